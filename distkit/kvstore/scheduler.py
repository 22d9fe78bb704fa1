"""The scheduler: waits until every node has said who and where it is, then tells all about all."""

from __future__ import annotations

from collections import Counter

from distkit.errors import KVStoreError
from distkit.kvstore.consistency import Terms
from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Barrier,
    Departed,
    Error,
    Leave,
    Register,
    Reply,
    Request,
    RollCall,
    error,
    stale,
)

#: A worker that takes a dead one's place counts its requests from here, the next from twice that.
LIFE = 1 << 40


class Scheduler:
    """Registration and barriers of one cluster, run after run: messages in, answers out, no I/O.

    Node ids are 0 to W−1 for workers, W to W+S−1 for servers. The first request of a newer run
    clears everything and calls the servers to register again.

    Args:
        workers: how many there are, W.
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
        self._callable: set[int] = set()  # servers that have ever been heard
        self._clear()

    def _clear(self) -> None:
        self.begun = False  # enough were there, and were told
        self.terms: Terms | None = None  # as the first worker said
        self.present: dict[int, Register] = {}  # who has registered for this run
        self.gone: dict[int, str] = {}  # who has ended, and how
        self.at_barrier: dict[int, Barrier] = {}
        self._passed: dict[int, int] = {}  # number of each worker's last barrier
        self._lives: Counter[int] = Counter()  # how often each worker has ended

    def handle(self, request: Request) -> list[Answer]:
        """Answers to this request, and to others that waited for it."""
        calls = self._begin(request.run) if request.run > self.run else []
        try:
            return [*calls, *self._handle(request)]
        except KVStoreError as refusal:
            return [*calls, error(request, refusal)]

    def _handle(self, request: Request) -> list[Answer]:
        is_server = request.node >= self.workers
        if isinstance(request, Register) and is_server:
            self._callable.add(request.node)
        if request.run < self.run:
            return [self._call(request.node) if is_server else stale(request, self.run)]
        match request:
            case Register():
                return self._register(request)
            case Barrier():
                return self._barrier(request)
            case Leave():
                return self._leave(request)
        raise KVStoreError(f"the scheduler has no answer to {type(request).__name__}.")

    def _begin(self, run: int) -> list[Answer]:
        """A newer run: forget the last one and call the roll."""
        waiting = [*self._unanswered(), *self.at_barrier.values()]
        late = [Error(r.run, r.node, r.number, stale(r, run).text)
                for r in waiting if r.node < self.workers]  # fmt: skip
        self.run = run
        self._clear()
        return [*late, *map(self._call, sorted(self._callable))]

    def _call(self, server: int) -> RollCall:
        return RollCall(self.run, server, 0)

    # -- registration -----------------------------------------------------------

    def _register(self, register: Register) -> list[Answer]:
        self._check(register)
        self.present[register.node] = register
        self.gone.pop(register.node, None)
        if not self.begun:
            return self._introduce()
        if register.node < self.workers:
            return [self._book(register)]
        return [self._book(register), *(self._departed(register.node, n) for n in self.gone)]

    def _introduce(self) -> list[Answer]:
        """Tell all about all, as soon as enough are there; or that this cannot be."""
        dead = [n for n in self.gone if n >= self.workers or self._halts()]
        if dead and self.terms is not None:
            text = self._missing("the beginning", dead)
            return [error(r, text) for r in self._waiting_workers()]
        if not self._complete():
            return []
        self.begun = True
        return [self._book(self.present[node]) for node in sorted(self.present)]

    def _check(self, register: Register) -> None:
        expects = register.workers, register.servers
        if expects != (self.workers, self.servers):
            raise KVStoreError(
                f"node {register.node} expects {expects[0]} workers and {expects[1]} servers, "
                f"but this cluster has {self.workers} and {self.servers}. "
                "Start every node with the same numbers."
            )
        if register.node >= self.workers:
            return
        terms = Terms.of(register.mode, register.bound, register.terms)
        terms.fit(self.workers, self.servers)
        others = [n for n in self.present if n < self.workers and n != register.node]
        if others and terms != self.terms:
            raise KVStoreError(
                f"worker {register.node} asks for {terms}, but worker {others[0]} for "
                f"{self.terms}. Create the same store on every worker."
            )
        self.terms = terms

    def _working(self) -> list[int]:
        """The workers that have registered and not ended."""
        return [n for n in sorted(self.present) if n < self.workers]

    def _complete(self) -> bool:
        if self.terms is None:
            return False
        wanted = self.terms.wait_for or self.workers
        if self.terms.spares:
            wanted = min(wanted, self.workers - sum(n < self.workers for n in self.gone))
        workers = len(self._working())
        return workers >= wanted and len(self.present) - workers == self.servers

    def _unanswered(self) -> list[Register]:
        return [] if self.begun else list(self.present.values())

    def _book(self, register: Register) -> AddressBook:
        assert self.terms is not None
        endpoints = {node: self.present[node].endpoint for node in sorted(self.present)}
        return AddressBook(
            register.run, register.node, register.number, self.terms.mode, self.terms.bound,
            endpoints, self.terms.numbers(), LIFE * self._lives[register.node],
        )  # fmt: skip

    # -- barrier ----------------------------------------------------------------

    def _barrier(self, barrier: Barrier) -> list[Answer]:
        if self._passed.get(barrier.node) == barrier.number:
            return [_done(barrier)]
        self.at_barrier[barrier.node] = barrier
        return self._pass()

    def _pass(self) -> list[Answer]:
        """Let them go on if all are there; tell them if that can never be."""
        waiting = [self.at_barrier[n] for n in sorted(self.at_barrier)]
        dead = [w for w in self.gone if w < self.workers]
        if dead and self._halts():
            self.at_barrier = {}
            return [error(b, self._missing("barrier", dead)) for b in waiting]
        spares = self.terms is None or self.terms.spares
        awaited = {*self._working(), *(() if spares else dead)}
        if not waiting or not self.at_barrier.keys() >= awaited:
            return []
        self.at_barrier = {}
        self._passed |= {b.node: b.number for b in waiting}
        return [_done(b) for b in waiting]

    # -- nodes that end ---------------------------------------------------------

    def _leave(self, leave: Leave) -> list[Answer]:
        """Tell the servers, and those who would wait for ever."""
        node = leave.node
        if node >= self.workers and node not in self.present:
            return []  # one of an earlier run: another may be on its way
        self.gone[node] = leave.how
        self.present.pop(node, None)
        self.at_barrier.pop(node, None)
        self._lives[node] += 1
        told = [self._departed(server, node) for server in sorted(self._callable - {node})]
        if self.begun:
            return [*told, *self._pass()]
        return [*told, *self._introduce()]

    def _departed(self, server: int, who: int) -> Departed:
        return Departed(self.run, server, 0, who, self.gone[who], LIFE * self._lives[who])

    def _waiting_workers(self) -> list[Register]:
        """Those who wait for the beginning: they are refused, and may come again."""
        return [self.present.pop(n) for n in self._working()]

    def _halts(self) -> bool:
        """Whether the others are told when a worker ends, and do not go on."""
        return self.terms is not None and not self.terms.spares and self.terms.on_crash == "halt"

    def _missing(self, what: str, nodes: list[int]) -> str:
        names = " and ".join(f"{self._name(n)} ({self.gone[n]})" for n in sorted(nodes))
        said = f"{what} waits for {names}, which has ended."
        if max(nodes) >= self.workers:
            return f"{said} Run again: another has its place then."
        return (
            f'{said} To go on with the others, create the store with on_crash="continue"; to have '
            'another worker take its place, with on_crash="replace".'
        )

    def _name(self, node: int) -> str:
        return f"worker {node}" if node < self.workers else f"server {node - self.workers}"


def _done(request: Request) -> Reply:
    return Reply(request.run, request.node, request.number)
