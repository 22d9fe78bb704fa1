"""gloo on GPUs that ranks share: what it cannot do there goes through host memory.

NCCL refuses several ranks on one GPU, and gloo takes CUDA tensors for broadcast and all_reduce
only. Here every other ``c10d`` operator gets a kernel for CUDA tensors that copies them to pinned
host memory, lets gloo work on the copies, and copies back what was received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distkit.events import P2P, Op
from distkit.recording.operators import CALLS, Call, tensors

#: What gloo does with CUDA tensors by itself.
_NATIVE = frozenset({"broadcast_", "allreduce_", "allreduce_coalesced_"})

_library: Any = None
#: Receives on their way: id of the work -> the work, and (device tensor, host copy) pairs.
_coming: dict[int, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = {}


def install(key: str = "CUDA") -> None:
    """Put the staging kernels in place, at the dispatch key of the tensors to be staged."""
    global _library
    _library = torch.library.Library("c10d", "IMPL")
    for name, call in CALLS.items():
        operator = getattr(torch.ops.c10d, name, None)
        if operator is not None and name not in _NATIVE and call.outputs is not None:
            _library.impl(name, _staged(operator.default, call), key, allow_override=True)
    dist.Work.wait = _waiting(dist.Work.wait)  # type: ignore[method-assign]


def _staged(operator: Any, call: Call) -> Callable[..., Any]:
    """The operator's kernel for device tensors."""
    host_key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def kernel(*args: Any) -> Any:
        copies: dict[int, torch.Tensor] = {}
        result = operator._handle.redispatch_boxed(host_key, *(_to_host(a, copies) for a in args))
        back = [(t, copies[id(t)]) for t in tensors(args, call.outputs)]
        script = result[-1] if isinstance(result, (tuple, list)) else result
        work = dist.Work.unbox(script)
        if call.op in P2P:
            if call.op is Op.RECV:
                _coming[id(work)] = work, back  # it arrives when the caller waits
            return script
        work.wait()  # whoever waits later may do so in C++, where nobody copies back
        _return(back)
        return (args[call.outputs or 0], script) if isinstance(result, (tuple, list)) else script

    return kernel


def _to_host(argument: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The argument with every tensor replaced by a copy in host memory."""
    if isinstance(argument, torch.Tensor):
        host = torch.empty(argument.shape, dtype=argument.dtype, pin_memory=argument.is_cuda)
        copies[id(argument)] = host.copy_(argument)
        return host
    if isinstance(argument, (list, tuple)):
        return [_to_host(a, copies) for a in argument]
    return argument


def _return(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for device, host in pairs:
            device.copy_(host)


def _waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Work.wait that copies back what was received."""

    def waiting(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        found = _coming.pop(id(work), None)
        if found is not None:
            _return(found[1])
        return result

    return waiting
