"""Synchronous data-parallel SGD: R replicas that compute what one would, on R times the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sync_initial_weights(model: nn.Module, *, src: int = 0) -> None:
    """Give every replica the weights of rank ``src``."""
    with torch.no_grad():
        for w in model.parameters():
            dist.broadcast(w, src)


def sync_sgd_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    *,
    all_reduce: Callable[[Tensor], Any] = dist.all_reduce,
) -> Tensor:
    """One step of synchronous data-parallel SGD on R ranks.

    ::

        g_r = ∇L(w; B_r)         each rank, on its own shard B_r of the minibatch
        g   = (1/R) Σ_r g_r      all-reduce
        w   ← w - η g            the same update everywhere

    It equals one process's step on the whole minibatch when the shards are equal, L is a
    mean, and no layer mixes examples (batch norm does).

    Args:
        model: the same weights on every rank.
        batch: this rank's inputs (B, …) and targets (B, …).
        loss_fn: mean loss of outputs and targets.
        lr: learning rate η.
        all_reduce: sums a tensor over all ranks in place, as ``dist.all_reduce`` does; pass
            :func:`~distkit.algorithms.collectives.ring_all_reduce` and see the same weights.

    Returns:
        This rank's loss before the update, a scalar.

    Source:
        Goyal et al., "Accurate, large minibatch SGD", 2017.
    """
    inputs, targets = batch
    loss = loss_fn(model(inputs), targets)
    model.zero_grad()
    loss.backward()

    with torch.no_grad():
        for w in model.parameters():
            if w.grad is not None:
                all_reduce(w.grad)
                w.sub_(lr * w.grad / dist.get_world_size())
    return loss.detach()
