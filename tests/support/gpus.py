"""Fake GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distkit.cluster.gpus import Gpu, Gpus

GIB = 1 << 30


def some_gpus(n: int, nccl: Sequence[int] = (2, 29, 7), **facts: Any) -> Gpus:
    """Return ``n`` GPUs of 80 GiB, with torch's NCCL."""
    gpu = Gpu(0, "NVIDIA H100", "GPU-0", 80 * GIB, 80 * GIB)
    each = tuple(replace(gpu, **{"index": i, "uuid": f"GPU-{i}", **facts}) for i in range(n))
    return Gpus(each, None, tuple(nccl))
