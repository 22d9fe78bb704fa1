"""Collectives other than all-reduce, compared with torch's and with their schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import concatenate, identifying_lengths, message_sizes, scheduled_sizes

import distkit as dk
from distkit.algorithms import collectives as ours
from distkit.algorithms.collectives import COLLECTIVES

OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX]

#: Arguments: the function to call, this rank, the number of ranks, the root, the tensor length, and
#: the operation.
Call = Callable[[Any, int, int, int, int, dist.ReduceOp], list[torch.Tensor]]


def random_tensor(length: int, seed: int) -> torch.Tensor:
    """Return a non-contiguous tensor of random integers, which differ between ranks."""
    numbers = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-4, 4, (2, length), generator=numbers).double().t()


def random_tensors(n: int, length: int) -> list[torch.Tensor]:
    return [random_tensor(length, i) for i in range(n)]


def broadcast(call: Any, r: int, n: int, root: int, length: int, op: Any) -> list[torch.Tensor]:
    x = random_tensor(length, 0)
    call(x, root)
    return [x]


def reduce(call: Any, r: int, n: int, root: int, length: int, op: Any) -> list[torch.Tensor]:
    x = random_tensor(length, 0).contiguous()
    call(x, root, op)
    return [x] if r == root else []  # torch leaves it undefined on other ranks


def scatter(call: Any, r: int, n: int, root: int, length: int, op: Any) -> list[torch.Tensor]:
    x = random_tensor(length, 0).contiguous()
    parts = [p.contiguous() for p in random_tensors(n, length)]
    call(x, parts if r == root else None, root)
    return [x]


def gather(call: Any, r: int, n: int, root: int, length: int, op: Any) -> list[torch.Tensor]:
    found = [p.contiguous() for p in random_tensors(n, length)]
    call(random_tensor(length, 99).contiguous(), found if r == root else None, root)
    return found


def all_gather(call: Any, r: int, n: int, root: int, length: int, op: Any) -> list[torch.Tensor]:
    found = [p.contiguous() for p in random_tensors(n, length)]
    call(found, random_tensor(length, 99).contiguous())
    return found


def reduce_scatter(
    call: Any, r: int, n: int, root: int, length: int, op: Any
) -> list[torch.Tensor]:
    x = random_tensor(length, 0).contiguous()
    call(x, [p.contiguous() for p in random_tensors(n, length)], op)
    return [x]


def all_to_all(call: Any, r: int, n: int, root: int, length: int, op: Any) -> list[torch.Tensor]:
    found = [torch.zeros(2 * (length + (i + 2 * r) % 3)).double() for i in range(n)]
    parts = [random_tensor(length + (r + 2 * i) % 3, i).reshape(-1) for i in range(n)]
    if call is not dist.all_to_all:
        call(found, parts)
        return found
    out = torch.cat(found)  # gloo supports only lists of equal parts
    received, sent = list(map(len, found)), list(map(len, parts))
    dist.all_to_all_single(out, torch.cat(parts), received, sent)
    return list(out.split(received))


#: A call of each collective except ``barrier``, which has a separate test.
CALLS: dict[str, Call] = {
    "broadcast": broadcast,
    "reduce": reduce,
    "scatter": scatter,
    "gather": gather,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


@settings(max_examples=8)
@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 7), st.sampled_from(OPS)),
        min_size=1,
        max_size=2,
    ),
)
def test_every_collective_equals_torch(n: int, cases: list[Any]) -> None:
    """The root, the length and the operation vary."""
    all_cases = [(name, *case) for name in CALLS for case in cases]

    def program() -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        return [
            tuple(
                CALLS[name](call, dist.get_rank(), n, root % n, length, op)
                for call in (COLLECTIVES[name].reference, getattr(dist, name))
            )
            for name, length, root, op in all_cases
        ]

    for pairs in dk.run_ranks(program, n).results:
        for case, (mine, theirs) in zip(all_cases, pairs, strict=True):
            assert len(mine) == len(theirs)
            assert all(map(torch.equal, mine, theirs)), case


def call_with_length(name: str, n: int, length: int) -> None:
    """Call a reference implementation with chunks of ``length`` elements in total."""
    x, parts = torch.ones(length), [torch.ones(length // n) for _ in range(n)]
    part, call, r = torch.ones(length // n), COLLECTIVES[name].reference, dist.get_rank()
    sizes = torch.ones(length).tensor_split(n * n)  # the data from i to j
    arguments: dict[str, tuple[Any, ...]] = {
        "broadcast": (x,),
        "reduce": (x,),
        "barrier": (),
        "all_gather": (parts, part),
        "scatter": (part, parts if r == 0 else None),
        "gather": (part, parts if r == 0 else None),
        "reduce_scatter": (part, parts),
        "all_to_all": ([sizes[i * n + r].clone() for i in range(n)], sizes[r * n : r * n + n]),
    }
    call(*arguments[name])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_recorded_messages_match_the_schedules(n: int) -> None:
    """Senders, receivers, sizes and order."""
    all_cases = []
    for name in COLLECTIVES:
        even = name in {"scatter", "gather", "all_gather", "reduce_scatter"}  # parts are equal
        many = identifying_lengths(COLLECTIVES[name].chunks(n))
        lengths = [0] if name == "barrier" else [0, n, 3 * n] if even else many
        all_cases += [(name, length) for length in lengths]

    def program() -> None:
        for name, length in all_cases:
            call_with_length(name, n, length)

    recorded = message_sizes(dk.run_ranks(program, n).trace)
    expected = concatenate(
        scheduled_sizes(COLLECTIVES[name].schedule(n), length, COLLECTIVES[name].chunks(n))
        for name, length in all_cases
    )
    assert recorded == {link: [4 * k for k in sizes] for link, sizes in expected.items()}


def test_barrier_waits_for_the_last_rank() -> None:
    """No rank passes before all have arrived."""
    barrier = ours.barrier

    def program() -> tuple[float, float]:
        import time

        for late in range(dist.get_world_size()):
            if dist.get_rank() == late:
                assert sum(i * i for i in range(200_000))  # arrive late
            arrived = time.monotonic()
            barrier()
            passed = time.monotonic()
        return arrived, passed

    times = dk.run_ranks(program, 5).results
    assert max(arrived for arrived, _ in times) <= min(passed for _, passed in times)


def test_roots_in_a_group_are_global_ranks() -> None:
    """Roots are global ranks; reduce does not change the tensors of other ranks."""

    def program() -> list[Any]:
        group, r = dist.new_group([1, 3]), float(dist.get_rank())
        x, y, z = torch.tensor([r]), torch.tensor([r]), torch.tensor([r])
        parts = [torch.zeros(1), torch.zeros(1)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours.broadcast(x, 3, group)
            ours.reduce(y, 3, group=group)
            ours.scatter(z, [torch.tensor([10.0]), torch.tensor([30.0])], 1, group=group)
            ours.gather(z, parts, 3, group)
            ours.barrier(group)
        return [t.item() for t in (x, y, z, *parts)]

    with pytest.warns(dk.errors.CommunicationWarning, match="on a group without rank"):
        results = dk.run_ranks(program, 4).results
    assert results == [[0, 0, 0, 0, 0], [3, 1, 10, 0, 0], [2, 2, 2, 0, 0], [3, 4, 30, 10, 30]]


INVALID_INPUTS = {
    "too few parts": (
        lambda: ours.all_gather([torch.ones(2)], torch.ones(2)),
        "ValueError: all_gather: expected len(tensor_list) == 2, one tensor per rank; got 1.",
    ),
    "parts of another length": (
        lambda: ours.reduce_scatter(torch.ones(2), [torch.ones(3), torch.ones(2)]),
        "ValueError: reduce_scatter: tensors differ in number of elements: 2, 3.",
    ),
    "parts of another dtype": (
        lambda: ours.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2).int()),
        "ValueError: all_gather: tensors differ in dtype: float32, int32.",
    ),
    "missing parts": (
        lambda: dist.get_rank() == 0 and ours.scatter(torch.ones(2), None, 0),
        "ValueError: scatter: rank 0 must pass scatter_list.",
    ),
    "a root outside the group": (
        lambda: ours.broadcast(torch.ones(2), 7),
        "ValueError: broadcast: rank 7 is not in the group, which has ranks 0, 1.",
    ),
}


def test_invalid_input_raises_before_any_message() -> None:
    def program() -> list[str]:
        errors = []
        for call, _ in INVALID_INPUTS.values():
            try:
                call()
            except (TypeError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        return errors

    run = dk.run_ranks(program, 2)
    assert run.results[0] == [message for _, message in INVALID_INPUTS.values()]
    assert not run.trace.messages
