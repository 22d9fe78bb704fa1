"""The figures of several runs and their losses as marks: a column for each run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, permutations
from typing import Any

from distkit._format import human_bytes, ticks
from distkit.views.compare.projection import difference, figure, finite, names, ratio
from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width
from distkit.views.scene.marks import Scene, Shape, line, rect, text, title
from distkit.views.scene.painter import cut
from distkit.views.scene.summaries import figure as in_digits

#: Figures are beside the lanes for up to so many runs, with a column for each, else below [pixels].
FEW, COLUMN, WIDE = 3, 112, 912
#: The column of names, a row, and the heads of the columns [pixels].
NAMES, ROW, HEAD = 148, 29, 36
#: At most so many ranks have a row; so many figures are shown at first.
MOST_RANKS, FIRST = 16, 4
#: A chart of losses [pixels].
WIDTH, PLOT, HEIGHT, AXIS = 440, 110, 152, 44
#: A curve has about so many points.
POINTS = 100
#: With its colour each run's curve has a dash.
DASHES = ("", "7 3", "2 2.5", "9 3 2 3")


def width_of(runs: int) -> int:
    """The width of the figures in the browser [pixels]."""
    return NAMES + COLUMN * runs if runs <= FEW else WIDE


def table(told: Json, width: float, ranks: int = MOST_RANKS) -> Scene:
    """A row for each figure, those that differ most first, and for each rank.

    What is compared with the n-th run is in layer n + 1.

    Args:
        told: what ``projection.summary`` returns.
        width: of all [pixels].
        ranks: at most so many have a row.
    """
    runs = told["runs"]
    rows = [*sorted(told["rows"], key=_alike), *islice(_ranks(runs), ranks)]
    room = (width - NAMES) / len(runs)
    scene = Scene(width, HEAD + ROW * len(rows))
    for n, run in enumerate(runs):
        fits = text_width(run["name"], 13.5) < room - 22
        words = run["name"] if fits else cut(run["name"], room - 22, 9)
        name = text(words, "strong", x=16, y=12, size=0 if fits else 9), title(run["name"])
        scene.add(NAMES + n * room, 0, rect(10, 10, "trace", y=3, lane=n), *name)
        scene.add(NAMES + n * room, 0, text("baseline", "small", x=16, y=25), layer=n + 1)
    for i, row in enumerate(rows):
        y, values = HEAD + ROW * i, row["values"]
        scene.add(0, y, text(row["label"], "tick", y=14), title(row["hint"]))
        for n, shapes in enumerate(_cells(row, room - 12)):
            scene.add(NAMES + n * room, y, *shapes)
        for n, sent in enumerate(row.get("sent", ())):
            scene.add(NAMES + n * room, y, *_beside(room - 12, sent, "sent"))
        for n, base in () if "sent" in row else permutations(range(len(runs)), 2):
            words = ratio(values[n], values[base]), difference(values[n], values[base], row["unit"])
            scene.add(NAMES + n * room, y, *_beside(room - 12, *words), layer=base + 1)
    return scene


def _alike(row: Json) -> float:
    """How alike the values of a row are, from 0 to 1; the total time comes first."""
    known = [abs(v) for v in row["values"] if finite(v)]
    if row["key"] == "seconds" or len(known) < len(row["values"]):
        return -1.0 if row["key"] == "seconds" else 0.5
    return min(known) / (max(known) or 1.0)


def _ranks(runs: list[Json]) -> Iterator[Json]:
    """The part of the time that each rank was in communication, as a figure."""
    for rank, name in sorted(names(runs).items()):
        known = [{r["rank"]: r for r in run["figures"]["ranks"]}.get(rank) for run in runs]
        yield {
            "label": name,
            "unit": "%",
            "values": [one and one["busy"] for one in known],
            "waiting": [one["waiting"] if one else 0.0 for one in known],
            "hint": "in communication, of which waiting is pale; bytes sent",
            "sent": [human_bytes(one["bytes"]) if one and one["bytes"] else "" for one in known],
        }


def _cells(row: Json, room: float) -> Iterator[tuple[Shape, ...]]:
    """The values of a row: in words, and as bars of which waiting is pale."""
    sizes = [abs(v) if finite(v) else 0.0 for v in row["values"]]
    most = 1.0 if row["unit"] == "%" else max(sizes) or 1.0
    waiting = row.get("waiting", [0.0] * len(sizes))
    for n, (value, size, waited) in enumerate(zip(row["values"], sizes, waiting, strict=True)):
        yield (
            text(figure(value, row["unit"]), "strong", y=14, size=0 if room > 90 else 11),
            rect(room, 4, "now", y=19),
            rect(size / most * room, 4, "trace", y=19, lane=n, opacity=0.4),
            rect((size - waited) / most * room, 4, "trace", y=19, lane=n),
        )


def _beside(room: float, words: str, more: str) -> tuple[Shape, ...]:
    """What is said at the right of a value, and more to a pointer that rests there."""
    return (
        rect(44, ROW - 4, "hover", x=room - 44),
        title(more),
        text(words, "tick", x=room, y=14, anchor="end"),
    )


# -- losses ------------------------------------------------------------------------------


def losses(told: Json) -> Json | None:
    """Two charts, over time and over steps; None where no run has told a loss."""
    curves = [(n, run["loss"]["points"]) for n, run in enumerate(told["runs"]) if run["loss"]]
    if not curves:
        return None
    scene = Scene(WIDE, HEIGHT)
    last = [max(p[by] for _, points in curves for p in points) for by in (0, 1)]
    steps = [(n, f"{n:,}") for n in {0, last[0] // 2, last[0]}]
    _chart(scene, 0, "loss over time", [*ticks(0, last[1] or 1e-9)], _of(curves, 1))
    _chart(scene, WIDE - WIDTH, "loss over steps", steps, _of(curves, 0))
    words = [
        f"{run['name']} {in_digits(run['loss']['last'])} after {run['loss']['steps']:,} steps"
        for run in told["runs"]
        if run["loss"]
    ]
    return {**scene.plain(), "said": f"loss: {', '.join(words)}"}


Curves = list[tuple[int, list[tuple[float, float | None]]]]


def _of(curves: list[tuple[int, list[list[Any]]]], by: int) -> Curves:
    """Losses over steps (0) or seconds (1)."""
    return [(n, [(p[by], p[2]) for p in points]) for n, points in curves]


def _chart(
    scene: Scene, left: float, name: str, marks: list[tuple[float, str]], curves: Curves
) -> None:
    """A chart whose left edge is at ``left``, with these ``marks`` on its axis of x."""
    known = [y for _, points in curves for _, y in points if y is not None]
    low, high = min(0.0, *known, 0.0), max(0.0, *known, 1e-12)
    last = max(x for _, points in curves for x, _ in points) or 1.0
    base = PLOT + 22

    def at(x: float, y: float) -> tuple[float, float]:
        across = AXIS + x / last * (WIDTH - AXIS - 6)
        return left + across, base - (y - low) / (high - low) * PLOT

    scene.add(left, 0, text(name, "strong", y=11))
    for y in (low, (low + high) / 2, high):
        x, place = at(0, y)
        scene.add(0, 0, line((x, place), (left + WIDTH - 6, place), "link"))
        scene.add(x - 6, place + 4, text(in_digits(y), "small", anchor="end"))
    for x, words in marks:
        scene.add(at(x, 0)[0], base + 16, text(words, "small", anchor="middle"))
    for n, points in curves:
        scene.add(0, 0, *_curve(n, [(at(x, y) if y is not None else None) for x, y in points]))


def _curve(n: int, points: list[tuple[float, float] | None]) -> Iterator[Shape]:
    """A line with a gap wherever no value is known."""
    few = points[:: max(1, len(points) // POINTS)]
    pieces = [
        f"{'L' if before else 'M'}{place[0]:.0f} {place[1]:.0f}"
        for before, place in zip([None, *few], few, strict=False)
        if place
    ]
    dash = ("stroke-dasharray", DASHES[n % len(DASHES)])
    yield "path", "curve", n, (("d", "".join(pieces)), dash), ""
