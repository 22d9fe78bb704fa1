"""What this machine, container or pod really allows: processors and memory.

The host's numbers are wrong in a container (Binder: 1 CPU and 2 GB of a 64-core host), so
the cgroup's quota counts.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def cpus() -> int:
    """Processors this process may use: affinity, cut to the cgroup's quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, math.ceil(min(usable, _cpu_quota())))


def _cpu_quota() -> float:
    v2 = _words(_CGROUP / "cpu.max")
    if len(v2) == 2 and v2[0] != "max":
        return int(v2[0]) / int(v2[1])
    quota = _words(_CGROUP / "cpu/cpu.cfs_quota_us")
    period = _words(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return math.inf


def memory() -> int:
    """Bytes that new processes may still take: free memory, cut to the cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    versions = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    for limit, used in versions:
        most, now = _words(_CGROUP / limit), _words(_CGROUP / used)
        if most and now and most[0] != "max":
            free = min(free, max(0, int(most[0]) - int(now[0])))
    return free


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
