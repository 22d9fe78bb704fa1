"""A strategy's collectives, with gradients: the gradient of a sum over replicas is such a sum."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distkit_strategies.agreement import check_shapes

if TYPE_CHECKING:
    from distkit_strategies.strategy import Strategy


#: Floating-point numbers that have no room for sums.
HALF = torch.float16, torch.bfloat16


def all_reduce(strategy: Strategy, x: Tensor, parts: int | None = None) -> Tensor:
    """The sum of ``x`` over the replicas, or the mean. ``dist.all_reduce`` loses its gradient.

    Args:
        strategy: of the replicas.
        x: dense.
        parts: what the sum is divided by; None for the sum itself.
    """
    total: Tensor = _AllReduce.apply(wide(x), strategy)  # type: ignore[no-untyped-call]
    total = total if parts is None else total / parts
    return total.to(x.dtype) if x.dtype in HALF else total


def wide(x: Tensor) -> Tensor:
    """The same numbers, in a dtype that has room for their sum; whole ones as ``torch.sum``."""
    if x.dtype in HALF:
        return x.float()
    return x if x.is_floating_point() or x.is_complex() else x.long()


def all_gather(strategy: Strategy, call: str, value: Any, axis: int) -> Tensor:
    """The tensors of all replicas, joined along a dimension whose size may differ.

    Raises:
        StrategyError: other dimensions differ, there is no such dimension, or no tensor.
    """
    x = strategy._tensor(call, value)
    shapes = strategy._compare(call, x.shape)
    check_shapes(call, shapes, axis)
    rows = x.movedim(axis, 0)
    joined: Tensor = _AllGather.apply(rows, strategy, [shape[axis] for shape in shapes])  # type: ignore[no-untyped-call]
    return joined.movedim(0, axis)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strategy: Strategy) -> Tensor:
        ctx.strategy, total = strategy, x.contiguous().clone()
        strategy._all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(ctx.strategy, gradient), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, strategy: Strategy, sizes: list[int]) -> Tensor:
        ctx.strategy, ctx.begins = strategy, [0, *accumulate(sizes)]
        missing = rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])
        found = strategy._all_gather(torch.cat([rows, missing]))
        return torch.cat([t[:size] for t, size in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        begin, end = ctx.begins[ctx.strategy._replica :][:2]
        return _summed(ctx.strategy, gradient)[begin:end], None, None


def _summed(strategy: Strategy, gradient: Tensor) -> Tensor:
    strategy._compare("all_reduce", gradient.shape)
    return all_reduce(strategy, gradient)
