"""Schedules of faults: crashes, delays, echoes, reorderings; does each push count exactly once?

Servers and their backups are here as state machines, the connections between them as queues, and
a schedule says what happens next. A benchmark draws schedules at random; a test lets Hypothesis
look for the shortest one that breaks the rule.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from itertools import chain

import torch

from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Copy,
    Departed,
    Init,
    Message,
    Pull,
    Push,
    Reply,
    Request,
    SetOptimizer,
)
from distkit.kvstore.node import Node
from distkit.kvstore.server import KVServer
from distkit.kvstore.shard import Shard

#: Workers and servers, and the servers' ids.
W, S = 2, 3
SERVERS = range(W, W + S)
MODES = ("dist_sync", "dist_async")

#: So much happens in a random schedule.
LENGTH = 30


class Network:
    """Servers in processes, and connections that each keep their order, and nothing else.

    ``hosts`` has the shards of each process, ``lines`` what is under way by sender and receiver,
    ``heard`` what came to each worker.

    Args:
        mode: "dist_sync" or "dist_async".
        replication: on how many servers each value is.
        on_crash: what becomes of the others when a worker ends.
    """

    def __init__(self, mode: str, replication: int, on_crash: str = "continue") -> None:
        terms: dict[str, float] = {
            "replication": replication, "on_crash": ["halt", "continue"].index(on_crash),
        }  # fmt: skip
        self.hosts = {n: [Shard(Node("server", n - W, W, S, "f"))] for n in SERVERS}
        self.lines: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.dead: set[int] = set()
        self.heard: dict[int, list[Message]] = defaultdict(list)
        everybody = dict.fromkeys(range(W + S), "")
        for n, (shard,) in self.hosts.items():
            shard.hear(AddressBook(0, n, 0, mode, 100, everybody, terms))

    @property
    def shards(self) -> list[Shard]:
        """All that are there."""
        return list(chain.from_iterable(self.hosts.values()))

    def shard(self, node: int) -> Shard | None:
        """The one that has this server's place."""
        return next((shard for shard in self.shards if shard.node.id == node), None)

    def send(self, src: int, dst: int, message: Message) -> None:
        """Put a message on its way."""
        self.lines[src, dst].append(message)

    @property
    def busy(self) -> list[tuple[int, int]]:
        """The connections that have something under way."""
        return [line for line, queue in self.lines.items() if queue]

    def deliver(self, line: tuple[int, int]) -> None:
        """The next message of a connection."""
        message, dst = self.lines[line].popleft(), line[1]
        if dst < W:
            self.heard[dst].append(message)
            return
        shard = self.shard(dst)
        if shard is None:
            return
        said = shard.handle(message) if isinstance(message, Request) else []
        said += shard.hear(message) if isinstance(message, Answer) else []
        for m in said:
            self.send(dst, m.to if isinstance(m, Copy) else m.node, m)
        for host in self.hosts.values():
            for heir in [heir for shard in host for heir in _taken(shard.heirs)]:
                host.append(heir)  # it registers, and hears who has ended so far
                for who in self.dead - {heir.node.id}:
                    self.send(-1, heir.node.id, self.departed(heir.node.id, who))

    def deliver_all(self) -> None:
        """All that is under way, and all that comes of it."""
        while lines := self.busy:
            self.deliver(lines[0])

    def crash(self, host: int) -> None:
        """A server's process ends: what was under way to and from it is lost."""
        gone = [shard.node.id for shard in self.hosts.pop(host)]
        self.dead |= set(gone)
        for line, queue in self.lines.items():
            if set(line) & set(gone):
                queue.clear()
        for left in [shard.node.id for shard in self.shards]:
            for who in gone:
                self.send(-1, left, self.departed(left, who))

    def departed(self, to: int, who: int) -> Departed:
        """The scheduler's word to a server that another has ended."""
        return Departed(0, to, 0, who, "signal SIGKILL", 0)


def _taken(heirs: list[Shard]) -> list[Shard]:
    found = list(heirs)
    heirs.clear()
    return found


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
        copies: on how many servers each value is; one less of them may crash.
    """

    def __init__(self, mode: str, copies: int) -> None:
        self.net, self.crashes = Network(mode, copies), copies - 1
        self.numbers = [0] * W
        self.sent: dict[tuple[int, int], tuple[int, Push]] = {}  # all of them
        self.pushes: dict[tuple[int, int], int] = {}  # by the pulls that came with them
        self.open: list[set[int]] = [set() for _ in range(W)]  # not acknowledged
        self.pushed: dict[int, float] = defaultdict(float)
        self.wrong: list[str] = []
        for server in SERVERS:
            self._ask(0, server, SetOptimizer, "sgd", {"learning_rate": -1.0})
            value = torch.zeros(1, dtype=torch.float64)
            self._ask(0, server, Init, f"w{server}", (1,), "float64", value)
        self._settle()

    def _ask(self, worker: int, server: int, kind: type[Request], *fields: object) -> Request:
        request = kind(0, worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        self.net.send(worker, server, request)
        return request

    # -- what may happen ---------------------------------------------------------

    def push(self, worker: int, server: int, *, pulls: bool = False) -> None:
        """A worker pushes a number that nobody else pushes; with it, it may pull."""
        value = 2.0 ** len(self.sent)
        self.pushed[server] += value
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

    def pull(self, worker: int, server: int) -> None:
        """A worker pulls; it may have to wait."""
        self._ask(worker, server, Pull, f"w{server}")

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
        for number in sorted(self.open[worker]):
            self.net.send(worker, *self.sent[worker, number])

    def crash(self, rng: random.Random) -> None:
        """A server's process ends, if one more may."""
        if self.crashes > 0:
            self.crashes -= 1
            self.net.crash(rng.choice(sorted(self.net.hosts)))

    # -- what must come of it ----------------------------------------------------

    def end(self) -> list[str]:
        """All messages arrive; what is wrong then: nothing, if each push counts exactly once."""
        self._settle()
        for worker in range(W):
            self.repeat(worker)
        self._settle()
        self.wrong += [f"worker {w} has no answer to {numbers}"
                       for w, numbers in enumerate(self.open) if numbers]  # fmt: skip
        for server in SERVERS:
            shard = self.net.shard(server)
            copies = [shard.store if shard else None]
            copies += [s.replicas[server] for s in self.net.shards if server in s.replicas]
            for store in copies:
                found = held(store, f"w{server}") if store else None
                if found != self.pushed[server]:
                    self.wrong.append(f"server {server}: {found}, not {self.pushed[server]}")
        return self.wrong

    def _settle(self) -> None:
        self.net.deliver_all()
        self._hear()

    def _hear(self) -> None:
        for worker, answers in self.net.heard.items():
            for a in answers:
                if isinstance(a, Reply):
                    self.open[worker] -= {a.number, self.pushes.get((worker, a.number), a.number)}
                else:
                    self.wrong.append(f"worker {worker} hears {a}")
            answers.clear()


def at_random(seed: int) -> list[str]:
    """Play a schedule that is drawn at random; what is wrong at its end.

    >>> at_random(0)
    []
    """
    rng = random.Random(seed)
    schedule = Schedule(rng.choice(MODES), rng.randint(1, S))
    for _ in range(LENGTH):
        worker, server = rng.randrange(W), rng.choice(SERVERS)
        match rng.choice(("push", "push", "deliver", "deliver", "echo", "pull", "crash", "repeat")):
            case "push":
                schedule.push(worker, server, pulls=rng.random() < 0.5)
            case "pull":
                schedule.pull(worker, server)
            case "deliver":
                schedule.deliver(rng, rng.randint(1, 6))
            case "echo":
                schedule.echo(rng)
            case "crash":
                schedule.crash(rng)
            case "repeat":
                schedule.repeat(worker)
    return schedule.end()
