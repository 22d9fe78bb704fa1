"""The pieces of each parameter by rank, as a static scene.

Each parameter has a line with its name and shape, and for each rank a box that represents the whole
parameter, in which the rank's pieces are coloured.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from distkit._format import count
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.marks import Scene, Shape, picture, rect, text, title
from distkit.views.scene.painter import cut
from distkit.views.scene.svg import text_width

#: The largest number of parameters of one kind that are listed by name.
FEW = 3

#: A parameter: ``name``, ``shape`` and ``pieces``, each with ``rank``, ``offset``, ``shape`` and
#: ``placement``, such as "Shard(0)".
Parameter = dict[str, Any]

WIDTH, LEFT, GAP, WIDEST = 900, 268, 10, 150  # of the field; of the ranks' columns
#: Heights of the head, of a line (largest, smallest) and of the field; width of a vector.
HEAD, TALL, LOW, HIGH, SLIM = 22, 50, 23, 430, 14
MOST = 14  # lines; further parameters share one
SAID = (
    "Each box stands for a whole parameter; coloured is what a rank holds of it. Ranks with the "
    "same part coloured hold copies."
)


class Painter:
    """Makes the picture of parameters.

    Args:
        parameters: each with its pieces.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        ranks = sorted({piece["rank"] for p in parameters for piece in p["pieces"]})
        self.lanes = {rank: lane for lane, rank in enumerate(ranks)}
        self.wide = min(WIDEST, (WIDTH - LEFT) / max(1, len(ranks)) - GAP)
        kinds = alike(parameters)
        self.kinds, self.rest = kinds[:MOST], [p for kind in kinds[MOST:] for p in kind]
        lines = len(self.kinds) + bool(self.rest) + 1
        self.tall = min(TALL, max(LOW, (HIGH - HEAD) / lines))
        self.scene = Scene(WIDTH, HEAD + self.tall * lines)

    def picture(self, name: str) -> Json:
        """The picture, for both painters; ``name`` is its title."""
        self._heads()
        for line, kind in enumerate(self.kinds):
            self._parameter(HEAD + line * self.tall, kind)
        sums = [(f"and {count(len(self.rest), 'other parameter')}", self.rest)] if self.rest else []
        for i, (words, some) in enumerate([*sums, ("all", self.parameters)]):
            self._sum(HEAD + (len(self.kinds) + i) * self.tall, words, some)
        return picture(
            self.scene,
            title=clean(name) or "Shard map",
            view="shards",
            facts=[
                count(len(self.lanes), "rank"),
                count(len(self.parameters), "parameter"),
                count(sum(map(size, self.parameters)), "value"),
            ],
            said=SAID,
            empty="" if self.parameters else "there are no parameters",
        )

    def _x(self, rank: int) -> float:
        return LEFT + self.lanes[rank] * (self.wide + GAP)

    def _heads(self) -> None:
        for rank, lane in self.lanes.items():
            dot = rect(11, 11, "own", r=3, lane=lane)
            self.scene.add(self._x(rank), 0, dot, text(f"rank {rank}", "small", x=17, y=9.5))

    def _parameter(self, y: float, kind: Sequence[Parameter]) -> None:
        """A line for parameters that are divided equally, of which the first is drawn."""
        one, high = kind[0], self.tall - 8
        self.scene.add(0, y, *_words(kind, high))
        wide, axes = self.wide if len(one["shape"]) > 1 else SLIM, drawn_axes(one)
        for rank, lane in self.lanes.items():
            held = [piece for piece in one["pieces"] if piece["rank"] == rank]
            told = "; ".join(sliced(one["shape"], piece) for piece in held) or "nothing"
            boxes = [rect(wide, high, "slot", r=2)]
            for piece in (p for p in held if size(p)):
                (top, h), (x, w) = (_part(one["shape"], piece, d) for d in axes)
                wh = max(1.5, w * wide), max(1.5, h * high)
                boxes.append(rect(*wh, "own", x=x * wide, y=top * high, lane=lane))
            self.scene.add(self._x(rank), y, title(f"rank {rank} holds {told}"), *boxes)

    def _sum(self, y: float, words: str, some: Sequence[Parameter]) -> None:
        """The share of several parameters on each rank, as a bar."""
        whole, high = max(1, sum(map(size, some))), self.tall - 8
        self.scene.add(0, y, text(words, "name", y=high / 2 + 5))
        for rank, lane in self.lanes.items():
            held = sum(size(p) for one in some for p in one["pieces"] if p["rank"] == rank)
            told = f"{held:,}"
            share = f"{held / whole:.1%}".replace(".0%", "%").replace("%", " %")
            fits = text_width(f"{told} {share}", 11) < self.wide
            self.scene.add(
                self._x(rank),
                y + high / 2 - 9,
                title(f"rank {rank} holds {told} of {whole:,} values"),
                rect(self.wide, 5, "now", r=2.5),
                rect(max(1.5, self.wide * min(1.0, held / whole)), 5, "own", r=2.5, lane=lane),
                text(share, "strong", y=19),
                *([text(told, "small", x=self.wide, y=19, anchor="end")] if fits else []),
            )


def _words(kind: Sequence[Parameter], high: float) -> Iterator[Shape]:
    """The name of parameters, their shape and placement."""
    one, name = kind[0], named(kind)
    # torch calls a parameter that a single rank holds replicated, too
    placed = {str(p["placement"]) for p in one["pieces"]} if len(one["pieces"]) > 1 else set()
    times = [f"{len(kind)} times"] if len(kind) > 1 else []
    more = " · ".join([shaped(one["shape"]), *times, *sorted(placed)])
    yield title(f"{name}: {more}")
    if high > 28:
        yield text(cut(name, LEFT - 16, 12), "key", y=high / 2 - 3)
        yield text(more, "small", y=high / 2 + 12)
    else:
        yield text(cut(name, LEFT - 30 - text_width(more, 11), 12), "key", y=high / 2 + 4)
        yield text(more, "small", x=LEFT - 14, y=high / 2 + 4, anchor="end")


# -- parameters ---------------------------------------------------------------------------


def alike(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Group parameters whose names differ only in numbers, with equal shapes and pieces."""
    found: dict[str, list[Parameter]] = defaultdict(list)
    for p in parameters:
        found[repr((re.sub(r"\d+", "*", p["name"]), p["shape"], p["pieces"]))].append(p)
    return list(found.values())


def named(kind: Sequence[Parameter]) -> str:
    """The names of a few parameters; for more, a pattern with a star for the layer's number.

    >>> named([{"name": f"{i}.weight"} for i in (0, 2)])
    '0.weight, 2.weight'
    >>> named([{"name": f"layers.{i}.weight"} for i in range(4)])
    'layers.*.weight'
    """
    names = [clean(p["name"]) for p in kind]
    if len(names) <= FEW:
        return ", ".join(names)
    parts = [name.split(".") for name in names]
    return ".".join(some[0] if len({*some}) == 1 else "*" for some in zip(*parts, strict=True))


def size(part: Parameter) -> int:
    """The number of values of a parameter or a piece."""
    return math.prod(part["shape"])


def shaped(shape: Sequence[int]) -> str:
    """A shape as text.

    >>> shaped([4, 8]), shaped([])
    ('4 × 8', 'one value')
    """
    return " × ".join(f"{n:,}" for n in shape) or "one value"


def sliced(shape: Sequence[int], piece: Parameter) -> str:
    """A piece as a Python slice.

    >>> sliced([8, 3], {"offset": [2, 0], "shape": [2, 3], "placement": "Shard(0)"})
    '[2:4, :] (2 × 3), Shard(0)'
    """
    told = [
        ":" if n == whole else f"{start}:{start + n}"
        for start, n, whole in zip(piece["offset"], piece["shape"], shape, strict=True)
    ]
    return f"[{', '.join(told)}] ({shaped(piece['shape'])}), {piece['placement']}"


def drawn_axes(parameter: Parameter) -> list[int]:
    """The two drawn dimensions, vertical and horizontal: the first that are divided."""
    shape = parameter["shape"]

    def whole(d: int) -> bool:
        return all(p["shape"][d] == shape[d] for p in parameter["pieces"])

    chosen = sorted(sorted(range(len(shape)), key=whole)[:2])
    return [*chosen, -1, -1][:2]


def _part(shape: Sequence[int], piece: Parameter, d: int) -> tuple[float, float]:
    """The relative begin and extent of a piece in a dimension; a missing one is filled."""
    if d < 0:
        return 0.0, float(all(piece["shape"]))
    return piece["offset"][d] / max(1, shape[d]), piece["shape"][d] / max(1, shape[d])


def describe(parameters: Sequence[Parameter]) -> Iterator[str]:
    """Lines of text about parameters and their pieces."""
    for kind in alike(parameters):
        one, many = kind[0], f", {len(kind)} times" if len(kind) > 1 else ""
        yield f"{named(kind)} {shaped(one['shape'])}{many}"
        yield from (f"  rank {p['rank']}: {sliced(one['shape'], p)}" for p in one["pieces"])
