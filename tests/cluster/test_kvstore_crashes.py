"""Processes of a parameter server that end, in a cluster: who goes on, and what comes after."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import distkit as dk
from distkit import kvstore


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(workers=2, servers=2) as cluster:
        yield cluster


def adds(mode: str, dies: int | None = None, **options) -> float:
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(4))
    for n in range(50):
        kv.pushpull("w", torch.ones(4))
        if n == 9 and kv.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    return kv.pull("w")[0].item()


@pytest.mark.parametrize(
    ("mode", "options"), [("dist_async", {}), ("dist_sync", {"on_crash": "continue"})]
)
def test_the_others_go_on_without_a_worker(cluster, mode: str, options) -> None:
    with pytest.warns(dk.CommunicationWarning, match="rank 1 ended"):
        run = cluster.run(adds, mode, 1, **options)
    assert run.results == [60, None]
    assert run.trace.meta["ends"]["1"]["how"] == "died"
    assert cluster.run(adds, mode).results == [100, 100]


def test_dist_sync_halts_and_names_the_dead(cluster) -> None:
    with pytest.raises(dk.RankDied, match="rank 1") as error:
        cluster.run(adds, "dist_sync", 1)
    assert "waits for a gradient of worker 1" in error.value.run.trace.meta["ends"]["0"]["text"]
    assert cluster.run(adds, "dist_sync").results == [100, 100]


def node(cluster, i: int) -> int:
    return cluster._room.nodes.children[i].pid


def goes_on(flag: str, rounds: int = 200, **options) -> list[float]:
    """Pushes until the test has killed something, and some rounds more."""
    kv = kvstore.create("dist_async", **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    keys = list(range(6))
    kv.init(keys, [torch.zeros(30_000)] * 6)
    sent = 0
    while rounds:
        kv.push(keys, [torch.ones(30_000)] * 6)
        kv.pull(keys)
        sent += 1
        if sent == 5 and kv.rank == 0:
            Path(flag).touch()
        rounds -= 1
    kv.barrier()
    return [v.unique().item() for v in kv.pull(keys)]


def test_a_server_with_a_backup_may_be_killed(cluster, tmp_path) -> None:
    flag = tmp_path / "now"
    run = cluster.submit(goes_on, str(flag), replication=2)
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    before = node(cluster, 2)
    os.kill(before, signal.SIGKILL)
    assert run.results == [[400.0] * 6] * 2
    assert cluster.run(adds, "dist_sync", replication=2).results == [100, 100]
    assert node(cluster, 2) != before


def wait_for_end(child) -> None:
    deadline = time.monotonic() + 60
    while child.status is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("gone", [[2], [4], [2, 3, 4]])
def test_between_runs_any_of_them_may_end(cluster, gone: list[int]) -> None:
    for i in gone:
        os.kill(node(cluster, i), signal.SIGKILL)
        wait_for_end(cluster._room.nodes.children[i])
    for mode in ("dist_sync", "dist_async"):
        assert cluster.run(adds, mode).results == [100, 100]
