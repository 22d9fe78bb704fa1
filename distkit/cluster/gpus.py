"""Which rank computes on which GPU, by what the ranks talk then, and why. Pure.

What a machine has comes from nvidia-smi (:func:`distkit.cluster.machine.gpus`). What is chosen is
said in words: on the status card, by the doctor, and in errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distkit._format import count, human_bytes, joined, named
from distkit.errors import StartError

#: What a rank takes on a GPU: CUDA's context, libraries, a little for tensors [bytes]; estimated.
GPU_RANK_BYTES = 700_000_000

#: The oldest driver of each version of CUDA.
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}

#: NCCL would listen on any other interface; ranks on several machines are told theirs later.
_NCCL = {"NCCL_SOCKET_IFNAME": "=lo"}


class Obstacle(NamedTuple):
    """Why a machine's GPUs cannot be used, and the remedy."""

    kind: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one (MIG).

    ``index`` is nvidia-smi's; ``slice`` is the number of a slice there, None for a whole
    GPU; sizes are in bytes, 0 if nobody tells them.
    """

    index: int
    name: str = ""
    uuid: str = ""
    total: int = 0
    free: int = 0
    slice: int | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        part = "" if self.slice is None else f"slice {self.slice} of "
        return f"{part}GPU {self.index}"

    @property
    def fit(self) -> float:
        """So many ranks have room in its memory."""
        return self.free // GPU_RANK_BYTES if self.total else float("inf")


@dataclass(frozen=True)
class Gpus:
    """What ranks on one machine may use.

    Args:
        usable: the GPUs in the order in which CUDA numbers them.
        obstacle: why there are none, although there could be.
        nccl: the version of torch's NCCL, () if it has none.
    """

    usable: tuple[Gpu, ...] = ()
    obstacle: Obstacle | None = None
    nccl: tuple[int, ...] = ()


@dataclass(frozen=True)
class Seat:
    """Where a rank computes.

    Args:
        device: as the rank names it.
        gpu: which that is, None for the CPU.
        fraction: of the GPU's memory that torch may take; 0 for all of it.
        alone: the rank sees no other GPU, so that this one is its cuda:0.
    """

    device: str = "cpu"
    gpu: Gpu | None = None
    fraction: float = 0.0
    alone: bool = False

    @property
    def where(self) -> str:
        """The device, for the status card."""
        most = f", at most {human_bytes(self.limit)}" if self.gpu and self.limit else ""
        other = f" = {self.gpu.label}" if self.gpu and self.alone else ""
        return f"{self.device}{other}{most}"

    @property
    def limit(self) -> int:
        """How much of the GPU's memory torch may take [bytes], 0 for all of it."""
        return int(self.fraction * self.gpu.total) if self.gpu else 0

    def environ(self, backend: str) -> dict[str, str]:
        """The environment variables by which CUDA and NCCL know of it."""
        if self.gpu is None:
            return {}
        found = {"CUDA_VISIBLE_DEVICES": self.gpu.uuid} if self.alone else {}
        return found | (_NCCL if backend == "nccl" else {})


CPU = Seat()


# -- what there is ---------------------------------------------------------------------------------


def examine(found: Mapping[str, Any], torch: Mapping[str, Any]) -> Gpus:
    """The GPUs that CUDA would show, or why it shows none.

    Args:
        found: the answer of :func:`distkit.cluster.machine.gpus`.
        torch: its versions of CUDA and NCCL; empty if it did not answer.
    """
    devices = [gpu for each in found["found"] for gpu in _devices(each)]
    usable, obstacle = _visible(devices, found.get("visible"))
    for why in (_no_driver(found), obstacle, _no_torch(found, torch)):
        if why is not None and (found["found"] or why.kind == "driver"):
            return Gpus((), why)
    nccl = tuple(int(n) for n in (torch.get("nccl") or ())[:3])
    return Gpus(tuple(usable), None, nccl)


def _devices(each: Mapping[str, Any]) -> list[Gpu]:
    """What CUDA takes a GPU for: itself; in MIG mode its slices, each to who sees no other."""
    facts = ("name", "uuid", "total", "free")
    slices = each.get("slices")
    if slices is None:
        known = {name: each[name] for name in facts if name in each}
        return [] if "error" in each else [Gpu(each.get("index", 0), **known)]
    return [
        Gpu(each["index"], **{name: part[name] for name in facts}, slice=n)
        for n, part in enumerate(slices)
    ]


def _no_driver(found: Mapping[str, Any]) -> Obstacle | None:
    lost = [f"GPU {each['index']}: {each['error']}" for each in found["found"] if "error" in each]
    if "error" in found or (lost and len(lost) == len(found["found"])):
        what = f"the GPU driver does not answer: {found.get('error') or joined(lost)}"
        return Obstacle("driver", what, "Reboot, or load the driver anew.")
    return None


def _visible(devices: Sequence[Gpu], setting: str | None) -> tuple[list[Gpu], Obstacle | None]:
    """What CUDA_VISIBLE_DEVICES leaves, by CUDA's rules: the first wrong name ends the list."""
    if not devices:
        remedy = "Make some (nvidia-smi mig -cgi … -C), or switch MIG off (nvidia-smi -mig 0)."
        return [], Obstacle("mig", "the GPUs are in MIG mode and have no slices", remedy)
    if setting is None:
        return list(devices), None
    found: list[Gpu] = []
    for name in filter(None, (name.strip() for name in setting.split(","))):
        meant = [gpu for gpu in devices if _is_meant(gpu, name)]
        if not meant or (len({gpu.index for gpu in meant}) > 1):
            break
        if meant[0] in found:
            what = (
                f"CUDA_VISIBLE_DEVICES={setting!r} names {meant[0].label} twice, so CUDA shows none"
            )
            return [], Obstacle("hidden", what, "Name each GPU once.")
        found += meant
    if found:
        return found, None
    there = joined([gpu.label for gpu in devices])
    what = f"CUDA_VISIBLE_DEVICES={setting!r} names none of what is there: {there}"
    return [], Obstacle("hidden", what, "Unset it: del os.environ['CUDA_VISIBLE_DEVICES'].")


def _is_meant(gpu: Gpu, name: str) -> bool:
    """True for a GPU's number, and for the beginning of its UUID or its slice's."""
    return name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name))


def _no_torch(found: Mapping[str, Any], torch: Mapping[str, Any]) -> Obstacle | None:
    if "cuda" not in torch:
        what = "torch did not answer, so its CUDA version is unknown"
        return Obstacle("torch", what, "Make import torch work.")
    if not torch["cuda"]:
        return Obstacle("torch", "torch is built without CUDA", "Install torch with CUDA.")
    driver = found.get("driver", "")
    needed = OLDEST_DRIVERS.get(int(torch["cuda"].split(".")[0]), 0)
    if driver and int(driver.split(".")[0]) < needed:
        what = f"the driver {driver} is too old for CUDA {torch['cuda']}, which torch is built for"
        return Obstacle("old", what, f"Install driver {needed} or later, or an older torch.")
    return None


# -- who gets what -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """What a user asks for, as of :class:`distkit.Cluster`."""

    device: str = "auto"
    backend: str = "auto"
    memory_fraction: float | None = None

    def check(self) -> None:
        """See whether these are known.

        Raises:
            StartError: one is not.
        """
        kind, _, index = self.device.partition(":")
        if self.device not in ("auto", "cpu") and (
            kind != "cuda" or (":" in self.device and not index.isdigit())
        ):
            raise StartError(
                f"device={self.device!r} is not known. Use device='auto', 'cpu', 'cuda' or "
                "'cuda:0'."
            )
        if self.backend not in ("auto", "gloo", "nccl"):
            raise StartError(
                f"backend={self.backend!r} is not known. Use 'auto', 'gloo' or 'nccl'."
            )
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise StartError(
                f"memory_fraction={self.memory_fraction}: give a part of a GPU's memory, more than "
                "0 and at most 1."
            )


def seat_ranks(ranks: int, wanted: Wanted, gpus: Gpus) -> tuple[tuple[Seat, ...], str, str]:
    """Each rank's place, the backend, and why, for the status card.

    Ranks go round the GPUs. NCCL serves them if each has a GPU of its own; else gloo, with copies
    in host memory.

    Raises:
        StartError: what was asked for is not to be had; the message says what is.
    """
    wanted.check()
    usable, why = _choose(ranks, wanted.device, gpus)
    if not usable:
        if wanted.backend == "nccl":
            raise StartError(
                f"backend='nccl' needs one GPU for each of {ranks} ranks; 0 can be used. "
                f"{why or 'Leave it out.'}"
            )
        return (CPU,) * ranks, "gloo", f"gloo on CPU{': ' if why else ''}{why}"
    taken = [usable[r % len(usable)] for r in range(ranks)]
    shared = Counter(taken)
    slow = _why_not_nccl(taken, gpus)
    if slow and wanted.backend == "nccl":
        raise StartError(
            f"backend='nccl' needs one GPU for each of {ranks} ranks: {slow}. Use backend='auto', "
            f"or at most {count(len(usable), 'rank')}."
        )
    # CUDA shows who sees a slice nothing beside it
    alone = any(gpu.slice is not None for gpu in gpus.usable)
    seats = tuple(
        Seat(
            "cuda:0" if alone else f"cuda:{gpus.usable.index(gpu)}",
            gpu,
            wanted.memory_fraction or _part(gpu, shared[gpu]),
            alone,
        )
        for gpu in taken
    )
    backend = "gloo" if slow or wanted.backend == "gloo" else "nccl"
    if backend == "nccl":
        return seats, backend, "nccl: every rank has a GPU of its own"
    note = f"gloo: {slow or 'as asked'}, so messages go through host memory"
    return seats, backend, note + _faster(usable, max(shared.values()), gpus)


def _choose(ranks: int, device: str, gpus: Gpus) -> tuple[Sequence[Gpu], str]:
    """The GPUs to go round; none, and why, where "auto" is the CPU."""
    if device == "cpu":
        return (), ""
    usable, why = list(gpus.usable), str(gpus.obstacle or "")
    if not usable and device != "auto":
        why = why or (
            "torch sees no GPU here (no driver, or a CPU build of torch). Use device='cpu' or "
            "'auto', or install torch with CUDA."
        )
        raise StartError(f"device={device!r} was asked for, and {why}")
    if ":" in device:
        index = int(device.partition(":")[2])
        if index >= len(usable):
            have = f"cuda:0 to cuda:{len(usable) - 1}" if len(usable) > 1 else "cuda:0"
            raise StartError(
                f"device={device!r} was asked for, of {count(len(usable), 'GPU')} here: {have}. "
                "Name one of those, or use device='auto'."
            )
        usable = usable[index : index + 1]
    roomy = [gpu for gpu in usable if gpu.fit >= 1] or usable
    full = _full(Counter(roomy[r % len(roomy)] for r in range(ranks))) if roomy else ""
    if full and device != "auto":
        raise StartError(
            f"{full} Use fewer ranks or device='cpu', or stop other programs there: nvidia-smi "
            "lists them."
        )
    return ((), full) if full else (roomy, why)


def _full(shared: Mapping[Gpu, int]) -> str:
    """What is wrong with the first GPU that has no room for its ranks; "" if all have."""
    for gpu, n in shared.items():
        if n > gpu.fit:
            return (
                f"{gpu.label} has {human_bytes(gpu.free)} of {human_bytes(gpu.total)} free, too "
                f"little for {count(n, 'rank')}: about {human_bytes(n * GPU_RANK_BYTES)}, so "
                f"{gpu.fit:g} fit."
            )
    return ""


def _why_not_nccl(taken: Sequence[Gpu], gpus: Gpus) -> str:
    """The reason why NCCL does not serve these ranks; "" if it does."""
    if not gpus.nccl:
        return "torch is built without NCCL"
    sharers = {gpu: [r for r, other in enumerate(taken) if other == gpu] for gpu in taken}
    gpu, ranks = max(sharers.items(), key=lambda item: len(item[1]))
    if len(taken) > 1 and any(gpu.slice is not None for gpu in taken):
        return "NCCL does not connect MIG slices"
    if len(ranks) == 1:
        return ""
    return f"{named(ranks)} share {gpu.label}, and NCCL needs one GPU per rank"


def _part(gpu: Gpu, sharers: int) -> float:
    """An equal part of what is free, without what each rank takes beside its tensors."""
    if sharers == 1:
        return 0.0
    if not gpu.total:
        return 1 / sharers
    return max(0.01, (gpu.free - sharers * GPU_RANK_BYTES / 2) / sharers / gpu.total)


def _faster(usable: Sequence[Gpu], most: int, gpus: Gpus) -> str:
    """The number of ranks that would have a GPU each, where ranks share GPUs; "" elsewhere."""
    whole = all(gpu.slice is None for gpu in usable)
    if most == 1 or len(usable) == 1 or not whole or not gpus.nccl:
        return ""
    return f"; dk.Cluster({len(usable)}) would use NCCL"
