"""Plans a cluster before its ranks start: the number of processes, their devices, and the backend.

Planning has no side effects: it computes a plan from the machine's resources, or raises
:class:`StartError`. The status card, the doctor and error messages quote the reasons for the plan.
The machine's GPUs are those that nvidia-smi lists (:func:`distkit.cluster.machine.gpus`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distkit._format import count, human_bytes, joined, named
from distkit.errors import StartError

#: Memory per additional rank [bytes], including small tensors; forked ranks share torch's memory.
RANK_BYTES = 90_000_000

#: Default number of ranks.
DEFAULT_RANKS = 4

#: Recommended maximum number of processes per core. If there are more, they start slowly and
#: compete for the cores.
PROCESSES_PER_CORE = 8


@dataclass(frozen=True)
class Plan:
    """The plan of a cluster.

    ``devices`` contains torch's name for each rank's device. ``note`` explains the backend on the
    status card, and ``oversubscription_warning`` describes the effect of too few cores.
    """

    ranks: int
    servers: int
    backend: str
    devices: tuple[str, ...]
    threads: int
    note: str = ""
    oversubscription_warning: str = ""

    @property
    def processes(self) -> int:
        """Number of processes: ranks, servers, and the scheduler that servers need."""
        return self.ranks + self.servers + (1 if self.servers else 0)

    @property
    def description(self) -> str:
        """Summary of the processes."""
        if self.servers:
            return f"{count(self.ranks, 'worker')}, {count(self.servers, 'server')}, 1 scheduler"
        return count(self.ranks, "rank")


def make_plan(
    ranks: int,
    servers: int,
    device: str,
    backend: str,
    *,
    cpus: int,
    memory: int,
    gpus: Gpus | None = None,
    threads: int | None = None,
) -> Plan:
    """Choose devices, backend and threads.

    Args:
        ranks: number of ranks (workers, if there are servers).
        servers: number of parameter servers.
        device: "auto", "cpu", "cuda" or "cuda:1".
        backend: "auto", "gloo" or "nccl".
        cpus: number of usable processors.
        memory: memory available to new processes [bytes].
        gpus: the machine's GPUs, or None if it has none.
        threads: torch threads per rank, or None to share the processors equally.

    Raises:
        StartError: the request is invalid or cannot be met; the message says what is available.
    """
    check_counts(ranks, servers)
    _check_memory(ranks, servers, memory, cpus)
    devices, backend, note = assign_devices(ranks, gpus or Gpus(), device, backend)
    if threads is None:
        threads = max(1, cpus // (ranks + servers))
    return Plan(
        ranks,
        servers,
        backend,
        devices,
        threads,
        note,
        oversubscription_warning=_warn_oversubscribed(ranks + servers, cpus),
    )


def _warn_oversubscribed(processes: int, cpus: int) -> str:
    """Return a warning if the processes oversubscribe the cores; else ""."""
    limit = PROCESSES_PER_CORE * cpus
    if processes <= limit:
        return ""
    return (
        f"{processes} processes share {count(cpus, 'core')}: they start slowly and compete for "
        f"the cores, so timings are unreliable. Use at most {limit} here, and "
        "dk.simulation.simulate for more ranks."
    )


def check_counts(ranks: int, servers: int) -> None:
    """Validate the numbers of ranks and servers.

    Raises:
        StartError: a number is not an integer, or is too small.
    """
    for name, n, minimum in ("ranks", ranks, "1 rank"), ("servers", servers, "0 servers"):
        if not isinstance(n, int) or isinstance(n, bool):
            raise StartError(f"{name} must be an integer, not {n!r}. Try dk.Cluster(4).")
        if n < int(minimum[0]):
            raise StartError(f"a cluster needs at least {minimum}; got {n}. Try dk.Cluster(4).")


def _check_memory(ranks: int, servers: int, memory: int, cpus: int) -> None:
    processes = ranks + servers + (1 if servers else 0)
    capacity = max(0, memory // RANK_BYTES)
    if processes > capacity:
        suggestion = min(capacity, PROCESSES_PER_CORE * cpus)
        remedy = f"Use dk.Cluster({suggestion})" if capacity else "Stop other programs or clusters"
        raise StartError(
            f"{processes} processes need about {human_bytes(processes * RANK_BYTES)} of "
            f"memory, but only {human_bytes(memory)} is free, enough for {capacity}. {remedy}."
        )


# -- GPUs ------------------------------------------------------------------------------------------


class Obstacle(NamedTuple):
    """The reason that a machine's GPUs cannot be used, and the remedy."""

    kind: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}"


@dataclass(frozen=True)
class Gpu:
    """A GPU, with the index, name and UUID that nvidia-smi reports."""

    index: int
    name: str
    uuid: str


@dataclass(frozen=True)
class Gpus:
    """The GPUs that ranks on one machine may use.

    Args:
        usable: the GPUs in CUDA's order.
        obstacle: why no GPU is usable, although the machine may have some.
        nccl: version of torch's NCCL, or () if torch has none.
    """

    usable: tuple[Gpu, ...] = ()
    obstacle: Obstacle | None = None
    nccl: tuple[int, ...] = ()


def examine(report: Mapping[str, Any], torch: Mapping[str, Any]) -> Gpus:
    """Return the GPUs that CUDA would list, or the reason that it lists none.

    Args:
        report: result of :func:`distkit.cluster.machine.gpus`.
        torch: torch's versions of CUDA and NCCL; empty if torch did not respond.
    """
    if "error" in report:
        reason = f"the GPU driver does not respond: {report['error']}"
        return Gpus((), Obstacle("driver", reason, "Reboot, or reload the driver."))
    devices = [Gpu(**entry) for entry in report["found"]]
    if not devices:
        return Gpus()
    usable, setting = devices, report.get("visible")
    if setting is not None:
        names = [name.strip() for name in setting.split(",")]
        usable = [gpu for name in names for gpu in devices if name in (str(gpu.index), gpu.uuid)]
    if not usable:
        existing = joined([f"GPU {gpu.index}" for gpu in devices])
        reason = f"CUDA_VISIBLE_DEVICES={setting!r} selects none of the GPUs here: {existing}"
        remedy = "Unset it: del os.environ['CUDA_VISIBLE_DEVICES']."
        return Gpus((), Obstacle("hidden", reason, remedy))
    if not torch.get("cuda"):
        reason, remedy = (
            ("torch is built without CUDA", "Install torch with CUDA.")
            if "cuda" in torch
            else ("torch does not respond", "Run python -c 'import torch' to see why.")
        )
        return Gpus((), Obstacle("torch", reason, remedy))
    return Gpus(tuple(usable), None, tuple(torch["nccl"] or ()))


def assign_devices(
    ranks: int, gpus: Gpus, device: str = "auto", backend: str = "auto"
) -> tuple[tuple[str, ...], str, str]:
    """Return each rank's device, the backend, and a note that explains the backend.

    Ranks are assigned to GPUs round-robin. By default, the backend is NCCL if each rank has its own
    GPU, else gloo, which transfers messages between GPUs through host memory.

    Raises:
        StartError: the request is invalid or cannot be met; the message says what is available.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise StartError(
            f"device={device!r} is invalid. Use device='auto', 'cpu', 'cuda' or 'cuda:0'."
        )
    if backend not in ("auto", "gloo", "nccl"):
        raise StartError(f"backend={backend!r} is invalid. Use 'auto', 'gloo' or 'nccl'.")
    usable, reason = _choose(device, gpus)
    if not usable:
        if backend == "nccl":
            raise StartError(
                f"backend='nccl' needs one GPU for each of {ranks} ranks; none is usable. "
                f"{reason or 'Omit the backend.'}"
            )
        return ("cpu",) * ranks, "gloo", f"gloo on CPU{': ' if reason else ''}{reason}"
    devices = tuple(usable[r % len(usable)] for r in range(ranks))
    no_nccl = _why_not_nccl(devices, gpus)
    if backend == "gloo" or (no_nccl and backend == "auto"):
        return (
            devices,
            "gloo",
            f"gloo: {no_nccl or 'as requested'}; messages go through host memory",
        )
    if no_nccl:
        raise StartError(
            f"backend='nccl' needs one GPU for each of {ranks} ranks: {no_nccl}. Use "
            f"backend='auto', or fewer ranks."
        )
    return devices, "nccl", "nccl: every rank has its own GPU"


def _choose(device: str, gpus: Gpus) -> tuple[Sequence[str], str]:
    """Return the devices to assign, and the reason if "auto" cannot use the GPUs."""
    names = [f"cuda:{i}" for i in range(len(gpus.usable))]
    if device == "cpu":
        return [], ""
    if device == "auto":
        return names, str(gpus.obstacle or "")
    if not names:
        reason = gpus.obstacle or (
            "nvidia-smi lists no GPU here, or is not installed. Use device='cpu' or 'auto', or "
            "install the NVIDIA driver."
        )
        raise StartError(f"device={device!r} was requested, but {reason}")
    if device == "cuda":
        return names, ""
    if device not in names:
        raise StartError(
            f"device={device!r} does not exist: this machine has {joined(names)}. Use one of "
            "these names, or device='auto'."
        )
    return [device], ""


def _why_not_nccl(devices: Sequence[str], gpus: Gpus) -> str:
    """Explain why NCCL cannot connect ranks on these devices, or return "" if it can."""
    if not gpus.nccl:
        return "torch is built without NCCL"
    shared_device, sharers = Counter(devices).most_common(1)[0]
    if sharers == 1:
        return ""
    ranks = [rank for rank, device in enumerate(devices) if device == shared_device]
    return f"{named(ranks)} share {shared_device}, and NCCL needs one GPU per rank"
