"""Nodes that give no sign of life and come back, and schedulers that end in the middle of a run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from kvstore_nodes import WAIT, Nodes, forks, started, until

from distkit import kvstore
from distkit.kvstore import KVStore
from distkit.kvstore.protocol import placement
from distkit.kvstore.protocol.messages import Leave, Missed, Register
from distkit.kvstore.protocol.terms import Terms
from distkit.kvstore.transport.sockets import BROKEN


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    with forks():
        yield


@pytest.fixture
def crew(warm: None) -> Iterator[Nodes]:
    """2 workers and 2 servers, missed when they are silent for half a second."""
    with started(2, 2, broken=True, heartbeat_timeout=0.5) as nodes:
        yield nodes


def begin(nodes: Nodes, mode: str, function, **options) -> Path:
    """Start a run; the folder where its workers and the test tell each other how far they are."""
    folder = Path(nodes.folder, "flags")
    folder.mkdir()
    nodes.begin(mode, function, **options)
    return folder


def flag(kv: KVStore, word: str) -> Path:
    link = kv._requests._link._lines[kv._scheduler].endpoint
    return Path(link.removeprefix("ipc://")).parent / "flags" / word


def adding(kv: KVStore) -> None:
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init("w", torch.zeros(1))


# -- a scheduler that ends ----------------------------------------------------------


def meets(kv: KVStore) -> list[float]:
    """Between two barriers each worker adds 1: all see the same."""
    adding(kv)
    seen = []
    for n in range(60):
        if n == 20 and kv.rank == 0:
            flag(kv, "now").touch()
        kv.push("w", torch.ones(1))
        kv.barrier()
        seen.append(kv.pull("w").item())
        kv.barrier()
    return seen


def replace_scheduler(nodes: Nodes) -> None:
    process = nodes.processes[4]
    process.kill()
    process.join(WAIT)
    nodes.start("scheduler", 0)


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_barriers_go_on_with_another_scheduler(crew: Nodes, mode: str) -> None:
    flags = begin(crew, mode, meets)
    until((flags / "now").exists)
    replace_scheduler(crew)
    assert [crew.result(0), crew.result(1)] == [[2.0 * n for n in range(1, 61)]] * 2
    assert crew.run("dist_sync", trivial) == [0, 1]


def trivial(kv: KVStore) -> int:
    return kv.rank


def dies_later(kv: KVStore) -> float:
    adding(kv)
    kv.barrier()
    flag(kv, f"now{kv.rank}").touch()
    until(flag(kv, "go").exists)
    kv.pushpull("w", torch.ones(1))
    if kv.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return kv.pushpull("w", torch.ones(1)).item()


def test_another_scheduler_notices_who_ends(crew: Nodes) -> None:
    flags = begin(crew, "dist_sync", dies_later)
    until(lambda: all((flags / f"now{r}").exists() for r in range(2)))
    replace_scheduler(crew)
    (flags / "go").touch()
    assert "waits for a gradient of worker 1" in crew.result(0)


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


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_a_server_that_hangs_is_replaced_and_refused_when_it_comes_back(
    crew: Nodes, mode: str
) -> None:
    home = 2 + placement.home("w", 2)
    flags = begin(crew, mode, adds_while_a_server_hangs, replication=2)
    until(lambda: all((flags / f"now{r}").exists() for r in range(2)))
    os.kill(crew.processes[home].pid, signal.SIGSTOP)
    (flags / "stopped").touch()
    until(lambda: all((flags / f"added{r}").exists() for r in range(2)))
    os.kill(crew.processes[home].pid, signal.SIGCONT)
    said = crew.receive(home)
    assert "was given up" in said or "was replaced" in said
    (flags / "back").touch()
    assert [crew.result(0), crew.result(1)] == [122.0] * 2


def test_without_copies_a_server_that_hangs_is_told(crew: Nodes) -> None:
    home = 2 + placement.home("w", 2)
    flags = begin(crew, "dist_async", adds_while_a_server_hangs)
    until(lambda: all((flags / f"now{r}").exists() for r in range(2)))
    os.kill(crew.processes[home].pid, signal.SIGSTOP)
    (flags / "stopped").touch()
    for worker in range(2):
        said = crew.result(worker)
        assert f"server {home - 2} gave no sign of life for 0.5 s and was ended" in said
        assert "SIGSTOP" in said and "heartbeat_timeout" in said
        assert "replication=2" in said
    os.kill(crew.processes[home].pid, signal.SIGCONT)
    assert "was given up" in crew.receive(home)


def one_hangs(kv: KVStore) -> tuple[float, float]:
    adding(kv)
    kv.barrier()
    while kv.rank == 1:
        kv.pushpull("w", torch.ones(1))
        flag(kv, "now").touch()
    until(flag(kv, "stopped").exists)
    kv.barrier()  # passes when the other is given up
    before = kv.pull("w").item()
    flag(kv, "passed").touch()
    until(flag(kv, "back").exists)
    return before, kv.pull("w").item()


@pytest.mark.parametrize("seen_by", ["a server", "the scheduler"])
@pytest.mark.parametrize("hangs", [True, False])
def test_whoever_notices_first_the_process_is_told_of_once(
    tmp_path: Path, seen_by: str, hangs: bool
) -> None:
    node = kvstore.Node("scheduler", 0, 1, 1, str(tmp_path), heartbeat_timeout=0.5)
    service, told = kvstore.serve(node), []
    service.missed = lambda *who: told.append(who)
    with Popen(["sleep", "60"]) as process:
        handle = service._machine.handle
        handle(Register(0, 1, 0, "ipc://server", 1, 1))
        handle(Register(0, 0, 0, "", 1, 1, Terms("dist_sync", 100), pid=process.pid))
        if not hangs:
            process.kill()
        news = [Missed(0, 1, 1, 0, 7, BROKEN), Leave(0, 0, 0, BROKEN)]
        first, second = news if seen_by == "a server" else reversed(news)
        (departed,) = handle(first)
        assert handle(second) == []
        assert told == [(0, process.pid)]
        process.kill()
    assert departed.how == ("gave no sign of life for 0.5 s and was ended" if hangs else BROKEN)
    service._stop.close()
    service._stopped.close()


def needs_every_worker(kv: KVStore) -> float:
    adding(kv)
    kv.barrier()
    if kv.rank == 1:
        flag(kv, "now").touch()
        until(flag(kv, "never").exists)
    return kv.pushpull("w", torch.ones(1)).item()


def test_dist_sync_says_that_a_worker_hung(crew: Nodes) -> None:
    flags = begin(crew, "dist_sync", needs_every_worker)
    until((flags / "now").exists)
    os.kill(crew.processes[1].pid, signal.SIGSTOP)
    said = crew.result(0)
    assert "gradient of worker 1, which gave no sign of life for 0.5 s and was ended" in said
    os.kill(crew.processes[1].pid, signal.SIGCONT)
    (flags / "never").touch()
    assert "worker 1 was given up" in crew.result(1)


def test_a_worker_that_hangs_is_given_up_and_hears_so(crew: Nodes) -> None:
    flags = begin(crew, "dist_async", one_hangs)
    until((flags / "now").exists)
    os.kill(crew.processes[1].pid, signal.SIGSTOP)
    (flags / "stopped").touch()
    until((flags / "passed").exists)
    os.kill(crew.processes[1].pid, signal.SIGCONT)
    said = crew.result(1)
    assert "worker 1 was given up" in said
    assert "heartbeat_timeout" in said
    (flags / "back").touch()
    before, after = crew.result(0)
    assert before == after > 0


def holds_the_lock(kv: KVStore) -> float:
    adding(kv)
    kv.barrier()
    if kv.rank == 1:
        begun = time.monotonic()
        sum(range(60_000_000))  # one call of CPython's, which lets no other thread in
        assert time.monotonic() - begun > 0.5
        flag(kv, "now1").touch()
    return kv.pushpull("w", torch.ones(1)).item()


def test_a_worker_that_computes_and_lets_no_thread_in_is_not_given_up(crew: Nodes) -> None:
    flags = begin(crew, "dist_sync", holds_the_lock)
    assert [crew.result(0), crew.result(1)] == [2, 2]
    assert (flags / "now1").exists()
