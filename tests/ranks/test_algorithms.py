"""Reference implementations, compared with torch's all-reduce and with their schedules."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import concatenate, identifying_lengths, message_sizes, scheduled_sizes

import distkit as dk
from distkit.algorithms.all_reduce import ALL_REDUCES

every_algorithm = pytest.mark.parametrize("name", ALL_REDUCES)
OPS = ["SUM", "MIN", "MAX", "PRODUCT"]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


# -- compared with torch --------------------------------------------------------------------

cases = st.tuples(
    st.sampled_from([*ALL_REDUCES]),
    st.integers(0, 70),
    st.tuples(st.sampled_from([*FLOATS, *INTEGERS]), st.sampled_from(OPS)),
    st.sampled_from([(), (2,), (3, 2)]),  # trailing dimensions
    st.booleans(),
)


def numbers(
    length: int, dtype: torch.dtype, trailing: tuple[int, ...], transposed: bool
) -> torch.Tensor:
    """Return numbers whose sums and products are exact in any order."""
    x = torch.tensor(
        random.choices([1, 2], k=length * 2 ** len(trailing) * 3 ** (len(trailing) > 1))
    )
    x = x[: length * torch.Size(trailing).numel()].to(dtype).view(length, *trailing)
    return x.transpose(0, -1) if transposed else x


@settings(max_examples=8)
@given(st.integers(1, 8), st.lists(cases, min_size=8, max_size=16))
def test_every_all_reduce_equals_torch(n: int, cases: list[Any]) -> None:
    """The length, dtype, operation, shape and layout vary; all ranks agree bitwise."""

    def program() -> list[Any]:
        results = []
        for name, length, (dtype, op), trailing, transposed in cases:
            random.seed(dist.get_rank() + length)
            result = numbers(length, dtype, trailing, transposed)
            expected = result.clone(memory_format=torch.contiguous_format)
            ALL_REDUCES[name].reference(result, getattr(dist.ReduceOp, op))
            dist.all_reduce(expected, getattr(dist.ReduceOp, op))
            results.append((result, expected))
        return results

    for i, pairs in enumerate(zip(*dk.run_ranks(program, n).results, strict=True)):
        for result, expected in pairs:
            assert torch.equal(result, expected), cases[i]
            assert torch.equal(result, pairs[0][0])


@pytest.mark.parametrize("n", [4, 7])
def test_all_ranks_round_identically(n: int) -> None:
    """Sums of any numbers are close to torch's, and bitwise equal on all ranks."""

    def program() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(dist.get_rank())
        x = torch.randn(1000)
        expected_sum = x.clone()
        dist.all_reduce(expected_sum)
        found = {}
        for name, algorithm in ALL_REDUCES.items():
            found[name] = x.clone(), expected_sum
            algorithm.reference(found[name][0])
        return found

    results = dk.run_ranks(program, n).results
    for name in ALL_REDUCES:
        first, expected_sum = results[0][name]
        assert torch.allclose(first, expected_sum, atol=1e-5), name
        assert all(torch.equal(found[name][0], first) for found in results), name


def test_subgroup_uses_group_ranks() -> None:
    """Ranks 1, 2 and 3 form the group; rank 0, which is outside, gets a warning."""

    def program() -> tuple[dict[str, list[float]], list[str]]:
        group = dist.new_group([1, 2, 3])
        found = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name, algorithm in ALL_REDUCES.items():
                x = torch.full((5,), float(dist.get_rank()))
                algorithm.reference(x, group=group)
                found[name] = x.tolist()
        return found, [str(w.message) for w in caught]

    with pytest.warns(
        dk.errors.CommunicationWarning, match="on a group without rank 0: the call has no effect"
    ):
        nonmember, *members = dk.run_ranks(program, 4).results
    assert all(x == [0.0] * 5 for x in nonmember[0].values())
    assert len(nonmember[1]) == len(ALL_REDUCES)
    assert "Running ring_all_reduce on global rank 0 which does not belong" in "".join(nonmember[1])
    for found, caught in members:
        assert all(x == [6.0] * 5 for x in found.values()) and not caught


# -- compared with the schedules -----------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_recorded_messages_match_the_schedules(n: int) -> None:
    """Senders, receivers, sizes and order; the lengths identify the chunks."""
    calls = [
        (a, length) for a in ALL_REDUCES.values() for length in identifying_lengths(a.chunks(n))
    ]

    def program() -> None:
        for algorithm, length in calls:
            algorithm.reference(torch.ones(length, dtype=torch.float64))

    recorded = message_sizes(dk.run_ranks(program, n).trace)
    expected = concatenate(
        scheduled_sizes(a.schedule(n), length, a.chunks(n)) for a, length in calls
    )
    assert recorded == {link: [8 * k for k in sizes] for link, sizes in expected.items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("double_tree", {"segments": 1}),
        ("double_tree", {"segments": 3}),
        ("hierarchical", {"devices_per_host": 4}),
        ("hierarchical", {"devices_per_host": 1}),
        ("torus", {"devices_per_host": 3}),
    ],
)
def test_options_match_the_schedule(name: str, options: dict[str, Any]) -> None:
    n, algorithm = 6, ALL_REDUCES[name]
    chunks = algorithm.chunks(n, **options)

    def program() -> list[bool]:
        correct = []
        for length in identifying_lengths(chunks):
            x = torch.arange(float(length))
            algorithm.reference(x, **options)
            correct.append(torch.equal(x, n * torch.arange(float(length))))
        return correct

    run = dk.run_ranks(program, n)
    assert all(all(correct) for correct in run.results)
    expected = concatenate(
        scheduled_sizes(algorithm.schedule(n, **options), length, chunks)
        for length in identifying_lengths(chunks)
    )
    assert message_sizes(run.trace) == {
        link: [4 * k for k in sizes] for link, sizes in expected.items()
    }


# -- invalid input ---------------------------------------------------------------------------

INVALID_INPUTS = {
    "an average": (
        lambda: (torch.ones(3), dist.ReduceOp.AVG),
        ValueError,
        "op is .*AVG; supported operations: MAX, MIN, PRODUCT, SUM",
    ),
    "an unknown operation": (
        lambda: (torch.ones(3), dist.ReduceOp.BXOR),
        ValueError,
        "op is .*BXOR; supported operations: MAX, MIN, PRODUCT, SUM",
    ),
    "no tensor": (lambda: ([1.0, 2.0],), TypeError, "expects dense tensors; got float"),
    "a sparse tensor": (
        lambda: (torch.eye(3).to_sparse(),),
        TypeError,
        "expects dense tensors; got layout torch.sparse_coo",
    ),
}


def test_invalid_input_raises_before_any_message() -> None:
    """Every rank gets the error from every algorithm, and continues."""

    def program() -> list[tuple[str, str, str, str]]:
        errors = []
        for name, algorithm in ALL_REDUCES.items():
            for mistake, (make, _, _) in INVALID_INPUTS.items():
                try:
                    algorithm.reference(*make())
                except Exception as error:
                    errors.append((name, mistake, type(error).__name__, str(error)))
        return errors

    run = dk.run_ranks(program, 2)
    assert not run.trace.messages
    for errors in run.results:
        assert len(errors) == len(ALL_REDUCES) * len(INVALID_INPUTS)
        for name, mistake, kind, message in errors:
            _, error, pattern = INVALID_INPUTS[mistake]
            assert kind == error.__name__, (name, mistake, message)
            assert message.startswith(f"{name}_all_reduce")
            with pytest.raises(error, match=pattern):
                raise error(message)


@every_algorithm
def test_different_lengths_raise_without_a_hang(name: str) -> None:
    """Gloo aborts a rank that receives too much; the error names sender, receiver and sizes."""
    reference = ALL_REDUCES[name].reference

    def program() -> None:
        reference(torch.ones(24 if dist.get_rank() == 1 else 12))

    with pytest.raises(
        dk.errors.RankError, match=r"sends float32\[\d+\].* receives it into float32\[\d+"
    ):
        dk.run_ranks(program, 3)


def test_tensors_of_every_kind_are_reduced_in_place() -> None:
    """A parameter, a 0-dimensional tensor, a slice, and an empty tensor."""

    def program() -> list[Any]:
        w = torch.nn.Parameter(torch.ones(2))
        table = torch.zeros(3, 4)
        scalar, nothing = torch.tensor(2.0), torch.empty(0, 3)
        for x in (w, table[:, 1::2].add_(1), scalar, nothing):
            dk.algorithms.halving_doubling_all_reduce(x)
        dk.algorithms.tree_all_reduce(table[:, 1])
        return [w.tolist(), w.requires_grad, table.tolist(), scalar.item(), nothing.shape]

    for result in dk.run_ranks(program, 3).results:
        assert result == [[3.0, 3.0], True, [[0, 9, 0, 3]] * 3, 6.0, (0, 3)]


# -- synchronous SGD ---------------------------------------------------------------------------


def test_initial_weights_are_broadcast_from_rank_0() -> None:
    def program() -> torch.Tensor:
        torch.manual_seed(dist.get_rank())
        net = torch.nn.Linear(3, 2)
        dk.algorithms.sync_initial_weights(net)
        return torch.cat([w.detach().reshape(-1) for w in net.parameters()])

    one, two = dk.run_ranks(program, 2).results
    assert torch.equal(one, two)


def test_shards_are_equal_and_disjoint() -> None:
    assert dk.run_ranks(lambda: dk.data.shard(torch.arange(11))[0].tolist(), 3).results == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]


def test_digits_equal_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    result = dk.data.digits()
    assert torch.equal(result[0] * 16, torch.tensor(images, dtype=torch.float32))
    assert torch.equal(result[1], torch.tensor(labels))
