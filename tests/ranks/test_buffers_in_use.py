"""Early use of the tensors of an asynchronous call is reported; other uses are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, State

Use = Callable[[torch.Tensor], object]


def use_while_receiving(*uses: Use) -> None:
    """Rank 0 sends after rank 1 has used the buffer of its irecv, or another tensor."""
    for use in uses:
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


def early_uses(run: Run) -> list[tuple[int, str]]:
    return sorted((s.rank, s.label) for s in run.trace.spans if s.op is Op.TOUCH)


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


def test_buffer_use_before_wait_is_reported() -> None:
    """Each use is reported once, and not after wait()."""
    with pytest.warns(dk.errors.CommunicationWarning, match="(uses|changes) the buffer"):
        run = dk.run_ranks(use_while_receiving, 2, *USES.values())
    assert early_uses(run) == sorted((1, name) for name in USES)
    findings = [f for f in run.findings if f.kind != "straggler"]
    assert {(f.kind, f.culprits, f.hang) for f in findings} == {("buffer_in_use", (1,), False)}
    assert all("test_buffers_in_use.py:" in finding.message for finding in findings)


HARMLESS: dict[str, Use] = {
    "shape": lambda m: (m.shape, m.size(), len(m), m.dtype, m.device, m.numel(), m.is_cuda),
    "views": lambda m: (m[:4], m.view(2, 4), m.T, m.reshape(4, 2), m.detach(), m.unsqueeze(0)),
    "the memory that it may share": lambda m: (m.contiguous(), m.to("cpu"), m.float(), m.cpu()),
    "its shape": lambda m: (torch.zeros_like(m), m.new_ones(2), torch.empty_like(m)),
    "the other half": lambda m: m[4:].sum() + m[4:].mul_(1).max(),
    "another tensor": lambda m: torch.ones(3).add_(2),
    "nothing": lambda m: m[2:2].sum(),
    "something meta": lambda m: torch.ones(3, device="meta") + 1,
    "something sparse": lambda m: torch.eye(3).to_sparse() @ torch.ones(3),
    "vmap": lambda m: torch.func.vmap(torch.func.grad(lambda x: x**2))(torch.ones(3)),
    "nested": lambda m: torch.nested.nested_tensor([torch.ones(n) for n in (2, 3)]) * 2,
    "a module": lambda m: torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(),
    "other attributes": lambda m: (m.requires_grad, m.grad, m.is_contiguous(), m.data_ptr()),
}


def test_unrelated_operations_are_not_reported() -> None:
    # a warning would be an error here
    assert early_uses(dk.run_ranks(use_while_receiving, 2, *HARMLESS.values())) == []


def test_buffer_use_under_another_mode_is_reported() -> None:
    def under_a_mode(memory: torch.Tensor) -> object:
        with RecordingMode():
            return memory[:4].sum()

    with pytest.warns(dk.errors.CommunicationWarning, match="uses the buffer"):
        run = dk.run_ranks(use_while_receiving, 2, under_a_mode)
    assert early_uses(run) == [(1, "sum")]


class RecordingMode(TorchFunctionMode):
    """Records calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_concurrent_receives_are_distinguished() -> None:
    def program() -> list[float]:
        x, y = torch.zeros(2), torch.zeros(2)
        if dist.get_rank() == 0:
            for value in (1.0, 2.0):
                dist.send(torch.full((2,), value), dst=1)
        else:
            first, second = dist.irecv(x, src=0), dist.irecv(y, src=0)
            first.wait()  # type: ignore[union-attr]
            x += 1  # its message has arrived
            y += 10  # too early
            second.wait()  # type: ignore[union-attr]
        return x.tolist()

    with pytest.warns(dk.errors.CommunicationWarning, match="changes the buffer"):
        run = dk.run_ranks(program, 2)
    assert run.results[1] == [2.0, 2.0]
    (touch,) = (s for s in run.trace.spans if s.op is Op.TOUCH)
    receives = [s.seq for s in run.trace.spans if s.op is Op.RECV and s.rank == 1]
    assert touch.match == str(receives[1])
    assert touch.state is State.COMPLETED


# -- every asynchronous call ------------------------------------------------------------------

N = 2
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda x, _: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x, _: dist.broadcast(x, 0, async_op=True),
    "reduce": lambda x, _: dist.reduce(x, 0, async_op=True),
    "all_gather": lambda x, y: dist.all_gather([*y.chunk(N)], x, async_op=True),
    "all_gather_into": lambda x, y: dist.all_gather_into_tensor(y, x, async_op=True),
    "reduce_scatter": lambda x, y: dist.reduce_scatter(x, [*y.chunk(N)], async_op=True),
    "reduce_scatter_tensor": lambda x, y: dist.reduce_scatter_tensor(x, y, async_op=True),
    "all_to_all": lambda x, y: dist.all_to_all([*y.chunk(N)], [*(y + 1).chunk(N)], async_op=True),
    "all_to_all_single": lambda x, y: dist.all_to_all_single(y, torch.ones(8), async_op=True),
    "gather": lambda x, y: dist.gather(x, [*y.chunk(N)] if rank() == 0 else None, async_op=True),
    "scatter": lambda x, y: dist.scatter(x, [*y.chunk(N)] if rank() == 0 else None, async_op=True),
    "isend": lambda x, _: dist.isend(x, 1) if rank() == 0 else dist.irecv(torch.ones(4), 0),
    "irecv": lambda x, _: dist.isend(torch.ones(4), 1) if rank() == 0 else dist.irecv(x, 0),
}

#: Permitted uses of a call's x and y before wait(), on rank 0 and on rank 1.
FREE, READ, NOTHING = ("read", "write"), ("read",), ()
ALLOWED = {
    "all_reduce": [(NOTHING, FREE)] * 2,
    "broadcast": [(READ, FREE), (NOTHING, FREE)],
    "reduce": [(NOTHING, FREE), (READ, FREE)],
    "all_gather": [(READ, NOTHING)] * 2,
    "all_gather_into": [(READ, NOTHING)] * 2,
    "reduce_scatter": [(NOTHING, READ)] * 2,
    "reduce_scatter_tensor": [(NOTHING, READ)] * 2,
    "all_to_all": [(FREE, NOTHING)] * 2,
    "all_to_all_single": [(FREE, NOTHING)] * 2,
    "gather": [(READ, NOTHING), (READ, FREE)],
    "scatter": [(NOTHING, READ), (NOTHING, FREE)],
    "isend": [(READ, FREE), (FREE, FREE)],
    "irecv": [(FREE, FREE), (NOTHING, FREE)],
}
DOES: dict[str, Use] = {"read": lambda m: m * 2, "write": lambda m: m.fill_(1)}


def rank() -> int:
    return dist.get_rank()


def each_use_of_each_call() -> None:
    """Combine each call with each use of its tensors, in a named mark."""
    for name, call in CALLS.items():
        for i in range(2):
            for use, use_tensor in DOES.items():
                mine = torch.ones(4), torch.ones(8)
                with dk.mark(f"{name} {i} {use}"):
                    work = call(*mine)
                    use_tensor(mine[i])
                    work.wait()


def test_only_forbidden_uses_of_each_call_are_reported() -> None:
    with pytest.warns(dk.errors.CommunicationWarning):
        run = dk.run_ranks(each_use_of_each_call, N)
    spans = [s for s in run.trace.spans if s.op in (Op.MARK, Op.TOUCH)]
    for r in range(N):
        mine = sorted((s for s in spans if s.rank == r), key=lambda s: s.seq)
        reported = {mark.label for mark, touch in pairwise(mine) if touch.op is Op.TOUCH}
        assert reported == {
            f"{name} {i} {use}"
            for name, allowed in ALLOWED.items()
            for i in range(2)
            for use in DOES
            if use not in allowed[r][i]
        }


# -- calls without wait() -------------------------------------------------------------------


def call_without_wait() -> None:
    for name in ("all_gather_into", "reduce_scatter_tensor", "all_to_all"):
        x, y = torch.ones(4), torch.ones(8)
        CALLS[name](x, y)
        y.sum()


def test_unawaited_wrapped_call_is_reported_once() -> None:
    with pytest.warns(dk.errors.CommunicationWarning, match="ranks 0 and 1 never waited for"):
        run = dk.run_ranks(call_without_wait, N)
    assert [f.kind for f in run.findings if f.kind != "straggler"] == ["not_waited"] * 3
