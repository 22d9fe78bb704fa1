"""Ranks that can still continue are not stopped; hangs end quickly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from tests.support.training import sum_over_ranks
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def usable(cluster: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield cluster
    assert cluster.run(sum_over_ranks).results == [6.0] * 3


def receive_from_a_timer() -> float:
    x = torch.zeros(1)
    if dist.get_rank() == 1:
        threading.Timer(0.6, lambda: dist.send(torch.ones(1), dst=0)).start()
    elif dist.get_rank() == 0:
        dist.recv(x, src=1)
    dist.barrier()
    return x.item()


def test_delayed_send_from_a_thread_is_not_a_hang(usable: dk.Cluster) -> None:
    assert usable.run(receive_from_a_timer).results == [1.0, 0.0, 0.0]


def receive_late(fifo: Path) -> float:
    """Rank 1 sends without waiting, and rank 0 receives once ``fifo`` is written to."""
    x = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.isend(torch.ones(1), dst=0)
    elif dist.get_rank() == 0:
        fifo.read_text()
        dist.recv(x, src=1)
    return x.item()


def test_unawaited_isend_arrives_after_the_sender_returned(
    usable: dk.Cluster, tmp_path: Path
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    run = usable.submit(receive_late, fifo)
    wait_until(lambda: run.trace.info.ends.keys() == {1, 2}, 60)
    fifo.write_text("go")
    with pytest.warns(dk.errors.CommunicationWarning, match="rank 1 never waited for isend"):
        assert run.wait(60).results == [1.0, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failing_subscriber_does_not_keep_the_cluster_busy(
    usable: dk.Cluster, tmp_path: Path
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    run = usable.submit(lambda: dist.get_rank() or fifo.read_text())
    run.subscribe(lambda events: events or {}["the end"])
    fifo.write_text("go")
    assert run.wait(60).results == ["go", 1, 2]


TIMEOUT = timedelta(seconds=0.6)


def wait_with_timeout() -> None:
    work = dist.irecv(torch.zeros(1), src=1)
    assert work is not None
    work.wait(TIMEOUT)


def barrier_with_timeout() -> None:
    dist.monitored_barrier(timeout=TIMEOUT)


@pytest.mark.parametrize("call", [wait_with_timeout, barrier_with_timeout])
@pytest.mark.filterwarnings("ignore::distkit.errors.CommunicationWarning")
def test_timeout_set_by_the_program_raises(usable: dk.Cluster, call: Callable[[], None]) -> None:
    def program() -> str:
        try:
            if dist.get_rank() == 0:
                call()
        except (RuntimeError, dist.DistStoreError):
            return "handled"
        return ""

    assert usable.run(program).results == ["handled", "", ""]


def test_thread_from_an_interrupted_run_does_not_affect_the_next(
    usable: dk.Cluster,
) -> None:
    def hang_with_a_timer() -> None:
        if dist.get_rank() == 1:
            threading.Timer(0.5, lambda: dist.send(torch.ones(1), dst=0)).start()
        dist.recv(torch.zeros(1), src=2)

    run = usable.submit(hang_with_a_timer)
    time.sleep(0.2)
    usable.interrupt()
    with pytest.raises(dk.errors.RunInterrupted):
        run.wait(10)
    assert len(usable.run(time.sleep, 0.7).trace) == 0


def receive_one_message_too_many() -> None:
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.recv(x)
    else:
        dist.send(x, dst=0)


def test_hang_in_a_receive_from_any_source_is_explained(usable: dk.Cluster) -> None:
    start = time.monotonic()
    with pytest.raises(
        dk.errors.DeadlockError, match=r"after sending 2 messages.*one of ranks 1 and 2"
    ):
        usable.run(receive_one_message_too_many)
    assert time.monotonic() - start < 30


def test_collective_in_a_cell_on_some_ranks_is_explained(usable: dk.Cluster) -> None:
    lost = pytest.warns(dk.errors.CommunicationWarning, match="variables of %%ranks cells are lost")
    with lost, pytest.raises(dk.errors.DeadlockError, match="the cell was not run on it"):
        usable.execute("dist.barrier()", [0])


def test_stop_ends_a_paused_run() -> None:
    with dk.Cluster(2) as cluster:
        stepper = cluster.step(sum_over_ranks)
        cluster.stop()
        start = time.monotonic()
        with pytest.raises(dk.errors.RunInterrupted, match="the cluster was stopped"):
            stepper.finish()
        assert time.monotonic() - start < 30


def test_send_to_an_unknown_rank_raises(usable: dk.Cluster) -> None:
    with pytest.raises(
        dk.errors.RankError, match="rank 7 does not exist; the group has ranks 0 to 2"
    ):
        usable.run(lambda: dist.send(torch.ones(1), dst=7))
