"""A private line between two processes of one user: framed messages over a socket pair.

Both ends are made by :func:`socket.socketpair` and handed over by inheritance or by passing
file descriptors, so nobody else can connect: what arrives was sent by the other end. Messages are
plain values, and receiving one executes nothing: the other end may run a program of anybody's.
When the other end dies, :meth:`Channel.recv` raises EOFError at once: a channel is also a lifeline.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from distkit.recording.plain import decode, encode

_HEAD = struct.Struct("!Q")

#: So much of a message is read at once [bytes].
_CHUNK = 1 << 20


class Channel:
    """One end of the line. ``send`` may be called from any thread, ``recv`` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel for this process and the other end for another one."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send one message of plain values, and perhaps a file descriptor with it.

        Raises:
            OSError: the other end is gone.
        """
        body = encode(message)
        head, sock = _HEAD.pack(len(body)), self._sock
        with self._lock:
            if fd is None:
                sock.sendall(head)
            else:
                socket.send_fds(sock, [head], [fd])
            sock.sendall(body)

    def recv(self) -> Any:
        """Wait for one message; tuples stand for its lists.

        Raises:
            EOFError: the other end has closed, or sent an invalid message.
        """
        return self.recv_fd()[0]

    def recv_fd(self) -> tuple[Any, int | None]:
        """Wait for one message and the file descriptor that came with it, if one did."""
        sock = self._sock
        try:
            head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
        except OSError:
            head, fds = b"", []
        if not head:
            raise EOFError("the other end of the channel is closed")
        head += _read(sock, _HEAD.size - len(head))
        message = _decoded(_read(sock, _HEAD.unpack(head)[0]))
        return message, fds[0] if fds else None

    def listen(self, hear: Callable[[Any], None], gone: Callable[[], None]) -> None:
        """Call ``hear(message)`` for each message from a new thread, and ``gone()`` after the last.

        The channel belongs to that thread, which closes it: to end it from this side, hang up.
        """
        work = hear, gone
        threading.Thread(target=self._listen, args=work, name="distkit-line", daemon=True).start()

    def _listen(self, hear: Callable[[Any], None], gone: Callable[[], None]) -> None:
        with suppress(EOFError):
            while True:
                _call(hear, self.recv())
        _call(gone)
        self.close()

    def broken(self) -> bool:
        """True if the other end has closed; does not wait."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """Break the line. After what has arrived, both ends read EOFError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break the line and let go of it: nobody else here may be reading it."""
        self.hang_up()
        self._sock.close()

    def close_here(self) -> None:
        """Close this end in a process that has inherited it: the line stays."""
        self._sock.close()


def _decoded(body: bytes) -> Any:
    try:
        return decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise EOFError(f"the channel received an invalid message: {error}") from error


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            got = sock.recv(min(size - len(data), _CHUNK))
        except OSError:
            got = b""
        if not got:
            raise EOFError("the other end of the channel is closed")
        data += got
    return bytes(data)


def _call(callback: Callable[..., None], *message: Any) -> None:
    """Call a listener; what it raises must not cost the messages that follow."""
    try:
        callback(*message)
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
