"""Resources left open by one run do not affect the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training import sum_over_ranks

import distkit as dk


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2) as cluster:
        yield cluster


def request_without_wait() -> None:
    x, other = torch.zeros(1), 1 - dist.get_rank()
    dist.isend(torch.ones(1), other) if other else dist.irecv(x, other)


def async_collective_on_one_rank() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


def group_on_one_rank() -> None:  # afterwards, the ranks name their groups differently
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def group_in_use() -> None:
    dist.irecv(torch.zeros(1), 1 - dist.get_rank(), group=dist.new_group([0, 1]))


def barrier_on_one_rank() -> None:
    if dist.get_rank() == 0:
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(milliseconds=50))


def thread_that_communicates() -> None:
    started = threading.Event()

    def forever() -> None:
        while True:
            dist.all_reduce(torch.ones(1))
            started.set()

    threading.Thread(target=forever, daemon=True).start()
    started.wait()


def processes_and_threads() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    threading.Thread(target=time.sleep, args=(1000,)).start()


def changed_process_state() -> None:
    os.chdir("/")
    torch.set_default_device("meta")
    signal.setitimer(signal.ITIMER_REAL, 60)
    sys.modules["torch"].left = True  # type: ignore[attr-defined]
    os.environ.clear()


def state() -> list[object]:
    handlers = [signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)]
    return [str(Path.cwd()), torch.ones(1).device.type, len(os.environ) > 3, *handlers]


PROGRAMS = [
    request_without_wait,
    async_collective_on_one_rank,
    group_on_one_rank,
    group_in_use,
    barrier_on_one_rank,
    thread_that_communicates,
    processes_and_threads,
    changed_process_state,
]


@pytest.mark.filterwarnings("ignore::distkit.errors.CommunicationWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_do_not_affect_later_runs(cluster: dk.Cluster, program: Callable[[], None]) -> None:
    before = cluster.run(state).results
    cluster.run(program)
    assert cluster.submit(sum_over_ranks).wait(30).results == [3.0, 3.0]
    assert cluster.run(state).results == before
    assert cluster.run(lambda: hasattr(torch, "left")).results == [False, False]


def test_groups_of_a_cell_are_available_in_later_cells(cluster: dk.Cluster) -> None:
    cluster.execute("pair = dist.new_group([0, 1])")
    run = cluster.execute("x = torch.ones(1); dist.all_reduce(x, group=pair); x.item()")
    assert run.results == [2.0, 2.0]
