"""Links from who asks to who answers: by ZeroMQ, a DEALER for each node; or by a function call."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import zmq
from msgspec.structs import replace

from distkit.consistency import Synchronous
from distkit.kvstore.protocol.messages import Message, Reply, Request
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.memory import Exchange, NotShown, Pool
from distkit.kvstore.transport.recording import updating
from distkit.kvstore.transport.sockets import BROKEN, LAST_BREATH, Ends, open_socket, receive, send

#: A batch without a message: its sender hangs up, and has not crashed.
BYE = encode()

#: The same of one that goes on by another connection.
MOVED = -1


class Line:
    """A connection to a node that is asked: its socket, what both lend, and its end.

    ``number`` tells a later connection to the same node from an earlier one: what is still under
    way by the earlier one may be read last. Memory of the ``pool`` is lent to nodes of this host
    alone: not to one at the other end of a TCP connection.
    """

    def __init__(
        self,
        context: Any,
        endpoint: str,
        keys: tuple[str, str] | None,
        number: int = 0,
        pool: Callable[[], Pool | None] = memory.shared,
    ) -> None:
        self.number = number
        self.socket = open_socket(context, zmq.DEALER, keys)
        self.ends, self.endpoint = Ends(self.socket), endpoint
        near = endpoint.startswith("ipc://")
        self.exchange = Exchange(pool() if near else None, writable=False)
        self.socket.connect(endpoint)

    def close(self, *, moved: bool = False) -> None:
        """Hang up, with a last word; ``moved``: another connection takes its place."""
        self.ends.hang_up(self.socket, encode(line=MOVED) if moved else BYE)

    def send(self, messages: Iterable[Message]) -> None:
        """Send a letter."""
        exchange = self.exchange
        frames = encode(*messages, back=exchange.given_up(), lend=exchange.lend, line=self.number)
        send(self.socket, frames)

    def receive(self) -> Iterator[Message]:
        """All messages that are here.

        Raises:
            NotShown: the other has lent memory that cannot be opened (any more).
        """
        while (frames := receive(self.socket)) is not None:
            batch = decode([f.buffer for f in frames], self.exchange.borrow)
            self.exchange.take_back(batch.back)
            yield from batch.messages


class ZmqLink:
    """The asking end: one connection for each node that is asked.

    Args:
        keys: the cluster's, see :func:`.sockets.open_socket`.
        way: from here to a node, given its endpoint, see :meth:`.Node.way`.
    """

    def __init__(
        self, keys: tuple[str, str] | None = None, way: Callable[[str], str] = str
    ) -> None:
        self._context: Any = zmq.Context()
        self._keys, self._way = keys, way
        self._poller = zmq.Poller()
        self._lines: dict[int, Line] = {}
        self._by_end: dict[Any, tuple[int, Line]] = {}
        self._lost: dict[int, str] = {}
        self._again: set[int] = set()
        self._broken: set[int] = set()  # nodes whose connections were, since they were replaced
        self._patience: dict[int, float] = {}
        self._until: dict[int, float] = {}  # when those that may come back are given up
        self._abandoned: list[Exchange] = []

    def connect(self, node: int, endpoint: str, *, patience: float = 0.0) -> None:
        """Connect to a node; it may come up later.

        Args:
            node: its id.
            endpoint: where it listens.
            patience: when its connection breaks it counts as lost only after this long [s].
        """
        self._patience[node] = patience
        before = self._lines.get(node)
        number = 0 if before is None else before.number + 1
        line = self._lines[node] = Line(self._context, self._way(endpoint), self._keys, number)
        for end in (line.socket, line.ends.socket):
            self._poller.register(end, zmq.POLLIN)
            self._by_end[end] = node, line

    def renew(self, node: int, endpoint: str) -> None:
        """Another process is in this node's place: connect to it, unless that was done.

        The one before may only be stopped: what it was lent stays as it is, for good. Who was
        never connected to it has nothing to renew. Where ``endpoint`` is that of the one before,
        a connection that broke has led to the new one since.
        """
        line = self._lines.get(node)
        broken = node in self._broken
        self._broken.discard(node)
        if line is None or (broken and self._way(endpoint) == line.endpoint):
            return
        for end in (line.socket, line.ends.socket):
            self._poller.unregister(end)
            del self._by_end[end]
        line.close(moved=True)
        self._abandoned.append(line.exchange)
        self._lost.pop(node, None)
        self._until.pop(node, None)
        self.connect(node, endpoint, patience=self._patience[node])
        self._again.add(node)

    def send(self, to: int, requests: Sequence[Request]) -> None:
        """Hand over requests. Their tensors are not copied: they must not change any more."""
        self._lines[to].send(requests)

    def receive(self, *, wait: bool) -> list[Message]:
        """The answers that are here; if ``wait``, after one came or a node was lost."""
        found: list[Message] = []
        if not wait:
            for node, line in self._lines.items():
                found += self._read(node, line)
            return found
        left = min(self._until.values(), default=None)
        most = None if left is None else max(0, int(1000 * (left - time.monotonic())) + 1)  # ms
        for end, _ in self._poller.poll(most):
            node, line = self._by_end[end]
            if end is not line.socket:
                self._listen(node, line)
            found += self._read(node, line)  # also its last answers, before it was lost
        return found

    def _read(self, node: int, line: Line) -> Iterator[Message]:
        """What came by this line; an answer whose tensors ended with the node is asked again."""
        try:
            yield from line.receive()
        except NotShown:
            while node not in self._broken and line.ends.socket.poll(LAST_BREATH):
                self._listen(node, line)
            if node not in self._broken:
                raise

    def lost(self) -> dict[int, str]:
        """The nodes whose connections are broken, and how that came about."""
        for node in list(self._lost):  # it may be there again
            self._listen(node, self._lines[node])
        if self._until:
            now = time.monotonic()
            self._until = {n: until for n, until in self._until.items() if until > now}
            return {n: how for n, how in self._lost.items() if n not in self._until}
        return self._lost

    def again(self) -> set[int]:
        """The nodes that were lost since and are there again, told once: repeat what was asked."""
        nodes, self._again = self._again - self._lost.keys(), self._again & self._lost.keys()
        return nodes

    def _listen(self, node: int, line: Line) -> None:
        for how in line.ends.heard():
            if how is not None:
                self._lost[node] = how
                self._broken.add(node)
                if how == BROKEN and self._patience[node]:
                    self._until[node] = time.monotonic() + self._patience[node]
            elif self._lost.pop(node, None):
                self._until.pop(node, None)
                self._again.add(node)
                line.exchange.renew()

    def close(self) -> None:
        """Hang up at once."""
        for line in self._lines.values():
            self._poller.unregister(line.ends.socket)
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

    def renew(self, node: int, endpoint: str) -> None:
        """Nobody takes its place."""

    def lost(self) -> dict[int, str]:
        """Nobody: it is here."""
        return {}

    def again(self) -> set[int]:
        """Nobody was away."""
        return set()

    def close(self) -> None:
        """Forget everything."""
        self._answers.clear()


def _copy(answer: Message) -> Message:
    """A pulled value belongs to the worker: the server keeps its own."""
    if isinstance(answer, Reply) and answer.value is not None:
        return replace(answer, value=answer.value.clone())
    return answer
