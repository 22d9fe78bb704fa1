"""The recorder covers every way to communicate, records each call once, and changes no program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, Span, State
from distkit.recording.tap import tap


def spans(run: Run, rank: int = 0) -> list[Span]:
    return sorted((s for s in run.trace.spans if s.rank == rank), key=lambda s: s.seq)


def calls_of(run: Run, rank: int = 0) -> list[tuple[Op, str]]:
    """Return the calls of a rank, after checking that all are complete."""
    assert {s.state for s in spans(run, rank)} == {State.COMPLETED}
    return [(s.op, s.label) for s in spans(run, rank)]


def run_with_and_without_recording(program: Callable[..., Any], *args: Any) -> Run:
    """Run a program with and without the recorder; check that the results are equal."""
    run = dk.run_ranks(program, 2, *args)
    assert run.results == dk.run_ranks(program, 2, *args, record=False).results
    # findings about stragglers depend on the machine
    assert [f for f in run.trace.diagnose() if f.kind != "straggler"] == []
    return run


# -- ways to call ----------------------------------------------------------------------


def functional() -> list[Any]:
    """Call functional collectives, as DTensor and compiled programs do."""
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    call, world = torch.ops._c10d_functional, dist.group.WORLD.group_name
    x = torch.arange(4.0) + dist.get_rank()
    many = call.all_gather_into_tensor(x, 2, world)
    found = [call.all_reduce(x, "max", world), many]
    found = [call.wait_tensor(y) for y in found]
    found += [call.reduce_scatter_tensor(many, "sum", 2, world), call.broadcast(x, 1, world)]
    found += call.all_reduce_coalesced([x, x], "sum", world)
    return [call.wait_tensor(y).tolist() for y in (*found, call.all_reduce_(x, "sum", world))]


def test_functional_collectives_are_recorded_once_each() -> None:
    run = run_with_and_without_recording(functional)
    assert calls_of(run) == [
        (Op.ALL_GATHER, ""),
        (Op.ALL_REDUCE, "max"),
        (Op.REDUCE_SCATTER, ""),
        (Op.BROADCAST, ""),
        (Op.ALL_REDUCE, ""),
        (Op.ALL_REDUCE, ""),
    ]
    first = spans(run)[1]
    assert first.where.partition(":")[0].endswith("test_recording_coverage.py")
    assert first.before is not None and first.after is not None
    assert first.before.values == (0, 1, 2, 3) and first.after.values == (1, 2, 3, 4)


def modes() -> list[Any]:
    x = torch.ones(2)
    with torch.inference_mode():
        y = torch.ones(2)
        dist.all_reduce(y)
        if dist.get_rank():
            dist.send(y, 0)
        else:
            dist.recv(y, 1)
        work = dist.all_reduce(y, async_op=True)
        assert isinstance(work, dist.Work)
        work.wait()
    with torch.no_grad():
        dist.all_reduce(x)
    weight = torch.ones(2, requires_grad=True)
    dist.all_reduce(weight.detach())
    return [x.tolist(), y.tolist(), weight.tolist()]


def test_inference_mode_and_no_grad_are_recorded() -> None:
    run = run_with_and_without_recording(modes)
    ops = [Op.ALL_REDUCE, Op.RECV, *[Op.ALL_REDUCE] * 3]
    assert [op for op, _ in calls_of(run)] == ops
    assert all(s.after is not None for s in spans(run))
    assert [s.before is None for s in spans(run)] == [op is Op.RECV for op in ops]  # only written


def meta() -> list[Any]:
    import torch.distributed._meta_registrations

    x_meta = torch.ones(3, device="meta")
    dist.all_reduce(x_meta)
    x = torch.ones(3)
    dist.all_reduce(x)
    return [x_meta.is_meta, x.tolist()]


def test_meta_tensors_are_not_recorded() -> None:
    assert calls_of(run_with_and_without_recording(meta)) == [(Op.ALL_REDUCE, "")]


# -- tensors of every kind --------------------------------------------------------------


def sparse() -> list[Any]:
    rank = dist.get_rank()
    x = torch.zeros(4, 2)
    x[: rank + 1] = 1.0  # each rank stores a different number of values
    both = x.to_sparse()
    dist.all_reduce(both)
    return both.to_dense().tolist()


def test_sparse_tensors_are_recorded() -> None:
    run = run_with_and_without_recording(sparse)
    (mine,), (other,) = spans(run), spans(run, 1)
    assert (mine.shape, mine.dtype) == ((4, 2), "sparse float32")
    assert (mine.nbytes, other.nbytes) == (2 * (16 + 4), 4 * (16 + 4)), "indices and values"
    assert mine.after is not None and mine.after.size == 4
    assert not run.trace.info.unrecorded


KINDS = (torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def kinds() -> list[Any]:
    for dtype in KINDS:
        dist.broadcast(torch.ones(3).to(dtype), 0)
    x = torch.tensor(2.0)
    dist.all_reduce(x)
    dist.all_reduce(torch.empty(0))
    dist.all_reduce(torch.ones(2, dtype=torch.complex64))
    dist.all_reduce(torch.nn.Parameter(torch.ones(2)).data)
    return [x.item()]


def test_all_dtypes_and_shapes_are_recorded() -> None:
    run = run_with_and_without_recording(kinds)
    assert len(calls_of(run)) == len(KINDS) + 4
    assert not run.trace.info.unrecorded


# -- a failing recorder does not break a program ---------------------------------------


def unreadable() -> list[Any]:
    """Prevent the recorder from inspecting any call."""

    def fails(*args: Any) -> Any:
        raise LookupError("no such group")

    tap.groups.find = fails  # type: ignore[method-assign]
    x = torch.ones(2)
    dist.all_reduce(x)
    work = dist.isend(x, 1 - dist.get_rank())
    dist.recv(x, 1 - dist.get_rank())
    assert work is not None
    work.wait()
    return x.tolist()


def test_calls_that_cannot_be_inspected_are_executed_and_counted() -> None:
    run = dk.run_ranks(unreadable, 2)
    assert run.results == [[2.0, 2.0]] * 2
    assert run.trace.spans == []
    assert run.trace.info.unrecorded[1] == {
        "all_reduce: LookupError: no such group": 1,
        "send: LookupError: no such group": 1,
        "recv: LookupError: no such group": 1,
    }


# -- hangs --------------------------------------------------------------


def inference_on_one_rank() -> None:
    x = torch.ones(3)
    if dist.get_rank() == 0:
        with torch.inference_mode():
            dist.all_reduce(torch.ones(3))
    dist.broadcast(x, 0)


def functional_on_one_rank() -> None:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    if dist.get_rank() == 0:
        call = torch.ops._c10d_functional
        call.wait_tensor(call.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name))


def full_tensor_on_one_rank() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    shards = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    if dist.get_rank() == 0:
        print(shards.full_tensor())


HANGS = {inference_on_one_rank: (0,), functional_on_one_rank: (1,), full_tensor_on_one_rank: (1,)}


@pytest.mark.parametrize("program", HANGS, ids=lambda program: program.__name__)
def test_hang_in_an_unusual_call_is_explained(program: Callable[[], None]) -> None:
    with pytest.raises(dk.errors.DeadlockError) as caught:
        dk.run_ranks(program, 2)
    (finding,) = caught.value.findings
    assert finding.hang and finding.culprits == HANGS[program]
    assert "test_recording_coverage.py" in finding.lines[0]
