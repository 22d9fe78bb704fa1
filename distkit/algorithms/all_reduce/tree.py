"""Binomial tree: reduce up a tree to rank 0, and broadcast down again."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.collectives import broadcast_schedule, reduce_schedule
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, recv, send
from distkit.algorithms.rounds import LinkCost, Numbers, Schedule, bits, ceil_lg, one_chunk


def schedule(n: int) -> Schedule:
    """Yield the rounds: reduce up a binomial tree, then broadcast down."""
    yield from reduce_schedule(n)
    yield from broadcast_schedule(n)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return 2⌈lg n⌉ t(K) + ⌈lg n⌉ K·gamma: binomial reduce, binomial broadcast.

    Thakur, Rabenseifner & Gropp, 2005.
    """
    return ceil_lg(n) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


@ALL_REDUCES.register(
    title="Binomial tree",
    summary="up a tree to rank 0, and down again",
    source="Thakur et al., 2005",
    cost="2⌈lg n⌉(α + Kβ) + ⌈lg n⌉Kγ",
    schedule=schedule,
    seconds=seconds,
    chunks=one_chunk,
)
@collective()
def tree_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce up a binomial tree to rank 0 and broadcast down the same tree.

    ::

        round 0   1 ► 0   3 ► 2   5 ► 4   7 ► 6
        round 1   2 ────► 0       6 ────► 4
        round 2   4 ────────────► 0                  and back in reverse

    Cost: 2⌈lg n⌉(α + Kβ) + ⌈lg n⌉Kγ. There are few rounds, but each carries the whole tensor.

    Source:
        Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
        MPICH", 2005.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    recv_buffer = empty_like(x)
    children = []

    for bit in bits(n):
        if rank & bit:
            send(x, rank - bit, group)
            recv(x, rank - bit, group)
            break
        if rank + bit < n:
            children.append(rank + bit)
            combine(x, recv(recv_buffer, rank + bit, group), op)

    for child in reversed(children):
        send(x, child, group)
