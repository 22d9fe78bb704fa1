"""Sends a rank's events, output and outcomes over its lifeline."""

from __future__ import annotations

import codecs
import fcntl
import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.rank_spec import CHANNEL_CLOSED

#: Maximum number of unsent messages with output. When it is reached, the pipes fill up, and
#: printing blocks.
MAX_UNSENT = 64

#: Capacity of the pipe for descriptor 1, and maximum number of bytes read at once.
PIPE_BYTES = 1 << 20


class Outbox:
    """Queue of messages; a separate thread sends them, so that no signal interrupts a send."""

    def __init__(self, lifeline: Channel) -> None:
        self._lifeline, self._run = lifeline, 0
        self._queue: queue.SimpleQueue[tuple[int, str, Any] | threading.Event] = queue.SimpleQueue()
        self._unsent = threading.Semaphore(MAX_UNSENT)
        self._pipes = [Pipe("stdout", self._emit_text), Pipe("stderr", self._emit_text)]
        start_loop(self._send)

    def emit(self, run: int, kind: str, data: Any) -> None:
        """Queue a message after the previous ones."""
        if kind == "rows":  # so that a step's output arrives before its events
            self.emit_output()
        self._queue.put((run, kind, data))

    def _emit_text(self, name: str, text: str) -> None:
        self._unsent.acquire()
        self.emit(self._run, "text", (name, text))

    def emit_output(self) -> None:
        """Queue the output that is in the pipes."""
        for pipe in self._pipes:
            pipe.forward()

    def drain(self) -> None:
        """Wait until all output and all queued messages are sent."""
        self.emit_output()
        sent = threading.Event()
        self._queue.put(sent)
        sent.wait()

    def _send(self) -> None:
        item = self._queue.get()
        if isinstance(item, threading.Event):
            item.set()
            return
        self._lifeline.send(item)
        if item[1] == "text":
            self._unsent.release()

    def capture(self) -> None:
        """Redirect descriptor 1, to which C code and child processes write.

        Descriptor 2 still refers to the log, for crash reports. The pipe is enlarged: C code that
        prints into a full pipe while it holds the GIL would block the thread that reads the pipe.
        """
        os.dup2(self._pipes[0].descriptor, 1)
        with suppress(AttributeError, OSError):  # not Linux, or above the user's limit
            fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @contextmanager
    def redirect_streams(self, run: int) -> Iterator[None]:
        """Redirect ``sys.stdout`` and ``sys.stderr`` to the pipes in the block."""
        self._run, previous = run, (sys.stdout, sys.stderr)
        streams = sys.stdout, sys.stderr = [pipe.stream() for pipe in self._pipes]
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr, *streams):
                with suppress(Exception):  # the function has closed or replaced it
                    stream.flush()
            sys.stdout, sys.stderr = previous
            self.emit_output()


class Pipe:
    """A pipe for the output of Python, C code or other processes.

    Args:
        name: the stream, "stdout" or "stderr".
        emit: called from any thread with the name and the next chunk of output.
    """

    def __init__(self, name: str, emit: Callable[[str, str], None]) -> None:
        self._name, self._emit, self._lock = name, emit, threading.Lock()
        self._source, self.descriptor = os.pipe()
        os.set_blocking(self._source, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        start_loop(self._wait)

    def _wait(self) -> None:
        select.select([self._source], [], [])
        self.forward()

    def forward(self) -> None:
        """Emit the output that is in the pipe."""
        with self._lock, suppress(BlockingIOError):  # another thread has emitted it
            self._emit(self._name, self._decoder.decode(os.read(self._source, PIPE_BYTES)))

    def stream(self) -> TextIO:
        """Return a stream like ``sys.stdout`` that accepts any string, including surrogates."""
        return os.fdopen(
            self.descriptor,
            "w",
            buffering=1,
            encoding="utf-8",
            errors="backslashreplace",
            closefd=False,
        )


def start_loop(function: Callable[[], None]) -> None:
    """Call a function repeatedly in a new thread; exit this process if it fails."""

    def loop() -> None:
        try:
            while True:
                function()
        except Exception:  # the program has closed descriptors, or replaced builtins
            os._exit(CHANNEL_CLOSED)

    threading.Thread(target=loop, name="distkit-outbox", daemon=True).start()
