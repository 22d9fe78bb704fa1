"""gloo on GPUs that ranks share: what it cannot do there goes through host memory.

NCCL refuses several ranks on one GPU, and gloo takes CUDA tensors for ``broadcast`` and
``all_reduce`` only. Here every other ``c10d`` operator gets a kernel for tensors on a device that
copies them to host memory, lets gloo work on the copies, and copies back what was received. The
copies are pinned: torch keeps such memory for the next of that size, and copies from it at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch.distributed import distributed_c10d as c10d

from distkit.events import P2P, Op
from distkit.recording import tap
from distkit.recording.operators import CALLS, Call, is_functional, storage_of, tensors

#: What gloo does with CUDA tensors by itself.
NATIVE = frozenset({"broadcast_", "allreduce_"})

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

#: Tensors on the device, and their copies in host memory.
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_libraries: list[Any] = []
#: Results on their way: id of the work -> the work, and where its copies belong.
_coming: dict[int, tuple[Any, _Pairs]] = {}


def install(key: str = "CUDA", native: frozenset[str] = NATIVE) -> None:
    """Put the staging kernels in place, for the tensors of a dispatch key.

    Args:
        key: of the tensors to be staged.
        native: the operators that gloo does by itself there.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name, call in CALLS.items():
        operator = getattr(torch.ops.c10d, name, None)
        if operator is not None and name not in native and call.outputs is not None:
            library.impl(name, _staged(operator.default, call), key, allow_override=True)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    functional.impl("wait_tensor", _wait_tensor, key, allow_override=True)
    _libraries.extend((library, functional))
    dist.Work.wait = _arriving(dist.Work.wait)  # type: ignore[method-assign]
    dist.Work.get_future = _future(dist.Work.get_future)  # type: ignore[method-assign]


def forget() -> None:
    """Let go of results that nobody has waited for."""
    _coming.clear()


def _staged(operator: Any, call: Call) -> Callable[..., Any]:
    """The operator's kernel for tensors on the device."""

    def kernel(*args: Any) -> Any:
        outputs = tensors(args, call.outputs)
        with torch.no_grad(), DisableTorchFunction():
            copies = {id(t): _beside(t) for t in outputs}
            for t in tensors(args, call.inputs):
                copies[id(t)] = copies.get(id(t), _beside(t)).copy_(t)
        result = operator._handle.redispatch_boxed(_HOST, *(_replaced(a, copies) for a in args))
        script = result[-1] if isinstance(result, (tuple, list)) else result
        work = dist.Work.unbox(script)
        if call.op is not Op.SEND:
            _coming[id(work)] = work, [(t, copies[id(t)]) for t in outputs]
        if call.op not in P2P and not _waits_here(sys._getframe(1)):
            work.wait()
        return (args[call.outputs or 0], script) if isinstance(result, (tuple, list)) else script

    return kernel


def _beside(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _replaced(argument: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The argument with every tensor replaced by its copy."""
    if isinstance(argument, torch.Tensor):
        return copies[id(argument)]
    if isinstance(argument, (list, tuple)):
        return [_replaced(a, copies) for a in argument]
    return argument


def _waits_here(caller: FrameType | None) -> bool:
    """True if the caller waits in Python or by ``wait_tensor``.

    DDP's reducer waits in C++, and so does DTensor's ``shard_dim_alltoall``.
    """
    while caller is not None and caller.f_code.co_filename == tap.__file__:
        caller = caller.f_back
    if caller is None or not is_functional(caller):
        return caller is not None and caller.f_code.co_filename == c10d.__file__
    return str(caller.f_locals.get("self")).startswith("_c10d_functional.")


def _arrive(pairs: _Pairs) -> None:
    """Copy back what was received, in the order of the waiting thread's stream."""
    with torch.no_grad(), DisableTorchFunction():  # who watches open buffers is not to see us
        for device, host in pairs:
            device.copy_(host, non_blocking=True)


def _arriving(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Work.wait that copies back what was received."""

    def arriving(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        _arrive(_coming.pop(id(work), (None, []))[1])
        return result

    return arriving


def _future(get_future: Callable[..., Any]) -> Callable[..., Any]:
    """Work.get_future that has the tensors on the device, after it has waited for them."""

    def future(work: Any) -> Any:
        found = _coming.get(id(work))
        if found is None:
            return get_future(work)
        work.wait()
        devices = {t.device for t, _ in found[1] if t.is_cuda}
        done: torch.futures.Future[Any] = torch.futures.Future(devices=[*devices])
        done.set_result([t for t, _ in found[1]])
        return done

    return future


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a functional collective, which is known by one of its results."""
    result = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed(_HOST, tensor)
    storage = storage_of(tensor)
    for key, (_, pairs) in list(_coming.items()):
        if any(storage_of(t) == storage for t, _ in pairs):
            _arrive(pairs)
            del _coming[key]
    return result  # type: ignore[no-any-return]
