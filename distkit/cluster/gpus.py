"""Assigns devices to ranks, chooses the backend, and explains the choice.

No side effects. nvidia-smi lists the machine's GPUs (:func:`distkit.cluster.machine.gpus`). The
status card, the doctor and errors quote the explanation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distkit._format import joined, named
from distkit.errors import StartError


class Obstacle(NamedTuple):
    """The reason why a machine's GPUs cannot be used, and the remedy."""

    kind: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}"


@dataclass(frozen=True)
class Gpu:
    """A GPU, with the number and name that nvidia-smi reports."""

    index: int
    name: str
    uuid: str


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


# -- detection -------------------------------------------------------------------------------------


def examine(found: Mapping[str, Any], torch: Mapping[str, Any]) -> Gpus:
    """Return the GPUs that CUDA would list, or the reason why it lists none.

    Args:
        found: result of :func:`distkit.cluster.machine.gpus`.
        torch: torch's versions of CUDA and NCCL; empty if torch did not respond.
    """
    if "error" in found:
        reason = f"the GPU driver does not respond: {found['error']}"
        return Gpus((), Obstacle("driver", reason, "Reboot, or reload the driver."))
    devices = [Gpu(**entry) for entry in found["found"]]
    if not devices:
        return Gpus()
    usable, setting = devices, found.get("visible")
    if setting is not None:
        names = [name.strip() for name in setting.split(",")]
        usable = [gpu for name in names for gpu in devices if name in (str(gpu.index), gpu.uuid)]
    if not usable:
        existing = joined([f"GPU {gpu.index}" for gpu in devices])
        reason = f"CUDA_VISIBLE_DEVICES={setting!r} selects none of the GPUs here: {existing}"
        remedy = "Unset it: del os.environ['CUDA_VISIBLE_DEVICES']."
        return Gpus((), Obstacle("hidden", reason, remedy))
    if not torch.get("cuda"):
        reason = "torch is built without CUDA" if "cuda" in torch else "torch does not respond"
        return Gpus((), Obstacle("torch", reason, "Install torch with CUDA."))
    return Gpus(tuple(usable), None, tuple(torch["nccl"] or ()))


# -- assignment --------------------------------------------------------------------------------


def assign_devices(
    ranks: int, gpus: Gpus, device: str = "auto", backend: str = "auto"
) -> tuple[tuple[str, ...], str, str]:
    """Return each rank's device, the backend, and the reason for the status card.

    Ranks are assigned to GPUs round-robin. The backend is NCCL if each rank has its own GPU, else
    gloo, with copies in host memory.

    Raises:
        StartError: an argument is invalid, or the request cannot be met; the message names what is
            available.
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
        note = f"gloo: {no_nccl or 'as requested'}, so messages go through host memory"
        return devices, "gloo", note
    if no_nccl:
        raise StartError(
            f"backend='nccl' needs one GPU for each of {ranks} ranks: {no_nccl}. Use "
            f"backend='auto', or fewer ranks."
        )
    return devices, "nccl", "nccl: every rank has its own GPU"


def _choose(device: str, gpus: Gpus) -> tuple[Sequence[str], str]:
    """Return the devices to assign, or none and the reason if "auto" selects the CPU."""
    existing = [f"cuda:{i}" for i in range(len(gpus.usable))]
    if device == "cpu":
        return [], ""
    if device == "auto":
        return existing, str(gpus.obstacle or "")
    if not existing:
        reason = gpus.obstacle or (
            "torch sees no GPU here (no driver, or a CPU build of torch). Use device='cpu' or "
            "'auto', or install torch with CUDA."
        )
        raise StartError(f"device={device!r} was requested, but {reason}")
    if device == "cuda":
        return existing, ""
    if device not in existing:
        raise StartError(
            f"device={device!r} does not exist: this machine has {joined(existing)}. Use one of "
            "these names, or device='auto'."
        )
    return [device], ""


def _why_not_nccl(devices: Sequence[str], gpus: Gpus) -> str:
    """Return the reason why NCCL cannot connect ranks on these devices; "" if it can."""
    if not gpus.nccl:
        return "torch is built without NCCL"
    shared, sharers = Counter(devices).most_common(1)[0]
    if sharers == 1:
        return ""
    ranks = [rank for rank, device in enumerate(devices) if device == shared]
    return f"{named(ranks)} share {shared}, and NCCL needs one GPU per rank"
