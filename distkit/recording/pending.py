"""Pending operations on the host and on a GPU, and collectives that the program never waits for.

Recording does not synchronize a GPU. A call enqueues work in a *stream* of the GPU and returns. The
tap records *events* in the stream before and after the work, and later queries whether the GPU has
reached them. Values are summarized on the GPU, in the same stream, and copied to host memory
asynchronously.

The backend completes a collective with ``async_op=True`` even if the program never waits for it.
Each ``Work`` returned to the program is therefore tracked until the program waits for it, requests
its future, or observes its completion.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import overrides
from torch.distributed import distributed_c10d as c10d

from distkit.events import WORLD, Op, State
from distkit.recording.encoding import Values
from distkit.recording.recorder import Recorder, is_stdlib_file, is_user_file

#: Longest timeout [ms] that a program is expected to handle itself. distkit does not interrupt a
#: wait with such a timeout.
MAX_USER_TIMEOUT = 60_000


def is_user_timeout(timeout: timedelta | int | None) -> bool:
    """Return whether the program is expected to handle a timeout; integers are in milliseconds."""
    if isinstance(timeout, timedelta):
        timeout = timeout // timedelta(milliseconds=1)
    return timeout is not None and 0 < timeout <= MAX_USER_TIMEOUT


def hook(undo: ExitStack, holder: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace an existing function with ``replacement(original, …)`` until ``undo`` is closed."""
    if (original := getattr(holder, name, None)) is not None:

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(holder, name, wrapper)
        undo.callback(setattr, holder, name, original)


class Pending:
    """An operation in progress, completed by ``wait`` or its future, whichever comes first."""

    __slots__ = (
        "_lock",
        "begin",
        "call_time",
        "device",
        "fields",
        "has_values",
        "in_flight",
        "is_done",
        "op",
        "outputs",
        "recorder",
        "seq",
        "work",
    )

    def __init__(
        self,
        recorder: Recorder,
        seq: int,
        op: Op,
        fields: tuple[Any, ...],
        outputs: list[torch.Tensor],
        has_values: bool,
        device: Device | None = None,
    ) -> None:
        self.recorder, self.seq, self.op, self.fields = recorder, seq, op, fields
        self.outputs, self.has_values, self.device = outputs, has_values, device
        self._lock, self.is_done = threading.Lock(), False
        self.begin: Any = None  # event in the device's stream
        self.call_time = 0.0  # time at which the host recorded ``begin`` [s]
        self.work: Any = None
        #: After :meth:`complete`, until the device has finished the operation: the event at the end
        #: of the operation, the id of the event's stream, and the deferred values.
        self.in_flight: tuple[Any, int, Any] | None = None

    def record_begin(self) -> None:
        """Record an event in the device's stream where the backend starts the operation."""
        if self.device is not None:
            self.call_time, self.begin = time.monotonic(), self.device.event()

    def complete(self, peer: int | None = None) -> None:
        """Record the completion; ``peer`` is the sender of a receive from any source."""
        now = time.monotonic()  # before values are summarized, which takes time
        with self._lock:
            if self.is_done or self.in_flight is not None:
                return
            if peer is not None:
                self.fields = peer, *self.fields[1:]
            values = self.recorder.summarize(*self.outputs) if self.has_values else None
            if self.device is None or self.begin is None:
                self._end(now, values)
            else:
                self.in_flight = self.device.event(), self.device.stream, values
                self.outputs = []
                self.recorder.in_flight.append(self)

    def poll(self) -> bool:
        """Record the completion if the device has finished; return False if it has not."""
        with self._lock:
            if self.is_done or self.in_flight is None or self.device is None:
                return True
            end, _, values = self.in_flight
            if not _is_reached(end):
                return False
            seconds = self.begin.elapsed_time(end) / 1e3
            if self.work is not None:
                # only NCCL knows its kernels' duration, if TORCH_NCCL_ENABLE_TIMING is set
                with suppress(RuntimeError):
                    seconds = self.work._get_duration() / 1e3
            end_time = self.device.clock.time(self.begin, self.call_time, end, time.monotonic())
            self._end(end_time, values, ("device_seconds", seconds))
            self.work = self.in_flight = None  # this object may live as long as its Work
            return True

    def is_in_this_stream(self) -> bool:
        """Return whether the operation's end was recorded in this thread's current stream."""
        in_flight, device = self.in_flight, self.device
        return in_flight is not None and device is not None and in_flight[1] == device.stream

    def _end(self, end_time: float, values: Any, *added: tuple[str, Any]) -> None:
        self.is_done, fields = True, self.fields
        if values is not None and type(values) is not tuple:  # the values arrive later
            added = *added, ("memory", values.memory)
        if added:
            *call, where, attributes, match = fields
            fields = (*call, where, (*attributes, *added), match)
        self.recorder.put(self.seq, self.op, State.COMPLETED, end_time, fields, values)

    def fail(self) -> None:
        """Record that the operation failed."""
        with self._lock:
            if not self.is_done:
                self.is_done = True
                now = time.monotonic()
                self.recorder.put(self.seq, self.op, State.FAILED, now, self.fields)


class record_wait:
    """Records that this thread is waiting for operations; an exception marks them as failed."""

    def __init__(self, *operations: Pending, has_timeout: bool = False) -> None:
        self._operations, self._has_timeout = operations, has_timeout

    def __enter__(self) -> None:
        self._operations[0].recorder.begin_wait(*self._operations, has_timeout=self._has_timeout)

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            for operation in self._operations:
                operation.fail()
        self._operations[0].recorder.end_wait()


# -- GPUs ------------------------------------------------------------------------------------------

#: Held during event queries and while a CUDA graph is captured, because a capture fails if another
#: thread queries an event.
event_query_lock = threading.Lock()


class Device:
    """A GPU, accessed through the torch module for its type."""

    def __init__(self, device: torch.device) -> None:
        self._torch, self._device = torch.get_device_module(device), device
        self.clock = Clock()

    @property
    def stream(self) -> int:
        """The id of this thread's current stream."""
        return int(self._torch.current_stream(self._device).stream_id)

    @property
    def attributes(self) -> tuple[tuple[str, Any], ...]:
        """The event attributes of a call made now."""
        return ("device", str(self._device)), ("stream", self.stream)

    @property
    def memory(self) -> int:
        """The number of bytes that this process's tensors occupy on the device."""
        return int(self._torch.memory_allocated(self._device))

    def event(self) -> Any:
        """Record an event in this thread's current stream."""
        event = self._torch.Event(enable_timing=True)
        self._torch.current_stream(self._device).record_event(event)
        return event

    def captures(self) -> bool:
        """Return whether this thread's calls are being captured into a CUDA graph."""
        return bool(self._torch.is_current_stream_capturing())


device_of = cache(Device)


class DeferredSummary:
    """A summary of values that are still being copied from the GPU.

    Args:
        flat: the values to summarize, (k,), float64.
        stride: the distance between the recorded values.
        size: the number of elements of the tensor; ``flat`` may be a sample of them.
    """

    def __init__(self, flat: torch.Tensor, stride: int, size: int) -> None:
        device = device_of(flat.device)
        self.memory, self._size, self._sampled = device.memory, size, size > len(flat)
        square = flat.square().sum() * (size / len(flat))  # torch.dot would load cuBLAS
        numbers = torch.cat([flat[::stride], torch.stack([square, flat.min(), flat.max()])])
        self._numbers = torch.empty(
            numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda
        ).copy_(numbers, non_blocking=True)
        self._event = device.event()

    def poll(self) -> Values | None:
        """Return the fields of a Summary, as ``summarize`` does, or None until the copy is done."""
        if not _is_reached(self._event):
            return None
        *values, square, minimum, maximum = self._numbers.tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        return tuple(values), norm, minimum, maximum, self._size, self._sampled


class Clock:
    """Converts times of a device's events to the host's clock.

    The GPU reaches an event after the host records it and before the host observes its completion.
    These times bound the offset between the clocks. The bound is exact if the GPU was idle.

    >>> class At:
    ...     def __init__(self, ms): self.ms = ms
    ...     def elapsed_time(self, other): return other.ms - self.ms
    >>> clock = Clock()
    >>> clock.time(At(0), 10.0, At(2), 10.5)            # the GPU was idle
    10.002
    >>> round(clock.time(At(5), 10.001, At(7), 10.5), 6)  # it was busy
    10.007
    """

    def __init__(self) -> None:
        self._latest: Any = None  # latest ``begin`` event
        self._latest_time = 0.0  # time of that event on the device's clock [s]
        self._offset = -math.inf  # host's clock minus device's clock [s]

    def time(self, begin: Any, call_time: float, end: Any, seen_time: float) -> float:
        """Return the time of ``end`` on the host's clock [s].

        Args:
            begin: an earlier event.
            call_time: the time at which the host recorded ``begin`` [s].
            end: an event that the GPU has reached.
            seen_time: the time at which the host observed this [s].
        """
        elapsed = self._latest.elapsed_time(begin) / 1e3 if self._latest is not None else 0.0
        self._latest, self._latest_time = begin, self._latest_time + elapsed
        end_time = self._latest_time + begin.elapsed_time(end) / 1e3
        self._offset = min(max(self._offset, call_time - self._latest_time), seen_time - end_time)
        return max(call_time, float(end_time + self._offset))


def _is_reached(event: Any) -> bool:
    """Return whether the GPU has reached an event; False while queries are not allowed."""
    if not event_query_lock.acquire(blocking=False):
        return False
    try:
        return bool(event.query())
    finally:
        event_query_lock.release()


# -- collectives that the program does not wait for -----------------------------------------

#: Methods of Work, besides wait(), that reveal its completion.
COMPLETION_QUERIES = (
    "get_future",
    "is_completed",
    "is_success",
    "synchronize",
    "result",
    "block_current_stream",
)

#: Maximum number of reported calls per run.
_MAX_REPORTED = 100

_FUNCTIONS = [f for f in vars(c10d).values() if type(f) is FunctionType]

#: Files of functions between the program and torch.distributed's functions, such as decorators.
_WRAPPER_FILES = (
    c10d.__file__,
    overrides.__file__,
    str(Path(__file__).parent),
    *{f.__code__.co_filename for f in _FUNCTIONS if hasattr(f, "__wrapped__")},
)


def returns_to_user(frame: FrameType) -> bool:
    """Return whether user code called the torch.distributed function in a frame."""
    for outer, _ in walk_stack(frame):
        file = outer.f_code.co_filename
        if not (file.startswith(_WRAPPER_FILES) or is_stdlib_file(file)):
            return is_user_file(file)
    return False


class UnwaitedCollectives:
    """Tracks a run's asynchronous collectives that the program has not waited for."""

    def __init__(self) -> None:
        # by the Work's id: the Work, the call's seq, and its group
        self._open: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        # keeps each Work alive until its caller holds it
        self._recent: deque[Any] = deque(maxlen=8)
        # sequence numbers of calls whose work was garbage-collected
        self._collected_seqs: list[int] = []

    def add(self, work: Any, pending: Pending) -> None:
        """Track a call that returns ``work`` to user code."""
        key, seq, group = id(work), pending.seq, pending.fields[1]
        self._recent.append(work)
        self._open[key] = weakref.ref(work, lambda _: self._on_collected(key, seq)), seq, group

    def _on_collected(self, key: int, seq: int) -> None:
        if self._open.pop(key, None) is not None and len(self._collected_seqs) < _MAX_REPORTED:
            self._collected_seqs.append(seq)

    def forget(self, work: Any) -> None:
        """Stop tracking a Work whose completion the program waits for or observes."""
        if self._open.pop(id(work), None) is not None and work in self._recent:
            self._recent.remove(work)

    def calls(self, group: str = WORLD) -> list[int]:
        """Return the sequence numbers of calls that the program has not waited for.

        For a group other than the world, return only calls whose Work is alive.
        """
        alive = [seq for _, seq, name in list(self._open.values()) if group in (WORLD, name)]
        return sorted([*(self._collected_seqs if group == WORLD else ()), *alive])[:_MAX_REPORTED]
