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
    """On a rank: return the functions of torch that are replaced."""
    places = c10d._new_group_with_tag, c10d._warn_not_in_group, dist.Work.wait
    hooked = ["distkit/recording/" in str(getattr(place, "__code__", None)) for place in places]
    return [*hooked, "distkit" in torch._C._dispatch_dump("c10d::allreduce_")]


def everything() -> list[Any]:
    """On a rank: use everything that the tap replaces."""
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
        recorded = cluster.run(everything)
        stock = cluster._submit(everything, (), {}, record=False).wait()
        again = cluster.run(everything)
    hooked = [True, True, True, True]
    assert recorded.results == again.results == [[[4.0, 4.0], hooked]] * 3
    assert stock.results == [[[4.0, 4.0], [False] * 4]] * 3
    assert len(stock.trace) == 0
    assert calls(recorded) == calls(again)


def test_nothing_is_hooked_outside_runs() -> None:
    assert hooks() == [False] * 4


CALLS: dict[str, Callable[[torch.Tensor, list[torch.Tensor], bool], Any]] = {
    "broadcast": lambda x, many, later: dist.broadcast(x, 0, async_op=later),
    "reduce": lambda x, many, later: dist.reduce(x, 0, async_op=later),
    "all_reduce": lambda x, many, later: dist.all_reduce(x, async_op=later),
    "gather": lambda x, many, later: dist.gather(x, on_rank_0(many), async_op=later),
    "all_gather": lambda x, many, later: dist.all_gather(many, x, async_op=later),
    "scatter": lambda x, many, later: dist.scatter(x, on_rank_0(many), async_op=later),
    "reduce_scatter": lambda x, many, later: dist.reduce_scatter(x, many, async_op=later),
    "all_to_all": lambda x, many, later: dist.all_to_all_single(
        x, torch.cat(many)[:4], async_op=later
    ),
    "barrier": lambda x, many, later: dist.barrier(async_op=later),
}


def on_rank_0(many: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return None if dist.get_rank() else many


def call_each() -> list[list[float]]:
    """Make each call, blocking and asynchronous; return the tensors."""
    found = []
    for call in CALLS.values():
        for later in (False, True):
            x, many = torch.ones(4), [torch.ones(4), torch.ones(4)]
            work = call(x, many, later)
            if later:
                with dk.mark("meanwhile"):
                    pass
                work.wait()
            found.append(torch.cat([x, *many]).tolist())
    return found


def test_every_collective_is_recorded_once_on_every_rank() -> None:
    """Also if it is asynchronous."""
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


def test_new_group_is_a_collective_of_all() -> None:
    def program() -> list[Any]:
        some, every = dist.new_group([0, 1]), dist.new_group()
        dist.new_group([0, 1], use_local_synchronization=True)
        return [dist.get_world_size(g) for g in (some, every)]

    run = dk.run_ranks(program, 3)
    assert run.results == [[2, 3], [2, 3], [-1, 3]]
    made = [s for s in run.trace.spans if s.op is Op.NEW_GROUP]
    labels = [s.label for s in made if s.rank == 2]
    assert labels == ["0, 1", ""], "a group of local synchronization is not recorded"
    assert {s.state for s in made} == {State.COMPLETED}
    assert {s.group for s in made} == {"world"}


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
