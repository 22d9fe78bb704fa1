"""Consistency models, crashes and the Trainer on real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest
import torch
from kvstore_nodes import Nodes, start_nodes, wait_until
from kvstore_nodes import fork_server as fork_server

from distkit import kvstore
from distkit.kvstore import KVStore, Trainer
from tests.support.in_process import InProcess


@pytest.fixture(scope="module")
def nodes(fork_server: None) -> Iterator[Nodes]:
    """Two workers and two servers, shared by several runs."""
    with start_nodes(2, 2) as nodes:
        yield nodes


@pytest.fixture
def killable_nodes(fork_server: None) -> Iterator[Nodes]:
    """Two workers and two servers, which the test may kill."""
    with start_nodes(2, 2) as nodes:
        yield nodes


def flag(kv: KVStore, name: str) -> Path:
    """Return the file that a worker creates when it reaches a point."""
    return Path(gettempdir(), f"kv-{os.getppid()}-{name}")


def flag_of(nodes: Nodes, name: str) -> Path:
    return Path(gettempdir(), f"kv-{psutil.Process(nodes.processes[0].pid).ppid()}-{name}")


# -- a server that exits -------------------------------------------------------------


def add_while_a_server_exits(kv: KVStore) -> list[float]:
    kv.set_optimizer(kvstore.SGD(learning_rate=-1, momentum=0.0))
    keys = list(range(6))
    kv.init([*keys, "big"], [torch.zeros(1)] * 6 + [torch.zeros(50_000)])
    for n in range(60):
        if n == 20 and kv.rank == 0:
            flag(kv, "now").touch()
        kv.push(keys, [torch.full((1,), 2.0**kv.rank)] * 6)
        kv.push("big", torch.full((50_000,), 2.0**kv.rank))
        if n % 3 == 0:
            kv.pull([*keys, "big"])
    kv.barrier()
    *small, big = kv.pull([*keys, "big"])
    assert bool((big == big[0]).all())
    return [v.item() for v in small] + [big[0].item()]


@pytest.mark.parametrize(("mode", "server"), [("dist_sync", 0), ("dist_async", 1)])
def test_killed_server_loses_no_acknowledged_push(
    killable_nodes: Nodes, mode: str, server: int
) -> None:
    killable_nodes.begin(mode, add_while_a_server_exits, replication=2, bigarray_bound=1000)
    reached = flag_of(killable_nodes, "now")
    wait_until(reached.exists)
    reached.unlink()
    killable_nodes.processes[2 + server].kill()
    assert [killable_nodes.result(0), killable_nodes.result(1)] == [[60.0 * 3] * 7] * 2


def adapt_while_a_server_exits(kv: KVStore) -> list[torch.Tensor]:
    """Use two optimizers with momentum, and replace one of them."""
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5, wd=0.1)
    kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9, keys=["h"])
    kv.init(["e", "h"], [torch.zeros(500, 4), torch.ones(300)])
    for n in range(40):
        if n == 15 and kv.rank == 0:
            flag(kv, "now").touch()
        if n == 25:
            kv.set_optimizer("sgd", learning_rate=0.01, momentum=0.9, keys=["h"], replace=True)
        kv.push("e", torch.full((500, 4), n + kv.rank + 1.0))
        kv.push("h", torch.full((300,), kv.rank - n / 20))
        kv.pull(["e", "h"])
    kv.barrier()
    return kv.pull(["e", "h"])


def test_optimizer_state_survives_the_death_of_a_server(killable_nodes: Nodes) -> None:
    (expected, _), before = InProcess(2, 2, bound=100).run(adapt_while_a_server_exits), os.getppid()
    Path(gettempdir(), f"kv-{before}-now").unlink()
    killable_nodes.begin("dist_sync", adapt_while_a_server_exits, replication=2, bigarray_bound=100)
    reached = flag_of(killable_nodes, "now")
    wait_until(reached.exists)
    reached.unlink()
    killable_nodes.processes[2].kill()
    for worker in range(2):
        for found, value in zip(killable_nodes.result(worker), expected, strict=True):
            assert torch.equal(found, value)


def test_server_death_without_replicas_raises(killable_nodes: Nodes) -> None:
    killable_nodes.begin("dist_async", add_while_a_server_exits)
    reached = flag_of(killable_nodes, "now")
    wait_until(reached.exists)
    reached.unlink()
    killable_nodes.processes[2].kill()
    for worker in range(2):
        result = killable_nodes.result(worker)
        assert "server 0 exited" in result
        assert "The values that only server 0 had are lost" in result
        assert "create the store with replication=2" in result


# -- consistency --------------------------------------------------------------------


def run_ahead(kv: KVStore) -> float:
    """Worker 1 pushes its only gradient after worker 0 has exceeded the staleness bound."""
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1))
    if kv.rank == 1:
        wait_until(flag(kv, "two").exists)
        flag(kv, "two").unlink()
        kv.push("w", torch.full((1,), 100.0))
        kv.barrier()
        return 0.0
    for _ in range(2):
        kv.pushpull("w", torch.ones(1))
    kv.push("w", torch.ones(1))
    flag(kv, "two").touch()
    value = kv.pull("w").item()  # three ahead: waits for worker 1
    kv.barrier()
    return value


def test_pull_waits_for_workers_beyond_the_staleness_bound(nodes: Nodes) -> None:
    assert nodes.run("dist_async", run_ahead, staleness=2)[0] == 103


def push_late(kv: KVStore) -> tuple[float, int]:
    kv.init("w", torch.zeros(1))
    kv.pull("w")
    kv.barrier()
    if kv.rank == 1:
        wait_until(flag(kv, "done").exists)
        flag(kv, "done").unlink()
        kv.push("w", torch.full((1,), 100.0))
        return kv.pull("w").item(), kv.dropped.get("w", 0)
    value = kv.pushpull("w", torch.ones(1)).item()
    flag(kv, "done").touch()
    return value, kv.dropped.get("w", 0)


def test_late_gradient_of_a_backup_worker_is_dropped(nodes: Nodes) -> None:
    assert nodes.run("dist_sync", push_late, backup=1) == [(1, 0), (1, 1)]


# -- MXNet's calls and the Trainer --------------------------------------------------


def many_calls(kv: KVStore) -> list[object]:
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.set_optimizer(kvstore.SGD(learning_rate=-1, momentum=0.5, multi_precision=True))
    kv.init("e", torch.arange(4000.0).view(1000, 4))
    kv.init("h", torch.zeros(8, dtype=torch.float16))
    kv.push("e", torch.full((1000, 4), 0.6))
    kv.push("h", [torch.full((8,), 0.25, dtype=torch.float16)] * 2)
    rows = kv.pull("e")
    kv.barrier()
    return [rows[[3, 499, 500, 999]].tolist(), kv.pull("h").tolist(), kv.traffic.sent]


def test_mxnet_calls_work_across_processes(nodes: Nodes) -> None:
    values = torch.arange(4000.0).view(1000, 4)[[3, 499, 500, 999]] + 1
    for rows, half, sent in nodes.run("dist_sync_device", many_calls, bigarray_bound=1000):
        assert rows == values.tolist()
        assert half == [1.0] * 8
        assert sent == 1000 + 2


OPTIONS = {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.01}


def _train(kv: KVStore, on_store: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    part = torch.randn(6, 8, 5)[:, kv.rank :: kv.num_workers]
    trainer = Trainer(net.parameters(), "sgd", OPTIONS, kv, update_on_kvstore=on_store)
    for batch in part:
        net.zero_grad()
        net(batch).square().sum().backward()
        trainer.step(8)
    return [w.detach() for w in net.parameters()]


def test_both_update_modes_equal_one_process(nodes: Nodes) -> None:
    (expected,) = InProcess(1).run(partial(_train, on_store=False))
    for on_store in (True, False):
        for weights in nodes.run("dist_sync", partial(_train, on_store=on_store)):
            torch.testing.assert_close(weights, expected)
