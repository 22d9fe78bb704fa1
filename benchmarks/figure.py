"""A measured number beside its reference, and a report of several."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number with its reference; ``must`` and ``aim`` are upper limits.

    The limits hold for the ratio to the reference, or for the value itself when ``absolute``.
    ``low`` and ``high`` are the extremes of the repetitions, ``value`` is their median. ``note``
    says why there is none, or why a limit is not reached.
    """

    name: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    reps: int = 0
    reference: str = ""
    reference_value: float | None = None
    must: float | None = None
    aim: float | None = None
    absolute: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over reference, None without one."""
        if self.value is None or not self.reference_value:
            return None
        return self.value / self.reference_value

    @property
    def reached(self) -> str:
        """The better of the two limits that the number keeps; "" when it has no limits."""
        if self.must is None and self.aim is None:
            return ""
        number = self.value if self.absolute else self.ratio
        if number is None:
            return self.note or "reference missing"
        if self.aim is not None and number <= self.aim:
            return "aim"
        return "must" if self.must is not None and number <= self.must else "not reached"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ratio": self.ratio, "reached": self.reached}


def figure(
    name: str,
    unit: str,
    samples: list[float],
    reference: str = "",
    against: list[float] | None = None,
    **limits: Any,
) -> Figure:
    """The medians of repeated measurements: ours, and those of the reference.

    >>> figure("start", "s", [2.0, 1.0, 3.0], "stock", [8.0, 10.0], must=0.25).reached
    'must'
    """
    return Figure(
        name,
        unit,
        median(samples),
        min(samples),
        max(samples),
        len(samples),
        reference,
        median(against) if against else None,
        **limits,
    )


def machine() -> dict[str, Any]:
    """What was measured on, and how busy it was before."""
    from distkit import __version__
    from distkit.cluster import limits

    load = os.getloadavg()
    return {
        "cpus": limits.cpus(),
        "memory": limits.memory(),
        "system": platform.platform(),
        "load_before": [round(x, 2) for x in load],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ipyparallel")},
        "distkit": __version__,  # it may run from a checkout, not installed
    }


@dataclass
class Report:
    """The figures of one or several benchmarks, and how they came about."""

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One JSON object."""
        plain = {**asdict(self), "figures": [f.to_dict() for f in self.figures]}
        return json.dumps(plain, indent=2)

    def __str__(self) -> str:
        facts = self.machine
        head = (
            f"{facts['cpus']} cpus, Python {facts['python']}, torch {facts['torch']}, "
            f"load before {facts['load_before'][0]}"
        )
        return "\n\n".join([head, *map(_paragraph, self.figures)])


def _paragraph(figure: Figure) -> str:
    """A figure in three lines that fit 80 columns."""
    against = f", {figure.note}" if figure.note else ""
    if figure.ratio is not None:
        against = f" = {_short(figure.ratio)} of {figure.reference}: "
        against += _number(figure.reference_value, figure.unit)
    elif figure.reference and not figure.absolute and not figure.note:
        against = f", {figure.reference}"
    sign = "" if figure.absolute else "x"
    limits = [
        f"{word} ≤ {_short(limit)}{sign}"
        for word, limit in (("must", figure.must), ("aim", figure.aim))
        if limit is not None
    ]
    lines = [figure.name, f"    {_number(figure.value, figure.unit)}{_range(figure)}{against}"]
    if limits:
        lines.append(f"    {', '.join(limits)}: {figure.reached}")
    return "\n".join(lines)


def _number(value: float | None, unit: str) -> str:
    return "?" if value is None else f"{_short(value)} {unit}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def _range(figure: Figure) -> str:
    if figure.low is None or figure.high is None or figure.reps < 2:
        return ""
    return f" [{_short(figure.low)} to {_short(figure.high)}]"
