"""A node's connections to the nodes that handle its requests: a ZeroMQ DEALER for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from distkit.kvstore.protocol.messages import Message
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.memory import Exchange, PeerMemoryLost
from distkit.kvstore.transport.node import open_socket, receive


class Link:
    """Connections to the nodes that handle requests.

    Args:
        keys: the cluster's CurveZMQ keys, see :func:`.node.open_socket`.
        route: returns the route to a node, given its endpoint; see :meth:`.Node.route`.
    """

    def __init__(
        self, keys: tuple[str, str] | None = None, route: Callable[[str], str] = str
    ) -> None:
        self.context: Any = zmq.Context()
        #: Polls the connections, and the owner's other sockets.
        self.poller = zmq.Poller()
        self._keys, self._route = keys, route
        #: The socket to each node, and the shared memory of both ends.
        self._connections: dict[int, tuple[Any, Exchange]] = {}

    def connect(self, node: int, endpoint: str) -> None:
        """Connect to a node, which may start later.

        Memory is lent only to nodes of this host, never over TCP.
        """
        route = self._route(endpoint)
        sock = open_socket(self.context, zmq.DEALER, self._keys)
        pool = memory.shared_pool() if route.startswith("ipc://") else None
        self._connections[node] = sock, Exchange(pool)
        sock.connect(route)
        self.poller.register(sock, zmq.POLLIN)

    def disconnect(self, node: int) -> None:
        """Close the connection to a node that has exited."""
        if node in self._connections:
            sock, _ = self._connections.pop(node)
            self.poller.unregister(sock)
            sock.close()

    def send(self, node: int | None, messages: Sequence[Message], server: int = 0) -> None:
        """Send messages for ``server`` to the node that serves its values, if connected.

        Tensors are not copied and must not change afterwards.
        """
        if node in self._connections:
            sock, exchange = self._connections[node]
            # pyzmq copies small frames anyway
            sock.send_multipart(encode(*messages, exchange=exchange, server=server), copy=False)

    def receive(self, *, wait: bool) -> list[Message]:
        """Return the responses that have arrived; if ``wait``, wait for at least one.

        Responses in shared memory that no longer exists are dropped, since their sender has exited.
        """
        if wait:
            self.poller.poll()
        messages: list[Message] = []
        for sock, exchange in self._connections.values():
            while (frames := receive(sock)) is not None:
                with suppress(PeerMemoryLost):
                    messages += decode([f.buffer for f in frames], exchange).messages
        return messages

    def close(self) -> None:
        """Close all connections immediately; unsent messages are lost."""
        self.context.destroy()
