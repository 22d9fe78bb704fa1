"""The state of a run with a parameter server at a moment, from the projection's intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distkit.views.scene.frame import Json


@dataclass
class RowState:
    """A key on a server.

    ``version`` is None before the first value. ``last``: the workers of the last update, and how
    late each was; ``slots``: slot, worker and version of each gradient in the inbox; ``held``:
    the workers whose pull waits.
    """

    version: int | None = None
    last: list[tuple[int, int]] = field(default_factory=list)
    slots: list[tuple[int, int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
    """The rows in their order, each node's status as kind, text, awaited; and who registered."""

    rows: list[RowState]
    status: dict[int, tuple[str, str, list[int]]]
    present: set[int]


def at(run: Json, time: float) -> Moment:
    """The state at a time [s]."""

    def now(name: str) -> Iterator[list[Any]]:
        """Those intervals, from the third value to the fourth, that the time is in."""
        return (s for s in run[name] if s[2] <= time and (s[3] is None or s[3] > time))

    rows = [RowState() for _ in run["rows"]]
    for row, version, _, _, late in now("versions"):
        rows[row].version, rows[row].last = version, late
    for row, worker, _, _, slot, version, _ in now("gradients"):
        rows[row].slots.append((slot, worker, version))
    for row, worker, *_ in now("held"):
        rows[row].held.append(worker)
    status = {node: (kind, text, awaited) for node, kind, _, _, text, awaited in now("status")}
    return Moment(rows, status, {node for node, *_ in now("present")})


def counts(run: Json) -> Json:
    """The counters at the end: pushes, pulls, updates, bytes there and back, bins of staleness."""
    sums = {**run["base"], "late": list(run["base"]["late"])}
    for beat in (b for b in run["beats"] if b["end"] is not None):
        size, kind = beat.get("nbytes", 0), beat["kind"]
        sums["pushes"] += kind == "push"
        sums["pulls"] += kind == "weights"
        sums["updates"] += kind == "update"
        sums["there"] += size * (kind == "push")
        sums["back"] += size * (kind == "weights")
    for *_, where in run["gradients"]:
        if where is not None:
            sums["late"][where] += 1
    return sums


def stretches(run: Json, node: int) -> list[tuple[str, float, float]]:
    """Stretches in which a worker waits or computes: kind, begin and end [s]."""
    found: list[tuple[str, float, float]] = []
    for _, kind, begin, end, *_ in (s for s in run["status"] if s[0] == node):
        until = run["end"] if end is None else end
        if found and found[-1][0] == kind and found[-1][2] == begin:
            found[-1] = kind, found[-1][1], until
        elif kind in ("waits", "works"):
            found.append((kind, begin, until))
    return found
