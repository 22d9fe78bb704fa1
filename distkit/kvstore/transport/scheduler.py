"""The scheduler: waits until every node has said who and where it is, then tells all about all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import (
    AddressBook,
    Answer,
    Appointed,
    Barrier,
    Copied,
    Departed,
    Error,
    Joined,
    Leave,
    Missed,
    Note,
    Noted,
    Present,
    Register,
    Replaced,
    Reply,
    Request,
    RollCall,
    ended,
    error,
    given_up,
    stale,
)
from distkit.kvstore.protocol.replication import ring
from distkit.kvstore.protocol.terms import Terms

#: The number of what nobody has asked for.
_UNASKED = -1

#: A worker that takes a dead one's place counts its requests from here, the next from twice that.
LIFE = 1 << 40


class Scheduler:
    """Registration and barriers of one cluster, run after run: messages in, answers out, no I/O.

    Node ids are 0 to W−1 for workers, W to W+S−1 for servers; a server that comes in the middle
    of a run, in a dead one's place, has its place's id + S + 1 (see :meth:`asker`). The first
    request of a newer run clears everything and calls the servers to register again. ``changed``
    says whether there is something new in its :meth:`journal`, from which another can go on in its
    place.

    Args:
        workers: how many there are, W.
        servers: how many must register, S.
        run: number of the present run.

    >>> scheduler = Scheduler(workers=1, servers=1)
    >>> scheduler.handle(Register(0, 1, 0, "ipc://port-of-the-server", 1, 1))
    []
    >>> [(a.node, a.endpoints) for a in
    ...  scheduler.handle(Register(0, 0, 0, "", 1, 1, Terms("dist_sync")))]
    [(0, {0: '', 1: 'ipc://port-of-the-server'}), (1, {0: '', 1: 'ipc://port-of-the-server'})]
    """

    def __init__(self, workers: int, servers: int, run: int = 0) -> None:
        self.workers, self.servers, self.run = workers, servers, run
        self.changed = False
        #: Called with the place of a process that is taken for dead, its pid, and how it was lost:
        #: it may know better.
        self.lost: Callable[[int, int, str], str] = lambda node, pid, how: how
        self._callable: set[int] = set()  # servers that have ever been heard
        self._clear()

    def _clear(self) -> None:
        self.changed = True
        self.begun = False  # enough were there, and were told
        self.terms: Terms | None = None  # as the first worker said
        self.present: dict[int, Register] = {}  # who has registered for this run
        self.gone: dict[int, str] = {}  # who has ended, and how; nobody has its place yet
        self._ends: dict[int, str] = {}  # the same since the beginning, whoever has the place
        self.parted: set[int] = set()  # who has hung up in order
        self.at_barrier: dict[int, Barrier] = {}
        self._passed: dict[int, int] = {}  # number of each worker's last barrier
        self.barriers = 0  # how many were passed
        self._lives: Counter[int] = Counter()  # how often each node has ended
        #: By server, the processes that have all of its values: the first of them serves.
        self.copies: dict[int, list[int]] = {}
        self._heirs: dict[int, int] = {}  # by place, the process that serves there for another
        self._addresses: dict[int, str] = {}  # of servers' places, whoever serves there
        self._notes: dict[str, str] = {}  # what workers tell each other

    def journal(self) -> dict[str, Any]:
        """All that another in its place must know; what was not answered is asked again."""
        self.changed, terms = False, self.terms
        present = self.present.items() if self.begun else ()
        return {
            "run": self.run,
            "begun": self.begun,
            "callable": sorted(self._callable),
            "terms": terms and asdict(terms),
            "present": [[n, r.endpoint, r.pid] for n, r in present],
            "gone": list(self.gone.items()),
            "ends": list(self._ends.items()),
            "lives": list(self._lives.items()),
            "passed": list(self._passed.items()),
            "parted": sorted(self.parted),
            "barriers": self.barriers,
            "copies": list(self.copies.items()),
            "heirs": list(self._heirs.items()),
            "addresses": list(self._addresses.items()),
            "notes": self._notes,
        }

    def resume(self, journal: dict[str, Any]) -> None:
        """Go on where another has stopped."""
        self.run, self._callable = journal["run"], set(journal["callable"])
        self._clear()
        self.begun = journal["begun"]
        self.terms = journal["terms"] and Terms(**journal["terms"])
        self.present = {n: self._place(n, *where) for n, *where in journal["present"]}
        self.gone, self._ends = dict(journal["gone"]), dict(journal["ends"])
        self._passed, self.barriers = dict(journal["passed"]), journal["barriers"]
        self._lives, self.parted = Counter(dict(journal["lives"])), set(journal["parted"])
        self.copies, self._addresses = dict(journal["copies"]), dict(journal["addresses"])
        self._heirs = dict(journal["heirs"])
        self._notes = dict(journal["notes"])

    def _place(self, node: int, endpoint: str, pid: int) -> Register:
        return Register(self.run, node, 0, endpoint, self.workers, self.servers, pid=pid)

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
        if self.late(request):
            return [given_up(request, self._name(request.node))]
        match request:
            case Register():
                return self._register(request)
            case Present():
                return self._greet(request)
            case Missed():
                return self._miss(request)
            case Copied():
                return self._copied(request)
            case Barrier():
                return self._barrier(request)
            case Leave():
                return self._leave(request)
            case Note():
                return [self._note(request)]
        raise KVStoreError(f"the scheduler has no answer to {type(request).__name__}.")

    def late(self, request: Request) -> bool:
        """True if a node that was taken for dead still says something."""
        said = request.run == self.run and not isinstance(request, (Register, Leave))
        return said and request.number < LIFE * self._lives[request.node]

    def _begin(self, run: int) -> list[Answer]:
        """A newer run: forget the last one and call the roll."""
        unanswered = [] if self.begun else self.present.values()
        waiting = [*unanswered, *self.at_barrier.values()]
        late = [
            Error(r.run, r.node, r.number, stale(r, run).text)
            for r in waiting
            if r.node < self.workers
        ]
        self.run = run
        self._clear()
        return [*late, *map(self._call, sorted(self._callable))]

    def _call(self, server: int) -> RollCall:
        return RollCall(self.run, server, 0)

    # -- registration -----------------------------------------------------------

    def _register(self, register: Register) -> list[Answer]:
        self._check(register)
        node, life = register.node, register.number // LIFE
        told: list[Answer] = []
        before = self.present.get(node)
        another = self.seat(node) != node and before is not None and before.pid != register.pid
        if another or (before is not None and life > self._lives[node]):  # quicker than bad news
            told = self._leave(Leave(self.run, node, 0, "it was replaced"))
        self._lives[node] = max(self._lives[node], life)
        self.present[node], self.changed = register, True
        self.gone.pop(node, None)
        self.parted.discard(node)
        if not self.begun:
            return [*told, *self._introduce()]
        return [*told, self._book(register), *self._news(node), *self._invite(node)]

    def asker(self, request: Request) -> int:
        """The id that a request's node has here.

        A server that comes in the middle of a run, when its place was lost, is a *stand-in*: it
        has an id of its own, since another may serve in that place.
        """
        node = request.node
        if not isinstance(request, Register) or node < self.workers or request.run > self.run:
            return node
        there = self.present.get(node)
        another = there is not None and there.pid != request.pid  # quicker than the bad news
        taken = self.begun and (another or self._lives[node])
        return node + self.servers + 1 if taken else node

    def seat(self, process: int) -> int:
        """The place of a server's process, stand-in or not, in the rings of copies."""
        return process - self.servers - 1 if process > self.workers + self.servers else process

    def _invite(self, process: int) -> list[Answer]:
        """Have copies made for a stand-in of all that its place should have."""
        if process <= self.workers + self.servers or process not in self.present:
            return []
        assert self.terms is not None
        first, endpoint = LIFE * self._lives[process], self.present[process].endpoint
        return [
            Joined(self.run, n, _UNASKED, process, endpoint, first)
            for n, holders in self.copies.items()
            if n in self.present and process not in holders and self.seat(process) in self._ring(n)
        ]

    def _ring(self, server: int) -> list[int]:
        assert self.terms is not None
        places = ring(server - self.workers, self.servers, self.terms.replication)
        return [self.workers + n for n in places]

    def _copied(self, copied: Copied) -> list[Answer]:
        """One more has all values of a server: unless it has ended meanwhile."""
        who, holders = copied.who, self.copies.get(copied.node, [])
        there = who in self.present and copied.first == LIFE * self._lives[who]
        if there and self.seat(who) != who and holders and who not in holders:
            holders.append(who)
            self.changed = True
        return []

    def _appoint(self) -> list[Answer]:
        """Have those who have copies serve in the places of those who have ended."""
        return [
            Appointed(
                self.run,
                holders[0],
                _UNASKED,
                n,
                LIFE * self._lives[n],
                {n: self._addresses[n]} | {h: self.present[h].endpoint for h in holders[1:]},
            )
            for n, holders in self.copies.items()
            if n in self.gone and holders
        ]

    def _greet(self, present: Present) -> list[Answer]:
        """One that this run has already, or one that has taken a server's place.

        It gets news instead of an answer, whose number could be that of a copy under way.
        """
        node = present.node
        told: list[Answer] = []
        if node in self.gone and node >= self.workers:
            del self.gone[node]
            self._heirs[node] = next(iter(self.copies.get(node, ())), node)
            told = [self._replaced(w, node, present.endpoint) for w in self._working()]
        self._lives[node] = max(self._lives[node], present.number // LIFE)
        place = self._place(node, present.endpoint, present.pid)
        self.present[node] = replace(self.present.get(node, place), pid=present.pid)
        self.changed = True
        invited = [a for n in sorted(self.present) for a in self._invite(n) if a.node == node]
        return [*self._news(node), *told, *invited]

    def _replaced(self, worker: int, server: int, endpoint: str) -> Replaced:
        return Replaced(self.run, worker, _UNASKED, server, endpoint)

    def missing(self, alive: Callable[[int, int], bool]) -> list[int]:
        """The nodes whose processes are not alive, when another scheduler has just begun."""
        return [n for n, r in self.present.items() if r.pid and not alive(self._home(n), r.pid)]

    def _home(self, node: int) -> int:
        """The place of the process that serves as a node: its pid is of that place's host."""
        return self.seat(self._heirs.get(node, node))

    def _news(self, node: int) -> list[Answer]:
        """The news that a node may have missed."""
        if node < self.workers:
            moved = [
                self._replaced(node, n, self.present[n].endpoint)
                for n, before in self._addresses.items()
                if n in self.present and self.present[n].endpoint != before
            ]
            return [*moved, *(self._departed(node, n) for n in self._lost())]
        stood_in = {n for n in self.present if self.seat(n) != n}  # a life before counts no more
        ends = [self._departed(node, n) for n in sorted(self._ends.keys() - {node} - stood_in)]
        return [*ends, *(a for a in self._appoint() if a.node == node)]

    def _introduce(self) -> list[Answer]:
        """Tell all about all, as soon as enough are there; or that this cannot be.

        In the place of a server that has ended another may be on its way.
        """
        dead = [n for n in self.gone if n < self.workers and self._halts()]
        if dead:
            return self._refuse_to_begin(dead)
        if not self._complete():
            return []
        self.begun, self._ends = True, {}
        servers = [n for n in self.present if n >= self.workers]
        self.copies = {n: self._ring(n) for n in servers}
        self._addresses = {n: self.present[n].endpoint for n in servers}
        return [self._book(self.present[node]) for node in sorted(self.present)]

    @property
    def lacks_servers(self) -> bool:
        """True if workers wait for the beginning, and servers have ended before it."""
        ended = any(n >= self.workers for n in self.gone)
        return ended and not self.begun and bool(self._working())

    def give_up_servers(self) -> list[Answer]:
        """Nobody has come for long in the places of the servers that have ended."""
        return self._refuse_to_begin([n for n in self.gone if n >= self.workers])

    def _refuse_to_begin(self, dead: list[int]) -> list[Answer]:
        """Those who wait for the beginning are refused, and may come again."""
        text = self._missing("the beginning", dead)
        return [error(self.present.pop(n), text) for n in self._working()]

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
        terms = register.terms
        if terms is None:
            raise KVStoreError(f"worker {register.node} has not told what store it creates.")
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

    def _book(self, register: Register) -> AddressBook:
        assert self.terms is not None
        endpoints = {node: self.present[node].endpoint for node in sorted(self.present)}
        return AddressBook(
            register.run,
            register.node,
            register.number,
            self.terms,
            endpoints,
            LIFE * self._lives[register.node],
            self.barriers,
        )

    # -- barrier ----------------------------------------------------------------

    def _barrier(self, barrier: Barrier) -> list[Answer]:
        if self._passed.get(barrier.node) == barrier.number:
            return [self._done(barrier)]
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
        if self.terms is not None and self.terms.elastic:
            awaited -= self.parted
        if not waiting or not self.at_barrier.keys() >= awaited:
            return []
        self.at_barrier, self.changed = {}, True
        self._passed |= {b.node: b.number for b in waiting}
        self.barriers += 1
        return [self._done(b) for b in waiting]

    def _done(self, barrier: Barrier) -> Reply:
        return Reply(barrier.run, barrier.node, barrier.number, self.barriers)

    def _note(self, note: Note) -> Noted:
        if note.text is not None:
            self._notes[note.name], self.changed = note.text, True
        return Noted(note.run, note.node, note.number, self._notes.get(note.name, ""))

    # -- nodes that end ---------------------------------------------------------

    def _leave(self, leave: Leave) -> list[Answer]:
        """Tell the servers, and those who would wait for ever."""
        node = leave.node
        if node not in self.present and (node >= self.workers or node in self.gone):
            return []  # known, or one of an earlier run: another may be on its way
        if 0 < leave.number < LIFE * self._lives[node]:
            return []  # of an earlier life
        there = self.present.pop(node, None)
        how = leave.how if there is None else self.lost(self._home(node), there.pid, leave.how)
        self._heirs.pop(node, None)
        self._ends[node] = how
        if self.seat(node) == node:  # nobody misses a stand-in
            self.gone[node] = how
        for holders in self.copies.values():
            if node in holders:
                holders.remove(node)
        self.changed = True
        self.at_barrier.pop(node, None)
        self._lives[node] += 1
        told: list[Answer] = []
        told += [self._departed(server, node) for server in sorted(self._callable - {node})]
        told += self._appoint()
        told += [self._departed(w, lost) for lost in self._lost() for w in self._working()]
        if self.begun:
            return [*told, *self._pass()]
        return [*told, *self._introduce()]

    def _miss(self, missed: Missed) -> list[Answer]:
        """A server has noticed; perhaps alone, if this scheduler was not there yet."""
        who = missed.who
        if who in self.parted or missed.last < LIFE * self._lives[who]:
            return []
        return self._leave(Leave(self.run, who, 0, missed.how))

    def bye(self, node: int, run: int, last: int) -> list[Answer]:
        """A node of this run hangs up in order: this life of it will not be missed."""
        if run != self.run or node not in self.present:
            return []
        self.changed = True
        self.parted.add(node)
        return self._pass() if self.begun else []

    def _departed(self, to: int, who: int) -> Departed:
        return Departed(self.run, to, _UNASKED, who, self._ends[who], LIFE * self._lives[who])

    def _lost(self) -> list[int]:
        """The servers that have ended and whose values nobody has."""
        return [n for n, holders in self.copies.items() if n in self.gone and not holders]

    def _halts(self) -> bool:
        """True if the others are told when a worker ends, and do not go on."""
        return self.terms is not None and not self.terms.spares and self.terms.on_crash == "halt"

    def _missing(self, what: str, nodes: list[int]) -> str:
        names = " and ".join(f"{self._name(n)}, which {ended(self.gone[n])}" for n in sorted(nodes))
        said = f"{what} waits for {names}."
        if max(nodes) >= self.workers:
            return f"{said} Run again: it is replaced then."
        return (
            f'{said} To continue with the others, create the store with on_crash="continue"; to '
            f'replace it, with on_crash="replace".'
        )

    def _name(self, node: int) -> str:
        if node < self.workers:
            return f"worker {node}"
        return f"server {self.seat(node) - self.workers}"
