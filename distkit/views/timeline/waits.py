"""Computes how long each rank waited for others. No side effects.

A rank *waits* in an operation from the end of its other activity (calls and marked computation)
until the last rank that the operation needs has arrived. Finished ranks do not wait: the final
barrier, after which no rank computes or sends, does not count as communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkit.events import Op
from distkit.trace.columns import Bools, Floats, Ints
from distkit.trace.matching import Operations, Pairs


@dataclass(frozen=True)
class Waits:
    """The waits of a run, with one element per operation.

    ``since`` is the start of the wait and ``waited`` its duration [s]. ``is_final`` marks the final
    barrier.
    """

    since: Floats
    waited: Floats
    is_final: Bools


def compute_waits(ops: Operations, pairs: Pairs, end: float) -> Waits:
    """Return the waits of a complete trace that ends at ``end`` [s]."""
    final = np.where(ops.ended, ops.end, end)
    since = np.fmax(_last_active(ops, final), ops.blocked)
    waited = np.maximum(0, np.minimum(_arrival(ops, pairs), final) - since)
    waited[ops.scheduled] = 0
    return Waits(since, waited, _final_barriers(ops, pairs))


def _lanes(rank: Ints) -> list[tuple[int, slice]]:
    """Return each rank and its slice of arrays that are sorted by rank."""
    ranks = np.unique(rank)
    ends = (np.searchsorted(rank, ranks, side).tolist() for side in ("left", "right"))
    return [(r, slice(a, b)) for r, a, b in zip(ranks.tolist(), *ends, strict=True)]


def _last_active(ops: Operations, final: Floats) -> Floats:
    """Return when each operation's rank was last active elsewhere, or called the operation."""
    marked = ops.mark & ops.ended
    rank = np.concatenate([ops.rank, ops.rank[marked]])
    time = np.concatenate([ops.start, ops.end[marked]])
    computes = np.append(ops.mark, np.zeros(int(marked.sum()), bool))  # from then on
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
    tied = pairs.collective >= 0
    last = np.full(pairs.collective_count, -np.inf)
    np.maximum.at(last, pairs.collective[tied], ops.start[tied])
    # a pull waits for its reply, a registration for all nodes
    sends, receives = ops.is_any_of([Op.SEND]), ops.is_any_of([Op.RECV, Op.PULL, Op.REGISTER])
    received = (pairs.recv >= 0) & receives[pairs.recv]
    arrival[pairs.recv[received]] = np.where(
        np.isnan(pairs.sent[received]), np.inf, pairs.sent[received]
    )
    rendezvous = (pairs.send >= 0) & (pairs.recv >= 0) & sends[pairs.send]
    arrival[pairs.send[rendezvous]] = ops.start[pairs.recv[rendezvous]]
    arrival[tied] = last[pairs.collective[tied]]
    return arrival


def _final_barriers(ops: Operations, pairs: Pairs) -> Bools:
    """Mark the barriers after which members only pull or enter further barriers."""
    barrier = ops.is_any_of([Op.BARRIER]) & (pairs.collective >= 0)
    work = ~ops.is_any_of([Op.BARRIER, Op.PULL])
    last = np.full(int(ops.rank.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(last, ops.rank[work], ops.start[work])
    late = ops.start > last[ops.rank]
    ended = np.ones(pairs.collective_count + 1, bool)
    ended[pairs.collective[~(barrier & late)]] = (
        False  # index -1 is for operations without a collective
    )
    return barrier & ended[pairs.collective]
