"""Batch norm over the examples of all replicas: the layer that data parallelism changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distkit.algorithms.tensor_parallel import copy_to_ranks, sum_of_ranks


class SyncBatchNorm(nn.BatchNorm1d):
    """Batch norm whose mean and variance are those of all replicas' examples.

    ::

        m  = Σ_r Σ_i x_ri / n               all-reduce: sums and counts in one message
        s² = Σ_r Σ_i (x_ri - m)² / n        all-reduce
        y  = γ (x - m) / √(s² + ε) + β

    ``BatchNorm1d`` takes the mean of its own replica's examples, so that R replicas compute
    something else than one process on the whole batch. Here the gradient passes through the
    all-reduces, too: with equal shards they compute the same. One message for both sums would need
    s² = Σ x²/n - m², where nothing is left of a small variance beside a large mean. For evaluation
    it is ``BatchNorm1d``.

    Args:
        num_features: C, of inputs (B, C) or (B, C, L); further ones as for ``BatchNorm1d``.

    Source:
        ``torch.nn.SyncBatchNorm``, which needs GPUs; Ioffe and Szegedy, "Batch normalization",
        ICML 2015.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``; in training all ranks have to call it."""
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        over = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = x.new_tensor([x.numel() / self.num_features])
        sums, n = _both_ways(torch.cat([x.sum(over), count])).split([self.num_features, 1])
        mean = sums / n
        centred = x - mean.view(shape)
        variance = _both_ways(centred.square().sum(over)) / n
        self._follow(mean.detach(), variance.detach() * n.detach() / (n.detach() - 1))
        y: Tensor = centred / (variance + self.eps).sqrt().view(shape)
        return y * self.weight.view(shape) + self.bias.view(shape) if self.affine else y

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics follow, as ``BatchNorm1d`` does."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        rate = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, float(rate))
        self.running_var.lerp_(variance, float(rate))


def _both_ways(x: Tensor) -> Tensor:
    """The sum of all ranks' tensors; its gradient, too, is the sum of all ranks' gradients."""
    return sum_of_ranks(copy_to_ranks(x, None), None)
