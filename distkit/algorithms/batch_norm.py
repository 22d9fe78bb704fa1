"""Batch norm over the examples of all replicas, as in a single process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distkit.algorithms.collectives import copy_to_ranks, sum_of_ranks


class SyncBatchNorm(nn.BatchNorm1d):
    """Batch norm with the mean and variance over the examples of all replicas.

    ::

        m  = Σ_r Σ_i x_ri / n               all-reduce: sums and counts in one message
        s² = Σ_r Σ_i (x_ri - m)² / n        all-reduce
        y  = γ (x - m) / √(s² + ε) + β

    ``BatchNorm1d`` uses only the statistics of its replica's examples, so R replicas do not match
    one process on the whole batch. Here, the gradient also passes through the all-reduces, so the
    results match if the shards are equal in size. Sending both sums in one message would require
    s² = Σ x²/n - m², which loses precision if the variance is small relative to the mean. In
    evaluation mode, this module equals ``BatchNorm1d``.

    Args:
        num_features: C, for inputs (B, C) or (B, C, L). The other arguments are the same as for
            ``BatchNorm1d``.

    Source:
        ``torch.nn.SyncBatchNorm``, which needs GPUs; Ioffe and Szegedy, "Batch normalization",
        ICML 2015.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``. In training mode, all ranks must call this method."""
        if not self.training:
            return super().forward(x)
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = x.new_tensor([x.numel() / self.num_features])
        sums, n = _differentiable_all_reduce(torch.cat([x.sum(dims), count])).split(
            [self.num_features, 1]
        )
        mean = sums / n
        centered = x - mean.view(shape)
        variance = _differentiable_all_reduce(centered.square().sum(dims)) / n
        self._update_running_stats(mean.detach(), variance.detach() * n.detach() / (n.detach() - 1))
        y: Tensor = centered / (variance + self.eps).sqrt().view(shape)
        return y * self.weight.view(shape) + self.bias.view(shape) if self.affine else y

    def _update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, as ``BatchNorm1d`` does."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, float(momentum))
        self.running_var.lerp_(variance, float(momentum))


def _differentiable_all_reduce(x: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors; its gradient is the sum of all ranks' gradients."""
    return sum_of_ranks(copy_to_ranks(x, None), None)
