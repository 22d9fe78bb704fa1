"""Reduce and broadcast: one rank reduces for all and sends the result to every rank."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, recv, send
from distkit.algorithms.rounds import LinkCost, Numbers, Round, Schedule, one_chunk


def schedule(n: int) -> Schedule:
    """Yield two rounds: every rank sends its tensor to rank 0, which sends the result back."""
    others, root = np.arange(1, n), np.zeros(max(n - 1, 0), dtype=int)
    if n > 1:
        yield Round(others, root, root, reduce=True)
        yield Round(root, others, root, reduce=False)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return 2(n-1) t(K) + (n-1) K·gamma: rank 0 exchanges one message at a time.

    TensorFlow's ``ReductionToOneDevice`` works this way.
    """
    return (n - 1) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


@ALL_REDUCES.register(
    title="Reduce to one, broadcast",
    summary="one rank reduces for all and sends the result to every rank",
    source="TensorFlow's ReductionToOneDevice",
    cost="2(n-1)(α + Kβ) + (n-1)Kγ",
    schedule=schedule,
    seconds=seconds,
    chunks=one_chunk,
)
@collective()
def reduce_broadcast_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Reduce on rank 0, which then sends the result to every other rank.

    ::

        1 ─┐          ┌─► 1
        2 ─┼─► 0: Σ ──┼─► 2
        3 ─┘          └─► 3

    Cost: 2(n-1)(α + Kβ) + (n-1)Kγ, in two rounds. All data passes through one rank's link.

    Source:
        TensorFlow, ``tf.distribute.ReductionToOneDevice``.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank > 0:
        send(x, 0, group)
        recv(x, 0, group)
        return

    recv_buffer = empty_like(x)
    for src in range(1, n):
        combine(x, recv(recv_buffer, src, group), op)
    for dst in range(1, n):
        send(x, dst, group)
