"""Computes how long each rank waited for others, and the critical path of a run. Pure.

A rank *waits* in an operation from the end of its other activity, which is calls and marked
computation, until the last rank that the operation needs has arrived. Finished ranks do not wait:
the final barrier, after which no rank computes or sends, does not count as communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distkit.events import Op
from distkit.trace.columns import Bools, Floats, Ints
from distkit.trace.matching import Operations, Pairs

#: Resolution of clocks [s].
CLOCK_RESOLUTION = 1e-9
#: An operation that ends within this fraction of its duration after another one of its rank ended
#: because the rank called ``wait()`` late, for example for an ``isend``.
LATE_WAIT = 0.1


@dataclass(frozen=True)
class Causes:
    """The waits and the critical path of a run, as operation indices.

    ``since`` and ``waited`` [s] have one element per operation. ``over`` marks the final barrier.
    ``path`` is the critical path, in reverse. ``via`` has the operations that waited for one on
    the path.
    """

    since: Floats
    waited: Floats
    over: Bools
    path: list[int]
    via: list[int]


def unknown(operations: int) -> Causes:
    """Return causes without waits and path for a number of operations."""
    none = np.zeros(operations)
    return Causes(none, none, none.astype(bool), [], [])


def causes(ops: Operations, pairs: Pairs, end: float, runs: int = 1) -> Causes:
    """Analyse a complete trace that ends at ``end`` [s].

    With several runs, rank r belongs to run r mod ``runs``, and ``path`` concatenates the
    critical paths of the runs.
    """
    if not len(ops):
        return unknown(0)
    final = np.where(ops.ended, ops.end, end)
    since = np.fmax(_last_active(ops, final), ops.blocked)
    waited = np.maximum(0, np.minimum(_arrival(ops, pairs), final) - since)
    waited[ops.scheduled] = 0
    paths = _critical(ops, pairs, since, waited, final, runs)
    return Causes(since, waited, _final_barriers(ops, pairs), *paths)


def _lanes(rank: Ints) -> list[tuple[int, slice]]:
    """Return each rank and its slice of arrays that are sorted by rank."""
    ranks, first = np.unique(rank, return_index=True)
    ends = [*first[1:].tolist(), len(rank)]
    return [(r, slice(a, b)) for r, a, b in zip(ranks.tolist(), first.tolist(), ends, strict=True)]


def _last_active(ops: Operations, final: Floats) -> Floats:
    """Return when the rank of each operation was last active elsewhere, or called it."""
    marked = ops.mark & ops.ended
    rank = np.concatenate([ops.rank, ops.rank[marked]])
    time = np.concatenate([ops.start, ops.end[marked]])
    computes = np.append(ops.mark, np.zeros(int(marked.sum()), bool))  # from this time on
    order = np.lexsort((time, rank))
    rank, time, computes = rank[order], time[order], computes[order]
    last_active, active = ops.start.copy(), dict(_lanes(rank))
    for r, part in _lanes(ops.rank):
        lane, start, end = active[r], ops.start[part], final[part]
        last = lane.start + np.maximum(np.searchsorted(time[lane], end) - 1, 0)
        meanwhile = time[last] > start
        last_active[part] = np.where(meanwhile, np.where(computes[last], end, time[last]), start)
    return np.where(ops.mark, ops.start, last_active)


def _arrival(ops: Operations, pairs: Pairs) -> Floats:
    """Return when the last rank that each operation needs has arrived; infinity if never."""
    arrival = np.full(len(ops), -np.inf)
    tied = pairs.tie >= 0
    last = np.full(pairs.ties, -np.inf)
    np.maximum.at(last, pairs.tie[tied], ops.start[tied])
    # a pull waits for its reply, a registration for all nodes
    sends, receives = ops.among([Op.SEND]), ops.among([Op.RECV, Op.PULL, Op.REGISTER])
    received = (pairs.recv >= 0) & receives[pairs.recv]
    arrival[pairs.recv[received]] = np.where(
        np.isnan(pairs.sent[received]), np.inf, pairs.sent[received]
    )
    rendezvous = (pairs.send >= 0) & (pairs.recv >= 0) & sends[pairs.send]
    arrival[pairs.send[rendezvous]] = ops.start[pairs.recv[rendezvous]]
    arrival[tied] = last[pairs.tie[tied]]
    return arrival


def _final_barriers(ops: Operations, pairs: Pairs) -> Bools:
    """Mark the barriers after which members only pull or enter further barriers."""
    barrier = ops.among([Op.BARRIER]) & (pairs.tie >= 0)
    work = ~ops.among([Op.BARRIER, Op.PULL])
    last = np.full(int(ops.rank.max()) + 1, -np.inf)
    np.maximum.at(last, ops.rank[work], ops.start[work])
    late = ops.start > last[ops.rank]
    ended = np.ones(pairs.ties + 1, bool)
    ended[pairs.tie[~(barrier & late)]] = False  # index -1 is for operations without a tie
    return barrier & ended[pairs.tie]


# -- the critical path ---------------------------------------------------------------


def _critical(
    ops: Operations, pairs: Pairs, since: Floats, waited: Floats, final: Floats, runs: int
) -> tuple[list[int], list[int]]:
    """Return the critical path, and the operations that waited for one on it.

    A wait is caused by the last operation to arrive, a server's operation by its request, and any
    other operation by the previous one of its rank, with the marks in between.
    """
    enclosing, waited_for, request = (
        _enclosing_marks(ops),
        _waited_for(ops, pairs),
        _requests(ops, pairs),
    )
    lanes = {r: _Lane(ops, part, enclosing, final) for r, part in _lanes(ops.rank)}
    path: dict[int, None] = {}
    via: dict[int, None] = {}

    arrived = np.where(waited > CLOCK_RESOLUTION, since + waited, math.inf)

    def begun(index: int) -> tuple[int, bool]:
        return lanes[ops.rank[index]].begun(ops.start[index], final[index], arrived[index])

    for run in range(runs):
        ends = np.where(~enclosing & (ops.rank % runs == run), final, -math.inf)
        index = int(ends.argmax()) if ends.max() > -math.inf else -1
        while index >= 0 and index not in path:
            if begun(index)[1] and waited_for[index] >= 0:
                via[index] = None
                index = int(waited_for[index])
                if index in path or index in via:
                    break
            path[index] = None
            if request[index] >= 0:
                via[int(request[index])] = None
                index = int(waited_for[request[index]])
                if index in path:
                    break
                if index not in via:
                    path[index] = None
            lane, (n, _) = lanes[ops.rank[index]], begun(index)
            while n and (lane.by_end[n - 1] in path or lane.by_end[n - 1] in via):
                n -= 1  # operations without duration end at their start
            later, index = index, int(lane.by_end[n - 1]) if n else -1
            mark = lane.mark_before(ops.start[later], final[index] if index >= 0 else -math.inf)
            if mark is not None:
                path[mark] = None
    return list(path), list(via)


class _Lane:
    """Operations of a rank ordered by end, and the marks around them."""

    def __init__(self, ops: Operations, part: slice, enclosing: Bools, final: Floats) -> None:
        indices = np.arange(part.start, part.stop)
        ends = np.where(ops.ended[part], ops.end[part], math.inf)
        self.by_end = indices[np.argsort(ends, kind="stable")]
        self.by_end = self.by_end[~enclosing[self.by_end]]
        self.ends = np.where(ops.ended[self.by_end], ops.end[self.by_end], math.inf)
        marks = indices[enclosing[part]]
        self._marks = marks[np.argsort(ops.start[marks], kind="stable")]
        self._begins, self._ends = ops.start[self._marks], final[self._marks]

    def begun(self, start: float, end: float, arrived: float) -> tuple[int, bool]:
        """Return the number of operations that ended before one began, and whether it waited.

        Args:
            start: start of the operation [s].
            end: end of the operation [s].
            arrived: when the last awaited rank arrived, infinity if it did not wait.
        """
        before = int(np.searchsorted(self.ends, start + CLOCK_RESOLUTION, "right"))
        before_end = int(np.searchsorted(self.ends, end))
        last_end = self.ends[before_end - 1] if before_end else -math.inf
        late = last_end > max(start, arrived) + CLOCK_RESOLUTION and end - last_end <= LATE_WAIT * (
            end - start
        )
        return (before_end, False) if late else (before, arrived < math.inf)

    def mark_before(self, start: float, since: float) -> int | None:
        """Return the last mark before ``start`` if it ended after ``since`` [s], else None."""
        n = int(np.searchsorted(self._begins, start)) - 1
        return int(self._marks[n]) if n >= 0 and self._ends[n] > since + CLOCK_RESOLUTION else None


def _requests(ops: Operations, pairs: Pairs) -> Ints:
    """Return the request that caused each operation of a server, -1 if none.

    This is the latest request that changed state, such as a push. The reply to a later pull is
    caused by that pull.
    """
    complete = np.flatnonzero((pairs.send >= 0) & (pairs.recv >= 0))
    requests = complete[~ops.among([Op.SEND])[pairs.send[complete]]]
    arrived = np.full(len(ops), -1)
    arrived[pairs.send[requests]] = pairs.recv[requests]
    answered = np.full(len(ops), -1)
    answered[pairs.send[complete]] = arrived[pairs.recv[complete]]
    changes = np.zeros(len(ops), bool)
    changes[pairs.recv[requests[~ops.among([Op.PULL])[pairs.send[requests]]]]] = True
    order = np.lexsort((~changes, ops.start, ops.rank))
    latest = np.maximum.accumulate(np.where(changes[order], np.arange(len(ops)), -1))
    request = np.full(len(ops), -1)
    request[order] = np.where(latest >= 0, order[latest], -1)
    request[ops.rank[request] != ops.rank] = -1
    later = (answered >= 0) & ((request < 0) | (ops.start[answered] > ops.start[request]))
    request[later] = answered[later]
    return request


def _enclosing_marks(ops: Operations) -> Bools:
    """Mark the marks that enclose communication, which are not a cause."""
    final, enclosing = np.where(ops.ended, ops.end, math.inf), np.zeros(len(ops), bool)
    for _, part in _lanes(ops.rank):
        mark, start = ops.mark[part], ops.start[part]
        calls = np.append(np.sort(start[~mark]), math.inf)
        enclosing[part] = mark & (calls[np.searchsorted(calls, start)] < final[part])
    return enclosing


def _waited_for(ops: Operations, pairs: Pairs) -> Ints:
    """Return the operation that each operation waited for, -1 if none."""
    waited_for = np.full(len(ops), -1)
    waited_for[pairs.send[pairs.send >= 0]] = pairs.recv[pairs.send >= 0]
    complete = (pairs.send >= 0) & (pairs.recv >= 0)
    waited_for[pairs.recv[complete]] = pairs.send[complete]
    tied = np.flatnonzero(pairs.tie >= 0)
    by_start = tied[np.argsort(-ops.start[tied], kind="stable")]
    ties, first = np.unique(pairs.tie[by_start], return_index=True)
    latest = np.full(pairs.ties, -1)
    latest[ties] = by_start[first]
    waited_for[tied] = latest[pairs.tie[tied]]
    return waited_for
