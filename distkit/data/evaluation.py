"""Evaluation in which every sample counts once, on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit.data.dataset import chunks
from distkit.data.shards import place

#: A number for each sample, from outputs (B, …) and targets (B, …).
Metric = Callable[[Tensor, Tensor], Tensor]


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for each sample (B,) whose largest output (B, C) is that of its class, else 0."""
    return outputs.argmax(-1) == targets


def evaluate(model: nn.Module, data: Any, metric: Metric = correct, *, batch: int = 64) -> float:
    """The mean of a metric over all samples, each counted once, on all replicas.

    ::

        m = Σ_r Σ_i metric_ri / N        all-reduce of sums, then one division

    The replicas take batches in turn, cut at the same places whatever their number, and the sums of
    the batches are added in their order: on any number of replicas the result is the same to the
    bit. Torch's ``DistributedSampler`` repeats samples, so that all replicas have equally many.

    Args:
        model: the same weights on every rank; it is evaluated in ``eval`` mode, without gradients.
        data: inputs and targets, as for :class:`~distkit.data.DistributedDataset`.
        metric: a number for each sample; by default 1 where the class is right, so that the
            result is the accuracy.
        batch: samples at a time.

    Raises:
        ValueError: there are no samples, or the metric does not give one number for each.

    Example:
        >>> import distkit as dk
        >>> dk.run_ranks(lambda: dk.data.evaluate(net, dk.data.digits()), 3)  # doctest: +SKIP
    """
    rank, replicas = place() if dist.is_initialized() else (0, 1)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = chunks(data, batch, rank, replicas)
            sums = [(0.0, 0) if part is None else _score(model, part, metric) for part in parts]
    finally:
        model.train(training)
    table = torch.tensor(sums, dtype=torch.float64, device=_device(model))  # others' rows are 0
    if replicas > 1:
        dist.all_reduce(table)
    summed, samples = table.reshape(-1, 2).sum(0).tolist()
    if not samples:
        raise ValueError("There are no samples to evaluate the model on.")
    return float(summed / samples)


def _score(model: nn.Module, samples: Any, metric: Metric) -> tuple[float, int]:
    """The sum of a metric over some samples, and their number."""
    inputs, targets = (part.to(_device(model)) for part in samples)
    return total(metric, model(inputs), targets).item(), len(targets)


def total(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of a metric over some samples.

    Raises:
        ValueError: the metric does not give one number for each sample.
    """
    found = metric(outputs, targets)
    if found.shape[:1] != targets.shape[:1] or found.numel() != len(targets):
        raise ValueError(
            f"The metric returned shape {tuple(found.shape)} for {len(targets)} samples. Return a "
            "number for each sample, such as cross_entropy(..., reduction='none')."
        )
    return found.double().sum()


def _device(model: nn.Module) -> torch.device:
    return next((w.device for w in model.parameters()), torch.device("cpu"))
