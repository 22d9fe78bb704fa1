"""The scheduler: waits until every node has said who and where it is, then tells all about all."""

from __future__ import annotations

from distkit.errors import KVStoreError
from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Barrier,
    Error,
    Register,
    Reply,
    Request,
    RollCall,
    error,
    stale,
)


class Scheduler:
    """Registration and barriers of one cluster, run after run: messages in, answers out, no I/O.

    Node ids are 0 to W−1 for workers, W to W+S−1 for servers. The first request of a newer run
    clears everything and calls the servers to register again.

    Args:
        workers: how many must register, W.
        servers: how many must register, S.
        run: number of the present run.

    >>> scheduler = Scheduler(workers=1, servers=1)
    >>> scheduler.handle(Register(0, 1, 0, "ipc://port-of-the-server", 1, 1))
    []
    >>> [(a.node, a.endpoints) for a in
    ...  scheduler.handle(Register(0, 0, 0, "", 1, 1, mode="dist_sync"))]
    [(0, {0: '', 1: 'ipc://port-of-the-server'}), (1, {0: '', 1: 'ipc://port-of-the-server'})]
    """

    def __init__(self, workers: int, servers: int, run: int = 0) -> None:
        self.workers, self.servers, self.run = workers, servers, run
        self.present: dict[int, Register] = {}  # who has registered for this run
        self.at_barrier: dict[int, Barrier] = {}
        self._callable: set[int] = set()  # servers that have ever been heard

    def handle(self, request: Request) -> list[Answer]:
        """Answers to this request, and to others that waited for it."""
        calls = self._begin(request.run) if request.run > self.run else []
        try:
            return [*calls, *self._handle(request)]
        except KVStoreError as refusal:
            return [*calls, error(request, refusal)]

    def _handle(self, request: Request) -> list[Answer]:
        is_server = request.node >= self.workers
        if is_server:
            self._callable.add(request.node)
        if request.run < self.run:
            return [self._call(request.node) if is_server else stale(request, self.run)]
        match request:
            case Register():
                return self._register(request)
            case Barrier():
                return self._barrier(request)
        raise KVStoreError(f"the scheduler has no answer to {type(request).__name__}.")

    def _begin(self, run: int) -> list[Answer]:
        """A newer run: forget the last one and call the roll."""
        late = [
            Error(r.run, r.node, r.number, stale(r, run).text)
            for r in (*self._unanswered(), *self.at_barrier.values())
            if r.node < self.workers
        ]
        self.run, self.present, self.at_barrier = run, {}, {}
        return [*late, *map(self._call, sorted(self._callable))]

    def _call(self, server: int) -> RollCall:
        return RollCall(self.run, server, 0)

    # -- registration -----------------------------------------------------------

    def _register(self, register: Register) -> list[Answer]:
        self._check(register)
        was_complete = self._complete()
        self.present[register.node] = register
        if not self._complete():
            return []
        told = [register] if was_complete else self.present.values()
        return [self._book(r) for r in sorted(told, key=lambda r: r.node)]

    def _check(self, register: Register) -> None:
        expects = register.workers, register.servers
        if expects != (self.workers, self.servers):
            raise KVStoreError(
                f"node {register.node} expects {expects[0]} workers and {expects[1]} servers, "
                f"but this cluster has {self.workers} and {self.servers}. "
                "Start every node with the same numbers."
            )
        first = self._first_worker(besides=register.node)
        if first is None or register.node >= self.workers:
            return
        if (register.mode, register.bound) != (first.mode, first.bound):
            raise KVStoreError(
                f'worker {register.node} asks for "{register.mode}" (bigarray_bound '
                f'{register.bound}), but worker {first.node} for "{first.mode}" '
                f"({first.bound}). Create the same store on every worker."
            )

    def _first_worker(self, besides: int | None = None) -> Register | None:
        workers = (r for n, r in self.present.items() if n < self.workers and n != besides)
        return next(workers, None)

    def _complete(self) -> bool:
        return len(self.present) == self.workers + self.servers

    def _unanswered(self) -> list[Register]:
        return [] if self._complete() else list(self.present.values())

    def _book(self, register: Register) -> AddressBook:
        first = self._first_worker()
        assert first is not None
        endpoints = {node: self.present[node].endpoint for node in sorted(self.present)}
        return AddressBook(
            register.run, register.node, register.number, first.mode, first.bound, endpoints
        )

    # -- barrier ----------------------------------------------------------------

    def _barrier(self, barrier: Barrier) -> list[Answer]:
        self.at_barrier[barrier.node] = barrier
        if len(self.at_barrier) < self.workers:
            return []
        passed, self.at_barrier = self.at_barrier, {}
        return [Reply(b.run, b.node, b.number) for _, b in sorted(passed.items())]
