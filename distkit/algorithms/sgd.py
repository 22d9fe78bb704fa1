"""Synchronous data-parallel SGD: R replicas that compute what one would, on R times the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from distkit.algorithms.alarm import first_bad, raise_alarm, trained

AllReduce = Callable[[Tensor], Any]
Loss = Callable[[Tensor, Tensor], Tensor]


def sync_initial_weights(model: nn.Module, *, src: int = 0) -> None:
    """Give every replica the weights of rank ``src``, and its buffers, such as batch statistics."""
    with torch.no_grad():
        for w in (*model.parameters(), *model.buffers()):
            dist.broadcast(w, src)


def sync_gradients(
    model: nn.Module | Iterable[Tensor],
    count: float | None = None,
    all_reduce: AllReduce = dist.all_reduce,
) -> None:
    """Give every replica the mean gradient of all replicas' examples, in one all-reduce.

    ::

        g = Σ_r n_r g_r / Σ_r n_r

    Gradients and counts are summed, and divided once: the mean of the replicas' means would be
    wrong where they have different numbers of examples. All gradients travel in one message,
    since the time of small messages is latency.

    Args:
        model: a model, or its parameters. One without a gradient on some replicas counts as zeros
            there; without one on any replica it stays so, and an optimizer leaves it alone.
            Sparse gradients become dense.
        count: n_r, how many examples this replica's gradient is the mean of, 0 or more; None if
            they are equally many on all replicas.
        all_reduce: sums a tensor over all ranks in place, as ``dist.all_reduce`` does.

    Raises:
        TrainingError: a gradient is NaN or infinite on some replica; on all of them.

    Source:
        Li et al., "PyTorch distributed", 2020: DDP's buckets.

    Example:
        >>> import distkit as dk, torch
        >>> def mean_of_three():
        ...     w = torch.zeros(1, requires_grad=True)
        ...     mine = torch.tensor([1.0, 2.0] if dist.get_rank() == 0 else [6.0])
        ...     (w * mine).mean().backward()
        ...     dk.algorithms.sync_gradients([w], count=len(mine))
        ...     return w.grad.item()
        >>> dk.run_ranks(mean_of_three, 2).results        # doctest: +SKIP
        [3.0, 3.0]
    """
    by_name = trained(model)
    weights = list(by_name.values())
    with torch.no_grad():
        message, table = _packed(weights, 1 if count is None else count)
        all_reduce(message)
        *sums, table = _unflatten_dense_tensors(message, [*weights, table])
        total, *alarms = (told := table.tolist())[len(weights) :]
        raise_alarm(alarms, by_name)

        message.div_(total or 1)
        for w, g, replicas in zip(weights, sums, told, strict=False):
            w.grad = g.to(w.dtype) if replicas else None


def _packed(weights: list[Tensor], n: float) -> tuple[Tensor, Tensor]:
    """A replica's message ``n g | has g | n | alarms``, and the table at its end."""
    found, ranks = [w.grad for w in weights], dist.get_world_size()
    parts = [_dense(g, w) for g, w in zip(found, weights, strict=True)]
    table = _table(*(g is not None for g in found), float(n), *[0] * ranks, device=parts[0].device)
    message = _flatten_dense_tensors([*parts, table])
    gradients = message[: -len(table)]
    if n and not isfinite(gradients.sum()):
        message[dist.get_rank() - ranks] = first_bad(parts)
    gradients.mul_(n) if n else gradients.zero_()  # a mean over no examples is NaN
    return message, table


@lru_cache(maxsize=64)  # the same in most steps
def _table(*numbers: float, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float, device=device)


def _dense(g: Tensor | None, w: Tensor) -> Tensor:
    """The gradient of a parameter, zeros if it has none."""
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
    """One step of synchronous data-parallel SGD on R ranks.

    ::

        g_r = ∇L(w; B_r)                   each rank, on its own shard B_r of the minibatch
        g   = Σ_r |B_r| g_r / Σ_r |B_r|    all-reduce
        w   ← w - η g                      the same update everywhere

    It equals one process's step on the whole minibatch when L is a mean over examples and no
    layer mixes them (batch norm does). The shards may differ in size.

    Args:
        model: the same weights on every rank.
        batch: this rank's inputs (B, …) and targets (B, …); B may be 0.
        loss_fn: mean loss of outputs and targets.
        lr: learning rate η, or an optimizer of ``torch.optim`` with the model's parameters: it
            makes the same update everywhere from the same gradient and the same state.
        all_reduce: sums a tensor over all ranks in place, as ``dist.all_reduce`` does; pass
            :func:`~distkit.algorithms.all_reduce.ring.ring_all_reduce` and see the same weights.

    Returns:
        This rank's loss before the update, a scalar; NaN if it has no examples.

    Raises:
        TrainingError: a gradient is NaN or infinite on some rank; on all of them.

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
    """Change the weights by their gradients: ``w ← w - η g``, or as an optimizer does."""
    if isinstance(lr, Optimizer):
        lr.step()
        return
    with torch.no_grad():
        for w in model.parameters():
            if w.grad is not None:
                w.sub_(w.grad, alpha=lr)
