"""How long each rank waited for others, and the chain of operations that made a run so long. Pure.

A rank *waits* in an operation from when it does nothing else until the last rank that the operation
needs has arrived. It does something else as long as it makes other calls or is in computation that
is marked. Ranks that have finished do not wait: the barrier at the end, after which nobody
computes or sends, is part of no rank's communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from distkit.events import Op
from distkit.trace.columns import Bools, Floats, Ints
from distkit.trace.matching import Operations, Pairs

#: Clocks are no finer [s].
SOON = 1e-9
#: An operation that ends so soon after another of its rank, as a part of its own time, ended since
#: the rank asked for it only then: the ``wait()`` of an ``isend`` often comes last.
LATE = 0.1


@dataclass(frozen=True)
class Causes:
    """Who waited and what a run's length comes from; operations by their numbers.

    ``since`` and ``waited`` [s] have one element per operation. ``over`` marks the barrier at the
    end. ``path`` is the critical path, from its end back, without the operations that waited for
    one of it: those are ``via``.
    """

    since: Floats
    waited: Floats
    over: Bools
    path: list[int]
    via: list[int]


def unknown(operations: int) -> Causes:
    """Nothing known of so many operations."""
    none = np.zeros(operations)
    return Causes(none, none, none.astype(bool), [], [])


def causes(ops: Operations, pairs: Pairs, end: float, runs: int = 1) -> Causes:
    """Look through a whole trace that ends then [s].

    Of several runs, with the n-th on the ranks that leave n when divided by ``runs``, ``path`` has
    one critical path after the other.
    """
    if not len(ops):
        return unknown(0)
    final = np.where(ops.ended, ops.end, end)
    since = np.fmax(_last_active(ops, final), ops.blocked)
    waited = np.maximum(0, np.minimum(_arrival(ops, pairs), final) - since)
    waited[ops.scheduled] = 0
    paths = _critical(ops, pairs, since, waited, final, runs)
    return Causes(since, waited, _over(ops, pairs), *paths)


def _lanes(rank: Ints) -> list[tuple[int, slice]]:
    """Each rank, and its part of arrays that are sorted by rank."""
    ranks, first = np.unique(rank, return_index=True)
    ends = [*first[1:].tolist(), len(rank)]
    return [(r, slice(a, b)) for r, a, b in zip(ranks.tolist(), first.tolist(), ends, strict=True)]


def _last_active(ops: Operations, final: Floats) -> Floats:
    """When the rank of each operation was last seen doing anything else, or called it."""
    marked = ops.mark & ops.ended
    rank = np.concatenate([ops.rank, ops.rank[marked]])
    time = np.concatenate([ops.start, ops.end[marked]])
    computes = np.append(ops.mark, np.zeros(int(marked.sum()), bool))  # from then on
    order = np.lexsort((time, rank))
    rank, time, computes = rank[order], time[order], computes[order]
    found, active = ops.start.copy(), dict(_lanes(rank))
    for r, mine in _lanes(ops.rank):
        lane, start, end = active[r], ops.start[mine], final[mine]
        last = lane.start + np.maximum(np.searchsorted(time[lane], end) - 1, 0)
        meanwhile = time[last] > start
        found[mine] = np.where(meanwhile, np.where(computes[last], end, time[last]), start)
    return np.where(ops.mark, ops.start, found)


def _arrival(ops: Operations, pairs: Pairs) -> Floats:
    """When the last rank that each operation needs has arrived; infinity: never."""
    until = np.full(len(ops), -np.inf)
    tied = pairs.tie >= 0
    last = np.full(pairs.ties, -np.inf)
    np.maximum.at(last, pairs.tie[tied], ops.start[tied])
    # a pull waits for its answer
    sends, receives = ops.among([Op.SEND]), ops.among([Op.RECV, Op.PULL])
    got = (pairs.recv >= 0) & receives[pairs.recv]
    until[pairs.recv[got]] = np.where(np.isnan(pairs.sent[got]), np.inf, pairs.sent[got])
    met = (pairs.send >= 0) & (pairs.recv >= 0) & sends[pairs.send]
    until[pairs.send[met]] = ops.start[pairs.recv[met]]
    until[tied] = last[pairs.tie[tied]]
    return until


def _over(ops: Operations, pairs: Pairs) -> Bools:
    """The barriers after which no member does anything but read and meet again."""
    barrier = ops.among([Op.BARRIER]) & (pairs.tie >= 0)
    work = ~ops.among([Op.BARRIER, Op.PULL])
    last = np.full(int(ops.rank.max()) + 1, -np.inf)
    np.maximum.at(last, ops.rank[work], ops.start[work])
    late = ops.start > last[ops.rank]
    ended = np.ones(pairs.ties + 1, bool)
    ended[pairs.tie[~(barrier & late)]] = False  # the last place is for those without a tie
    return barrier & ended[pairs.tie]


# -- the critical path ---------------------------------------------------------------


def _critical(
    ops: Operations, pairs: Pairs, since: Floats, waited: Floats, final: Floats, runs: int
) -> tuple[list[int], list[int]]:
    """The critical path: an operation that waited is explained by the last to arrive.

    What a server does is explained by the request that made it do so; any other operation by what
    its rank did before, and by marks meanwhile.
    """
    around, blamed, prompt = _around(ops), _blamed(ops, pairs), _prompts(ops, pairs)
    lanes = {r: _Lane(ops, mine, around, final) for r, mine in _lanes(ops.rank)}
    path: dict[int, None] = {}
    via: dict[int, None] = {}

    arrived = np.where(waited > SOON, since + waited, math.inf)

    def begun(at: int) -> tuple[int, bool]:
        return lanes[ops.rank[at]].begun(ops.start[at], final[at], arrived[at])

    for run in range(runs):
        ends = np.where(~around & (ops.rank % runs == run), final, -math.inf)
        at = int(ends.argmax()) if ends.max() > -math.inf else -1
        while at >= 0 and at not in path:
            if begun(at)[1] and blamed[at] >= 0:
                via[at] = None
                at = int(blamed[at])
                if at in path or at in via:
                    break
            path[at] = None
            if prompt[at] >= 0:
                via[int(prompt[at])] = None
                at = int(blamed[prompt[at]])
                if at in path:
                    break
                if at not in via:
                    path[at] = None
            lane, (n, _) = lanes[ops.rank[at]], begun(at)
            while n and (lane.told[n - 1] in path or lane.told[n - 1] in via):
                n -= 1  # what takes no time ends when it starts
            later, at = at, int(lane.told[n - 1]) if n else -1
            mark = lane.mark_before(ops.start[later], final[at] if at >= 0 else -math.inf)
            if mark is not None:
                path[mark] = None
    return list(path), list(via)


class _Lane:
    """What a rank did: the operations in the order of their ends, and the marks around them."""

    def __init__(self, ops: Operations, mine: slice, around: Bools, final: Floats) -> None:
        all_ = np.arange(mine.start, mine.stop)
        ends = np.where(ops.ended[mine], ops.end[mine], math.inf)
        self.told = all_[np.argsort(ends, kind="stable")]
        self.told = self.told[~around[self.told]]
        self.ends = np.where(ops.ended[self.told], ops.end[self.told], math.inf)
        marks = all_[around[mine]]
        self._marks = marks[np.argsort(ops.start[marks], kind="stable")]
        self._begins, self._ends = ops.start[self._marks], final[self._marks]

    def begun(self, start: float, end: float, arrived: float) -> tuple[int, bool]:
        """How many operations ended before one began, and True if it waited.

        Args:
            start: of the operation [s].
            end: of the operation [s].
            arrived: when the last rank had arrived for which it waited, infinity if it did not.
        """
        before = int(np.searchsorted(self.ends, start + SOON, "right"))
        sooner = int(np.searchsorted(self.ends, end))
        freed = self.ends[sooner - 1] if sooner else -math.inf
        late = freed > max(start, arrived) + SOON and end - freed <= LATE * (end - start)
        return (sooner, False) if late else (before, arrived < math.inf)

    def mark_before(self, start: float, since: float) -> int | None:
        """The last mark that began before ``start``, if it went on later than ``since`` [s]."""
        n = int(np.searchsorted(self._begins, start)) - 1
        return int(self._marks[n]) if n >= 0 and self._ends[n] > since + SOON else None


def _prompts(ops: Operations, pairs: Pairs) -> Ints:
    """The request on which a server did each operation, -1: it is no server's, or nobody asked.

    It is the latest request that changed anything, such as a push, or for the answer to a pull
    that pull, if it came later.
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


def _around(ops: Operations) -> Bools:
    """True if an operation is a mark around communication: it explains nothing that they do not."""
    final, found = np.where(ops.ended, ops.end, math.inf), np.zeros(len(ops), bool)
    for _, mine in _lanes(ops.rank):
        mark, start = ops.mark[mine], ops.start[mine]
        talk = np.append(np.sort(start[~mark]), math.inf)
        found[mine] = mark & (talk[np.searchsorted(talk, start)] < final[mine])
    return found


def _blamed(ops: Operations, pairs: Pairs) -> Ints:
    """The operation that each one waited for, -1: none."""
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
