"""ZeroMQ sockets that admit only the cluster, never drop a message, and report a peer's end.

On one host sockets are ``ipc://`` files in the cluster's folder, which only its user may enter.
Between hosts they are ports on the one interface that reaches the others. If the cluster has keys
(CurveZMQ), a process without them cannot connect.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import zmq

#: Maximum time to send the last message of a closed socket [ms]; if it is lost, the process counts
#: as dead.
CLOSE_LINGER_MS = 2000

#: Grace period before a disconnected process counts as hung [ms].
_EXIT_MS = 200


def context() -> zmq.Context[Any]:
    """Return this process's context, which is never collected, so it never waits for sockets."""
    return _context_of(os.getpid())


@cache
def _context_of(pid: int) -> zmq.Context[Any]:
    return zmq.Context()


def open_socket(
    context: Any, kind: int, keys: tuple[str, str] | None, heartbeat_timeout: float = 0.0
) -> Any:
    """Create a socket that never drops a message because its queue is full.

    Args:
        context: ZeroMQ's context.
        kind: ``zmq.ROUTER`` to answer requests, ``zmq.DEALER`` to send them.
        keys: the cluster's public and secret key; None to rely on the folder's permissions.
        heartbeat_timeout: a connection that is silent for this long counts as broken [s]; 0 for no
            limit. ZeroMQ's own threads send the heartbeats (ZMTP's PING and PONG).
    """
    sock = context.socket(kind)
    sock.linger = sock.sndhwm = sock.rcvhwm = 0
    sock.reconnect_ivl, sock.reconnect_ivl_max = 10, 200  # ms
    if heartbeat_timeout:
        sock.heartbeat_ivl = sock.heartbeat_timeout = max(1, int(500 * heartbeat_timeout))  # ms
    if keys is not None:
        public, secret = (key.encode() for key in keys)
        sock.curve_publickey, sock.curve_secretkey = public, secret
        if kind == zmq.ROUTER:
            sock.curve_server = True
        else:
            sock.curve_serverkey = public
    return sock


def new_keys() -> tuple[str, str]:
    """Return a public and a secret key for a cluster."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def outlives_connection(pid: int) -> bool:
    """Return True if a process is alive shortly after its connection broke, hung or not.

    This needs Linux; elsewhere the process counts as ended.
    """
    if sys.platform != "linux":
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        return not poller.poll(_EXIT_MS)
    finally:
        os.close(process)


#: How a connection ended.
BROKEN = "its connection was lost"


#: Plain ints, because each use of pyzmq's enums costs a microsecond.
_EVENTS, _READABLE, _NOBLOCK = map(int, (zmq.EVENTS, zmq.POLLIN, zmq.NOBLOCK))

#: A monitor's first frame: an event and its value. zmq.utils.monitor imports asyncio.
_MONITOR_EVENT = struct.Struct("=Hi")


class ConnectionMonitor:
    """Reports when connections of a socket begin and end, without delay.

    Args:
        sock: the socket to monitor. Poll :attr:`socket` for changes.
    """

    def __init__(self, sock: Any) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.socket = sock.get_monitor_socket(events)
        self.socket.linger = 0
        self._connected = self._ended = False

    def changes(self) -> list[str | None]:
        """Return in order why the DEALER's connection ended, or None for a new connection."""
        changes: list[str | None] = []
        for event, _ in self._events():
            was_connected, self._connected = self._connected, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._connected:
                changes += [None] * self._ended
            else:
                changes += [BROKEN] * was_connected
            self._ended = self._ended or bool(changes)
        return changes

    def close(self, sock: Any, goodbye: Sequence[Any]) -> None:
        """Close the DEALER with a last message, which soon expires without a connection."""
        self.changes()
        sock.disable_monitor()
        self.socket.close()
        sock.linger = CLOSE_LINGER_MS if self._connected else CLOSE_LINGER_MS // 10
        with suppress(zmq.Again):
            sock.send_multipart(goodbye, zmq.NOBLOCK)
        sock.close()

    def broken(self) -> list[int]:
        """Return the file descriptors of the ROUTER's connections that have ended."""
        return [fd for event, fd in self._events() if event == zmq.EVENT_DISCONNECTED]

    def _events(self) -> Iterator[tuple[int, int]]:
        while self.socket.poll(0):
            event, _ = self.socket.recv_multipart()  # the second frame is the address
            yield _MONITOR_EVENT.unpack(event)


def receive(sock: Any) -> list[Any] | None:
    """Return the frames of the next message, without copying them; None if there is none."""
    if sock.get(_EVENTS) & _READABLE:  # cheaper than zmq.Again
        with suppress(zmq.Again):  # the sender may have disconnected since
            frames: list[Any] = sock.recv_multipart(_NOBLOCK, copy=False)
            return frames
    return None


def listen_on(sock: Any, address: str) -> str:
    """Bind a socket to a free port of an interface; return the endpoint."""
    sock.bind(f"tcp://{address}:*")
    return str(sock.last_endpoint.decode())


def connection(frame: Any) -> int:
    """Return the file descriptor of a frame's connection."""
    return int(frame.get(zmq.SRCFD))
