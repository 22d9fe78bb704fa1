"""Pending operations, and collectives with ``async_op=True`` that the program never waits for.

The backend completes such collectives anyway. Each ``Work`` returned to the program is therefore
tracked until the program waits for it, requests its future, or observes its completion.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import wraps
from pathlib import Path
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch.distributed import distributed_c10d as c10d

from distkit.events import WORLD, Op, State
from distkit.recording.recorder import Recorder, is_stdlib_file, is_user_file

if TYPE_CHECKING:
    from distkit.recording.device import Device, InFlight

#: Longest timeout [ms] that a program is expected to handle, so its wait is not interrupted.
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
        self.in_flight: tuple[InFlight, Any] | None = None  # with its deferred values

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
                in_flight = self.device.in_flight(self.work, self.begin, self.call_time)
                self.in_flight = in_flight, values
                self.outputs = []
                self.recorder.in_flight.append(self)

    def poll(self) -> bool:
        """Record the completion if the device has finished and return whether it is done."""
        with self._lock:
            if self.is_done or self.in_flight is None:
                return True
            in_flight, values = self.in_flight
            end_time = in_flight.poll()
            if end_time is not None:
                self._end(end_time, values, ("device_seconds", in_flight.seconds))
                # this object may live as long as its Work
                self.work = self.in_flight = None
            return end_time is not None

    def is_in_this_stream(self) -> bool:
        """Return whether this thread's current stream waits for the operation."""
        in_flight, device = self.in_flight, self.device
        return in_flight is not None and device is not None and in_flight[0].stream == device.stream

    def _end(self, end_time: float, values: Any, *facts: tuple[str, Any]) -> None:
        self.is_done, fields = True, self.fields
        if values is not None and type(values) is not tuple:  # the values arrive later
            facts = *facts, ("memory", values.memory)
        if facts:
            *call, where, attributes, match = fields
            fields = (*call, where, (*attributes, *facts), match)
        self.recorder.put(self.seq, self.op, State.COMPLETED, end_time, fields, values)

    def fail(self) -> None:
        """Record that the operation failed."""
        with self._lock:
            if not self.is_done:
                self.is_done = True
                now = time.monotonic()
                self.recorder.put(self.seq, self.op, State.FAILED, now, self.fields)


class record_wait:
    """Records that this thread waits for operations; an exception marks them as failed."""

    def __init__(self, *operations: Pending, has_timeout: bool = False) -> None:
        self._operations, self._has_timeout = operations, has_timeout

    def __enter__(self) -> None:
        self._operations[0].recorder.begin_wait(*self._operations, has_timeout=self._has_timeout)

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            for operation in self._operations:
                operation.fail()
        self._operations[0].recorder.end_wait()


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
    """Return whether a function of torch.distributed returns to user code."""
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
        self._collected_seqs: list[int] = []  # seqs of calls whose work was garbage-collected

    def add(self, work: Any, pending: Pending) -> None:
        """Track a call that returns ``work`` to user code."""
        key, seq, group = id(work), pending.seq, pending.fields[1]
        self._recent.append(work)
        self._open[key] = weakref.ref(work, lambda _: self._on_collected(key, seq)), seq, group

    def _on_collected(self, key: int, seq: int) -> None:
        if self._open.pop(key, None) is not None and len(self._collected_seqs) < _MAX_REPORTED:
            self._collected_seqs.append(seq)

    def forget(self, work: Any) -> None:
        """Stop tracking a Work that the program waits for."""
        if self._open.pop(id(work), None) is not None and work in self._recent:
            self._recent.remove(work)

    def calls(self, group: str = WORLD) -> list[int]:
        """Return the seqs of calls not waited for; for a group, only calls whose Work is alive."""
        alive = [seq for _, seq, name in list(self._open.values()) if group in (WORLD, name)]
        return sorted([*(self._collected_seqs if group == WORLD else ()), *alive])[:_MAX_REPORTED]
