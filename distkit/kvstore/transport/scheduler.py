"""The scheduler: sends every node the address book once all nodes have registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    INCARNATION_STRIDE,
    AddressBook,
    Barrier,
    Departed,
    Finished,
    Note,
    NoteStored,
    Register,
    Reply,
    Request,
    Response,
    error,
)
from distkit.kvstore.protocol.options import StoreOptions


class Scheduler:
    """Handles the registrations, barriers and exits of one run's nodes, without I/O.

    Node ids are 0 to W−1 for workers, and W to W+S−1 for servers.

    Args:
        workers: number of workers, W.
        servers: number of servers, S.
        on_start: called once all nodes have registered.

    >>> scheduler = Scheduler(workers=1, servers=1)
    >>> scheduler.handle(Register(1, 0, "ipc://server-port"))
    []
    >>> replies = scheduler.handle(Register(0, 0, "", StoreOptions("dist_sync")))
    >>> [(a.node, a.endpoints) for a in replies]
    [(0, {0: '', 1: 'ipc://server-port'}), (1, {0: '', 1: 'ipc://server-port'})]
    """

    def __init__(
        self,
        workers: int,
        servers: int,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers, self.servers, self.on_start = workers, servers, on_start
        self.started = False  # whether the address book has been sent
        self.options = StoreOptions()  # chosen by the first worker
        self.present: dict[int, Register] = {}  # nodes that have registered and not exited
        self.departed: dict[int, str] = {}  # cause of exit, until the node is replaced
        self.finished: set[int] = set()  # workers that have finished normally
        self.at_barrier: dict[int, Barrier] = {}
        self.barriers = 0  # number of barriers passed
        self._incarnations: Counter[int] = Counter()  # number of exits of each node
        self._notes: dict[str, str] = {}  # text that workers store for each other

    def handle(self, request: Request, server: int = 0) -> list[Response]:
        """Handle a request; return all responses that can now be sent. ``server`` is not used."""
        if request.number < INCARNATION_STRIDE * self._incarnations[request.node]:
            return []  # sent by a process that has exited
        try:
            match request:
                case Register():
                    return self._register(request)
                case Barrier():
                    self.at_barrier[request.node] = request
                    return self._release_barrier()
                case Finished():
                    return self._finish(request)
                case Note():
                    return [self._note(request)]
            raise KVStoreError(f"the scheduler cannot handle {type(request).__name__}.")
        except KVStoreError as e:
            return [error(request, e)]

    # -- registration -----------------------------------------------------------

    def _register(self, register: Register) -> list[Response]:
        node, incarnation = register.node, register.number // INCARNATION_STRIDE
        if register.options is not None:
            self._check_options(node, register.options)
        notices: list[Response] = []
        if incarnation > self._incarnations[node]:
            # the scheduler has not yet noticed that the node's previous process exited
            notices = self.handle_departure(node, incarnation - 1, "it was replaced")
        self.present[node] = register
        self.departed.pop(node, None)
        self.finished.discard(node)
        return [
            *notices,
            *([self._address_book(register)] if self.started else self._start_if_complete()),
        ]

    def _start_if_complete(self) -> list[Response]:
        """Return the address books once all required nodes are present."""
        if len(self.present) < self.workers + self.servers - len(self._excused_workers()):
            return []
        self.started = True
        self.on_start()
        return [self._address_book(self.present[node]) for node in sorted(self.present)]

    def _check_options(self, worker: int, options: StoreOptions) -> None:
        others = [n for n in sorted(self.present) if n < self.workers and n != worker]
        if others and options != self.options:
            raise KVStoreError(
                f"worker {worker} requests {options}, but worker {others[0]} "
                f"requested {self.options}. Create the same store on every worker."
            )
        self.options = options

    def _address_book(self, register: Register) -> AddressBook:
        endpoints = {node: self.present[node].endpoint for node in sorted(self.present)}
        return AddressBook(register.node, register.number, self.options, endpoints, self.barriers)

    # -- barrier ----------------------------------------------------------------

    def _release_barrier(self) -> list[Response]:
        """Release the barrier once all required workers have arrived."""
        requests = [self.at_barrier[n] for n in sorted(self.at_barrier)]
        expected = {*range(self.workers)} - self._excused_workers()
        if not requests or not self.at_barrier.keys() >= expected:
            return []
        self.at_barrier = {}
        self.barriers += 1
        return [Reply(b.node, b.number, self.barriers) for b in requests]

    # -- notes ------------------------------------------------------------------

    def _note(self, note: Note) -> NoteStored:
        if note.text is not None:
            self._notes[note.name] = note.text
        return NoteStored(note.node, note.number, self._notes.get(note.name, ""))

    # -- nodes that exit ---------------------------------------------------------

    def handle_departure(self, node: int, incarnation: int, cause: str) -> list[Response]:
        """Handle a node's exit.

        Return the exit notices, and responses to the requests that were waiting for this node.

        Servers are notified of every exit; workers are notified only when a server exits.

        Args:
            node: the node that has exited.
            incarnation: how many processes this node had before this one.
            cause: why it exited.
        """
        if incarnation < self._incarnations[node] or node in self.departed:
            return []
        self.present.pop(node, None)
        if node >= self.workers and not self.started:
            return []  # the cluster ends the run
        self._incarnations[node], self.departed[node] = incarnation + 1, cause
        self.at_barrier.pop(node, None)
        first = INCARNATION_STRIDE * self._incarnations[node]
        notices: list[Response] = [
            Departed(receiver, -1, node, cause, first)  # not a response to a request
            for receiver in (sorted(self.present) if self.started else ())
            if receiver >= self.workers or node >= self.workers
        ]
        return [*notices, *(self._release_barrier() if self.started else self._start_if_complete())]

    def _finish(self, request: Finished) -> list[Response]:
        """Handle a worker whose function has returned; barriers no longer wait for it."""
        self.finished.add(request.node)
        return [Reply(request.node, request.number), *self._release_barrier()]

    def _excused_workers(self) -> set[int]:
        """Return the workers that the others do not wait for."""
        if self.options.crash_effect == "continue":
            return {n for n in self.departed if n < self.workers}
        return self.finished
