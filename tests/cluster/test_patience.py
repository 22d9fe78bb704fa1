"""Ranks that may continue are not ended; uninterruptible waits end quickly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import distkit as dk


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(3) as made:
        yield made


@pytest.fixture
def usable(cluster: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield cluster
    assert cluster.run(total).results == [3.0] * 3


def total() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def sent_by_a_timer() -> float:
    x = torch.zeros(1)
    if dist.get_rank() == 1:
        threading.Timer(0.6, lambda: dist.send(torch.ones(1), dst=0)).start()
    elif dist.get_rank() == 0:
        dist.recv(x, src=1)
    dist.barrier()
    return x.item()


def test_later_send_of_a_thread_is_awaited(usable: dk.Cluster) -> None:
    assert usable.run(sent_by_a_timer).results == [1.0, 0.0, 0.0]


SECOND = timedelta(seconds=0.6)


def receive_in_time() -> None:
    work = dist.irecv(torch.zeros(1), src=1)
    assert work is not None
    work.wait(SECOND)


def group_in_time() -> None:
    dist.new_group([0, 1], timeout=SECOND)


def barrier_in_time() -> None:
    dist.monitored_barrier(timeout=SECOND)


@pytest.mark.parametrize("call", [receive_in_time, group_in_time, barrier_in_time])
@pytest.mark.filterwarnings("ignore::distkit.errors.CommunicationWarning")
def test_time_limit_of_the_program_is_respected(
    usable: dk.Cluster, call: Callable[[], None]
) -> None:
    def program() -> str:
        try:
            if dist.get_rank() == 0:
                call()
        except (RuntimeError, dist.DistStoreError):
            return "handled"
        return ""

    assert usable.run(program).results == ["handled", "", ""]


def test_surviving_thread_does_not_affect_the_next_run(
    usable: dk.Cluster,
) -> None:
    def haunt() -> None:
        if dist.get_rank() == 1:
            threading.Timer(0.5, lambda: dist.send(torch.ones(1), dst=0)).start()
        dist.recv(torch.zeros(1), src=2)

    run = usable.submit(haunt)
    time.sleep(0.2)
    usable.interrupt()
    with pytest.raises(dk.errors.RunInterrupted):
        run.wait(10)
    later = usable.run(time.sleep, 0.7)
    assert len(later.trace) == 0


def three_from_anybody() -> None:
    x = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.recv(x)
    else:
        dist.send(x, dst=0)


def test_receive_from_any_source_is_explained_and_released(usable: dk.Cluster) -> None:
    start = time.monotonic()
    with pytest.raises(
        dk.errors.DeadlockError, match=r"after sending 2 messages.*one of ranks 1 and 2"
    ):
        usable.run(three_from_anybody)
    assert time.monotonic() - start < 30


def test_unknown_rank_raises(usable: dk.Cluster) -> None:
    with pytest.raises(
        dk.errors.RankError, match="rank 7 does not exist; the group has ranks 0 to 2"
    ):
        usable.run(lambda: dist.send(torch.ones(1), dst=7))


def test_object_collectives_are_named(usable: dk.Cluster) -> None:
    def program() -> None:
        if dist.get_rank() != 0:
            dist.all_gather_object([None] * 3, "x")

    with pytest.raises(dk.errors.DeadlockError, match=r"wait in all_gather_object\(\)") as caught:
        usable.run(program)
    assert [f.kind for f in caught.value.findings] == ["skipped"]


def test_cell_run_by_some_ranks_is_explained(usable: dk.Cluster) -> None:
    lost = pytest.warns(dk.errors.CommunicationWarning, match="variables of %%ranks cells are lost")
    with lost, pytest.raises(dk.errors.DeadlockError, match="the cell was not run on it"):
        usable.execute("dist.barrier()", [0])


def test_stop_while_paused_ends_the_run() -> None:
    with dk.Cluster(2) as cluster:
        stepper = cluster.step(total)
        cluster.stop()
        start = time.monotonic()
        with pytest.raises(dk.errors.RunInterrupted, match="the cluster was stopped"):
            stepper.finish()
        assert time.monotonic() - start < 30
        with pytest.raises(dk.errors.StoppedError, match=r"dk.Cluster\(2\)"):
            cluster.step(total)


def test_play_from_a_past_moment_replays_it(usable: dk.Cluster) -> None:
    def often() -> None:
        for _ in range(6):
            dist.barrier()

    with usable.step(often) as stepper:
        for _ in range(3):
            stepper.next()
        stepper.seek(0).play(speed=100)
        assert (stepper.position, len(stepper.moments)) == (3, 4)
