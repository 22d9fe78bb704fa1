"""Using the buffer of an irecv too early is noticed; using anything else is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import distkit as dk
from distkit.diagnosis.findings import Kind
from distkit.events import Op, State
from distkit.recording.open_buffers import _bytes

Use = Callable[[torch.Tensor], object]


def receiving(use: Use) -> list[float]:
    """Rank 0 sends when rank 1 has used the buffer of its irecv, or something beside it."""
    memory = torch.zeros(8)
    if dist.get_rank() == 0:
        dist.barrier()
        dist.send(torch.ones(4), dst=1)
    else:
        work = dist.irecv(memory[:4], src=0)
        use(memory)
        dist.barrier()
        work.wait()  # type: ignore[union-attr]
        use(memory)
    return memory.tolist()


def touched(run: dk.Run) -> list[tuple[int, str]]:
    return [(s.rank, s.label) for s in run.trace.spans if s.op is Op.TOUCH]


USES: dict[str, Use] = {
    "sum": lambda m: m.sum(),
    "add_": lambda m: m[3:5].add_(1),
    "__setitem__": lambda m: m.__setitem__(0, 1.0),
    "tolist": lambda m: m[:1].tolist(),
    "item": lambda m: m[0].item(),
    "cat": lambda m: torch.cat([torch.ones(1), m]),
    "copy_": lambda m: torch.ones(8).copy_(m),
    "linear": lambda m: torch.nn.functional.linear(torch.ones(2, 8), weight=m[None]),
    "numpy": lambda m: m.numpy(),
    "__float__": lambda m: float(m[1]),
    "__repr__": lambda m: repr(m[:2]),
    "add": lambda m: 1 + m[:4].reshape(2, 2).T,
}


@pytest.mark.parametrize("name", USES)
def test_a_use_is_noticed(name: str) -> None:
    with pytest.warns(dk.CommunicationWarning, match="uses the buffer"):
        run = dk.run_ranks(receiving, 2, USES[name])
    assert [rank for rank, _ in touched(run)] == [1], "once, and not after wait()"
    (finding,) = (f for f in run.findings if f.kind is not Kind.STRAGGLER)
    assert (finding.kind, finding.culprits, finding.hang) == (Kind.BUFFER_IN_USE, (1,), False)
    assert "test_touch.py:" in finding.message


HARMLESS: dict[str, Use] = {
    "shape": lambda m: (m.shape, m.size(), len(m), m.dtype, m.device, m.numel(), m.is_cuda),
    "views": lambda m: (m[:4], m.view(2, 4), m.T, m.reshape(4, 2), m.detach(), m.unsqueeze(0)),
    "the other half": lambda m: m[4:].sum() + m[4:].mul_(1).max(),
    "another tensor": lambda m: torch.ones(3).add_(2),
    "nothing": lambda m: m[2:2].sum(),
    "something meta": lambda m: torch.ones(3, device="meta") + 1,
    "something sparse": lambda m: torch.eye(3).to_sparse() @ torch.ones(3),
    "vmap": lambda m: torch.func.vmap(torch.func.grad(lambda x: x**2))(torch.ones(3)),
    "nested": lambda m: torch.nested.nested_tensor([torch.ones(n) for n in (2, 3)]) * 2,
    "a module": lambda m: torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(),
    "the device": lambda m: (m.requires_grad, m.grad, m.is_contiguous(), m.data_ptr()),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_touch_it_is_not_blamed(name: str) -> None:
    run = dk.run_ranks(receiving, 2, HARMLESS[name])  # a warning would be an error here
    assert touched(run) == []


def test_views_that_interleave_count_as_one() -> None:
    columns = torch.zeros(4, 2).T
    begin, end = _bytes(columns[0])
    assert end - begin == 4 * (3 * 2 + 1)
    assert _bytes(columns[1])[0] < end
    assert _bytes(torch.zeros(3)[3:]) == (0, 0)


def test_a_use_under_another_mode_is_noticed() -> None:
    def under_a_mode(memory: torch.Tensor) -> object:
        with Seeing():
            return memory[:4].sum()

    with pytest.warns(dk.CommunicationWarning, match="uses the buffer"):
        run = dk.run_ranks(receiving, 2, under_a_mode)
    assert touched(run) == [(1, "sum")]


class Seeing(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("begins_inside", [False, True])
@pytest.mark.parametrize("ends_inside", [False, True])
def test_modes_and_receives_may_overlap(begins_inside: bool, ends_inside: bool) -> None:
    def program(begins_inside: bool, ends_inside: bool) -> list[str]:
        x, mode = torch.zeros(2), Seeing()
        if dist.get_rank() == 0:
            for _ in range(2):
                dist.send(torch.ones(2), dst=1)
            return []
        work = None if begins_inside else dist.irecv(x, src=0)
        with mode:
            work = work or dist.irecv(x, src=0)
            torch.ones(1).sum()
            if ends_inside:
                work.wait()  # type: ignore[union-attr]
        if not ends_inside:
            torch.ones(1).prod()
            work.wait()  # type: ignore[union-attr]
        x.prod()
        dist.irecv(x, src=0).wait()  # type: ignore[union-attr]
        assert torch._C._len_torch_function_stack() == 0  # type: ignore[attr-defined]
        return [name for name in mode.seen if name in ("sum", "prod")]

    run = dk.run_ranks(program, 2, begins_inside, ends_inside)
    assert run.results == [[], ["sum"]]
    assert touched(run) == []


def test_a_default_device_goes_with_an_open_receive() -> None:
    def program() -> str:
        x = torch.zeros(2)
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), dst=1)
            return ""
        with torch.device("meta"):
            work = dist.irecv(x, src=0)
            made = torch.ones(1)
        work.wait()  # type: ignore[union-attr]
        return f"{made.device} {torch.ones(1).device}"

    assert dk.run_ranks(program, 2).results == ["", "meta cpu"]


def test_compiled_functions_run_while_a_receive_is_open() -> None:
    def program() -> list[float]:
        x, y = torch.zeros(2), torch.arange(3.0)
        double = torch.compile(lambda t: 2 * t + 1, backend="eager")
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), dst=1)
            return []
        work = dist.irecv(x, src=0)
        result = double(y)
        work.wait()  # type: ignore[union-attr]
        return [*result.tolist(), *double(x).tolist()]

    run = dk.run_ranks(program, 2)
    assert run.results[1] == [1.0, 3.0, 5.0, 3.0, 3.0]
    assert touched(run) == []


def test_two_receives_at_once() -> None:
    def program() -> list[float]:
        x, y = torch.zeros(2), torch.zeros(2)
        if dist.get_rank() == 0:
            for value in (1.0, 2.0):
                dist.send(torch.full((2,), value), dst=1)
        else:
            first, second = dist.irecv(x, src=0), dist.irecv(y, src=0)
            first.wait()  # type: ignore[union-attr]
            x += 1  # its message has come
            y += 10  # too early
            second.wait()  # type: ignore[union-attr]
        return x.tolist()

    with pytest.warns(dk.CommunicationWarning, match="uses the buffer"):
        run = dk.run_ranks(program, 2)
    assert run.results[1] == [2.0, 2.0]
    (touch,) = (s for s in run.trace.spans if s.op is Op.TOUCH)
    receives = [s.seq for s in run.trace.spans if s.op is Op.RECV and s.rank == 1]
    assert touch.match == str(receives[1])
    assert touch.state is State.COMPLETED


def test_nothing_is_left_when_a_receive_was_never_waited_for() -> None:
    def program() -> int:
        x = torch.zeros(2)
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), dst=1)
        else:
            dist.irecv(x, src=0)
        dist.barrier()
        return 0

    def depth() -> int:
        return torch._C._len_torch_function_stack()  # type: ignore[attr-defined, no-any-return]

    with dk.Cluster(2) as cluster:
        with pytest.warns(dk.CommunicationWarning, match="never waited"):
            cluster.run(program)
        assert cluster.run(depth).results == [0, 0]
