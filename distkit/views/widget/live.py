"""Defines protocols of live and stepped runs, and the threads of views.

A view uses threads to execute commands and to send updates at a limited rate.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from distkit.diagnosis.findings import Finding
from distkit.diagnosis.rank_state import RankState
from distkit.events import Event
from distkit.trace.log import EventLog

#: Minimum time between updates of a live view, and time to collect events of all ranks [s].
PERIOD, GATHER = 0.06, 0.025
#: Minimum pause between updates, as a multiple of the last update's CPU time; ranks need the CPU.
PAUSE = 4


@runtime_checkable
class Live(Protocol):
    """A run that may still be in progress, such as :class:`distkit.cluster.Run`."""

    @property
    def trace(self) -> EventLog:
        """The events recorded so far."""

    @property
    def finished(self) -> bool:
        """True if the trace is complete."""

    def subscribe(self, callback: Callable[[Sequence[Event]], None], /) -> Callable[[], None]:
        """Call ``callback`` with all current events, with each new batch, and finally with none.

        The callback may be called from any thread.

        Returns:
            A function that cancels the subscription.
        """


class Moment(Protocol):
    """The position of a stepped run after one of its steps."""

    @property
    def events(self) -> int:
        """Number of the trace's events up to this moment."""

    @property
    def time(self) -> float:
        """Time of the last of these events [s]."""

    @property
    def choice(self) -> Sequence[int]:
        """The ranks that were released to reach this moment; empty for the first moment."""

    @property
    def rank_states(self) -> Sequence[RankState]:
        """The state of each rank."""


class Steppable(Live, Protocol):
    """A run that advances step by step, such as the result of ``cluster.step(fn)``.

    It also has the methods ``next(rank)``, ``back()``, ``seek(position)``, ``play(speed)``,
    ``pause()`` and ``finish()``, which the cockpit calls by name. They may be called from any
    thread and raise :class:`~distkit.errors.DistkitError` if they are not applicable. All except
    ``pause``, ``back`` and ``seek`` may block.
    """

    @property
    def name(self) -> str:
        """The program's name."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part."""

    @property
    def moments(self) -> Sequence[Moment]:
        """The moments so far; the first one precedes all events."""

    @property
    def position(self) -> int:
        """Index of the moment shown; the last one is the present."""

    @property
    def playing(self) -> bool:
        """True while the run steps automatically."""

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings, the most important first."""

    @property
    def error(self) -> str:
        """The run's error message; "" if it did not fail."""

    def watch(self, callback: Callable[[], None], /) -> Callable[[], None]:
        """Call ``callback``, from any thread, whenever any of the above changes.

        Returns:
            A function that cancels the subscription.
        """


class Worker:
    """A thread that calls queued functions in order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue ``call``."""
        self._calls.put(call)

    def close(self) -> None:
        """Stop the thread after all queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            call()


class Notifier:
    """A thread that calls ``act`` soon after a notification, once for a burst of notifications.

    The pause grows with the processor time of a call, so large pictures are updated less often.

    Args:
        act: called in the notifier's thread.
        period: minimum time between two calls [s].
        gather: time to wait for more notifications [s].
    """

    def __init__(self, act: Callable[[], None], period: float, gather: float = GATHER) -> None:
        self._act, self._period, self._gather = act, period, gather
        self._due, self._now, self._closed = threading.Event(), threading.Event(), False
        threading.Thread(target=self._work, daemon=True).start()

    def notify(self, *, now: bool = False) -> None:
        """Request a call of ``act``, without a pause if ``now``. Thread-safe; never blocks."""
        if now:
            self._now.set()
        self._due.set()

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self.notify(now=True)

    def _work(self) -> None:
        pause = 0.0
        while True:
            self._now.wait(pause)
            self._due.wait()
            self._now.wait(self._gather)
            if self._closed:
                return
            self._due.clear()
            self._now.clear()
            start = time.thread_time()
            self._act()
            pause = max(self._period, PAUSE * (time.thread_time() - start))
