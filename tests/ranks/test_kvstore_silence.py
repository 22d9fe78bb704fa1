"""Hanging nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
from kvstore_nodes import Nodes, forks, started, until

from distkit import kvstore
from distkit.kvstore import KVStore
from distkit.kvstore.protocol import placement


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    with forks():
        yield


@pytest.fixture
def crew(warm: None) -> Iterator[Nodes]:
    """2 workers and 2 servers with a heartbeat timeout of half a second."""
    with started(2, 2, heartbeat_timeout=0.5) as nodes:
        yield nodes


def begin(nodes: Nodes, mode: str, function, **options) -> Path:
    """Start a run; return the folder of its progress files."""
    folder = Path(nodes.folder, "flags")
    folder.mkdir()
    nodes.begin(mode, function, **options)
    return folder


def flag(kv: KVStore, word: str) -> Path:
    line = kv._requests._link._connections[kv._scheduler]
    endpoint = line.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return Path(endpoint.removeprefix("ipc://")).parent / "flags" / word


def adding(kv: KVStore) -> None:
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1))


# -- silence ------------------------------------------------------------------------


def adds_while_a_server_hangs(kv: KVStore) -> float:
    adding(kv)
    for n in range(60):
        if n == 20:
            flag(kv, f"now{kv.rank}").touch()
            until(flag(kv, "stopped").exists)
        kv.push("w", torch.ones(1))
        if n % 3 == 0:
            kv.pull("w")
    kv.barrier()
    flag(kv, f"added{kv.rank}").touch()
    until(flag(kv, "back").exists)
    kv.push("w", torch.ones(1))
    kv.barrier()
    return kv.pull("w").item()


def test_backup_answers_for_a_hung_server(crew: Nodes) -> None:
    home = 2 + placement.home("w", 2)
    flags = begin(crew, "dist_sync", adds_while_a_server_hangs, replication=2)
    until(lambda: all((flags / f"now{r}").exists() for r in range(2)))
    os.kill(crew.processes[home].pid, signal.SIGSTOP)
    (flags / "stopped").touch()
    until(lambda: all((flags / f"added{r}").exists() for r in range(2)))
    os.kill(crew.processes[home].pid, signal.SIGCONT)  # and it gets no more requests
    (flags / "back").touch()
    assert [crew.result(0), crew.result(1)] == [122.0] * 2


def test_hung_server_without_a_backup_is_named(crew: Nodes) -> None:
    home = 2 + placement.home("w", 2)
    flags = begin(crew, "dist_async", adds_while_a_server_hangs)
    until(lambda: all((flags / f"now{r}").exists() for r in range(2)))
    os.kill(crew.processes[home].pid, signal.SIGSTOP)
    (flags / "stopped").touch()
    for worker in range(2):
        said = crew.result(worker)
        assert f"server {home - 2} missed heartbeats for 0.5 s and was killed" in said
        assert "SIGSTOP" in said and "heartbeat_timeout" in said
        assert "replication=2" in said
    crew.processes[home].kill()


def hangs(kv: KVStore) -> float:
    adding(kv)
    kv.barrier()
    if kv.rank == 1:
        kv.pushpull("w", torch.ones(1)) if kv.type == "dist_async" else None
        flag(kv, "now").touch()
        until(flag(kv, "never").exists)
    until(flag(kv, "stopped").exists)
    kv.push("w", torch.ones(1))
    kv.barrier()  # passes when the other counts as dead
    return kv.pull("w").item()


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_hung_worker_counts_as_dead(crew: Nodes, mode: str) -> None:
    flags = begin(crew, mode, hangs)
    until((flags / "now").exists)
    os.kill(crew.processes[1].pid, signal.SIGSTOP)
    (flags / "stopped").touch()
    said = crew.result(0)
    if mode == "dist_async":
        assert said == 2
    else:
        assert "waits for worker 1, which missed heartbeats for 0.5 s and was killed" in said
    crew.processes[1].kill()


def holds_the_lock(kv: KVStore) -> float:
    adding(kv)
    kv.barrier()
    if kv.rank == 1:
        begun = time.monotonic()
        sum(range(60_000_000))  # a single CPython call, which holds the GIL
        assert time.monotonic() - begun > 0.5
        flag(kv, "now1").touch()
    return kv.pushpull("w", torch.ones(1)).item()


def test_worker_that_holds_the_gil_is_not_declared_dead(crew: Nodes) -> None:
    flags = begin(crew, "dist_sync", holds_the_lock)
    assert [crew.result(0), crew.result(1)] == [2, 2]
    assert (flags / "now1").exists()
