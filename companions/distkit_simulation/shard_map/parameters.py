"""A static scene that shows which shards of each parameter each rank has.

Parameters with the same shapes and shards whose names differ only in numbers share a row. In each
row, a box for each rank represents the whole parameter; the rank's shards are colored.
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
from distkit.views.scene.renderer import cut
from distkit.views.scene.svg import text_width

#: Maximum number of parameters of one type to list by name.
MAX_NAMES = 3

#: A parameter with ``name``, ``shape`` and ``shards``. Each shard has ``rank``, ``offset``,
#: ``shape`` and ``placement``, such as "Shard(0)".
Parameter = dict[str, Any]

#: WIDTH is the width of the drawing, LEFT is the width of the column of labels, GAP is the gap
#: between columns, and MAX_COLUMN is the maximum width of a rank's column [px]. Boxes drawn at one
#: scale have sides of at least MIN_SCALED.
WIDTH, LEFT, GAP, MAX_COLUMN, MIN_SCALED = 900, 268, 10, 150, 4
#: Sizes [px]: HEAD is the height of the heading. MIN_SIDE is the minimum side of other boxes.
HEAD, MAX_LINE, MIN_LINE, MAX_HEIGHT, VECTOR_WIDTH, MIN_SIDE = 22, 84, 23, 430, 14, 12
MAX_ROWS = 14  # further parameters share one row
DESCRIPTION = (
    "Each box represents a whole parameter; the rank's shard is colored. Ranks with the same "
    "shard have copies of it. Shard(0) splits the rows, and Shard(1) the columns."
)


class Renderer:
    """Draws the shards of parameters.

    Args:
        parameters: the parameters with their shards.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        ranks = sorted({shard["rank"] for p in parameters for shard in p["shards"]})
        self.lanes = {rank: lane for lane, rank in enumerate(ranks)}
        self.column_width = min(MAX_COLUMN, (WIDTH - LEFT) / max(1, len(ranks)) - GAP)
        kinds = group_parameters(parameters)
        self.kinds, self.others = kinds[:MAX_ROWS], [p for kind in kinds[MAX_ROWS:] for p in kind]
        lines = len(self.kinds) + bool(self.others) + 1
        self.line_height = min(MAX_LINE, max(MIN_LINE, (MAX_HEIGHT - HEAD) / lines))
        self.scene = Scene(WIDTH, HEAD + self.line_height * lines)
        self.scale = self._common_scale() if self.kinds else 0.0  # pixels per value; 0: various

    def picture(self, name: str) -> Json:
        """Return the picture for the SVG and browser renderers, with the title ``name``."""
        for rank, lane in self.lanes.items():
            self.scene.add(
                self._x(rank),
                0,
                rect(11, 11, "own", r=3, lane=lane),
                text(f"rank {rank}", "small", x=17, y=9.5),
            )
        for line, kind in enumerate(self.kinds):
            self._add_parameter(HEAD + line * self.line_height, kind)
        totals = (
            [(f"and {count(len(self.others), 'other parameter')}", self.others)]
            if self.others
            else []
        )
        for i, (label, members) in enumerate([*totals, ("all", self.parameters)]):
            self._add_total(HEAD + (len(self.kinds) + i) * self.line_height, label, members)
        return picture(
            self.scene,
            title=clean(name) or "Shard map",
            view="shards",
            facts=[
                count(len(self.lanes), "rank"),
                count(len(self.parameters), "parameter"),
                count(sum(map(size, self.parameters)), "value"),
            ],
            description=DESCRIPTION,
            max_height=1.4 * self.scene.height,  # the width of the page determines the scale
            empty="" if self.parameters else "there are no parameters",
        )

    def _x(self, rank: int) -> float:
        return LEFT + self.lanes[rank] * (self.column_width + GAP)

    def _add_parameter(self, y: float, kind: Sequence[Parameter]) -> None:
        """Add a line for parameters with the same shards; the first one is drawn."""
        parameter, height = kind[0], self.line_height - 8
        self.scene.add(0, y, *_labels(kind, height))
        axes, (width, height) = axes_to_draw(parameter), self._box(parameter, height)
        y += (self.line_height - 8 - height) / 2
        for rank, lane in self.lanes.items():
            shards = [shard for shard in parameter["shards"] if shard["rank"] == rank]
            label = (
                "; ".join(format_slice(parameter["shape"], shard) for shard in shards) or "nothing"
            )
            boxes = [rect(width, height, "slot", r=2)]
            for shard in (s for s in shards if size(s)):
                (top, h), (x, w) = (_extent(parameter["shape"], shard, d) for d in axes)
                wh = max(1.5, w * width), max(1.5, h * height)
                boxes.append(rect(*wh, "own", x=x * width, y=top * height, lane=lane))
            self.scene.add(self._x(rank), y, title(f"rank {rank} has {label}"), *boxes)

    def _common_scale(self) -> float:
        """Return the scale of all boxes, or 0 if the smallest would be too small."""
        rows, columns = zip(*(_sides(kind[0]) for kind in self.kinds), strict=True)
        scale = min((self.line_height - 8) / max(rows), self.column_width / max(1, *columns))
        smallest = min(n for n in (*rows, *columns) if n)
        return scale if smallest * scale >= MIN_SCALED else 0.0

    def _box(self, parameter: Parameter, height: float) -> tuple[float, float]:
        """Return the size of a parameter's box: at the common scale, or as large as fits."""
        rows, columns = _sides(parameter)
        if self.scale:
            return columns * self.scale or VECTOR_WIDTH, rows * self.scale
        if not columns:
            return VECTOR_WIDTH, max(MIN_SIDE, height)
        width = min(self.column_width, height * columns / rows)
        return max(MIN_SIDE, width), max(MIN_SIDE, width * rows / columns)

    def _add_total(self, y: float, label: str, members: Sequence[Parameter]) -> None:
        """Add a bar with each rank's share of several parameters."""
        total, height = max(1, sum(map(size, members))), self.line_height - 8
        self.scene.add(0, y, text(label, "name", y=height / 2 + 5))
        for rank, lane in self.lanes.items():
            n = sum(
                size(p) for parameter in members for p in parameter["shards"] if p["rank"] == rank
            )
            values = f"{n:,}"
            share = f"{n / total:.1%}".replace(".0%", "%")
            fits = text_width(f"{values} {share}", 11) < self.column_width
            self.scene.add(
                self._x(rank),
                y + height / 2 - 9,
                title(f"rank {rank} has {values} of {total:,} values"),
                rect(self.column_width, 5, "now", r=2.5),
                rect(
                    max(1.5, self.column_width * min(1.0, n / total)),
                    5,
                    "own",
                    r=2.5,
                    lane=lane,
                ),
                text(share, "strong", y=19),
                *([text(values, "small", x=self.column_width, y=19, anchor="end")] if fits else []),
            )


def _labels(kind: Sequence[Parameter], height: float) -> Iterator[Shape]:
    """Yield the name, shape and placement of parameters."""
    parameter, name = kind[0], group_name(kind)
    # torch reports Replicate() even for a parameter on only one rank
    placements = (
        {str(p["placement"]) for p in parameter["shards"]}
        if len(parameter["shards"]) > 1
        else set()
    )
    times = [f"×{len(kind)}"] if len(kind) > 1 else []
    details = " · ".join([format_shape(parameter["shape"]), *times, *sorted(placements)])
    yield title(f"{name}: {details}")
    if height > 28:
        yield text(cut(name, LEFT - 16, 12), "key", y=height / 2 - 3)
        yield text(details, "small", y=height / 2 + 12)
    else:
        yield text(cut(name, LEFT - 30 - text_width(details, 11), 12), "key", y=height / 2 + 4)
        yield text(details, "small", x=LEFT - 14, y=height / 2 + 4, anchor="end")


# -- parameters ---------------------------------------------------------------------------


def group_parameters(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Group parameters with the same shapes and shards whose names differ only in numbers."""
    groups: dict[str, list[Parameter]] = defaultdict(list)
    for p in parameters:
        groups[repr((re.sub(r"\d+", "*", p["name"]), p["shape"], p["shards"]))].append(p)
    return list(groups.values())


def group_name(kind: Sequence[Parameter]) -> str:
    """Return the names of a few parameters, or a pattern with a star for layer numbers.

    >>> group_name([{"name": f"{i}.weight"} for i in (0, 2)])
    '0.weight, 2.weight'
    >>> group_name([{"name": f"layers.{i}.weight"} for i in range(4)])
    'layers.*.weight'
    """
    names = [clean(p["name"]) for p in kind]
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return ".".join(
        values[0] if len({*values}) == 1 else "*"
        for values in zip(*(name.split(".") for name in names), strict=True)
    )


def size(part: Parameter) -> int:
    """Return the number of values of a parameter or a shard."""
    return math.prod(part["shape"])


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape.

    >>> format_shape([4, 8]), format_shape([])
    ('4 × 8', 'scalar')
    """
    return " × ".join(f"{n:,}" for n in shape) or "scalar"


def format_slice(shape: Sequence[int], shard: Parameter) -> str:
    """Format a shard as a Python slice.

    >>> format_slice([8, 3], {"offset": [2, 0], "shape": [2, 3], "placement": "Shard(0)"})
    '[2:4, :] (2 × 3), Shard(0)'
    """
    slices = [
        ":" if n == size else f"{start}:{start + n}"
        for start, n, size in zip(shard["offset"], shard["shape"], shape, strict=True)
    ]
    return f"[{', '.join(slices)}] ({format_shape(shard['shape'])}), {shard['placement']}"


def axes_to_draw(parameter: Parameter) -> list[int]:
    """Return the dimensions to draw, vertical and horizontal; sharded dimensions are preferred."""
    shape = parameter["shape"]

    def is_whole(d: int) -> bool:
        return all(p["shape"][d] == shape[d] for p in parameter["shards"])

    chosen = sorted(sorted(range(len(shape)), key=is_whole)[:2])
    return [*chosen, -1, -1][:2]


def _sides(parameter: Parameter) -> tuple[int, int]:
    """Return the rows and columns of a parameter's box; a vector has 0 columns."""
    shape, (vertical, horizontal) = parameter["shape"], axes_to_draw(parameter)
    rows = max(1, shape[vertical]) if shape else 1
    return rows, max(1, shape[horizontal]) if len(shape) > 1 else 0


def _extent(shape: Sequence[int], shard: Parameter, d: int) -> tuple[float, float]:
    """Return a shard's relative offset and extent in dimension ``d``; -1 means no dimension."""
    if d < 0:
        return 0.0, float(all(shard["shape"]))
    return shard["offset"][d] / max(1, shape[d]), shard["shape"][d] / max(1, shape[d])


def describe(parameters: Sequence[Parameter]) -> Iterator[str]:
    """Yield lines of text about parameters and their shards."""
    for kind in group_parameters(parameters):
        parameter, times = kind[0], f", {len(kind)} times" if len(kind) > 1 else ""
        yield f"{group_name(kind)} {format_shape(parameter['shape'])}{times}"
        yield from (
            f"  rank {p['rank']}: {format_slice(parameter['shape'], p)}"
            for p in parameter["shards"]
        )
