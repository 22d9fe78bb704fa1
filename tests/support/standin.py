"""A fake device for tests without a GPU; its tensors are in host memory.

For torch it is the device ``pretend:0``, with a dispatch key, a thread in backward passes, and
copies to the CPU. It executes operations immediately, but can pretend to be busy: between
:func:`stop` and :func:`go`, events are not reached, and reading a value, as ``item()`` does, waits.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as tree
from torch.utils import backend_registration as registration

KEY = "PrivateUse1"

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set = torch.ops.aten.set_.source_Storage_storage_offset._handle.redispatch_boxed
_storage = torch._C._construct_storage_from_data_pointer
#: The device's memory, by address. It is never freed, which keeps addresses unique.
_memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
_libraries: list[Any] = []

#: The operators that ran on the device, by name.
operators: list[str] = []

_running = threading.Event()
_running.set()
_pending: list[Event] = []  # not yet reached by the device
_capturing = False


class Event:
    """Like torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def query(self) -> bool:
        """Return whether the device has reached the event."""
        assert not _capturing, "a capture fails if the device is queried"
        return self.at is not None

    def record(self, stream: object = None) -> None:
        """Enqueue the event."""
        _Stream().record_event(self)

    def wait(self, stream: object = None) -> None:
        """Do nothing: the device has a single stream."""

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds to another event."""
        assert self.at is not None and other.at is not None
        return 1e3 * (other.at - self.at)


class _Stream:
    stream_id = 0

    def __init__(self, **how: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        assert not _capturing
        event = event or Event()
        if _running.is_set():
            event.at = time.monotonic()
        else:
            _pending.append(event)
        return event


class _Module(registration._DummyBackendModule):
    Event, Stream, stream = Event, _Stream, nullcontext

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    def memory_allocated(self, device: torch.device) -> int:
        return 4096

    def is_current_stream_capturing(self) -> bool:
        return _capturing


def stop() -> None:
    """Pretend to be busy."""
    _running.clear()


def go() -> None:
    """Reach all pending events, and stop pretending to be busy."""
    for event in _pending:
        event.at = time.monotonic()
    _pending.clear()
    _running.set()


@contextmanager
def capture() -> Iterator[None]:
    """Simulate the capture of a graph."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


def install() -> None:
    """Register the device in this process."""
    registration._setup_privateuseone_for_python_backend("pretend", backend_module=_Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, KEY)
    torch.UntypedStorage.resize_ = _ignore_frees(torch.UntypedStorage.resize_)  # type: ignore
    _libraries.append(library)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    operators.append(op.name())
    if op is torch.ops.aten._local_scalar_dense.default:
        _running.wait()
    known: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors on the host and on the device

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        known.append((_to_host(value), value))
        return known[-1][0]

    def on_device(value: Any) -> Any:
        found = [ours for host, ours in known if host is value]
        return found[0] if found else _to_device(value)

    args, kwargs = tree.tree_map(on_host, (args, kwargs))
    if op is torch.ops.aten._copy_from.default:
        if len(known) == 1 and known[0][0] is args[0] and not (args[2:] and args[2]):
            operators.append("a copy that waits")
        return args[1].copy_(args[0])
    result = tree.tree_map(on_device, op(*args, **kwargs))
    for host, ours in known:
        if host.shape != ours.shape:  # resized by the operator
            _point(ours, host)
    return result


def _ignore_frees(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``resize_`` that ignores device storages, which FSDP resizes to free memory."""

    def resize_host(storage: Any, size: int) -> Any:
        return storage if storage.device.type == "pretend" else resize(storage, size)

    return resize_host


def _to_host(value: torch.Tensor) -> torch.Tensor:
    memory = value.untyped_storage()
    like = value.storage_offset(), value.shape, value.stride()
    return torch.empty(0, dtype=value.dtype).set_(_memory[memory.data_ptr()][0], *like)


def _to_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = torch._C._acc.create_empty_tensor((0,), value.dtype)
    _point(tensor, value)
    return tensor


def _point(ours: torch.Tensor, host: torch.Tensor) -> None:
    """Make a device tensor share the memory of a host tensor."""
    memory = host.untyped_storage()
    address, size = memory.data_ptr(), memory.nbytes()
    if address not in _memory or _memory[address][0].nbytes() != size:
        _memory[address] = memory, _storage(address, ours.device, size)
    _set(_CPU, ours, _memory[address][1], host.storage_offset(), host.shape, host.stride())


def stage_messages() -> None:
    """Stage gloo's messages through host memory, as for ranks that share a GPU."""
    from distkit.cluster.rank import gpu
    from distkit.recording.tap import tap

    tap.remove()  # installed last, so that a receive ends after its copy to the device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the kernels are overridden on purpose
        gpu.stage_messages(KEY)
    tap.install()


def register_async_backend() -> None:
    """Register a backend that returns immediately, like NCCL, and changes no tensor."""
    from distkit.recording.tap import tap

    tap.remove()
    tap.on_gloo, tap.on_gpu = False, True
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("allreduce_", "broadcast_"):
            library.impl(
                name, lambda tensors, *_: (tensors, _work(tensors)), KEY, allow_override=True
            )
    _libraries.append(library)
    tap.install()


def _work(result: list[torch.Tensor]) -> Any:
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(done).boxed()
