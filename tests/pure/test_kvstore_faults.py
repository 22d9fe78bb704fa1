"""Servers that end: every acknowledged push counts exactly once.

A sample of :mod:`tests.stress.kvstore.schedules`: 100 of its random schedules.
"""

from __future__ import annotations

import pytest
import torch

from distkit.kvstore.protocol.messages import Departed, Init, Pull, Push, Reply, SetOptimizer
from distkit.kvstore.protocol.server import Entry
from distkit.kvstore.protocol.wire import decode, encode
from distkit.kvstore.transport.session import Backup, ServerSession, backup_of
from tests.stress.kvstore.schedules import SERVERS, Network, W, at_random


@pytest.mark.parametrize(
    ("broken", "name", "instead"),
    [
        (Entry, "knows", lambda self, push: False),  # counts what comes again
        (Backup, "copy", lambda self, request: []),  # loses what it acknowledged
        (Backup, "hold", lambda self, answers: list(answers)),  # acknowledges what may be lost
        (Backup, "lost", lambda self: []),  # waits for a backup that has ended
        (ServerSession, "_in_place_of", lambda self, server: self.stores[server]),
    ],
)
def test_schedules_at_random_find_what_is_broken(monkeypatch, broken, name, instead) -> None:
    monkeypatch.setattr(broken, name, instead)
    assert any(is_wrong(seed) for seed in range(100))


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
        net.send(0, server, SetOptimizer(0, 0, 0, "sgd", {"learning_rate": -1.0}), server)
        init = Init(0, 0, 1, f"w{server}", (1,), "float32", torch.zeros(1))
        net.send(0, server, init, server)
    net.deliver_all()
    net.heard.clear()
    return net


def test_nothing_is_acknowledged_before_the_backup_has_it() -> None:
    net = started()
    net.send(0, W, push(0, 5, 1.0), W)
    net.send(1, W, Pull(0, 1, 6, f"w{W}"), W)
    net.deliver((0, W))
    net.deliver((1, W))  # it would show what may still be lost
    assert not net.lines[W, 0] and not net.lines[W, 1]
    net.deliver((W, W + 1))
    net.deliver((W + 1, W))
    assert net.lines[W, 0] and net.lines[W, 1]


def test_the_backup_has_what_was_acknowledged_and_the_optimizer() -> None:
    net = started()
    net.send(0, W, push(0, 5, 3.0), W)
    net.deliver_all()
    net.crash(W)
    net.deliver_all()
    net.send(0, W + 1, push(0, 5, 3.0), W)
    net.send(1, W + 1, push(1, 5, 4.0), W)
    net.deliver_all()
    assert net.store(W).entries[f"w{W}"].value.item() == 7
    assert replies(net) == [5, 5]


def test_a_backup_that_ends_holds_nobody_up() -> None:
    net = started()
    net.send(0, W, push(0, 5, 1.0), W)
    net.deliver((0, W))
    net.crash(W + 1)
    net.deliver_all()
    assert replies(net) == [5]


@pytest.mark.parametrize("first", ["worker", "server"])
def test_a_worker_and_a_server_end_in_any_order(first: str) -> None:
    net = started("dist_sync")
    net.send(0, W, push(0, 5, 1.0), W)
    net.send(0, W, Pull(0, 0, 6, f"w{W}"), W)
    net.deliver_all()
    if first == "server":
        net.crash(W)
        net.deliver_all()
    net.leave(1)
    if first == "worker":
        net.crash(W)
    net.deliver_all()
    net.send(0, W + 1, Pull(0, 0, 6, f"w{W}"), W)
    net.deliver_all()
    assert [a for a in net.heard[0] if isinstance(a, Reply)][-1].value.item() == 1


def test_a_late_copy_is_acknowledged_to_nobody() -> None:
    net = started()
    net.crash(W)
    net.deliver_all()
    (copy,) = Backup(0, W, W + 1).copy(push(0, 5, 1.0))
    assert net.sessions[W + 1].handle(copy, 0) == []


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_a_copy_is_the_message(size: int) -> None:
    message = Push(0, 1, 5, "w", (size,), 7, torch.arange(float(size)))
    (copy,) = Backup(0, W, W + 1).copy(message)
    (came,) = decode(encode(copy)).messages
    found = came.message
    assert (found.number, found.shape, found.version) == (5, (size,), 7)
    assert torch.equal(found.value, message.value)
    gone = Backup(0, W, 3).copy(Departed(0, 2, 0, 1, "x", 9))[0].message
    assert (gone.who, gone.how, gone.first) == (1, "x", 9)
    assert Backup(0, W, W + 1).copy(Pull(0, 0, 0, "w")) == []


def test_each_server_is_the_backup_of_one() -> None:
    assert [backup_of(i, 3) for i in range(3)] == [1, 2, 0]
