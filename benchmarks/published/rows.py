"""Published numbers with their predictions, and statistics of the errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """A published number; ``fitted`` rows determine the constants and are not scored.

    ``naive`` is the prediction of perfect scaling, such as n times the throughput of one GPU.
    """

    table: str
    case: str
    unit: str
    published: float
    predicted: float
    fitted: bool = False
    naive: float | None = None

    @property
    def error(self) -> float:
        """The relative error; positive if the prediction is too high.

        >>> Row("a table", "a case", "s", 2.0, 2.5).error
        0.25
        """
        return self.predicted / self.published - 1

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**asdict(self), "error": round(self.error, 4)}


def scored_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are not fitted."""
    return [row for row in rows if not row.fitted]


def geomean(rows: Iterable[Row]) -> float:
    """Return the geometric mean of the predictions' error factors, less one.

    Unlike the geometric mean of errors, it is not zero if a single row happens to be exact.

    >>> rows = [Row("", "", "s", 1.0, 2.0), Row("", "", "s", 2.0, 1.0)]
    >>> geomean(rows)
    1.0
    """
    logs = [abs(math.log(row.predicted / row.published)) for row in scored_rows(rows)]
    return math.expm1(sum(logs) / len(logs))


def median_error(rows: Iterable[Row]) -> float:
    """Return the median of the absolute errors."""
    return median(abs(row.error) for row in scored_rows(rows))


def naive_error(rows: Iterable[Row]) -> float:
    """Return the median absolute error of perfect scaling, over the scored rows with ``naive``."""
    return median(abs(row.naive / row.published - 1) for row in scored_rows(rows) if row.naive)


def worst(rows: Iterable[Row]) -> Row:
    """Return the row with the largest absolute error."""
    return max(scored_rows(rows), key=lambda row: abs(row.error))


def largest_error(rows: Iterable[Row]) -> float:
    """Return the absolute error of the worst row."""
    return abs(worst(rows).error)


def solve(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Solve Σ constant · term = value for the constants; there are as many rows as constants.

    >>> solve([[1, 0], [1, 2]], [3, 7])
    [3.0, 2.0]
    """
    constants: list[float] = np.linalg.solve(
        np.array(terms, float), np.array(values, float)
    ).tolist()
    return constants
