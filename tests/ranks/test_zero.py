"""The reference implementation of ZeRO, compared with FSDP2, DDP and the memory formula."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import error_message
from waiting import wait_until

import distkit as dk
from distkit.events import Op
from distkit_parallel import States, Zero, tensor_bytes

STEPS = 5


class Net(nn.Module):
    """A model with a separate parameter, a unit of several layers, and indivisible sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.middle = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 7), nn.LayerNorm(7))
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh())) * self.scale


def train(model: nn.Module, step: Any) -> list[torch.Tensor]:
    """Return the losses of some steps, with a different batch on each rank."""
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        step()
        losses.append(loss.detach())
    return losses


def step_of(optimizer: torch.optim.Optimizer) -> Any:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(parts: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parts, lr=1e-2)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_losses_of_every_stage_equal_those_of_fsdp2_and_ddp(n: int) -> None:
    def program() -> list[list[torch.Tensor]]:
        found = []
        for stage in range(4):
            model = Net()
            found.append(train(model, Zero(model, adam, stage=stage).step))
        ddp = DistributedDataParallel(Net())
        found.append(train(ddp, step_of(adam(ddp.parameters()))))
        fsdp, mesh = Net(), init_device_mesh("cpu", (n,))
        for child in (fsdp.first, fsdp.middle, fsdp.last):
            fully_shard(child, mesh=mesh)
        fully_shard(fsdp, mesh=mesh)
        found.append(train(fsdp, step_of(adam(fsdp.parameters()))))
        return found

    for losses in dk.run_ranks(program, n).results:
        *zero_losses, ddp, fsdp = map(torch.stack, losses)
        for stage, mine in enumerate(zero_losses):
            assert torch.allclose(mine, fsdp, rtol=0, atol=1e-12), stage
            assert torch.allclose(mine, ddp, rtol=0, atol=1e-12), stage


def test_memory_on_a_rank_equals_the_formula() -> None:
    """Add up the bytes of all tensors in the process after backward, with optimizer state."""
    size = {"parameter": 4, "gradient": 4, "optimizer": 8}
    count = 6 * (128 * 128 + 128)

    def program() -> list[int]:
        found, x = [], torch.randn(2, 128)
        before = tensor_bytes()  # before any message
        for stage in range(4):
            expected_bytes = States.of(count, ranks=4, stage=stage, **size).total
            model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
            zero = Zero(model, lambda parts: torch.optim.Adam(parts, foreach=False), stage=stage)
            for _ in range(2):
                zero.optimizer.step()  # creates the state
                model(x).sum().backward()

            def held() -> int:
                return tensor_bytes() - before

            # wait until gloo has released its last tensor
            wait_until(lambda limit=1.05 * expected_bytes: held() < limit)
            found.append(held())
            del model, zero
            gc.collect()
        return found

    for measured in dk.run_ranks(program, 4).results:
        expected = [States.of(count, ranks=4, stage=stage, **size).total for stage in range(4)]
        assert measured == pytest.approx(expected, rel=0.05)


def test_each_stage_sends_its_collectives() -> None:
    def program() -> None:
        for stage in range(4):
            model = Net()
            zero = Zero(model, adam, stage=stage)
            with dk.mark(str(stage)):
                model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
                zero.step()

    units = 4
    expected = [
        {Op.ALL_REDUCE: units},
        {Op.ALL_REDUCE: units, Op.ALL_GATHER: units},
        {Op.REDUCE_SCATTER: units, Op.ALL_GATHER: units},
        {Op.REDUCE_SCATTER: units, Op.ALL_GATHER: 2 * units},
    ]
    spans = [span for span in dk.run_ranks(program, 2).trace.spans if span.rank == 0]
    marks = {span.label: span for span in spans if span.op is Op.MARK}
    for stage, calls in enumerate(expected):
        mark = marks[str(stage)]
        counts = Counter(s.op for s in spans if mark.start < s.start and s.end < mark.end)
        assert counts == Counter(calls), stage


def test_gradients_accumulate_and_unused_layers_do_not_hang() -> None:
    def program() -> list[torch.Tensor]:
        found = []
        for stage in range(4):
            model = Net()
            zero = Zero(model, lambda parts: torch.optim.SGD(parts, lr=0.1), stage=stage)
            x = torch.ones(2, 6, dtype=torch.float64) * (1 + dist.get_rank())
            for _ in range(2):
                model.first(x).square().sum().backward()
            zero.step()
            found.append(model.first(x).detach())
        return found

    for result in dk.run_ranks(program, 2).results:
        assert all(torch.equal(result[0], other) for other in result[1:])


def test_invalid_stage_and_tied_weights_raise() -> None:
    def program() -> list[str]:
        tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        tied["b"].weight = tied["a"].weight
        return [
            error_message(ValueError, partial(Zero, model, adam, stage=stage))
            for model, stage in ((Net(), 4), (tied, 3))
        ]

    first, second = dk.run_ranks(program, 1).results[0]
    assert first == "ZeRO needs a stage from 0 to 3; got 4"
    assert second.startswith("'b' and 'a' share a parameter")
