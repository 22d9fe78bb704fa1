"""A server through the runs of its cluster: a fresh :class:`KVServer` for each, and its copies."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace

from distkit.errors import KVStoreError
from distkit.kvstore.consistency import Terms
from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Copy,
    Departed,
    Error,
    Message,
    Missed,
    Present,
    Register,
    Reply,
    Request,
    RollCall,
    given_up,
    stale,
)
from distkit.kvstore.node import Node
from distkit.kvstore.replication import Backups, original, ring
from distkit.kvstore.scheduler import LIFE
from distkit.kvstore.server import KVServer, Watch

#: How a worker departs that has done its work.
FINISHED = "finished"


class Shard:
    """Registers a server for each run and hands its requests to the run's KVServer; no I/O.

    ``backups`` have copies of what it holds, ``replicas`` are its own copies of others' values,
    by node. Those that it must take over, since their server has ended, are in ``heirs`` until
    somebody runs them.

    Args:
        node: the server's place in the cluster.
        watch: a context manager around each update.
    """

    def __init__(self, node: Node, watch: Watch = nullcontext) -> None:
        self.node, self.watch, self.run = node, watch, node.run
        self._heir = False
        self._clear()

    def _clear(self) -> None:
        self.store: KVServer | None = None  # None until the scheduler says who is there
        self.backups = Backups(self.run, self.node.id, [])
        self.replicas: dict[int, KVServer] = {}
        self.heirs: list[Shard] = []
        self._departed: dict[int, Departed] = {}
        self._missed: dict[int, tuple[int, str]] = {}  # who, its last request, and how
        self._early: list[Request] = []
        self._asked = 0

    @property
    def over(self) -> bool:
        """Whether it served in another's place, in a run that is over."""
        return self._heir and self.store is None

    def register(self) -> Register | Present:
        """The server's own request to the scheduler, with the endpoint it listens on."""
        n, pid = self.node, os.getpid()
        self._asked += 1
        head = self.run, n.id, self._asked, n.endpoint(n.id)
        if self.store is not None:
            return Present(*head, pid)
        return Register(*head, n.workers, n.servers, pid=pid)

    def miss(self, who: int, last: int, how: str) -> Missed:
        """Tell the scheduler that the connection to a node broke."""
        self._missed[who] = last, how
        self._asked += 1
        return Missed(self.run, self.node.id, self._asked, who, last, how)

    def greet(self) -> list[Message]:
        """All that a scheduler must hear that has just begun."""
        missed = [self.miss(who, *what) for who, what in self._missed.items()]
        return [self.register(), *missed]

    def late(self, request: Request) -> bool:
        """Whether a worker that was taken for dead still says something."""
        store = self.store if request.run == self.run else None
        return store is not None and store.late(request)

    def handle(self, request: Request) -> list[Message]:
        """Answer a worker, or a server whose backup this is.

        The first request of a newer run clears the store.
        """
        if request.run < self.run:
            return [] if isinstance(request, Copy) else [stale(request, self.run)]
        mine = self._begin(request.run) if request.run > self.run else []
        if self.store is None:
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
            case AddressBook() if answer.run == self.run and self.store is None:
                return self._open(answer)
            case Departed() if answer.run == self.run and self.store is not None:
                return self._depart(answer)
            case Reply() if answer.run == self.run:
                return [*self.backups.arrived(answer.number)]
            case Error():
                raise KVStoreError(answer.text)
        return []

    def _begin(self, run: int) -> list[Message]:
        self.run = run
        self._clear()
        return [] if self._heir else [self.register()]

    def _open(self, book: AddressBook) -> list[Message]:
        """Serve from now on, first those who were told before this server was."""
        n, terms = self.node, Terms.of(book.mode, book.bound, book.terms)
        workers = [node for node in book.endpoints if node < n.workers]

        def fresh(watch: Watch) -> KVServer:
            return KVServer(terms.rule, workers, on_crash=terms.on_crash, elastic=terms.elastic,
                            must_update=not terms.sync, watch=watch)  # fmt: skip

        self.store, self._asked = fresh(self.watch), max(self._asked, book.first)
        self._rings = {n.workers + i: [n.workers + j for j in ring(i, n.servers, terms.replication)]
                       for i in range(n.servers)}  # fmt: skip
        self.backups = Backups(self.run, n.id, self._rings[n.id][1:])
        self.replicas = {
            server: fresh(nullcontext) for server, holders in self._rings.items()
            if n.id in holders[1:]
        }  # fmt: skip
        early, self._early = self._early, []
        return [answer for request in early for answer in self._serve(request)]

    def _serve(self, request: Request) -> list[Message]:
        if isinstance(request, Copy):
            return self._follow(request)
        assert self.store is not None
        copies = self.backups.copies(request)
        return [*copies, *self.backups.hold(self.store.handle(request))]

    # -- as a backup ------------------------------------------------------------

    def _follow(self, copy: Copy) -> list[Message]:
        """Do as the primary did; its answers are the primary's to give.

        Copies to a server that has ended are nobody's any more, and acknowledged by nobody. One
        that was taken for dead hears so: then it cannot acknowledge any more either.
        """
        replica = self.replicas.get(copy.node)
        if replica is None:
            gone = self._departed.get(copy.node)
            late = gone is not None and copy.number < gone.first
            return [given_up(copy, self.node.name(copy.node))] if late else []
        message = original(copy)
        if isinstance(message, Departed):
            _part(replica, message)
        elif isinstance(message, Request):
            replica.handle(message)
        return [Reply(copy.run, copy.node, copy.number)]

    # -- others that end --------------------------------------------------------

    def bye(self, node: int, run: int, last: int) -> list[Message]:
        """A node hangs up in order: its work is done, and this was its last request."""
        if run != self.run or self.store is None or node >= self.node.workers:
            return []
        return self._leave(Departed(run, self.node.id, 0, node, FINISHED, last))

    def _leave(self, departed: Departed) -> list[Message]:
        assert self.store is not None
        copies = self.backups.copies(departed)
        return [*copies, *self.backups.hold(_part(self.store, departed))]

    def _depart(self, departed: Departed) -> list[Message]:
        assert self.store is not None
        who = departed.who
        self._departed[who] = departed
        if who < self.node.workers:
            return self._leave(departed)
        self._inherit()
        return [*self.backups.lost(who)]

    def _inherit(self) -> None:
        """Take over the servers that have ended and whose first backup left is this one."""
        for server, holders in self._rings.items():
            left = [h for h in holders if h not in self._departed]
            if server in self._departed and left[:1] == [self.node.id] and server in self.replicas:
                self.heirs.append(self._heir_of(server, self.replicas.pop(server), left[1:]))

    def _heir_of(self, server: int, store: KVServer, backups: list[int]) -> Shard:
        index = server - self.node.workers
        heir = Shard(replace(self.node, index=index, run=self.run), self.watch)
        heir._heir, heir.store, store.watch = True, store, self.watch
        before = self._rings[server].index(self.node.id) - 1  # heirs that may have been
        heir._asked = self._departed[server].first + before * LIFE
        heir._rings, heir._departed = self._rings, dict(self._departed)
        heir.backups = Backups(self.run, server, backups, heir._asked)
        for d in self._departed.values():
            if d.who < self.node.workers:
                store.leave(d.who, d.how, d.first)
        return heir


def _part(store: KVServer, departed: Departed) -> list[Answer]:
    """A worker has ended, or finished."""
    if departed.how == FINISHED:
        return store.finish(departed.who, departed.first)
    return store.leave(departed.who, departed.how, departed.first)
