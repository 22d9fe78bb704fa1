"""A server through the runs of its cluster: a fresh :class:`KVServer` for each, and its copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    AddressBook,
    Answer,
    Appointed,
    Copied,
    Departed,
    Error,
    Joined,
    Message,
    Missed,
    Present,
    Register,
    Reply,
    Request,
    RollCall,
    stale,
)
from distkit.kvstore.protocol.replication import Backups, Copy, Portion, portions, restore, ring
from distkit.kvstore.protocol.server import KVServer, Watch
from distkit.kvstore.transport.node import Node

#: How a worker departs that has done its work.
FINISHED = "finished"


class ServerSession:
    """Registers a server for each run and hands its requests to the run's KVServer; no I/O.

    ``backups`` have copies of what it holds, ``replicas`` are its own copies of others' values,
    by node. Those that it must take over, since their server has ended, are in ``heirs`` until
    somebody runs them. One that comes in the middle of a run holds nothing but copies: its
    ``store`` is None, and what it says it says as ``me``.

    Args:
        node: the server's place in the cluster.
        watch: a context manager around each update.
    """

    def __init__(self, node: Node, watch: Watch = nullcontext) -> None:
        self.node, self.watch, self.run = node, watch, node.run
        self.endpoint, self.pid = node.endpoint(node.id), os.getpid()  # where it listens
        self._heir = False
        self._fresh: Callable[[Watch], KVServer]  # an empty one, by the terms of the run
        self._clear()

    def _clear(self) -> None:
        self.begun, self.me = False, self.node.id  # until the scheduler says who is there
        self.store: KVServer | None = None
        self.backups = Backups(self.run, self.node.id, [])
        self.replicas: dict[int, KVServer] = {}
        self.heirs: list[ServerSession] = []
        #: Where those listen to whom copies go, and from which number on they count.
        self.endpoints: dict[int, str] = {}
        self._firsts: dict[int, int] = {}
        self._arriving: dict[int, list[Portion]] = {}  # of whole copies, by server
        self._departed: dict[int, Departed] = {}
        self._missed: dict[int, tuple[int, str]] = {}  # who, its last request, and how
        self._early: list[Request] = []
        self._asked = 0

    @property
    def over(self) -> bool:
        """True if it served in another's place, in a run that is over."""
        return self._heir and not self.begun

    def register(self) -> Register | Present:
        """The server's own request to the scheduler, with the endpoint it listens on."""
        n, pid = self.node, self.pid
        self._asked += 1
        head = self.run, self.me, self._asked, self.endpoint
        if self.begun:
            return Present(*head, pid)
        return Register(*head, n.workers, n.servers, pid=pid)

    def miss(self, who: int, last: int, how: str) -> Missed:
        """Tell the scheduler that the connection to a node broke."""
        self._missed[who] = last, how
        self._asked += 1
        return Missed(self.run, self.me, self._asked, who, last, how)

    def greet(self) -> list[Message]:
        """All that a scheduler must hear that has just begun."""
        missed = [self.miss(who, *what) for who, what in self._missed.items()]
        return [self.register(), *missed, *map(self._copied, self.backups.nodes)]

    def _copied(self, who: int) -> Copied:
        """Tell the scheduler that a backup has a whole copy."""
        self._asked += 1
        return Copied(self.run, self.me, self._asked, who, self._firsts.get(who, 0))

    def late(self, request: Request) -> bool:
        """True if a node that was taken for dead still says something."""
        if request.run != self.run:
            return False
        if isinstance(request, Copy):
            gone = self._departed.get(request.node)
            return gone is not None and request.number < gone.first
        return self.store is not None and self.store.late(request)

    def handle(self, request: Request) -> list[Message]:
        """Answer a worker, or a server whose backup this is.

        The first request of a newer run clears the store.
        """
        if request.run < self.run:
            return [] if isinstance(request, Copy) else [stale(request, self.run)]
        mine = self._begin(request.run) if request.run > self.run else []
        if not self.begun:
            self._early.append(request)
            return mine
        return [*mine, *self._serve(request)]

    def hear(self, answer: Answer) -> list[Message]:
        """Obey the scheduler; note that a backup has a copy.

        Raises:
            KVStoreError: the scheduler refuses this server.
        """
        match answer:
            case RollCall() if answer.run > self.run:
                return self._begin(answer.run)
            case AddressBook() if answer.run == self.run and not self.begun:
                return self._open(answer)
            case Departed() if answer.run == self.run and self.begun:
                return self._depart(answer)
            case Joined() if answer.run == self.run:
                return self._share(answer)
            case Appointed() if answer.run == self.run:
                self._inherit(answer)
            case Reply() if answer.run == self.run:
                whole = self.backups.arrived(answer.number)
                return self.backups.hold([*map(self._copied, whole)])
            case Error():
                raise KVStoreError(answer.text)
        return []

    def _begin(self, run: int) -> list[Message]:
        self.run = run
        self._clear()
        return [] if self._heir else [self.register()]

    def _open(self, book: AddressBook) -> list[Message]:
        """Serve from now on, first those who were told before this server was."""
        n, terms = self.node, book.terms
        workers = [node for node in book.endpoints if node < n.workers]

        def fresh(watch: Watch) -> KVServer:
            return KVServer(
                terms.rule,
                workers,
                on_crash=terms.on_crash,
                elastic=terms.elastic,
                must_update=not terms.sync,
                watch=watch,
            )

        self.begun, self.me, self._asked = True, book.node, max(self._asked, book.first)
        self._fresh, whole = fresh, book.node == n.id
        rings = {
            n.workers + i: [n.workers + j for j in ring(i, n.servers, terms.replication)]
            for i in range(n.servers)
        }
        self.store = fresh(self.watch) if whole else None
        self.endpoints = dict(book.endpoints)
        self.backups = Backups(self.run, n.id, rings[n.id][1:] if whole else [])
        self.replicas = {
            server: fresh(nullcontext)
            for server, holders in rings.items()
            if whole and n.id in holders[1:]
        }
        early, self._early = self._early, []
        return [answer for request in early for answer in self._serve(request)]

    def _serve(self, request: Request) -> list[Message]:
        if isinstance(request, Copy):
            return self._follow(request)
        if self.store is None:  # it holds copies alone, and nobody knows its address
            return []
        copies = self.backups.copies(request)
        return [*copies, *self.backups.hold(self.store.handle(request))]

    # -- as a backup ------------------------------------------------------------

    def _follow(self, copy: Copy) -> list[Message]:
        """Do as the primary did; its answers are the primary's to give.

        Copies to a server that has ended are nobody's any more, and acknowledged by nobody.
        """
        message, replica = copy.message, self.replicas.get(copy.node)
        if isinstance(message, Portion):
            self._arrive(copy.node, message)
        elif replica is None:
            return []
        elif isinstance(message, Departed):
            _part(replica, message)
        elif isinstance(message, Request):
            replica.handle(message)
        return [Reply(copy.run, copy.node, copy.number)]

    def _arrive(self, server: int, portion: Portion) -> None:
        """A part of a whole copy: with the last it takes the place of what was known before."""
        if portion.number == 0:
            self._arriving[server] = []
        self._arriving[server].append(portion)
        if not portion.left:
            found = self._arriving.pop(server)
            self.replicas[server] = restore(self._fresh(nullcontext), found)

    def _share(self, joined: Joined) -> list[Message]:
        """Make a whole copy for one that has come, unless that was done."""
        who = joined.who
        if self.store is None or self._firsts.get(who, -1) >= joined.first:
            return []
        found: list[Message] = self.backups.lost(who)  # another life of it
        self.endpoints[who], self._firsts[who] = joined.endpoint, joined.first
        everything = portions(self.run, self.node.id, self.store)
        return [*found, *self.backups.begin(who, everything)]

    # -- others that end --------------------------------------------------------

    def bye(self, node: int, run: int, last: int) -> list[Message]:
        """A node hangs up in order: its work is done, and this was its last request."""
        if run != self.run or not self.begun or node >= self.node.workers:
            return []
        return self._leave(Departed(run, self.node.id, 0, node, FINISHED, last))

    def _leave(self, departed: Departed) -> list[Message]:
        if self.store is None:
            return []
        copies = self.backups.copies(departed)
        return [*copies, *self.backups.hold(_part(self.store, departed))]

    def _depart(self, departed: Departed) -> list[Message]:
        who = departed.who
        self._departed[who] = departed
        if who < self.node.workers:
            return self._leave(departed)
        if self._firsts.get(who, 0) >= departed.first:
            return []  # another has its place already
        return self.backups.lost(who)

    def _inherit(self, appointed: Appointed) -> None:
        """Take over a server that has ended."""
        replica = self.replicas.pop(appointed.who, None)
        if replica is not None:
            self.heirs.append(self._heir_of(appointed, replica))

    def _heir_of(self, appointed: Appointed, store: KVServer) -> ServerSession:
        """The one that serves in its place; the other copies begin anew with what it has."""
        server, others = appointed.who, dict(appointed.endpoints)
        heir = ServerSession(
            replace(self.node, index=server - self.node.workers, run=self.run), self.watch
        )
        heir._heir, heir.begun = True, True
        heir.endpoint, heir.pid = others.pop(server), self.pid
        heir.store, store.watch, heir._fresh = store, self.watch, self._fresh
        heir._asked, heir._departed = appointed.first, dict(self._departed)
        heir.endpoints = others
        heir.backups = Backups(self.run, server, others, appointed.first)
        for d in self._departed.values():
            if d.who < self.node.workers:
                store.leave(d.who, d.how, d.first)
        return heir

    def open(self) -> list[Message]:
        """The first message of a server that replaces a dead one."""
        if not self._heir or self.store is None:
            return [self.register()]
        everything = portions(self.run, self.node.id, self.store)
        copies = [c for node in self.backups.nodes for c in self.backups.begin(node, everything)]
        return [self.register(), *copies]


def _part(store: KVServer, departed: Departed) -> list[Answer]:
    """A worker has ended, or finished."""
    if departed.how == FINISHED:
        return store.finish(departed.who, departed.first)
    return store.leave(departed.who, departed.how, departed.first)
