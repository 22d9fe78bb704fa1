"""A node's connections to the nodes that handle its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from distkit.kvstore.protocol.messages import Message
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.connection import LocalConnection, RemoteConnection, connect
from distkit.kvstore.transport.node import open_socket


class Link:
    """Connections to the nodes that handle requests.

    Args:
        keys: the run's CurveZMQ keys; see :func:`.node.open_socket`.
        route: returns the route to a node, given its endpoint; see :meth:`.Node.route`.
        wait: whether :meth:`send` waits until the data is sent. A node that also serves requests
            must not wait, or two nodes could wait for each other.
    """

    def __init__(
        self,
        keys: tuple[str, str] | None = None,
        route: Callable[[str], str] = str,
        *,
        wait: bool = True,
    ) -> None:
        self.context: Any = zmq.Context()
        #: Polls the connections, and the owner's other sockets.
        self.poller = zmq.Poller()
        self._keys, self._route, self._wait = keys, route, wait
        self._connections: dict[int, LocalConnection | RemoteConnection] = {}  # by node

    def connect(self, node: int, endpoint: str) -> None:
        """Connect to a node, which may start later."""
        route = self._route(endpoint)
        if route.startswith("tcp://"):
            sock = open_socket(self.context, zmq.DEALER, self._keys)
            sock.connect(route)
            self._connections[node] = RemoteConnection(sock, self.poller)
        else:
            local = connect(route.removeprefix("ipc://"))
            self._connections[node] = LocalConnection(local, self.poller, wait=self._wait)

    def disconnect(self, node: int) -> None:
        """Close the connection to a node that has exited."""
        if node in self._connections:
            self._connections.pop(node).close()

    def send(self, node: int | None, messages: Sequence[Message], server: int = 0) -> None:
        """Send messages for ``server`` to the node that serves its values, if connected."""
        if node in self._connections:
            self._connections[node].send(*encode(*messages, server=server))

    def receive(self, *, wait: bool) -> list[Message]:
        """Return the responses that have arrived; if ``wait``, wait for data first."""
        if wait:
            self.poller.poll()
        messages: list[Message] = []
        for connection in self._connections.values():
            while (received := connection.receive()) is not None:
                messages += decode(*received).messages
        return messages

    def close(self) -> None:
        """Close all connections immediately; unsent messages are lost."""
        for node in list(self._connections):
            self.disconnect(node)
        self.context.destroy()
