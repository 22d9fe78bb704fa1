"""A private line between two processes of one user: framed messages over a socket pair.

Both ends are made by :func:`socket.socketpair` and handed over by inheritance or by passing
file descriptors, so nobody else can connect: what arrives was sent by the other end.
When the other end dies, :meth:`Channel.recv` raises EOFError at once: a channel is also a lifeline.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

_HEAD = struct.Struct("!Q")


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
        """Send one picklable message, and perhaps a file descriptor with it.

        Raises:
            OSError: the other end is gone.
        """
        body = pickle.dumps(message, protocol=5)
        head = _HEAD.pack(len(body))
        with self._lock:
            if fd is None:
                self._sock.sendall(head)
            else:
                socket.send_fds(self._sock, [head], [fd])
            self._sock.sendall(body)

    def recv(self) -> Any:
        """Wait for one message.

        Raises:
            EOFError: the other end is gone.
        """
        return self.recv_fd()[0]

    def recv_fd(self) -> tuple[Any, int | None]:
        """Wait for one message and the file descriptor that came with it, if one did."""
        try:
            head, fds, _, _ = socket.recv_fds(self._sock, _HEAD.size, 1)
        except OSError:
            head, fds = b"", []
        if not head:
            raise EOFError("the other end of the channel is closed")
        head += self._read(_HEAD.size - len(head))
        message = pickle.loads(self._read(_HEAD.unpack(head)[0]))
        return message, fds[0] if fds else None

    def broken(self) -> bool:
        """True if the other end is gone, as far as one can tell without waiting."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def finish(self) -> None:
        """Nothing more will come: after what has arrived, :meth:`recv` raises EOFError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Break the line. Both ends read EOFError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break the line and let go of it: nobody else here may be reading it."""
        self.hang_up()
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                got = self._sock.recv_into(view)
            except OSError:
                got = 0
            if not got:
                raise EOFError("the other end of the channel is closed")
            view = view[got:]
        return bytes(data)
