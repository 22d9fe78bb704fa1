"""ZeroMQ between the nodes of one host: a DEALER where one asks, a ROUTER where one answers.

Sockets are ``ipc://`` files in the cluster's own folder, which nobody but its user may enter.
All logic is in :mod:`.scheduler` and :mod:`.shard`; here are sockets and nothing else.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import zmq

from distkit.errors import KVStoreError
from distkit.kvstore.messages import Answer, Message, Register, Request, error
from distkit.kvstore.node import Node
from distkit.kvstore.recording import Answering, Asking, updating
from distkit.kvstore.scheduler import Scheduler
from distkit.kvstore.shard import Shard
from distkit.kvstore.wire import decode, encode


def _socket(context: Any, kind: int) -> Any:
    """A socket that never drops a message for want of room, and never lingers."""
    sock = context.socket(kind)
    sock.linger = sock.sndhwm = sock.rcvhwm = 0
    sock.reconnect_ivl, sock.reconnect_ivl_max = 10, 200  # ms
    return sock


def _frames(sock: Any) -> list[Any]:
    """The next message, where ZeroMQ put it."""
    return [frame.buffer for frame in sock.recv_multipart(copy=False)]


class ZmqLink:
    """The asking end: one connection for each node that is asked."""

    def __init__(self) -> None:
        self._context: Any = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[int, Any] = {}

    def connect(self, node: int, endpoint: str) -> None:
        """Connect to a node; it may come up later."""
        sock = self._sockets[node] = _socket(self._context, zmq.DEALER)
        sock.connect(endpoint)
        self._poller.register(sock, zmq.POLLIN)

    def send(self, to: int, request: Request) -> None:
        """Hand over a request. Its tensor is not copied: it must not change any more."""
        self._sockets[to].send_multipart(encode(request), copy=False)

    def receive(self, *, wait: bool) -> list[Message]:
        """The next answer of each node that has one; at least one if ``wait``."""
        ready = self._poller.poll(None if wait else 0)
        return [decode(_frames(sock)) for sock, _ in ready]

    def close(self) -> None:
        """Hang up at once."""
        self._context.destroy(linger=0)


class Service:
    """A server, or the scheduler, run by this process. It lives through many runs.

    Args:
        node: its place in the cluster, with the run to begin with.

    Raises:
        KVStoreError: the node is a worker, or cannot listen in its folder.
    """

    def __init__(self, node: Node) -> None:
        if node.role == "worker":
            raise KVStoreError(
                f"worker {node.index} has nothing to serve. Call kvstore.use(node) there instead."
            )
        self.node = node
        self.ignored = 0  # malformed messages
        self._stop, self._stopped = socket.socketpair()
        self._notes = Answering()
        self._routes: dict[int, bytes] = {}
        self._registering: Asking | None = None
        self._machine: Scheduler | Shard = (
            Shard(node, updating) if node.role == "server"
            else Scheduler(node.workers, node.servers, node.run)
        )  # fmt: skip

    def stop(self) -> None:
        """End :meth:`run`, from any thread or signal handler; twice does no harm."""
        with suppress(OSError):
            self._stop.send(b"x")

    def run(self) -> None:
        """Serve in this thread until :meth:`stop`.

        Raises:
            KVStoreError: it cannot listen in its folder, or the scheduler refuses it.
        """
        context = zmq.Context()
        try:
            self._open(context)
            self._serve_until_stopped()
        finally:
            context.destroy(linger=0)
            self._stop.close()
            self._stopped.close()

    def _open(self, context: Any) -> None:
        """Listen; a server then tells the scheduler where."""
        node = self.node
        self._router = _socket(context, zmq.ROUTER)
        self._scheduler = _socket(context, zmq.DEALER)
        endpoint = node.endpoint(node.id)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as e:
            raise KVStoreError(f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                               "Give a folder that exists and can be written.") from e  # fmt: skip
        self._poller = zmq.Poller()
        for end in (self._router, self._scheduler, self._stopped):
            self._poller.register(end, zmq.POLLIN)
        if isinstance(self._machine, Shard):
            self._scheduler.connect(node.endpoint(node.scheduler))
            self._deliver([self._machine.register()])

    def _serve_until_stopped(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self.node.path(self.node.id).unlink(missing_ok=True)  # ZeroMQ leaves it

    def _turn(self) -> bool:
        """Wait for messages and answer them; False when told to stop."""
        ready = dict(self._poller.poll())
        if self._router in ready:
            self._serve()
        if self._scheduler in ready:
            self._hear()
        return self._stopped.fileno() not in ready

    def _serve(self) -> None:
        """Answer one request; what cannot be read is ignored."""
        identity, *frames = _frames(self._router)
        try:
            request = decode(frames)
        except KVStoreError:
            self.ignored += 1
            return
        if not isinstance(request, Request) or not 0 <= request.node < self.node.scheduler:
            self.ignored += 1
            return
        self._routes[request.node] = bytes(identity)
        self._notes.arrived(request)
        self._deliver(self._answers(request))

    def _answers(self, request: Request) -> Iterable[Message]:
        try:
            return self._machine.handle(request)
        except Exception as e:  # out of memory, say: the asker hears of it, the others go on
            what = f"{self.node.role} {self.node.index} could not serve {type(request).__name__}"
            return [error(request, f"{what}: {type(e).__name__}: {e}")]

    def _hear(self) -> None:
        """The scheduler's word to a server."""
        answer = decode(_frames(self._scheduler))
        if isinstance(self._machine, Shard) and isinstance(answer, Answer):
            said = self._machine.hear(answer)
            if self._registering is not None and self._machine.store is not None:
                self._registering.answered(answer)
                self._registering = None
            self._deliver(said)

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Note each message, then send it: who has the answer finds it in the trace."""
        for message in messages:
            if isinstance(message, Register):
                self._registering = Asking(message, self.node.scheduler)
                self._scheduler.send_multipart(encode(message), copy=False)
            elif message.node in self._routes:
                self._notes.answering(message)
                route = self._routes[message.node]
                self._router.send_multipart([route, *encode(message)], copy=False)
