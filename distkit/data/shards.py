"""This rank's replica index, and its rows of tensors that all ranks have."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor


def shard(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return this rank's equal share of each tensor, every R-th row from its rank on.

    Remaining rows are dropped, because the average of the shards' gradients is the gradient of the
    whole batch only if all shards have the same size.

    Args:
        tensors: shape (N, …), the same on every rank.

    Returns:
        Tensors of shape (N // R, …).
    """
    rank, replicas = place()
    return tuple(t[: len(t) // replicas * replicas][rank::replicas] for t in tensors)


def place() -> tuple[int, int]:
    """Return this rank and the world size, also in a replacement process without a group."""
    from_environment = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if from_environment and not dist.is_initialized():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.get_rank(), dist.get_world_size()
