"""ZeroMQ sockets that keep strangers out, lose nothing, and tell when the other end is gone.

On one host sockets are ``ipc://`` files in the cluster's own folder, which nobody but its user may
enter; between hosts they are ports of the one interface that leads to the others. Where the
cluster has keys (CurveZMQ), who does not know them cannot even shake hands.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import zmq

from distkit.errors import KVStoreError

#: So long a last word may take to leave [ms]: where it is lost, a live process counts as dead.
LAST_WORD = 2000

#: Whose connections have broken since it ends is gone within this time [ms].
LAST_BREATH = 200


def context() -> zmq.Context[Any]:
    """This process's, which is never collected: it would wait for sockets collected with it."""
    return _context_of(os.getpid())


@cache
def _context_of(pid: int) -> zmq.Context[Any]:
    return zmq.Context()


def open_socket(
    context: Any, kind: int, keys: tuple[str, str] | None, heartbeat_timeout: float = 0.0
) -> Any:
    """A socket that never drops a message for want of room.

    Args:
        context: ZeroMQ's.
        kind: ``zmq.ROUTER`` to answer, ``zmq.DEALER`` to ask.
        keys: the cluster's public and secret key; None to leave it to the folder's permissions.
        heartbeat_timeout: connections over which nothing came for so long are broken [s]; 0: none.
            ZeroMQ's own threads ask and answer (ZMTP's PING and PONG).
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
    """A public and a secret key for a cluster."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def listens(path: Path) -> bool:
    """True if a process listens at this socket; what one that has ended left does not count."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def lives(pid: int) -> bool:
    """True if there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def goes_on(pid: int) -> bool:
    """True if a process whose connections have broken hangs: one that ends is soon gone.

    Only Linux tells; elsewhere it counts as one that has ended.
    """
    if sys.platform != "linux":
        return False
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        gone = select.poll()
        gone.register(process, select.POLLIN)
        return not gone.poll(LAST_BREATH)
    finally:
        os.close(process)


#: How a connection that was good ended, and one that never was.
BROKEN = "its connection was lost"
REFUSED = "it does not talk to this process: they have not the keys of one cluster"


#: As plain numbers: each use of ZeroMQ's own, which are enums, costs a microsecond.
_EVENTS, _READABLE, _NOBLOCK, _MORE = map(int, (zmq.EVENTS, zmq.POLLIN, zmq.NOBLOCK, zmq.SNDMORE))


#: What a monitor's first frame holds: an event and its value. zmq.utils.monitor imports asyncio.
_MONITORED = struct.Struct("=Hi")


class Ends:
    """Hears when connections of a socket begin and end: at once when the other process ends.

    Args:
        sock: the socket that is watched; :attr:`socket` is to be polled.
    """

    def __init__(self, sock: Any) -> None:
        self._refusals = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        known = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        for refusal in self._refusals:
            known |= refusal
        self.socket = sock.get_monitor_socket(known)
        self.socket.linger = 0
        self._good, self._refused = False, 0

    def heard(self) -> list[str | None]:
        """The state of a DEALER's one connection: how it ended, None when it is good."""
        found: list[str | None] = []
        for event, _ in self._events():
            if event in self._refusals:
                self._good = False
                self._refused += 1
                if event != self._refusals[0] or self._refused > 1:
                    found.append(REFUSED)  # else perhaps it has just ended
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._good, self._refused = True, 0
                found.append(None)
            elif self._good:
                self._good = False
                found.append(BROKEN)
        return found

    def hang_up(self, sock: Any, word: Sequence[Any]) -> None:
        """Close the DEALER with a last word, which is not long in leaving if nobody is there."""
        self.heard()
        sock.disable_monitor()
        self.socket.close()
        sock.linger = LAST_WORD if self._good else LAST_WORD // 10
        with suppress(zmq.Again):
            sock.send_multipart(word, zmq.NOBLOCK)
        sock.close()

    def broken(self) -> list[int]:
        """The file descriptors of those connections of a ROUTER that have ended."""
        return [fd for event, fd in self._events() if event == zmq.EVENT_DISCONNECTED]

    def _events(self) -> Iterator[tuple[int, int]]:
        while self.socket.poll(0):
            said, _ = self.socket.recv_multipart()  # the second frame is the address
            yield _MONITORED.unpack(said)


def receive(sock: Any) -> list[Any] | None:
    """The frames of the next message, where ZeroMQ put them; None if there is none."""
    if not sock.get(_EVENTS) & _READABLE:  # cheaper than zmq.Again
        return None
    try:
        frames = [sock.recv(_NOBLOCK, copy=False)]
    except zmq.Again:  # its sender has gone meanwhile
        return None
    while frames[-1].more:
        frames.append(sock.recv(_NOBLOCK, copy=False))
    return frames


def send(sock: Any, frames: Sequence[Any]) -> None:
    """Send a message: small frames are copied, which is faster, large ones are not."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        more = _MORE if i < last else 0
        sock.send(frame, more, copy=len(frame) < zmq.COPY_THRESHOLD)


def listen_on(sock: Any, address: str, endpoint: str = "", ports: range = range(0)) -> str:
    """Have a socket listen to other hosts, too: at a port of this interface, or where it is told.

    Raises:
        KVStoreError: other processes listen there.
    """
    for where in [endpoint] if endpoint else [f"tcp://{address}:{port}" for port in ports or "*"]:
        with suppress(zmq.ZMQError):
            sock.bind(where)
            return str(sock.last_endpoint.decode())
    among = f", ports {ports.start} to {ports.stop - 1}" if ports else ""
    raise KVStoreError(
        f"other processes, perhaps of another cluster, listen at {endpoint or address}{among}. End "
        "them, or name other ports: dk.Cluster(…, ports='45001-45009')."
    )


def from_afar(frame: Any) -> bool:
    """True if a frame came by TCP: its sender has no memory in common with this process."""
    try:
        ipaddress.ip_address(frame.get("Peer-Address"))
    except (ValueError, zmq.ZMQError):  # a Unix socket, which tells a process or nothing
        return False
    return True


def connection(frame: Any) -> int:
    """The file descriptor of the connection that a frame came by."""
    return int(frame.get(zmq.SRCFD))
