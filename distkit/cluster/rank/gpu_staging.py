"""Messages between ranks that share a GPU: gloo sends and receives them from host memory.

NCCL refuses several ranks on one GPU. gloo's collectives take CUDA tensors; its ``send`` and
``recv`` do not. Here these get a kernel for tensors on a device that hands gloo a copy in pinned
host memory, and copies back what was received when the program waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from distkit.events import Op
from distkit.recording.operators import CALLS

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

#: Tensors on the device, and their copies in host memory.
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_libraries: list[Any] = []
#: Messages on their way: id of the work -> the work, and where its copies belong.
_coming: dict[int, tuple[Any, _Pairs]] = {}


def install(key: str = "CUDA") -> None:
    """Put the kernels in place, for the tensors of a dispatch key."""
    library = torch.library.Library("c10d", "IMPL")
    for name in ("send", "recv_", "recv_any_source_"):
        operator = getattr(torch.ops.c10d, name).default
        kernel = _staged(operator, CALLS[name].op is Op.SEND)
        library.impl(name, kernel, key, allow_override=True)
    _libraries.append(library)
    dist.Work.wait = _arriving(dist.Work.wait)  # type: ignore[method-assign]


def forget() -> None:
    """Let go of messages that nobody has waited for."""
    _coming.clear()


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
