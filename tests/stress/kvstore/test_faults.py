"""Killed processes, and random bytes on the sockets, while a parameter server is running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import distkit as dk
from distkit import kvstore
from tests.support.kvstore_nodes import send_random_bytes, wait_until

WORKERS, SERVERS = 4, 2
#: Time of the kill, and duration of the run [s].
KILL_TIME, DURATION = 0.5, 1.5


def push_for_a_while(dying_rank: int | None, **options: Any) -> tuple[float, int, list[float]]:
    """Push and pull for a while; worker ``dying_rank`` kills itself.

    Returns:
        The longest pause [s], the number of this worker's pushes to each key, and the values.
    """
    kv = kvstore.create("dist_async", **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    keys, ones = list(range(8)), torch.ones(1000, dtype=torch.float64)  # on both servers
    kv.init(keys, [torch.zeros_like(ones)] * len(keys))
    kv.barrier()
    start = last = time.monotonic()
    pause, sent = 0.0, 0
    while last < start + DURATION:
        if kv.rank == dying_rank and last > start + KILL_TIME:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push(keys, [ones] * len(keys))
        kv.pull(keys)
        sent += 1
        now = time.monotonic()
        pause, last = max(pause, now - last), now
    kv.barrier()
    return pause, sent, [value[0].item() for value in kv.pull(keys)]


def test_killed_worker_does_not_stop_others_in_dist_async() -> None:
    with dk.Cluster(workers=WORKERS, servers=SERVERS) as cluster:
        with pytest.warns(dk.errors.CommunicationWarning, match="worker 3 exited"):
            found = cluster.run(push_for_a_while, WORKERS - 1).results
    assert found.pop() is None
    assert max(pause for pause, _, _ in found) < 5


def test_killed_servers_lose_no_acknowledged_push() -> None:
    with dk.Cluster(workers=WORKERS, servers=SERVERS) as cluster:
        for server in range(SERVERS):
            run = cluster.submit(push_for_a_while, None, replication=2)
            wait_until(lambda run=run: len(run.trace) > 100)
            cluster.kill(f"server {server}")
            with pytest.warns(dk.errors.CommunicationWarning, match=r"its backup took over"):
                found = run.wait().results
            assert max(pause for pause, _, _ in found) < 5
            total = sum(sent for _, sent, _ in found)
            assert [values for _, _, values in found] == [[total] * 8] * WORKERS


def push_ones(flag: str) -> tuple[float, float]:
    """Push ones until the flag exists; return the value and the expected value."""
    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init(["w", "pushes"], [torch.zeros(1, dtype=torch.float64)] * 2)
    pushed = 0
    while not Path(flag).exists():
        kv.push("w", torch.ones(1, dtype=torch.float64))
        kv.pull("w")
        pushed += 1
    kv.push("pushes", torch.tensor([pushed], dtype=torch.float64))
    kv.barrier()
    value, pushes = kv.pull(["w", "pushes"])
    return value.item(), pushes.item()


def test_random_bytes_change_no_value(tmp_path: Path) -> None:
    with dk.Cluster(workers=2, servers=1) as cluster:
        run = cluster.submit(push_ones, str(tmp_path / "flag"))
        wait_until(lambda: len(run.trace) > 100)
        paths = [p for p in Path(cluster._supervisor.folder).iterdir() if p.is_socket()]
        assert paths
        for path in paths:
            send_random_bytes(path, 10_000)
        (tmp_path / "flag").touch()
        for value, expected in run.wait(60).results:
            assert value == expected > 0
