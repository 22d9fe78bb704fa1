"""Links to server nodes, over a ZeroMQ DEALER each or by a function call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq

from distkit.consistency import Synchronous
from distkit.kvstore.protocol.messages import Message, Request
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.memory import Exchange, MemoryGone
from distkit.kvstore.transport.recording import updating
from distkit.kvstore.transport.sockets import ConnectionMonitor, open_socket, receive

#: A batch without messages: its sender closes the connection and has not crashed.
GOODBYE = encode()


@dataclass
class _Connection:
    """The socket of a connection to a server node, and the shared memory of both ends."""

    socket: Any
    ends: ConnectionMonitor
    exchange: Exchange

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived, except those whose shared memory is gone.

        Raises:
            KVStoreError: the memory of a live process cannot be opened.
        """
        while (frames := receive(self.socket)) is not None:
            with suppress(MemoryGone):
                yield from decode([f.buffer for f in frames], self.exchange).messages


class ZmqLink:
    """Connections to nodes that answer.

    Args:
        keys: the keys of the cluster, see :func:`.sockets.open_socket`.
        route: returns the route to a node, given its endpoint; see :meth:`.Node.way`.
    """

    def __init__(
        self, keys: tuple[str, str] | None = None, route: Callable[[str], str] = str
    ) -> None:
        self.context: Any = zmq.Context()
        #: Polls the sockets that :meth:`wait` waits for.
        self.poller = zmq.Poller()
        self._keys, self._route = keys, route
        self._connections: dict[int, _Connection] = {}
        self._changes: list[tuple[int, str | None]] = []

    def connect(self, node: int, endpoint: str, heartbeat_timeout: float = 0.0) -> None:
        """Connect to a node, which may start later.

        Memory is lent only to nodes of this host, never over TCP.
        """
        route = self._route(endpoint)
        sock = open_socket(self.context, zmq.DEALER, self._keys, heartbeat_timeout)
        pool = memory.shared() if route.startswith("ipc://") else None
        connection = self._connections[node] = _Connection(
            sock, ConnectionMonitor(sock), Exchange(pool)
        )
        sock.connect(route)
        for end in (sock, connection.ends.socket):
            self.poller.register(end, zmq.POLLIN)

    def disconnect(self, node: int) -> None:
        """Close the connection to a node that has ended."""
        if (connection := self._connections.pop(node, None)) is not None:
            for sock in (connection.socket, connection.ends.socket):
                self.poller.unregister(sock)
            connection.ends.close(connection.socket, GOODBYE)

    def send(self, node: int | None, messages: Sequence[Message], to: int = 0) -> None:
        """Send messages for server ``to`` to the node that serves its values, if connected.

        Tensors are not copied and must not change afterwards.
        """
        if node in self._connections:
            frames = encode(*messages, exchange=self._connections[node].exchange, to=to)
            self._connections[node].socket.send_multipart(
                frames, copy=False
            )  # pyzmq copies small ones

    def wait(self) -> Collection[Any]:
        """Wait until a registered socket is readable, and return the readable sockets."""
        ready = dict(self.poller.poll())
        for node, connection in self._connections.items():
            if connection.ends.socket in ready:
                self._changes += [(node, how) for how in connection.ends.changes()]
        return ready

    def receive(self, *, wait: bool) -> list[Message]:
        """Return the answers that have arrived; if ``wait``, wait for one or for a change."""
        if wait:
            self.wait()
        return [m for connection in self._connections.values() for m in connection.receive()]

    def changes(self) -> list[tuple[int, str | None]]:
        """Return new changes: a node, and how its connection ended (None: it was restored)."""
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Close all connections immediately; unsent messages are lost."""
        for connection in self._connections.values():
            connection.ends.close(connection.socket, GOODBYE)
        self._connections.clear()
        self.context.term()


class LocalLink:
    """A server of one worker in the same process, without transport."""

    def __init__(self) -> None:
        self._server = KVServer(Synchronous(), workers=[0], watch=updating)
        self._answers: list[Message] = []

    def send(self, node: int, requests: Sequence[Request], to: int) -> None:
        """Handle requests immediately."""
        for request in requests:
            self._answers += self._server.handle(request)

    def receive(self, *, wait: bool) -> list[Message]:
        """Return the answers to the requests sent since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def changes(self) -> list[tuple[int, str | None]]:
        """Return no changes, because there are no connections."""
        return []

    def disconnect(self, node: int) -> None:
        """Do nothing, because there are no connections."""

    def close(self) -> None:
        """Do nothing, because there are no connections."""
