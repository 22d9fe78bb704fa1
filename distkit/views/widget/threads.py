"""Threads of a view: one that does what the reader asks, one that tells what changed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

#: Seconds between two updates while much happens.
PERIOD = 0.016


class Worker:
    """Calls functions one after the other in a thread of its own, started by the first."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def do(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, after all that came before it."""
        self._calls.put(call)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread when it has done what was asked so far."""
        self._calls.put(None)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            call()


class Notifier:
    """Calls ``act`` soon after it was notified, once for all that came at the same time."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._due = act, threading.Event()
        self._worker = Worker()

    def notify(self) -> None:
        """Something has changed. From any thread; never waits."""
        if not self._due.is_set():
            self._due.set()
            self._worker.do(self._run)

    def close(self) -> None:
        """End the thread."""
        self._due.set()
        self._worker.close()

    def _run(self) -> None:
        self._due.clear()
        self._act()
        time.sleep(PERIOD)
