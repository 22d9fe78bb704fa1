"""Assigns devices to ranks, chooses the backend, and explains the choice. Pure.

The machine's GPUs come from nvidia-smi (:func:`distkit.cluster.machine.gpus`). The status card, the
doctor and errors quote the explanation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distkit._format import count, human_bytes, joined, named
from distkit.errors import StartError

#: Estimated GPU memory of a rank: CUDA context, libraries and small tensors [bytes].
GPU_RANK_BYTES = 700_000_000

#: Oldest driver version for each major version of CUDA.
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}

#: Keeps NCCL from listening on other interfaces; ranks on several machines replace it later.
_NCCL = {"NCCL_SOCKET_IFNAME": "=lo"}


class Obstacle(NamedTuple):
    """The reason why a machine's GPUs cannot be used, and the remedy."""

    kind: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    ``index`` is nvidia-smi's; sizes are in bytes, 0 if unknown. With ``mig`` it is one MIG
    slice: CUDA shows a process only one, the first or the one in CUDA_VISIBLE_DEVICES.
    """

    index: int
    name: str = ""
    uuid: str = ""
    total: int = 0
    free: int = 0
    mig: bool = False

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"{'a slice of ' if self.mig else ''}GPU {self.index}"

    @property
    def capacity(self) -> float:
        """The number of ranks that fit in its free memory."""
        return self.free // GPU_RANK_BYTES if self.total else float("inf")


@dataclass(frozen=True)
class Gpus:
    """The GPUs that ranks on one machine may use.

    Args:
        usable: the GPUs in CUDA's order.
        obstacle: reason why no GPU is usable, although the machine may have some.
        nccl: version of torch's NCCL; () if torch has none.
    """

    usable: tuple[Gpu, ...] = ()
    obstacle: Obstacle | None = None
    nccl: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceAssignment:
    """The device of a rank.

    Args:
        device: torch's name of the device on the rank.
        gpu: the GPU; None for the CPU.
        fraction: share of the GPU's memory that torch may allocate; 0 for all of it.
    """

    device: str = "cpu"
    gpu: Gpu | None = None
    fraction: float = 0.0

    @property
    def summary(self) -> str:
        """The device, for the status card."""
        limit = f", at most {human_bytes(self.limit)}" if self.gpu and self.limit else ""
        return f"{self.device}{limit}"

    @property
    def limit(self) -> int:
        """GPU memory that torch may allocate [bytes]; 0 for all of it."""
        return int(self.fraction * self.gpu.total) if self.gpu else 0

    def environ(self, backend: str) -> dict[str, str]:
        """Return the environment variables for NCCL."""
        return _NCCL if self.gpu is not None and backend == "nccl" else {}


CPU = DeviceAssignment()


# -- detection -------------------------------------------------------------------------------------


def examine(found: Mapping[str, Any], torch: Mapping[str, Any]) -> Gpus:
    """Return the GPUs that CUDA would list, or the reason why it lists none.

    Args:
        found: result of :func:`distkit.cluster.machine.gpus`.
        torch: torch's versions of CUDA and NCCL; empty if torch did not respond.
    """
    devices = [Gpu(**entry) for entry in found["found"] if "error" not in entry]
    usable, hidden = _visible(devices, found.get("visible"))
    for obstacle in (_no_driver(found), hidden, _no_torch(found, torch)):
        if obstacle is not None and (found["found"] or obstacle.kind == "driver"):
            return Gpus((), obstacle)
    nccl = tuple(int(n) for n in (torch.get("nccl") or ())[:3])
    return Gpus(tuple(usable), None, nccl)


def _no_driver(found: Mapping[str, Any]) -> Obstacle | None:
    failed = [
        f"GPU {entry['index']}: {entry['error']}" for entry in found["found"] if "error" in entry
    ]
    if "error" in found or (failed and len(failed) == len(found["found"])):
        what = f"the GPU driver does not respond: {found.get('error') or joined(failed)}"
        return Obstacle("driver", what, "Reboot, or reload the driver.")
    return None


def _visible(devices: Sequence[Gpu], setting: str | None) -> tuple[list[Gpu], Obstacle | None]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: the first invalid name ends the list."""
    slices = [gpu for gpu in devices if gpu.mig]
    if slices and (setting is None or setting.startswith("MIG-")):
        return slices[:1], None
    if setting is None:
        return list(devices), None
    selected: list[Gpu] = []
    for name in filter(None, (name.strip() for name in setting.split(","))):
        matches = [gpu for gpu in devices if _matches(gpu, name)]
        if len(matches) != 1:
            break
        selected += matches
    if selected:
        return selected, None
    existing = joined([gpu.label for gpu in devices])
    what = f"CUDA_VISIBLE_DEVICES={setting!r} selects none of the GPUs here: {existing}"
    return [], Obstacle("hidden", what, "Unset it: del os.environ['CUDA_VISIBLE_DEVICES'].")


def _matches(gpu: Gpu, name: str) -> bool:
    """Return True for the GPU's index, and for a prefix of its UUID."""
    return name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name))


def _no_torch(found: Mapping[str, Any], torch: Mapping[str, Any]) -> Obstacle | None:
    if "cuda" not in torch:
        what = "torch did not respond, so its CUDA version is unknown"
        return Obstacle("torch", what, "Check that import torch works.")
    if not torch["cuda"]:
        return Obstacle("torch", "torch is built without CUDA", "Install torch with CUDA.")
    driver = found.get("driver", "")
    needed = OLDEST_DRIVERS.get(int(torch["cuda"].split(".")[0]), 0)
    if driver and int(driver.split(".")[0]) < needed:
        what = f"the driver {driver} is too old for CUDA {torch['cuda']}, for which torch is built"
        return Obstacle("old", what, f"Install driver {needed} or later, or an older torch.")
    return None


# -- assignment --------------------------------------------------------------------------------


def assign_devices(
    ranks: int,
    gpus: Gpus,
    device: str = "auto",
    backend: str = "auto",
    memory_fraction: float | None = None,
) -> tuple[tuple[DeviceAssignment, ...], str, str]:
    """Return each rank's device, the backend, and the reason for the status card.

    Ranks are assigned to GPUs round-robin. The backend is NCCL if each rank has its own GPU, else
    gloo, with copies in host memory.

    Raises:
        StartError: an argument is invalid, or the request cannot be met; the message names what is
            available.
    """
    _check(device, backend, memory_fraction)
    usable, why = _choose(ranks, device, gpus)
    if not usable:
        if backend == "nccl":
            raise StartError(
                f"backend='nccl' needs one GPU for each of {ranks} ranks; none is usable. "
                f"{why or 'Omit the backend.'}"
            )
        return (CPU,) * ranks, "gloo", f"gloo on CPU{': ' if why else ''}{why}"
    by_rank = [usable[r % len(usable)] for r in range(ranks)]
    sharers = Counter(by_rank)
    no_nccl = _why_not_nccl(by_rank, gpus)
    if no_nccl and backend == "nccl":
        raise StartError(
            f"backend='nccl' needs one GPU for each of {ranks} ranks: {no_nccl}. Use "
            f"backend='auto', or at most {count(len(usable), 'rank')}."
        )
    assignments = tuple(
        DeviceAssignment(
            f"cuda:{gpus.usable.index(gpu)}",
            gpu,
            memory_fraction or _memory_share(gpu, sharers[gpu]),
        )
        for gpu in by_rank
    )
    if not no_nccl and backend != "gloo":
        return assignments, "nccl", "nccl: every rank has its own GPU"
    note = f"gloo: {no_nccl or 'as requested'}, so messages go through host memory"
    return assignments, "gloo", note


def _check(device: str, backend: str, memory_fraction: float | None) -> None:
    if device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", device):
        raise StartError(
            f"device={device!r} is invalid. Use device='auto', 'cpu', 'cuda' or 'cuda:0'."
        )
    if backend not in ("auto", "gloo", "nccl"):
        raise StartError(f"backend={backend!r} is invalid. Use 'auto', 'gloo' or 'nccl'.")
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise StartError(
            f"memory_fraction={memory_fraction}: expected a fraction of a GPU's memory, more than "
            "0 and at most 1."
        )


def _choose(ranks: int, device: str, gpus: Gpus) -> tuple[Sequence[Gpu], str]:
    """Return the GPUs to assign; none, and the reason, if "auto" selects the CPU."""
    if device == "cpu":
        return (), ""
    usable, why = list(gpus.usable), str(gpus.obstacle or "")
    if not usable and device != "auto":
        why = why or (
            "torch sees no GPU here (no driver, or a CPU build of torch). Use device='cpu' or "
            "'auto', or install torch with CUDA."
        )
        raise StartError(f"device={device!r} was requested, but {why}")
    if ":" in device:
        index = int(device.partition(":")[2])
        if index >= len(usable):
            names = f"cuda:0 to cuda:{len(usable) - 1}" if len(usable) > 1 else "cuda:0"
            raise StartError(
                f"device={device!r} does not exist: this machine has {count(len(usable), 'GPU')}, "
                f"{names}. Use one of these names, or device='auto'."
            )
        usable = usable[index : index + 1]
    free = [gpu for gpu in usable if gpu.capacity >= 1] or usable
    full = _full(Counter(free[r % len(free)] for r in range(ranks))) if free else ""
    if full and device != "auto":
        raise StartError(
            f"{full} Use fewer ranks or device='cpu', or stop other programs there: nvidia-smi "
            "lists them."
        )
    return ((), full) if full else (free, why)


def _full(sharers: Mapping[Gpu, int]) -> str:
    """Describe the first GPU whose free memory is too small for its ranks; "" if none is."""
    for gpu, n in sharers.items():
        if n > gpu.capacity:
            return (
                f"{gpu.label} has {human_bytes(gpu.free)} of {human_bytes(gpu.total)} free, and "
                f"{count(n, 'rank')} need about {human_bytes(n * GPU_RANK_BYTES)}: "
                f"{gpu.capacity:g} fit."
            )
    return ""


def _why_not_nccl(by_rank: Sequence[Gpu], gpus: Gpus) -> str:
    """Return the reason why NCCL cannot connect these ranks; "" if it can."""
    if not gpus.nccl:
        return "torch is built without NCCL"
    sharers = {gpu: [r for r, other in enumerate(by_rank) if other == gpu] for gpu in by_rank}
    gpu, ranks = max(sharers.items(), key=lambda item: len(item[1]))
    if len(ranks) == 1:
        return ""
    return f"{named(ranks)} share {gpu.label}, and NCCL needs one GPU per rank"


def _memory_share(gpu: Gpu, sharers: int) -> float:
    """Return an equal share of the free memory, minus each rank's memory besides its tensors."""
    if sharers == 1:
        return 0.0
    if not gpu.total:
        return 1 / sharers
    return max(0.01, (gpu.free - sharers * GPU_RANK_BYTES / 2) / sharers / gpu.total)
