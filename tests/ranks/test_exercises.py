"""Exercises: the library's pages solve them, stubs are not attempts, mistakes are named."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from answers import answer, check_is_no_attempt, empty, stub

import distkit as dk
from distkit.exercises import TASKS
from distkit.exercises.collectives import TASKS as COLLECTIVES

NAMES = [task.name for task in COLLECTIVES]


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_one(name: str) -> None:
    verdict = getattr(dk.check, name)(answer(name))
    assert verdict, repr(verdict)
    assert verdict.status == "solved" and all(p.good for p in verdict.points)
    assert len(verdict.points) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nothing", [empty, stub])
def test_a_stub_is_no_attempt(name: str, nothing: Any) -> None:
    check_is_no_attempt(name, nothing)


def flat(x: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [r for r in range(n) if r != rank]
    works = [dist.isend(x.clone(), r) for r in others]
    inbox = [torch.empty_like(x) for _ in others]
    for r, into in zip(others, inbox, strict=True):
        dist.recv(into, r)
    for work in works:
        work.wait()
    for part in inbox:
        x += part


def test_right_but_too_many_bytes() -> None:
    verdict = dk.check.ring_all_reduce(flat)
    assert verdict.status == "right, but not the best"
    text = repr(verdict)
    assert "✗ 12,288 bytes sent by the busiest rank; Ring needs 6,144" in text
    assert "✓ 3 messages" in text and "dk.hint.ring_all_reduce()" in text
    assert "not the best" in verdict._repr_html_()


def chain(x: torch.Tensor, src: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    place = (rank - src) % n
    if place:
        dist.recv(x, (rank - 1) % n)
    if place + 1 < n:
        dist.send(x, (rank + 1) % n)


def test_right_but_too_many_rounds() -> None:
    verdict = dk.check.broadcast(chain)
    assert "✗ 3 rounds; Broadcast needs 2" in repr(verdict)


def borrowed(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def test_torchs_own_is_not_ones_own() -> None:
    verdict = dk.check.tree_all_reduce(borrowed)
    assert verdict.status == "not right yet"
    assert [p.text for p in verdict.points] == [
        "it calls dist.all_reduce: write it with send and recv, isend and irecv"
    ]


def off_by_one(x: torch.Tensor) -> None:
    flat(x)
    x += 1.0


def test_a_wrong_result_is_shown() -> None:
    verdict = dk.check.ring_all_reduce(off_by_one)
    assert verdict.status == "not right yet"
    assert "on 2 ranks, with 1 element, rank 0 ends with\n    [31]" in repr(verdict)
    assert "where [30] would be right" in repr(verdict)


def stuck(x: torch.Tensor) -> None:
    if dist.get_world_size() > 1:
        dist.recv(x, (dist.get_rank() + 1) % dist.get_world_size())


def test_a_hang_is_explained() -> None:
    verdict = dk.check.ring_all_reduce(stuck)
    assert verdict.status == "not right yet" and "waits in recv" in repr(verdict)
    assert "on 2 ranks:\n    deadlock in stuck: " in repr(verdict)
    assert "released" not in repr(verdict) and "trial" not in repr(verdict)


def outside(x: torch.Tensor) -> None:
    over(x)


def over(x: torch.Tensor) -> None:
    if dist.get_world_size() == 3:
        dist.send(x, 3)
    flat(x)


def test_an_error_shows_the_learners_lines_and_on_how_many_ranks_it_was() -> None:
    text = repr(dk.check.ring_all_reduce(outside))
    assert re.search(r"✗ on 3 ranks:\n    rank . raised ValueError: send: rank 3 does", text)
    assert "in outside" in text and "in over" in text
    assert not any(
        word in text for word in ("exercises/collectives", "collectives.py", "-packages/", "trial")
    )


def alone(x: torch.Tensor) -> None:
    flat(x)
    if dist.get_world_size() == 1:
        x += 1.0


def to_itself(x: torch.Tensor) -> None:
    flat(x)
    if dist.get_world_size() == 1:
        dist.send(x, 0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(alone, "on 1 rank, with 1 element, rank 0 ends with"), (to_itself, "on 1 rank:")],
)
def test_one_rank_is_tried_too(wrong: Any, says: str) -> None:
    verdict = dk.check.ring_all_reduce(wrong)
    assert verdict.status == "not right yet" and says in repr(verdict)


def returned(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    flat(total)
    return total


def returned_list(outputs: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    mine = [torch.zeros_like(x) for _ in outputs]
    answer("all_gather")(mine, x)
    return mine


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        (
            "ring_all_reduce",
            returned,
            "it returns the right result, but x has to hold it: write into x",
        ),
        ("all_gather", returned_list, "it returns the right result, but outputs has to hold it"),
    ],
)
def test_a_result_that_is_returned_is_told_from_a_wrong_one(
    name: str, wrong: Any, says: str
) -> None:
    verdict = getattr(dk.check, name)(wrong)
    assert verdict.status == "not right yet" and says in repr(verdict)


@pytest.mark.parametrize("wrong", [lambda x: None, lambda x, src, dst: None, lambda: None])
def test_the_wrong_parameters_are_named(wrong: Any) -> None:
    verdict = dk.check.broadcast(wrong)
    assert verdict.status == "not right yet"
    assert "✗ write def broadcast(x, src): yours takes (" in repr(verdict)


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="judges a function, not int"):
        dk.check.broadcast(3)


def test_hints_come_one_by_one() -> None:
    hints = TASKS["ring_all_reduce"].hints
    given = [repr(dk.hint.ring_all_reduce()) for _ in range(2 * len(hints))]
    assert given[: len(hints)] == given[len(hints) :]
    assert sorted(given[: len(hints)]) == [
        f"Hint {i} of {len(hints)}: {h}" for i, h in zip(itertools.count(1), hints, strict=False)
    ]


def test_the_desks_list_what_there_is() -> None:
    assert all(name in repr(dk.check) for name in TASKS)
    assert "def ring_all_reduce(x)" in repr(dk.check.ring_all_reduce)
    assert dir(dk.solution) == sorted(TASKS)
    with pytest.raises(AttributeError, match=r"no exercise 'ring'. There are: broadcast"):
        _ = dk.check.ring
    assert dk.solution.broadcast()._repr_markdown_().startswith("```python\nimport")


# -- the mean over unequal shards --------------------------------------------------------


def of_means(losses: torch.Tensor) -> torch.Tensor:
    mean = losses.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def by_ranks(losses: torch.Tensor) -> float:
    dist.all_reduce(total := losses.sum())
    return total.item() / dist.get_world_size()


def by_own_count(losses: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total := losses.sum())
    return total / len(losses)


def weighted_means(losses: torch.Tensor) -> torch.Tensor:
    both = torch.stack([losses.mean() * len(losses), torch.tensor(len(losses))])
    dist.all_reduce(both)
    return both[0] / both[1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (of_means, "1, 2 and 6 examples: 21 is the mean of the ranks' means"),
        (by_ranks, "82 is the sum divided by the number of ranks; 27.33 would be right"),
        (by_own_count, "each rank divides the sum by its own number of examples"),
        (weighted_means, "3, 0, 2 and 1 examples: it returns NaN: the mean over no examples"),
        (lambda losses: losses.mean(), "each rank returns the mean of its own examples"),
        (lambda losses: losses, "rank 1 returns a value of type Tensor"),
    ],
)
def test_means_of_means_are_told_by_what_they_give(wrong: Any, says: str) -> None:
    verdict = dk.check.mean_loss(wrong)
    assert verdict.status == "not right yet" and says in repr(verdict)


def two_calls(losses: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total := losses.sum())
    dist.all_reduce(number := torch.tensor(len(losses)))
    return total / number


def test_the_mean_in_one_call_and_in_two() -> None:
    verdict = dk.check.mean_loss(answer("mean_loss"))
    assert verdict and verdict.points[-1].text == "1 communication of a rank"
    verdict = dk.check.mean_loss(two_calls)
    assert verdict.status == "right, but not the best"
    assert "✗ 2 communications of a rank; one all-reduce of the sum" in repr(verdict)


@pytest.mark.parametrize("nothing", [empty, stub])
def test_a_stub_of_a_mean_is_no_attempt(nothing: Any) -> None:
    check_is_no_attempt("mean_loss", nothing)
