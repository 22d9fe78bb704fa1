"""Links to the nodes that answer: ZeroMQ, a DEALER for each; or a function call."""

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
from distkit.kvstore.transport.sockets import Ends, open_socket, receive

#: A batch without a message: its sender closes the connection, and has not crashed.
GOODBYE = encode()


@dataclass
class _Line:
    """A connection to a node that answers: its socket, and the memory that both lend."""

    socket: Any
    ends: Ends
    exchange: Exchange

    def receive(self) -> Iterator[Message]:
        """All messages that are here; those whose memory ended with their sender are lost.

        Raises:
            KVStoreError: the memory of a process that lives cannot be opened.
        """
        while (frames := receive(self.socket)) is not None:
            with suppress(MemoryGone):
                yield from decode([f.buffer for f in frames], self.exchange).messages


class ZmqLink:
    """Connections to nodes that answer.

    Args:
        keys: the cluster's, see :func:`.sockets.open_socket`.
        way: from here to a node, given its endpoint, see :meth:`.Node.way`.
    """

    def __init__(
        self, keys: tuple[str, str] | None = None, way: Callable[[str], str] = str
    ) -> None:
        self.context: Any = zmq.Context()
        #: Of what :meth:`wait` waits for.
        self.poller = zmq.Poller()
        self._keys, self._way = keys, way
        self._lines: dict[int, _Line] = {}
        self._changes: list[tuple[int, str | None]] = []

    def connect(self, node: int, endpoint: str, heartbeat_timeout: float = 0.0) -> None:
        """Connect to a node, which may come up later.

        Memory is lent to nodes of this host alone: not to one at the other end of TCP.
        """
        way = self._way(endpoint)
        sock = open_socket(self.context, zmq.DEALER, self._keys, heartbeat_timeout)
        pool = memory.shared() if way.startswith("ipc://") else None
        line = self._lines[node] = _Line(sock, Ends(sock), Exchange(pool))
        sock.connect(way)
        for end in (sock, line.ends.socket):
            self.poller.register(end, zmq.POLLIN)

    def disconnect(self, node: int) -> None:
        """Close the connection to a node, which has ended."""
        if (line := self._lines.pop(node, None)) is not None:
            for sock in (line.socket, line.ends.socket):
                self.poller.unregister(sock)
            line.ends.close(line.socket, GOODBYE)

    def send(self, node: int | None, messages: Sequence[Message], to: int = 0) -> None:
        """Send messages for server ``to`` to the node that serves its values, if it is there.

        Their tensors are not copied: they must not change any more.
        """
        if node in self._lines:
            frames = encode(*messages, exchange=self._lines[node].exchange, to=to)
            self._lines[node].socket.send_multipart(frames, copy=False)  # but for small ones

    def wait(self) -> Collection[Any]:
        """Wait until there is something at a connection, or elsewhere: the sockets where it is."""
        ready = dict(self.poller.poll())
        for node, line in self._lines.items():
            if line.ends.socket in ready:
                self._changes += [(node, how) for how in line.ends.changes()]
        return ready

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers that are here; if ``wait``, after one came or a connection changed."""
        if wait:
            self.wait()
        return [m for line in self._lines.values() for m in line.receive()]

    def changes(self) -> list[tuple[int, str | None]]:
        """The nodes whose connections ended, and how; or are there again: None. Each once."""
        found, self._changes = self._changes, []
        return found

    def close(self) -> None:
        """Close all connections at once; what was not sent is lost."""
        for line in self._lines.values():
            line.ends.close(line.socket, GOODBYE)
        self._lines.clear()
        self.context.term()


class LocalLink:
    """A server of one worker, at the other end of a function call."""

    def __init__(self) -> None:
        self._server = KVServer(Synchronous(), workers=[0], watch=updating)
        self._answers: list[Message] = []

    def send(self, node: int, requests: Sequence[Request], to: int) -> None:
        """Have them answered at once."""
        for request in requests:
            self._answers += self._server.handle(request)

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers to what was sent since."""
        answers, self._answers = self._answers, []
        return answers

    def changes(self) -> list[tuple[int, str | None]]:
        """There is no connection that could end."""
        return []

    def disconnect(self, node: int) -> None:
        """There is no connection."""

    def close(self) -> None:
        """There is nothing to close."""
