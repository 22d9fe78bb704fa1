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
    told = ~_around(ops)
    if not told.any():
        return [], []
    arrived = np.where(waited > SOON, since + waited, math.inf)
    flat, first, before, late = _order_of_ends(ops, told, arrived, final)
    slow, blamed = ((waited > SOON) & ~late).tolist(), _blamed(ops, pairs).tolist()
    prompt, marked = _prompts(ops, pairs).tolist(), _Marked(ops, final, ~told)
    path: dict[int, None] = {}
    via: dict[int, None] = {}
    for run in range(runs):
        ends = np.where(told & (ops.rank % runs == run), final, -math.inf)
        at = int(ends.argmax()) if ends.max() > -math.inf else -1
        while at >= 0 and at not in path:
            if slow[at] and blamed[at] >= 0:
                via[at] = None
                at = blamed[at]
                if at in path or at in via:
                    break
            path[at] = None
            if prompt[at] >= 0:
                via[prompt[at]] = None
                at = blamed[prompt[at]]
                if at in path:
                    break
                if at not in via:
                    path[at] = None
            n = before[at]
            while n > first[at] and (flat[n - 1] in path or flat[n - 1] in via):
                n -= 1  # what takes no time ends when it starts
            later, at = at, flat[n - 1] if n > first[at] else -1
            if (mark := marked.before(later, final[at] if at >= 0 else -math.inf)) is not None:
                path[mark] = None
    return list(path), list(via)


def _prompts(ops: Operations, pairs: Pairs) -> Ints:
    """The request on which a server did each operation, -1: it is no server's, or nobody asked.

    It is the latest request that changed anything, such as a push, or for the answer to a pull
    that pull, if it came later.
    """
    whole = np.flatnonzero((pairs.send >= 0) & (pairs.recv >= 0))
    asks = whole[~ops.among([Op.SEND])[pairs.send[whole]]]
    own = np.full(len(ops) + 1, -1)  # where the request of each operation arrived; the last: none
    own[pairs.send[asks]] = pairs.recv[asks]
    answered = np.full(len(ops), -1)
    answered[pairs.send[whole]] = own[pairs.recv[whole]]
    found = np.full(len(ops), -1)
    changes = pairs.recv[asks[~ops.among([Op.PULL])[pairs.send[asks]]]]
    for server in np.unique(ops.rank[pairs.recv[asks]]):
        mine = np.flatnonzero(ops.rank == server)
        came = np.sort(changes[ops.rank[changes] == server])
        came = came[np.argsort(ops.start[came], kind="stable")]
        last = np.searchsorted(ops.start[came], ops.start[mine], "right") - 1
        found[mine] = np.where(last >= 0, np.append(came, -1)[last], -1)
    later = (answered >= 0) & ((found < 0) | (ops.start[answered] > ops.start[found]))
    found[later] = answered[later]
    return found


class _Marked:
    """The marks around communication, by their ranks."""

    def __init__(self, ops: Operations, final: Floats, around: Bools) -> None:
        self._ops, self._final = ops, final
        self._of: dict[int, Ints] = {}
        for rank in np.unique(ops.rank[around]).tolist():
            mine = np.flatnonzero(around & (ops.rank == rank))
            self._of[rank] = mine[np.argsort(ops.start[mine], kind="stable")]

    def before(self, operation: int, since: float) -> int | None:
        """The last one that began before an operation, if it went on later than ``since`` [s]."""
        marks = self._of.get(int(self._ops.rank[operation]))
        if marks is None:
            return None
        n = int(np.searchsorted(self._ops.start[marks], self._ops.start[operation]))
        return int(marks[n - 1]) if n and self._final[marks[n - 1]] > since + SOON else None


def _order_of_ends(
    ops: Operations, told: Bools, arrived: Floats, final: Floats
) -> tuple[list[int], list[int], list[int], Bools]:
    """The told operations, rank by rank in the order of their ends.

    And for each operation: where its rank's begin, and where those begin that had not ended when
    it started, or, True in the last array, when its rank asked for it late.
    """
    end = np.where(ops.ended, ops.end, math.inf)
    order = np.lexsort((end, ops.rank))
    order = order[told[order]]
    first, before = np.zeros((2, len(ops)), np.int64)
    late = np.zeros(len(ops), bool)
    told_of = dict(_lanes(ops.rank[order]))
    for r, mine in _lanes(ops.rank):
        lane = told_of.get(r, slice(0, 0))
        ends, start = end[order[lane]], ops.start[mine]
        sooner = np.searchsorted(ends, final[mine])  # what ended before it did
        freed = np.append(ends, -math.inf)[sooner - 1]  # the last place: nothing did
        late[mine] = (freed > np.maximum(start, arrived[mine]) + SOON) & (
            final[mine] - freed <= LATE * (final[mine] - start)
        )
        since = np.searchsorted(ends, start + SOON, "right")
        first[mine], before[mine] = lane.start, lane.start + np.where(late[mine], sooner, since)
    return order.tolist(), first.tolist(), before.tolist(), late


def _around(ops: Operations) -> Bools:
    """True if an operation is a mark around communication: it explains nothing that they do not."""
    found = np.zeros(len(ops), bool)
    for rank in np.unique(ops.rank[ops.mark]):
        mine = np.flatnonzero(ops.rank == rank)
        marks, talk = mine[ops.mark[mine]], np.sort(ops.start[mine[~ops.mark[mine]]])
        later = np.append(talk, math.inf)[np.searchsorted(talk, ops.start[marks])]
        found[marks] = later < np.where(ops.ended[marks], ops.end[marks], math.inf)
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
