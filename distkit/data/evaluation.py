"""Evaluation that counts every sample once, on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit.data.dataset import open_data, rank_and_world_size

#: A function that returns one number per sample from outputs (B, …) and targets (B, …).
Metric = Callable[[Tensor, Tensor], Tensor]


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether each sample's class has the largest of its outputs (B, C), shape (B,)."""
    return outputs.argmax(-1) == targets


def evaluate(model: nn.Module, data: Any, metric: Metric = correct, *, batch: int = 64) -> float:
    """Return the mean of a metric over all samples, each counted once, on every replica.

    ::

        m = Σ_r Σ_i metric_ri / N        all-reduce of sums, then one division

    Batches are assigned to replicas round-robin. They do not depend on the number of replicas, and
    their sums are added in order, so the result is bitwise equal on any number of replicas. In
    contrast, torch's ``DistributedSampler`` repeats samples to even out the replicas.

    Args:
        model: a model with the same weights on every rank, evaluated in ``eval`` mode.
        data: inputs and targets, as for :class:`~distkit.data.DistributedDataset`.
        metric: returns one number per sample; by default 1 for the correct class and 0 otherwise,
            so that the mean is the accuracy.
        batch: samples per batch.

    Raises:
        ValueError: There are no samples, or the metric does not return one number per sample.

    Example:
        >>> import distkit as dk
        >>> dk.run_ranks(lambda: dk.data.evaluate(net, dk.data.digits()), 3)  # doctest: +SKIP
    """
    rank, replicas = rank_and_world_size() if dist.is_initialized() else (0, 1)
    source, training = open_data(data), model.training
    samples = range(len(source))
    batches = [samples[first : first + batch] for first in samples[::batch]]
    sums = [(0.0, 0)] * len(batches)
    model.eval()
    try:
        with torch.no_grad():
            for i in range(rank, len(batches), replicas):
                sums[i] = _sum_metric(model, source.take(batches[i]), metric)
    finally:
        model.train(training)
    # the rows of other replicas are 0
    table = torch.tensor(sums, dtype=torch.float64, device=_device(model))
    if replicas > 1:
        dist.all_reduce(table)
    summed, counted = table.reshape(-1, 2).sum(0).tolist()
    if not counted:
        raise ValueError("There are no samples to evaluate the model on.")
    return float(summed / counted)


def _sum_metric(model: nn.Module, samples: Any, metric: Metric) -> tuple[float, int]:
    """Return the sum of a metric over a batch, and the number of samples."""
    inputs, targets = (part.to(_device(model)) for part in samples)
    return total(metric, model(inputs), targets).item(), len(targets)


def total(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of a metric over samples.

    Raises:
        ValueError: The metric does not return one number per sample.
    """
    scores = metric(outputs, targets)
    if scores.shape[:1] != targets.shape[:1] or scores.numel() != len(targets):
        raise ValueError(
            f"The metric returned shape {tuple(scores.shape)} for {len(targets)} samples. Return "
            "one number for each sample, for example cross_entropy(..., reduction='none')."
        )
    return scores.double().sum()


def _device(model: nn.Module) -> torch.device:
    return next((w.device for w in model.parameters()), torch.device("cpu"))
