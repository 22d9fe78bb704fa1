"""What a view needs to know of a run that goes on, and how it keeps its updates few."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from distkit.events import Event, Trace

#: Seconds between two updates of a live view.
PERIOD = 0.1


@runtime_checkable
class Live(Protocol):
    """A run that may still be going on, such as :class:`distkit.Run`."""

    @property
    def trace(self) -> Trace:
        """What was recorded so far."""

    @property
    def finished(self) -> bool:
        """Whether the trace is complete."""

    def subscribe(self, callback: Callable[[list[Event]], None], /) -> Callable[[], None]:
        """Call back with events as they arrive, from any thread, and with [] at the end.

        Returns:
            A function that ends the subscription.
        """


class Throttle:
    """Gathers events and hands them on in batches, at most one per ``period``.

    Args:
        act: called with a batch, never twice at once; from whichever thread.
        period: seconds between two batches.
    """

    def __init__(self, act: Callable[[list[Event]], None], *, period: float = PERIOD) -> None:
        self._act, self._period = act, period
        self._lock, self._acting = threading.Lock(), threading.Lock()
        self._waiting: list[Event] = []
        self._timer: threading.Timer | None = None
        self._last = -period

    def add(self, events: list[Event]) -> None:
        """Take in events; they are handed on at once or a little later."""
        with self._lock:
            self._waiting += events
            if self._timer is not None or not self._waiting:
                return
            delay = max(0.0, self._last + self._period - time.monotonic())
            self._timer = threading.Timer(delay, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Hand on what is waiting, now."""
        with self._acting:
            with self._lock:
                events, self._waiting = self._waiting, []
                if self._timer is not None:
                    self._timer.cancel()
                self._timer, self._last = None, time.monotonic()
            if events:
                self._act(events)
