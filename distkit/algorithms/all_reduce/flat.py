"""Flat exchange: every rank sends everything to every other rank and reduces by itself."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, isend, recv
from distkit.algorithms.rounds import LinkCost, Numbers, Round, Schedule, whole


def schedule(n: int) -> Schedule:
    """Everybody sends everything to everybody: one round, n(n-1) messages."""
    src, dst = np.nonzero(~np.eye(n, dtype=bool))
    if n > 1:
        yield Round(src, dst, np.zeros_like(src), reduce=True)


def seconds(n: Numbers, nbytes: Numbers, link: LinkCost) -> Numbers:
    """(n-1) (t(K) + K·gamma): every rank sends everything to every other."""
    return (n - 1) * (link.seconds(nbytes) + nbytes * link.gamma)


@ALL_REDUCES.register(
    title="Flat exchange",
    summary="every rank sends everything to every other rank and reduces by itself",
    source="Chan et al., 2007",
    cost="(n-1)(α + Kβ + Kγ)",
    schedule=schedule,
    seconds=seconds,
    chunks=whole,
)
@collective()
def flat_all_reduce(x: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Everybody sends everything to everybody, and reduces by itself.

    ::

        0 ◄──► 1
        ▲ ╲  ╱ ▲
        ▼ ╱  ╲ ▼
        2 ◄──► 3

    (n-1)(α + Kβ + Kγ), one message after the other, in one round. All reduce in the order of
    ranks, so that all round alike.

    Source:
        The "all-to-all" variant of Chan, Heimlich, Purkayastha & van de Geijn, "Collective
        communication: theory, practice, and experience", 2007.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    mine, inbox = x.clone(), empty_like(x)
    sending = [isend(mine, to, group) for to in range(n) if to != rank]

    for source in range(n):
        theirs = mine if source == rank else recv(inbox, source, group)
        if source == 0:
            x.copy_(theirs)
        else:
            combine(x, theirs, op)
    for work in sending:
        work.wait()
