"""Fake GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from distkit.cluster.plan import Gpu, Gpus


def some_gpus(n: int, nccl: Sequence[int] = (2, 29, 7)) -> Gpus:
    """Return ``n`` fake GPUs, and a version of NCCL."""
    return Gpus(tuple(Gpu(i, "NVIDIA H100", f"GPU-{i}") for i in range(n)), None, tuple(nccl))
