"""Losses whose sum over the replicas is the mean over the global batch."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from distkit.errors import StrategyError
from distkit_strategies.context import ReplicaContext, get_replica_context


def compute_average_loss(
    per_example_loss: Tensor,
    sample_weight: Any = None,
    global_batch_size: int | None = None,
) -> Tensor:
    """This replica's part of the mean loss of the global batch: Σ of its examples / global batch.

    The gradients of this run are then summed over the replicas, and so is the loss:
    ``strategy.reduce("sum", loss)``.

    A row of shape (T,), such as the losses of a text's tokens, adds all its T losses: it is not
    averaged. For the mean over tokens give their number as ``global_batch_size``.

    Args:
        per_example_loss: a loss for each row, shape (B, …), as with ``reduction="none"``.
        sample_weight: what each loss is multiplied with: a number; of the same shape, where 1 is
            repeated; or without the last dimension, so that of (B, T) losses (B,) weighs rows.
        global_batch_size: rows of all replicas; None to count them, which takes a small message.

    Raises:
        StrategyError: a scalar loss or no tensor, weights of another shape, a size that is no whole
            number, or a call outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.compute_average_loss``.

    >>> import torch
    >>> compute_average_loss(torch.tensor([1.0, 2.0, 3.0]), global_batch_size=4)
    tensor(1.5000)
    >>> losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> compute_average_loss(losses, sample_weight=[1.0, 0.5])
    tensor(3.2500)
    """
    replica, size = _replica("compute_average_loss", per_example_loss), global_batch_size
    if not per_example_loss.dim():
        raise StrategyError(
            "compute_average_loss needs a loss for each example, not a scalar, which has been "
            'averaged already. Compute the loss with reduction="none".'
        )
    if size is not None and not (isinstance(size, Integral) and size >= 0):
        raise StrategyError(
            f"compute_average_loss(global_batch_size={size!r}): give the rows of all replicas' "
            "batches together, a whole number, or None to count them."
        )
    if sample_weight is not None:
        per_example_loss = per_example_loss * _weights(sample_weight, per_example_loss)
    if size is None:
        rows = len(per_example_loss)
        size = sum(n for (n,) in replica.strategy._compare("average_loss", [rows]))
    replica.summed = True
    return per_example_loss.sum() / (size or math.inf)


def _weights(sample_weight: Any, losses: Tensor) -> Tensor:
    """Weights that torch repeats as TensorFlow does, which adds or drops a last dimension."""
    given = weights = torch.as_tensor(sample_weight, device=losses.device)
    if weights.dim() == losses.dim() + 1 and weights.shape[-1] == 1:
        weights = weights.squeeze(-1)
    elif weights.dim() == losses.dim() - 1:
        weights = weights.unsqueeze(-1)
    pairs = zip(weights.shape, losses.shape, strict=False)
    fits = weights.dim() == losses.dim() and all(w in (1, n) for w, n in pairs)
    if not fits and given.numel() != 1:
        raise StrategyError(
            f"compute_average_loss(sample_weight=…) of shape {tuple(given.shape)} does not weigh "
            f"losses of shape {tuple(losses.shape)}. Give a number, a weight for each loss, or of "
            f"shape {tuple(losses.shape[:-1]) or tuple(losses.shape)}."
        )
    return weights


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """This replica's part of a loss that does not depend on the batch: it, summed, / replicas.

    It goes with :func:`compute_average_loss`. A plain mean loss needs no scaling. Of sharded
    parameters, each of which has its gradient once and not on each replica, it is whole in
    ``backward``.

    Raises:
        StrategyError: no tensor, or a call outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.scale_regularization_loss``.

    >>> import torch
    >>> scale_regularization_loss(torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    replica = _replica("scale_regularization_loss", regularization_loss)
    replica.scaled = True
    loss, replicas = regularization_loss.sum(), replica.num_replicas_in_sync
    if not hasattr(loss, "full_tensor"):
        return loss / replicas
    whole: Tensor = loss.full_tensor()
    return whole - whole.detach() * (1 - 1 / replicas)


def _replica(call: str, loss: Any) -> ReplicaContext:
    if not isinstance(loss, Tensor):
        raise StrategyError(
            f"{call} of {loss!r:.60}, a {type(loss).__name__}: give a tensor. Of a list of tensors "
            "torch.stack makes one, through which gradients flow."
        )
    if (found := get_replica_context()) is None:
        raise StrategyError(
            f"{call} outside of a replica function: it divides what one replica computes. Call it "
            "in the function that strategy.run gets."
        )
    return found
