"""Strategies that keep variables in one place or in pieces, compared with one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from distkit import run_ranks
from distkit.errors import RankError
from distkit.events import Op
from distkit.strategies import (
    CentralStorageStrategy,
    FullyShardedStrategy,
    MirroredStrategy,
    Strategy,
    compute_average_loss,
)

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def whole(w: Tensor) -> Tensor:
    return (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone()


def train(strategy: Strategy, make=torch.optim.Adam, batch: int = 11, average: bool = False):
    """Losses, weights, and the elements of this rank's weights and optimizer state."""
    torch.manual_seed(dist.get_rank() if strategy.num_replicas_in_sync > 1 else 0)
    with strategy.scope():
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.ModuleList([nn.Linear(8, 5)])[0])
        model = nn.Sequential(inner, nn.Linear(5, 2)).double()
        optimizer = make(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        if average:
            loss = compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
        else:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for _ in range(2):
        for x, y in strategy.distribute_dataset((X, Y), global_batch=batch):
            loss = strategy.run(step, args=(x, y))
            losses.append(strategy.reduce("sum" if average else "mean", loss).item())
    weights = [whole(w) for w in model.parameters()]
    held = sum(getattr(w, "_local_tensor", w).numel() for w in model.parameters())
    states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    return losses, weights, held, sum(getattr(s, "_local_tensor", s).numel() for s in states)


@pytest.mark.parametrize("kind", [CentralStorageStrategy, FullyShardedStrategy])
@pytest.mark.parametrize(("ranks", "average"), [(1, False), (3, False), (2, True)])
def test_it_equals_one_process(kind, ranks: int, average: bool) -> None:
    """30 rows in batches of 11: the pieces differ, and the last batch is shorter."""
    losses, weights, size, kept = train(Strategy(), average=average)
    found = run_ranks(train, ranks, kind(), average=average).results
    for theirs, there, *_ in found:
        torch.testing.assert_close(theirs, losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(there, weights, rtol=0, atol=1e-12)
    if kind is CentralStorageStrategy:
        assert [f[3] for f in found] == [kept] + [0] * (ranks - 1)
    else:
        assert sum(f[2] for f in found) == size and sum(f[3] for f in found) == kept
        assert max(f[2] for f in found) <= math.ceil(size / ranks) + 8 + 5 + 2 + 6 + 8 + 5


def test_all_messages_go_by_rank_0() -> None:
    run = run_ranks(train, 3, CentralStorageStrategy())
    ops = {s.op for s in run.trace.spans}
    assert {Op.REDUCE, Op.BROADCAST} <= ops
    assert all(s.nbytes == 8 for s in run.trace.spans if s.op is Op.ALL_REDUCE)  # losses


def nan(strategy: Strategy) -> list[str]:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).mean() * (math.nan if dist.get_rank() == 1 and len(x) == 3 else 1)
        loss.backward()
        optimizer.step()
        return loss

    said = []
    for rows in (2, 3, 2):
        try:
            strategy.run(step, args=(torch.ones(rows, 2),))
        except Exception as error:
            said.append(str(error))
    return said, bool(whole(next(model.parameters())).isfinite().all())


@pytest.mark.parametrize("kind", [CentralStorageStrategy, FullyShardedStrategy])
def test_nan_is_told_on_all_ranks_and_changes_nothing(kind) -> None:
    for said, finite in run_ranks(nan, 2, kind()).results:
        assert len(said) == 1 and finite
        assert "Linear.weight" in said[0] and "in run 2" in said[0]


def nested(outer: Strategy, inner: Strategy) -> None:
    with outer.scope(), inner.scope():
        pass


@pytest.mark.parametrize("kind", [CentralStorageStrategy, FullyShardedStrategy])
def test_strategies_do_not_nest(kind) -> None:
    with pytest.raises(RankError, match="strategies do not nest"):
        run_ranks(nested, 2, kind(), MirroredStrategy())
    with pytest.raises(RankError, match="strategies do not nest"):
        run_ranks(nested, 2, MirroredStrategy(), kind())
