"""The identity of a process in a cluster, and its ZeroMQ sockets.

On one host, sockets are files in the cluster's folder, which only the cluster's user can access.
Between hosts, they are ports on the network interface that reaches the other hosts, and a process
without the run's keys (CurveZMQ) cannot connect.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq


@dataclass(frozen=True)
class Node:
    """One process in a cluster of W workers, S servers and one scheduler.

    Args:
        role: "worker", "server" or "scheduler".
        index: the number within the role, from 0.
        workers: number of workers, W.
        servers: number of servers, S.
        folder: a folder that the nodes of one cluster share. Only the cluster's user can access
            it (0700), which protects the sockets in it.
        keys: the run's public and secret key (CurveZMQ), or None to rely on the permissions of the
            folder.
        incarnation: how many processes this node had before this one.
        address: the address of the network interface to the other hosts, or "" if there are none.
        scheduler_endpoint: the scheduler's endpoint, or "" for the default on this host.
        run: the name of the run, unique in the folder.

    >>> Node("server", 1, workers=4, servers=2, folder="f").id
    5
    """

    role: str
    index: int
    workers: int
    servers: int
    folder: str
    keys: tuple[str, str] | None = field(default=None, repr=False)
    incarnation: int = 0
    address: str = ""
    scheduler_endpoint: str = ""
    run: str = "run"

    @property
    def id(self) -> int:
        """The number in the cluster: workers first, then servers, then the scheduler."""
        return self.index + {"worker": 0, "server": self.workers}.get(self.role, self.scheduler)

    @property
    def scheduler(self) -> int:
        """The id of the scheduler."""
        return self.workers + self.servers

    def name(self, node: int) -> str:
        """Return the name of a node in this cluster.

        >>> Node("scheduler", 0, workers=4, servers=2, folder="f").name(5)
        'server 1'
        """
        if node == self.scheduler:
            return "the scheduler"
        return f"worker {node}" if node < self.workers else f"server {node - self.workers}"

    def endpoint(self, node: int) -> str:
        """Return the endpoint of a server on this host, or of the scheduler."""
        if self.scheduler_endpoint and node == self.scheduler:
            return self.scheduler_endpoint
        return f"ipc://{self.path(node)}"

    def path(self, node: int) -> str:
        """Return the path of a node's socket on this host."""
        return f"{self.folder}/{self.run}-kv{node}"

    def route(self, endpoint: str) -> str:
        """Return the route from this node to an endpoint: TCP unless both use the same folder.

        >>> node = Node("worker", 0, workers=4, servers=2, folder="/tmp/f")
        >>> node.route("tcp://10.0.0.2:4711 ipc:///tmp/f/kv4")
        'ipc:///tmp/f/kv4'
        >>> node.route("tcp://10.0.0.2:4711 ipc:///tmp/of-another-host/kv4")
        'tcp://10.0.0.2:4711'
        """
        remote, _, local = endpoint.partition(" ")
        if not remote.startswith("tcp://"):  # all nodes are on one host
            return endpoint
        return local if Path(local.removeprefix("ipc://")).parent == Path(self.folder) else remote


# -- sockets ---------------------------------------------------------------------------------------


def open_socket(context: Any, kind: int, keys: tuple[str, str] | None) -> Any:
    """Create a socket with unlimited queues, so that no message is dropped for lack of space.

    Args:
        context: the ZeroMQ context.
        kind: ``zmq.ROUTER`` to receive requests, ``zmq.DEALER`` to send them.
        keys: the public and secret key that all peers share, or None for no authentication.
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
    """Return a new public and secret key."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


#: Plain ints, because each use of pyzmq's enums costs a microsecond.
_EVENTS, _READABLE, _NOBLOCK = map(int, (zmq.EVENTS, zmq.POLLIN, zmq.NOBLOCK))


def receive(sock: Any) -> list[Any] | None:
    """Return the frames of the next message, without copying them, or None if there is none."""
    if sock.get(_EVENTS) & _READABLE:  # cheaper than zmq.Again
        with suppress(zmq.Again):  # the sender may have disconnected since
            frames: list[Any] = sock.recv_multipart(_NOBLOCK, copy=False)
            return frames
    return None


def listen_on(sock: Any, address: str) -> str:
    """Bind a socket to a free port on a network interface; return the endpoint."""
    sock.bind(f"tcp://{address}:*")
    return str(sock.last_endpoint.decode())
