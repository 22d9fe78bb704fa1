"""Tensor parallelism, with layers split over ranks by columns and by rows.

Y = X·A and Z = Y·B are split over R ranks, A by columns and B by rows::

    rank r    X ─► [A_r] ─► Y_r ─► [B_r] ─► Z_r ─ all-reduce ─► Z = Σ_r Z_r

No communication is needed between the two layers, even with an element-wise function between them.
The forward pass needs one all-reduce, and the backward pass needs another, which sums the gradient
of X.
"""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from distkit.algorithms.collectives import copy_to_ranks, sum_of_ranks
from distkit.algorithms.contract import Group
from distkit.errors import LayoutError


class ColumnLinear(nn.Module):
    """This rank's columns of a linear layer: X -> Y_r = X·A_r + b_r.

    Every rank passes the same X and receives different features. Columns of A are rows of
    ``weight``, because torch stores the transpose.

    Args:
        whole: the full layer, the same on every rank; only this rank's part is kept.
        group: the process group; None means the default group.

    Raises:
        LayoutError: The number of features is not divisible by the number of ranks.

    Source:
        Shoeybi et al., "Megatron-LM", 2019.
    """

    #: The sharded dimension of each sharded parameter, for :func:`~distkit_parallel.shards`.
    sharded: ClassVar = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_shard(whole.weight, 0, group))
        self.bias = None if whole.bias is None else nn.Parameter(_shard(whole.bias, 0, group))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the columns to ``x``; the backward pass all-reduces the gradient of ``x``."""
        return nn.functional.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's rows of a linear layer: Y_r -> Z = Σ_r Y_r·B_r + b.

    Every rank passes different features and receives the same Z. The arguments and the source are
    the same as for :class:`ColumnLinear`.
    """

    sharded: ClassVar = {"weight": 1}

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_shard(whole.weight, 1, group))
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the rows, all-reduce the result, and add the bias once."""
        y = sum_of_ranks(nn.functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def _shard(whole: Tensor, dim: int, group: Group) -> Tensor:
    """Return a copy of this rank's shard, so that the full tensor can be freed."""
    n = dist.get_world_size(group)
    if whole.shape[dim] % n:
        raise LayoutError(
            f"{whole.shape[dim]} features cannot be divided evenly among {n} tensor-parallel "
            f"ranks. Use a multiple of {n}. To check this in advance, use "
            f"distkit_parallel.Layout(tp={n}, hidden={whole.shape[dim]})"
        )
    return whole.detach().chunk(n, dim)[dist.get_rank(group)].clone()
