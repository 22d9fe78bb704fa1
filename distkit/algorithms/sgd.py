"""Synchronous data-parallel SGD, in which R replicas match one process on all data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

AllReduce = Callable[[Tensor], Any]
Loss = Callable[[Tensor, Tensor], Tensor]


def sync_initial_weights(model: nn.Module, *, src: int = 0) -> None:
    """Broadcast weights and buffers (such as batch statistics) of rank ``src`` to all replicas."""
    with torch.no_grad():
        for w in (*model.parameters(), *model.buffers()):
            dist.broadcast(w, src)


def sync_gradients(
    model: nn.Module | Iterable[Tensor],
    count: float | None = None,
    all_reduce: AllReduce = dist.all_reduce,
) -> None:
    """Average the gradients over all replicas' examples, in one all-reduce.

    ::

        g = Σ_r n_r g_r / Σ_r n_r

    The sum of gradients is divided by the sum of counts: the mean of the replicas' means would be
    wrong if their numbers of examples differ. One message carries all gradients, because latency
    dominates small messages.

    Args:
        model: a model, or its parameters. A missing gradient counts as zeros; a parameter without
            a gradient on all replicas keeps None, and optimizers skip it. Sparse gradients
            become dense.
        count: n_r, the number of examples behind this replica's mean gradient, 0 or more; None if
            it is the same on all replicas.
        all_reduce: sums a tensor over all ranks in place, like ``dist.all_reduce``.

    Source:
        Li et al., "PyTorch distributed", 2020, on DDP's buckets.

    Example:
        >>> import distkit as dk, torch
        >>> def mean_of_three():
        ...     w = torch.zeros(1, requires_grad=True)
        ...     shard = torch.tensor([1.0, 2.0] if dist.get_rank() == 0 else [6.0])
        ...     (w * shard).mean().backward()
        ...     dk.algorithms.sync_gradients([w], count=len(shard))
        ...     return w.grad.item()
        >>> dk.run_ranks(mean_of_three, 2).results        # doctest: +SKIP
        [3.0, 3.0]
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    weights = [w for w in parameters if w.requires_grad]
    with torch.no_grad():
        message, table = _pack(weights, 1 if count is None else count)
        all_reduce(message)
        *sums, table = _unflatten_dense_tensors(message, [*weights, table])
        *counts, total = table.tolist()
        message.div_(total or 1)
        for w, g, contributors in zip(weights, sums, counts, strict=True):
            w.grad = g.to(w.dtype) if contributors else None


def _pack(weights: list[Tensor], n: float) -> tuple[Tensor, Tensor]:
    """Return a replica's message ``n g | has g | n``, and the table at its end."""
    gradients = [w.grad for w in weights]
    parts = [_dense(g, w) for g, w in zip(gradients, weights, strict=True)]
    numbers = [*(g is not None for g in gradients), n]
    table = torch.tensor(numbers, dtype=torch.float, device=parts[0].device)
    message = _flatten_dense_tensors([*parts, table])
    sums = message[: -len(table)]
    sums.mul_(n) if n else sums.zero_()  # a mean over no examples is NaN
    return message, table


def _dense(g: Tensor | None, w: Tensor) -> Tensor:
    """Return the gradient of a parameter, zeros if it has none."""
    if g is None:
        return torch.zeros_like(w)
    return g.to_dense() if g.is_sparse else g


def sync_sgd_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Loss,
    lr: float | Optimizer,
    *,
    all_reduce: AllReduce = dist.all_reduce,
) -> Tensor:
    """Run one step of synchronous data-parallel SGD on R ranks.

    ::

        g_r = ∇L(w; B_r)                   each rank, on its shard B_r of the minibatch
        g   = Σ_r |B_r| g_r / Σ_r |B_r|    all-reduce
        w   ← w - η g                      the same update on every rank

    This equals one process's step on the whole minibatch if L is a mean over examples and no
    layer mixes them, as batch norm does. The shards may differ in size.

    Args:
        model: the same weights on every rank.
        batch: this rank's inputs (B, …) and targets (B, …); B may be 0.
        loss_fn: mean loss of outputs and targets.
        lr: learning rate η, or an optimizer of ``torch.optim`` with the model's parameters, which
            makes the same update on every rank from the same gradient and state.
        all_reduce: sums a tensor over all ranks in place, like ``dist.all_reduce``;
            :func:`~distkit.algorithms.all_reduce.ring.ring_all_reduce` leads to the same weights.

    Returns:
        This rank's loss before the update, a scalar; NaN if it has no examples.

    Source:
        Goyal et al., "Accurate, large minibatch SGD", 2017.
    """
    inputs, targets = batch
    loss = loss_fn(model(inputs), targets)
    model.zero_grad()
    loss.backward()
    sync_gradients(model, len(targets), all_reduce)
    update(model, lr)
    return loss.detach()


def update(model: nn.Module, lr: float | Optimizer) -> None:
    """Update the weights from their gradients: ``w ← w - η g``, or an optimizer's step."""
    if isinstance(lr, Optimizer):
        lr.step()
        return
    with torch.no_grad():
        for w in model.parameters():
            if w.grad is not None:
                w.sub_(w.grad, alpha=lr)
