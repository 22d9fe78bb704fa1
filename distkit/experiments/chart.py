"""Seconds against the control that was varied, and the table beside it, as SVG. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Real
from statistics import mean
from typing import Any

from distkit.experiments.controls import said
from distkit.experiments.results import (
    SECONDS,
    Record,
    cells,
    columns,
    common,
    headline,
    shown,
    to_text,
)
from distkit.views import svg
from distkit.views.geometry import text_width
from distkit.views.theme import GRAY, INK, RANKS_LIGHT
from distkit.views.units import human_seconds, round_step

WIDTH, HEIGHT = 460.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 18.0, 34.0, 44.0

#: So many series are named where they end, in at most so many pixels.
NAMED, ROOM = 5, 140.0
#: Between the parameters of a series: each gets a line of its own.
AND = "\n"

#: What was varied shows in so many of the latest runs.
RECENT = 6

#: A static table has at most so many rows, and pixels between them; a chart so many ticks.
MAX_ROWS, ROW, MAX_TICKS = 12, 22, 12
#: The chart stands beside the table up to this width, else below: notebooks do not scale it.
MAX_WIDTH = 940


@dataclass(frozen=True)
class Ink:
    """The colours of a chart: words, fainter words, lines of the grid, the series looked at."""

    words: str = INK
    faint: str = GRAY
    grid: str = "#e7ebef"
    accent: str = RANKS_LIGHT[0]
    paper: str = "#fff"


PAPER = Ink()
#: Those of the page around it: see panel.css.
THEMED = Ink("var(--dkx-fg)", "var(--dkx-muted)", "var(--dkx-line)", "var(--dkx-accent)",
             "var(--dkx-bg)")  # fmt: skip


def varied(records: Sequence[Record]) -> list[str]:
    """The parameters in which runs differ, the one for the axis first.

    Numbers come before words, then what took most values in the latest runs, then what was
    changed last.
    """
    names = [name for name, values in _values(records).items() if len(values) > 1]
    words = {n for n in names if not all(map(is_number, _values(records)[n].values()))}
    recent, last = _values(records[-RECENT:]), _values(records[-2:])
    return sorted(names, key=lambda n: (n in words, -len(recent[n]), -len(last[n])))


def _values(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The values of each parameter, by what they are called."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for r in records:
        for name, value in r.parameters.items():
            found[name][said(value)] = value
    return found


def is_number(value: Any) -> bool:
    """Whether it has a place on an axis."""
    return isinstance(value, Real) and not isinstance(value, bool)


def chart(records: Sequence[Record], ink: Ink = PAPER) -> str:
    """Seconds against what was varied, as the inside of an SVG; "" where there is nothing to see.

    Runs that differ in other parameters, too, are series of their own; that of the latest run
    is in colour.
    """
    well = [r for r in records if not r.outcome]
    names = varied(well)
    return _Chart(well, names[0], names[1:], ink).body() if names else ""


def alone(records: Sequence[Record], ink: Ink) -> str:
    """The chart as a picture of its own, "" where there is nothing to see."""
    body = chart(records, ink)
    if not body:
        return ""
    about = varied([r for r in records if not r.outcome])[0]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
        f' font-family="{svg.FONT}" font-size="12"><title>{escape(f"seconds against {about}")}'
        f"</title>{body}</svg>"
    )


def to_svg(name: str, records: Sequence[Record]) -> str:
    """Table and chart side by side: what stays where there are no widgets."""
    names = columns(records) if records else []
    rows = list(enumerate(records, 1))[::-1][:MAX_ROWS]
    body, wide = _table(["#", *names], [[str(n), *cells(r, names)] for n, r in rows])
    more = len(records) - len(rows)
    if more > 0:
        body += svg.text(24, 78 + ROW * len(rows) + 8, f"… and {more} earlier", GRAY)
    picture = chart(records)
    beside = 60 + wide + WIDTH < MAX_WIDTH
    x, y = (40 + wide, 44.0) if beside else (8.0, 76.0 + ROW * (len(rows) + 1))
    width = max(560.0, x + WIDTH + 12 if picture else wide + 48, wide + 48)
    height = max(78.0 + ROW * (len(rows) + (more > 0)), y + HEIGHT + 4 if picture else 0)
    title = headline(name, records)
    room = text_width(title, 18.5) + 62
    same = _cut(common(records), MAX_WIDTH - room)
    width = max(width, room + text_width(same, 12))
    head = svg.heading(24, 32, title, same)
    placed = f'<g transform="translate({x:.0f} {y:.0f})">{picture}</g>' if picture else ""
    return svg.document(width, height if records else 54, title, head + body + placed)


class Picture:
    """Some runs as table and plot, in a form that lasts."""

    def __init__(self, name: str, records: list[Record]) -> None:
        self._name, self._records = name, list(records)

    def __repr__(self) -> str:
        return to_text(self._name, self._records)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": to_svg(self._name, self._records), "text/plain": repr(self)}


def _table(head: list[str], rows: list[list[str]]) -> tuple[str, float]:
    """A table from the left edge, and how wide it is."""
    if not rows:
        return "", 0.0
    parts, x = [], 24.0
    for i, name in enumerate(head):
        column = [row[i] for row in rows]
        width = max(text_width(t, 12.5) for t in [name, *column])
        parts.append(svg.text(x, 66, name, GRAY))
        parts += [svg.text(x, 66 + ROW * (k + 1), t, INK) for k, t in enumerate(column)]
        x += width + 20
    rule = svg.line(24, 74, x - 20, 74, "#dde3e9", 1)
    return rule + "".join(parts), x - 44


class _Chart:
    """Paints one chart."""

    def __init__(self, records: Sequence[Record], x: str, others: Sequence[str], ink: Ink) -> None:
        self.name, self.ink = x, ink
        #: Points (value of x, seconds) by what else was set; the latest run's series is last.
        self.series: dict[str, list[tuple[Any, float]]] = {}
        for r in records:
            key = AND.join(f"{n}={shown(n, r.parameters.get(n))}" for n in others)
            points = self.series.pop(key, [])
            self.series[key] = [*points, (r.parameters.get(x), r.measured[SECONDS])]
        values: list[Any] = [v for points in self.series.values() for v, _ in points]
        self.numeric = all(map(is_number, values))
        words: list[Any] = list(dict.fromkeys(map(said, values)))
        self.values: list[Any] = words
        if self.numeric:
            self.values = sorted(set(values))
        least, most = self.values[0], self.values[-1]
        self.log = self.numeric and bool(0 < least <= most / 8)
        self.named = 2 <= len(self.series) <= NAMED and self.numeric
        wide = max(text_width(each, 12.5) for key in self.series for each in key.split(AND)) + 8
        self.right = WIDTH - RIGHT - (min(ROOM, wide) if self.named else 0.0)
        longest = max(s for points in self.series.values() for _, s in points)
        self.step = round_step(longest or 1.0, 4)
        self.top = self.step * max(1, math.ceil(longest / self.step - 1e-9))

    def x(self, value: Any) -> float:
        """Where a value stands."""
        room = self.right - LEFT
        if not self.numeric:
            return LEFT + room * (self.values.index(said(value)) + 0.5) / len(self.values)
        scale: Callable[[Any], float] = math.log if self.log else float
        low, high = scale(self.values[0]), scale(self.values[-1])
        return LEFT + 14 + (room - 28) * (scale(value) - low) / (high - low)

    def y(self, seconds: float) -> float:
        """Where so many seconds stand."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / self.top

    def body(self) -> str:
        colors = dict.fromkeys(self.series, self.ink.faint) | {[*self.series][-1]: self.ink.accent}
        lines = [self._line(points, colors[key]) for key, points in self.series.items()]
        head = svg.text(LEFT, 16, "seconds", self.ink.words, 'font-weight="600"')
        return "".join([head, *self._axes(), *lines, *self._names(colors)])

    def _axes(self) -> list[str]:
        parts = []
        for k in range(round(self.top / self.step) + 1):
            y = self.y(k * self.step)
            told = human_seconds(k * self.step) if k else "0"
            parts.append(svg.line(LEFT, y, self.right, y, self.ink.grid, 1))
            parts.append(svg.text(LEFT - 8, y + 4, told, self.ink.faint, 'text-anchor="end"'))
        edge = -math.inf
        for value in self.values[:: max(1, -(-len(self.values) // MAX_TICKS))]:
            told, x = shown(self.name, value), self.x(value)
            half = text_width(told, 12) / 2
            if x - half > edge + 6:
                parts.append(svg.text(x, HEIGHT - BOTTOM + 18, told, self.ink.faint,
                                      'text-anchor="middle"'))  # fmt: skip
                edge = x + half
        middle = (LEFT + self.right) / 2
        return [*parts, svg.text(middle, HEIGHT - 6, self.name, self.ink.words,
                                 'text-anchor="middle" font-weight="600"')]  # fmt: skip

    def _line(self, points: list[tuple[Any, float]], color: str) -> str:
        """A dot per run, and a line through the means."""
        means = "L".join(f"{x:.1f} {y:.1f}" for x, y in self._means(points))
        line = f'<path d="M{means}" fill="none" stroke="{color}" stroke-width="2"/>'
        dots = "".join(
            f'<circle cx="{self.x(v):.1f}" cy="{self.y(s):.1f}" r="4" fill="{color}" '
            f'stroke="{self.ink.paper}" stroke-width="1.2"/>' for v, s in points
        )  # fmt: skip
        return (line if self.numeric else "") + dots

    def _means(self, points: list[tuple[Any, float]]) -> list[tuple[float, float]]:
        by: dict[float, list[float]] = defaultdict(list)
        for value, seconds in points:
            by[self.x(value)].append(seconds)
        return [(x, self.y(mean(by[x]))) for x in sorted(by)]

    def _names(self, colors: dict[str, str]) -> Iterator[str]:
        """What each series is, where it ends; or only the latest, over the picture."""
        if len(self.series) == 1:
            return
        if not self.named:
            latest = [*self.series][-1]
            told = _cut(latest.replace(AND, ", "), WIDTH - LEFT - 90)
            yield svg.text(WIDTH - RIGHT, 16, told, self.ink.accent, 'text-anchor="end"')
            return
        ends = {key: self._means(points)[-1][1] for key, points in self.series.items()}
        y = -math.inf
        for key in sorted(ends, key=lambda key: ends[key]):
            lines = [_cut(each, ROOM) for each in key.split(AND)]
            y = max(y + 7, ends[key] + 4 - 7 * (len(lines) - 1))
            for told in lines:
                yield svg.text(self.right + 6, y, told, colors[key], 'font-weight="600"')
                y += 14


def _cut(words: str, room: float) -> str:
    """As much of a line as fits."""
    if text_width(words, 12) <= room:
        return words
    return f"{words[: int(room / 7)]}…"
