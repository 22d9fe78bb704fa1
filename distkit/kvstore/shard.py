"""A server through the runs of its cluster: a fresh :class:`KVServer` for each."""

from __future__ import annotations

from contextlib import nullcontext

from distkit.errors import KVStoreError
from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Error,
    Message,
    Register,
    Request,
    RollCall,
    stale,
)
from distkit.kvstore.node import Node
from distkit.kvstore.server import KVServer, Watch

#: The modes of a distributed store.
MODES = ("dist_sync", "dist_async")


class Shard:
    """Registers a server for each run and hands its requests to the run's KVServer; no I/O.

    Args:
        node: the server's place in the cluster.
        watch: a context manager around each update.
    """

    def __init__(self, node: Node, watch: Watch = nullcontext) -> None:
        self.node, self.watch, self.run = node, watch, node.run
        self.store: KVServer | None = None  # None until the scheduler says who is there
        self._early: list[Request] = []
        self._asked = 0

    def register(self) -> Register:
        """The server's own request to the scheduler, with the endpoint it listens on."""
        n = self.node
        self._asked += 1
        return Register(self.run, n.id, self._asked, n.endpoint(n.id), n.workers, n.servers)

    def handle(self, request: Request) -> list[Message]:
        """Answer a worker; the first request of a newer run clears the store."""
        if request.run < self.run:
            return [stale(request, self.run)]
        mine = self._begin(request.run) if request.run > self.run else []
        if self.store is None:
            self._early.append(request)
            return mine
        return [*mine, *self.store.handle(request)]

    def hear(self, answer: Answer) -> list[Message]:
        """Obey the scheduler.

        Raises:
            KVStoreError: it refuses this server.
        """
        match answer:
            case RollCall() if answer.run > self.run:
                return self._begin(answer.run)
            case AddressBook() if answer.run == self.run and self.store is None:
                return self._open(answer.mode)
            case Error():
                raise KVStoreError(answer.text)
        return []

    def _begin(self, run: int) -> list[Message]:
        self.run, self.store, self._early, self._asked = run, None, [], 0
        return [self.register()]

    def _open(self, mode: str) -> list[Message]:
        """Serve from now on, first those who were told before this server was."""
        sync = mode == "dist_sync"
        store = KVServer(self.node.workers if sync else 1, must_update=not sync, watch=self.watch)
        self.store, early, self._early = store, self._early, []
        return [answer for request in early for answer in store.handle(request)]
