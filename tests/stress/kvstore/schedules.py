"""Fault schedules for a parameter server, and checks of its invariants.

The scheduler and the servers are state machines, the connections between them are queues, and a
schedule is a sequence of events. There are three invariants: each acknowledged push counts exactly
once, on the server and on its backup; no worker waits forever; every worker is notified of each
lost server.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque

import torch

from distkit.kvstore.protocol.messages import (
    AddressBook,
    Barrier,
    Copy,
    Departed,
    Error,
    Init,
    Message,
    Pull,
    Push,
    Register,
    Reply,
    Request,
    Response,
    SetOptimizer,
)
from distkit.kvstore.protocol.options import StoreOptions
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.scheduler import Scheduler
from distkit.kvstore.transport.session import ServerSession, backup_of

#: Numbers of workers and servers, ids of the servers, and id of the scheduler.
W, S = 2, 3
SERVERS = range(W, W + S)
SCHEDULER = W + S
MODES = ("dist_sync", "dist_async")

#: The number of events in a random schedule.
LENGTH = 40


class Ended(Message):
    """The end of a process; it reaches the scheduler after all messages from the process."""


class Network:
    """Processes and the ordered connections between them.

    ``queues`` contains the messages in flight, each with its target server, by sender and receiver.
    ``inbox`` contains the messages delivered to each worker.
    """

    def __init__(self, mode: str, replication: int, on_crash: str = "continue") -> None:
        self.options = StoreOptions(mode, 100, replication=replication, on_crash=on_crash)
        self.scheduler = Scheduler(W, S)
        self.sessions = {n: ServerSession(Node("server", n - W, W, S, "f")) for n in SERVERS}
        self.queues: dict[tuple[int, int], deque[tuple[Message, int]]] = defaultdict(deque)
        self.inbox: dict[int, list[Message]] = defaultdict(list)
        for n in self.sessions:
            self.send(n, SCHEDULER, Register(n, 0, ""))
        for worker in range(W):
            self.send(worker, SCHEDULER, Register(worker, 0, "", self.options))
        self.deliver_all()
        self.inbox.clear()

    def send(self, src: int, dst: int, message: Message, to: int = 0) -> None:
        """Send a message; messages to a crashed server are lost."""
        if dst in self.sessions or dst not in SERVERS:
            self.queues[src, dst].append((message, to))

    @property
    def busy(self) -> list[tuple[int, int]]:
        """The connections with messages in flight."""
        return [pair for pair, queue in self.queues.items() if queue]

    def deliver(self, pair: tuple[int, int]) -> None:
        """Deliver the next message of a connection."""
        (message, to), (_, dst) = self.queues[pair].popleft(), pair
        if dst < W:
            self.inbox[dst].append(message)
        elif dst == SCHEDULER:
            for reply in self._handle_at_scheduler(message):
                self.send(SCHEDULER, reply.node, reply)
        elif isinstance(message, Request):
            self._send_all(dst, self.sessions[dst].handle(message, to))
        elif isinstance(message, Response):
            self._send_all(dst, self.sessions[dst].handle_response(message))

    def _handle_at_scheduler(self, message: Message) -> list[Response]:
        """Return the scheduler's replies to a request, or to the end of a process."""
        if isinstance(message, Ended):
            return self.scheduler.handle_departure(message.node, 0, "signal SIGKILL")
        assert isinstance(message, Request)
        return self.scheduler.handle(message)

    def _send_all(self, server: int, messages: list[Message]) -> None:
        for m in messages:
            if isinstance(m, Copy):
                self.send(server, W + backup_of(server - W, S), m)
            else:
                self.send(server, SCHEDULER if isinstance(m, Request) else m.node, m)

    def deliver_all(self) -> None:
        """Deliver all messages, including those that they cause."""
        while pairs := self.busy:
            self.deliver(pairs[0])

    def crash(self, server: int) -> None:
        """Crash a server: messages to it are lost; messages from it arrive."""
        del self.sessions[server]
        for src, dst in [*self.queues]:
            if dst == server:
                self.queues[src, dst].clear()
        self.send(server, SCHEDULER, Ended(server, 0))

    def terminate(self, worker: int) -> None:
        """End a worker's process."""
        self.send(worker, SCHEDULER, Ended(worker, 0))

    def store(self, server: int) -> KVServer | None:
        """Return the store with a server's values, on that server or on its backup."""
        return next((s.stores[server] for s in self.sessions.values() if server in s.stores), None)

    def replica(self, server: int) -> KVServer | None:
        """Return the backup of a server's values."""
        found = (s.replicas.get(server) for s in self.sessions.values())
        return next(filter(None, found), None)


def pushed_sum(store: KVServer | None, key: str) -> float:
    """Return the sum of the pushes that a store has accepted; NaN if it lacks the key."""
    if store is None or key not in store.entries:
        return math.nan
    entry = store.entries[key]
    waiting = [p.value for arrived in entry.rounds.values() for p in arrived.values()]
    return float(entry.value + sum(waiting))


class Schedule:
    """Workers that push distinct powers of two to all servers, and a record of their pushes."""

    def __init__(self, mode: str, replication: int) -> None:
        self.net, self.replication = Network(mode, replication), replication
        self.violations: list[str] = []
        self.workers = list(range(W))
        self.numbers = Counter[int]()
        self.sent: dict[tuple[int, int], tuple[int, Push]] = {}
        self.unanswered: dict[tuple[int, int], tuple[int, Request]] = {}
        self.serving = {(w, s): s for w in range(W) for s in SERVERS}
        # lost servers and dead processes, as known to each worker
        self.lost: list[set[int]] = [set() for _ in range(W)]
        self.dead: list[set[int]] = [set() for _ in range(W)]
        for server in SERVERS:
            for worker in range(W):
                value = torch.zeros(1, dtype=torch.float64) if worker == 0 else None
                self._request(worker, server, SetOptimizer, "sgd", {"learning_rate": -1.0})
                self._request(worker, server, Init, f"w{server}", (1,), "float64", value)
        self._settle()

    def _request(self, worker: int, server: int, kind: type[Request], *fields: object) -> Request:
        request = kind(worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        self.unanswered[worker, request.number] = server, request
        self.net.send(worker, self.serving.get((worker, server), server), request, server)
        return request

    # -- events ------------------------------------------------------------------

    def push(self, worker: int, server: int, *, pulls: bool = False) -> None:
        """Push the next power of two from a worker; with ``pulls``, also send a pull."""
        if worker not in self.workers:
            return
        value = torch.full((1,), 2.0 ** len(self.sent), dtype=torch.float64)
        push = self._request(worker, server, Push, f"w{server}", (1,), 0, value)
        assert isinstance(push, Push)
        self.sent[worker, push.number] = server, push
        if pulls:
            self.pull(worker, server)

    def pull(self, worker: int, server: int) -> None:
        """Send a pull from a worker to a server; it may never get a reply."""
        if worker in self.workers:
            request = self._request(worker, server, Pull, f"w{server}")
            del self.unanswered[worker, request.number]

    def deliver(self, rng: random.Random, count: int) -> None:
        """Deliver ``count`` messages on random connections."""
        for _ in range(count):
            if pairs := sorted(self.net.busy):
                self.net.deliver(rng.choice(pairs))
        self._process_replies()

    def crash(self, rng: random.Random) -> None:
        """Crash a random server, unless it is the last one."""
        if len(self.net.sessions) > 1:
            self.net.crash(rng.choice(sorted(self.net.sessions)))

    def terminate(self, worker: int) -> None:
        """Terminate a worker, unless it is the last one."""
        if worker in self.workers and len(self.workers) > 1:
            self.workers.remove(worker)
            self.net.terminate(worker)

    # -- invariants -----------------------------------------------------------

    def finish(self) -> list[str]:
        """Deliver all messages and return the violated invariants."""
        for worker in self.workers:
            self._request(worker, SCHEDULER, Barrier, 0)
        self._settle()
        gone = {n for n in SERVERS if self.net.store(n) is None}
        for worker in self.workers:
            late = [
                n for (w, n), (s, _) in self.unanswered.items() if w == worker and s not in gone
            ]
            if late:
                self.violations.append(f"worker {worker} has no reply to {late}")
            if self.lost[worker] != gone:
                self.violations.append(
                    f"worker {worker} was notified of lost servers {self.lost[worker]}, not {gone}"
                )
        for server in {*SERVERS} - gone:
            self._check(server)
        return self.violations

    def _check(self, server: int) -> None:
        """Check that a server and its backup have counted each acknowledged push once."""
        mine = {key: push.value.item() for key, (s, push) in self.sent.items() if s == server}
        unacknowledged = sum(int(value) for key, value in mine.items() if key in self.unanswered)
        acknowledged = sum(int(value) for key, value in mine.items() if key not in self.unanswered)
        stores = [self.net.store(server)]
        if (replica := self.net.replica(server)) is not None:
            stores.append(replica)
        elif self.replication == 2 and len(self.net.sessions) == S:
            self.violations.append(f"server {server} has no backup")
        found = {pushed_sum(store, f"w{server}") for store in stores}
        value = found.pop()
        if found or math.isnan(value) or (int(value) - acknowledged) & ~unacknowledged:
            self.violations.append(f"server {server}: {found | {value}}, not {acknowledged}")

    def _settle(self) -> None:
        while self.net.busy:
            self.net.deliver_all()
            self._process_replies()

    def _process_replies(self) -> None:
        for worker, replies in self.net.inbox.items():
            for a in replies:
                if worker in self.workers:
                    self._process_reply(worker, a)
            replies.clear()

    def _process_reply(self, worker: int, reply: Message) -> None:
        if isinstance(reply, Reply):
            self.unanswered.pop((worker, reply.number), None)
        elif isinstance(reply, Departed):
            self._depart(worker, reply.peer)
        elif isinstance(reply, Error):
            self.violations.append(f"worker {worker} received {reply}")
        else:
            assert isinstance(reply, AddressBook), reply

    def _depart(self, worker: int, who: int) -> None:
        """Send a worker's pending requests for a crashed server to its backup."""
        self.dead[worker].add(who)
        for server in SERVERS:
            if self.serving[worker, server] != who:
                continue
            backup = W + backup_of(server - W, S)
            if server != who or self.replication == 1 or backup in self.dead[worker]:
                self.lost[worker].add(server)
                continue
            self.serving[worker, server] = backup
            for (w, _), (to, request) in sorted(self.unanswered.items(), key=lambda item: item[0]):
                if w == worker and to == server:
                    self.net.send(worker, backup, request, server)


#: The events and their weights.
EVENTS = {"push": 6, "deliver": 6, "pull": 2, "crash": 0.7, "terminate": 0.3}


def random_schedule_errors(seed: int) -> list[str]:
    """Run a random schedule and return the violated invariants."""
    rng = random.Random(seed)
    schedule = Schedule(rng.choice(MODES), rng.randint(1, 2))
    for event in rng.choices([*EVENTS], [*EVENTS.values()], k=LENGTH):
        apply_event(schedule, event, rng)
    return schedule.finish()


def apply_event(schedule: Schedule, event: str, rng: random.Random) -> None:
    """Apply an event to a random worker or server."""
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
        case "terminate":
            schedule.terminate(worker)
