"""Connections between nodes: Unix sockets within a host, ZeroMQ between hosts.

A round trip through a Unix socket takes a third of the CPU time that it takes through ZeroMQ, whose
messages pass through an I/O thread. A message is a header and a body
(:mod:`distkit.kvstore.protocol.wire`).
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zmq

from distkit.kvstore.transport.node import receive

#: A received header and body.
Received: TypeAlias = "tuple[Any, Any]"

#: The sizes of a header and a body [bytes].
_SIZES = struct.Struct("!QQ")
#: Requested size of a socket's send buffer [bytes]; the system may limit it.
_SOCKET_BYTES = 1 << 22
#: Maximum number of buffers in one system call.
_MAX_BUFFERS = 64
#: Interval at which a node looks for the socket of another node that has not started yet [s].
_CONNECT_INTERVAL = 0.005


class LocalConnection:
    """A connection to a process on this host.

    Args:
        sock: a connected Unix socket.
        poller: polls the connection until it is closed.
        wait: whether :meth:`send` waits until the socket has accepted the message. Otherwise,
            :meth:`receive` sends the rest; the poller reports when the socket is writable.
    """

    def __init__(self, sock: socket.socket, poller: Any, *, wait: bool) -> None:
        self._sock, self._poller = sock, poller
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._flags = 0 if wait else socket.MSG_DONTWAIT
        self._unsent: deque[memoryview] = deque()
        self._incoming = self._read()
        poller.register(self, zmq.POLLIN)

    def fileno(self) -> int:
        """Return the socket's file descriptor, or -1 if the connection is closed."""
        return self._sock.fileno()

    def send(self, header: bytes, body: Sequence[memoryview]) -> None:
        """Send a message, unless the connection is closed; the body is not copied."""
        sizes = _SIZES.pack(len(header), sum(map(len, body)))
        self._unsent += [memoryview(sizes + header), *filter(len, body)]
        self._flush()

    def _flush(self) -> None:
        """Send queued data."""
        try:
            with suppress(BlockingIOError):
                while self._unsent:
                    self._drop(
                        self._sock.sendmsg(islice(self._unsent, _MAX_BUFFERS), (), self._flags)
                    )
        except OSError:
            self.close()
        if self.fileno() >= 0:
            self._poller.register(self, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))

    def _drop(self, sent: int) -> None:
        """Remove sent bytes from the queue."""
        while sent:
            view = self._unsent.popleft()
            if sent < len(view):
                self._unsent.appendleft(view[sent:])
            sent -= min(sent, len(view))

    def receive(self) -> Received | None:
        """Return the next message, or None if it has not arrived; never wait."""
        if self._unsent:
            self._flush()
        return next(self._incoming, None)

    def _read(self) -> Iterator[Received | None]:
        """Yield each message, or None while the next has not arrived, until the connection ends."""
        with suppress(OSError, MemoryError, ValueError):  # data from a program that is not a node
            while True:
                sizes = bytearray(_SIZES.size)
                yield from self._fill(sizes)
                header, body = (np.empty(size, np.uint8) for size in _SIZES.unpack(sizes))
                yield from self._fill(header)
                yield from self._fill(body)
                yield header, body
        self.close()

    def _fill(self, buffer: Any) -> Iterator[None]:
        """Fill a buffer with received data; yield while none has arrived."""
        missing = memoryview(buffer)
        while missing:
            try:
                count = self._sock.recv_into(missing, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                yield
                continue
            if not count:
                raise ConnectionError
            missing = missing[count:]

    def close(self) -> None:
        """Close the connection; unsent data is lost."""
        self._unsent.clear()
        if self.fileno() >= 0:
            self._poller.unregister(self)
            self._sock.close()


class RemoteConnection:
    """A connection to a process on another host: a ZeroMQ DEALER, which has its own queue."""

    def __init__(self, sock: Any, poller: Any) -> None:
        self._sock, self._poller = sock, poller
        poller.register(sock, zmq.POLLIN)

    def send(self, header: bytes, body: Sequence[memoryview]) -> None:
        """Send a message; the body is not copied."""
        self._sock.send_multipart([header, *body], copy=False)

    def receive(self) -> Received | None:
        """Return the next message, or None if it has not arrived."""
        frames = receive(self._sock)
        return None if frames is None else join_frames(*frames)

    def close(self) -> None:
        """Close the connection; unsent messages are lost."""
        self._poller.unregister(self._sock)
        self._sock.close()


def join_frames(header: zmq.Frame, *body: zmq.Frame) -> Received:
    """Return the header and body of a message that has arrived through ZeroMQ."""
    return header.buffer, b"".join(frame.buffer for frame in body)


def listen(path: str) -> socket.socket:
    """Return a socket that listens on a path; the path appears once the socket is listening."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}~")
    listener.listen(socket.SOMAXCONN)
    Path(f"{path}~").rename(path)
    return listener


def connect(path: str) -> socket.socket:
    """Connect to a process that may start later; if it has exited, return an unconnected socket."""
    while not Path(path).exists():
        time.sleep(_CONNECT_INTERVAL)
    sock = socket.socket(socket.AF_UNIX)
    with suppress(ConnectionRefusedError):
        sock.connect(path)
    return sock
