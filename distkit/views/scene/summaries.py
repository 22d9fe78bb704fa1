"""Compares, measures and formats tensor summaries for pictures. No side effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from distkit.events import Summary
from distkit.views.scene.frame import Json

#: Maximum number of values in a single row, the row length of longer tensors, and the maximum
#: number of elements of a tensor that is formatted as text.
MAX_SINGLE_ROW, ROW_LENGTH, MAX_WRITTEN = 16, 8, 6


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


def number(x: float, digits: int = 4) -> float | str:
    """Round to significant digits; NaN and infinity become strings, as JSON has no such numbers."""
    return float(f"{x:.{digits}g}") if math.isfinite(x) else str(x)


def columns(s: Summary, shape: Sequence[int] = ()) -> int:
    """Return the number of columns of a heat map.

    A complete matrix keeps its columns, a short tensor has one row, and others have 8 columns.

    >>> columns(Summary((1.0,) * 12, 1, 0, 1, 12), (3, 4))
    4
    """
    n = len(s.values)
    if len(shape) == 2 and n == s.size == math.prod(shape):
        return shape[1]
    return n if n <= MAX_SINGLE_ROW else ROW_LENGTH


def key(s: Summary) -> tuple[str, ...]:
    """Return a key that compares equal for equal summaries, even with NaN."""
    return tuple(map(repr, (*s.values, s.norm, s.min, s.max, s.size)))


def unequal(a: Summary, b: Summary) -> list[int]:
    """Return the positions at which the values of two summaries differ; a NaN equals a NaN.

    >>> unequal(Summary((1.0, 2.0), 1, 1, 2, 2), Summary((1.0, 3.0), 1, 1, 3, 2))
    [1]
    """
    pairs = enumerate(zip(a.values, b.values, strict=False))
    return [i for i, (x, y) in pairs if x != y and not (math.isnan(x) and math.isnan(y))]


def distance(a: Summary, b: Summary) -> float:
    """Return the largest difference between values at the same position; NaN if none is finite."""
    pairs = zip(a.values, b.values, strict=False)
    differences = [abs(x - y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    return max(differences, default=math.nan)


def average(summaries: Sequence[Summary]) -> list[float]:
    """Return the mean of the values at each position."""
    return [
        math.fsum(column) / len(summaries) if all(map(math.isfinite, column)) else math.nan
        for column in zip(*(s.values for s in summaries), strict=False)
    ]


def largest(values: Iterable[float]) -> float:
    """Return the largest magnitude among finite values, 0 if there are none."""
    return max((abs(v) for v in values if math.isfinite(v)), default=0.0)


def figure(x: float | str | None, digits: int = 3) -> str:
    """Format a number with a few digits and a minus sign.

    >>> figure(-0.12345), figure("nan"), figure(None)
    ('−0.123', 'NaN', '–')
    """
    if x is None:
        return "–"
    if isinstance(x, str):
        return {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[x]
    return (f"{x:,.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.{digits}g}").replace("-", "−")


def written(s: Summary | None) -> str:
    """Format the values of a small tensor; return "" if it is large or missing.

    >>> written(Summary((3.0, -0.5), 3.04, -0.5, 3.0, 2)), written(None)
    ('[3, −0.5]', '')
    """
    if s is None or not len(s.values) == s.size <= MAX_WRITTEN:
        return ""
    return f"[{', '.join(figure(number(v)) for v in s.values)}]"
