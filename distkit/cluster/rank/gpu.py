"""A rank's GPU: taken after the fork, with its part of the memory; and what its errors mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from distkit._format import human_bytes
from distkit.cluster import machine
from distkit.cluster.processes.rank_spec import Spec
from distkit.cluster.runs.outcome import text
from distkit.errors import StartError
from distkit.events import Op
from distkit.recording.operators import CALLS

#: What CUDA says, and what to do about it.
_MEANING = (
    (
        "bad fork|re-initialize|initialization error",
        "a module that Python imports at its start (sitecustomize, *.pth) uses CUDA, in the "
        "process that ranks are forked from: find it with python -X importtime -c pass",
    ),
    (
        "driver version is insufficient|driver on your system is too old",
        "install a newer driver, or torch for an older CUDA: see distkit doctor",
    ),
    ("not compiled with CUDA", "install torch with CUDA, or use device='cpu'"),
    (
        "no CUDA-capable device|No CUDA GPUs|invalid device ordinal|is lost|fallen off the bus",
        "it is gone or not visible: nvidia-smi and the system's log (dmesg) tell more; use another "
        "one, or device='cpu'",
    ),
    (
        "out of memory",
        "other programs fill it (nvidia-smi lists them): stop them, or use fewer ranks or "
        "device='cpu'",
    ),
    (
        "busy or unavailable",
        "another process has it to itself: set its compute mode to DEFAULT with nvidia-smi -c 0",
    ),
    (
        "device-side assert|illegal memory access",
        "a kernel failed, and this process cannot use CUDA any more; after a %%ranks cell "
        "cluster.restart() starts new ones",
    ),
    ("no kernel image", "torch's build has no code for this GPU: install one for its generation"),
)

#: So many holders of a GPU's memory are named.
MOST = 8

#: What torch says of a tensor that its backend does not take: the type of its device.
_FOREIGN = re.compile(r"No backend type associated with device type (\w+)|must be CUDA and dense")


def take(spec: Spec) -> None:
    """Initialize CUDA on the rank's GPU, which no other process of ours has done for it.

    Raises:
        StartError: the GPU cannot be used; the message says why.
    """
    assignment = spec.assignment
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi numbers them
    Path(_pid(spec, spec.rank)).write_text(str(os.getpid()))
    try:
        torch.cuda.init()
        torch.cuda.set_device(assignment.device)
        if assignment.fraction:
            torch.cuda.set_per_process_memory_fraction(assignment.fraction)
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:
        said = str(error).partition("\n")[0].rstrip(".")
        raise StartError(f"{_who(spec)} cannot use it: {said}; {_remedy(said)}.") from error


def _pid(spec: Spec, rank: int) -> str:
    """Where a rank's pid is, for whoever lists the processes on a GPU."""
    return f"{spec.folder}/rank-{rank}.pid"


def _who(spec: Spec) -> str:
    gpu = spec.assignment.gpu
    named = f" ({', '.join(filter(None, [gpu.label, gpu.name]))})" if gpu else ""
    return f"rank {spec.rank} on {spec.device}{named}"


def _remedy(said: str) -> str:
    meant = (what for text, what in _MEANING if re.search(text, said, re.IGNORECASE))
    return next(meant, "distkit doctor tells what this machine has")


def hint(error: BaseException, spec: Spec) -> str:
    """What to add to an exception of torch's: who holds the GPU's memory, what its words mean."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"\n{_who(spec)}: {_memory(spec)}. {_LESS}"
    said = text(error)
    if found := _FOREIGN.search(said):
        return (
            f"\nTensors of a collective are on its backend's device. {_who(spec)} communicates "
            f"by {spec.backend}, and this tensor is on {found[1] or 'the CPU'}: move it with "
            f'x.to("{spec.device}").'
        )
    if "invalid device ordinal" in said:
        return f"\n{_who(spec)} has no other GPU: torch.device('cuda') means it."
    if "CUDA error" in said:
        return f"\n{_who(spec)}: {_remedy(said)}."
    return ""


_LESS = (
    "Use smaller batches or fewer ranks, or give a rank more: dk.Cluster(…, memory_fraction=…). "
    "cluster.restart() frees what variables of %%ranks cells hold."
)


def _memory(spec: Spec) -> str:
    """Who holds how much of the rank's GPU."""
    gpu = spec.assignment.gpu
    if gpu is None:
        return "it computes on the CPU"
    ranks = {}
    for rank in range(spec.world_size):
        with suppress(OSError):  # it is on another machine
            ranks[Path(_pid(spec, rank)).read_text()] = f"rank {rank}"
    held = sorted(machine.holders(gpu.uuid).items(), key=lambda item: -item[1])
    each = [f"{ranks.get(str(p), f'process {p}')} {human_bytes(n)}" for p, n in held[:MOST]]
    most = f"it may take {human_bytes(spec.assignment.limit)}; " if spec.assignment.limit else ""
    return f"{most}of {human_bytes(gpu.total)} hold: {', '.join(each) or 'unknown processes'}"


# -- messages through host memory ----------------------------------------------------------------
#
# Messages between ranks that share a GPU: gloo sends and receives them from host memory.
#
# NCCL refuses several ranks on one GPU. gloo's collectives take CUDA tensors; its ``send`` and
# ``recv`` do not. Here these get a kernel for tensors on a device that hands gloo a copy in pinned
# host memory, and copies back what was received when the program waits for it.

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

#: Tensors on the device, and their copies in host memory.
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_libraries: list[Any] = []
#: Messages on their way: id of the work -> the work, and where its copies belong.
_coming: dict[int, tuple[Any, _Pairs]] = {}


def stage_messages(key: str = "CUDA") -> None:
    """Put the kernels in place, for the tensors of a dispatch key."""
    library = torch.library.Library("c10d", "IMPL")
    for name in ("send", "recv_", "recv_any_source_"):
        operator = getattr(torch.ops.c10d, name).default
        kernel = _staged(operator, CALLS[name].op is Op.SEND)
        library.impl(name, kernel, key, allow_override=True)
    _libraries.append(library)
    dist.Work.wait = _arriving(dist.Work.wait)  # type: ignore[method-assign]


def _staged(operator: Any, sends: bool) -> Callable[..., Any]:
    """The operator's kernel for tensors on the device."""

    def kernel(tensors: list[torch.Tensor], *args: Any) -> Any:
        with torch.no_grad(), DisableTorchFunction():
            pairs = [(t, _beside(t)) for t in tensors]
            for device, host in pairs if sends else ():
                host.copy_(device)
        script = operator._handle.redispatch_boxed(_HOST, [host for _, host in pairs], *args)
        if not sends:
            work = dist.Work.unbox(script)
            _coming[id(work)] = work, pairs
        return script

    return kernel


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _arriving(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Work.wait that copies back what was received, in the order of the waiting thread's stream."""

    def arriving(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        _, pairs = _coming.pop(id(work), (None, []))
        with torch.no_grad(), DisableTorchFunction():  # who watches open buffers is not to see us
            for device, host in pairs:
                device.copy_(host, non_blocking=True)
        return result

    return arriving
