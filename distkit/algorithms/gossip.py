"""Gossip, for contrast: an average that is not exact, and waits for neighbours only."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.contract import Group, collective
from distkit.algorithms.p2p import exchange


@collective()
def gossip_average(x: Tensor, group: Group = None, *, rounds: int = 1) -> None:
    """Average ``x`` with both neighbours on a ring, in place. **No** all-reduce.

    ::

        x_r ← (x_{r-1} + x_r + x_{r+1}) / 3

    Everybody's mean stays what it was, and the ranks come nearer to it from round to round, by
    a factor of (1 + 2 cos 2π/n)/3. A round takes 2α + 2Kβ, however many ranks there are: that is
    what decentralised SGD buys with ranks that differ.

    Args:
        x: floating-point tensor of any shape, the same on every rank; K bytes.
        group: the process group; None is the world.
        rounds: how often.

    Source:
        Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    if n == 1:
        return

    from_left, from_right = empty_like(x), empty_like(x)
    for _ in range(rounds):
        exchange(x, right, from_left, left, group)
        exchange(x, left, from_right, right, group)
        x.add_(from_left).add_(from_right).div_(3)
