"""Flat exchange: every rank sends everything to every other rank and reduces locally."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, isend, recv
from distkit.algorithms.rounds import LinkCost, Numbers, Round, Schedule, one_chunk


def schedule(n: int) -> Schedule:
    """Yield one round of n(n-1) messages: every rank sends its tensor to every other rank."""
    src, dst = np.nonzero(~np.eye(n, dtype=bool))
    if n > 1:
        yield Round(src, dst, np.zeros_like(src), reduce=True)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """Return (n-1) (t(K) + K·gamma): every rank sends everything to every other rank."""
    return (n - 1) * (link.seconds(nbytes) + nbytes * link.gamma)


@ALL_REDUCES.register(
    title="Flat exchange",
    summary="every rank sends everything to every other rank and reduces locally",
    source="Chan et al., 2007",
    cost="(n-1)(α + Kβ + Kγ)",
    schedule=schedule,
    seconds=seconds,
    chunks=one_chunk,
)
@collective()
def flat_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Send the tensor to every other rank and reduce locally.

    ::

        0 ◄──► 1
        ▲ ╲  ╱ ▲
        ▼ ╱  ╲ ▼
        2 ◄──► 3

    Cost: (n-1)(α + Kβ + Kγ), in one round, in which messages are sent one after another. Every rank
    reduces in rank order, so rounding is the same everywhere.

    Source:
        The "all-to-all" variant of Chan, Heimlich, Purkayastha & van de Geijn, "Collective
        communication: theory, practice, and experience", 2007.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    local, recv_buffer = x.clone(), empty_like(x)
    works = [isend(local, dst, group) for dst in range(n) if dst != rank]

    for source in range(n):
        received = local if source == rank else recv(recv_buffer, source, group)
        if source == 0:
            x.copy_(received)
        else:
            combine(x, received, op)
    for work in works:
        work.wait()
