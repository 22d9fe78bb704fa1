"""ZeroMQ between nodes: a DEALER where one asks, a ROUTER where one answers.

On one host large tensors go through memory that both ends see (:mod:`.memory`). All logic is in
:mod:`.scheduler` and :mod:`.shard`; here are sockets and nothing else.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import zmq

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    Answer,
    Copied,
    Leave,
    Message,
    Missed,
    Present,
    Pull,
    Push,
    Register,
    Reply,
    Request,
    error,
    given_up,
)
from distkit.kvstore.protocol.replication import Copy
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport import memory
from distkit.kvstore.transport.journal import Journal, file_of
from distkit.kvstore.transport.link import BYE, MOVED, Line
from distkit.kvstore.transport.memory import Exchange, Pool
from distkit.kvstore.transport.node import PATIENCE, Node
from distkit.kvstore.transport.recording import Answering, Asking, updating
from distkit.kvstore.transport.scheduler import LIFE, Scheduler
from distkit.kvstore.transport.shard import ServerSession
from distkit.kvstore.transport.sockets import (
    BROKEN,
    Ends,
    connection,
    from_afar,
    goes_on,
    listen_on,
    listens,
    lives,
    open_socket,
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
    line: int = 0  # of its connections to this node, which this is
    last: int = 0  # number of its latest request
    #: The pulls that it waits for, each with the push that it came with, or itself: their numbers.
    open: dict[int, int] = field(default_factory=dict)

    @property
    def age(self) -> tuple[int, int]:
        """Greater for later connections of one node in one run."""
        return self.last // LIFE, self.line


class Peers:
    """The connections of a ROUTER that nodes ask by.

    ``ways`` has the latest of each node: answers go there.

    Args:
        ends: hears when connections end.
        pool: where tensors lie that are lent to them.
    """

    def __init__(self, ends: Ends, pool: Pool | None) -> None:
        self._ends, self._pool = ends, pool
        self._peers: dict[bytes, Peer] = {}  # by ZeroMQ's name of the connection
        self.ways: dict[int, Peer] = {}
        self._descriptors: dict[int, bytes] = {}  # of connections
        self._parted: list[bytes] = []  # connections that have ended

    def at(self, name: bytes, *, far: bool = False) -> Peer:
        """The node at the other end of a connection, perhaps of another host.

        -1 while nobody knows which.
        """
        pool = None if far else self._pool
        return self._peers.get(name) or Peer(-1, -1, name, Exchange(pool, writable=True))

    def know(self, peer: Peer, latest: Request, frame: Any) -> None:
        """It is the node that asked this; ``frame`` came from it.

        What came by an earlier connection than the present one may be read after what came by that.
        """
        peer.node, peer.run, peer.last = latest.node, latest.run, latest.number
        if peer.identity not in self._peers:
            self.look()
            self._descriptors[connection(frame)] = peer.identity
            self._peers[peer.identity] = peer
        way = self.ways.get(peer.node)
        same = way is not None and (way.node, way.run) == (peer.node, peer.run)
        if way is None or not same or way.age <= peer.age:
            self.ways[peer.node] = peer

    def look(self) -> None:
        """The connections that have ended: read before a new one may reuse a descriptor."""
        self._parted += [self._descriptors.pop(d, b"") for d in self._ends.broken()]

    @property
    def parted(self) -> bool:
        """True if connections have ended."""
        return bool(self._parted)

    def part(self) -> list[Peer]:
        """Those whose connections have ended without a last word, and who have no other."""
        names, self._parted = self._parted, []
        return [peer for name in names if (peer := self.forget(name)) is not None]

    def forget(self, name: bytes) -> Peer | None:
        """Nothing more comes by this connection: its node, unless that has another."""
        peer = self._peers.pop(name, None)
        if peer is None or self.ways.get(peer.node) is not peer:
            return None
        return self.ways.pop(peer.node)


#: So many batches are answered together at most: nobody waits long for the first.
_AT_ONCE = 8

#: What other threads say to that which serves: to end, or to look for news.
_STOP, _NEWS = b"x", b"n"

#: So often a scheduler looks for nodes that ended before it began [ms].
_LOOK = 100

#: So many copies are in one letter at most.
_COPIES = 100

#: So long the acknowledgement of a push waits for the pull that came with it [ms].
_PATIENCE = 5


class Service:
    """A server, or the scheduler, run by this process. It lives through many runs.

    Args:
        node: its place in the cluster, with the run to begin with.
        heir: what is left of the server whose place it takes.

    Raises:
        KVStoreError: the node is a worker, or cannot listen in its folder.
    """

    def __init__(self, node: Node, heir: ServerSession | None = None) -> None:
        if node.role == "worker":
            raise KVStoreError(
                f"worker {node.index} has nothing to serve. Call kvstore.use(node) there instead."
            )
        self.node = node
        self.ignored = 0  # malformed messages
        #: Called with the place and the process of a node that is taken for dead: 0 for whichever
        #: is the scheduler, again and again until one answers.
        self.missed: Callable[[int, int], None] = lambda node, pid: None
        #: Called, by a scheduler with other hosts, with where it listens, and with each run that
        #: begins: on one host its folder and its journal tell.
        self.listens: Callable[[str], None] = lambda endpoint: None
        self.begun: Callable[[int], None] = lambda run: None
        self._has_hosts = bool(node.address)
        self._dead: set[tuple[int, int]] = set()  # servers' processes, as somebody else has noticed
        self._inode = 0  # of the socket that it listens at
        self._stop, self._stopped = socket.socketpair()
        self._notes = Answering()
        self._letters: dict[int, list[Message]] = {}  # by node, not sent yet
        self._registering: Asking | None = None
        self._ended: SimpleQueue[Leave] = SimpleQueue()  # nodes, as somebody else has noticed
        self._unsure = False  # another scheduler was here: not all have connected to this one
        self._lacking = 0.0  # since when workers wait for servers that have ended; 0 if none does
        self._alone, self._told = False, 0.0  # the scheduler has ended; when that was said
        self._known = {*range(node.scheduler + 1 + node.servers)} - {node.scheduler}
        self._journal: Journal | None = None  # of a scheduler, for the one after it
        self._pool = memory.shared() if heir is None else memory.own()  # its own thread
        self._heir = heir is not None
        self._backups: dict[str, Line] = {}  # by where they listen
        self._heirs: list[tuple[Service, threading.Thread]] = []
        self._machine: Scheduler | ServerSession = heir or (
            ServerSession(node, updating)
            if node.role == "server"
            else Scheduler(node.workers, node.servers, node.run)
        )
        if isinstance(self._machine, Scheduler):
            self._machine.lost = self._lost
        self._path = node.path(node.id) if heir is None else node.here(heir.endpoint)

    def stop(self) -> None:
        """End :meth:`run`, from any thread or signal handler; twice does no harm."""
        with suppress(OSError):
            self._stop.send(_STOP)

    def leave(self, run: int, node: int, life: int, how: str) -> None:
        """Tell a scheduler that this life of a node has ended, from any thread.

        It notices by itself when a connection breaks; a worker may end before it has one.
        """
        self._ended.put(Leave(run, node, LIFE * (life + 1) - 1, how))
        with suppress(OSError):
            self._stop.send(_NEWS)

    def end(self, node: int, pid: int) -> None:
        """Tell a scheduler that a server's process has ended, which it cannot see on other hosts.

        It notices by itself when a connection breaks; one before it may have had that.
        """
        self._dead.add((node, pid))

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
        self._router = open_socket(context, zmq.ROUTER, node.keys, node.heartbeat_timeout)
        self._scheduler = open_socket(context, zmq.DEALER, node.keys, node.heartbeat_timeout)
        self._ends, self._schedulers = Ends(self._router), Ends(self._scheduler)
        self._peers = Peers(self._ends, self._pool)
        path = self._path
        endpoint = f"ipc://{path}"
        try:
            if not self._heir and listens(path):  # the dead may still be closing
                raise BlockingIOError
            if isinstance(self._machine, Scheduler):
                self._unsure = self._go_on(self._machine, Journal(file_of(path)))
            self._router.bind(endpoint)
            self._inode = path.stat().st_ino
            if self._has_hosts:
                endpoint = self._listen_to_hosts(endpoint)
        except BlockingIOError:
            raise KVStoreError(
                f"{node.role} {node.index} is already running: a process listens at "
                f"{endpoint}. Start each node of a cluster once."
            ) from None
        except (zmq.ZMQError, OSError) as e:
            raise KVStoreError(
                f"{node.role} {node.index} cannot listen at {endpoint}: {e}. "
                "Give a folder that exists and can be written."
            ) from e
        self._poller = zmq.Poller()
        ends = self._ends.socket, self._schedulers.socket
        for end in (self._router, self._scheduler, self._stopped, *ends):
            self._poller.register(end, zmq.POLLIN)
        if isinstance(self._machine, ServerSession):
            self._machine.endpoint = endpoint
            self._scheduler.connect(node.way(node.endpoint(node.scheduler)))
            self._deliver(self._machine.open())

    def _listen_to_hosts(self, near: str) -> str:
        """Listen to other hosts, too, a scheduler where another was; the endpoint for all."""
        before = self.node.chief if isinstance(self._machine, Scheduler) else ""
        address = self.node.address
        far = listen_on(self._router, address, before.partition(" ")[0], self.node.ports)
        endpoint = f"{far} {near}"
        if isinstance(self._machine, Scheduler):
            self.listens(endpoint)
        return endpoint

    def _go_on(self, scheduler: Scheduler, journal: Journal) -> bool:
        """Begin as the only scheduler; tells whether there was another before."""
        self._journal, told = journal, journal.read()
        if told is not None:
            scheduler.resume(told)
        self._deliver(())
        return told is not None

    def _serve_until_stopped(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._retire()
            for line in self._backups.values():
                line.socket.disable_monitor()
                line.ends.socket.close()
            if self._heir:
                self._schedulers.hang_up(self._scheduler, BYE)
            if self._listens():
                self._path.unlink()  # ZeroMQ leaves it
            if self._journal is not None:
                self._journal.close()  # in order: nobody goes on

    def _turn(self) -> bool:
        """Wait for messages and answer them; False when told to stop."""
        rest = _LOOK if self._unsure or self._lacking or self._alone else None
        ready = dict(self._poller.poll(_PATIENCE if self._letters else rest))
        if self._unsure and not self._letters:
            self._look_after()
        self._await_servers()
        self._await_scheduler()
        if not ready:
            self._send(list(self._letters))
        if self._ends.socket in ready:
            self._peers.look()
        if self._router in ready:
            self._serve_all()
        if self._peers.parted:
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
        over = isinstance(self._machine, ServerSession) and self._machine.over
        return not over and not (self._stopped.fileno() in ready and self._is_told_to_stop())

    def _is_told_to_stop(self) -> bool:
        """Handle messages from other threads."""
        said = self._stopped.recv(64)
        while not self._ended.empty():
            self._deliver(self._machine.handle(self._ended.get()))
        return _STOP in said

    def _look_after(self) -> None:
        """Find nodes that ended with the last scheduler: they have no connection here to break."""
        if isinstance(self._machine, Scheduler):
            for node in self._machine.missing(self._is_alive):
                if node not in self._peers.ways:
                    leave = Leave(self._machine.run, node, 0, BROKEN)
                    self._deliver(self._machine.handle(leave))
            self._unsure = not self._machine.present.keys() <= self._peers.ways.keys()

    def _is_alive(self, node: int, pid: int) -> bool:
        """A process of another host counts as alive until the one that forked it tells its end."""
        return (node, pid) not in self._dead if self._has_hosts else lives(pid)

    def _await_servers(self) -> None:
        """Wait for other servers before the beginning, but not for ever."""
        machine = self._machine
        if not isinstance(machine, Scheduler) or not machine.lacks_servers:
            self._lacking = 0.0
            return
        self._lacking = self._lacking or time.monotonic()
        if time.monotonic() > self._lacking + PATIENCE:
            self._deliver(machine.give_up_servers())

    def _await_scheduler(self) -> None:
        """Say that the scheduler is lost: it has ended, or hangs, and so may the one after it."""
        if self._alone and time.monotonic() > self._told + self.node.heartbeat_timeout:
            self._told = time.monotonic()
            self.missed(self.node.scheduler, 0)

    def _listens(self) -> bool:
        """True if who connects to its address comes to it, and not to one in its place."""
        with suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

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

    def _part(self) -> None:
        """Read what ended connections still hold; report those without a goodbye."""
        while self._serve_all():
            pass
        for peer in self._peers.part():
            self._miss(peer)

    def _serve(self, frames: list[Any]) -> list[Message]:
        """The answers to a batch of requests; what cannot be read is ignored."""
        name = bytes(frames[0].buffer)
        peer = self._peers.at(name, far=self._has_hosts and from_afar(frames[0]))
        answers: list[Message] = []
        try:
            requests = self._read(peer, [frame.buffer for frame in frames[1:]])
        except KVStoreError:
            self.ignored += 1
            return answers
        if not requests:
            last = self._peers.forget(name)  # None: its node has another connection
            moved = last is None or last.line == MOVED
            return [] if moved else [*self._machine.bye(peer.node, peer.run, peer.last)]
        if self._machine.late(requests[0]):  # nobody else's answers may go its way
            who = self.node.name(requests[0].node)
            send(self._router, [name, *encode(*(given_up(r, who) for r in requests))])
            return answers
        self._peers.know(peer, requests[-1], frames[0])
        for request in requests:
            if isinstance(request, Push) and request.pull >= 0:
                peer.open[request.pull] = request.number
            elif isinstance(request, Pull):
                peer.open[request.number] = request.number
            if request.node <= self.node.scheduler:  # a stand-in is in no picture
                self._notes.arrived(request)
            answers += self._answers(request)
        return answers

    def _read(self, peer: Peer, frames: list[Any]) -> list[Request]:
        """The requests in these frames, all of one node; none when it hangs up.

        Raises:
            KVStoreError: they are none.
        """
        batch = decode(frames, peer.exchange.borrow)
        peer.exchange.take_back(batch.back)
        peer.line = batch.line
        found = [m for m in batch.messages if isinstance(m, Request)]
        if isinstance(self._machine, Scheduler):
            for request in found:
                request.node = self._machine.asker(request)
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

    def _miss(self, peer: Peer) -> None:
        """A connection broke without a last word: the process at its other end counts as dead."""
        of_this_run = peer.run == self._machine.run
        if isinstance(self._machine, ServerSession):
            if of_this_run:
                self._deliver([self._machine.miss(peer.node, peer.last, BROKEN)])
        elif of_this_run or peer.node >= self.node.workers:
            self._deliver(self._machine.handle(Leave(self._machine.run, peer.node, 0, BROKEN)))

    def _lost(self, node: int, pid: int, how: str) -> str:
        """The scheduler's word on a node that is taken for dead, whoever noticed it first.

        Of a process on another host it does not know whether it hangs or has ended.
        """
        patience = self.node.heartbeat_timeout
        if how == BROKEN:
            self.missed(node, pid)
            if patience and not self._has_hosts and goes_on(pid):
                return silence(patience)
        return how

    # -- the scheduler's word to a server, and everybody's answers --------------

    def _hear(self) -> None:
        while (frames := receive(self._scheduler)) is not None:
            for answer in decode([frame.buffer for frame in frames]).messages:
                self._obey(answer)

    def _obey(self, answer: Message) -> None:
        """Handle a message from the scheduler or a backup."""
        if not (isinstance(self._machine, ServerSession) and isinstance(answer, Answer)):
            return
        said = self._machine.hear(answer)
        if self._registering is not None and self._machine.begun:
            self._registering.answered(answer)
            self._registering = None
        while self._machine.heirs:
            heir = self._machine.heirs.pop()
            assert heir.store is not None
            heir.store.watch = partial(updating, server=heir.node.id)
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
        """The connection to the scheduler broke, and one is there again: it has to know us.

        Raises:
            KVStoreError: the scheduler had taken this server for dead, and another has its place.
        """
        for how in self._schedulers.heard():
            self._alone = self._alone or how is not None
            if self._alone and how is None and isinstance(self._machine, ServerSession):
                self._alone = False
                if not self._listens():
                    raise KVStoreError(
                        f"{self.node.name(self.node.id)} gave no sign of life for too long, and "
                        "was replaced."
                    )
                self._deliver(self._machine.greet())

    def _backup(self, endpoint: str) -> Line:
        """The connection to a server that keeps copies."""
        if endpoint not in self._backups:
            way = self.node.way(endpoint)
            line = Line(self._context, way, self.node.keys, pool=lambda: self._pool)
            self._backups[endpoint] = line
            self._poller.register(line.socket, zmq.POLLIN)
        return self._backups[endpoint]

    def _deliver(self, messages: Iterable[Message]) -> None:
        """Note each message, then send it: who has the answer finds it in the trace.

        A scheduler's answer is sent only after what led to it is written down.
        """
        if self._journal is not None and isinstance(self._machine, Scheduler):
            if self._machine.changed:
                self._journal.write(self._machine.journal())
                if self._machine.begun and self._has_hosts:
                    self.begun(self._machine.run)
        copies: dict[str, list[Copy]] = {}
        for message in messages:
            if isinstance(message, (Register, Present, Missed, Copied)):
                if isinstance(message, Register) and message.run >= 0:  # else it is in no trace
                    self._registering = Asking(message, self.node.scheduler)
                self._scheduler.send_multipart(encode(message))
            elif isinstance(message, Copy):
                assert isinstance(self._machine, ServerSession)
                copies.setdefault(self._machine.endpoints[message.to], []).append(message)
            elif message.node in self._peers.ways:
                self._notes.answering(message)
                self._enclose(message, self._peers.ways[message.node])
        for endpoint, same in copies.items():
            for n in range(0, len(same), _COPIES):
                self._backup(endpoint).send(same[n : n + _COPIES])
        self._send([node for node in self._letters if not self._waits(node)])

    def _enclose(self, message: Message, way: Peer) -> None:
        """Put it into the next letter: the answer to a pull in place of its push's receipt."""
        letter = self._letters.setdefault(message.node, [])
        receipt = way.open.pop(message.number, None)
        if receipt is not None:
            letter[:] = [m for m in letter if m.number != receipt]
        letter.append(message)

    def _waits(self, node: int) -> bool:
        """True if the node waits for a pull anyway, and its letter has nothing but receipts."""
        way = self._peers.ways.get(node)
        return (
            way is not None
            and bool(way.open)
            and all(isinstance(m, Reply) and m.value is None for m in self._letters[node])
        )

    def _send(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            letter, way = self._letters.pop(node), self._peers.ways.get(node)
            if way is not None:
                frames = encode(*letter, back=way.exchange.given_up(), lend=way.exchange.lend)
                send(self._router, [way.identity, *frames])
