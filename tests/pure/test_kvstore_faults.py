"""Crashes, delays, echoes and reorderings: every push counts exactly once, whatever happens."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from distkit.kvstore.messages import (
    AddressBook,
    Answer,
    Copy,
    Departed,
    Error,
    Init,
    Message,
    Pull,
    Push,
    Reply,
    Request,
    SetOptimizer,
)
from distkit.kvstore.node import Node
from distkit.kvstore.replication import Backups, changes, original, ring
from distkit.kvstore.server import KVServer
from distkit.kvstore.shard import Shard
from distkit.kvstore.wire import decode, encode

W, S = 2, 3
SERVERS = range(W, W + S)


class Network:
    """Servers in processes, and connections that each keep their order, and nothing else."""

    def __init__(self, mode: str, replication: int, on_crash: str = "continue") -> None:
        terms = {"replication": replication, "on_crash": ["halt", "continue"].index(on_crash)}
        self.hosts = {n: [Shard(Node("server", n - W, W, S, "f"))] for n in SERVERS}
        self.lines: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.dead: set[int] = set()
        self.heard: dict[int, list[Answer]] = defaultdict(list)  # by worker
        everybody = dict.fromkeys(range(W + S), "")
        for n, (shard,) in self.hosts.items():
            shard.hear(AddressBook(0, n, 0, mode, 100, everybody, terms))

    def shard(self, node: int) -> Shard | None:
        return next((s for h in self.hosts.values() for s in h if s.node.id == node), None)

    def send(self, src: int, dst: int, message: Message) -> None:
        self.lines[src, dst].append(message)

    def deliver(self, line: tuple[int, int]) -> None:
        """The next message of a connection."""
        message, dst = self.lines[line].popleft(), line[1]
        if dst < W:
            self.heard[dst].append(message)
            return
        shard = self.shard(dst)
        if shard is None:
            return
        said = shard.handle(message) if isinstance(message, Request) else shard.hear(message)
        for m in said:
            self.send(dst, m.to if isinstance(m, Copy) else m.node, m)
        for host in self.hosts.values():
            for heir in [heir for s in host for heir in take(s.heirs)]:
                host.append(heir)  # it registers, and hears who has ended so far
                for who in self.dead - {heir.node.id}:
                    self.send(-1, heir.node.id, self.departed(heir.node.id, who))

    def deliver_all(self) -> None:
        while lines := [line for line, queue in self.lines.items() if queue]:
            self.deliver(lines[0])

    def crash(self, host: int) -> None:
        """A server's process ends: what was under way to and from it is lost."""
        gone = [s.node.id for s in self.hosts.pop(host)]
        self.dead |= set(gone)
        for line, queue in self.lines.items():
            if set(line) & set(gone):
                queue.clear()
        for left in [s.node.id for h in self.hosts.values() for s in h]:
            for who in gone:
                self.send(-1, left, self.departed(left, who))

    def departed(self, to: int, who: int) -> Departed:
        return Departed(0, to, 0, who, "signal SIGKILL", 0)


def take(heirs: list[Shard]) -> list[Shard]:
    found = list(heirs)
    heirs.clear()
    return found


def held(store: KVServer, key: str) -> float:
    """All that it has of what was pushed: applied, or waiting for its round."""
    entry = store.entries[key]
    waiting = [p.value for arrived in entry.rounds.values() for p in arrived.values()]
    return sum([entry.value, *waiting]).item()


class Faults(RuleBasedStateMachine):
    """Workers push to every server, each push a bit of its own; beside it, what they pushed."""

    @initialize(mode=st.sampled_from(["dist_sync", "dist_async"]), copies=st.integers(1, S))
    def start(self, mode: str, copies: int) -> None:
        self.net, self.crashes = Network(mode, copies), copies - 1
        self.numbers = [0] * W
        self.sent: dict[tuple[int, int], tuple[int, Push]] = {}  # all of them
        self.open: list[set[int]] = [set() for _ in range(W)]  # not acknowledged
        self.pushed: dict[int, float] = defaultdict(float)
        for server in SERVERS:
            self.ask(0, server, SetOptimizer, "sgd", {"learning_rate": -1.0})
            value = torch.zeros(1, dtype=torch.float64)
            self.ask(0, server, Init, f"w{server}", (1,), "float64", value)
        self.settle()

    def ask(self, worker: int, server: int, kind: type[Request], *fields: object) -> Request:
        request = kind(0, worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        self.net.send(worker, server, request)
        return request

    @rule(worker=st.integers(0, W - 1), server=st.sampled_from(SERVERS))
    def push(self, worker: int, server: int) -> None:
        value = 2.0 ** len(self.sent)
        self.pushed[server] += value
        settled = min(self.open[worker], default=self.numbers[worker])
        gradient = torch.full((1,), value, dtype=torch.float64)
        push = self.ask(worker, server, Push, f"w{server}", (1,), 0, gradient, settled)
        self.sent[worker, push.number] = server, push
        self.open[worker].add(push.number)

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 6))
    def deliver(self, choice, count: int) -> None:
        for _ in range(count):
            if lines := sorted(line for line, queue in self.net.lines.items() if queue):
                self.net.deliver(choice.choice(lines))
        self.hear()

    @precondition(lambda self: self.sent)
    @rule(choice=st.randoms(use_true_random=False))
    def echo(self, choice) -> None:
        """A message comes again, however old."""
        worker, number = choice.choice(sorted(self.sent))
        server, push = self.sent[worker, number]
        self.net.send(worker, server, push)

    @rule(worker=st.integers(0, W - 1), server=st.sampled_from(SERVERS))
    def pull(self, worker: int, server: int) -> None:
        self.ask(worker, server, Pull, f"w{server}")

    @precondition(lambda self: self.crashes > 0)
    @rule(choice=st.randoms(use_true_random=False))
    def crash(self, choice) -> None:
        self.crashes -= 1
        self.net.crash(choice.choice(sorted(self.net.hosts)))

    @rule(worker=st.integers(0, W - 1))
    def repeat(self, worker: int) -> None:
        """A worker has connected again: what was not acknowledged goes out again."""
        for number in sorted(self.open[worker]):
            self.net.send(worker, *self.sent[worker, number])

    def hear(self) -> None:
        for worker, answers in self.net.heard.items():
            for a in answers:
                assert not isinstance(a, Error), a.text
                assert isinstance(a, Reply)
                self.open[worker].discard(a.number)
            answers.clear()

    def settle(self) -> None:
        self.net.deliver_all()
        self.hear()

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        self.settle()
        for worker in range(W):
            self.repeat(worker)
        self.settle()
        assert not any(self.open)
        for server in SERVERS:
            shard = self.net.shard(server)
            assert shard is not None
            assert held(shard.store, f"w{server}") == self.pushed[server]
            for host in self.net.hosts.values():
                for replica in (s.replicas.get(server) for s in host):
                    if replica is not None:
                        assert held(replica, f"w{server}") == self.pushed[server]


Faults.TestCase.settings = settings(max_examples=500, stateful_step_count=30, deadline=None)
test_every_push_counts_once_in_500_schedules_of_faults = Faults.TestCase


# -- one thing at a time -----------------------------------------------------------


def push(worker: int, number: int, value: float, server: int = W) -> Push:
    return Push(0, worker, number, f"w{server}", (1,), 0, torch.full((1,), value))


def started(mode: str = "dist_async", replication: int = 2, on_crash: str = "continue") -> Network:
    net = Network(mode, replication, on_crash)
    for server in SERVERS:
        net.send(0, server, SetOptimizer(0, 0, 0, "sgd", {"learning_rate": -1.0}))
        net.send(0, server, Init(0, 0, 1, f"w{server}", (1,), "float32", torch.zeros(1)))
    net.deliver_all()
    net.heard.clear()
    return net


def test_nothing_is_acknowledged_before_every_backup_has_it() -> None:
    net = started(replication=3)
    net.send(0, W, push(0, 5, 1.0))
    net.send(1, W, Pull(0, 1, 6, f"w{W}"))
    net.deliver((0, W))
    net.deliver((1, W))  # it would show what may still be lost
    for backup in (W + 1, W + 2):
        assert not net.lines[W, 0]
        assert not net.lines[W, 1]
        net.deliver((W, backup))
        net.deliver((backup, W))
    assert net.lines[W, 0]
    assert net.lines[W, 1]


def test_the_heir_has_what_was_acknowledged_and_the_optimizer() -> None:
    net = started()
    net.send(0, W, push(0, 5, 3.0))
    net.deliver_all()
    net.crash(W)
    net.deliver_all()
    heir = net.shard(W)
    assert heir in net.hosts[W + 1]
    net.send(0, W, push(0, 5, 3.0))
    net.send(1, W, push(1, 5, 4.0))
    net.deliver_all()
    assert heir.store.entries[f"w{W}"].value.item() == 7
    assert [a.number for a in net.heard[0]] == [5, 5]


def test_a_backup_that_ends_holds_nobody_up() -> None:
    net = started()
    net.send(0, W, push(0, 5, 1.0))
    net.deliver((0, W))
    net.crash(W + 1)
    net.deliver_all()
    assert [a.number for a in net.heard[0]] == [5]


@pytest.mark.parametrize("first", ["worker", "server"])
def test_a_worker_and_a_server_end_in_any_order(first: str) -> None:
    net = started("dist_sync")
    net.send(0, W, push(0, 5, 1.0))
    net.send(0, W, Pull(0, 0, 6, f"w{W}"))
    net.deliver_all()
    if first == "server":
        net.crash(W)
        net.deliver_all()
    for left in [s.node.id for h in net.hosts.values() for s in h]:
        net.send(-1, left, Departed(0, left, 0, 1, "signal SIGKILL", 100))
    if first == "worker":
        net.crash(W)
    net.deliver_all()
    net.send(0, W, Pull(0, 0, 6, f"w{W}"))
    net.deliver_all()
    assert net.heard[0][-1].value.item() == 1


def test_an_heir_lives_for_its_run_alone() -> None:
    net = started()
    net.crash(W)
    net.deliver_all()
    heir = net.shard(W)
    assert heir.handle(Pull(1, 0, 0, "w")) == []
    assert heir.store is None


def test_a_copy_of_an_earlier_run_ends_nobody() -> None:
    net = started()
    (copy,) = Backups(0, W, [W + 1]).copies(push(0, 5, 1.0))
    backup = net.shard(W + 1)
    backup.handle(Pull(1, 0, 0, "w"))
    assert backup.handle(copy) == []


def test_a_copy_that_reaches_the_heir_of_a_backup_is_not_acknowledged() -> None:
    net = started()
    net.crash(W + 1)
    net.deliver_all()
    (copy,) = Backups(0, W, [W + 1]).copies(push(0, 5, 1.0))
    assert net.shard(W + 1).handle(copy) == []


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_a_copy_is_the_message(size: int) -> None:
    message = Push(0, 1, 5, "w", (size,), 7, torch.arange(float(size)), 4, "")
    (copy,) = Backups(0, W, [W + 1]).copies(message)
    (came,) = decode(encode(copy)).messages
    found = original(came)
    assert (found.number, found.shape, found.settled) == (5, (size,), 4)
    assert torch.equal(found.value, message.value)
    gone = original(Backups(0, W, [3]).copies(Departed(0, 2, 0, 1, "x", 9))[0])
    assert (gone.who, gone.how, gone.first) == (1, "x", 9)
    assert not changes(Pull(0, 0, 0, "w"))
    assert not changes(Init(0, 1, 0, "w", (1,), "float32"))


def test_rings_go_round() -> None:
    assert [ring(i, 3, 2) for i in range(3)] == [[0, 1], [1, 2], [2, 0]]
