"""Losses whose sum over the replicas is the mean over the global batch."""

from __future__ import annotations

from torch import Tensor

from distkit.errors import StrategyError
from distkit.strategies.context import ReplicaContext, get_replica_context


def compute_average_loss(
    per_example_loss: Tensor,
    sample_weight: Tensor | None = None,
    global_batch_size: int | None = None,
) -> Tensor:
    """This replica's part of the mean loss of the global batch: Σ of its examples / global batch.

    The gradients of this run are then summed over the replicas, and so is the loss:
    ``strategy.reduce("sum", loss)``.

    Args:
        per_example_loss: a loss for each row, shape (B, …), as with ``reduction="none"``.
        sample_weight: what each loss is multiplied with, shape (B,).
        global_batch_size: rows of all replicas; None to count them, which takes a small message.

    Raises:
        StrategyError: a scalar loss, or a call outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.compute_average_loss``.

    >>> import torch
    >>> compute_average_loss(torch.tensor([1.0, 2.0, 3.0]), global_batch_size=4)
    tensor(1.5000)
    """
    replica = _replica("compute_average_loss")
    if per_example_loss.dim() == 0:
        raise StrategyError(
            "compute_average_loss needs a loss for each example, not a scalar, which has been "
            'averaged already. Compute the loss with reduction="none".'
        )
    if sample_weight is not None:
        per_example_loss = (per_example_loss.movedim(0, -1) * sample_weight).movedim(-1, 0)
    rows = per_example_loss.shape[0]
    if global_batch_size is None:
        global_batch_size = sum(n for (n,) in replica.strategy._compare("average_loss", [rows]))
    replica.summed = True
    per_row = per_example_loss.reshape(rows, -1).mean(1) if rows else per_example_loss
    return per_row.sum() / max(global_batch_size, 1)


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """This replica's part of a loss that does not depend on the batch: it, summed, / replicas.

    It goes with :func:`compute_average_loss`. A plain mean loss needs no scaling. Of sharded
    parameters, each of which has its gradient once and not on each replica, it is whole in
    ``backward``.

    Raises:
        StrategyError: outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.scale_regularization_loss``.

    >>> import torch
    >>> scale_regularization_loss(torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    replica = _replica("scale_regularization_loss")
    replica.scaled = True
    loss, replicas = regularization_loss.sum(), replica.num_replicas_in_sync
    if not hasattr(loss, "full_tensor"):
        return loss / replicas
    whole: Tensor = loss.full_tensor()
    return whole - whole.detach() * (1 - 1 / replicas)


def _replica(call: str) -> ReplicaContext:
    if (found := get_replica_context()) is None:
        raise StrategyError(
            f"{call} outside of a replica function: it divides what one replica computes. Call it "
            "in the function that strategy.run gets."
        )
    return found
