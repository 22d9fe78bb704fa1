"""What a run with a parameter server is like at a moment, found in the projection's intervals.

js/serversstate.js does the same in the browser.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

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


def at(picture: Json, time: float) -> Moment:
    """The state at a time [s]."""
    run = max((t for t in picture["runs"] if t <= time), default=-math.inf)
    rows = [RowState() for _ in picture["rows"]]
    for since, row in picture["known"]:
        if run <= since <= time:
            rows[row].version = 0
    for row, version, begin, end, late in picture["updates"]:
        if begin >= run and end is not None and end <= time:
            rows[row].version, rows[row].last = version, late
    for row, worker, begin, end, slot, version, _ in picture["gradients"]:
        if begin <= time and (end is None or end > time):
            rows[row].slots.append((slot, worker, version))
    for row, worker, begin, end in picture["held"]:
        if begin <= time and (end is None or end > time):
            rows[row].held.append(worker)
    status = {
        node: (kind, text, awaited)
        for since, node, kind, text, awaited in picture["status"]
        if since <= time
    }
    return Moment(rows, status, {node for t, node in picture["present"] if run <= t <= time})


def counts(picture: Json) -> Json:
    """The counters at the end: pushes, pulls, updates, bytes there and back, bins of staleness."""
    sums = {**picture["base"], "late": list(picture["base"]["late"])}
    for beat in (b for b in picture["beats"] if b["end"] is not None):
        size, kind = beat.get("nbytes", 0), beat["kind"]
        sums["pushes"] += kind == "push"
        sums["pulls"] += kind == "weights"
        sums["updates"] += kind == "update"
        sums["there"] += size * (kind == "push")
        sums["back"] += size * (kind == "weights")
    for *_, where in picture["gradients"]:
        if where is not None:
            sums["late"][where] += 1
    return sums


def resting(picture: Json, time: float) -> Json | None:
    """The beat that has ended last."""
    ends = [b["end"] for b in picture["beats"] if b["end"] is not None]
    i = bisect_right(ends, time)
    return picture["beats"][i - 1] if i else None


def stretches(picture: Json, node: int) -> list[tuple[str, float, float]]:
    """When a worker waits and computes: kind, begin and end [s]."""
    mine = [s for s in picture["status"] if s[1] == node]
    ends = [*(s[0] for s in mine[1:]), picture["end"]]
    found: list[tuple[str, float, float]] = []
    for (begin, _, kind, *_), end in zip(mine, ends, strict=False):
        if found and found[-1][0] == kind and found[-1][2] == begin:
            found[-1] = kind, found[-1][1], end
        elif kind in ("waits", "works"):
            found.append((kind, begin, end))
    return found
