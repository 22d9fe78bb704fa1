"""What a run adds up to, in numbers to compare: messages, rounds, waiting, losses. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import TypeGuard

import numpy as np

from distkit._format import human_bytes, human_seconds
from distkit.trace.hosts import between
from distkit.trace.log import EventLog
from distkit.trace.training import read
from distkit.views.gradients.projection import thin
from distkit.views.scene import summaries
from distkit.views.scene.frame import Json
from distkit.views.scene.summaries import number, rounded
from distkit.views.timeline.columns import Columns

WORKER = "worker"  # a rank's role where there is a parameter server


def figures(columns: Columns) -> Json:
    """The numbers of a run: seconds, bytes, counts, and parts of the time from 0 to 1.

    With a parameter server ``busy`` and ``waiting`` are means of the workers alone: what a server
    does between two requests is no loss of time. What counts as waiting, and that the barrier at
    the end does not, is in :mod:`distkit.views.timeline.causes`.
    """
    frame = columns.frame
    ranks = [{key: lane[key] for key in _OF_A_RANK} for lane in frame["lanes"]]
    workers = [r for r in ranks if r["role"] == WORKER] or ranks
    seconds = (frame["end"] or 0.0) - (frame["start"] or 0.0)
    ends = _done(columns)
    done = [ends[r["rank"]] for r in workers if r["rank"] in ends]
    return {
        "seconds": seconds,
        "first_done": min(done) if done else None,
        "apart": (max(done) - min(done)) / seconds if done and seconds else 0.0,
        **{
            key: frame[key]
            for key in ("messages", "message_bytes", "collectives", "collective_bytes")
        },
        "between_bytes": between(columns.traffic)[1],
        "most_sent": max((r["bytes"] for r in workers), default=0),
        "rounds": rounds(columns),
        "busy": _mean([r["busy"] for r in workers]),
        "waiting": _mean([r["waiting"] for r in workers]),
        "ranks": ranks,
    }


_OF_A_RANK = ("rank", "name", "role", "busy", "waiting", "messages", "bytes")


def _mean(parts: list[float]) -> float:
    return round(sum(parts) / len(parts), 4) if parts else 0.0


def _done(columns: Columns) -> dict[int, float]:
    """When each rank had finished [s since the start], before the barrier at the end."""
    ops, parted, zero = columns.ops, _parted(columns), columns.frame["start"] or 0.0
    bounds = [*np.flatnonzero(np.diff(ops.rank, prepend=-1)).tolist(), len(ops)]
    found = {}
    for a, b in pairwise(bounds):
        rank = int(ops.rank[a])
        ends = ops.end[a:b][ops.start[a:b] - zero < parted.get(rank, math.inf)]
        if len(ends) and not np.isnan(ends).any():
            found[rank] = round(float(ends.max()) - zero, 9)
    return found


def _parted(columns: Columns) -> dict[int, float]:
    """When ranks had nothing left but the barrier at the end [s since the start]."""
    ops, over = columns.ops, columns.causes.over
    first: dict[int, float] = {}
    for rank, start in zip(ops.rank[over].tolist(), ops.start[over].tolist(), strict=True):
        first[rank] = min(start, first.get(rank, start))
    zero = columns.frame["start"] or 0.0
    return {rank: start - zero for rank, start in first.items()}


def ratio(value: float | str | None, base: float | str | None) -> str:
    """A value as a multiple of the baseline's.

    >>> ratio(3, 2), ratio(2, 2), ratio(0, 2), ratio(2, 0), ratio(2, 2**20), ratio(2048, 1)
    ('1.5×', '=', '0×', '', '<0.001×', '2,048×')
    """
    if value is None or base is None or isinstance(value, str) or isinstance(base, str):
        return ""
    if value == base:
        return "=" if value else ""
    if not base:
        return ""
    times = value / base
    if 0 < abs(times) < 0.001:
        return "<0.001×"
    return f"{times:,.0f}×" if abs(times) >= 100 else f"{times:.2g}×"


def difference(value: float | str | None, base: float | str | None, unit: str) -> str:
    """How far a value is from the baseline's, in words.

    >>> difference(3, 2, "n"), difference(0.1, 0.3, "s"), difference(None, 2, "n")
    ('+1', '−200 ms', '')
    """
    if value is None or base is None or isinstance(value, str) or isinstance(base, str):
        return ""
    return f"{'−' if value < base else '+'}{figure(abs(value - base), unit)}"


def finite(value: float | str | None) -> TypeGuard[float]:
    """True for a number that is one."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def figure(value: float | str | None, unit: str) -> str:
    """A value in words.

    >>> figure(0.25, "s"), figure(4096, "B"), figure(0.251, "%"), figure(None, "n")
    ('250 ms', '4 KiB', '25 %', '–')
    """
    if value is None or isinstance(value, str) or unit == "x":
        return summaries.figure(value)
    match unit:
        case "s":
            return human_seconds(value)
        case "B":
            return human_bytes(value)
        case "%":
            return f"{100 * value:.0f} %"
        case _:
            return f"{value:,}"


# -- rounds --------------------------------------------------------------------------


def rounds(columns: Columns) -> int:
    """How many exchanges had to come one after another.

    In a round a rank sends at most one message and receives at most one, and sends only what
    can depend on earlier rounds; a collective is one round. The ring all-reduce has 2(n-1).
    """
    known: dict[int, int] = defaultdict(int)  # the last round of which a rank has the result
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    depth: dict[int, int] = defaultdict(int)
    for begins, rank, item in _exchanges(columns):
        if begins:
            depth[item] = sent[rank] = max(depth[item], 1 + max(known[rank], sent[rank]))
            continue
        if item >= 0:  # a message: received one at a time
            depth[item] = received[rank] = max(depth[item], 1 + received[rank])
        known[rank] = max(known[rank], depth[item])
    return max(depth.values(), default=0)


def _exchanges(columns: Columns) -> list[tuple[int, int, int]]:
    """Beginnings (1) and ends (0) in the order of their times: each with its rank and what it is.

    Messages are numbered from 0, collectives are -1, -2 …
    """
    ops, pairs = columns.ops, columns.pairs
    gone = np.flatnonzero((pairs.send >= 0) & ~np.isnan(pairs.sent))
    come = gone[(pairs.recv[gone] >= 0) & ~np.isnan(pairs.received[gone])]
    into = np.flatnonzero((pairs.tie >= 0) & ~ops.scheduled)
    out = into[ops.ended[into]]
    time = np.concatenate([pairs.sent[gone], ops.start[into], pairs.received[come], ops.end[out]])
    begins = np.arange(len(time)) < len(gone) + len(into)
    rank = ops.rank[np.concatenate([pairs.send[gone], into, pairs.recv[come], out])]
    item = np.concatenate([gone, -1 - pairs.tie[into], come, -1 - pairs.tie[out]])
    order = np.lexsort((begins, time))
    facts = (begins.astype(np.int64), rank, item)
    return list(zip(*(fact[order].tolist() for fact in facts), strict=True))


# -- training --------------------------------------------------------------------------


def training(trace: EventLog) -> Json | None:
    """The loss of a watched loop: ``[step, seconds since the start, mean loss of the ranks]``.

    None where no loss was told. ``last`` is the last one, ``nan`` the first step at which it is
    no finite number (None: never), ``seconds`` the time per step.
    """
    marks = [e for e in trace.events if e.attributes.get("watched") == "step"]
    steps = sorted(read(EventLog(marks)).steps.items())
    told = [(n + 1, list(step.told.values())) for n, step in steps]
    points = [
        (n, _average([t.time for t in by]) - trace.start, _average([t.loss for t in by]))
        for n, by in told
        if by
    ]
    if not any(math.isfinite(loss) for _, _, loss in points):
        return None
    (first, begin, _), (final, end, last) = points[0], points[-1]
    odd = [n for n, _, loss in points if not math.isfinite(loss)]
    where = {n: (at, loss) for n, at, loss in points}
    kept = [n for n, _ in thin([(n, loss) for n, _, loss in points], 300)]
    return {
        "points": [[n, round(where[n][0], 7), rounded(where[n][1])] for n in kept],
        "steps": final,
        "last": number(last),
        "nan": odd[0] if odd else None,
        "seconds": (end - begin) / (final - first) if final > first else None,
    }


def _average(values: list[float]) -> float:
    return sum(values) / len(values)
