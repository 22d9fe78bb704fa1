"""Queries the processors, memory and GPUs that this machine, container or pod provides.

In a container the host's numbers are too large (Binder: 1 CPU and 2 GB of a 64-core host), so the
cgroup's limits apply. The doctor sends this file to machines where distkit may not be installed,
so its top level imports only the standard library. The GPUs are listed without CUDA, because the
forks of a process that has initialized CUDA cannot use it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

_CGROUP, _PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

#: Timeout for nvidia-smi [s]. The program is slow if it must first load the driver.
SMI_TIMEOUT = 20.0

Json = dict[str, Any]


def usable_cores() -> int:
    """Return the number of processors in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float:
    """Return the number of processors that the cgroups allow, or infinity if there is no limit."""
    limits = [read_fields(cgroup / "cpu.max") for cgroup in cgroups()]
    quotas = [int(limit[0]) / int(limit[1]) for limit in limits if limit and limit[0] != "max"]
    return min(quotas, default=math.inf)


def cpus() -> int:
    """Return the number of processors in the affinity mask, limited by the cgroups' quotas."""
    return max(1, math.ceil(min(usable_cores(), cpu_quota())))


def memory() -> int:
    """Return the memory available to new processes, limited by the cgroups [bytes]."""
    import psutil

    return int(min(psutil.virtual_memory().available, cgroup_memory()))


def cgroup_memory() -> float:
    """Return the memory that the cgroups still allow [bytes], or infinity if there is no limit."""
    return min(map(_memory_left, cgroups()), default=math.inf)


def _memory_left(cgroup: Path) -> float:
    limit, used = read_fields(cgroup / "memory.max"), read_fields(cgroup / "memory.current")
    if not limit or not used or limit[0] == "max":
        return math.inf
    fields = read_fields(cgroup / "memory.stat")
    stat = dict(zip(fields[::2], fields[1::2], strict=False))
    # the page cache is reclaimable
    return max(0, int(limit[0]) - int(used[0]) + int(stat.get("inactive_file", 0)))


def cgroups() -> list[Path]:
    """Return the cgroup (version 2) of this process and its ancestors, whose limits also apply.

    In a container the process's own cgroup is often the outermost visible one. systemd services,
    such as a user's server on a hub, and Slurm jobs have nested cgroups.
    """
    paths = [
        line.removeprefix("0::/") for line in read_fields(_PROC_CGROUP) if line.startswith("0::/")
    ]
    folder = _CGROUP.joinpath(*paths)
    return [folder, *folder.parents]


def read_fields(path: Path) -> list[str]:
    """Return the fields of a /proc or cgroup file, or [] if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def local_address(peer: str) -> str:
    """Return this machine's source address for packets to ``peer``, without sending a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((peer, 9))
        return str(s.getsockname()[0])


# -- GPUs ------------------------------------------------------------------------------------------


def gpus() -> Json:
    """Return the GPUs that nvidia-smi lists, and the setting of CUDA_VISIBLE_DEVICES.

    ``found`` lists each GPU's index, name and UUID, ``driver`` is the driver's version, and
    ``visible`` is the setting. If nvidia-smi fails, ``error`` is its message.
    """
    report: Json = {"found": [], "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    if not shutil.which("nvidia-smi"):
        return report
    # the name is last, since it may contain a comma
    command = ["nvidia-smi", "--query-gpu=index,uuid,driver_version,name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {**report, "error": f"nvidia-smi timed out after {SMI_TIMEOUT:.0f} s"}
    rows = re.findall(r"^(\d+), (GPU-\S+), ([\d.]+), (.+)", result.stdout, re.MULTILINE)
    for index, uuid, report["driver"], name in rows:
        report["found"].append({"index": int(index), "name": name, "uuid": uuid})
    if result.returncode and not rows and "No devices" not in result.stdout:
        report["error"] = (result.stdout + result.stderr).strip().partition("\n")[0]
    return report
