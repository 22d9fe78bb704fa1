"""Sums of tensors, in the order given: the same to the bit in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distkit.kvstore.transport.memory import empty_like

#: Sums of these are made in float32, to be rounded once.
NARROW = torch.float16, torch.bfloat16


def added_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one dtype, in float32 if that is narrow; of one the tensor itself.

    >>> added_up([torch.ones(2), torch.ones(2)])
    tensor([2., 2.])
    """
    first, *rest = tensors
    if not rest:
        return first
    if first.dtype in NARROW:
        first, *rest = (t.float() for t in tensors)
    total: Tensor = torch.add(first, rest[0], out=empty_like(first))
    for t in rest[1:]:
        total += t
    return total
