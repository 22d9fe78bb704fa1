"""Schedules of faults: does each acknowledged push count exactly once?

The scheduler, servers and their backups are here as state machines, the connections between them
as queues, and a schedule says what happens next: to any of them, at any time, over several runs.
The rules: each acknowledged push counts exactly once, on the server and on its backup; nobody
waits for ever; what is lost is told to every worker.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque

import torch

from distkit.kvstore.protocol.messages import (
    AddressBook,
    Answer,
    Barrier,
    Copy,
    Departed,
    Error,
    Init,
    Leave,
    Message,
    Pull,
    Push,
    Register,
    Reply,
    Request,
    SetOptimizer,
)
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.terms import Terms
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession, backup_of

#: Workers and servers, the servers' ids, and the scheduler's.
W, S = 2, 3
SERVERS = range(W, W + S)
CHIEF = W + S
MODES = ("dist_sync", "dist_async")

#: How much happens in a random schedule.
LENGTH = 40


class Network:
    """Processes, and connections that each keep their order, and nothing else.

    ``lines`` has what is under way, by sender and receiver, each with the server that it is for;
    ``heard`` what came to each worker.
    """

    def __init__(self, mode: str, replication: int, on_crash: str = "continue") -> None:
        self.terms = Terms(mode, 100, replication=replication, on_crash=on_crash)
        self.chief, self.run = Scheduler(W, S), 0
        self.sessions: dict[int, ServerSession] = {}
        self.lines: dict[tuple[int, int], deque[tuple[Message, int]]] = defaultdict(deque)
        self.heard: dict[int, list[Message]] = defaultdict(list)
        self.begin()

    def begin(self) -> None:
        """All that are missing come, and register for the run."""
        for n in SERVERS:
            if n not in self.sessions:
                self.sessions[n] = ServerSession(Node("server", n - W, W, S, "f", run=self.run))
                self.send(n, CHIEF, self.sessions[n].register())
        for worker in range(W):
            self.send(worker, CHIEF, Register(self.run, worker, 0, "", self.terms))
        self.deliver_all()
        self.heard.clear()

    def send(self, src: int, dst: int, message: Message, to: int = 0) -> None:
        """Put a message on its way; one to a server that has ended is lost."""
        if dst in self.sessions or dst not in SERVERS:
            self.lines[src, dst].append((message, to))

    @property
    def busy(self) -> list[tuple[int, int]]:
        """The connections that have something under way."""
        return [line for line, queue in self.lines.items() if queue]

    def deliver(self, line: tuple[int, int]) -> None:
        """The next message of a connection."""
        (message, to), (_, dst) = self.lines[line].popleft(), line
        if dst < W:
            self.heard[dst].append(message)
        elif dst == CHIEF:
            assert isinstance(message, Request)
            for answer in self.chief.handle(message):
                self.send(CHIEF, answer.node, answer)
        elif isinstance(message, Request):
            self._say(dst, self.sessions[dst].handle(message, to))
        elif isinstance(message, Answer):
            self._say(dst, self.sessions[dst].hear(message))

    def _say(self, server: int, said: list[Message]) -> None:
        for m in said:
            if isinstance(m, Copy):
                self.send(server, W + backup_of(server - W, S), m)
            else:
                self.send(server, CHIEF if isinstance(m, Request) else m.node, m)

    def deliver_all(self) -> None:
        """All that is under way, and all that comes of it."""
        while lines := self.busy:
            self.deliver(lines[0])

    def crash(self, server: int) -> None:
        """A server's process ends: what was under way to it is lost, what it has sent arrives."""
        del self.sessions[server]
        for src, dst in [*self.lines]:
            if dst == server:
                self.lines[src, dst].clear()
        self.send(server, CHIEF, Leave(self.run, server, 0, "signal SIGKILL", 0))

    def leave(self, worker: int) -> None:
        """A worker's process ends."""
        self.send(worker, CHIEF, Leave(self.run, worker, 0, "signal SIGKILL", 0))

    def store(self, server: int) -> KVServer | None:
        """Who serves these values."""
        return next((s.stores[server] for s in self.sessions.values() if server in s.stores), None)

    def replica(self, server: int) -> KVServer | None:
        """The copy of these values."""
        found = (s.replicas.get(server) for s in self.sessions.values())
        return next(filter(None, found), None)


def held(store: KVServer | None, key: str) -> float:
    """All that it has of what was pushed, applied or waiting for its round; NaN without the key."""
    if store is None or key not in store.entries:
        return math.nan
    entry = store.entries[key]
    waiting = [p.value for arrived in entry.rounds.values() for p in arrived.values()]
    return float(entry.value + sum(waiting))


class Schedule:
    """Workers push to every server, each push a bit of its own; beside it, what they pushed."""

    def __init__(self, mode: str, replication: int) -> None:
        self.net, self.replication = Network(mode, replication), replication
        self.wrong: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self.workers = list(range(W))
        self.numbers = Counter[int]()
        self.sent: dict[tuple[int, int], tuple[int, Push]] = {}
        self.open: dict[tuple[int, int], tuple[int, Request]] = {}  # not answered
        self.serving = {(w, s): s for w in range(W) for s in SERVERS}
        self.lost: list[set[int]] = [set() for _ in range(W)]  # servers, as each worker heard
        self.dead: list[set[int]] = [set() for _ in range(W)]
        for server in SERVERS:
            for worker in range(W):
                value = torch.zeros(1, dtype=torch.float64) if worker == 0 else None
                self._ask(worker, server, SetOptimizer, "sgd", {"learning_rate": -1.0})
                self._ask(worker, server, Init, f"w{server}", (1,), "float64", value)
        self._settle()

    def _ask(self, worker: int, server: int, kind: type[Request], *fields: object) -> Request:
        request = kind(self.net.run, worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        self.open[worker, request.number] = server, request
        to = self.serving.get((worker, server), server)
        self.net.send(worker, to, request, server)
        return request

    # -- what may happen ---------------------------------------------------------

    def push(self, worker: int, server: int, *, pulls: bool = False) -> None:
        """A worker pushes a number that nobody else pushes; with it, it may pull."""
        if worker not in self.workers:
            return
        value = torch.full((1,), 2.0 ** len(self.sent), dtype=torch.float64)
        push = self._ask(worker, server, Push, f"w{server}", (1,), 0, value)
        assert isinstance(push, Push)
        self.sent[worker, push.number] = server, push
        if pulls:
            self.pull(worker, server)

    def pull(self, worker: int, server: int) -> None:
        """A worker pulls; it may have to wait."""
        if worker in self.workers:
            request = self._ask(worker, server, Pull, f"w{server}")
            del self.open[worker, request.number]

    def deliver(self, rng: random.Random, count: int) -> None:
        """Some messages arrive, of any connections."""
        for _ in range(count):
            if lines := sorted(self.net.busy):
                self.net.deliver(rng.choice(lines))
        self._hear()

    def crash(self, rng: random.Random) -> None:
        """A server's process ends."""
        if len(self.net.sessions) > 1:
            self.net.crash(rng.choice(sorted(self.net.sessions)))

    def leave(self, worker: int) -> None:
        """A worker ends, if it is not the last."""
        if worker in self.workers and len(self.workers) > 1:
            self.workers.remove(worker)
            self.net.leave(worker)

    def again(self) -> None:
        """The run comes to its end, and another begins on the same cluster."""
        self.end()
        self.net.run += 1
        self.net.begin()
        self._begin()

    # -- what must come of it ----------------------------------------------------

    def end(self) -> list[str]:
        """All messages arrive; what is wrong then: nothing."""
        for worker in self.workers:
            self._ask(worker, CHIEF, Barrier, 0)
        self._settle()
        gone = {n for n in SERVERS if self.net.store(n) is None}
        for worker in self.workers:
            late = [n for (w, n), (s, _) in self.open.items() if w == worker and s not in gone]
            if late:
                self.wrong.append(f"worker {worker} has no answer to {late}")
            if self.lost[worker] != gone:
                self.wrong.append(f"worker {worker} hears {self.lost[worker]} of {gone}")
        for server in {*SERVERS} - gone:
            self._check(server)
        return self.wrong

    def _check(self, server: int) -> None:
        """A server and its backup have what was acknowledged, once."""
        mine = {key: push.value.item() for key, (s, push) in self.sent.items() if s == server}
        perhaps = sum(int(value) for key, value in mine.items() if key in self.open)
        acknowledged = sum(int(value) for key, value in mine.items() if key not in self.open)
        stores = [self.net.store(server)]
        if (replica := self.net.replica(server)) is not None:
            stores.append(replica)
        elif self.replication == 2 and len(self.net.sessions) == S:
            self.wrong.append(f"server {server} has no backup")
        found = {held(store, f"w{server}") for store in stores}
        value = found.pop()
        if found or math.isnan(value) or (int(value) - acknowledged) & ~perhaps:
            self.wrong.append(f"server {server}: {found | {value}}, not {acknowledged}")

    def _settle(self) -> None:
        while self.net.busy:
            self.net.deliver_all()
            self._hear()

    def _hear(self) -> None:
        for worker, answers in self.net.heard.items():
            for a in answers:
                if a.run == self.net.run and worker in self.workers:
                    self._answered(worker, a)
            answers.clear()

    def _answered(self, worker: int, answer: Message) -> None:
        if isinstance(answer, Reply):
            self.open.pop((worker, answer.number), None)
        elif isinstance(answer, Departed):
            self._depart(worker, answer.who)
        elif isinstance(answer, Error):
            self.wrong.append(f"worker {worker} hears {answer}")
        else:
            assert isinstance(answer, AddressBook), answer

    def _depart(self, worker: int, who: int) -> None:
        """A worker asks the backup again what the server has not answered."""
        self.dead[worker].add(who)
        for server in SERVERS:
            if self.serving[worker, server] != who:
                continue
            backup = W + backup_of(server - W, S)
            if server != who or self.replication == 1 or backup in self.dead[worker]:
                self.lost[worker].add(server)
                continue
            self.serving[worker, server] = backup
            for (w, _), (to, request) in sorted(self.open.items(), key=lambda item: item[0]):
                if w == worker and to == server:
                    self.net.send(worker, backup, request, server)


#: What may happen, and how likely it is.
EVENTS = {"push": 6, "deliver": 6, "pull": 2, "crash": 0.7, "leave": 0.3, "again": 0.4}


def at_random(seed: int) -> list[str]:
    """Play a schedule that is drawn at random; what is wrong at its end."""
    rng = random.Random(seed)
    schedule = Schedule(rng.choice(MODES), rng.randint(1, 2))
    for event in rng.choices([*EVENTS], [*EVENTS.values()], k=LENGTH):
        happen(schedule, event, rng)
    return schedule.end()


def happen(schedule: Schedule, event: str, rng: random.Random) -> None:
    """One thing happens in a schedule."""
    worker, server = rng.randrange(W), rng.choice(SERVERS)
    match event:
        case "push":
            schedule.push(worker, server, pulls=rng.random() < 0.5)
        case "pull":
            schedule.pull(worker, server)
        case "deliver":
            schedule.deliver(rng, rng.randint(1, 8))
        case "crash":
            schedule.crash(rng)
        case "leave":
            schedule.leave(worker)
        case "again":
            schedule.again()
