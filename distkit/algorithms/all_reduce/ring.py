"""Ring: chunks travel around the ring once to be reduced, and once more to be gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, exchange
from distkit.algorithms.rounds import LinkCost, Numbers, Schedule, ring_rounds


def schedule(n: int) -> Schedule:
    """Yield the rounds of the bandwidth-optimal all-reduce: 2(n-1) rounds of K/n bytes per rank.

    Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.

    Args:
        n: number of ranks.

    Example:
        >>> first = next(schedule(4))
        >>> first.src, first.dst, first.chunk
        (array([0, 1, 2, 3]), array([1, 2, 3, 0]), array([0, 1, 2, 3]))
    """
    yield from ring_rounds(n, 0, reduce=True)  # reduce-scatter
    yield from ring_rounds(n, 1, reduce=False)  # all-gather


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return 2(n-1) t(K/n) + (n-1)/n K·gamma. Patarasuk & Yuan, 2009.

    >>> from distkit_simulation import Link
    >>> seconds(4, 4000, Link(alpha=1.0, beta=0.001))
    12.0
    """
    return 2 * (n - 1) * link.seconds(nbytes / n) + (n - 1) / n * nbytes * link.gamma


@ALL_REDUCES.register(
    title="Ring",
    summary="chunks travel around once to be reduced, once more to be gathered",
    source="Patarasuk & Yuan, 2009",
    cost="2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ",
    schedule=schedule,
    seconds=seconds,
)
@collective()
def ring_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce ``x`` over all ranks, in place, as ``dist.all_reduce(x)`` does.

    In n-1 rounds of *reduce-scatter*, each rank sends a chunk to its right neighbor and adds the
    chunk received from the left. Rank r then has the complete sum of chunk r+1. In n-1 rounds
    of *all-gather*, the complete chunks travel around once more::

        rank 0 ── chunk r-s ──► rank 1 ──► … ──► rank n-1 ──► rank 0

    Cost: 2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ; no algorithm sends fewer bytes.

    Args:
        x: tensor of K bytes, with the same shape on every rank.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.

    Source:
        Patarasuk & Yuan, 2009; introduced to deep learning by Gibiansky (Baidu), 2017.

    Example:
        >>> import distkit as dk, torch
        >>> def total():
        ...     x = torch.arange(6.)
        ...     dk.algorithms.ring_all_reduce(x)
        ...     return x.tolist()
        >>> dk.run_ranks(total, 3).results[0]        # doctest: +SKIP
        [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = x.tensor_split(n)  # views of x
    recv_buffer = empty_like(chunks[0])

    for s in range(n - 1):  # reduce-scatter
        out, local = chunks[(rank - s) % n], chunks[(rank - s - 1) % n]
        combine(local, exchange(out, right, recv_buffer[: len(local)], left, group), op)

    for s in range(n - 1):  # all-gather
        out, into = chunks[(rank + 1 - s) % n], chunks[(rank - s) % n]
        exchange(out, right, into, left, group)


def ring_pass(
    chunks: Sequence[Tensor],
    first: int,
    left: int,
    right: int,
    group: Group,
    op: ReduceOp | None = None,
) -> None:
    """Pass chunks around a ring once: send ``first``, then in each round the chunk just received.

    Args:
        chunks: one chunk for each rank of the ring.
        first: index of the chunk that this rank sends first.
        left: neighbor in the group to receive from.
        right: neighbor in the group to send to.
        group: the process group.
        op: combines each received chunk with the local chunk; None overwrites the local chunk.
    """
    m, recv_buffer = len(chunks), empty_like(chunks[0])
    for s in range(m - 1):
        out, local = chunks[(first - s) % m], chunks[(first - s - 1) % m]
        if op is None:
            exchange(out, right, local, left, group)
        else:
            combine(local, exchange(out, right, recv_buffer[: len(local)], left, group), op)


def ring_of(leaders: Sequence[int], x: Tensor, op: ReduceOp, group: Group) -> None:
    """All-reduce in a ring of some ranks of the group, including this rank."""
    n, position = len(leaders), leaders.index(dist.get_rank(group))
    left, right = leaders[position - 1], leaders[(position + 1) % n]
    chunks = x.tensor_split(n)
    ring_pass(chunks, position, left, right, group, op)
    ring_pass(chunks, position + 1, left, right, group)
