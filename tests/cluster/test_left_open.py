"""What one run leaves open never reaches the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import distkit as dk


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2) as made:
        yield made


def sum_of_ones() -> float:
    x = torch.ones(3)
    dist.all_reduce(x)
    return x[0].item()


def no_wait() -> None:
    x, other = torch.zeros(1), 1 - dist.get_rank()
    dist.isend(torch.ones(1), other) if other else dist.irecv(x, other)


def half_a_batch() -> None:
    other = 1 - dist.get_rank()
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(1), other),
            dist.P2POp(dist.irecv, torch.zeros(1), other),
        ]
    )
    requests[0].wait()


def in_the_background() -> None:
    dist.all_reduce(torch.ones(1_000_000), async_op=True)


def in_the_background_on_one() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


def everything() -> None:
    dist.irecv(torch.zeros(1), 1 - dist.get_rank())
    in_the_background()


def counted_on_one() -> None:  # it returns at once, and gloo numbers its collectives
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(0))


def group_left() -> None:
    dist.new_group([0, 1])


def group_on_one() -> None:  # the next group's name is that of another one here
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def group_in_use() -> None:
    dist.irecv(torch.zeros(1), 1 - dist.get_rank(), group=dist.new_group([0, 1]))


def barrier_without_one() -> None:
    if dist.get_rank() == 0:
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(milliseconds=50))


OPEN = [
    no_wait,
    half_a_batch,
    in_the_background,
    in_the_background_on_one,
    everything,
    counted_on_one,
    group_left,
    group_on_one,
    group_in_use,
    barrier_without_one,
]


@pytest.mark.filterwarnings("ignore::distkit.errors.CommunicationWarning")
@pytest.mark.parametrize("program", OPEN)
def test_the_next_run_meets_in_a_new_group(
    cluster: dk.Cluster, program: Callable[[], None]
) -> None:
    pids = [row[2] for row in cluster.wait().status().rows]
    for _ in range(3):
        cluster.run(program)
        run = cluster.submit(sum_of_ones).wait(10)
        assert run.results == [2.0, 2.0]
    assert [row[2] for row in cluster.status().rows] == pids


def test_what_is_waited_for_leaves_the_group_as_it_is(cluster: dk.Cluster) -> None:
    cluster.run(sum_of_ones)
    before = cluster._room.generation

    def program() -> None:
        x = torch.ones(1000)
        for _ in range(20):
            dist.all_reduce(x, async_op=True).get_future().wait()
        works = [dist.all_reduce(torch.ones(n), async_op=True) for n in range(1, 20)]
        for work in works:
            work.wait()

    for _ in range(5):
        cluster.run(program)
        cluster.run(sum_of_ones)
    assert cluster._room.generation == before


def test_a_thread_that_goes_on_communicating_does_not_reach_the_next_run(
    cluster: dk.Cluster,
) -> None:
    def program() -> None:
        begun = threading.Event()

        def forever() -> None:
            while True:
                dist.all_reduce(torch.ones(1))
                begun.set()

        threading.Thread(target=forever, daemon=True).start()
        begun.wait()

    with pytest.warns(dk.errors.CommunicationWarning, match="Join the thread before the function"):
        cluster.run(program)
    assert cluster.submit(sum_of_ones).wait(10).results == [2.0, 2.0]


def test_the_groups_of_a_cell_are_for_those_after_it(cluster: dk.Cluster) -> None:
    cluster.execute("pair = dist.new_group([0, 1])")
    run = cluster.execute("x = torch.ones(1); dist.all_reduce(x, group=pair); x.item()")
    assert run.results == [2.0, 2.0]
