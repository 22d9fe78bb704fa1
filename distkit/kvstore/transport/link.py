"""Links to the nodes that answer: ZeroMQ, a DEALER for each; or a function call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import zmq
from msgspec.structs import replace

from distkit.consistency import Synchronous
from distkit.kvstore.protocol.messages import Message, Reply, Request
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.memory import Exchange, HiddenMemory
from distkit.kvstore.transport.recording import updating
from distkit.kvstore.transport.sockets import REFUSED, Ends, open_socket, receive, send

#: A batch without a message: its sender closes the connection, and has not crashed.
GOODBYE = encode()


class Link(Protocol):
    """Carries requests to nodes and answers back."""

    def send(self, to: int, requests: Sequence[Request]) -> None:
        """Hand requests to node ``to``, without waiting."""

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers that are here; if ``wait``, after one came or a connection changed."""

    def redirect(self, node: int, by: int) -> None:
        """Node ``by`` answers in the place of ``node``, which has ended."""

    def lost(self) -> dict[int, str]:
        """The nodes that cannot be reached any more, and why."""

    def again(self) -> set[int]:
        """The nodes whose connections broke and are there again, each returned once."""

    def close(self) -> None:
        """Close all connections at once; what was not sent is lost."""


class Line:
    """A connection to a node that answers: its socket, and the memory that both lend.

    Memory is lent to nodes of this host alone: not to one at the other end of a TCP connection.
    """

    def __init__(
        self,
        context: Any,
        endpoint: str,
        keys: tuple[str, str] | None,
        heartbeat_timeout: float = 0.0,
    ) -> None:
        self.socket = open_socket(context, zmq.DEALER, keys, heartbeat_timeout)
        self.ends, self.endpoint, self.broken = Ends(self.socket), endpoint, ""
        pool = memory.shared() if endpoint.startswith("ipc://") else None
        self.exchange = Exchange(pool, writable=False)
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Close it, with a goodbye."""
        self.ends.close(self.socket, GOODBYE)

    def send(self, messages: Iterable[Message], to: int = 0) -> None:
        """Send a batch for node ``to``."""
        exchange = self.exchange
        frames = encode(*messages, back=exchange.given_up(), lend=exchange.lend, to=to)
        send(self.socket, frames)

    def receive(self) -> Iterator[Message]:
        """All messages that are here; those whose memory ended with their sender are lost.

        Raises:
            HiddenMemory: the memory of a process that lives cannot be opened.
        """
        while (frames := receive(self.socket)) is not None:
            try:
                batch = decode([f.buffer for f in frames], self.exchange.borrow)
            except HiddenMemory as e:
                if e.sender_lives:
                    raise
                continue
            self.exchange.take_back(batch.back)
            yield from batch.messages

    def check(self) -> bool:
        """Take note of what became of the connection; True if it is there again."""
        again = False
        for how in self.ends.changes():
            again = again or (how is None and bool(self.broken))
            self.broken = how or ""
        if again:
            self.exchange.renew()
        return again


class ZmqLink:
    """Connections to the scheduler and the servers.

    Args:
        keys: the cluster's, see :func:`.sockets.open_socket`.
        way: from here to a node, given its endpoint, see :meth:`.Node.way`.
        scheduler: the node without which nothing goes on: it alone is lost when its connection
            breaks. What becomes of a server is the scheduler's to say.
    """

    def __init__(
        self,
        keys: tuple[str, str] | None = None,
        way: Callable[[str], str] = str,
        scheduler: int = -1,
    ) -> None:
        self._context: Any = zmq.Context()
        self._keys, self._way, self._scheduler = keys, way, scheduler
        self._poller = zmq.Poller()
        self._lines: dict[int, Line] = {}
        self._by_socket: dict[Any, tuple[int, Line]] = {}
        self._lost: dict[int, str] = {}
        self._again: set[int] = set()

    def connect(self, node: int, endpoint: str) -> None:
        """Connect to a node, which may come up later."""
        line = self._lines[node] = Line(self._context, self._way(endpoint), self._keys)
        for sock in (line.socket, line.ends.socket):
            self._poller.register(sock, zmq.POLLIN)
            self._by_socket[sock] = node, line

    def redirect(self, node: int, by: int) -> None:
        """Node ``by`` answers in the place of ``node``, which has ended."""
        if (line := self._lines.pop(node, None)) is not None:
            for sock in (line.socket, line.ends.socket):
                self._poller.unregister(sock)
                del self._by_socket[sock]
            line.close()
        self._lines[node] = self._lines[by]

    def send(self, to: int, requests: Sequence[Request]) -> None:
        """Hand over requests. Their tensors are not copied: they must not change any more."""
        self._lines[to].send(requests, to)

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers that are here; if ``wait``, after one came or a connection changed."""
        if not wait:
            return [m for line in {*self._lines.values()} for m in line.receive()]
        found: list[Message] = []
        for sock, _ in self._poller.poll():
            node, line = self._by_socket[sock]
            if sock is not line.socket:
                self._check(node, line)
            found += line.receive()  # also its last answers, before it was lost
        return found

    def _check(self, node: int, line: Line) -> None:
        if line.check():
            self._again |= {n for n, other in self._lines.items() if other is line}
        self._lost.pop(node, None)
        if line.broken and (node == self._scheduler or line.broken == REFUSED):
            self._lost[node] = line.broken

    def lost(self) -> dict[int, str]:
        """The nodes that cannot be reached any more, and why."""
        return self._lost

    def again(self) -> set[int]:
        """The nodes whose connections broke and are there again, each returned once."""
        nodes, self._again = self._again, set()
        return nodes

    def close(self) -> None:
        """Close all connections at once."""
        for line in {*self._lines.values()}:
            line.close()
        self._lines.clear()
        self._context.term()
        if (pool := memory.shared()) is not None:
            pool.trim()


class LocalLink:
    """A server of one worker, at the other end of a function call."""

    def __init__(self) -> None:
        self._server = KVServer(Synchronous(), workers=[0], watch=updating)
        self._answers = deque[Message]()

    def send(self, to: int, requests: Sequence[Request]) -> None:
        """Have them answered at once."""
        for request in requests:
            self._answers += map(_copy, self._server.handle(request))

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers to what was sent since."""
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def redirect(self, node: int, by: int) -> None:
        """There is no other server."""

    def lost(self) -> dict[int, str]:
        """None: it is here."""
        return {}

    def again(self) -> set[int]:
        """None: it was never away."""
        return set()

    def close(self) -> None:
        """Forget the answers."""
        self._answers.clear()


def _copy(answer: Message) -> Message:
    """A pulled value belongs to the worker: the server keeps its own."""
    if isinstance(answer, Reply) and answer.value is not None:
        return replace(answer, value=answer.value.clone())
    return answer
