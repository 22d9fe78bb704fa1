"""Computes how long each rank waited for others, and the critical path of a run. Pure.

A rank *waits* in an operation from the end of its other activity until the last rank that the
operation needs has arrived. Other calls and marked computation are other activity. Finished ranks
do not wait: the final barrier, after which no rank computes or sends, is not communication.
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
#: If an operation ends within this fraction of its duration after another operation of its rank, it
#: ended because the rank waited for it only then, as with a late ``wait()`` of an ``isend``.
LATE_WAIT = 0.1


@dataclass(frozen=True)
class Causes:
    """Waits and critical path of a run, by operation index.

    ``since`` and ``waited`` [s] have one element per operation. ``over`` marks the final barrier.
    ``path`` is the critical path, from its end back, without the operations that waited for one on
    the path, which are in ``via``.
    """

    since: Floats
    waited: Floats
    over: Bools
    path: list[int]
    via: list[int]


def unknown(operations: int) -> Causes:
    """Return empty causes for this number of operations."""
    none = np.zeros(operations)
    return Causes(none, none, none.astype(bool), [], [])


def causes(ops: Operations, pairs: Pairs, end: float, runs: int = 1) -> Causes:
    """Analyse a complete trace that ends at ``end`` [s].

    With several runs, run n has the ranks r with r mod ``runs`` = n, and ``path`` concatenates
    their critical paths.
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
    """Return each rank, with its slice of arrays sorted by rank."""
    ranks, first = np.unique(rank, return_index=True)
    ends = [*first[1:].tolist(), len(rank)]
    return [(r, slice(a, b)) for r, a, b in zip(ranks.tolist(), first.tolist(), ends, strict=True)]


def _last_active(ops: Operations, final: Floats) -> Floats:
    """Return when the rank of each operation last did anything else, or called it."""
    marked = ops.mark & ops.ended
    rank = np.concatenate([ops.rank, ops.rank[marked]])
    time = np.concatenate([ops.start, ops.end[marked]])
    computes = np.append(ops.mark, np.zeros(int(marked.sum()), bool))  # from then on
    order = np.lexsort((time, rank))
    rank, time, computes = rank[order], time[order], computes[order]
    found, active = ops.start.copy(), dict(_lanes(rank))
    for r, part in _lanes(ops.rank):
        lane, start, end = active[r], ops.start[part], final[part]
        last = lane.start + np.maximum(np.searchsorted(time[lane], end) - 1, 0)
        meanwhile = time[last] > start
        found[part] = np.where(meanwhile, np.where(computes[last], end, time[last]), start)
    return np.where(ops.mark, ops.start, found)


def _arrival(ops: Operations, pairs: Pairs) -> Floats:
    """Return when the last rank that each operation needs has arrived; infinity if never."""
    until = np.full(len(ops), -np.inf)
    tied = pairs.tie >= 0
    last = np.full(pairs.ties, -np.inf)
    np.maximum.at(last, pairs.tie[tied], ops.start[tied])
    # a pull waits for its reply, a registration for that of all nodes
    sends, receives = ops.among([Op.SEND]), ops.among([Op.RECV, Op.PULL, Op.REGISTER])
    got = (pairs.recv >= 0) & receives[pairs.recv]
    until[pairs.recv[got]] = np.where(np.isnan(pairs.sent[got]), np.inf, pairs.sent[got])
    met = (pairs.send >= 0) & (pairs.recv >= 0) & sends[pairs.send]
    until[pairs.send[met]] = ops.start[pairs.recv[met]]
    until[tied] = last[pairs.tie[tied]]
    return until


def _final_barriers(ops: Operations, pairs: Pairs) -> Bools:
    """Return the barriers after which members only pull or enter further barriers."""
    barrier = ops.among([Op.BARRIER]) & (pairs.tie >= 0)
    work = ~ops.among([Op.BARRIER, Op.PULL])
    last = np.full(int(ops.rank.max()) + 1, -np.inf)
    np.maximum.at(last, ops.rank[work], ops.start[work])
    late = ops.start > last[ops.rank]
    ended = np.ones(pairs.ties + 1, bool)
    ended[pairs.tie[~(barrier & late)]] = False  # the last element is for operations without a tie
    return barrier & ended[pairs.tie]


# -- the critical path ---------------------------------------------------------------


def _critical(
    ops: Operations, pairs: Pairs, since: Floats, waited: Floats, final: Floats, runs: int
) -> tuple[list[int], list[int]]:
    """Return the critical path: the cause of a wait is the last operation to arrive.

    The cause of a server's operation is its request; the cause of any other operation is the
    previous operation of its rank, with the marks in between.
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

    def begun(at: int) -> tuple[int, bool]:
        return lanes[ops.rank[at]].begun(ops.start[at], final[at], arrived[at])

    for run in range(runs):
        ends = np.where(~enclosing & (ops.rank % runs == run), final, -math.inf)
        at = int(ends.argmax()) if ends.max() > -math.inf else -1
        while at >= 0 and at not in path:
            if begun(at)[1] and waited_for[at] >= 0:
                via[at] = None
                at = int(waited_for[at])
                if at in path or at in via:
                    break
            path[at] = None
            if request[at] >= 0:
                via[int(request[at])] = None
                at = int(waited_for[request[at]])
                if at in path:
                    break
                if at not in via:
                    path[at] = None
            lane, (n, _) = lanes[ops.rank[at]], begun(at)
            while n and (lane.by_end[n - 1] in path or lane.by_end[n - 1] in via):
                n -= 1  # operations without duration end when they start
            later, at = at, int(lane.by_end[n - 1]) if n else -1
            mark = lane.mark_before(ops.start[later], final[at] if at >= 0 else -math.inf)
            if mark is not None:
                path[mark] = None
    return list(path), list(via)


class _Lane:
    """Operations of a rank ordered by end, and the marks around them."""

    def __init__(self, ops: Operations, part: slice, enclosing: Bools, final: Floats) -> None:
        all_ = np.arange(part.start, part.stop)
        ends = np.where(ops.ended[part], ops.end[part], math.inf)
        self.by_end = all_[np.argsort(ends, kind="stable")]
        self.by_end = self.by_end[~enclosing[self.by_end]]
        self.ends = np.where(ops.ended[self.by_end], ops.end[self.by_end], math.inf)
        marks = all_[enclosing[part]]
        self._marks = marks[np.argsort(ops.start[marks], kind="stable")]
        self._begins, self._ends = ops.start[self._marks], final[self._marks]

    def begun(self, start: float, end: float, arrived: float) -> tuple[int, bool]:
        """Return how many operations ended before an operation began, and whether it waited.

        Args:
            start: start of the operation [s].
            end: end of the operation [s].
            arrived: when the last awaited rank had arrived, infinity if it did not wait.
        """
        before = int(np.searchsorted(self.ends, start + CLOCK_RESOLUTION, "right"))
        before_end = int(np.searchsorted(self.ends, end))
        last_end = self.ends[before_end - 1] if before_end else -math.inf
        late = last_end > max(start, arrived) + CLOCK_RESOLUTION and end - last_end <= LATE_WAIT * (
            end - start
        )
        return (before_end, False) if late else (before, arrived < math.inf)

    def mark_before(self, start: float, since: float) -> int | None:
        """Return the last mark that began before ``start``, if it ended after ``since`` [s]."""
        n = int(np.searchsorted(self._begins, start)) - 1
        return int(self._marks[n]) if n >= 0 and self._ends[n] > since + CLOCK_RESOLUTION else None


def _requests(ops: Operations, pairs: Pairs) -> Ints:
    """Return the request that caused each operation of a server, -1 if none.

    It is the latest request that changed state, such as a push; for the reply to a later pull it
    is that pull.
    """
    whole = np.flatnonzero((pairs.send >= 0) & (pairs.recv >= 0))
    asks = whole[~ops.among([Op.SEND])[pairs.send[whole]]]
    arrived = np.full(len(ops), -1)
    arrived[pairs.send[asks]] = pairs.recv[asks]
    answered = np.full(len(ops), -1)
    answered[pairs.send[whole]] = arrived[pairs.recv[whole]]
    changes = np.zeros(len(ops), bool)
    changes[pairs.recv[asks[~ops.among([Op.PULL])[pairs.send[asks]]]]] = True
    order = np.lexsort((~changes, ops.start, ops.rank))
    last = np.maximum.accumulate(np.where(changes[order], np.arange(len(ops)), -1))
    found = np.full(len(ops), -1)
    found[order] = np.where(last >= 0, order[last], -1)
    found[ops.rank[found] != ops.rank] = -1
    later = (answered >= 0) & ((found < 0) | (ops.start[answered] > ops.start[found]))
    found[later] = answered[later]
    return found


def _enclosing_marks(ops: Operations) -> Bools:
    """Mark operations that are marks around communication, which explain nothing by themselves."""
    final, found = np.where(ops.ended, ops.end, math.inf), np.zeros(len(ops), bool)
    for _, part in _lanes(ops.rank):
        mark, start = ops.mark[part], ops.start[part]
        talk = np.append(np.sort(start[~mark]), math.inf)
        found[part] = mark & (talk[np.searchsorted(talk, start)] < final[part])
    return found


def _waited_for(ops: Operations, pairs: Pairs) -> Ints:
    """Return the operation that each operation waited for, -1 if none."""
    found = np.full(len(ops), -1)
    found[pairs.send[pairs.send >= 0]] = pairs.recv[pairs.send >= 0]
    whole = (pairs.send >= 0) & (pairs.recv >= 0)
    found[pairs.recv[whole]] = pairs.send[whole]
    tied = np.flatnonzero(pairs.tie >= 0)
    by_start = tied[np.argsort(-ops.start[tied], kind="stable")]
    ties, first = np.unique(pairs.tie[by_start], return_index=True)
    latest = np.full(pairs.ties, -1)
    latest[ties] = by_start[first]
    found[tied] = latest[pairs.tie[tied]]
    return found
