"""Beginners' mistakes on ranks, and the resulting errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.errors import MismatchError


def send_four_receive_two() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.zeros(2), src=0)


def test_error_begins_with_its_cause() -> None:
    with pytest.raises(dk.errors.RankDied) as died:
        dk.run_ranks(send_four_receive_two, 2)
    assert str(died.value).startswith("rank 0 sends float32[4] to rank 1 at ")
    assert "receives it into float32[2]" in str(died.value).partition("The process of rank 1")[0]
    with pytest.raises(MismatchError) as differ:
        dk.run_ranks(lambda: dist.all_reduce(torch.ones(1 + dist.get_rank())), 2)
    message = str(differ.value)
    assert message.startswith("rank 0 calls all_reduce() of float32[1]")
    assert "deadlock" not in message and "cluster" not in message


def broadcast_from_a_rank_outside_the_group() -> None:
    half = dist.new_group([1, 2])
    if dist.get_rank():
        dist.broadcast(torch.ones(3), src=0, group=half)


@pytest.mark.parametrize(
    ("program", "remedy"),
    [
        (broadcast_from_a_rank_outside_the_group, "use group_src"),
        (lambda: dist.all_reduce(torch.ones(1), op=None), "op must be a dist.ReduceOp"),
        (lambda: dist.batch_isend_irecv([]), "at least one P2POp"),
        (lambda: dist.reduce(torch.ones(1), dst=3), "must be ranks from 0"),
    ],
)
def test_torch_error_has_a_remedy(program: object, remedy: str) -> None:
    with pytest.raises(dk.errors.RankError) as caught:
        dk.run_ranks(program, 3)  # type: ignore[arg-type]
    assert remedy in str(caught.value).partition("Traceback")[0]
