"""Initializes a rank's GPU after the fork, explains its errors, and stages messages for gloo."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from distkit.cluster.processes.rank_spec import Spec
from distkit.cluster.runs.outcome import text
from distkit.errors import StartError
from distkit.events import Op
from distkit.recording.operators import CALLS

#: Patterns of CUDA's error messages, and remedies.
_REMEDIES = (
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

#: torch's error for a tensor on a device that the backend does not support.
_WRONG_DEVICE = re.compile(
    r"No backend type associated with device type (\w+)|must be CUDA and dense"
)


def take(spec: Spec) -> None:
    """Initialize CUDA on the rank's GPU.

    Raises:
        StartError: the GPU cannot be used; the message says why.
    """
    assignment = spec.assignment
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi numbers them
    try:
        torch.cuda.init()
        torch.cuda.set_device(assignment.device)
        if assignment.fraction:
            torch.cuda.set_per_process_memory_fraction(assignment.fraction)
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise StartError(
            f"{_describe_rank(spec)} cannot use it: {reason}; {_remedy(reason)}."
        ) from error


def _describe_rank(spec: Spec) -> str:
    gpu = spec.assignment.gpu
    label = f" ({', '.join(filter(None, [gpu.label, gpu.name]))})" if gpu else ""
    return f"rank {spec.rank} on {spec.device}{label}"


def _remedy(message: str) -> str:
    remedies = (r for pattern, r in _REMEDIES if re.search(pattern, message, re.IGNORECASE))
    return next(remedies, "run distkit doctor to see what this machine has")


def hint(error: BaseException, spec: Spec) -> str:
    """Return a remedy for torch's exception; "" without one."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"\n{_describe_rank(spec)}. {_MEMORY_HINT}"
    message = text(error)
    if found := _WRONG_DEVICE.search(message):
        return (
            f"\nTensors of a collective are on its backend's device. {_describe_rank(spec)} "
            f"communicates by {spec.backend}, and this tensor is on {found[1] or 'the CPU'}: move "
            f'it with x.to("{spec.device}").'
        )
    if "invalid device ordinal" in message:
        return f"\n{_describe_rank(spec)}: use torch.device('cuda'), which is its GPU."
    if "CUDA error" in message:
        return f"\n{_describe_rank(spec)}: {_remedy(message)}."
    return ""


_MEMORY_HINT = (
    "Use smaller batches or fewer ranks, or give a rank more: dk.Cluster(…, memory_fraction=…). "
    "cluster.restart() frees what variables of %%ranks cells hold."
)


# -- messages through host memory ----------------------------------------------------------------
#
# Messages between ranks that share a GPU: gloo transfers them from and to host memory.
#
# NCCL does not support several ranks on one GPU. gloo's collectives accept CUDA tensors; its
# ``send`` and ``recv`` do not. These kernels pass gloo a copy in pinned host memory, and copy
# received data to the device when the program waits for it.

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

#: Tensors on the device, and their copies in host memory.
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_libraries: list[Any] = []
#: Receives in progress: id of the work -> the work, and its tensors with their copies.
_receiving: dict[int, tuple[Any, _Pairs]] = {}


def stage_messages(key: str = "CUDA") -> None:
    """Register the kernels for the tensors of a dispatch key."""
    library = torch.library.Library("c10d", "IMPL")
    for name in ("send", "recv_", "recv_any_source_"):
        operator = getattr(torch.ops.c10d, name).default
        kernel = _staged_kernel(operator, CALLS[name].op is Op.SEND)
        library.impl(name, kernel, key, allow_override=True)
    _libraries.append(library)
    dist.Work.wait = _copying_wait(dist.Work.wait)  # type: ignore[method-assign]


def _staged_kernel(operator: Any, sends: bool) -> Callable[..., Any]:
    """Return the operator's kernel for tensors on the device."""

    def kernel(tensors: list[torch.Tensor], *args: Any) -> Any:
        with torch.no_grad(), DisableTorchFunction():
            pairs = [(t, _host_copy(t)) for t in tensors]
            for device, host in pairs if sends else ():
                host.copy_(device)
        script = operator._handle.redispatch_boxed(_HOST, [host for _, host in pairs], *args)
        if not sends:
            work = dist.Work.unbox(script)
            _receiving[id(work)] = work, pairs
        return script

    return kernel


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copying_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Work.wait that copies received data to the device, on the caller's stream."""

    def copying_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        _, pairs = _receiving.pop(id(work), (None, []))
        with torch.no_grad(), DisableTorchFunction():  # hidden from the recorder of buffers
            for device, host in pairs:
                device.copy_(host, non_blocking=True)
        return result

    return copying_wait
