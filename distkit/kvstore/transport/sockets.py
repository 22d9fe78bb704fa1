"""ZeroMQ sockets that only the cluster can use, and that never drop a message.

On one host sockets are ``ipc://`` files in the cluster's folder, which only its user can access.
Between hosts they are ports on the one interface that reaches the others. If the cluster has keys
(CurveZMQ), a process without them cannot connect.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import zmq


def open_socket(context: Any, kind: int, keys: tuple[str, str] | None) -> Any:
    """Create a socket that never drops a message because its queue is full.

    Args:
        context: ZeroMQ's context.
        kind: ``zmq.ROUTER`` to receive requests, ``zmq.DEALER`` to send them.
        keys: the cluster's public and secret key; None to rely on the folder's permissions.
    """
    sock = context.socket(kind)
    sock.linger = sock.sndhwm = sock.rcvhwm = 0
    sock.reconnect_ivl, sock.reconnect_ivl_max = 10, 200  # ms
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


#: Plain ints, because each use of pyzmq's enums costs a microsecond.
_EVENTS, _READABLE, _NOBLOCK = map(int, (zmq.EVENTS, zmq.POLLIN, zmq.NOBLOCK))


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
