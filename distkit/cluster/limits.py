"""The processors and memory that this machine, container or pod really allows.

The host's numbers are wrong in a container (Binder: 1 CPU and 2 GB of a 64-core host), so
the cgroup's quota counts.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import psutil

from distkit.errors import StartError

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


#: Files that a process of each kind has open at once, without a rank's own, and those that each
#: process of the cluster adds. The kernel's are beside those it has open already.
_FILES = {"kernel": (40, 1), "rank": (80, 1), "controller": (130, 6)}


def check_files(processes: int, controller: bool = True) -> None:
    """See whether so many processes, and a controller, may open as many files as they need.

    Raises:
        StartError: the limit is too low.
    """
    soft, hard = (
        math.inf if n == resource.RLIM_INFINITY else n
        for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    need = {kind: base + each * processes for kind, (base, each) in _FILES.items()}
    need["kernel"] += psutil.Process().num_fds()
    need["controller"] *= controller
    ours = max(need["kernel"], need["rank"])
    if soft < ours or hard < need["controller"]:
        most = max(ours, need["controller"])
        limit = f"{soft}" if soft == hard else f"{soft}, at most {hard}"
        raise StartError(
            f"a process may open {limit} files at once here (RLIMIT_NOFILE), and a cluster of "
            f"{processes} processes needs {most}. Set the limit before Jupyter starts "
            f"(ulimit -n {max(1024, most)}), close files, or ask for fewer ranks."
        )


def raise_files() -> None:
    """Let this process open as many files as it may allow itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
