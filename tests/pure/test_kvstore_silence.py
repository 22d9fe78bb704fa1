"""Servers that hang and come back, and schedulers that end: each push counts once all the same."""

from __future__ import annotations

import json
from collections import defaultdict, deque

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distkit.errors import KVStoreError
from distkit.kvstore.client.requests import Call, Requests
from distkit.kvstore.protocol.messages import (
    Answer,
    Barrier,
    Departed,
    Error,
    Init,
    Leave,
    Message,
    Missed,
    Present,
    Push,
    Register,
    Replaced,
    Reply,
    Request,
    SetOptimizer,
    given_up,
)
from distkit.kvstore.protocol.replication import Backups, Copy
from distkit.kvstore.protocol.terms import Terms
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.scheduler import LIFE, Scheduler
from distkit.kvstore.transport.shard import ServerSession
from distkit.trace.calls import silence

W, S = 2, 3
SERVERS = range(W, W + S)
SCHEDULER = -1  # processes: that of the scheduler, 0 and 1 of the workers, others of servers


def answers(shard: ServerSession, request: Request) -> list[Message]:
    """Those of a server, as :class:`.transport.Service` asks for them."""
    if shard.late(request):
        return [given_up(request, shard.node.name(request.node))]
    return shard.handle(request)


class Processes:
    """All processes of a cluster; connections keep their order, and nothing else.

    ``at`` is the process that listens at a server's address, ``shards`` are those that are in a
    process, ``frozen`` processes do nothing, ``links`` are the workers' connections.
    """

    def __init__(self, terms: Terms) -> None:
        self.scheduler, self.terms = Scheduler(W, S), terms
        self.lines: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.shards = {n: ServerSession(Node("server", n - W, W, S, "f")) for n in SERVERS}
        self.host = {n: n for n in SERVERS}  # of each, the process that ends with it
        self.at: dict[int, int] = {n: n for n in SERVERS}
        self.links = {(w, n): n for w in range(W) for n in SERVERS}
        self.frozen: set[int] = set()
        self.hung: set[int] = set()  # processes that were frozen, once
        self.heard: list[list[Answer]] = [[] for _ in range(W)]
        self.renewed: list[tuple[int, int]] = []  # worker and server: repeat what is open
        for process, shard in self.shards.items():
            self.send(process, SCHEDULER, shard.register())
        for w in range(W):
            self.send(w, SCHEDULER, Register(0, w, 0, "", W, S, terms))
        self.deliver_all()

    def send(self, src: int, dst: int, message: Message) -> None:
        self.lines[src, dst].append(message)

    def busy(self) -> list[tuple[int, int]]:
        ready = [line for line, queue in self.lines.items() if queue]
        return sorted(line for line in ready if line[1] not in self.frozen)

    def deliver_all(self) -> None:
        while lines := self.busy():
            self.deliver(*lines[0])

    def deliver(self, src: int, dst: int) -> None:
        message = self.lines[src, dst].popleft()
        if dst == SCHEDULER:
            assert isinstance(message, Request)
            self.tell(self.scheduler.handle(message), src)
        elif dst < W:
            self.inform(dst, message)
        elif dst in self.shards:
            self.serve(src, dst, message)

    def tell(self, answers: list[Answer], asked: int | None = None) -> None:
        """The scheduler's words; to who was given up, a refusal alone."""
        for answer in answers:
            to = answer.node if answer.node < W else self.at[answer.node]
            if isinstance(answer, Error) and asked is not None and answer.node >= W:
                self.send(SCHEDULER, asked, answer)
            elif to < W or (to in self.shards and self.host[to] not in self.hung):
                self.send(SCHEDULER, to, answer)

    def inform(self, worker: int, message: Message) -> None:
        if isinstance(message, Replaced):
            self.connect(worker, message.who)
        elif isinstance(message, Answer):
            self.heard[worker].append(message)

    def connect(self, worker: int, server: int) -> None:
        """Anew: what it has sent before may still arrive, no answer will."""
        before, now = self.links[worker, server], self.at[server]
        if before != now:
            self.links[worker, server] = now
            self.lines[before, worker].clear()
            self.renewed.append((worker, server))

    def serve(self, src: int, dst: int, message: Message) -> None:
        shard = self.shards[dst]
        try:
            said = answers(shard, message) if isinstance(message, Request) else []
            said += shard.hear(message) if isinstance(message, Answer) else []
        except KVStoreError:  # it has heard that it was given up
            return self.leave(dst)
        for m in said:
            if isinstance(m, (Present, Register, Missed)):
                self.send(dst, SCHEDULER, m)
            elif isinstance(m, Copy):
                self.send(dst, self.at[m.to], m)
            elif m.node >= W:
                self.send(dst, src, m)
            elif self.links[m.node, shard.node.id] == dst:
                self.send(dst, m.node, m)
        while shard.heirs:
            heir = shard.heirs.pop()
            process = W + len(self.host)
            self.shards[process], self.host[process] = heir, self.host[dst]
            self.at[heir.node.id] = process
            self.send(process, SCHEDULER, heir.register())
            for w in range(W):
                if self.links[w, heir.node.id] not in self.shards:
                    self.connect(w, heir.node.id)
        return None

    def leave(self, process: int) -> None:
        """It ends by itself: the scheduler sees the connections break that it has not given up."""
        gone = [s for p, s in self.shards.items() if self.host[p] == self.host[process]]
        last = {s.node.id: s._asked for s in gone}
        for node in self.end(process):
            broken = Leave(0, node, last[node], "its connection was lost")
            self.tell(self.scheduler.handle(broken))

    def end(self, process: int) -> list[int]:
        """It and all that are in it are gone, with what was under way."""
        gone, nodes = [p for p in self.shards if self.host[p] == self.host[process]], []
        for p in gone:
            nodes.append(self.shards.pop(p).node.id)
            self.frozen.discard(p)
            for line, queue in self.lines.items():
                if p in line:
                    queue.clear()
            for w in range(W):
                if self.links[w, nodes[-1]] == p and self.at[nodes[-1]] in self.shards:
                    self.connect(w, nodes[-1])
        return nodes

    def primaries(self) -> list[int]:
        """Processes that have never hung."""
        return sorted({self.host[p] for p in self.shards} - self.hung)


class Silence(RuleBasedStateMachine):
    """Two workers push to three servers and meet at barriers."""

    @initialize(mode=st.sampled_from(["dist_sync", "dist_async"]), copies=st.integers(2, S))
    def start(self, mode: str, copies: int) -> None:
        self.net = Processes(Terms(mode, 100, replication=copies))
        self.faults, self.numbers = copies - 1, [1] * W
        self.open: list[dict[int, tuple[int, Request]]] = [{} for _ in range(W)]
        self.pushed: dict[int, float] = defaultdict(float)
        self.asked, self.passed, self.count = [0] * W, [0] * W, 0
        for server in SERVERS:
            self.ask(0, server, SetOptimizer, "sgd", {"learning_rate": -1.0})
            self.ask(0, server, Init, f"w{server}", (1,), "float64", self.one(0.0))
        self.settle()

    def one(self, value: float) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.float64)

    def ask(self, worker: int, to: int, kind: type[Request], *fields: object) -> None:
        request = kind(0, worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        self.open[worker][request.number] = to, request
        self.net.send(worker, to if to == SCHEDULER else self.net.links[worker, to], request)

    @rule(worker=st.integers(0, W - 1), server=st.sampled_from(SERVERS))
    def push(self, worker: int, server: int) -> None:
        value = 2.0**self.count
        self.count += 1
        self.pushed[server] += value
        settled = min(self.open[worker], default=self.numbers[worker])
        self.ask(worker, server, Push, f"w{server}", (1,), 0, self.one(value), settled)

    @rule(worker=st.integers(0, W - 1))
    def barrier(self, worker: int) -> None:
        if self.asked[worker] == self.passed[worker]:
            self.ask(worker, SCHEDULER, Barrier, self.asked[worker])
            self.asked[worker] += 1

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 8))
    def deliver(self, choice, count: int) -> None:
        for _ in range(count):
            if lines := self.net.busy():
                self.net.deliver(*choice.choice(lines))
        self.hear()

    @rule(choice=st.randoms(use_true_random=False))
    def hang(self, choice) -> None:
        """It is silent for too long; its other connections stay."""
        if self.faults:
            self.faults -= 1
            process = choice.choice(self.net.primaries())
            self.net.hung.add(process)
            for p in [p for p in self.net.shards if self.net.host[p] == process]:
                self.net.frozen.add(p)
                self.net.lines[SCHEDULER, p].clear()
                self.net.lines[p, SCHEDULER].clear()
                self.missed(self.net.shards[p].node.id)

    def missed(self, node: int) -> None:
        self.net.tell(self.net.scheduler.handle(Leave(0, node, 0, "its connection was lost")))

    @rule()
    def come_back(self) -> None:
        """It goes on where it was, and connects to the scheduler again."""
        back, self.net.frozen = sorted(self.net.frozen), set()
        for p in back:
            self.greet(p)

    def greet(self, process: int) -> None:
        shard = self.net.shards.get(process)
        if shard is not None and self.net.at[shard.node.id] != process:
            self.net.leave(process)  # it sees that another listens in its place
        elif shard is not None:
            for message in shard.greet():
                self.net.send(process, SCHEDULER, message)

    @rule(choice=st.randoms(use_true_random=False), noticed=st.booleans())
    def crash(self, choice, noticed: bool) -> None:
        """If the scheduler does not notice, since it has just begun, the servers do."""
        if self.faults:
            self.faults -= 1
            process = choice.choice(self.net.primaries())
            shards = [s for p, s in self.net.shards.items() if self.net.host[p] == process]
            last = {s.node.id: s._asked for s in shards}  # of its present life
            for node in self.net.end(process):
                if noticed:
                    self.missed(node)
                    continue
                for p in self.net.shards.keys() - self.net.frozen:
                    missed = self.net.shards[p].miss(node, last[node], "broke")
                    self.net.send(p, SCHEDULER, missed)

    @rule()
    def replace_scheduler(self) -> None:
        """Another goes on from the journal; what was under way is lost, all greet it."""
        journal = json.loads(json.dumps(self.net.scheduler.journal()))
        self.net.scheduler = Scheduler(W, S)
        self.net.scheduler.resume(journal)
        for line, queue in self.net.lines.items():
            if SCHEDULER in line:
                queue.clear()
        for p in sorted(self.net.shards.keys() - self.net.frozen):
            self.greet(p)
        for w in range(W):
            self.net.send(w, SCHEDULER, Present(0, w, self.numbers[w], ""))
            self.numbers[w] += 1
            self.repeat(w, SCHEDULER)

    def repeat(self, worker: int, to: int) -> None:
        where = to if to == SCHEDULER else self.net.links[worker, to]
        for server, request in self.open[worker].values():
            if server == to:
                self.net.send(worker, where, request)

    def hear(self) -> None:
        for worker, answers in enumerate(self.net.heard):
            for a in answers:
                assert not isinstance(a, Error), a.text
                found = self.open[worker].pop(a.number, None)
                if found is not None and isinstance(found[1], Barrier):
                    assert isinstance(a, Reply)
                    self.passed[worker] += 1
            answers.clear()
        renewed, self.net.renewed = self.net.renewed, []
        for worker, server in renewed:
            self.repeat(worker, server)

    @invariant()
    def nobody_passes_a_barrier_alone(self) -> None:
        if hasattr(self, "net"):
            assert max(self.passed) <= min(self.asked)

    def settle(self) -> None:
        while self.net.busy() or self.net.renewed:
            self.net.deliver_all()
            self.hear()

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        self.come_back()
        self.settle()
        for worker in range(W):
            self.barrier(worker)
        self.settle()
        assert self.passed == [max(self.asked)] * W
        assert not any(self.open), self.open
        for server in SERVERS:
            shard = self.net.shards[self.net.at[server]]
            copies = [s.replicas[server] for s in self.net.shards.values() if server in s.replicas]
            for store in (shard.store, *copies):
                entry = store.entries[f"w{server}"]
                waiting = [p.value for r in entry.rounds.values() for p in r.values()]
                assert sum([entry.value, *waiting]).item() == self.pushed[server]


Silence.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
test_who_comes_back_corrupts_nothing_in_300_schedules = Silence.TestCase


# -- one thing at a time -----------------------------------------------------------


def test_a_server_that_was_given_up_hears_so_from_its_backup() -> None:
    net = Processes(Terms("dist_async", 100, replication=2))
    push = Push(0, 0, 5, "w", (1,), 0, torch.ones(1))
    (copy,) = Backups(0, 2, [3]).copies(push)
    net.shards[3].hear(Departed(0, 3, -1, 2, "its connection was lost", LIFE))
    net.send(2, 3, copy)
    net.deliver(2, 3)
    assert isinstance(net.lines[3, 2][-1], Error)
    net.deliver(3, 2)
    assert 2 not in net.shards


class Wire:
    """A worker's connections, as a test has them."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Request]] = []
        self.comes: list[Message] = []
        self.back: set[int] = set()
        self.renewed: list[int] = []

    def send(self, to: int, requests: list[Request]) -> None:
        self.sent += [(to, r) for r in requests]

    def receive(self, *, wait: bool) -> list[Message]:
        assert self.comes or not wait, "would wait for ever"
        found, self.comes = self.comes, []
        return found

    def renew(self, node: int, endpoint: str) -> None:
        self.renewed.append(node)
        self.back.add(node)

    def lost(self) -> dict[int, str]:
        return {}

    def again(self) -> set[int]:
        back, self.back = self.back, set()
        return back

    def close(self) -> None:
        pass


def asking() -> tuple[Wire, Requests]:
    wire = Wire()
    requests = Requests(wire, 0, 0, name=Node("scheduler", 0, W, S, "f").name)
    requests.greetings[W + S] = Present, ("", 7)
    requests.post(Call(2, Push, ("w", (1,), 0, torch.ones(1))))
    requests.dispatch()
    return wire, requests


def test_a_worker_connects_anew_and_repeats_what_is_open() -> None:
    wire, requests = asking()
    wire.comes = [Replaced(0, 0, -1, 2, "ipc://x")]
    requests.dispatch()
    assert wire.renewed == [2]
    assert [(to, type(r), r.number) for to, r in wire.sent] == [(2, Push, 0)] * 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "its connection was lost",
            r"server 0 has ended \(its connection was lost\) while .*Lost with",
        ),
        (
            silence(1.5),
            r"server 0 gave no sign of life for 1.5 s and was ended while .*SIGSTOP"
            r".*heartbeat_timeout.*Lost with node 2: \['w'\]",
        ),
    ],
)
def test_a_worker_hears_that_a_server_and_its_values_are_gone(how: str, says: str) -> None:
    wire, requests = asking()
    requests.loss = lambda node, keys: f"Lost with node {node}: {keys}. "
    wire.comes = [Departed(0, 0, -1, 2, how, LIFE)]
    with pytest.raises(KVStoreError, match=says):
        requests.flush()


def test_a_worker_greets_another_scheduler_and_hears_if_it_was_given_up() -> None:
    wire, requests = asking()
    wire.back = {W + S}
    requests.dispatch()
    to, greeting = wire.sent[-1]
    assert (to, type(greeting), greeting.pid) == (W + S, Present, 7)
    wire.comes = [given_up(greeting, "worker 0")]
    with pytest.raises(KVStoreError, match="worker 0 was given up"):
        requests.flush()
    with pytest.raises(KVStoreError, match="worker 0 was given up"):
        requests.ask([Call(3, SetOptimizer, ("sgd", {}))])
