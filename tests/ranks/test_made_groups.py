"""Groups left behind, made by their members only, used or waited for after their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.diagnosis.findings import Kind


def rank() -> int:
    return dist.get_rank()


def remark(program: Callable[[], Any], ranks: int = 2) -> dk.Finding:
    """The one remark about a program that ends."""
    with pytest.warns(dk.CommunicationWarning):
        run = dk.run_ranks(program, ranks)
    (finding,) = (f for f in run.findings if f.kind is not Kind.STRAGGLER)
    assert not finding.hang
    return finding


def line_of(program: Callable[..., Any], after: int) -> str:
    """The line so many lines after a function's first, as findings name it."""
    return f"test_made_groups.py:{program.__code__.co_firstlineno + after}"


# -- left behind --------------------------------------------------------------------------


def made_in_a_loop() -> None:
    for _ in range(4):
        group = dist.new_group([0, 1])
        if rank() < 2:
            dist.all_reduce(torch.ones(1), group=group)


def made_in_a_function_called_again() -> None:
    def mean(x: torch.Tensor) -> None:
        dist.all_reduce(x, group=dist.new_group([0, 1]))

    for _ in range(3):
        mean(torch.ones(1))


def test_groups_made_again_and_again_are_remarked_on() -> None:
    finding = remark(made_in_a_loop, 3)
    assert (finding.kind, finding.culprits) == (Kind.LEAKED_GROUP, (0, 1))
    assert line_of(made_in_a_loop, 2) in finding.message
    assert remark(made_in_a_function_called_again).kind is Kind.LEAKED_GROUP


def made_and_destroyed() -> None:
    for _ in range(4):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)


def made_and_kept() -> None:
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)


def made_for_each_pair() -> None:
    for other in range(dist.get_world_size()):
        dist.new_group(sorted({0, other}))
    dist.barrier()


@pytest.mark.parametrize("program", [made_and_destroyed, made_and_kept, made_for_each_pair])
def test_groups_that_are_kept_destroyed_or_different_are_fine(program: Callable[[], None]) -> None:
    dk.run_ranks(program, 2)  # a warning would be an error here


# -- made by some ----------------------------------------------------------------------------


def made_by_its_members() -> None:
    if rank() < 2:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)


def test_a_group_made_by_its_members_only_is_remarked_on() -> None:
    finding = remark(made_by_its_members, 3)
    assert (finding.kind, finding.culprits) == (Kind.NEW_GROUP, (2,))
    assert line_of(made_by_its_members, 2) in finding.message


# -- destroyed -------------------------------------------------------------------------------


def used_after_its_end() -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(1), group=group)


def waited_for_after_its_end() -> None:
    group, x = dist.new_group(), torch.ones(1)
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.destroy_process_group(group)
    work.wait()


def test_a_group_used_after_its_end_is_remarked_on_with_both_lines() -> None:
    for program, lines in ((used_after_its_end, (3, 4)), (waited_for_after_its_end, (2, 3))):
        finding = remark(program)
        assert (finding.kind, finding.culprits) == (Kind.WRONG_GROUP, (0, 1))
        assert all(line_of(program, n) in finding.message for n in lines)


def destroyed_by_one() -> None:
    group = dist.new_group()
    if rank() == 0:
        dist.destroy_process_group(group)
    else:
        dist.all_reduce(torch.ones(1), group=group)


def destroyed_by_one_that_waits_elsewhere() -> None:
    group = dist.new_group()
    if rank() == 0:
        dist.destroy_process_group(group)
    else:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def default_destroyed_by_one() -> None:
    dist.barrier()
    if rank() == 0:
        dist.destroy_process_group()
    else:
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "program", [destroyed_by_one, destroyed_by_one_that_waits_elsewhere, default_destroyed_by_one]
)
def test_a_group_destroyed_before_the_others_use_it_explains_their_hang(
    program: Callable[[], None],
) -> None:
    with pytest.raises(dk.DeadlockError) as caught:
        dk.run_ranks(program, 2)
    (finding,) = caught.value.findings
    assert (finding.kind, finding.culprits) == (Kind.WRONG_GROUP, (0,))
    assert all(line_of(program, n) in finding.message for n in (3, 5))


def skipped_and_destroyed_at_the_end() -> None:
    group = dist.new_group()
    if rank() == 1:
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


def test_a_group_destroyed_at_the_end_is_no_cause() -> None:
    with pytest.raises(dk.DeadlockError) as caught:
        dk.run_ranks(skipped_and_destroyed_at_the_end, 2)
    (finding,) = caught.value.findings
    assert "destroy" not in str(finding)


def destroyed_when_all_have_used_it() -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    if rank() == 0:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank() == 1:
        dist.destroy_process_group(group)


def test_groups_may_end_at_different_times() -> None:
    dk.run_ranks(destroyed_when_all_have_used_it, 2)
