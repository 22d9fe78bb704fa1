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
        "a module that Python imports at startup (sitecustomize, *.pth) uses CUDA in the "
        "process that ranks are forked from: find it with python -X importtime -c pass",
    ),
    (
        "driver version is insufficient|driver on your system is too old",
        "install a newer driver, or torch for an older CUDA version: see distkit doctor",
    ),
    ("not compiled with CUDA", "install torch with CUDA, or use device='cpu'"),
    (
        "no CUDA-capable device|No CUDA GPUs|invalid device ordinal|is lost|fallen off the bus",
        "it is missing or not visible: see nvidia-smi and the system log (dmesg); use another GPU, "
        "or device='cpu'",
    ),
    (
        "out of memory",
        "other programs are using its memory (nvidia-smi lists them): stop them, or use fewer "
        "ranks or device='cpu'",
    ),
    (
        "busy or unavailable",
        "another process is using the GPU exclusively: set the GPU's compute mode to DEFAULT with "
        "nvidia-smi -c 0",
    ),
    (
        "device-side assert|illegal memory access",
        "a kernel failed, and this process can no longer use CUDA; after a %%ranks cell, start new "
        "processes with cluster.restart()",
    ),
    (
        "no kernel image",
        "torch is built without code for this GPU: install a build for its generation",
    ),
)

#: torch's error for a tensor on a device that the backend does not support.
_WRONG_DEVICE = re.compile(
    r"No backend type associated with device type (\w+)|must be CUDA and dense"
)


def initialize(spec: Spec) -> None:
    """Initialize CUDA on the rank's GPU.

    Raises:
        StartError: the GPU cannot be used; the message contains the reason.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
    try:
        torch.cuda.init()
        torch.cuda.set_device(spec.device)
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise StartError(
            f"{_describe_rank(spec)} cannot use its GPU: {reason}; {_remedy(reason)}."
        ) from error


def _describe_rank(spec: Spec) -> str:
    return f"rank {spec.rank} on {spec.device}"


def _remedy(message: str) -> str:
    remedies = (r for pattern, r in _REMEDIES if re.search(pattern, message, re.IGNORECASE))
    return next(remedies, "run distkit doctor to see what this machine has")


def hint(error: BaseException, spec: Spec) -> str:
    """Return a remedy for torch's exception, or "" if there is none."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"\n{_describe_rank(spec)} ran out of memory. Use smaller batches or fewer ranks. "
            "cluster.restart() frees the memory of %%ranks cells' variables."
        )
    message = text(error)
    if match := _WRONG_DEVICE.search(message):
        return (
            f"\nThe backend does not support tensors on this device: {_describe_rank(spec)} "
            f"communicates over {spec.backend}, but this tensor is on {match[1] or 'the CPU'}. "
            f'Move it with x.to("{spec.device}").'
        )
    if "invalid device ordinal" in message:
        return f"\n{_describe_rank(spec)}: use torch.device('cuda'), which is this rank's GPU."
    if "CUDA error" in message:
        return f"\n{_describe_rank(spec)}: {_remedy(message)}."
    return ""


# -- messages through host memory ----------------------------------------------------------------
#
# Ranks that share a GPU exchange messages through host memory: NCCL does not support several ranks
# on one GPU, and gloo accepts CUDA tensors in collectives, but not in ``send`` and ``recv``. These
# kernels pass gloo a copy in pinned host memory and copy received data to the device when the
# program waits for it.

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

#: Tensors on the device and their copies in host memory.
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_libraries: list[Any] = []
#: Receives in progress: id of the Work -> the Work, and its tensors with their host copies.
_receives: dict[int, tuple[Any, _Pairs]] = {}


def stage_messages(key: str = "CUDA") -> None:
    """Register the kernels for tensors with this dispatch key."""
    library = torch.library.Library("c10d", "IMPL")
    for name in ("send", "recv_", "recv_any_source_"):
        operator = getattr(torch.ops.c10d, name).default
        library.impl(
            name, _staged_kernel(operator, CALLS[name].op is Op.SEND), key, allow_override=True
        )
    _libraries.append(library)
    dist.Work.wait = _copying_wait(dist.Work.wait)  # type: ignore[method-assign]


def _staged_kernel(operator: Any, sends: bool) -> Callable[..., Any]:
    """Return a kernel of the operator for tensors on the device."""

    def kernel(tensors: list[torch.Tensor], *args: Any) -> Any:
        with torch.no_grad(), DisableTorchFunction():
            pairs = [
                (t, torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)) for t in tensors
            ]
            for device, host in pairs if sends else ():
                host.copy_(device)
        script = operator._handle.redispatch_boxed(_HOST, [host for _, host in pairs], *args)
        if not sends:
            work = dist.Work.unbox(script)
            _receives[id(work)] = work, pairs
        return script

    return kernel


def _copying_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Work.wait that copies received data to the device, on the caller's stream."""

    def copying_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        _, pairs = _receives.pop(id(work), (None, []))
        with torch.no_grad(), DisableTorchFunction():  # so that OpenBuffers does not see the copy
            for device, host in pairs:
                device.copy_(host, non_blocking=True)
        return result

    return copying_wait
