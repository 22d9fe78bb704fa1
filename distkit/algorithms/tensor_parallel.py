"""Tensor parallelism, with layers split over ranks by columns and by rows.

Y = X·A and Z = Y·B are split over R ranks, A by columns and B by rows::

    rank r    X ─► [A_r] ─► Y_r ─► [B_r] ─► Z_r ─ all-reduce ─► Z = Σ_r Z_r

No communication is needed between the two layers, even with an element-wise function between them.
Forward needs one all-reduce, and backward needs another, which sums the gradient of X.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

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

    #: The sharded dimension of each sharded parameter, for ``parallel.shards``.
    sharded: ClassVar = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_shard(whole.weight, 0, group))
        self.bias = None if whole.bias is None else nn.Parameter(_shard(whole.bias, 0, group))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the columns to a copy of ``x``; backward all-reduces its gradient."""
        return nn.functional.linear(copy_to_ranks(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's rows of a linear layer: Y_r -> Z = Σ_r Y_r·B_r + b.

    Every rank passes different features and receives the same Z. Arguments and source as for
    :class:`ColumnLinear`.
    """

    sharded: ClassVar = {"weight": 1}

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(_shard(whole.weight, 1, group))
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the rows and all-reduce, then add the bias once; backward copies the gradient."""
        y = sum_of_ranks(nn.functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class _Copy(torch.autograd.Function):
    """The identity in forward; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' tensors in forward; backward passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


copy_to_ranks = cast(Callable[[Tensor, Group], Tensor], _Copy.apply)
sum_of_ranks = cast(Callable[[Tensor, Group], Tensor], _Sum.apply)


def _shard(whole: Tensor, dim: int, group: Group) -> Tensor:
    """Return a copy of this rank's equal part, so that the full tensor can be freed."""
    n = dist.get_world_size(group)
    if whole.shape[dim] % n:
        raise LayoutError(
            f"{whole.shape[dim]} features on {n} tensor-parallel ranks: use a multiple of {n}. "
            f"To check this in advance, use dk.simulation.parallel.Layout(tp={n}, "
            f"hidden={whole.shape[dim]})"
        )
    return whole.detach().chunk(n, dim)[dist.get_rank(group)].clone()
