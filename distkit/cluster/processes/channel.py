"""A private channel for framed messages between two processes of one user, over a Unix socket.

Most channels are socket pairs, which are inherited or passed as file descriptors, so no other
process can connect. The others use a socket in a folder that only the user can access. Messages are
plain values, and receiving one executes no code: the other process may run an untrusted program.
When the other end is closed, :meth:`Channel.recv` raises EOFError after the last message. A channel
is therefore also a lifeline.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from distkit.recording.encoding import decode, encode

_HEAD = struct.Struct("!Q")

#: Maximum number of bytes per read.
CHUNK_BYTES = 1 << 20


class Channel:
    """One end of a channel. ``send`` may be called from any thread, ``recv`` from only one."""

    def __init__(self, sock: socket.socket) -> None:
        # reentrant: a garbage collection in ``send`` may run a finalizer that sends
        self._sock, self._lock = sock, threading.RLock()
        _channels.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return a channel for this process, and a socket for the other process."""
        local, remote = socket.socketpair()
        return cls(local), remote

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send one message of plain values and optionally a file descriptor.

        Raises:
            OSError: the other end is closed.
        """
        body, sock = encode(message), self._sock
        data = _HEAD.pack(len(body)) + body
        with self._lock:  # one call, so that an interrupt cannot separate header and body
            sent = sock.send(data) if fd is None else socket.send_fds(sock, [data], [fd])
            sock.sendall(memoryview(data)[sent:])

    def recv(self) -> Any:
        """Wait for one message; its lists arrive as tuples.

        Raises:
            EOFError: the other end is closed, or sent an invalid message.
        """
        return self.recv_fd()[0]

    def recv_fd(self) -> tuple[Any, int | None]:
        """Wait for one message, and its file descriptor if it has one."""
        try:
            head, fds, _, _ = socket.recv_fds(self._sock, _HEAD.size, 1)
            head += self._read(_HEAD.size - len(head))
            message = decode(self._read(_HEAD.unpack(head)[0]))
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            self.shutdown()  # after an invalid message, the peer must not wait for a reply
            raise EOFError(f"the channel is closed: {error}") from error
        return message, fds[0] if fds else None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (chunk := self._sock.recv(min(size - len(data), CHUNK_BYTES))):
                raise EOFError("the other end of the channel is closed")
            data += chunk
        return bytes(data)

    def listen(self, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> None:
        """Call ``on_message(message)`` for each message, and ``on_close()`` after the last.

        A new thread calls them. The channel belongs to that thread, which closes it. To close it
        from another thread, call :meth:`shutdown`.
        """
        threading.Thread(
            target=self._listen, args=(on_message, on_close), name="distkit-channel", daemon=True
        ).start()

    def _listen(self, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> None:
        with suppress(EOFError):
            while True:
                _call(on_message, self.recv())
        _call(on_close)
        self.close()

    def shutdown(self) -> None:
        """Shut the connection down; ``recv`` raises EOFError after the messages already sent."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close the socket; no other thread may be reading it."""
        self.shutdown()
        self._sock.close()


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close inherited channels in a forked child, so that a channel closes when its owner exits."""
    for channel in _channels:
        channel._sock.close()


os.register_at_fork(after_in_child=_close_inherited)


def _call(callback: Callable[..., None], *message: Any) -> None:
    """Call a callback; print its exception, so that later messages are still handled."""
    try:
        callback(*message)
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
