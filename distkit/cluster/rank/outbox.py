"""Sends a rank's events, output and outcomes over its lifeline."""

from __future__ import annotations

import codecs
import io
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.rank_spec import LINE_CLOSED

#: Maximum number of unsent bytes of output before a print blocks, like a full pipe.
MAX_UNSENT = 1 << 22

#: Maximum number of bytes read at once from the output of other processes.
MAX_READ = 1 << 26

#: Interval between polls for output that did not come from Python [s].
POLL_INTERVAL = 0.2


class Outbox:
    """Queue of messages; a separate thread sends them, where no signal interrupts a message."""

    def __init__(self, lifeline: Channel) -> None:
        self._lifeline = lifeline
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._file: io.FileIO | None = None
        self._poll_source: OutputSource | None = None
        self._streams: dict[str, io.TextIOWrapper] = {}
        threading.Thread(target=self._send, name="distkit-outbox", daemon=True).start()

    def emit(self, run: int, kind: str, what: Any) -> None:
        """Queue a message after the previous ones."""
        self._queue.put((run, kind, what))

    def drain(self) -> None:
        """Wait until all queued messages are sent."""
        sent = threading.Event()
        self._queue.put(sent)
        sent.wait()

    def _send(self) -> None:
        try:
            while True:
                item = self._next()
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, OutputSource):
                    if text := item.take():
                        self._lifeline.send((item.run, "text", (item.name, text)))
                else:
                    self._lifeline.send(item)
        except Exception:  # the program has closed descriptors, or replaced builtins
            os._exit(LINE_CLOSED)

    def _next(self) -> Item:
        while True:
            polled = self._poll_source
            with suppress(queue.Empty):
                return self._queue.get(timeout=None if polled is None else POLL_INTERVAL)
            if polled is not None:
                return polled

    def capture(self, path: str) -> None:
        """Redirect descriptor 1, the output of C code and other processes, to a file.

        Writing to a file never blocks. Descriptor 2 stays in the log, for crash reports.
        """
        self._file = io.FileIO(path, "a+", opener=lambda p, flags: os.open(p, flags, 0o600))
        os.dup2(self._file.fileno(), 1)

    @contextmanager
    def printing(self, run: int) -> Iterator[None]:
        """Send the output of the block."""
        previous = sys.stdout, sys.stderr
        streams = sys.stdout, sys.stderr = self._stream("stdout", run), self._stream("stderr", run)
        if self._file is not None:
            self._file.truncate(0)
            self._poll(FileOutput(run, self._file))
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr, *streams):
                with suppress(Exception):  # the function has closed or replaced it
                    stream.flush()
            sys.stdout, sys.stderr = previous
            if self._file is not None:
                self._poll(None)

    def _poll(self, source: OutputSource | None) -> None:
        previous, self._poll_source = self._poll_source, source
        if (current := source or previous) is not None:
            self._queue.put(current)  # polls it now, and wakes the thread

    def _stream(self, name: str, run: int) -> io.TextIOWrapper:
        """Return the stream; all runs use the same one, because loggers keep it."""
        try:
            stream = self._streams[name]
            stream.flush()
        except (KeyError, ValueError):  # the first run, or an earlier run closed or detached it
            stream = _text_stream(io.BufferedWriter(PythonOutput(name, self._queue.put)))
            self._streams[name] = stream
        stream.buffer.raw.run = run  # type: ignore[attr-defined]
        return stream


def _text_stream(binary: io.BufferedWriter) -> io.TextIOWrapper:
    """Return a stream like ``sys.stdout`` that accepts any string, including surrogates."""
    return io.TextIOWrapper(
        binary, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


#: A message, a source of output to read, or an event to set, in order.
Item: TypeAlias = "tuple[int, str, Any] | OutputSource | threading.Event"


class OutputSource:
    """Unsent output of a run, read by the outbox's thread."""

    def __init__(self, name: str, run: int = 0) -> None:
        self.name, self.run = name, run
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self) -> str:
        """Return the text since the previous call."""
        return self._decoder.decode(self._read_new())

    def _read_new(self) -> bytes:
        raise NotImplementedError


class FileOutput(OutputSource):
    """Output that other processes append to a file."""

    def __init__(self, run: int, file: io.FileIO) -> None:
        super().__init__("stdout", run)
        self._file, self._offset = file, 0

    def _read_new(self) -> bytes:
        size = os.fstat(self._file.fileno()).st_size - self._offset
        data = os.pread(self._file.fileno(), min(size, MAX_READ), self._offset) if size > 0 else b""
        self._offset += len(data)
        return data


class PythonOutput(OutputSource, io.RawIOBase):
    """Python's output to a stream, in small pieces that are sent together."""

    def __init__(self, name: str, send: Callable[[OutputSource], None]) -> None:
        super().__init__(name)
        self._send, self._pieces, self._size = send, list[bytes](), 0
        self._drained = threading.Condition()

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor for processes that inherit this stream."""
        return {"stdout": 1, "stderr": 2}[self.name]

    def write(self, data: Any) -> int:
        """Queue data; block while more than ``MAX_UNSENT`` bytes are unsent."""
        with self._drained:
            self._drained.wait_for(lambda: self._size < MAX_UNSENT)
            self._pieces.append(bytes(data))
            self._size += len(self._pieces[-1])
            if len(self._pieces) == 1:
                self._send(self)
            return len(self._pieces[-1])

    def _read_new(self) -> bytes:
        with self._drained:
            pieces, self._pieces, self._size = self._pieces, [], 0
            self._drained.notify_all()
        return b"".join(pieces)


def print_to_descriptor() -> None:
    """Print to descriptor 1 in a child process of a rank, because it has no outbox."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, _text_stream(io.BufferedWriter(io.FileIO(1, "w", closefd=False))))
