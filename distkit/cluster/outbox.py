"""What a rank says to its starter: events, prints, outcomes, down its lifeline."""

from __future__ import annotations

import io
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distkit.cluster.channel import Channel


class Outbox:
    """Sends down the lifeline from a thread of its own, where no signal breaks a message in two."""

    def __init__(self, lifeline: Channel) -> None:
        self._lifeline = lifeline
        self._waiting: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="distkit-outbox", daemon=True).start()

    def emit(self, run: int, kind: str, what: Any) -> None:
        """Have it sent, after what came before."""
        self._waiting.put((run, kind, what))

    def _send(self) -> None:
        with suppress(OSError):  # the starter is gone, and so will be this process
            while True:
                self._lifeline.send(self._waiting.get())

    @contextmanager
    def printing(self, run: int) -> Iterator[None]:
        """Send what Python prints meanwhile; what C++ prints goes to the log, for crash reports."""
        before = sys.stdout, sys.stderr
        mine = _Stream(self, run, "stdout"), _Stream(self, run, "stderr")
        sys.stdout, sys.stderr = mine
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in mine:
                stream.flush()


class _Stream(io.TextIOBase):
    """Standard output that goes down the lifeline, a line at a time."""

    def __init__(self, out: Outbox, run: int, name: str) -> None:
        self._out, self._run, self._name, self._text = out, run, name, ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._text += text
            if "\n" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._text = self._text, ""
            if text:
                self._out.emit(self._run, "text", (self._name, text))
