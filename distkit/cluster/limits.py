"""The processors and memory that this machine, container or pod really allows.

The host's numbers are wrong in a container (Binder: 1 CPU and 2 GB of a 64-core host), so
the cgroup's quota counts.
"""

from __future__ import annotations

import math
import resource

import psutil

from distkit.cluster import machine
from distkit.errors import StartError


def cpus() -> int:
    """Processors this process may use: affinity, cut to the cgroup's quota, at least 1."""
    return max(1, math.ceil(min(machine.usable_cores(), machine.cpu_quota())))


def memory() -> int:
    """Bytes that new processes may still take: free memory, cut to the cgroup's limit."""
    return int(min(psutil.virtual_memory().available, machine.cgroup_memory()))


#: Files that a process of each kind has open at once, without a rank's own, and those that each
#: process of the cluster adds. The kernel's are beside those it has open already.
_FILES = {"kernel": (40, 1), "rank": (80, 1), "controller": (130, 6)}


def files(processes: int) -> dict[str, int]:
    """Files that a process of each kind has open in a cluster of so many processes."""
    return {kind: base + each * processes for kind, (base, each) in _FILES.items()}


def check_files(processes: int, controller: bool = True) -> None:
    """See whether so many processes, and a controller, may open as many files as they need.

    Raises:
        StartError: the limit is too low.
    """
    soft, hard = (
        math.inf if n == resource.RLIM_INFINITY else n
        for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    need = files(processes)
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
