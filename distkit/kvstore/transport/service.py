"""Serves a node's requests over ZeroMQ: a ROUTER answers the DEALERs of other nodes.

On one host large tensors are in shared memory (:mod:`.memory`). This module handles the sockets;
the logic is in :mod:`.scheduler` and :mod:`.session`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from msgspec import msgpack

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    LIFE,
    AddressBook,
    Answer,
    Copy,
    Message,
    Request,
    error,
)
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.link import ZmqLink
from distkit.kvstore.transport.memory import Exchange, MemoryGone
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.recording import Answering, Asking
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession
from distkit.kvstore.transport.sockets import (
    BROKEN,
    ConnectionMonitor,
    connection,
    listen_on,
    open_socket,
    outlives_connection,
    receive,
)
from distkit.trace.calls import silence


@dataclass
class Peer:
    """The connection, shared memory and latest request of a node that sends requests."""

    identity: bytes
    exchange: Exchange
    node: int = -1  # unknown before its first request
    last: int = 0
    gone: bool = False  # a batch was lost with its memory, so later ones are ignored

    @property
    def life(self) -> int:
        """The number of processes that were this node before."""
        return self.last // LIFE


#: Maximum number of batches answered together, which limits the wait of the first.
_MAX_BATCHES = 8


#: Maximum size of a notice [bytes].
_NOTICE = 1 << 16


class Service:
    """The server or the scheduler that this process runs.

    Args:
        node: its identity in the cluster.

    Raises:
        KVStoreError: The node is a worker, or cannot listen in its folder.
    """

    def __init__(self, node: Node) -> None:
        if node.role == "worker":
            raise KVStoreError(
                f"worker {node.index} has nothing to serve. Call kvstore.use(node) there instead."
            )
        self.node = node
        #: Called with "missed" for a node that counts as dead, with its pid (0 for the scheduler).
        #: A scheduler also reports "listens" with its endpoint, and "begun" when the run starts.
        self.report: Callable[[str, Any], None] = lambda what, which: None
        #: Passes notices from other threads, such as the end of a node, to the serving thread.
        self._inside, self._outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        #: Set by another thread at the end of the run: no more answers are sent.
        self.resting = False
        self._notes = Answering()
        self._link = ZmqLink(node.keys, node.way)  # to the scheduler and the backup
        self._peers: dict[bytes, Peer] = {}  # by ZeroMQ's identity of the connection
        self._names: dict[int, bytes] = {}  # connections by descriptor
        self._routes: dict[int, Peer] = {}  # latest connection of each node, for answers
        self._broken: list[bytes] = []  # connections that have ended
        self._machine: ServerSession | Scheduler = (
            ServerSession(node)
            if node.role == "server"
            else Scheduler(
                node.workers, node.servers, self._cause, lambda: self.report("begun", None)
            )
        )

    def leave(self, node: int, life: int, how: str) -> None:
        """Report to a scheduler, from any thread, that this process of a node has ended.

        The scheduler detects broken connections itself, but a worker may end before it has one.
        """
        self._outside.send(msgpack.encode((node, life, how)))

    def run(self) -> None:
        """Serve in this thread until the process ends.

        Raises:
            KVStoreError: The node cannot listen in its folder, or the scheduler rejects it.
        """
        torch.set_num_threads(1)  # other processes of this host need the processors
        self._pool = memory.shared()
        self._open()
        while True:
            self._turn()

    def _open(self) -> None:
        """Listen, and register a server."""
        node = self.node
        endpoint = f"ipc://{node.path(node.id)}"
        self._router = open_socket(
            self._link.context, zmq.ROUTER, node.keys, node.heartbeat_timeout
        )
        self._ends = ConnectionMonitor(self._router)
        try:
            self._router.bind(endpoint)
        except (zmq.ZMQError, OSError) as e:
            raise KVStoreError(
                f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                "Use an existing, writable folder."
            ) from e
        self._link.poller.register(self._inside, zmq.POLLIN)
        if node.address:
            endpoint = f"{listen_on(self._router, node.address)} {endpoint}"
        if isinstance(self._machine, Scheduler):
            self._begin()
            self.report("listens", endpoint)
            return
        register = self._machine.register(endpoint)
        self._registering = Asking(register, node.scheduler)
        scheduler = node.endpoint(node.scheduler)
        self._link.connect(node.scheduler, scheduler, node.heartbeat_timeout)
        self._link.send(node.scheduler, [register])

    def _begin(self) -> None:
        """Start reading requests, which workers may have sent before this server was ready."""
        for end in (self._router, self._ends.socket):
            self._link.poller.register(end, zmq.POLLIN)

    def _turn(self) -> None:
        """Wait for messages and answer them."""
        ready = self._link.wait()
        if self._ends.socket in ready:
            self._find_broken()
        if self._router in ready:
            self._serve_all()
        if self._broken:
            self._remove_broken()
        for answer in self._link.receive(wait=False):
            assert isinstance(answer, Answer)
            self._deliver(self._handle_answer(answer))
        if (self.node.scheduler, BROKEN) in self._link.changes():
            self.report("missed", (self.node.scheduler, 0))
        if self._inside.fileno() in ready:
            self._deliver(self._machine.leave(*msgpack.decode(self._inside.recv(_NOTICE))))

    def _handle_answer(self, answer: Answer) -> list[Message]:
        """Handle an answer from the scheduler or the backup; return messages to send."""
        assert isinstance(self._machine, ServerSession)
        messages = self._machine.handle_answer(answer)
        if isinstance(answer, AddressBook):
            self._registering.answered(answer)
            self._begin()
            if (backup := self._machine.backup.to) is not None:
                self._link.connect(backup, answer.endpoints[backup])
        return messages

    # -- nodes that send requests -----------------------------------------------

    def _serve_all(self) -> bool:
        """Handle a few batches of requests, and send their answers together.

        Return False if no batches are left.
        """
        answers: list[Message] = []
        for _ in range(_MAX_BATCHES):
            frames = receive(self._router)
            if frames is None:
                break
            answers += self._serve(frames)
        self._deliver(answers)
        return frames is not None

    def _find_broken(self) -> None:
        """Find ended connections before a new one reuses a descriptor."""
        self._broken += [self._names.pop(d, b"") for d in self._ends.broken()]

    def _remove_broken(self) -> None:
        """Read the last messages of ended connections; a node that sent no goodbye counts as dead.

        The scheduler notifies the other nodes.
        """
        while self._serve_all():
            pass
        names, self._broken = self._broken, []
        for peer in filter(None, map(self._remove, names)):
            self._deliver(self._machine.leave(peer.node, peer.life, BROKEN))

    def _remove(self, name: bytes) -> Peer | None:
        """Remove an ended connection; return its node, unless that has another connection."""
        peer = self._peers.pop(name, None)
        if peer is None or self._routes.get(peer.node) is not peer:
            return None
        return self._routes.pop(peer.node)

    def _peer(self, frame: Any) -> Peer:
        """Return the peer whose identity is in this frame."""
        name = bytes(frame.buffer)
        if name not in self._peers:
            self._find_broken()
            self._names[connection(frame)] = name
            # with several hosts, lend only to peers that have lent to this process
            self._peers[name] = Peer(name, Exchange(None if self.node.address else self._pool))
        return self._peers[name]

    def _serve(self, frames: list[Any]) -> list[Message]:
        """Return the answers to a batch of requests; unreadable batches are ignored."""
        machine, peer = self._machine, self._peer(frames[0])
        try:
            batch = decode([frame.buffer for frame in frames[1:]], peer.exchange)
            requests = self._checked(batch.messages)
        except KVStoreError as e:
            peer.gone |= isinstance(e, MemoryGone)
            return []
        if peer.gone:
            return []
        if not requests:  # a goodbye
            last = self._remove(peer.identity)
            return [] if last is None else [*machine.finish(last.node, last.last)]
        peer.node, peer.last = requests[-1].node, requests[-1].number
        current = self._routes.get(peer.node, peer)
        self._routes[peer.node] = peer if peer.life >= current.life else current
        answers: list[Message] = []
        for request in requests:
            self._notes.arrived(request)
            try:
                answers += machine.handle(request, batch.to)
            except Exception as e:  # e.g. out of memory: only this request fails
                if isinstance(request, Copy):
                    raise  # a backup that misses a message must end
                server = f"{self.node.role} {self.node.index}"
                text = f"{server} could not serve {type(request).__name__}: {type(e).__name__}: {e}"
                answers.append(error(request, text))
        return answers

    def _checked(self, messages: Sequence[Message]) -> list[Request]:
        """Return messages as the requests of one node of this cluster.

        Raises:
            KVStoreError: A message is not a request, or its sender is not in this cluster.
        """
        requests = [m for m in messages if isinstance(m, Request)]
        nodes = {m.node for m in messages}
        node_ids = range(self.node.scheduler)
        if len(requests) < len(messages) or len(nodes) > 1 or not all(n in node_ids for n in nodes):
            raise KVStoreError(f"requests of nodes {nodes}, which are not in this cluster.")
        return requests

    def _cause(self, node: int, pid: int, how: str) -> str:
        """Return how a node was lost, and report it so that the cluster can end a hung node.

        The scheduler can detect a hung node only on its own host.
        """
        if how == BROKEN:
            self.report("missed", (node, pid))
            if not self.node.address and outlives_connection(pid):
                return silence(self.node.heartbeat_timeout)
        return how

    # -- sending ----------------------------------------------------------------

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Record each message, then send it, so that the trace has every received answer."""
        if self.resting:
            return
        batches: dict[int, list[Message]] = {}
        copies: list[Message] = []
        for message in messages:
            if isinstance(message, Copy):
                copies.append(message)
            elif message.node in self._routes:
                self._notes.answering(message)
                batches.setdefault(message.node, []).append(message)
        if copies and isinstance(self._machine, ServerSession):
            self._link.send(self._machine.backup.to, copies)
        for node, batch in batches.items():
            peer = self._routes[node]
            frames = encode(*batch, exchange=peer.exchange)
            self._router.send_multipart([peer.identity, *frames], copy=False)
