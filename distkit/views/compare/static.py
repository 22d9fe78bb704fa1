"""Several traces as a static picture, overlaid on one clock, and their differences as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from distkit._format import aligned, human_bytes, human_seconds, ticks
from distkit.trace.columns import Floats
from distkit.views.compare.figures import ratio
from distkit.views.scene import svg, values_svg
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.geometry import text_width
from distkit.views.scene.theme import GRAY, INK, TRACES_LIGHT, rank_color
from distkit.views.scene.values_svg import Curve, chart
from distkit.views.timeline.columns import Columns, covered

WIDTH = 960
#: At most so many ranks are drawn; of each a strip per trace, in pixels.
MAX_RANKS, ROW, LEFT, RIGHT = 16, 13, 190, WIDTH - 30


def to_svg(picture: Json, columns: Sequence[Columns]) -> str:
    """The comparison as an SVG document of at most 60 kB.

    Args:
        picture: what :func:`~distkit.views.compare.projection.project` makes.
        columns: of each trace, for its bars.
    """
    sizes = ((MAX_RANKS, 1), (MAX_RANKS, 2), (8, 2), (8, 4), (4, 8))
    return svg.fitting(_document(picture, columns, *size) for size in sizes)


def _fitting(facts: Sequence[str], title: str) -> str:
    """The facts beside the title, if there is room."""
    words = " · ".join(facts)
    return words if text_width(title, 18) + text_width(words, 13) < WIDTH - 80 else ""


def color(n: int) -> str:
    """The colour of the n-th trace."""
    return TRACES_LIGHT[n % len(TRACES_LIGHT)]


def _document(picture: Json, columns: Sequence[Columns], ranks: int, pixel: int) -> str:
    title = picture["title"]
    parts, y = svg.opening(title, _fitting(picture["facts"], title), flagged(picture))
    drawn, y = _lanes(picture, columns, ranks, pixel, y)
    parts.append(drawn)
    curves = [(n, run["loss"]["points"]) for n, run in enumerate(picture["runs"]) if run["loss"]]
    if curves:
        parts += [
            *_chart("loss over time", curves, 24, y, 1),
            *_chart("loss over steps", curves, 500, y, 0),
        ]
        y += 166
    drawn, y = _table(picture, y + 6)
    return svg.document(WIDTH, y + 8, title, "".join([*parts, drawn]))


# -- who was doing what ----------------------------------------------------------------


def _lanes(
    picture: Json, columns: Sequence[Columns], most: int, pixel: int, y: float
) -> tuple[str, float]:
    """A lane per rank with a strip per trace, and where the picture goes on."""
    names = {r["rank"]: r["name"] for run in picture["runs"] for r in run["figures"]["ranks"]}
    ranks = sorted(names)[:most]
    if not ranks:
        return svg.text(24, y + 4, "nothing was recorded", GRAY), y + 24
    frames = [c.frame for c in columns]
    spans = [max(1e-9, (f["end"] or 0.0) - (f["start"] or 0.0)) for f in frames]
    longest = max(spans)
    widths = [(RIGHT - LEFT) * (s / longest if picture["clock"] == "start" else 1.0) for s in spans]
    tall = len(columns) * (ROW + 2) + 6
    parts = [*_axis(longest if picture["clock"] == "start" else None, y, y + len(ranks) * tall)]
    for lane, rank in enumerate(ranks):
        parts += _name(names[rank], lane, y + len(columns) * (ROW + 2) / 2)
        for n, c in enumerate(columns):
            top = y + n * (ROW + 2)
            if len(ranks) * len(columns) <= 24:
                name = picture["runs"][n]["name"]
                short = name if len(name) < 14 else f"{name[:12]}…"
                parts.append(
                    svg.text(
                        LEFT - 12, top + ROW - 3, short, GRAY, 'text-anchor="end" font-size="10"'
                    )
                )
            parts.append(svg.rect(LEFT - 7, top, 3, ROW, f'fill="{color(n)}"', "", 1))
            parts.append(svg.rect(LEFT, top, widths[n], ROW, 'fill="#f2f4f6"', "", 2))
            parts += _strip(c, rank, widths[n], top, rank_color(lane), pixel)
        y += tall
    if len(names) > len(ranks):
        parts.append(
            svg.text(
                24, y + 34, f"the first {len(ranks)} of {len(names):,} ranks are drawn here", GRAY
            )
        )
        y += 18
    return "".join([*parts, *_legend(y + 38)]), y + 60


#: What a strip shows, a colour for it, and how high it is.
_KINDS = (
    ("communication", GRAY, ROW),
    ("waiting for others", svg.tint(GRAY, 0.32), ROW),
    ("marked computation", "#c3cad1", 4.0),
)


def _legend(y: float) -> Iterator[str]:
    """What the colours of a strip mean."""
    x = float(LEFT)
    for word, fill, tall in _KINDS:
        yield svg.rect(x, y - 4 - tall / 2, 22, tall, f'fill="{fill}"', "", 2)
        yield svg.text(x + 29, y, word, GRAY)
        x += 60 + text_width(word, 12)


def _name(name: str, lane: int, middle: float) -> Iterator[str]:
    yield f'<circle cx="29" cy="{middle - 1:.1f}" r="5" fill="{rank_color(lane)}"/>'
    yield svg.text(42, middle + 3.5, name, INK, 'font-size="13" font-weight="700"')


def _axis(seconds: float | None, top: float, bottom: float) -> Iterator[str]:
    """Seconds since the start, or parts of each trace's duration."""
    last = 1.0 if seconds is None else seconds
    for time, label in ticks(0, last, percent=seconds is None):
        x = LEFT + time / last * (RIGHT - LEFT)
        yield svg.line(x, top - 4, x, bottom, "#e1e6ea", 1)
        yield svg.text(x, bottom + 15, label, GRAY, 'text-anchor="middle"')


def _strip(c: Columns, rank: int, width: float, top: float, ink: str, pixel: int) -> Iterator[str]:
    """What a rank did over the whole run: communication, and paler where it waited."""
    cells = max(1, int(width / pixel))
    work, talk, wait = _covers(c, rank, cells)
    pale, faint = svg.tint(ink, 0.32), svg.tint(ink, 0.6)
    waiting = wait > talk
    shown = [
        (work * (talk + wait < 0.02) >= 0.3, "#c3cad1", 4.0),
        (waiting & (wait >= 0.02), pale, float(ROW)),
        (~waiting & (talk < 0.5) & (talk >= 0.02), faint, float(ROW)),
        (~waiting & (talk >= 0.5), ink, float(ROW)),
    ]
    for mask, stroke, tall in shown:
        if path := _runs(mask, pixel, top + ROW / 2):
            yield f'<path d="{path}" stroke="{stroke}" stroke-width="{tall:g}"/>'


def _runs(mask: np.ndarray[tuple[int], np.dtype[np.bool_]], pixel: int, y: float) -> str:
    """The cells that are set, as horizontal lines."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return "".join(
        f"M{LEFT + a * pixel} {y:g}h{(b - a) * pixel}"
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    )


def _covers(c: Columns, rank: int, cells: int) -> tuple[Floats, Floats, Floats]:
    """Of each cell of the run's time: the parts in computation, communication and waiting."""
    start, end = c.frame["start"] or 0.0, c.frame["end"] or 0.0
    if end <= start:
        return np.zeros(cells), np.zeros(cells), np.zeros(cells)
    edges = np.linspace(start, end, cells + 1)
    spans = c.computation(rank), c.communication(rank), c.waiting(rank)
    work, talk, wait = (covered(*span, edges) for span in spans)
    return work, np.maximum(0, talk - wait), wait


# -- losses ------------------------------------------------------------------------------


def _chart(
    name: str, curves: list[tuple[int, list[list[float]]]], left: float, top: float, by: int
) -> Iterator[str]:
    """Losses over steps (``by`` 0) or seconds (1)."""
    last = max(p[by] for _, points in curves for p in points if p[2] is not None)
    end = human_seconds(last) if by else f"step {last:.0f}"
    lines = (
        Curve([(p[by], p[2]) for p in points], color(n), 1.8, DASHES[n % 4]) for n, points in curves
    )
    return chart(name, lines, left, top + 14, 426, 100, end, start=0.0)


#: With its colour each trace's curve has a dash; js/comparecharts.js has the same.
DASHES = ("", "7 3", "2 2.5", "9 3 2 3")


# -- differences -------------------------------------------------------------------------


def _table(picture: Json, y: float) -> tuple[str, float]:
    """A row per figure: value, multiple of the baseline and a bar for each trace."""
    runs, base = picture["runs"], picture["baseline"]
    room = (WIDTH - 48 - 172) / len(runs)
    parts = [svg.line(24, y - 8, WIDTH - 24, y - 8, "#e9ecef", 1)]
    for n, run in enumerate(runs):
        x = 196 + n * room
        facts = " · ".join(run["facts"]) if len(runs) < 4 else ""
        parts.append(svg.rect(x, y + 1, 10, 10, f'fill="{color(n)}"', "", 2))
        fits = text_width(run["name"] + facts, 14) < room - 60
        parts.append(svg.heading(x + 16, y + 10, run["name"], facts if fits else "", 12))
    y += 34
    for row in picture["rows"]:
        parts.append(svg.text(24, y, row["label"], GRAY))
        most = max((abs(v) for v in row["values"] if _finite(v)), default=0) or 1
        for n, value in enumerate(row["values"]):
            x = 196 + n * room
            words = "" if n == base else ratio(value, row["values"][base])
            parts.append(svg.text(x, y, figure(value, row["unit"]), INK))
            parts.append(svg.text(x + room - 22, y, words, GRAY, 'text-anchor="end"'))
            length = (room - 22) * abs(value) / most if _finite(value) else 0
            parts.append(svg.rect(x, y + 5, room - 22, 3, 'fill="#eef1f3"', "", 1.5))
            parts.append(svg.rect(x, y + 5, max(length, 0.1), 3, f'fill="{color(n)}"', "", 1.5))
        y += 27
    return "".join(parts), y - 10


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def figure(value: float | str | None, unit: str) -> str:
    """A value in words.

    >>> figure(0.25, "s"), figure(4096, "B"), figure(0.251, "%"), figure(None, "n")
    ('250 ms', '4 KiB', '25 %', '–')
    """
    if value is None or isinstance(value, str) or unit == "x":
        return values_svg.figure(value)
    match unit:
        case "s":
            return human_seconds(value)
        case "B":
            return human_bytes(value)
        case "%":
            return f"{100 * value:.0f} %"
        case _:
            return f"{value:,}"


def to_table(picture: Json) -> str:
    """A table to read in a terminal: a line per figure, a column per trace."""
    runs, base = picture["runs"], picture["baseline"]
    head = [""]
    for n, run in enumerate(runs):
        head += [run["name"]] if n == base else [run["name"], ""]
    lines = [head]
    for row in picture["rows"]:
        cells = [row["label"]]
        for n, value in enumerate(row["values"]):
            words = [] if n == base else [ratio(value, row["values"][base])]
            cells += [figure(value, row["unit"]), *words]
        lines.append(cells)
    state = "still running" if picture["live"] else ", ".join(picture["facts"])
    parts = [f"Compare: {state or picture['title']}", *(f"  {line}" for line in aligned(lines))]
    return "\n".join(parts + [f"  {line}" for line in flagged(picture)])
