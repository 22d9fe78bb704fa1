"""Schedules of faults: crashes, delays, echoes, reorderings; does each push count exactly once?

The scheduler, servers and their backups are here as state machines, the connections between them
as queues, and a schedule says what happens next: to any of them, at any time, over several runs.
A benchmark draws schedules at random; a test lets Hypothesis look for the shortest one that breaks
a rule. The rules: each acknowledged push counts exactly once, on the server and on each of its
copies; nobody waits for ever; copies are made anew; what is lost is told to every worker.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict, deque
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from distkit.kvstore.protocol.messages import (
    GIVE,
    AddressBook,
    Answer,
    Barrier,
    Departed,
    Error,
    Init,
    Leave,
    Message,
    Present,
    Pull,
    Push,
    Register,
    Replaced,
    Reply,
    Request,
    SetOptimizer,
)
from distkit.kvstore.protocol.replication import Copy
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.terms import Terms
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.shard import ServerSession

#: Workers and servers, the servers' ids, and the scheduler's.
W, S = 2, 3
SERVERS = range(W, W + S)
CHIEF = W + S
MODES = ("dist_sync", "dist_async")

#: So much happens in a random schedule.
LENGTH = 40


class Letter(NamedTuple):
    """A message, the server that sent it, and for a copy where it goes."""

    message: Message
    sender: ServerSession | None
    where: str


class Network:
    """Processes, and connections that each keep their order, and nothing else.

    ``hosts`` has the shards of each server's process, ``lines`` what is under way by sender and
    receiver, ``heard`` what came to each worker.

    Args:
        mode: "dist_sync" or "dist_async".
        replication: on how many servers each value is.
        on_crash: what becomes of the others when a worker ends.
    """

    def __init__(self, mode: str, replication: int, on_crash: str = "continue") -> None:
        self.terms = Terms(mode, 100, replication=replication, on_crash=on_crash)
        self.chief, self.run = Scheduler(W, S), 0
        self.hosts: dict[int, list[ServerSession]] = {}
        self.lines: dict[tuple[int, int], deque[Letter]] = defaultdict(deque)
        self.heard: dict[int, list[Message]] = defaultdict(list)
        self._ways: dict[int, ServerSession | None] = {}  # whom the scheduler reaches by an id
        self._starts = 0
        for n in SERVERS:
            self.come(n)
        for worker in range(W):
            self.register(worker)
        self.deliver_all()
        self.heard.clear()

    @property
    def shards(self) -> list[ServerSession]:
        """All that are there."""
        return list(chain.from_iterable(self.hosts.values()))

    def shard(self, node: int) -> ServerSession | None:
        """The one that serves in this server's place."""
        return next((s for s in self.shards if s.node.id == node and s.store is not None), None)

    def replica(self, process: int, server: int) -> KVServer | None:
        """The copy of a server's values that a process has."""
        mine = [host[0] for host in self.hosts.values() if host[0].me == process]
        return mine[0].replicas.get(server) if mine else None

    @property
    def vacant(self) -> list[int]:
        """The servers that have no process."""
        return [n for n in SERVERS if n not in {host[0].node.id for host in self.hosts.values()}]

    def send(
        self, src: int, dst: int, message: Message, sender: ServerSession | None = None
    ) -> None:
        """Put a message on its way."""
        copied = isinstance(message, Copy)
        where = sender.endpoints[dst] if copied and sender is not None else ""
        self.lines[src, dst].append(Letter(message, sender, where))

    @property
    def busy(self) -> list[tuple[int, int]]:
        """The connections that have something under way."""
        return [line for line, queue in self.lines.items() if queue]

    def deliver(self, line: tuple[int, int]) -> None:
        """The next message of a connection."""
        letter, (src, dst) = self.lines[line].popleft(), line
        message, sender, _ = letter
        if dst < W:
            self.heard[dst].append(message)
        elif dst == CHIEF:
            self._ask_chief(src, message, sender)
        elif (shard := self._receiver(line, letter)) is not None:
            if isinstance(message, Request) and not shard.late(message):
                self._say(shard, shard.handle(message))
            elif isinstance(message, Answer):
                self._say(shard, shard.hear(message))

    def _receiver(self, line: tuple[int, int], letter: Letter) -> ServerSession | None:
        """Who gets it: a copy who listens where it went, all else who has the id now."""
        if letter.where:
            mine = (h[0] for h in self.hosts.values() if h[0].endpoint == letter.where)
            return next(mine, None)
        found = self._ways.get(line[1]) if line[0] == CHIEF else self.shard(line[1])
        return found if found in self.shards else None

    def _say(self, shard: ServerSession, said: list[Message]) -> None:
        for m in said:
            if isinstance(m, Copy):
                self.send(m.node, m.to, m, shard)
            elif isinstance(m, Request):
                self.send(m.node, CHIEF, m, shard)
            else:
                self.send(shard.me, m.node, m, shard)
        host = next(host for host in self.hosts.values() if shard in host)
        host[1:] = [s for s in host[1:] if not s.over]
        while shard.heirs:
            heir = shard.heirs.pop()
            host.append(heir)
            self._say(heir, heir.open())

    def _ask_chief(self, src: int, message: Message, sender: ServerSession | None) -> None:
        assert isinstance(message, Request)
        if isinstance(message, Leave):
            if sender is not None and self._ways.get(src) is not sender:
                return  # it has another connection
        else:
            message.node = self.chief.asker(message)
            self._ways[message.node] = sender
        for answer in self.chief.handle(message):
            if answer.node < W or answer.node in self._ways:
                self.send(CHIEF, answer.node, answer)

    def deliver_all(self) -> None:
        """All that is under way, and all that comes of it."""
        while lines := self.busy:
            self.deliver(lines[0])

    # -- who comes and goes -------------------------------------------------------

    def register(self, worker: int) -> None:
        """A worker asks to take part in the run."""
        fields = self.run, worker, 0, "", W, S, self.terms, 1000 + worker
        self.send(worker, CHIEF, Register(*fields))

    def come(self, server: int) -> None:
        """A process begins in a server's place."""
        self._starts += 1
        pid = server if self._starts <= S else 100 + self._starts
        node = Node("server", server - W, W, S, "f", start=self._starts - 1)
        shard = ServerSession(node)
        shard.pid = pid
        self.hosts[pid] = [shard]
        self._say(shard, shard.open())

    def crash(self, host: int) -> None:
        """A server's process ends: what was under way to and from it is lost."""
        gone = self.hosts.pop(host)
        for queue in self.lines.values():
            left = [letter for letter in queue if letter.sender not in gone]
            queue.clear()
            queue.extend(left)
        for shard in gone:
            for line in [line for line in self.lines if line[1] == shard.me and line[0] != CHIEF]:
                self.lines[line].clear()
            for node in [n for n, way in self._ways.items() if way is shard]:
                self.lines[CHIEF, node].clear()
                self.send(node, CHIEF, Leave(self.run, node, 0, "signal SIGKILL"), shard)
            for node in self.chief.missing(partial(_is_not, shard.pid)):
                if node not in self._ways:  # not heard yet: it looks after the processes itself
                    self._ask_chief(node, Leave(self.run, node, 0, "signal SIGKILL"), None)

    def leave(self, worker: int) -> None:
        """A worker's process ends."""
        for line in [line for line in self.lines if line[0] == worker]:
            self.lines[line].clear()
        self.send(worker, CHIEF, Leave(self.run, worker, 0, "signal SIGKILL"))

    def crash_chief(self, workers: list[int]) -> None:
        """The scheduler's process ends; another goes on from its journal, and all greet it."""
        for line in [line for line in self.lines if CHIEF in line]:
            self.lines[line].clear()
        told = json.loads(json.dumps(self.chief.journal()))
        self.chief, self._ways = Scheduler(W, S), {}
        self.chief.resume(told)
        pids = {shard.pid for shard in self.shards} | {1000 + w for w in workers}
        for node in self.chief.missing(lambda _, pid: pid in pids):
            self.chief.handle(Leave(self.chief.run, node, 0, "signal SIGKILL"))
        for shard in self.shards:
            self._say(shard, shard.greet())
        for worker in workers:
            self.send(worker, CHIEF, Present(self.run, worker, 1 << 30, "", 1000 + worker))


def _is_not(dead: int, node: int, pid: int) -> bool:
    return pid != dead


def held(store: KVServer, key: str) -> float:
    """All that it has of what was pushed, applied or waiting for its round; NaN without the key."""
    if key not in store.entries:
        return math.nan
    entry = store.entries[key]
    waiting = [p.value for arrived in entry.rounds.values() for p in arrived.values()]
    return float(entry.value + sum(waiting))


class Schedule:
    """Workers push to every server, each push a bit of its own; beside it, what they pushed.

    Args:
        mode: "dist_sync" or "dist_async".
        copies: on how many servers each value is; one less of them may crash at once.
    """

    def __init__(self, mode: str, copies: int) -> None:
        self.net, self.replication = Network(mode, copies), copies
        self.wrong: list[str] = []
        self._begin()

    def _begin(self) -> None:
        """A run begins: everybody is there."""
        self.workers = list(range(W))
        self.numbers = [0] * W
        self.sent: dict[tuple[int, int], tuple[int, Push]] = {}  # all of them
        self.pushes: dict[tuple[int, int], int] = {}  # by the pulls that came with them
        self.open: list[set[int]] = [set() for _ in range(W)]  # not acknowledged
        self.asked: dict[tuple[int, int], tuple[int, Request]] = {}  # all else, not answered
        self.lost: list[set[int]] = [set() for _ in range(W)]  # servers, as each worker heard
        for server in SERVERS:
            for worker in range(W):
                self._ask(worker, server, SetOptimizer, "sgd", {"learning_rate": -1.0})
                self._init(worker, server, gives=worker == 0)

    def _init(self, worker: int, server: int, *, gives: bool) -> None:
        value = torch.zeros(1, dtype=torch.float64) if gives else None
        self._ask(worker, server, Init, f"w{server}", (1,), "float64", value)

    def _ask(self, worker: int, dst: int, kind: type[Request], *fields: object) -> Request:
        request = kind(self.net.run, worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        if kind is not Push:
            self.asked[worker, request.number] = dst, request
        self.net.send(worker, dst, request)
        return request

    # -- what may happen ---------------------------------------------------------

    def push(self, worker: int, server: int, *, pulls: bool = False) -> None:
        """A worker pushes a number that nobody else pushes; with it, it may pull."""
        if not self._may_push(worker):
            return
        value = 2.0 ** len(self.sent)
        settled = min(self.open[worker], default=self.numbers[worker])
        gradient = torch.full((1,), value, dtype=torch.float64)
        push = self._ask(worker, server, Push, f"w{server}", (1,), 0, gradient, settled)
        assert isinstance(push, Push)
        if pulls:
            push.pull = self.numbers[worker]
            self.numbers[worker] += 1
            self.pushes[worker, push.pull] = push.number
        self.sent[worker, push.number] = server, push
        self.open[worker].add(push.number)

    def _may_push(self, worker: int) -> bool:
        """True if it has ended its preparations."""
        first = (Init, SetOptimizer)
        asked = (isinstance(r, first) for (w, _), (_, r) in self.asked.items() if w == worker)
        return worker in self.workers and not any(asked)

    def pull(self, worker: int, server: int) -> None:
        """A worker pulls; it may have to wait."""
        if self._may_push(worker):
            request = self._ask(worker, server, Pull, f"w{server}")
            del self.asked[worker, request.number]

    def deliver(self, rng: random.Random, count: int) -> None:
        """Some messages arrive, of any connections."""
        for _ in range(count):
            if lines := sorted(self.net.busy):
                self.net.deliver(rng.choice(lines))
        self._hear()

    def echo(self, rng: random.Random) -> None:
        """A message comes again, however old."""
        if self.sent:
            worker, number = rng.choice(sorted(self.sent))
            self.net.send(worker, *self.sent[worker, number])

    def repeat(self, worker: int) -> None:
        """A worker has connected again: what was not acknowledged goes out again."""
        if worker not in self.workers:
            return
        for (who, _), (dst, request) in sorted(self.asked.items()):
            if who == worker:
                self.net.send(worker, dst, request)
        for number in sorted(self.open[worker]):
            self.net.send(worker, *self.sent[worker, number])

    def crash(self, rng: random.Random, *, beyond: bool = False) -> None:
        """A server's process ends: no value's last copy, unless ``beyond``."""
        may = [h for h in sorted(self.net.hosts) if beyond or not self._is_last(h)]
        if may:
            self.net.crash(rng.choice(may))

    def _is_last(self, host: int) -> bool:
        """True if a value would be lost with this process, as far as others know."""
        left = {h[0].me for pid, h in self.net.hosts.items() if pid != host}
        begun = self.net.chief.copies
        return not begun or any(not left.intersection(p) for p in begun.values())

    def come(self, rng: random.Random) -> None:
        """A process begins in the place of one that has ended."""
        if vacant := self.net.vacant:
            self.net.come(rng.choice(vacant))

    def crash_chief(self) -> None:
        """The scheduler ends, and another goes on."""
        self.net.crash_chief(self.workers)

    def leave(self, worker: int) -> None:
        """A worker ends, if it is not the last."""
        if worker in self.workers and len(self.workers) > 1:
            self.workers.remove(worker)
            self.net.leave(worker)

    def again(self) -> None:
        """The run comes to its end, and another begins on the same cluster."""
        self._end()
        self.net.run += 1
        for worker in range(W):
            self.net.register(worker)
        self._settle()
        self._begin()

    # -- what must come of it ----------------------------------------------------

    def end(self) -> list[str]:
        """All messages arrive, and all places are taken; what is wrong then: nothing."""
        self._end()
        return self.wrong

    def _end(self) -> None:
        for worker in self.workers:
            self._ask(worker, CHIEF, Barrier, 0)
        for _ in range(3):  # what is asked may have to be asked again
            for server in self.net.vacant:
                self.net.come(server)
            self._settle()
            for worker in self.workers:
                self.repeat(worker)
            self._settle()
        lost = set(self.net.chief._lost())
        for worker in self.workers:
            late = [n for n in self.open[worker] if self.sent[worker, n][0] not in lost]
            late += [n for (w, n), (to, _) in self.asked.items() if w == worker and to not in lost]
            if late:
                self.wrong.append(f"worker {worker} has no answer to {late}")
            if self.lost[worker] != lost:
                self.wrong.append(f"worker {worker} hears {self.lost[worker]} of {lost}")
        for server in set(SERVERS) - lost:
            self._check(server)

    def _check(self, server: int) -> None:
        """A server and all copies have what was acknowledged, once."""
        shard, processes = self.net.shard(server), self.net.chief.copies[server]
        copies = [shard.store if shard else None]
        copies += [self.net.replica(p, server) for p in processes[1:]]
        if len(copies) != self.replication:
            self.wrong.append(f"server {server}: copies at {processes} alone")
        mine = [(w, n) for (w, n), (s, _) in self.sent.items() if s == server]
        acknowledged = sum(2 ** self._bit(m) for m in mine if m[1] not in self.open[m[0]])
        perhaps = sum(2 ** self._bit(m) for m in mine if m[1] in self.open[m[0]])
        found = {held(store, f"w{server}") if store else math.nan for store in copies}
        value = found.pop()
        if found or math.isnan(value) or (int(value) - acknowledged) & ~perhaps:
            self.wrong.append(f"server {server}: {found | {value}}, not {acknowledged}")

    def _bit(self, push: tuple[int, int]) -> int:
        return int(math.log2(self.sent[push][1].value.item()))

    def _settle(self) -> None:
        while self.net.busy:
            self.net.deliver_all()
            self._hear()

    def _hear(self) -> None:
        for worker, answers in self.net.heard.items():
            for a in answers:
                self._answered(worker, a)
            answers.clear()

    def _answered(self, worker: int, answer: Message) -> None:
        if answer.run != self.net.run or worker not in self.workers:
            return
        if isinstance(answer, Reply):
            of = self.asked.pop((worker, answer.number), None)
            if of is not None and isinstance(of[1], Init) and answer.version == GIVE:
                self._init(worker, of[0], gives=True)
            push = self.pushes.get((worker, answer.number), answer.number)
            self.open[worker] -= {answer.number, push}
        elif isinstance(answer, Replaced):
            self.repeat(worker)
        elif isinstance(answer, Departed):
            self.lost[worker].add(answer.who)
        elif isinstance(answer, Error):
            self.wrong.append(f"worker {worker} hears {answer}")
        else:
            assert isinstance(answer, AddressBook), answer


#: What may happen, and how likely it is.
_EVENTS = {
    "push": 6,
    "deliver": 6,
    "pull": 2,
    "echo": 2,
    "repeat": 1,
    "crash": 2,
    "come": 2,
    "crash_chief": 0.7,
    "leave": 0.3,
    "again": 0.4,
    "beyond": 0.1,
}


def at_random(seed: int) -> list[str]:
    """Play a schedule that is drawn at random; what is wrong at its end.

    >>> at_random(0)
    []
    """
    rng = random.Random(seed)
    schedule = Schedule(rng.choice(MODES), rng.randint(1, S))
    for event in rng.choices([*_EVENTS], [*_EVENTS.values()], k=LENGTH):
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
        case "echo" | "come":
            getattr(schedule, event)(rng)
        case "crash" | "beyond":
            schedule.crash(rng, beyond=event == "beyond")
        case "repeat" | "leave":
            getattr(schedule, event)(worker)
        case "crash_chief" | "again":
            getattr(schedule, event)()
