"""Messages of a rank to its starter: events, prints, outcomes, down its lifeline."""

from __future__ import annotations

import codecs
import errno
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

#: A rank that prints more than this many bytes ahead of its starter waits, as at a full pipe.
AHEAD = 1 << 22

#: Of what other processes print at most so many bytes are taken at once; the end of a run is once.
MOST = 1 << 26

#: How often to look for output that did not come from Python [s].
POLL = 0.2


class Outbox:
    """Sends down the lifeline from a thread of its own, where no signal breaks a message in two."""

    def __init__(self, lifeline: Channel) -> None:
        self._lifeline = lifeline
        self._waiting: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._file: io.FileIO | None = None
        self._polled: Printed | None = None
        self._streams: dict[str, io.TextIOWrapper] = {}
        threading.Thread(target=self._send, name="distkit-outbox", daemon=True).start()

    def emit(self, run: int, kind: str, what: Any) -> None:
        """Have it sent, after what came before."""
        self._waiting.put((run, kind, what))

    def drain(self) -> None:
        """Wait until all that came before is sent."""
        sent = threading.Event()
        self._waiting.put(sent)
        sent.wait()

    def _send(self) -> None:
        try:
            while True:
                item = self._next()
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, Printed):
                    if text := item.take():
                        self._post((item.run, "text", (item.name, text)))
                else:
                    self._post(item)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.ENOTSOCK):  # closed here: nothing can be said
                os._exit(LINE_CLOSED)
            # else the starter is gone, and so will be this process

    def _post(self, message: tuple[int, str, Any]) -> None:
        try:
            self._lifeline.send(message)
        except OSError:
            raise
        except Exception:  # of a program that replaces builtins, say
            os._exit(LINE_CLOSED)

    def _next(self) -> Item:
        while True:
            polled = self._polled
            with suppress(queue.Empty):
                return self._waiting.get(timeout=None if polled is None else POLL)
            if polled is not None:
                return polled

    def capture(self, path: str) -> None:
        """Collect what comes on descriptor 1: prints of C code and of other processes.

        In a file, which nobody can be blocked by. Descriptor 2 stays in the log, for crash reports.
        """
        self._file = io.FileIO(path, "a+", opener=lambda p, flags: os.open(p, flags, 0o600))
        os.dup2(self._file.fileno(), 1)

    @contextmanager
    def printing(self, run: int) -> Iterator[None]:
        """Send what is printed meanwhile."""
        before = sys.stdout, sys.stderr
        mine = sys.stdout, sys.stderr = self._stream("stdout", run), self._stream("stderr", run)
        if self._file is not None:
            self._file.truncate(0)
            self._poll(Appended(run, self._file))
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr, *mine):
                with suppress(Exception):  # the function has closed it, or it is one of its own
                    stream.flush()
            sys.stdout, sys.stderr = before
            if self._file is not None:
                self._poll(None)

    def _poll(self, what: Printed | None) -> None:
        last, self._polled = self._polled, what
        if (looked := what or last) is not None:
            self._waiting.put(looked)  # looks at it now, and wakes the thread

    def _stream(self, name: str, run: int) -> io.TextIOWrapper:
        """The same one in all runs: loggers keep it."""
        try:
            stream = self._streams[name]
            stream.flush()
        except (KeyError, ValueError):  # the first run, or the last one has closed or detached it
            stream = _text_stream(io.BufferedWriter(Pieces(name, self._waiting.put)))
            self._streams[name] = stream
        stream.buffer.raw.run = run  # type: ignore[attr-defined]
        return stream


def _text_stream(binary: io.BufferedWriter) -> io.TextIOWrapper:
    """As ``sys.stdout`` is, but that it takes any string: one of a broken file name, too."""
    return io.TextIOWrapper(
        binary, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


#: A message, output that is taken when its turn comes, or who waits for what came before.
Item: TypeAlias = "tuple[int, str, Any] | Printed | threading.Event"


class Printed:
    """Output of a run that is on its way; taken by the outbox's thread."""

    def __init__(self, name: str, run: int = 0) -> None:
        self.name, self.run = name, run
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self) -> str:
        """The text since the last call."""
        return self._decoder.decode(self._bytes())

    def _bytes(self) -> bytes:
        raise NotImplementedError


class Appended(Printed):
    """A file that is appended to."""

    def __init__(self, run: int, file: io.FileIO) -> None:
        super().__init__("stdout", run)
        self._file, self._at = file, 0

    def _bytes(self) -> bytes:
        there = os.fstat(self._file.fileno()).st_size - self._at
        data = os.pread(self._file.fileno(), min(there, MOST), self._at) if there > 0 else b""
        self._at += len(data)
        return data


class Pieces(Printed, io.RawIOBase):
    """A stream's output from Python: small pieces, many of which leave as one."""

    def __init__(self, name: str, send: Callable[[Printed], None]) -> None:
        super().__init__(name)
        self._send, self._pieces, self._size = send, list[bytes](), 0
        self._taken = threading.Condition()

    def writable(self) -> bool:
        """As files say it."""
        return True

    def fileno(self) -> int:
        """The descriptor for processes that inherit this stream."""
        return {"stdout": 1, "stderr": 2}[self.name]

    def write(self, data: Any) -> int:
        """Have it sent; wait while too much is on its way."""
        with self._taken:
            self._taken.wait_for(lambda: self._size < AHEAD)
            self._pieces.append(bytes(data))
            self._size += len(self._pieces[-1])
            if len(self._pieces) == 1:
                self._send(self)
            return len(self._pieces[-1])

    def _bytes(self) -> bytes:
        with self._taken:
            pieces, self._pieces, self._size = self._pieces, [], 0
            self._taken.notify_all()
        return b"".join(pieces)


def in_child() -> None:
    """In a process that a rank has forked, where nobody sends: print to descriptor 1."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, _text_stream(io.BufferedWriter(io.FileIO(1, "w", closefd=False))))
