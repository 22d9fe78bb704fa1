"""Protocols for runs that go on or are stepped through; updates of views, kept few.

Threads of a view do what the reader asks, and tell what has changed.
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

#: Seconds between two updates of a live view, and in which the ranks' events come together.
PERIOD, GATHER = 0.06, 0.025
#: And so many times as long as the last update took: the ranks need the processor, too.
PAUSE = 4


@runtime_checkable
class Live(Protocol):
    """A run that may still be going on, such as :class:`distkit.cluster.Run`."""

    @property
    def trace(self) -> EventLog:
        """The events recorded so far."""

    @property
    def finished(self) -> bool:
        """True if the trace is complete."""

    def subscribe(self, callback: Callable[[list[Event]], None], /) -> Callable[[], None]:
        """Call back with the events so far, with others as they arrive, and with [] at the end.

        From any thread.

        Returns:
            A function that ends the subscription.
        """


class Moment(Protocol):
    """The position of a stepped run after one of its steps."""

    @property
    def events(self) -> int:
        """So many of the trace's events had happened."""

    @property
    def time(self) -> float:
        """The time of the last of them [s]."""

    @property
    def choice(self) -> Sequence[int]:
        """The ranks that were let go to get here; none for the first moment."""

    @property
    def standings(self) -> Sequence[RankState]:
        """The state of each rank."""


class Steppable(Live, Protocol):
    """A run that goes on step by step, such as what ``cluster.step(fn)`` returns.

    Its methods raise a :class:`~distkit.errors.DistkitError` when they make no sense, and may be
    called from any thread; all but ``pause``, ``back`` and ``seek`` may take a while.
    """

    @property
    def name(self) -> str:
        """The program's name."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part."""

    @property
    def moments(self) -> Sequence[Moment]:
        """The moments so far, the first before anything happened."""

    @property
    def position(self) -> int:
        """The moment shown; the last one is now."""

    @property
    def playing(self) -> bool:
        """True if it goes on by itself."""

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings, if any, the most important first."""

    @property
    def error(self) -> str:
        """The run's failure, in words; "" if it did not fail."""

    def next(self, rank: int | None = None, /) -> object:
        """Let the next communication go: of every rank, or of one."""

    def back(self) -> object:
        """Look at the moment before."""

    def seek(self, position: int, /) -> object:
        """Look at a moment."""

    def play(self, speed: float, /) -> object:
        """Step again and again, ``speed`` times a second; returns when that ends."""

    def pause(self) -> object:
        """Stop playing."""

    def finish(self) -> object:
        """Let everything go."""

    def watch(self, callback: Callable[[], None], /) -> Callable[[], None]:
        """Call back whenever any of the above changed, from any thread.

        Returns:
            A function that ends this.
        """


class Worker:
    """Calls functions one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def do(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, after all that came before it."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread when it has done what was asked so far."""
        self._calls.put(None)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            call()


class Notifier:
    """Calls ``act`` soon after it was notified, once for all that came at the same time.

    After a call that took long it pauses longer: the larger a picture, the fewer its updates.

    Args:
        act: called in a thread of its own.
        period: seconds between two calls.
    """

    def __init__(self, act: Callable[[], None], period: float) -> None:
        self._act, self._period = act, period
        self._due, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def notify(self) -> None:
        """Something has changed. From any thread; never waits."""
        self._due.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._due.set()

    def _work(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause) and self._due.wait():
            if self._closed.wait(min(GATHER, self._period)):
                return
            self._due.clear()
            began = time.monotonic()
            self._act()
            pause = max(self._period, PAUSE * (time.monotonic() - began))
