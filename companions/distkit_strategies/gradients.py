"""The gradients of all replicas, put together before a step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from distkit.errors import StrategyError, TrainingError
from distkit_strategies.context import ReplicaContext
from distkit_strategies.strategy import Strategy
from distkit_strategies.variables import owned, parameters_of


def own_parameters(strategy: Strategy, optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer updates, all of them variables of the strategy.

    Raises:
        StrategyError: one was not made in the strategy's scope, or was moved to another device.
    """
    weights = parameters_of(optimizer)
    for k, w in enumerate(weights):
        found = owned(w)
        if found is None or found[0] is not strategy:
            whose = "outside of every scope" if found is None else f"in the scope of {found[0]}"
            raise StrategyError(
                f"{type(optimizer).__name__}.step() in {strategy}.run would update parameter {k}, "
                f"of shape {tuple(w.shape)}, which was made {whose}: its values may differ between "
                f"replicas. Make the model in `with strategy.scope():`."
            )
    strategy._check_devices((name, w) for w in weights for name in [owned(w)[1]])  # type: ignore[index]
    return weights


@torch.no_grad()
def put_together(
    strategy: Strategy,
    weights: Sequence[Tensor],
    replica: ReplicaContext,
    all_reduce: Callable[[Tensor], Any],
) -> None:
    """Replace each gradient by that of the whole batch, Σ n_r g_r / Σ n_r or Σ g_r.

    Args:
        strategy: for comparing, before gradients travel.
        weights: the parameters, the same on all replicas.
        replica: knows the rows n_r, and whether losses are divided by the global batch already.
        all_reduce: sums a tensor over the replicas, in place.

    Raises:
        StrategyError: on all replicas: one has other parameters, or is not inside the same step.
        TrainingError: on all replicas: one has a gradient that is not finite.
    """
    check_losses(replica)
    rows = 1 if replica.rows is None else replica.rows
    make_dense(weights)
    there = bytes(w.grad is not None for w in weights)
    bad = first_not_finite(w.grad for w in weights) if rows else -1  # without rows a mean is NaN
    facts = [rows, replica.summed, len(weights), zlib.crc32(there), bad]
    shown = strategy._compare("optimizer.step", facts)
    _check(shown, weights, replica)
    if len({s[3] for s in shown}) > 1:
        _complete(weights, torch.tensor(list(there), device=strategy.device), all_reduce)
    part = 1 if replica.summed else rows / (sum(s[0] for s in shown) or 1)
    mine = [w.grad for w in weights if w.grad is not None]
    as_one(mine, lambda g: all_reduce(g.mul_(part) if rows else g.zero_()))


def check_losses(replica: ReplicaContext) -> None:
    """See that the losses of a step belong together.

    Raises:
        StrategyError: one is divided by the replicas, and the other is a mean.
    """
    if replica.scaled and not replica.summed:
        raise StrategyError(
            "scale_regularization_loss in a step with a mean loss makes it too small: the mean "
            "over replicas divides it once more. Use compute_average_loss, or leave it out."
        )


def as_one(tensors: Sequence[Tensor], change: Callable[[Tensor], Any]) -> None:
    """Change tensors in place as one flat tensor, or one for each dtype: it travels at once."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        alike = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in alike])
        change(flat)
        for t, changed in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            t.copy_(changed.view_as(t))


def make_dense(weights: Sequence[Tensor]) -> None:
    """Make sparse gradients dense, so that they can be added up."""
    for w in weights:
        w.grad = None if w.grad is None else w.grad.to_dense()


def first_not_finite(gradients: Iterable[Tensor | None]) -> int:
    """The number of the first gradient that is NaN or infinite; -1 for none."""
    bad = (k for k, g in enumerate(gradients) if g is not None and not g.isfinite().all())
    return next(bad, -1)


def refuse_not_finite(
    weight: Tensor, replica: ReplicaContext, culprit: int | None, who: str = "replica"
) -> NoReturn:
    """Name a gradient that is NaN or infinite.

    Args:
        weight: the parameter.
        replica: knows the run.
        culprit: whose gradient it is; None if all were finite, and their sum is not.
        who: what the culprit is.

    Raises:
        TrainingError: always.
    """
    layer = owned(weight)[1]  # type: ignore[index]
    where = "as the sum of all replicas" if culprit is None else f"on {who} {culprit}"
    raise TrainingError(
        f"The gradient of {layer} is not finite {where} in run {replica.number} of the strategy. "
        "This step was not made. Look for NaN in its batch, or lower the learning rate.",
        rank=culprit or 0,
        step=replica.number,
        layer=layer,
    )


def _check(shown: Sequence[Sequence[int]], weights: Sequence[Tensor], replica: Any) -> None:
    for r, (_, summed, count, _, bad) in enumerate(shown):
        if count != len(weights) or summed != shown[0][1]:
            raise StrategyError(
                f"The optimizers of replica {r} and of this one update different parameters, or "
                "only one of them used compute_average_loss. All replicas must make the same step."
            )
        if bad >= 0:
            refuse_not_finite(weights[bad], replica, r)


def _complete(
    weights: Sequence[Tensor], there: Tensor, all_reduce: Callable[[Tensor], Any]
) -> None:
    """A gradient that only some replicas have is 0 on the others."""
    all_reduce(there)
    for w, known in zip(weights, there.tolist(), strict=True):
        if known and w.grad is None:
            w.grad = torch.zeros_like(w)
