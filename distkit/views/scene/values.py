"""Tensor values in pictures: summaries as plain data and text; heat maps, histograms, tables."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from distkit._format import count
from distkit.events import Summary
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import (
    Scene,
    Shape,
    cached_drawing,
    circle,
    line,
    path,
    rect,
    text,
    title,
)
from distkit.views.scene.renderer import cut
from distkit.views.scene.svg import text_width

#: A tensor is drawn in rows of ROW_LENGTH values, so that their numbers fit. One with at most
#: MAX_WRITTEN elements is formatted as text.
ROW_LENGTH, MAX_WRITTEN = 8, 6


def plain(s: Summary, shape: Sequence[int] = ()) -> Json:
    """Return a summary as plain data, with the number of columns of its heat map."""
    return {
        "values": [number(v) for v in s.values],
        "norm": number(s.norm),
        "min": number(s.min),
        "max": number(s.max),
        "size": s.size,
        "columns": columns(s, shape),
    }


def number(x: float) -> float | str:
    """Round to four significant digits; NaN and infinity become strings, since JSON lacks them."""
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)


def columns(s: Summary, shape: Sequence[int] = ()) -> int:
    """Return the number of columns of a heat map.

    A complete matrix keeps its columns; others have at most 8 columns.

    >>> columns(Summary((1.0,) * 12, 1, 0, 1, 12), (3, 4))
    4
    """
    n = len(s.values)
    complete = len(shape) == 2 and n == s.size == math.prod(shape)
    return shape[1] if complete else min(n, ROW_LENGTH)


def key(s: Summary) -> tuple[str, ...]:
    """Return a key that compares equal for equal summaries, even if they contain NaN."""
    return tuple(map(repr, (*s.values, s.norm, s.min, s.max, s.size)))


def unequal(a: Summary, b: Summary) -> list[int]:
    """Return the positions at which the values of two summaries differ; NaN equals NaN.

    >>> unequal(Summary((1.0, 2.0), 1, 1, 2, 2), Summary((1.0, 3.0), 1, 1, 3, 2))
    [1]
    """
    return [
        i
        for i, (x, y) in enumerate(zip(a.values, b.values, strict=False))
        if x != y and not (math.isnan(x) and math.isnan(y))
    ]


def distance(a: Summary, b: Summary) -> float:
    """Return the largest difference between values at the same position; NaN if none is finite."""
    differences = (
        abs(x - y)
        for x, y in zip(a.values, b.values, strict=False)
        if math.isfinite(x) and math.isfinite(y)
    )
    return max(differences, default=math.nan)


def average(summaries: Sequence[Summary]) -> list[float]:
    """Return the mean of the values at each position; NaN if one of them is not finite."""
    return [
        math.fsum(column) / len(summaries) if all(map(math.isfinite, column)) else math.nan
        for column in zip(*(s.values for s in summaries), strict=False)
    ]


def largest(values: Iterable[float]) -> float:
    """Return the largest magnitude among finite values; 0 if there are none."""
    return max((abs(v) for v in values if math.isfinite(v)), default=0.0)


def figure(x: float | str | None, digits: int = 3) -> str:
    """Format a number briefly, with a typographic minus sign.

    >>> figure(-0.12345), figure("nan"), figure(None)
    ('−0.123', 'NaN', '–')
    """
    if x is None:
        return "–"
    if isinstance(x, str):
        return {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[x]
    return (f"{x:,.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.{digits}g}").replace("-", "−")


def format_values(s: Summary | None) -> str:
    """Format the values of a small tensor; return "" if it is large or missing.

    >>> format_values(Summary((3.0, -0.5), 3.04, -0.5, 3.0, 2)), format_values(None)
    ('[3, −0.5]', '')
    """
    if s is None or not len(s.values) == s.size <= MAX_WRITTEN:
        return ""
    return f"[{', '.join(figure(number(v)) for v in s.values)}]"


# -- marks -----------------------------------------------------------------------------------------

#: A color has SHADES shades. A histogram has BINS bins and needs MIN_VALUES values.
SHADES, BINS, MIN_VALUES = 8, 17, 32
#: Sizes of cells [px]. MIN_ROW applies to a single row, and MIN_HEIGHT to several rows.
MAX_CELL_WIDTH, MIN_ROW, MIN_HEIGHT, MAX_HEIGHT = 40, 18, 4, 26
#: Font sizes of the numbers in cells [px]. Decimals are used if a value is at least MIN_DECIMAL.
MIN_SIZE, MAX_SIZE, MIN_DECIMAL = 9, 11.5, 0.1
#: Sizes of columns and texts [px]. In columns at least MIN_NAMED wide, numbers are labeled.
MAX_COLUMN_WIDTH, MIN_NAMED, COLUMN_GAP, LINE_HEIGHT, HISTOGRAM_HEIGHT = 330, 70, 12, 13, 20

#: Values of a tensor; non-finite values are strings.
Values = tuple[float | str, ...]
#: Name, role and lane of a column. The lane is None if the column does not belong to a rank.
Head = tuple[str, str, int | None]


@dataclass(frozen=True)
class Cell:
    """A tensor in a table.

    ``summary`` is a result of :func:`plain`. Each of the ``lines`` below it has a class and
    alternative texts, longest first. The values at ``marked`` positions have a frame. A ``wrong``
    tensor has a single frame around it. ``missing`` is the text for an unknown tensor.
    """

    summary: Json | None
    lines: Sequence[tuple[str, Sequence[str]]] = ()
    marked: Collection[int] = ()
    wrong: bool = False
    missing: str = "–"


class Table:
    """A table of tensors with one scale per row, visible for one step.

    Args:
        scene: the scene to which marks are added.
        step: the number of the step.
        heads: headings of the columns.
        left: width of the row names [px].
        width: width of the table [px].
        max_height: maximum height of a tensor [px].
        histograms: whether tensors have a histogram below them.
    """

    def __init__(
        self,
        scene: Scene,
        step: int,
        heads: Sequence[Head],
        left: float,
        width: float,
        max_height: float,
        *,
        histograms: bool = True,
    ) -> None:
        self.min_values, self.max_height = MIN_VALUES if histograms else math.inf, max_height
        self.scene, self.step, self.heads, self.left = scene, step, heads, left
        pitch = min(MAX_COLUMN_WIDTH, (width - left) / max(1, len(heads)))
        self.positions = [left + i * pitch for i in range(len(heads))]
        self.column_width = pitch - COLUMN_GAP
        self.bottom = 34.0 if any(role for _, role, _ in heads) else 20.0
        for x, (name, role, lane) in zip(self.positions, heads, strict=True):
            label = fitting([name, name.split()[-1]], self.column_width - 10, 12.5)
            self.add(
                x,
                0,
                title(f"{name} {role}"),
                circle(4.5, "gray" if lane is None else "own", x=5, y=9, lane=lane or 0),
                text(label, "strong", x=15, y=13.5),
                text(fitting([role], self.column_width, 11), "small", y=28),
            )

    def add(self, x: float, y: float, *shapes: Shape) -> None:
        """Add a drawing to the scene for this step."""
        self.scene.add(x, y, *shapes, begin=float(self.step), end=self.step + 1.0)

    def row(
        self,
        name: str,
        notes: Sequence[str],
        cells: Sequence[Cell],
        max_magnitude: float,
        *,
        scaled: bool = True,
    ) -> None:
        """Add a row with a name, notes, and a tensor or text in each column.

        ``max_magnitude`` is the magnitude shown in full color; ``scaled`` rows have a color scale.
        """
        top, tensors = self.bottom + 4, [cell.summary["values"] for cell in cells if cell.summary]
        span = (
            span_of(v for values in tensors for v in values)
            if any(len({*values}) > 1 for values in tensors)
            else None  # constant tensors need no histogram
        )
        descriptions = (
            f"{head} {', '.join(options[0] for _, options in cell.lines)}"
            for (head, *_), cell in zip(self.heads, cells, strict=True)
            if cell.summary
        )
        colors = [f"colors: ±{figure(max_magnitude)}"] if max_magnitude else []
        heading = title(f"{name}: {'; '.join([*notes, *colors, *descriptions])}", aloud=True)
        note_texts = (text(note, "small", y=28 + LINE_HEIGHT * i) for i, note in enumerate(notes))
        self.add(0, top, heading, text(cut(name, self.left, 12), "strong", y=14), *note_texts)
        bottoms = [top + 16 + LINE_HEIGHT * len(notes)]
        if colors and scaled:
            self.add(0, bottoms[0] + 4, *color_scale(max_magnitude, self.left - COLUMN_GAP))
            bottoms = [bottoms[0] + 16]
        for x, (*_, lane), cell in zip(self.positions, self.heads, cells, strict=True):
            if cell.summary is None:
                self.add(
                    x, top + 14, text(cell.missing, "late" if cell.wrong else "small", size=11)
                )
            else:
                bottoms.append(
                    top + self._cell(x, top, cell, cell.summary, max_magnitude, span, lane)
                )
        self.bottom = max(bottoms) + 8

    def _cell(
        self,
        x: float,
        y: float,
        cell: Cell,
        s: Json,
        max_magnitude: float,
        span: tuple[float, float] | None,
        lane: int | None,
    ) -> float:
        """Draw a tensor with its histogram and lines; return their total height."""
        values, marked = tuple(s["values"]), frozenset(cell.marked)
        shapes, height = heat(
            values,
            s["columns"],
            max_magnitude,
            self.column_width,
            self.max_height,
            marked,
            describe(s),
        )
        frame = rect(self.column_width + 6, height + 6, "alarm", x=-3, y=-3, r=3)
        self.add(x, y, *shapes, *([frame] if cell.wrong else []))
        if span and len(values) >= self.min_values:
            bars = histogram(values, span, self.column_width, lane=lane or 0)
            self.add(x, y + height + 5, title(f"from {' to '.join(map(figure, span))}"), *bars)
            height += 5 + HISTOGRAM_HEIGHT
        fitted = (
            (
                # numbers are labeled in all columns of a table or in none
                fitting(o[-1:] if self.column_width < MIN_NAMED else o, self.column_width, 11),
                style,
            )
            for style, o in cell.lines
        )
        texts = [
            text(content, style, y=LINE_HEIGHT * (i + 1), size=11)
            for i, (content, style) in enumerate(pair for pair in fitted if pair[0])
        ]
        norm_title = title(f"{describe(s)}\nnorm: the square root of the sum of the squared values")
        self.add(x, y + height, norm_title, *texts)
        return height + LINE_HEIGHT * len(texts) + 3


def fitting(options: Sequence[str], width: float, size: float) -> str:
    """Return the first text that fits into ``width`` pixels, or ""."""
    return next((option for option in options if text_width(option, size) <= width), "")


@cached_drawing
def heat(
    values: Values,
    columns: int,
    max_magnitude: float,
    width: float,
    max_height: float,
    marked: frozenset[int] = frozenset(),
    caption: str = "",
) -> tuple[list[Shape], float]:
    """Return a heat map with a tooltip, and its height [px].

    Args:
        values: the values, row by row.
        columns: number of values per row.
        max_magnitude: magnitude shown in full color.
        width: available width [px].
        max_height: available height [px].
        marked: positions of cells with a frame.
        caption: first line of the tooltip.
    """
    columns = max(1, columns)
    rows = max(1, math.ceil(len(values) / columns))
    cell_width = max(1, math.floor(min(width / columns, MAX_CELL_WIDTH)))
    cell_height = max(
        1,
        math.floor(
            min(
                max(cell_width, MIN_ROW if rows == 1 else MIN_HEIGHT), MAX_HEIGHT, max_height / rows
            )
        ),
    )
    numbers, size = fitting_numbers(values, cell_width, cell_height)
    gap = 1 if min(cell_width, cell_height) > 9 else 0
    areas: dict[tuple[str, float], str] = defaultdict(str)
    shapes = []
    for i, v in enumerate(values):
        x, y = i % columns * cell_width, i // columns * cell_height
        cell = f"M{x} {y}h{cell_width - gap}v{cell_height - gap}h{gap - cell_width}z"
        if key := shade(v, max_magnitude):
            areas[key] += cell
        if i in marked:
            areas["fresh", 0] += cell
        if numbers:
            middle, low = x + cell_width / 2, y + cell_height / 2 + 0.35 * size
            shapes.append(text(numbers[i], "cell", x=middle, y=low, anchor="middle", size=size))
        elif isinstance(v, str):
            areas["alarm", 0] += (
                f"M{x} {y}l{cell_width} {cell_height}m0-{cell_height}l-{cell_width} {cell_height}"
            )
    lines = (
        ", ".join(map(figure, values[i : i + columns])) for i in range(0, len(values), columns)
    )
    filled = [path(d, style, opacity=opacity) for (style, opacity), d in sorted(areas.items())]
    background = rect(columns * cell_width, rows * cell_height, "blank")
    return [title("\n".join([caption, *lines])), background, *filled, *shapes], rows * cell_height


def fitting_numbers(values: Values, width: float, height: float) -> tuple[list[str], float]:
    """Return the values as text, and the font size.

    The texts have three digits, two decimals (unless all values are too small) or two digits,
    whichever fit first into the cells. If none fit, the list is empty.

    >>> fitting_numbers((0.0625, 1.0), 36, 20), fitting_numbers((0.0625, 1.0), 12, 20)[0]
    ((['0.06', '1.00'], 11.4), [])
    >>> fitting_numbers((-0.0625, 0.001), 36, 20)
    ([], 0.0)
    """
    formats: list[Callable[[float | str], str]] = [figure, lambda v: figure(v, 2)]
    if largest(v for v in values if not isinstance(v, str)) >= MIN_DECIMAL:
        formats.insert(
            1, lambda v: figure(v) if isinstance(v, str) else f"{v:.2f}".replace("-", "−")
        )
    for numbers in ([form(v) for v in values] for form in formats):
        fitting_size = (width - 4) / (0.7 * max([3, *map(len, numbers)]))
        size = round(min(MAX_SIZE, fitting_size, height + 0.5), 1)
        if size >= MIN_SIZE:
            return numbers, size
    return [], 0.0


def color_scale(max_magnitude: float, width: float) -> list[Shape]:
    """Return a color scale from ``-max_magnitude`` to ``max_magnitude``, with a label."""
    levels = range(-SHADES, SHADES + 1)
    width = (width - 46) // len(levels) * len(levels)
    values = tuple(max_magnitude * k * abs(k) / SHADES**2 for k in levels)
    strip, _ = heat(values, len(levels), max_magnitude, width, 10)
    return [*strip[1:], text(f"±{figure(max_magnitude, 2)}", "tick", x=width + 5, y=9)]


def shade(v: float | str, max_magnitude: float) -> tuple[str, float] | None:
    """Return the class and opacity of a value; None near zero.

    The opacity grows with the square root of the magnitude, so that small values remain visible.

    >>> shade(-0.5, 2.0), shade(0.0, 2.0), shade("nan", 2.0)
    (('negative', 0.7), None, ('odd', 0))
    """
    if isinstance(v, str):
        return "odd", 0
    level = round(SHADES * math.sqrt(min(1.0, abs(v) / max_magnitude))) if max_magnitude else 0
    return ("negative" if v < 0 else "positive", 0.45 + 0.5 * level / SHADES) if level else None


@cached_drawing
def histogram(
    values: Values, span: tuple[float, float], width: float, *, lane: int = 0
) -> list[Shape]:
    """Return a histogram with a line at zero.

    Args:
        values: the values.
        span: the first and last value of the axis.
        width: total width [px].
        lane: lane that determines the color.
    """
    low, high = span
    counts = bins(values, low, high)
    shapes = [line((0, HISTOGRAM_HEIGHT), (width, HISTOGRAM_HEIGHT), "base")]
    if low < 0 < high:
        zero = width * -low / (high - low)
        shapes.append(line((zero, 0), (zero, HISTOGRAM_HEIGHT), "zero"))
    tops = [round(HISTOGRAM_HEIGHT - n / max(1, *counts) * (HISTOGRAM_HEIGHT - 2)) for n in counts]
    steps = (f"V{y}h{len([*same]) * width / BINS:.3g}" for y, same in groupby(tops))
    outline = f"M0 {HISTOGRAM_HEIGHT}{''.join(steps)}V{HISTOGRAM_HEIGHT}"
    return [*shapes, path(outline, "bins", lane=lane)]


def bins(values: Iterable[float | str], low: float, high: float) -> list[int]:
    """Count the finite values in bins of equal width.

    >>> counts = bins([0.0, 0.5, 1.0, "nan"], 0.0, 1.0)
    >>> counts[0], counts[8], counts[-1], sum(counts)
    (1, 1, 1, 3)
    """
    finite = (v for v in values if not isinstance(v, str))
    counts = Counter(min(BINS - 1, int((v - low) / (high - low) * BINS)) for v in finite)
    return [counts[n] for n in range(BINS)]


def span_of(values: Iterable[float | str]) -> tuple[float, float]:
    """Return the range of all finite values, widened if they are all equal.

    >>> span_of([2.0, "nan"]), span_of([])
    ((1.5, 2.5), (-1.0, 1.0))
    """
    finite = [v for v in values if not isinstance(v, str)]
    low, high = min(finite, default=-1.0), max(finite, default=1.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


# -- text ------------------------------------------------------------------------------------------


def describe(s: Json) -> str:
    """Return a one-line description of a summary.

    >>> describe({"size": 2, "min": 0.0, "max": 1.0, "norm": 2.0, "values": [0.0, "nan"]})
    '2 values, 0 to 1, norm 2, 1 × NaN'
    """
    parts = bounds(s), f"norm {figure(s['norm'])}", non_finite_counts(s)
    return ", ".join(filter(None, [count(s["size"], "value"), *parts]))


def bounds(s: Json) -> str:
    """Format the range of the finite values."""
    finite = [v for v in s["values"] if not isinstance(v, str)] or ["nan"]
    complete = not isinstance(s["min"], str)
    low, high = (s["min"], s["max"]) if complete else (min(finite), max(finite))
    return (
        f"{figure(low)} to {figure(high)}"
        if low != high
        else "all " * (s["size"] > 1) + figure(low)
    )


def non_finite_counts(s: Json) -> str:
    """Format the counts of non-finite values.

    >>> non_finite_counts({"values": [0.0, "nan", "nan", "-inf"]})
    '2 × NaN, 1 × −∞'
    """
    counts = [(s["values"].count(word), word) for word in ("nan", "inf", "-inf")]
    return ", ".join(f"{n} × {figure(word)}" for n, word in counts if n)


def norm(s: Json) -> tuple[str, Sequence[str]]:
    """Return the class and texts of the norm, or of the non-finite values if there are any."""
    if odd := non_finite_counts(s):
        return "late", [odd, "NaN"]
    return "count", [f"norm {figure(s['norm'])}", figure(s["norm"])]
