"""SGD with less communication: local steps between averages, and accumulated gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distkit.algorithms.sgd import AllReduce, Loss, sync_gradients, update


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

    With H = 1 and plain SGD, this equals synchronous SGD. With H > 1 it is a different algorithm,
    which sends 1/H of the messages; the replicas differ between averages.

    Args:
        model: the same weights on every rank.
        batches: this rank's H minibatches, of inputs (B, …) and targets (B, …); a batch of
            0 rows is skipped.
        loss_fn: mean loss of outputs and targets.
        lr: learning rate η, or an optimizer of ``torch.optim``; its state, such as momentum, is
            not averaged.
        all_reduce: sums a tensor over all ranks in place, like ``dist.all_reduce``.

    Returns:
        This rank's loss before each step, (H,); NaN for a batch of 0 rows.

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
    """Run one step of synchronous SGD on several minibatches, one after the other.

    ::

        n_r = Σ_k |B_rk|
        g_r = 1/n_r Σ_k |B_rk| ∇L(w; B_rk)      each rank, without communication
        g   = Σ_r n_r g_r / Σ_r n_r             all-reduce
        w   ← w - η g

    This equals one step on all examples together, with the memory use of one minibatch. Unlike
    :func:`local_sgd_round` it updates the weights once.

    Args:
        model: the same weights on every rank.
        batches: this rank's minibatches, of inputs (B, …) and targets (B, …); batches of
            0 rows are skipped.
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
