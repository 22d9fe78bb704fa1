"""Operations between call and end; collectives with ``async_op=True`` that nobody waits for.

The completion of the latter says nothing: the backend completes them either way. So each ``Work``
that a program was given is remembered until the program waits for it, asks for its future, or
sees it completed.
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
from distkit.recording.device import Device, Flight, Later
from distkit.recording.recorder import Recorder, is_standard, is_users

#: A program that sets a time limit up to this [ms] handles it: it is not released before.
PATIENT = 60_000


def is_limit(given: timedelta | int | None) -> bool:
    """True if this time limit is one that the program means to reach; int in milliseconds."""
    if isinstance(given, timedelta):
        given = given // timedelta(milliseconds=1)
    return given is not None and 0 < given <= PATIENT


def hook(undo: ExitStack, holder: Any, name: str, instead: Callable[..., Any]) -> None:
    """Have ``instead(stock, …)`` called for a function, if it exists, until ``undo`` is closed."""
    if (stock := getattr(holder, name, None)) is not None:

        @wraps(stock)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return instead(stock, *args, **kwargs)

        setattr(holder, name, hooked)
        undo.callback(setattr, holder, name, stock)


class Pending:
    """A started operation: completes once, by ``wait`` or by its future, whichever is first."""

    __slots__ = (
        "_lock",
        "begin",
        "called",
        "device",
        "done",
        "fields",
        "flight",
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
        self.begin: Any = None  # an event in the device's stream, put there at …
        self.called = 0.0
        self.work: Any = None
        self.flight: tuple[Flight, Any] | None = None  # the device is at it; the values after it

    def leaves(self) -> None:
        """It goes to a backend that works in the device's stream, and waits there."""
        if self.device is not None:
            self.called, self.begin = time.monotonic(), self.device.event()

    def complete(self, peer: int | None = None) -> None:
        """Note that it is done; ``peer`` is who sent, where that was open."""
        now = time.monotonic()  # before looking at the values, which takes a while
        with self._lock:
            if self.done or self.flight is not None:
                return
            if peer is not None:
                self.fields = peer, *self.fields[1:]
            values = self.recorder.look(*self.outputs) if self.look else None
            if self.device is None:
                self._end(now, values)
            elif self.begin is None:
                self._end(now, values, *self._memory(values))
            else:
                self.flight = Flight(self.device, self.work, self.begin, self.called), values
                self.outputs = []
                self.recorder.flying.append(self)

    def lands(self) -> bool:
        """Note the end of its flight, if the device says that it is over."""
        with self._lock:
            if self.done or self.flight is None:
                return True
            flight, values = self.flight
            at = flight.landed()
            if at is not None:
                self._end(at, values, ("device_seconds", flight.seconds), *self._memory(values))
                self.work = self.flight = None  # it may be kept for as long as its work is
            return at is not None

    def joins(self, *, read: bool = True) -> None:
        """The program's stream waits for it; without ``read``, one that we do not know does.

        Its values were put to be read in a stream of the backend's, and the program may change the
        tensors next: then they are given up, unless they are there.
        """
        with self._lock:
            if self.done or self.flight is None:
                return
            flight, _ = self.flight
            if read:
                flight.joins()
            elif self.look:
                self.flight = flight, None
                *call, where, known, match = self.fields
                self.fields = (*call, where, (*known, ("unread", True)), match)

    def is_in_this_stream(self) -> bool:
        """True if this thread's current stream waits for it."""
        flight, device = self.flight, self.device
        return flight is not None and device is not None and flight[0].stream == device.stream

    def _end(self, at: float, values: Any, *facts: tuple[str, Any]) -> None:
        self.done = True
        *call, where, known, match = self.fields
        fields = (*call, where, (*known, *facts), match) if facts else self.fields
        self.recorder.put(self.seq, self.op, State.COMPLETED, at, fields, values)

    @staticmethod
    def _memory(values: object) -> list[tuple[str, int]]:
        return [("memory", values.memory)] if isinstance(values, Later) else []

    def fail(self) -> None:
        """Note that it ended with an error."""
        with self._lock:
            if not self.done:
                self.done = True
                now = time.monotonic()
                self.recorder.put(self.seq, self.op, State.FAILED, now, self.fields)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Inside, its caller waits for it; an exception is its end."""
        try:
            yield
        except BaseException:
            self.fail()
            raise
        finally:
            self.recorder.wait_ends()


# -- those that nobody waits for ------------------------------------------------------------

#: What a program can do with a Work, beside wait(), to know that it is over.
LOOKS = (
    "get_future",
    "is_completed",
    "is_success",
    "synchronize",
    "result",
    "block_current_stream",
)

#: A run reports at most so many calls.
_MOST = 100

_BETWEEN = (c10d.__file__, overrides.__file__, str(Path(__file__).parent))


@cache
def _wrappers() -> frozenset[CodeType]:
    """The code of all that is wrapped around torch's functions, whichever package it is from."""
    found = set()
    for function in vars(c10d).values():
        while type(function) is FunctionType and hasattr(function, "__wrapped__"):
            found.add(function.__code__)
            function = function.__wrapped__
    return frozenset(found)


def is_given_to_users(frame: FrameType) -> bool:
    """True if what a function of torch.distributed returns goes to the user's own code."""
    for outer, _ in walk_stack(frame):
        code = outer.f_code
        file = code.co_filename
        if not (file.startswith(_BETWEEN) or code in _wrappers() or is_standard(file)):
            return is_users(file)
    return False


class Unwaited:
    """The asynchronous collectives of a run that its program has not waited for."""

    def __init__(self) -> None:
        # by id of the work: the work, the call's number, and its group
        self._given: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._latest: deque[Any] = deque(maxlen=8)  # keeps a work until its caller has it
        self._lost: list[int] = []  # of works that are gone

    def add(self, work: Any, pending: Pending) -> None:
        """A call has returned ``work`` to the user's code."""
        key, seq, group = id(work), pending.seq, pending.fields[1]
        self._latest.append(work)
        self._given[key] = weakref.ref(work, lambda _: self._gone(key, seq)), seq, group

    def _gone(self, key: int, seq: int) -> None:
        if self._given.pop(key, None) is not None and len(self._lost) < _MOST:
            self._lost.append(seq)

    def forget(self, work: Any) -> None:
        """The program waits for it."""
        if self._given.pop(id(work), None) is not None and work in self._latest:
            self._latest.remove(work)

    def calls(self, group: str = WORLD) -> list[int]:
        """The numbers of the calls that were not waited for; on one group, of those still held."""
        held = [seq for _, seq, its in list(self._given.values()) if group in (WORLD, its)]
        return sorted([*(self._lost if group == WORLD else ()), *held])[:_MOST]
