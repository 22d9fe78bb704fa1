"""torch's ``Join`` on ranks with different numbers of batches, and its messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import distkit as dk
from distkit.cluster import Run
from distkit.events import Op, Span

FEATURES, STEPS = 4, (2, 5)


def train(join: bool, divide_by_all: bool = True) -> torch.Tensor:
    """Rank r runs ``STEPS[r]`` steps of one example each."""
    torch.manual_seed(0)
    net, rank = DistributedDataParallel(nn.Linear(FEATURES, 1).double()), dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Join([net], enable=join, divide_by_initial_world_size=divide_by_all):
        for x in data(rank):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    return torch.cat([w.detach().reshape(-1) for w in net.parameters()])


def data(rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + rank)
    return torch.randn(STEPS[rank], 1, FEATURES, dtype=torch.float64, generator=random)


def train_in_one_process(divide_by_all: bool) -> torch.Tensor:
    """Train in one process; a step uses the examples of the ranks that still have some."""
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for n in range(max(STEPS)):
        rows = [data(rank)[n] for rank in range(len(STEPS)) if n < STEPS[rank]]
        optimizer.zero_grad()
        (
            net(torch.cat(rows)).square().sum() / (len(STEPS) if divide_by_all else len(rows))
        ).backward()
        optimizer.step()
    return torch.cat([w.detach().reshape(-1) for w in net.parameters()])


def collectives_of(run: Run, rank: int) -> list[Span]:
    """Return the collectives of a rank after the construction of DDP."""
    calls = [s for s in run.trace.spans if s.rank == rank and s.op is not Op.MARK]
    return calls[next(i for i, s in enumerate(calls) if s.op is Op.ALL_REDUCE) :]


@pytest.mark.parametrize("divide_by_all", [True, False])
def test_joined_rank_contributes_zeros(divide_by_all: bool) -> None:
    run = dk.run_ranks(train, len(STEPS), True, divide_by_all)
    assert not run.findings
    for weights in run.results:
        assert torch.allclose(weights, train_in_one_process(divide_by_all), rtol=0, atol=1e-12)

    first, second = (collectives_of(run, rank) for rank in range(len(STEPS)))
    shapes = [[(s.op, s.shape, s.dtype) for s in calls] for calls in (first, second)]
    assert shapes[0] == shapes[1], "each call is shadowed"
    gradients = [s for s in first if s.shape == (FEATURES + 1,) and s.op is Op.ALL_REDUCE]
    shadows = [s for s in gradients if "gradients" not in s.attributes]
    assert (len(gradients), len(shadows)) == (max(STEPS), max(STEPS) - min(STEPS))
    # a busy machine may leave no time for values
    assert not any(any(s.before.values) for s in shadows if s.before is not None)
    assert first[-1].op is Op.BROADCAST, "the weights of the rank that finished last"


def test_uneven_inputs_hang_without_join() -> None:
    with pytest.raises(dk.errors.DeadlockError, match="rank 0"):
        dk.run_ranks(train, len(STEPS), False)
