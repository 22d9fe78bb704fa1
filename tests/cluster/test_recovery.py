"""After a hang: the run ends at once on every rank, and the same cluster runs the next."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from waiting import until

import distkit as dk
from distkit.hangs import ALL


@pytest.fixture(scope="module")
def shared() -> Iterator[dk.Cluster]:
    with dk.Cluster(3) as made:
        yield made


@pytest.fixture
def cluster(shared: dk.Cluster) -> Iterator[dk.Cluster]:
    """A cluster that must still work when the test is over, with the same processes."""
    pids = [row[2] for row in shared.wait().status().rows]
    yield shared
    assert shared.run(sum_of_ranks).results == [3.0, 3.0, 3.0]
    assert [row[2] for row in shared.status().rows] == pids


def sum_of_ranks() -> float:
    x = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(x)
    return x[0].item()


def hung(cluster: dk.Cluster) -> bool:
    return any(f.hang for f in cluster.diagnose())


HANGS = [
    "ring_of_recvs",
    "no_receiver",
    "skipped",
    "new_group_skipped",
    "wrong_group",
    "unused_parameter",
    "different_root",
    "missing_barrier",
]


@pytest.mark.parametrize("name", HANGS)
def test_interrupt_ends_a_hang_on_all_ranks(cluster: dk.Cluster, name: str) -> None:
    case = ALL[name]
    run = cluster.submit(case.program, wait_forever=True)
    until(lambda: hung(cluster))
    assert not run.finished
    cluster.interrupt()
    with pytest.raises(dk.errors.RunInterrupted, match="ready for the next run"):
        run.wait(60)
    assert cluster.run(dist.get_rank).results == [0, 1, 2]
    assert [(f.kind, f.culprits) for f in run.findings if f.hang] == [(case.kind, case.culprits)]


def test_an_import_of_a_library_is_not_cut_in_two(cluster: dk.Cluster, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    site.joinpath("cut_in_two.py").write_text(f"""if True:
        import os, pathlib, threading, time
        with open(f"{tmp_path}/begun-{{os.environ['RANK']}}", "a") as file:
            print("begun", file=file)
        end = time.monotonic() + 10  # until the release is put off for the first time
        while not any(isinstance(t, threading.Timer) for t in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.001)
    """)

    def program() -> str:
        sys.path.insert(0, str(site))
        import cut_in_two

        return cut_in_two.__name__

    run = cluster.submit(program)
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 3)
    cluster.interrupt()
    with pytest.raises(dk.errors.RunInterrupted):
        run.wait(10)
    assert cluster.run(program).results == ["cut_in_two"] * 3
    assert [p.read_text() for p in tmp_path.glob("begun-*")] == ["begun\n"] * 3


def test_a_hang_that_nobody_waits_for_is_released(cluster: dk.Cluster) -> None:
    for _ in range(3):
        with pytest.raises(
            dk.errors.DeadlockError, match=r"in a circle(?s:.*)ready for the next run"
        ):
            cluster.run(ALL["ring_of_recvs"].program)
        (finding,) = cluster.diagnose()
        assert finding.kind == "cycle"


def test_groups_can_be_made_after_a_group_was_not(cluster: dk.Cluster) -> None:
    with pytest.raises(dk.errors.DeadlockError, match="Call new_group on every rank of the world"):
        cluster.run(ALL["new_group_skipped"].program)

    def program() -> float:
        pair = dist.new_group([0, 1])
        x = torch.ones(2)
        if dist.get_rank() < 2:
            dist.all_reduce(x, group=pair)
        return x[0].item()

    assert cluster.run(program).results == [2.0, 2.0, 1.0]


def test_ranks_in_a_deadlock_while_another_computes(cluster: dk.Cluster) -> None:
    def program() -> None:
        me = dist.get_rank()
        if me == 2:
            time.sleep(3600)
        dist.recv(torch.zeros(1), src=1 - me)

    with pytest.raises(dk.errors.DeadlockError, match="each waits for the other"):
        cluster.run(program)


def test_a_long_computation_is_no_hang(cluster: dk.Cluster) -> None:
    def program() -> float:
        if dist.get_rank() == 0:
            time.sleep(1.5)  # longer than the watcher's patience
        return sum_of_ranks()

    run = cluster.run(program)
    assert run.results == [3.0, 3.0, 3.0]
    assert {f.kind for f in run.findings} <= {"straggler"}


def blocks_its_rank() -> None:
    from ipyparallel.engine.app import IPEngine

    if dist.get_rank() == 1:
        IPEngine.instance().kernel.io_loop.call_later(0, threading.Event().wait)


def test_a_rank_that_never_begins_the_next_run_is_named_and_replaced(
    shared: dk.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distkit.cluster.runs.conductor.BEGIN", 5.0)
    shared.run(blocks_its_rank)
    with pytest.raises(dk.errors.RankDied, match=r"rank 1 .* gave no sign of life for 5 s"):
        shared.run(dist.get_rank)
    assert shared.run(dist.get_rank).results == [0, 1, 2]


class Interrupted(threading.Event):
    """Where the reader presses stop."""

    def wait(self, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_while_ranks_start_says_so_in_a_line(shared: dk.Cluster) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared.wait()._room, "ready", Interrupted())
        with pytest.raises(dk.errors.RunStopped, match="while the ranks are starting"):
            shared.run(dist.get_rank)
    assert shared.run(dist.get_rank).results == [0, 1, 2]
