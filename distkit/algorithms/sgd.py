"""Data-parallel SGD: synchronous steps, local steps, and gradient accumulation.

After a synchronous step, R replicas match one process that used all the data. Local steps and
gradient accumulation need fewer messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

AllReduce = Callable[[Tensor], Any]
Loss = Callable[[Tensor, Tensor], Tensor]


def sync_initial_weights(model: nn.Module, *, src: int = 0) -> None:
    """Broadcast weights and buffers (e.g. batch statistics) from rank ``src`` to all replicas."""
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

    The sum of gradients is divided by the sum of counts, because the mean of the replicas' means
    would be wrong if their numbers of examples differed. One message carries all gradients, because
    latency dominates small messages.

    Args:
        model: a model, or its parameters. A missing gradient counts as zeros. If no replica has a
            gradient for a parameter, it remains None, and optimizers skip the parameter. Sparse
            gradients become dense.
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
    """Return a replica's message, and the table at its end.

    The message starts with the gradients, multiplied by ``n``. The table contains a flag for each
    parameter, 1 if it has a gradient, and then ``n``.
    """
    gradients = [w.grad for w in weights]
    dense = [_dense(g, w) for g, w in zip(gradients, weights, strict=True)]
    numbers = [*(g is not None for g in gradients), n]
    table = torch.tensor(numbers, dtype=torch.float, device=dense[0].device)
    message = _flatten_dense_tensors([*dense, table])
    sums = message[: -len(table)]
    sums.mul_(n) if n else sums.zero_()  # a mean over no examples is NaN
    return message, table


def _dense(g: Tensor | None, w: Tensor) -> Tensor:
    """Return the gradient of a parameter, or zeros if it has none."""
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
    layer, such as batch norm, mixes them. The shards may differ in size.

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


# -- less communication ---------------------------------------------------------------------


def average_weights(model: nn.Module, all_reduce: AllReduce = dist.all_reduce) -> None:
    """Average the weights over all replicas: ``w = 1/R Σ_r w_r``.

    Args:
        model: the same layers on every rank.
        all_reduce: sums a tensor over all ranks in place, like ``dist.all_reduce``.
    """
    weights = [w.detach() for w in model.parameters()]
    message = torch.cat([w.reshape(-1) for w in weights])
    all_reduce(message)
    message.div_(dist.get_world_size())
    for w, mean in zip(weights, message.split([w.numel() for w in weights]), strict=True):
        w.copy_(mean.view_as(w))


def local_sgd_round(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_fn: Loss,
    lr: float | Optimizer,
    *,
    all_reduce: AllReduce = dist.all_reduce,
) -> Tensor:
    """Run H local steps on each replica, then average the weights.

    ::

        w_r ← w_r - η ∇L(w_r; B_r)      H times, without communication
        w   = (1/R) Σ_r w_r             all-reduce

    With H = 1, plain SGD and batches of equal size, this equals synchronous SGD. With H > 1, it is
    a different algorithm, which sends 1/H of the messages; the replicas differ between averages.

    Args:
        model: the same weights on every rank.
        batches: this rank's H minibatches, of inputs (B, …) and targets (B, …); empty batches are
            skipped.
        loss_fn: mean loss of outputs and targets.
        lr: learning rate η, or an optimizer of ``torch.optim``; its state, such as momentum, is
            not averaged.
        all_reduce: sums a tensor over all ranks in place, like ``dist.all_reduce``.

    Returns:
        This rank's loss before each step, (H,); NaN for an empty batch.

    Source:
        Stich, "Local SGD converges fast and communicates little", ICLR 2019.
    """
    losses = []
    for inputs, targets in batches:
        if not len(targets):
            losses.append(torch.tensor(nan))
            continue
        loss = loss_fn(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        update(model, lr)
        losses.append(loss.detach())
    average_weights(model, all_reduce)
    return torch.stack(losses)


def accumulated_sgd_step(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Loss,
    lr: float | Optimizer,
    *,
    all_reduce: AllReduce = dist.all_reduce,
) -> Tensor:
    """Run one step of synchronous SGD on several minibatches, one after another.

    ::

        n_r = Σ_k |B_rk|
        g_r = 1/n_r Σ_k |B_rk| ∇L(w; B_rk)      each rank, without communication
        g   = Σ_r n_r g_r / Σ_r n_r             all-reduce
        w   ← w - η g

    This equals one step on all examples together, with the memory use of one minibatch. Unlike
    :func:`local_sgd_round`, it updates the weights only once.

    Args:
        model: the same weights on every rank.
        batches: this rank's minibatches, of inputs (B, …) and targets (B, …); empty batches are
            skipped.
        loss_fn: mean loss of outputs and targets.
        lr: learning rate η, or an optimizer of ``torch.optim``.
        all_reduce: sums a tensor over all ranks in place, like ``dist.all_reduce``.

    Returns:
        This rank's mean loss before the update, a scalar; NaN if it has no examples.

    Source:
        Ott et al., "Scaling neural machine translation", 2018.
    """
    count = sum(len(targets) for _, targets in batches)
    model.zero_grad()
    mean = torch.tensor(0.0 if count else nan)
    for inputs, targets in batches:
        if not len(targets):
            continue  # a mean over no examples is NaN
        loss = loss_fn(model(inputs), targets) * (len(targets) / count)
        loss.backward()
        mean = mean + loss.detach()
    sync_gradients(model, count, all_reduce)
    update(model, lr)
    return mean
