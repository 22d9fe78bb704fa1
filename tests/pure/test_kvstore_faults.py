"""Crashes, delays, echoes and reorderings: every push counts exactly once, whatever happens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from benchmarks.kvstore_schedules import (
    MODES,
    SERVERS,
    Network,
    S,
    Schedule,
    W,
    at_random,
    happen,
)
from distkit.consistency import Asynchronous, Synchronous
from distkit.kvstore.protocol.entry import Ledger
from distkit.kvstore.protocol.messages import (
    GIVE,
    Departed,
    Init,
    Leave,
    Pull,
    Push,
    Reply,
    SetOptimizer,
)
from distkit.kvstore.protocol.placement import Part
from distkit.kvstore.protocol.replication import Backups, changes, portions, restore, ring
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.protocol.sparse import Rows, pack
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.scheduler import LIFE, Scheduler

EVENTS = [
    "push",
    "deliver",
    "pull",
    "echo",
    "repeat",
    "crash",
    "come",
    "crash_chief",
    "leave",
    "again",
    "beyond",
]


class Faults(RuleBasedStateMachine):
    """Hypothesis says what happens next in a schedule."""

    @initialize(mode=st.sampled_from(MODES), copies=st.integers(1, S))
    def start(self, mode: str, copies: int) -> None:
        self.schedule = Schedule(mode, copies)

    @rule(event=st.sampled_from(EVENTS), chance=st.randoms(use_true_random=False))
    def happens(self, event: str, chance) -> None:
        happen(self.schedule, event, chance)

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            assert self.schedule.end() == []


Faults.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_every_push_counts_once_whatever_ends_whenever = Faults.TestCase


@pytest.mark.parametrize(
    ("broken", "name", "instead"),
    [
        (Ledger, "knows", lambda self, push: False),  # counts what comes again
        (Backups, "copies", lambda self, request: []),  # loses what it acknowledged
        (Backups, "begin", lambda self, node, everything: []),  # makes no copies anew
        (Backups, "lost", lambda self, node: []),  # waits for those who have ended
        (Scheduler, "_invite", lambda self, process: []),
        (Scheduler, "_appoint", lambda self: []),
        (Scheduler, "_lost", lambda self: []),
        (Scheduler, "missing", lambda self, alive: []),  # who ended together with the scheduler
        (Scheduler, "asker", lambda self, request: request.node),
    ],
)
def test_schedules_at_random_find_what_is_broken(monkeypatch, broken, name, instead) -> None:
    monkeypatch.setattr(broken, name, instead)
    assert any(is_wrong(seed) for seed in range(300))


def is_wrong(seed: int) -> bool:
    """Whether a schedule shows that something is broken: by its rules, or by an exception."""
    try:
        return bool(at_random(seed))
    except Exception:
        return True


def test_schedules_at_random_find_nothing() -> None:
    assert [seed for seed in range(100) if at_random(seed)] == []


# -- one thing at a time -----------------------------------------------------------


def push(worker: int, number: int, value: float, server: int = W) -> Push:
    return Push(0, worker, number, f"w{server}", (1,), 0, torch.full((1,), value))


def replies(net: Network) -> list[int]:
    """The numbers of what the servers have answered to worker 0."""
    return [a.number for a in net.heard[0] if isinstance(a, Reply)]


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
    assert replies(net) == [5, 5]


def test_a_backup_that_ends_holds_nobody_up() -> None:
    net = started()
    net.send(0, W, push(0, 5, 1.0))
    net.deliver((0, W))
    net.crash(W + 1)
    net.deliver_all()
    assert replies(net) == [5]


@pytest.mark.parametrize("first", ["worker", "server"])
def test_a_worker_and_a_server_end_in_any_order(first: str) -> None:
    net = started("dist_sync")
    net.send(0, W, push(0, 5, 1.0))
    net.send(0, W, Pull(0, 0, 6, f"w{W}"))
    net.deliver_all()
    if first == "server":
        net.crash(W)
        net.deliver_all()
    net.leave(1)
    if first == "worker":
        net.crash(W)
    net.deliver_all()
    net.send(0, W, Pull(0, 0, 6, f"w{W}"))
    net.deliver_all()
    assert [a for a in net.heard[0] if isinstance(a, Reply)][-1].value.item() == 1


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
    found = came.message
    assert (found.number, found.shape, found.settled) == (5, (size,), 4)
    assert torch.equal(found.value, message.value)
    gone = Backups(0, W, [3]).copies(Departed(0, 2, 0, 1, "x", 9))[0].message
    assert (gone.who, gone.how, gone.first) == (1, "x", 9)
    assert not changes(Pull(0, 0, 0, "w"))
    assert not changes(Init(0, 1, 0, "w", (1,), "float32"))


def test_rings_go_round() -> None:
    assert [ring(i, 3, 2) for i in range(3)] == [[0, 1], [1, 2], [2, 0]]


# -- copies that are made anew -------------------------------------------------------


def test_nobody_waits_for_a_copy_that_is_being_made() -> None:
    backups = Backups(0, W, [3])
    (first,) = backups.begin(9, [push(0, 1, 1.0)])
    mine, its = backups.copies(push(0, 2, 1.0))
    assert (mine.to, its.to) == (3, 9)
    answer = Reply(0, 0, 2)
    assert backups.hold([answer]) == []
    assert backups.arrived(mine.number) == []
    assert backups.hold([]) == [answer]  # the one that joins has not confirmed anything
    assert backups.arrived(first.number) == [9]
    told = Leave(0, 9, 0, "")
    assert backups.hold([told]) == []  # not before it has what was answered meanwhile
    backups.arrived(its.number)
    assert backups.hold([]) == [told]


def filled_server() -> KVServer:
    server = KVServer(Synchronous(), range(3), on_crash="continue")
    server.handle(SetOptimizer(0, 0, 0, "sgd", {"learning_rate": 0.5, "momentum": 0.9}))
    for n, key in enumerate(("w", 7, "h")):
        value = torch.ones(4, dtype=torch.float16 if key == "h" else torch.float32)
        server.handle(Init(0, 0, n + 1, key, (2, 2), str(value.dtype)[6:], value))
        for worker in range(3):
            server.handle(Push(0, worker, 10 + n, key, (2, 2), 0, value * worker))
        server.handle(Push(0, 0, 20 + n, key, (2, 2), 1, value, 3))  # of the next round
    server.handle(Pull(0, 0, 30, "w"))
    server.leave(2, "signal SIGKILL", LIFE)
    return server


def test_a_copy_goes_on_as_the_original() -> None:
    server, copy = filled_server(), KVServer(Synchronous(), range(3), on_crash="continue")
    sent = portions(0, W, server)
    assert [p.left for p in sent] == [3, 2, 1, 0]
    came = decode(encode(*Backups(0, W, [3]).begin(3, sent))).messages
    restore(copy, [c.message for c in came])
    for one in (server, copy):
        one.handle(Push(0, 1, 40, "w", (2, 2), 1, torch.full((4,), 3.0)))
    assert torch.equal(server.entries["w"].value, copy.entries["w"].value)
    assert copy.state == server.state
    assert [*map(encode, portions(0, W, copy))] == [*map(encode, portions(0, W, server))]
    assert copy.late(Pull(0, 2, 50, "w"))


def test_a_copy_has_gradients_that_wait_and_states_of_any_shape() -> None:
    server = KVServer(Synchronous(), range(2))
    server.handle(SetOptimizer(0, 0, 0, "torch.optim.Adafactor", {}))
    server.handle(Init(0, 0, 1, "w", (2, 3), "float32", torch.ones(6)))
    for worker in range(2):
        server.handle(Push(0, worker, 2, "w", (2, 3), 0, torch.arange(6.0)))
    gradient = pack(Rows(torch.tensor([1]), torch.ones(1, 3)), Part(0, 0, 6))
    server.handle(Push(0, 0, 3, "w", (2, 3), 1, gradient, codec="rows:float32"))
    came = decode([memoryview(bytearray(f)) for f in encode(*portions(0, W, server))]).messages
    entry = restore(KVServer(Synchronous(), range(2)), came).entries["w"]
    kept, here = server.entries["w"].slots, entry.slots
    assert {k: v.shape for k, v in kept.items()} == {k: v.shape for k, v in here.items()}
    assert all(torch.equal(kept[name], here[name]) for name in kept)
    assert entry.rounds[1][0].value.to_dense().tolist() == [0, 0, 0, 1, 1, 1]
    server.entries["w"].slots["step"] += 1
    assert entry.slots["step"] == 1


def test_the_first_worker_that_is_left_gives_the_value() -> None:
    server = KVServer(Synchronous(), range(3), on_crash="continue")
    for worker in (2, 1):
        assert server.handle(Init(0, worker, 5, "w", (1,), "float32")) == []
    (asked,) = server.leave(0, "signal SIGKILL", LIFE)
    assert (asked.node, asked.number, asked.version) == (1, 5, GIVE)
    (again,) = server.leave(1, "signal SIGKILL", LIFE)
    assert (again.node, again.version) == (2, GIVE)
    done = server.handle(Init(0, 2, 6, "w", (1,), "float32", torch.ones(1)))
    assert [(a.node, a.number, a.version) for a in done] == [(2, 6, 0)]


def test_who_was_asked_for_the_value_may_come_after_a_newcomer() -> None:
    server = KVServer(Asynchronous(), range(3), on_crash="replace")
    server.handle(Init(0, 1, 5, "w", (1,), "float32"))
    server.leave(0, "signal SIGKILL", LIFE)
    server.handle(Init(0, 0, LIFE, "w", (1,), "float32", torch.ones(1)))
    (done,) = server.handle(Init(0, 1, 6, "w", (1,), "float32", torch.zeros(1)))
    assert isinstance(done, Reply)
    assert server.entries["w"].value.item() == 1


def test_two_neighbours_that_end_together_are_told_to_all_workers() -> None:
    net = started(replication=2)
    net.crash(W)
    net.crash(W + 1)
    net.deliver_all()
    for worker in range(W):
        assert [a.who for a in net.heard[worker] if isinstance(a, Departed)] == [W]
    assert net.shard(W + 1) is not None
