"""ZeroMQ between nodes: a DEALER where one asks, a ROUTER where one answers.

On one host large tensors go through memory that both ends see (:mod:`.memory`). All logic is in
:mod:`.scheduler` and :mod:`.session`; here are sockets and nothing else.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq

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
from distkit.kvstore.transport.link import Line
from distkit.kvstore.transport.memory import Exchange, MemoryGone, Pool
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.recording import Answering, Asking
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession
from distkit.kvstore.transport.sockets import (
    BROKEN,
    Ends,
    connection,
    from_afar,
    listen_on,
    open_socket,
    outlives_connection,
    receive,
    send,
)
from distkit.trace.calls import silence


@dataclass
class Peer:
    """A node that asks: the way back to it, what both lend, and its latest request."""

    identity: bytes
    exchange: Exchange
    node: int = -1  # unknown before its first request
    last: int = 0
    gone: bool = False  # a letter ended with its memory: order is all, so none after it counts

    @property
    def life(self) -> int:
        """The number of processes that were this node before."""
        return self.last // LIFE


class Peers:
    """The connections of a ROUTER that nodes ask by.

    ``ways`` has the latest of each node: answers go there.

    Args:
        ends: reports when connections end.
        pool: where tensors lie that are lent to them, unless they are on another host.
    """

    def __init__(self, ends: Ends, pool: Pool | None) -> None:
        self._ends, self._pool = ends, pool
        self._peers: dict[bytes, Peer] = {}  # by ZeroMQ's name of the connection
        self._descriptors: dict[int, bytes] = {}  # of connections
        self.ways: dict[int, Peer] = {}
        self.broken: list[bytes] = []  # connections that have ended

    def at(self, frame: Any) -> Peer:
        """The node at the other end of the connection whose name this frame is."""
        name = bytes(frame.buffer)
        if name not in self._peers:
            self.find_broken()
            self._descriptors[connection(frame)] = name
            pool = None if from_afar(frame) else self._pool
            self._peers[name] = Peer(name, Exchange(pool))
        return self._peers[name]

    def update(self, peer: Peer, latest: Request) -> None:
        """It is the node that asked this."""
        peer.node, peer.last = latest.node, latest.number
        way = self.ways.get(peer.node)
        if way is None or way.life <= peer.life:
            self.ways[peer.node] = peer

    def find_broken(self) -> None:
        """The connections that have ended: read before a new one may reuse a descriptor."""
        self.broken += [self._descriptors.pop(d, b"") for d in self._ends.broken()]

    def remove(self, name: bytes) -> Peer | None:
        """Nothing more comes by this connection: its node, unless that has another."""
        peer = self._peers.pop(name, None)
        if peer is None or self.ways.get(peer.node) is not peer:
            return None
        return self.ways.pop(peer.node)


#: How many batches are answered together at most: nobody waits long for the first.
_AT_ONCE = 8


class Service:
    """A server, or the scheduler, run by this process.

    Args:
        node: its place in the cluster.

    Raises:
        KVStoreError: the node is a worker, or cannot listen in its folder.
    """

    def __init__(self, node: Node) -> None:
        if node.role == "worker":
            raise KVStoreError(
                f"worker {node.index} has nothing to serve. Call kvstore.use(node) there instead."
            )
        self.node = node
        #: Called with "missed", a node that is taken for dead and its pid (0: the scheduler); by a
        #: scheduler with "listens" and where, and "begun" when all have registered.
        self.report: Callable[[str, Any], None] = lambda what, which: None
        #: Wakes the thread that serves for each of the notices of other threads: the end of a node.
        self._inside, self._outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices: deque[tuple[int, int, str]] = deque()
        #: Set from another thread: nothing is answered any more, as the run is ended.
        self.resting = False
        self._notes = Answering()
        self._lines: dict[str, Line] = {}  # to the scheduler and the backup, by endpoint
        self._session = ServerSession(node) if node.role == "server" else None
        self._machine = self._session or self._scheduler()
        self._path = node.path(node.id)

    def _scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.node.workers, self.node.servers)
        scheduler.lost = self._cause
        scheduler.on_begin = lambda: self.report("begun", None)
        return scheduler

    def leave(self, node: int, life: int, how: str) -> None:
        """Report to a scheduler that this life of a node has ended, from any thread.

        It notices by itself when a connection breaks; a worker may end before it has one.
        """
        self._notices.append((node, life, how))
        self._outside.send(b"!")

    def run(self) -> None:
        """Serve in this thread until the process ends.

        Raises:
            KVStoreError: it cannot listen in its folder, or the scheduler refuses it.
        """
        self._context = zmq.Context()
        torch.set_num_threads(1)  # the others of this host have work to do, too
        self._open(self._context)
        while True:
            self._turn()

    def _open(self, context: Any) -> None:
        """Listen; a server then registers."""
        node = self.node
        self._router = open_socket(context, zmq.ROUTER, node.keys, node.heartbeat_timeout)
        self._ends = Ends(self._router)
        self._peers = Peers(self._ends, memory.shared())
        endpoint = f"ipc://{self._path}"
        try:
            self._router.bind(endpoint)
        except (zmq.ZMQError, OSError) as e:
            raise KVStoreError(
                f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                "Give a folder that exists and can be written."
            ) from e
        self._poller = zmq.Poller()
        for end in (self._router, self._inside, self._ends.socket):
            self._poller.register(end, zmq.POLLIN)
        if node.address:
            endpoint = f"{listen_on(self._router, node.address)} {endpoint}"
        if self._session is None:
            self.report("listens", endpoint)
        else:
            register = self._session.register(endpoint)
            self._registering = Asking(register, node.scheduler)
            self._to_scheduler = self._line(node.endpoint(node.scheduler), node.heartbeat_timeout)
            self._poller.register(self._to_scheduler.ends.socket, zmq.POLLIN)
            self._to_scheduler.send([register])

    def _line(self, endpoint: str, heartbeat_timeout: float = 0.0) -> Line:
        """The connection to the scheduler, or to the server that is this one's backup."""
        if endpoint not in self._lines:
            way = self.node.way(endpoint)
            line = Line(self._context, way, self.node.keys, heartbeat_timeout)
            self._lines[endpoint] = line
            self._poller.register(line.socket, zmq.POLLIN)
        return self._lines[endpoint]

    def _turn(self) -> None:
        """Wait for messages and answer them."""
        ready = dict(self._poller.poll())
        if self._ends.socket in ready:
            self._peers.find_broken()
        if self._router in ready:
            self._serve_all()
        if self._peers.broken:
            self._remove_broken()
        if self._session is not None:
            self._receive_answers(self._session, ready)
        if self._inside.fileno() in ready:
            self._inside.recv(1)
            self._deliver(self._machine.leave(*self._notices.popleft()))

    def _receive_answers(self, session: ServerSession, ready: dict[Any, int]) -> None:
        """Handle what comes from the scheduler or the backup; report a scheduler that is lost."""
        for line in [line for line in self._lines.values() if line.socket in ready]:
            for answer in line.receive():
                assert isinstance(answer, Answer)
                if isinstance(answer, AddressBook):
                    self._registering.answered(answer)
                self._deliver(session.handle_answer(answer))
        if self._to_scheduler.ends.socket in ready and any(self._to_scheduler.ends.changes()):
            self.report("missed", (self.node.scheduler, 0))

    # -- those who ask ----------------------------------------------------------

    def _serve_all(self) -> bool:
        """Take a few batches of requests; their answers go out together.

        False when there are no more.
        """
        answers: list[Message] = []
        for _ in range(_AT_ONCE):
            frames = receive(self._router)
            if frames is None:
                break
            answers += self._serve(frames)
        self._deliver(answers)
        return frames is not None

    def _remove_broken(self) -> None:
        """Read what ended connections still hold; the nodes without a goodbye count as dead.

        The scheduler tells the others, servers too.
        """
        while self._serve_all():
            pass
        names, self._peers.broken = self._peers.broken, []
        for peer in filter(None, map(self._peers.remove, names)):
            self._deliver(self._machine.leave(peer.node, peer.life, BROKEN))

    def _serve(self, frames: list[Any]) -> list[Message]:
        """The answers to a batch of requests; what cannot be read is ignored."""
        machine, peer = self._machine, self._peers.at(frames[0])
        try:
            batch = decode([frame.buffer for frame in frames[1:]], peer.exchange)
            requests = self._checked(batch.messages)
        except KVStoreError as e:
            peer.gone |= isinstance(e, MemoryGone)
            return []
        if peer.gone:
            return []
        if not requests:  # a goodbye
            last = self._peers.remove(peer.identity)
            return [] if last is None else [*machine.finish(last.node, last.last)]
        self._peers.update(peer, requests[-1])
        answers: list[Message] = []
        for request in requests:
            self._notes.arrived(request)
            try:
                answers += machine.handle(request, batch.to)
            except Exception as e:  # out of memory, say: one request fails, the others do not
                if isinstance(request, Copy):
                    raise  # a backup that has not every message ends
                what = f"{self.node.role} {self.node.index} could not serve"
                text = f"{what} {type(request).__name__}: {type(e).__name__}: {e}"
                answers.append(error(request, text))
        return answers

    def _checked(self, messages: Sequence[Message]) -> list[Request]:
        """The requests of one node of this cluster.

        Raises:
            KVStoreError: they are none.
        """
        found = [m for m in messages if isinstance(m, Request)]
        nodes = {m.node for m in messages}
        known = range(self.node.scheduler)
        if len(found) < len(messages) or len(nodes) > 1 or not all(n in known for n in nodes):
            raise KVStoreError(f"requests of nodes {nodes}: there are none such here.")
        return found

    def _cause(self, node: int, pid: int, how: str) -> str:
        """How a node was lost, for a scheduler, which of another host cannot know whether it hangs.

        It is reported: if it hangs, somebody has to end it.
        """
        if how == BROKEN:
            self.report("missed", (node, pid))
            if not self.node.address and outlives_connection(pid):
                return silence(self.node.heartbeat_timeout)
        return how

    # -- what is sent -----------------------------------------------------------

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Record each message, then send it: whoever has the answer finds it in the trace."""
        if self.resting:
            return
        letters: dict[int, list[Message]] = {}
        copies: list[Message] = []
        for message in messages:
            if isinstance(message, Copy):
                copies.append(message)
            elif message.node in self._peers.ways:
                self._notes.answering(message)
                letters.setdefault(message.node, []).append(message)
        if copies and self._session is not None and self._session.backup.to is not None:
            self._line(self._session.endpoints[self._session.backup.to]).send(copies)
        for node, letter in letters.items():
            peer = self._peers.ways[node]
            frames = encode(*letter, exchange=peer.exchange)
            send(self._router, [peer.identity, *frames])
