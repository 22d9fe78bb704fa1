"""A hang can be interrupted on all ranks, and the cluster can run the next program."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from training import sum_over_ranks
from waiting import wait_until

import distkit as dk
from distkit_examples.hangs import ALL


@pytest.fixture(scope="module")
def shared() -> Iterator[dk.Cluster]:
    with dk.Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work after the test."""
    yield shared
    assert shared.run(sum_over_ranks).results == [6.0, 6.0, 6.0]


HANGS = [
    "ring_of_recvs",
    "new_group_skipped",
    "unused_parameter",
    "missing_barrier",
]


@pytest.mark.parametrize("name", HANGS)
def test_interrupt_ends_a_hang_on_all_ranks(cluster: dk.Cluster, name: str) -> None:
    case = ALL[name]
    run = cluster.submit(case.program, wait_forever=True)
    wait_until(lambda: any(f.hang for f in cluster.diagnose()))
    assert not run.finished
    cluster.interrupt()
    with pytest.raises(dk.errors.RunInterrupted, match="ready for the next run"):
        run.wait(60)
    assert cluster.run(dist.get_rank).results == [0, 1, 2]
    assert [(f.kind, f.culprits) for f in run.findings if f.hang] == [(case.kind, case.culprits)]


def test_group_can_be_created_after_a_failed_creation(cluster: dk.Cluster) -> None:
    with pytest.raises(dk.errors.DeadlockError, match="Call new_group on every rank in the world"):
        cluster.run(ALL["new_group_skipped"].program)

    def program() -> float:
        pair = dist.new_group([0, 1])
        x = torch.ones(2)
        if dist.get_rank() < 2:
            dist.all_reduce(x, group=pair)
        return x[0].item()

    assert cluster.run(program).results == [2.0, 2.0, 1.0]


def test_deadlock_is_found_while_another_rank_computes(cluster: dk.Cluster) -> None:
    def program() -> None:
        me = dist.get_rank()
        if me == 2:
            time.sleep(3600)
        dist.recv(torch.zeros(1), src=1 - me)

    with pytest.raises(dk.errors.DeadlockError, match="each waits for the other"):
        cluster.run(program)


def test_long_computation_is_not_a_hang(cluster: dk.Cluster) -> None:
    def program() -> float:
        if dist.get_rank() == 0:
            time.sleep(1.5)  # longer than the watchdog's check interval
        return sum_over_ranks()

    run = cluster.run(program)
    assert run.results == [6.0, 6.0, 6.0]
    assert {f.kind for f in run.findings} <= {"straggler"}


class InterruptedEvent(threading.Event):
    """An event whose wait is interrupted by the user."""

    def wait(self, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt


def test_interrupt_while_ranks_start_raises_run_stopped(shared: dk.Cluster) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared.wait()._supervisor, "ready", InterruptedEvent())
        with pytest.raises(dk.errors.RunStopped, match="while the ranks were starting"):
            shared.run(dist.get_rank)
    assert shared.run(dist.get_rank).results == [0, 1, 2]
