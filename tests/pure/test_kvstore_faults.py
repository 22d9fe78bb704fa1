"""Crashes, delays, echoes and reorderings: every push counts exactly once, whatever happens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from distkit.bench.kvstore_schedules import MODES, SERVERS, Network, S, Schedule, W, at_random
from distkit.kvstore.entry import Ledger
from distkit.kvstore.messages import Departed, Init, Pull, Push, SetOptimizer
from distkit.kvstore.replication import Backups, changes, original, ring
from distkit.kvstore.wire import decode, encode

WORKER, SERVER = st.integers(0, W - 1), st.sampled_from(SERVERS)
CHANCE = st.randoms(use_true_random=False)


class Faults(RuleBasedStateMachine):
    """Hypothesis says what happens next in a schedule."""

    @initialize(mode=st.sampled_from(MODES), copies=st.integers(1, S))
    def start(self, mode: str, copies: int) -> None:
        self.schedule = Schedule(mode, copies)

    @rule(worker=WORKER, server=SERVER, pulls=st.booleans())
    def push(self, worker: int, server: int, pulls: bool) -> None:
        self.schedule.push(worker, server, pulls=pulls)

    @rule(worker=WORKER, server=SERVER)
    def pull(self, worker: int, server: int) -> None:
        self.schedule.pull(worker, server)

    @rule(chance=CHANCE, count=st.integers(1, 6))
    def deliver(self, chance, count: int) -> None:
        self.schedule.deliver(chance, count)

    @precondition(lambda self: self.schedule.sent)
    @rule(chance=CHANCE)
    def echo(self, chance) -> None:
        self.schedule.echo(chance)

    @precondition(lambda self: self.schedule.crashes > 0)
    @rule(chance=CHANCE)
    def crash(self, chance) -> None:
        self.schedule.crash(chance)

    @rule(worker=WORKER)
    def repeat(self, worker: int) -> None:
        self.schedule.repeat(worker)

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            assert self.schedule.end() == []


Faults.TestCase.settings = settings(max_examples=500, stateful_step_count=30, deadline=None)
test_every_push_counts_once_in_500_schedules_of_faults = Faults.TestCase


@pytest.mark.parametrize(
    ("broken", "name", "instead"),
    [
        (Ledger, "knows", lambda self, push: False),  # counts what comes again
        (Backups, "copies", lambda self, request: []),  # loses what it acknowledged
    ],
)
def test_schedules_at_random_find_what_is_broken(monkeypatch, broken, name, instead) -> None:
    assert not any(at_random(seed) for seed in range(50))
    monkeypatch.setattr(broken, name, instead)
    assert any(at_random(seed) for seed in range(50))


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
