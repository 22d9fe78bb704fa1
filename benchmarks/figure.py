"""Figures, i.e. measurements with their references; tables of figures; and a report."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A measurement with its reference; if it has no value, a row of a benchmark's table.

    Args:
        name: the measured quantity.
        unit: the unit of the value and of the reference.
        value: the median of the repetitions; None if it could not be measured.
        low: the minimum of the repetitions.
        high: the maximum of the repetitions.
        reps: the number of repetitions.
        reference: the quantity to compare with.
        reference_value: the median of the reference.
        limit: the upper limit of the ratio of value to reference, or of the value if ``absolute``.
        target: a stricter limit than ``limit``, on the same quantity.
        absolute: whether the limits apply to the value itself.
        note: the reason for a missing value.
    """

    name: str
    unit: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reps: int = 0
    reference: str = ""
    reference_value: float | None = None
    limit: float | None = None
    target: float | None = None
    absolute: bool = False
    note: str = ""

    def of(self, samples: Sequence[float], against: Sequence[float] = (), note: str = "") -> Figure:
        """Return the figure with the medians of these samples; ``note`` explains missing samples.

        >>> start = Figure("start", "s", reference="stock", limit=0.25)
        >>> start.of([2.0, 1.0, 3.0], [8.0, 10.0]).verdict
        'limit met'
        """
        if not samples:
            return replace(self, note=note or "not measured")
        reference_value = median(against) if against else None
        return replace(
            self,
            value=median(samples),
            low=min(samples),
            high=max(samples),
            reps=len(samples),
            reference_value=reference_value,
        )

    @property
    def ratio(self) -> float | None:
        """The ratio of value to reference; None if either is missing."""
        if self.value is None or not self.reference_value:
            return None
        return self.value / self.reference_value

    @property
    def verdict(self) -> str:
        """Whether a limit is met, or why this is unknown; "" without limits."""
        if self.limit is None and self.target is None:
            return ""
        number = self.value if self.absolute else self.ratio
        if number is None:
            return self.note or "reference missing"
        if self.target is not None and number <= self.target:
            return "target met"
        return "limit met" if self.limit is not None and number <= self.limit else "not met"

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as plain data."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}


def figure(
    name: str,
    unit: str,
    samples: Sequence[float],
    reference: str = "",
    against: Sequence[float] | None = None,
    **limits: Any,
) -> Figure:
    """Return a figure whose name or limits depend on the measurement."""
    return Figure(name, unit, reference=reference, **limits).of(samples, against or ())


def fill(
    table: Mapping[str, Figure], samples: Mapping[str, Sequence[float]], note: str = ""
) -> list[Figure]:
    """Fill a benchmark's table with its values.

    Args:
        table: the figures by the names of their samples, such as ``"start"`` or
            ``"start / reference"``.
        samples: repetitions by name; missing ones were not measured.
        note: the reason for missing samples.

    >>> table = {"one / two": Figure("one", "s", reference="two", limit=0.6)}
    >>> [row.verdict for row in fill(table, {"one": [1.0], "two": [2.0]})]
    ['limit met']
    """
    keys = [key.partition(" / ") for key in table]
    return [
        row.of(samples.get(name, ()), samples.get(reference, ()), note)
        for (name, _, reference), row in zip(keys, table.values(), strict=True)
    ]


def machine() -> dict[str, Any]:
    """Describe the machine, its software, and its load before the measurement."""
    from distkit import __version__
    from distkit.cluster import machine

    return {
        "cpus": machine.cpus(),
        "memory": machine.memory(),
        "system": platform.platform(),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ipyparallel")},
        "distkit": __version__,  # distkit may run from a checkout without being installed
    }


@dataclass
class Report:
    """The figures of one or more benchmarks, and their samples."""

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        plain = {**asdict(self), "figures": [f.to_dict() for f in self.figures]}
        return json.dumps(plain, indent=2)

    def __str__(self) -> str:
        host = self.machine
        head = (
            f"{host['cpus']} cpus, Python {host['python']}, torch {host['torch']}, "
            f"load before {host['load_before'][0]}"
        )
        return "\n\n".join([head, *map(_paragraph, self.figures)])


def _paragraph(figure: Figure) -> str:
    """Format a figure as at most three lines."""
    comparison = f", {figure.note}" if figure.note else ""
    if figure.ratio is not None:
        comparison = f" = {_short(figure.ratio)} of {figure.reference}: "
        comparison += _number(figure.reference_value, figure.unit)
    elif figure.reference and not figure.absolute and not figure.note:
        comparison = f", {figure.reference}"
    unit = "" if figure.absolute else "x"
    limits = [
        f"{word} ≤ {_short(limit)}{unit}"
        for word, limit in (("limit", figure.limit), ("target", figure.target))
        if limit is not None
    ]
    lines = [figure.name, f"    {_number(figure.value, figure.unit)}{_range(figure)}{comparison}"]
    if limits:
        lines.append(f"    {', '.join(limits)}: {figure.verdict}")
    return "\n".join(lines)


def _number(value: float | None, unit: str) -> str:
    return "?" if value is None else f"{_short(value)} {unit}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def _range(figure: Figure) -> str:
    if figure.low is None or figure.high is None or figure.reps < 2:
        return ""
    return f" [{_short(figure.low)} to {_short(figure.high)}]"
