"""Functions for tests that run on ranks: sums, messages of errors, and helpers for training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer


def sum_over_ranks() -> float:
    """Return the sum of 1, 2, … over the ranks."""
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[0].item()


def error_message(kind: type[Exception], call: Callable[..., object], *args: object) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args)
    return str(caught.value)


def whole(w: Tensor) -> Tensor:
    """Return a detached copy of a tensor, or of the full tensor of a DTensor."""
    return (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone()


def training_step(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that trains a classifier for one step and returns the loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step
