"""ZeroMQ between the nodes of one host: a DEALER where one asks, a ROUTER where one answers.

Large tensors go through memory that both ends see (:mod:`.memory`). All logic is in
:mod:`.scheduler` and :mod:`.shard`; here are sockets and nothing else.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from distkit.errors import KVStoreError
from distkit.kvstore import memory
from distkit.kvstore.link import BYE, Line
from distkit.kvstore.memory import Exchange
from distkit.kvstore.messages import (
    Answer,
    Copy,
    Leave,
    Message,
    Pull,
    Register,
    Reply,
    Request,
    error,
)
from distkit.kvstore.node import Node
from distkit.kvstore.recording import Answering, Asking, updating
from distkit.kvstore.scheduler import Scheduler
from distkit.kvstore.shard import Shard
from distkit.kvstore.sockets import (
    BROKEN,
    LAST_WORD,
    Ends,
    connection,
    listens,
    open_socket,
    receive,
    send,
)
from distkit.kvstore.wire import decode, encode

#: So many batches are answered together at most: nobody waits long for the first.
_AT_ONCE = 8

#: So long the acknowledgement of a push waits for the pull that came with it [ms].
_PATIENCE = 5


@dataclass
class _Peer:
    """A node that asks: who it is, the way back to it, and what both lend."""

    node: int
    run: int
    identity: bytes
    exchange: Exchange
    open: set[int] = field(default_factory=set)  # numbers of the pulls that it waits for


class Service:
    """A server, or the scheduler, run by this process. It lives through many runs.

    Args:
        node: its place in the cluster, with the run to begin with.
        heir: what is left of the server whose place it takes.

    Raises:
        KVStoreError: the node is a worker, or cannot listen in its folder.
    """

    def __init__(self, node: Node, heir: Shard | None = None) -> None:
        if node.role == "worker":
            raise KVStoreError(
                f"worker {node.index} has nothing to serve. Call kvstore.use(node) there instead."
            )
        self.node = node
        self.ignored = 0  # malformed messages
        self._stop, self._stopped = socket.socketpair()
        self._notes = Answering()
        self._peers: dict[bytes, _Peer] = {}  # by ZeroMQ's name of the connection
        self._ways: dict[int, _Peer] = {}  # by node
        self._descriptors: dict[int, bytes] = {}  # of connections
        self._parted: list[bytes] = []  # connections that have ended
        self._letters: dict[int, list[Message]] = {}  # by node, not sent yet
        self._registering: Asking | None = None
        self._alone = False  # the scheduler has ended
        self._known = set(range(node.scheduler))
        self._pool = memory.shared() if heir is None else memory.own()  # its own thread
        self._heir = heir is not None
        self._backups: dict[int, Line] = {}
        self._heirs: list[tuple[Service, threading.Thread]] = []
        self._machine: Scheduler | Shard = heir or (
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
        self._context = context = zmq.Context()
        torch.set_num_threads(1)  # the others of this host have work to do, too
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
        self._router = open_socket(context, zmq.ROUTER, node.keys)
        self._scheduler = open_socket(context, zmq.DEALER, node.keys)
        self._ends, self._schedulers = Ends(self._router), Ends(self._scheduler)
        endpoint = node.endpoint(node.id)
        if not self._heir and listens(node.path(node.id)):  # the dead may still be closing
            raise KVStoreError(f"{node.role} {node.index} is there already: somebody listens at "
                               f"{endpoint}. Start each node of a cluster once.")  # fmt: skip
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as e:
            raise KVStoreError(f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                               "Give a folder that exists and can be written.") from e  # fmt: skip
        self._poller = zmq.Poller()
        ends = self._ends.socket, self._schedulers.socket
        for end in (self._router, self._scheduler, self._stopped, *ends):
            self._poller.register(end, zmq.POLLIN)
        if isinstance(self._machine, Shard):
            self._scheduler.connect(node.endpoint(node.scheduler))
            self._deliver([self._machine.register()])

    def _serve_until_stopped(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._retire()
            for line in self._backups.values():
                line.socket.disable_monitor()
                line.ends.socket.close()
            if self._heir:  # its address is another's again
                self._scheduler.linger = LAST_WORD
                self._scheduler.send_multipart(BYE)
                self._scheduler.disable_monitor()
                self._schedulers.socket.close()
                self._scheduler.close()
            else:
                self.node.path(self.node.id).unlink(missing_ok=True)  # ZeroMQ leaves it

    def _turn(self) -> bool:
        """Wait for messages and answer them; False when told to stop."""
        ready = dict(self._poller.poll(_PATIENCE if self._letters else None))
        if not ready:
            self._send(list(self._letters))
        if self._ends.socket in ready:
            self._look()
        if self._router in ready:
            self._serve_all()
        if self._parted:
            self._part()
        for line in self._backups.values():
            if line.socket in ready:
                for answer in line.receive():
                    self._obey(answer)
        if self._scheduler in ready:
            self._hear()
        if self._schedulers.socket in ready:
            self._greet()
        if self._heirs and self._heirs[0][0].node.run < self._machine.run:
            self._retire()  # a server has its place again
        over = isinstance(self._machine, Shard) and self._machine.over
        return not over and self._stopped.fileno() not in ready

    # -- those who ask ----------------------------------------------------------

    def _serve_all(self) -> bool:
        """Take up a few batches of requests; what answers them goes out together.

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

    def _look(self) -> None:
        """Which connections have ended: asked before a new one may have the same descriptor."""
        self._parted += [self._descriptors.pop(d, b"") for d in self._ends.broken()]

    def _part(self) -> None:
        """What came by connections that have ended is heard; who said no goodbye is missed."""
        while self._serve_all():
            pass
        names, self._parted = self._parted, []
        for name in names:
            self._miss(name)

    def _serve(self, frames: list[Any]) -> list[Message]:
        """The answers to a batch of requests; what cannot be read is ignored."""
        name = bytes(frames[0].buffer)
        peer = self._peers.get(name) or _Peer(-1, -1, name, Exchange(self._pool, writable=True))
        answers: list[Message] = []
        try:
            requests = self._read(peer, [frame.buffer for frame in frames[1:]])
        except KVStoreError:
            self.ignored += 1
            return answers
        if not requests:
            self._forget(name)
            return answers
        peer.node, peer.run = requests[0].node, requests[0].run
        if name not in self._peers:
            self._look()
            self._descriptors[connection(frames[0])] = name
        self._peers[name] = self._ways[peer.node] = peer
        for request in requests:
            if isinstance(request, Pull):
                peer.open.add(request.number)
            self._notes.arrived(request)
            answers += self._answers(request)
        return answers

    def _read(self, peer: _Peer, frames: list[Any]) -> list[Request]:
        """The requests in these frames, all of one node; none when it hangs up.

        Raises:
            KVStoreError: they are none.
        """
        batch = decode(frames, peer.exchange.borrow)
        peer.exchange.take_back(batch.back)
        found = [m for m in batch.messages if isinstance(m, Request)]
        nodes = {m.node for m in batch.messages}
        if len(found) < len(batch.messages) or len(nodes) > 1 or not nodes <= self._known:
            raise KVStoreError(f"requests of nodes {nodes}: there are none such here.")
        return found

    def _answers(self, request: Request) -> Iterable[Message]:
        try:
            return self._machine.handle(request)
        except Exception as e:  # out of memory, say: the asker hears of it, the others go on
            what = f"{self.node.role} {self.node.index} could not serve {type(request).__name__}"
            return [error(request, f"{what}: {type(e).__name__}: {e}")]

    def _miss(self, name: bytes) -> None:
        """A connection broke, without a last word: the process at its other end has ended."""
        peer = self._peers.get(name)
        if peer is None:
            return
        latest = self._ways.get(peer.node) is peer  # else another is there in its place
        self._forget(peer.identity)
        if not latest or not isinstance(self._machine, Scheduler):
            return
        if peer.run == self._machine.run or peer.node >= self.node.workers:
            self._deliver(self._machine.handle(Leave(self._machine.run, peer.node, 0, BROKEN)))

    def _forget(self, name: bytes) -> _Peer | None:
        peer = self._peers.pop(name, None)
        if peer is not None and self._ways.get(peer.node) is peer:
            del self._ways[peer.node]
        return peer

    # -- the scheduler's word to a server, and everybody's answers --------------

    def _hear(self) -> None:
        while (frames := receive(self._scheduler)) is not None:
            for answer in decode([frame.buffer for frame in frames]).messages:
                self._obey(answer)

    def _obey(self, answer: Message) -> None:
        """What the scheduler or a backup says to a server."""
        if not (isinstance(self._machine, Shard) and isinstance(answer, Answer)):
            return
        said = self._machine.hear(answer)
        if self._registering is not None and self._machine.store is not None:
            self._registering.answered(answer)
            self._registering = None
        while self._machine.heirs:
            heir = self._machine.heirs.pop()
            service = Service(heir.node, heir)
            thread = threading.Thread(target=service.run, name="distkit-heir", daemon=True)
            self._heirs.append((service, thread))
            thread.start()
        self._deliver(said)

    def _retire(self) -> None:
        """End those that served in others' places."""
        heirs, self._heirs = self._heirs, []
        for service, thread in heirs:
            service.stop()
            thread.join()

    def _greet(self) -> None:
        """The connection to the scheduler broke, and another is there: it has to know us."""
        for how in self._schedulers.heard():
            self._alone = self._alone or how is not None
            if self._alone and how is None and isinstance(self._machine, Shard) and not self._heir:
                self._alone = False
                self._deliver([self._machine.register()])

    def _backup(self, node: int) -> Line:
        """The connection to a server that keeps copies."""
        if node not in self._backups:
            line = Line(self._context, self.node.endpoint(node), self.node.keys)
            line.exchange = Exchange(self._pool, writable=False)
            self._backups[node] = line
            self._poller.register(line.socket, zmq.POLLIN)
        return self._backups[node]

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Note each message, then send it: who has the answer finds it in the trace."""
        copies: dict[int, list[Copy]] = {}
        for message in messages:
            if isinstance(message, Register):
                self._registering = Asking(message, self.node.scheduler)
                self._scheduler.send_multipart(encode(message))
            elif isinstance(message, Copy):
                copies.setdefault(message.to, []).append(message)
            elif message.node in self._ways:
                self._notes.answering(message)
                self._letters.setdefault(message.node, []).append(message)
        for node, same in copies.items():
            self._backup(node).send(same)
        self._send([node for node in self._letters if not self._waits(node)])

    def _waits(self, node: int) -> bool:
        """Whether the node waits for a pull anyway, and its letter has nothing but receipts."""
        way = self._ways.get(node)
        if way is None:
            return False
        way.open.difference_update(m.number for m in self._letters[node])
        return bool(way.open) and all(
            isinstance(m, Reply) and m.value is None for m in self._letters[node]
        )

    def _send(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            letter, way = self._letters.pop(node), self._ways.get(node)
            if way is not None:
                frames = encode(*letter, back=way.exchange.given_up(), lend=way.exchange.lend)
                send(self._router, [way.identity, *frames])
