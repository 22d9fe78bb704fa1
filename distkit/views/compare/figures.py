"""What a run adds up to, in numbers to compare: messages, rounds, waiting, the critical path. Pure.

Waiting and the critical path follow the rules of js/causes.js, for a whole trace in columns.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

import numpy as np

from distkit.events import Op
from distkit.trace.log import EventLog
from distkit.views.gradients.curves import thin
from distkit.views.gradients.steps import read
from distkit.views.scene.frame import Json
from distkit.views.scene.summaries import number, rounded
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.operations import Bools, Floats, Ints

#: Clocks are no finer [s].
SOON = 1e-9
WORKER = "worker"  # a rank's role where there is a parameter server


def figures(columns: Columns) -> Json:
    """The numbers of a run: seconds, bytes, counts, and parts of the time from 0 to 1.

    With a parameter server ``busy`` and ``waiting`` are means of the workers alone: what a server
    does between two requests is no loss of time.
    """
    frame, waited = columns.frame, waits(columns)
    path = critical_path(columns, waited)
    ranks = per_rank(columns, waited)
    workers = [r for r in ranks if r["role"] == WORKER] or ranks
    end, start = frame["end"] or 0.0, frame["start"] or 0.0
    return {
        "seconds": end - start,
        **{
            key: frame[key]
            for key in ("messages", "message_bytes", "collectives", "collective_bytes")
        },
        "most_sent": int(sent_bytes(columns)[1].max(initial=0)),
        "rounds": rounds(columns),
        "critical": int((~columns.ops.mark[path]).sum()) if path else 0,
        "busy": _mean([r["busy"] for r in workers]),
        "waiting": _mean([r["waiting"] for r in workers]),
        "ranks": ranks,
    }


def per_rank(columns: Columns, waited: Floats) -> list[Json]:
    """What each lane sent, and the parts of the time that it communicated and waited."""
    messages, nbytes = sent_bytes(columns)
    ops, frame = columns.ops, columns.frame
    waiting = np.bincount(ops.rank, weights=waited) if len(ops) else np.zeros(0)
    seconds = (frame["end"] or 0.0) - (frame["start"] or 0.0) or 1.0

    def of(all_ranks: Ints | Floats, rank: int) -> float:
        return float(all_ranks[rank]) if rank < len(all_ranks) else 0.0

    return [
        {
            "rank": lane["rank"],
            "name": lane["name"],
            "role": lane["role"],
            "busy": lane["busy"],
            "waiting": round(min(lane["busy"], of(waiting, lane["rank"]) / seconds), 4),
            "messages": int(of(messages, lane["rank"])),
            "bytes": int(of(nbytes, lane["rank"])),
        }
        for lane in frame["lanes"]
    ]


def _mean(parts: list[float]) -> float:
    return round(sum(parts) / len(parts), 4) if parts else 0.0


def sent_bytes(columns: Columns) -> tuple[Ints, Ints]:
    """Messages and bytes that each rank sent, by its number."""
    ops, pairs = columns.ops, columns.pairs
    gone = (pairs.send >= 0) & ~np.isnan(pairs.sent)
    src = ops.rank[pairs.send[gone]]
    counted = np.bincount(src) if len(src) else np.zeros(0, np.int64)
    weighed = np.bincount(src, weights=pairs.nbytes[gone]) if len(src) else np.zeros(0)
    return counted.astype(np.int64), weighed.astype(np.int64)


# -- who waits for whom ------------------------------------------------------------


def waits(columns: Columns) -> Floats:
    """Seconds that each operation waits for the last one to arrive, from its start on."""
    ops, pairs = columns.ops, columns.pairs
    if not len(ops):
        return np.zeros(0)
    most = np.where(ops.ended, ops.end, columns.frame["end"])
    until = np.full(len(ops), -np.inf)
    tied = pairs.tie >= 0
    last = np.full(len(pairs.ties), -np.inf)
    np.maximum.at(last, pairs.tie[tied], ops.start[tied])
    # a pull waits for its answer
    sends, receives = ops.among([Op.SEND]), ops.among([Op.RECV, Op.PULL])
    got = (pairs.recv >= 0) & receives[pairs.recv]
    until[pairs.recv[got]] = np.where(np.isnan(pairs.sent[got]), np.inf, pairs.sent[got])
    met = (pairs.send >= 0) & (pairs.recv >= 0) & sends[pairs.send]
    until[pairs.send[met]] = ops.start[pairs.recv[met]]
    until[tied] = last[pairs.tie[tied]]
    waited = np.maximum(0, np.minimum(until, most) - ops.start)
    return np.where(ops.scheduled, 0.0, waited)


def critical_path(columns: Columns, waited: Floats) -> list[int]:
    """The chain of operations that made the run last so long, from its end back.

    An operation that waited is explained by the last to arrive, any other by what its rank
    did before.
    """
    ops = columns.ops
    if not len(ops):
        return []
    end, told = np.where(ops.ended, ops.end, math.inf), ~_around(columns)
    order = np.lexsort((end, ops.rank))
    order = order[told[order]]
    edges = np.flatnonzero(np.diff(ops.rank[order], prepend=-1, append=-1))
    lanes = {
        int(ops.rank[order[a]]): (end[order[a:b]].tolist(), order[a:b].tolist())
        for a, b in pairwise(edges.tolist())
    }
    start, rank, blamed = ops.start.tolist(), ops.rank.tolist(), _blamed(columns).tolist()
    slow = (waited > SOON).tolist()
    path: dict[int, None] = {}
    final = np.where(ops.ended, ops.end, columns.frame["end"])
    at = int(np.where(told, final, -math.inf).argmax())
    while at >= 0 and at not in path:
        path[at] = None
        if slow[at] and blamed[at] >= 0:
            if blamed[at] in path:
                break
            path[at := blamed[at]] = None
        ends, found = lanes[rank[at]]
        n = bisect_right(ends, start[at] + SOON)
        while n and found[n - 1] in path:  # what takes no time ends when it starts
            n -= 1
        at = found[n - 1] if n else -1
    return list(path)


def _around(columns: Columns) -> Bools:
    """True if an operation is a mark around communication: it explains nothing that they do not."""
    ops, found = columns.ops, np.zeros(len(columns.ops), bool)
    for rank in np.unique(ops.rank[ops.mark]):
        mine = np.flatnonzero(ops.rank == rank)
        marks, talk = mine[ops.mark[mine]], np.sort(ops.start[mine[~ops.mark[mine]]])
        later = np.append(talk, math.inf)[np.searchsorted(talk, ops.start[marks])]
        found[marks] = later < np.where(ops.ended[marks], ops.end[marks], math.inf)
    return found


def _blamed(columns: Columns) -> Ints:
    """The operation that each one waited for, -1: none."""
    ops, pairs = columns.ops, columns.pairs
    found = np.full(len(ops), -1)
    found[pairs.send[pairs.send >= 0]] = pairs.recv[pairs.send >= 0]
    whole = (pairs.send >= 0) & (pairs.recv >= 0)
    found[pairs.recv[whole]] = pairs.send[whole]
    tied = np.flatnonzero(pairs.tie >= 0)
    by_start = tied[np.argsort(-ops.start[tied], kind="stable")]
    ties, first = np.unique(pairs.tie[by_start], return_index=True)
    latest = np.full(len(pairs.ties), -1)
    latest[ties] = by_start[first]
    found[tied] = latest[pairs.tie[tied]]
    return found


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
