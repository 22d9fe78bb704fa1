"""Scheduled functions finish exactly once despite deaths; shards of variables."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distkit.errors import StrategyError
from distkit.kvstore.protocol.optimizer import SGD
from distkit_strategies.coordinator import FunctionQueue, Worker
from distkit_strategies.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from tests.support.in_process import InProcess


class Queue(RuleBasedStateMachine):
    """Workers that run functions, die at any time, and send late messages."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.deaths = FunctionQueue(), Counter[int]()
        # the workers to which each function was assigned
        self.assigned: dict[int, list[Worker]] = {}
        self.results, self.cancelled = Counter[int](), set[int]()
        self.late: list[tuple[Worker, int]] = []

    def worker(self, rank: int) -> Worker:
        return Worker(rank, self.deaths[rank])

    @property
    def running(self) -> dict[Worker, int]:
        return {w: n for w, n in self.queue.workers.items() if n is not None}

    def assign(self) -> None:
        for worker, function in self.queue.assign():
            assert (
                worker == self.worker(worker.rank) or self.deaths[worker.rank] > worker.incarnation
            )
            self.assigned.setdefault(function, []).append(worker)

    @rule()
    def schedule(self) -> None:
        assert self.queue.schedule("function") not in self.assigned
        self.assign()

    @rule(rank=st.integers(1, 3))
    def becomes_ready(self, rank: int) -> None:
        self.queue.ready(self.worker(rank))
        self.assign()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), dies=st.booleans())
    def finishes(self, data, dies: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.running)))
        function = self.running[worker]
        if dies:  # its last message may be in flight
            self.deaths[worker.rank] = max(self.deaths[worker.rank], worker.incarnation + 1)
            self.late.append((worker, function))
        elif self.deaths[worker.rank] == worker.incarnation:
            self.results[function] += self.queue.finished(worker, function) is not None
            self.assign()

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def receive_late_message(self, data) -> None:
        worker, function = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        self.results[function] += self.queue.finished(worker, function) is not None
        self.assign()

    @rule()
    def cancel(self) -> None:
        pending = set(self.queue.pending)
        assert len(self.queue.cancel()) == len(pending)
        self.cancelled |= pending

    @invariant()
    def every_function_counts_once(self) -> None:
        known = self.results.keys() | self.cancelled | self.queue.unfinished.keys()
        assert known == set(range(self.queue._scheduled))
        assert all(n <= 1 for n in self.results.values())
        assert not {f for f, n in self.results.items() if n} & self.queue.unfinished.keys()
        assert len(set(self.running.values())) == len(self.running)

    @invariant()
    def functions_run_again_only_after_a_death(self) -> None:
        for workers in self.assigned.values():
            assert len(set(workers)) == len(workers) <= 1 + sum(self.deaths.values())

    def teardown(self) -> None:
        """Let live workers continue until every function has finished."""
        for _ in range(2 * self.queue._scheduled + 3):
            for rank in (1, 2, 3):
                worker = self.worker(rank)
                self.queue.ready(worker)
                self.assign()
                if worker in self.running:
                    function = self.running[worker]
                    self.results[function] += self.queue.finished(worker, function) is not None
        assert not self.queue.unfinished
        self.every_function_counts_once()


TestQueue = Queue.TestCase


@pytest.mark.parametrize("bound", [2, 1000])  # split across the servers, or not
def test_rescheduled_function_pushes_once(bound: int) -> None:
    cluster = InProcess(workers=3, servers=2, mode="dist_async", bound=bound)
    dead, replacement, reader = (cluster.store(rank) for rank in range(3))
    dead.set_optimizer(SGD(learning_rate=-1))
    for kv in (dead, replacement, reader):
        kv.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
    with dead.once(0):
        dead.pushpull("a", torch.ones(4), torch.empty(4))
        dead.push("b", torch.ones(4))  # and dies before its second push of "a"
    with replacement.once(0):
        replacement.push(["a", "b"], [torch.ones(4)] * 2)
        replacement.push("a", torch.full((4,), 10.0))
    with dead.once(1):
        dead.push(["a", "b"], [torch.ones(4)] * 2)
    with replacement.once(0):  # worker 0 was replaced
        replacement.push(["a", "b"], [torch.ones(4)] * 2)
        replacement.push("a", torch.full((4,), 10.0))
    replacement.push("a", torch.ones(4))  # outside functions every push counts
    assert [v.tolist() for v in reader.pull(["a", "b"])] == [[13.0] * 4, [2.0] * 4]


# -- partitioners, with TensorFlow's documented examples ---------------------------------------


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(5), (3,), [3]),
        (MinSizePartitioner(4, 2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, 10), (6, 1), [6, 1]),
        (MinSizePartitioner(1024, 10), (6, 1), [1, 1]),
        (MinSizePartitioner(), (1 << 20,), [1]),
        (MinSizePartitioner(24 << 10, 8), (128, 128), [3, 1]),  # 21.3 KiB each, as in TensorFlow
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, 2), (6, 1), [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(1), (3, 100), [3, 1]),
    ],
)
def test_shards_match_tensorflow(partitioner, shape, shards) -> None:
    assert partitioner(shape, torch.float32) == shards


@given(rows=st.integers(1, 50), width=st.integers(1, 9), size=st.integers(1, 4000))
def test_size_limits_of_shards_are_respected(rows: int, width: int, size: int) -> None:
    for partitioner in (MaxSizePartitioner(size), MinSizePartitioner(size, 7)):
        shards, _ = partitioner((rows, width), torch.float64)
        sizes = [len(shard) * width * 8 for shard in torch.arange(rows).tensor_split(shards)]
        assert sum(sizes) == rows * width * 8 and max(sizes) - min(sizes) <= width * 8
        if isinstance(partitioner, MaxSizePartitioner):
            assert max(sizes) <= max(size, width * 8)
        else:
            assert shards == 1 or sum(sizes) / shards > size * (shards - 1) / shards


@pytest.mark.parametrize(
    "create",
    [
        lambda: FixedShardsPartitioner(0),
        lambda: MinSizePartitioner(min_shard_bytes=-1),
        lambda: MaxSizePartitioner(8, max_shards=0),
    ],
)
def test_invalid_partitioner_options_raise(create) -> None:
    with pytest.raises(StrategyError, match="at least 1"):
        create()
