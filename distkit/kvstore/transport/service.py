"""ZeroMQ between nodes: a DEALER where one asks, a ROUTER where one answers.

On one host large tensors go through memory that both ends see (:mod:`.memory`). All logic is in
:mod:`.scheduler` and :mod:`.session`; here are sockets and nothing else.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    LIFE,
    Answer,
    Leave,
    Message,
    Register,
    Request,
    error,
)
from distkit.kvstore.protocol.replication import Copy
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.link import Line
from distkit.kvstore.transport.memory import Exchange, HiddenMemory, Pool
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.recording import Answering, Asking, updating
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession
from distkit.kvstore.transport.sockets import (
    BROKEN,
    Ends,
    connection,
    from_afar,
    listen_on,
    listens,
    open_socket,
    outlives_connection,
    receive,
    send,
)
from distkit.trace.calls import silence


@dataclass
class Peer:
    """A node that asks: who it is, the way back to it, and what both lend."""

    node: int
    run: int
    identity: bytes
    exchange: Exchange
    last: int = 0  # number of its latest request

    @property
    def age(self) -> tuple[int, int]:
        """Greater for later processes in one place."""
        return self.run, self.last // LIFE


class Peers:
    """The connections of a ROUTER that nodes ask by.

    ``ways`` has the latest of each node: answers go there.

    Args:
        ends: reports when connections end.
        pool: where tensors lie that are lent to them.
    """

    def __init__(self, ends: Ends, pool: Pool | None) -> None:
        self._ends, self._pool = ends, pool
        self._peers: dict[bytes, Peer] = {}  # by ZeroMQ's name of the connection
        self.ways: dict[int, Peer] = {}
        self._descriptors: dict[int, bytes] = {}  # of connections
        self.broken: list[bytes] = []  # connections that have ended

    def at(self, name: bytes, *, far: bool = False) -> Peer:
        """The node at the other end of a connection, perhaps of another host.

        -1 while nobody knows which.
        """
        pool = None if far else self._pool
        return self._peers.get(name) or Peer(-1, -1, name, Exchange(pool, writable=True))

    def know(self, peer: Peer, latest: Request, frame: Any) -> None:
        """It is the node that asked this; ``frame`` came from it."""
        peer.node, peer.run, peer.last = latest.node, latest.run, latest.number
        if peer.identity not in self._peers:
            self.look()
            self._descriptors[connection(frame)] = peer.identity
            self._peers[peer.identity] = peer
        way = self.ways.get(peer.node)
        if way is None or way.age <= peer.age:
            self.ways[peer.node] = peer

    def look(self) -> None:
        """The connections that have ended: read before a new one may reuse a descriptor."""
        self.broken += [self._descriptors.pop(d, b"") for d in self._ends.broken()]

    def take_broken(self) -> list[Peer]:
        """Those whose connections have ended without a goodbye, and who have no other."""
        names, self.broken = self.broken, []
        return [peer for name in names if (peer := self.forget(name)) is not None]

    def forget(self, name: bytes) -> Peer | None:
        """Nothing more comes by this connection: its node, unless that has another."""
        peer = self._peers.pop(name, None)
        if peer is None or self.ways.get(peer.node) is not peer:
            return None
        return self.ways.pop(peer.node)


#: How many batches are answered together at most: nobody waits long for the first.
_AT_ONCE = 8

#: What other threads send to the one that serves: to end, or to look for news.
_STOP, _NEWS = b"x", b"n"

#: How many copies are in one batch at most.
_COPIES = 100


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
        self._dead: set[bytes] = set()  # connections of processes whose memory has ended with them
        #: Called with a node that is taken for dead and its pid; 0 for whichever is the scheduler.
        self.missed: Callable[[int, int], None] = lambda node, pid: None
        #: Called by a scheduler, with where it listens, and with each run that begins.
        self.listens: Callable[[str], None] = lambda endpoint: None
        self.begun: Callable[[int], None] = lambda run: None
        self._stop, self._stopped = socket.socketpair()
        self._notes = Answering()
        self._registering: Asking | None = None
        self._ended: SimpleQueue[Leave] = SimpleQueue()  # nodes, as others have noticed
        self._begun = -1  # the latest run that a scheduler has reported
        self._known = {*range(node.scheduler)}
        self._pool = memory.shared()
        self._poller = zmq.Poller()
        self._lines: dict[str, Line] = {}  # to the scheduler and the backup, by endpoint
        self._chief: Line | None = None
        self._machine: Scheduler | ServerSession = (
            ServerSession(node, updating)
            if node.role == "server"
            else Scheduler(node.workers, node.servers, node.run)
        )
        if isinstance(self._machine, Scheduler):
            self._machine.lost = self._cause
        self._path = node.path(node.id)

    def stop(self) -> None:
        """End :meth:`run`, from any thread or signal handler; twice does no harm."""
        with suppress(OSError):
            self._stop.send(_STOP)

    def leave(self, run: int, node: int, life: int, how: str) -> None:
        """Report to a scheduler that this life of a node has ended, from any thread.

        It notices by itself when a connection breaks; a worker may end before it has one.
        """
        self._ended.put(Leave(run, node, 0, how, life))
        with suppress(OSError):
            self._stop.send(_NEWS)

    def run(self) -> None:
        """Serve in this thread until :meth:`stop`.

        Raises:
            KVStoreError: it cannot listen in its folder, or the scheduler refuses it.
        """
        self._context = context = zmq.Context()
        torch.set_num_threads(1)  # the others of this host have work to do, too
        try:
            self._open(context)
            try:
                while self._turn():
                    pass
            finally:
                self._path.unlink(missing_ok=True)  # ZeroMQ leaves it
        finally:
            context.destroy(linger=0)
            self._stop.close()
            self._stopped.close()

    def _open(self, context: Any) -> None:
        """Listen; a server then registers."""
        node = self.node
        self._router = open_socket(context, zmq.ROUTER, node.keys, node.heartbeat_timeout)
        self._ends = Ends(self._router)
        self._peers = Peers(self._ends, self._pool)
        endpoint = f"ipc://{self._path}"
        try:
            if listens(self._path):
                raise KVStoreError(
                    f"{node.role} {node.index} is already running: a process listens at "
                    f"{endpoint}. Start each node of a cluster once."
                )
            self._router.bind(endpoint)
        except (zmq.ZMQError, OSError) as e:
            raise KVStoreError(
                f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                "Give a folder that exists and can be written."
            ) from e
        for end in (self._router, self._stopped, self._ends.socket):
            self._poller.register(end, zmq.POLLIN)
        if node.address:
            before = node.chief.partition(" ")[0] if node.role == "scheduler" else ""
            endpoint = f"{listen_on(self._router, node.address, before)} {endpoint}"
        if isinstance(self._machine, ServerSession):
            self._machine.endpoint = endpoint
            self._chief = self._line(node.endpoint(node.scheduler), node.heartbeat_timeout)
            self._poller.register(self._chief.ends.socket, zmq.POLLIN)
            self._deliver([self._machine.register()])
        else:
            self.listens(endpoint)

    def _line(self, endpoint: str, heartbeat_timeout: float = 0.0) -> Line:
        """The connection to the scheduler, or to the server that is this one's backup."""
        if endpoint not in self._lines:
            way = self.node.way(endpoint)
            line = Line(self._context, way, self.node.keys, heartbeat_timeout)
            self._lines[endpoint] = line
            self._poller.register(line.socket, zmq.POLLIN)
        return self._lines[endpoint]

    def _turn(self) -> bool:
        """Wait for messages and answer them; False when asked to stop."""
        ready = dict(self._poller.poll())
        if self._ends.socket in ready:
            self._peers.look()
        if self._router in ready:
            self._serve_all()
        if self._peers.broken:
            self._bury()
        for line in list(self._lines.values()):
            if line.socket in ready:
                for answer in line.receive():
                    self._hear(answer)
        if self._chief is not None and self._chief.ends.socket in ready:
            self._check_scheduler(self._chief)
        return not (self._stopped.fileno() in ready and self._is_stopped())

    def _is_stopped(self) -> bool:
        """Handle messages from other threads."""
        said = self._stopped.recv(64)
        while isinstance(self._machine, Scheduler) and not self._ended.empty():
            self._deliver(self._machine.handle(self._ended.get()))
        return _STOP in said

    def _check_scheduler(self, line: Line) -> None:
        """A scheduler that hangs is reported; another in its place has to know this server."""
        for how in line.changes():
            if how is not None:
                self.missed(self.node.scheduler, 0)
            elif isinstance(self._machine, ServerSession):
                self._deliver([self._machine.register()])

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

    def _bury(self) -> None:
        """Read what ended connections still hold; the nodes without a goodbye count as dead.

        The scheduler tells the others; a server hears it from there.
        """
        while self._serve_all():
            pass
        for peer in self._peers.take_broken():
            if isinstance(self._machine, Scheduler) and peer.run == self._machine.run:
                leave = Leave(peer.run, peer.node, 0, BROKEN, peer.last // LIFE)
                self._deliver(self._machine.handle(leave))

    def _serve(self, frames: list[Any]) -> list[Message]:
        """The answers to a batch of requests; what cannot be read is ignored."""
        name = bytes(frames[0].buffer)
        peer = self._peers.at(name, far=bool(self.node.address) and from_afar(frames[0]))
        answers: list[Message] = []
        try:
            batch = decode([frame.buffer for frame in frames[1:]], peer.exchange.borrow)
            requests = self._checked(batch.messages)
        except KVStoreError as e:
            self.ignored += 1
            if isinstance(e, HiddenMemory):
                self._dead.add(name)
            return answers
        if name in self._dead:  # what came before is lost, and order is all
            return answers
        peer.exchange.take_back(batch.back)
        if not requests:  # a goodbye
            last = self._peers.forget(name)
            return [] if last is None else [*self._machine.bye(last.node, last.run, last.last)]
        self._peers.know(peer, requests[-1], frames[0])
        for request in requests:
            self._notes.arrived(request)
            answers += self._answers(request, batch.to)
        return answers

    def _checked(self, messages: list[Message]) -> list[Request]:
        """The requests of one node of this cluster.

        Raises:
            KVStoreError: they are none.
        """
        found = [m for m in messages if isinstance(m, Request)]
        nodes = {m.node for m in messages}
        if len(found) < len(messages) or len(nodes) > 1 or not nodes <= self._known:
            raise KVStoreError(f"requests of nodes {nodes}: there are none such here.")
        return found

    def _answers(self, request: Request, to: int) -> Iterable[Message]:
        try:
            if isinstance(self._machine, Scheduler):
                return self._machine.handle(request)
            return self._machine.handle(request, to)
        except Exception as e:  # out of memory, say: the asker hears of it, the others go on
            what = f"{self.node.role} {self.node.index} could not serve {type(request).__name__}"
            return [error(request, f"{what}: {type(e).__name__}: {e}")]

    def _cause(self, node: int, pid: int, how: str) -> str:
        """How a node was lost, for a scheduler, which of another host cannot know whether it hangs.

        It is reported: if it hangs, somebody has to end it.
        """
        if how == BROKEN:
            self.missed(node, pid)
            if not self.node.address and outlives_connection(pid):
                return silence(self.node.heartbeat_timeout)
        return how

    # -- what is sent -----------------------------------------------------------

    def _hear(self, answer: Message) -> None:
        """Handle a message from the scheduler or the backup."""
        if not (isinstance(self._machine, ServerSession) and isinstance(answer, Answer)):
            return
        said = self._machine.hear(answer)
        if self._registering is not None and self._machine.begun:
            self._registering.answered(answer)
            self._registering = None
        self._deliver(said)

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Record each message, then send it: whoever has the answer finds it in the trace."""
        machine, copies = self._machine, list[Copy]()
        letters: dict[int, list[Message]] = {}
        for message in messages:
            if isinstance(message, Register):
                if message.run >= 0:  # else it is in no trace
                    self._registering = Asking(message, self.node.scheduler)
                assert self._chief is not None
                self._chief.send([message])
            elif isinstance(message, Copy):
                copies.append(message)
            elif message.node in self._peers.ways:
                self._notes.answering(message)
                letters.setdefault(message.node, []).append(message)
        if copies and isinstance(machine, ServerSession) and machine.backup.to is not None:
            line = self._line(machine.endpoints[machine.backup.to])
            for n in range(0, len(copies), _COPIES):
                line.send(copies[n : n + _COPIES])
        for node, letter in letters.items():
            self._send(self._peers.ways[node], letter)
        if isinstance(machine, Scheduler) and machine.begun and machine.run != self._begun:
            self._begun = machine.run
            self.begun(machine.run)

    def _send(self, peer: Peer, letter: list[Message]) -> None:
        frames = encode(*letter, back=peer.exchange.given_up(), lend=peer.exchange.lend)
        send(self._router, [peer.identity, *frames])
