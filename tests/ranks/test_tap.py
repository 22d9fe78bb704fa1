"""The tap changes no program, and its removal restores torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, State


def hooks() -> list[bool]:
    """Return which torch functions are replaced on this rank."""
    functions = c10d._new_group_with_tag, c10d._warn_not_in_group, dist.Work.wait
    hooked = [
        "distkit/recording/" in str(getattr(function, "__code__", None)) for function in functions
    ]
    return [*hooked, "distkit" in torch._C._dispatch_dump("c10d::allreduce_")]


def use_everything() -> list[Any]:
    """Use everything that the tap replaces on a rank."""
    pair = dist.new_group([0, 1])
    x = torch.full((2,), float(dist.get_rank()))
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=pair)
    work = dist.all_reduce(x, async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()
    dist.barrier()
    return [x.tolist(), hooks()]


def calls(run: Run) -> list[tuple[int, Op]]:
    return [(s.rank, s.op) for s in sorted(run.trace.spans, key=lambda s: (s.rank, s.seq))]


def test_uninstalling_restores_torch() -> None:
    with dk.Cluster(3) as cluster:
        recorded = cluster.run(use_everything)
        unrecorded = cluster._submit(use_everything, (), {}, record=False).wait()
        repeated = cluster.run(use_everything)
    assert recorded.results == repeated.results == [[[4.0, 4.0], [True] * 4]] * 3
    assert unrecorded.results == [[[4.0, 4.0], [False] * 4]] * 3
    assert len(unrecorded.trace) == 0
    assert calls(recorded) == calls(repeated)


def test_nothing_is_hooked_outside_runs() -> None:
    assert hooks() == [False] * 4


CALLS: dict[str, Callable[[torch.Tensor, list[torch.Tensor], bool], Any]] = {
    "broadcast": lambda x, tensors, async_op: dist.broadcast(x, 0, async_op=async_op),
    "reduce": lambda x, tensors, async_op: dist.reduce(x, 0, async_op=async_op),
    "all_reduce": lambda x, tensors, async_op: dist.all_reduce(x, async_op=async_op),
    "gather": lambda x, tensors, async_op: dist.gather(x, on_rank_0(tensors), async_op=async_op),
    "all_gather": lambda x, tensors, async_op: dist.all_gather(tensors, x, async_op=async_op),
    "scatter": lambda x, tensors, async_op: dist.scatter(x, on_rank_0(tensors), async_op=async_op),
    "reduce_scatter": lambda x, tensors, async_op: dist.reduce_scatter(
        x, tensors, async_op=async_op
    ),
    "all_to_all": lambda x, tensors, async_op: dist.all_to_all_single(
        x, torch.cat(tensors)[:4], async_op=async_op
    ),
    "barrier": lambda x, tensors, async_op: dist.barrier(async_op=async_op),
}


def on_rank_0(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return None if dist.get_rank() else tensors


def call_each() -> list[list[float]]:
    """Run each call, first blocking and then asynchronous; return the tensors."""
    found = []
    for call in CALLS.values():
        for async_op in (False, True):
            x, tensors = torch.ones(4), [torch.ones(4), torch.ones(4)]
            work = call(x, tensors, async_op)
            if async_op:
                with dk.mark("meanwhile"):
                    pass
                work.wait()
            found.append(torch.cat([x, *tensors]).tolist())
    return found


def test_every_collective_is_recorded_once_on_every_rank() -> None:
    """Both blocking and asynchronous calls are recorded."""
    run = dk.run_ranks(call_each, 2)
    assert run.results == dk.run_ranks(call_each, 2, record=False).results
    spans = [s for s in run.trace.spans if s.op is not Op.MARK]
    for rank in (0, 1):
        mine = sorted((s for s in spans if s.rank == rank), key=lambda s: s.seq)
        assert [(s.op, s.state) for s in mine] == [
            (Op(name), State.COMPLETED) for name in CALLS for _ in range(2)
        ]
    matched = [run.trace.matches[s.rank, s.seq] for s in spans]
    assert all(matched.count(m) == 2 for m in matched)


def test_new_group_is_a_collective_over_all_ranks() -> None:
    def program() -> list[Any]:
        pair, all_ranks = dist.new_group([0, 1]), dist.new_group()
        dist.new_group([0, 1], use_local_synchronization=True)
        return [dist.get_world_size(g) for g in (pair, all_ranks)]

    run = dk.run_ranks(program, 3)
    assert run.results == [[2, 3], [2, 3], [-1, 3]]
    new_groups = [s for s in run.trace.spans if s.op is Op.NEW_GROUP]
    labels = [s.label for s in new_groups if s.rank == 2]
    assert labels == ["0, 1", ""], "a group with local synchronization is not recorded"
    assert {s.state for s in new_groups} == {State.COMPLETED}
    assert {s.group for s in new_groups} == {"world"}


def test_unawaited_collective_warns() -> None:
    def program() -> None:
        a, b, c, d = torch.ones(4, 3)
        dist.all_reduce(a, async_op=True)
        kept = dist.broadcast(b, 0, async_op=True)
        dist.all_gather([torch.ones(3), torch.ones(3)], c, async_op=True).wait()
        dist.all_reduce(d, async_op=True).get_future().wait()
        while dist.get_rank() == 0 and not kept.is_completed():
            pass
        del kept

    with pytest.warns(dk.errors.CommunicationWarning) as caught:
        dk.run_ranks(program, 2)
    first, second = [str(warning.message) for warning in caught]
    assert first.startswith("ranks 0 and 1 never waited for all_reduce(async_op=True) at ")
    assert second.startswith("rank 1 never waited for broadcast(async_op=True) at ")
