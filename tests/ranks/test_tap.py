"""The tap changes no program, and its removal restores torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

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


N = 2
GIVEN: dict[str, Any] = {
    "broadcast": lambda x: dist.broadcast(x, 0, async_op=True),
    "reduce": lambda x: dist.reduce(x, 0, async_op=True),
    "all_reduce": lambda x: dist.all_reduce(x, async_op=True),
    "gather": lambda x: dist.gather(
        x, None if dist.get_rank() else [torch.empty(4) for _ in range(N)], async_op=True
    ),
    "all_gather": lambda x: dist.all_gather([torch.empty(4) for _ in range(N)], x, async_op=True),
    "scatter": lambda x: dist.scatter(
        x, None if dist.get_rank() else [torch.ones(4) for _ in range(N)], async_op=True
    ),
    "reduce_scatter": lambda x: dist.reduce_scatter(
        x, [torch.ones(4) for _ in range(N)], async_op=True
    ),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty(4), x, async_op=True),
    "barrier": lambda x: dist.barrier(async_op=True),
}


@pytest.mark.parametrize("name", GIVEN)
def test_asynchronous_collective_is_recorded_until_its_wait(name: str) -> None:
    call = GIVEN[name]

    def program() -> list[float]:
        x = torch.ones(4)
        work = call(x)
        with dk.mark("meanwhile"):
            pass
        work.wait()
        return x.tolist()

    run = dk.run_ranks(program, N)
    spans = [s for s in run.trace.spans if s.op is not Op.MARK]
    assert [(s.rank, s.op, s.state) for s in sorted(spans, key=lambda s: s.rank)] == [
        (r, Op(name), State.COMPLETED) for r in range(N)
    ]
    assert run.results == dk.run_ranks(program, N, record=False).results


def test_recorded_tensor_can_still_be_resized() -> None:
    """FSDP frees gathered parameters like this."""

    def program() -> list[int]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16):
            x = torch.ones(8, dtype=dtype)
            dist.all_reduce(x)
            x.untyped_storage().resize_(0)
            found.append(x.untyped_storage().size())
        return found

    run = dk.run_ranks(program, 2)
    assert run.results == [[0] * 4] * 2
    assert [span.after.max for span in run.trace.spans] == [2.0] * 8


def test_new_group_is_a_collective_of_all() -> None:
    def program() -> list[Any]:
        some, every = dist.new_group([0, 1]), dist.new_group()
        dist.new_group([0, 1], use_local_synchronization=True)
        return [dist.get_world_size(g) for g in (some, every)]

    run = dk.run_ranks(program, 3)
    assert run.results == [[2, 3], [2, 3], [-1, 3]]
    made = [s for s in run.trace.spans if s.op is Op.NEW_GROUP]
    labels = [s.label for s in made if s.rank == 2]
    assert labels == ["0, 1", ""], "what only its members call is no collective of all"
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

    with pytest.warns(dk.errors.CommunicationWarning) as said:
        dk.run_ranks(program, 2)
    first, second = [str(warning.message) for warning in said]
    assert first.startswith("ranks 0 and 1 never waited for all_reduce(async_op=True) at ")
    assert second.startswith("rank 1 never waited for broadcast(async_op=True) at ")


class Watching(TorchFunctionMode):
    """A dispatch mode of the program."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_on_one_rank_adds_no_calls() -> None:
    def exchange() -> list[Any]:
        with Watching() if dist.get_rank() == 0 else nullcontext():
            found: list[Any] = [None] * 2
            dist.all_gather_object(found, dist.get_rank())
            x = torch.tensor(dist.get_rank())
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return [*found, int(x)]

    run = dk.run_ranks(exchange, 2)
    assert run.results == [[0, 1, 1]] * 2
    assert not run.trace.diagnose()
