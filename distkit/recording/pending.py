"""Pending operations, and collectives with ``async_op=True`` that the program never waits for.

The backend completes the latter in any case. So each ``Work`` that is returned to the program is
tracked until the program waits for it, requests its future, or observes its completion.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import overrides
from torch.distributed import distributed_c10d as c10d

from distkit.events import WORLD, Op, State
from distkit.recording.device import DeferredSummary, Device, InFlight
from distkit.recording.recorder import Recorder, is_standard, is_users

#: A program that sets a timeout of at most this long [ms] handles it: its wait is not interrupted.
MAX_USER_TIMEOUT = 60_000


def is_limit(given: timedelta | int | None) -> bool:
    """Return whether the program is expected to handle this timeout; int in milliseconds."""
    if isinstance(given, timedelta):
        given = given // timedelta(milliseconds=1)
    return given is not None and 0 < given <= MAX_USER_TIMEOUT


def hook(undo: ExitStack, holder: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function, if it exists, by ``instead(stock, …)`` until ``undo`` is closed."""
    if (stock := getattr(holder, name, None)) is not None:

        @wraps(stock)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return instead(stock, *args, **kwargs)

        setattr(holder, name, hooked)
        undo.callback(setattr, holder, name, stock)


class Pending:
    """An operation in progress: ``wait`` or its future completes it, whichever is first."""

    __slots__ = (
        "_lock",
        "begin",
        "called",
        "device",
        "done",
        "fields",
        "in_flight",
        "look",
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
        look: bool,
        device: Device | None = None,
    ) -> None:
        self.recorder, self.seq, self.op, self.fields = recorder, seq, op, fields
        self.outputs, self.look, self.device = outputs, look, device
        self._lock, self.done = threading.Lock(), False
        self.begin: Any = None  # an event in the device's stream
        self.called = 0.0  # time at which the host recorded it [s]
        self.work: Any = None
        self.in_flight: tuple[InFlight, Any] | None = None  # with its deferred values

    def record_begin(self) -> None:
        """Record its begin in the device's stream, where the backend executes it."""
        if self.device is not None:
            self.called, self.begin = time.monotonic(), self.device.event()

    def complete(self, peer: int | None = None) -> None:
        """Record its completion; ``peer`` is the sender if a receive accepts any source."""
        now = time.monotonic()  # before summarizing the values, which takes time
        with self._lock:
            if self.done or self.in_flight is not None:
                return
            if peer is not None:
                self.fields = peer, *self.fields[1:]
            values = self.recorder.look(*self.outputs) if self.look else None
            if self.device is None or self.begin is None:
                self._end(now, values, *self._memory(values))
            else:
                self.in_flight = InFlight(self.device, self.work, self.begin, self.called), values
                self.outputs = []
                self.recorder.in_flight.append(self)

    def poll(self) -> bool:
        """Record its completion if the device has finished it; return whether it is done."""
        with self._lock:
            if self.done or self.in_flight is None:
                return True
            in_flight, values = self.in_flight
            at = in_flight.poll()
            if at is not None:
                self._end(at, values, ("device_seconds", in_flight.seconds), *self._memory(values))
                self.work = self.in_flight = None  # this object may live as long as its work
            return at is not None

    def synchronize_stream(self) -> None:
        """Make the program's stream wait for it."""
        with self._lock:
            if self.in_flight is not None:
                self.in_flight[0].synchronize_stream()

    def discard_values(self) -> None:
        """Discard values that have not arrived: the program may change the tensors before.

        They are read in a stream of the backend, and an unknown stream of the program waits for it.
        """
        with self._lock:
            if self.in_flight is not None:
                self.in_flight = self.in_flight[0], None

    def is_in_this_stream(self) -> bool:
        """Return whether this thread's current stream waits for it."""
        in_flight, device = self.in_flight, self.device
        return in_flight is not None and device is not None and in_flight[0].stream == device.stream

    def _end(self, at: float, values: Any, *facts: tuple[str, Any]) -> None:
        self.done = True
        *call, where, known, match = self.fields
        fields = (*call, where, (*known, *facts), match) if facts else self.fields
        self.recorder.put(self.seq, self.op, State.COMPLETED, at, fields, values)

    @staticmethod
    def _memory(values: object) -> list[tuple[str, int]]:
        return [("memory", values.memory)] if isinstance(values, DeferredSummary) else []

    def fail(self) -> None:
        """Record that it ended with an error."""
        with self._lock:
            if not self.done:
                self.done = True
                now = time.monotonic()
                self.recorder.put(self.seq, self.op, State.FAILED, now, self.fields)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wrap the wait for it; an exception marks it as failed."""
        try:
            yield
        except BaseException:
            self.fail()
            raise
        finally:
            self.recorder.end_wait()


# -- collectives that the program does not wait for -----------------------------------------

#: Methods of Work, besides wait(), by which a program learns that it is complete.
COMPLETION_QUERIES = (
    "get_future",
    "is_completed",
    "is_success",
    "synchronize",
    "result",
    "block_current_stream",
)

#: Maximum number of calls that a run reports.
_MAX_REPORTED = 100

_WRAPPER_FILES = (c10d.__file__, overrides.__file__, str(Path(__file__).parent))


@cache
def _wrappers() -> frozenset[CodeType]:
    """Return the code of all decorators of torch's functions, from whichever package."""
    found = set()
    for function in vars(c10d).values():
        while type(function) is FunctionType and hasattr(function, "__wrapped__"):
            found.add(function.__code__)
            function = function.__wrapped__
    return frozenset(found)


def is_given_to_users(frame: FrameType) -> bool:
    """Return whether a function of torch.distributed returns to the user's own code."""
    for outer, _ in walk_stack(frame):
        code = outer.f_code
        file = code.co_filename
        if not (file.startswith(_WRAPPER_FILES) or code in _wrappers() or is_standard(file)):
            return is_users(file)
    return False


class UnwaitedCollectives:
    """Tracks the asynchronous collectives of a run that its program has not waited for."""

    def __init__(self) -> None:
        # by id of the work: the work, the call's number, and its group
        self._open: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._recent: deque[Any] = deque(maxlen=8)  # keeps a work alive until its caller holds it
        self._collected: list[int] = []  # numbers of calls whose work was garbage-collected

    def add(self, work: Any, pending: Pending) -> None:
        """Track a call that has returned ``work`` to the user's code."""
        key, seq, group = id(work), pending.seq, pending.fields[1]
        self._recent.append(work)
        self._open[key] = weakref.ref(work, lambda _: self._on_collected(key, seq)), seq, group

    def _on_collected(self, key: int, seq: int) -> None:
        if self._open.pop(key, None) is not None and len(self._collected) < _MAX_REPORTED:
            self._collected.append(seq)

    def forget(self, work: Any) -> None:
        """Stop tracking a work that the program waits for."""
        if self._open.pop(id(work), None) is not None and work in self._recent:
            self._recent.remove(work)

    def calls(self, group: str = WORLD) -> list[int]:
        """Return the seqs of the calls not waited for; for one group, of works still alive."""
        held = [seq for _, seq, name in list(self._open.values()) if group in (WORLD, name)]
        return sorted([*(self._collected if group == WORLD else ()), *held])[:_MAX_REPORTED]
