"""Blocks a rank of a stepped run before each communication call."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gate:
    """Semaphore that blocks a rank before each communication until it gets a permit.

    The tap's hook waits on it, so it works for every program, including DDP's C++ reducer. Another
    thread adds permits, since the main thread waits. The operation of a waiting rank is
    *scheduled* but not *started*, which :class:`distkit.diagnosis.rank_state.WaitForGraph`
    interprets.

    ``on_wait`` is called before a communication waits.
    """

    def __init__(self) -> None:
        self.on_wait: Callable[[], None] = lambda: None
        self._permits: float = 0
        self._changed = threading.Condition()

    def allow(self, count: int | None) -> None:
        """Add ``count`` permits, or permit all if None. May be called from any thread."""
        with self._changed:
            self._permits += float("inf") if count is None else count
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for a permit, and consume it."""
        with self._changed:
            if not self._permits:
                self.on_wait()
                self._changed.wait_for(lambda: self._permits)
            self._permits -= 1
