"""A parameter server in one process: workers are threads, and servers are state machines.

A lock serializes the requests. Messages are encoded as on the wire, but need no socket.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from distkit.errors import KVStoreError
from distkit.kvstore.client.requests import Requests
from distkit.kvstore.client.worker import KVStore
from distkit.kvstore.protocol.messages import Barrier, Message, Reply, Request
from distkit.kvstore.protocol.options import BIGARRAY_BOUND, StoreOptions
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.wire import decode, encode

#: Time limit of a worker's wait for a reply [s].
TIMEOUT = 30.0

_Result = TypeVar("_Result")


class InProcess:
    """The servers of a store, and the scheduler's barrier.

    Args:
        workers: number of workers.
        servers: number of servers.
        mode: the store's name, such as "dist_sync".
        bound: minimum number of elements of an array that is split over all servers.

    >>> import torch
    >>> def add(kv):
    ...     kv.init("w", torch.zeros(1))
    ...     kv.push("w", torch.full((1,), kv.rank + 1.0))
    ...     return kv.pull("w").item()
    >>> InProcess(workers=2).run(add)
    [3.0, 3.0]
    """

    def __init__(
        self,
        workers: int = 1,
        servers: int = 1,
        mode: str = "dist_sync",
        bound: int = BIGARRAY_BOUND,
    ) -> None:
        options = StoreOptions(mode, bound)
        self.workers, self.options = workers, options
        self.nodes = {
            workers + i: KVServer(
                options.rule, range(workers), require_optimizer=not options.rule.has_rounds
            )
            for i in range(servers)
        }
        self.scheduler = workers + servers
        #: The receiver, the message and the size [bytes] of each request.
        self.requests: list[tuple[int, Request, int]] = []
        self.changed = threading.Condition()
        self.replies: dict[int, deque[Message]] = {w: deque() for w in range(workers)}
        self._waiting: list[Barrier] = []

    def store(self, rank: int = 0, **options: Any) -> KVStore:
        """Create the store of a worker."""
        link: Any = _Link(self, rank)
        return KVStore(
            Requests(link, rank),
            self.options,
            num_workers=self.workers,
            servers=sorted(self.nodes),
            scheduler=self.scheduler,
            **options,
        )

    def run(self, function: Callable[[KVStore], _Result], **options: Any) -> list[_Result]:
        """Run a function on every worker, each in a thread; return the results by rank."""
        with ThreadPoolExecutor(self.workers) as pool:
            stores = [self.store(rank, **options) for rank in range(self.workers)]
            return [f.result() for f in [pool.submit(function, kv) for kv in stores]]

    def handle(self, to: int, request: Request, nbytes: int) -> None:
        """Handle a request, and store the replies."""
        with self.changed:
            self.requests.append((to, request, nbytes))
            if isinstance(request, Barrier):
                self._enter_barrier(request)
            else:
                for reply in self.nodes[to].handle(request):
                    self.replies[reply.node].append(_round_trip(reply)[0])
            self.changed.notify_all()

    def _enter_barrier(self, barrier: Barrier) -> None:
        self._waiting.append(barrier)
        if len(self._waiting) == self.workers:
            for b in self._waiting:
                self.replies[b.node].append(Reply(b.node, b.number, b.nth + 1))
            self._waiting.clear()


class _Link:
    """A worker's link to the servers."""

    def __init__(self, servers: InProcess, rank: int) -> None:
        self._servers, self._rank, self._replies = servers, rank, servers.replies[rank]

    def send(self, node: int, requests: Sequence[Request], to: int) -> None:
        """Send requests; their replies are stored."""
        for request in requests:
            message, nbytes = _round_trip(request)
            assert isinstance(message, Request)
            self._servers.handle(to, message, nbytes)

    def receive(self, *, wait: bool) -> list[Message]:
        """Return the stored replies; with ``wait``, first wait until there is one."""
        servers, mine = self._servers, self._replies
        with servers.changed:
            if not servers.changed.wait_for(lambda: mine or not wait, TIMEOUT):
                raise KVStoreError(f"worker {self._rank} has waited {TIMEOUT:g} s for a reply.")
            found = list(mine)
            mine.clear()
            return found

    def close(self) -> None:
        """Do nothing, because there are no connections."""


def _round_trip(message: Message) -> tuple[Message, int]:
    """Encode and decode a message; return the result and the encoded size [bytes]."""
    header, body = encode(message)
    received = bytearray(b"".join(body))
    return decode(header, received).messages[0], len(header) + len(received)
