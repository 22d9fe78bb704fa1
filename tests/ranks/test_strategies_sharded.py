"""Strategies with central or sharded variables, compared with one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from training import error_message, whole

from distkit import run_ranks
from distkit.errors import StrategyError, TrainingError
from distkit.events import Op
from distkit_strategies import (
    CentralStorageStrategy,
    FullyShardedStrategy,
    MirroredStrategy,
    Strategy,
    compute_average_loss,
    scale_regularization_loss,
)

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def train(strategy: Strategy, make=torch.optim.Adam, batch: int = 11, average: bool = False):
    """Return losses, weights, and the sizes of this rank's weights and optimizer state."""
    torch.manual_seed(dist.get_rank() if strategy.num_replicas_in_sync > 1 else 0)
    with strategy.scope():
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.ModuleList([nn.Linear(8, 5)])[0])
        model = nn.Sequential(inner, nn.Linear(5, 2)).double()
        optimizer = make(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        if average:
            loss = compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
            squares = sum(w.square().sum() for w in model.parameters())
            loss = loss + scale_regularization_loss(0.01 * squares)
            loss.backward()
        else:
            loss = F.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
        optimizer.step()
        return loss

    losses = []
    for _ in range(2):
        for x, y in strategy.distribute_dataset((X, Y), global_batch=batch):
            loss = strategy.run(step, args=(x, y))
            losses.append(strategy.reduce("sum" if average else "mean", loss).item())
    weights = [whole(w) for w in model.parameters()]
    size = sum(getattr(w, "_local_tensor", w).numel() for w in model.parameters())
    states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    return losses, weights, size, sum(getattr(s, "_local_tensor", s).numel() for s in states)


@pytest.mark.parametrize("kind", [CentralStorageStrategy, FullyShardedStrategy])
@pytest.mark.parametrize(("ranks", "average"), [(3, False), (2, True)])
def test_sharded_strategy_equals_one_process(kind, ranks: int, average: bool) -> None:
    """30 rows in batches of 11: the shards differ in size, and the last batch is shorter."""
    losses, weights, size, state_size = train(Strategy(), average=average)
    found = run_ranks(train, ranks, kind(), average=average).results
    for replica_losses, replica_weights, *_ in found:
        torch.testing.assert_close(replica_losses, losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(replica_weights, weights, rtol=0, atol=1e-12)
    if kind is CentralStorageStrategy:
        assert [f[3] for f in found] == [state_size] + [0] * (ranks - 1)
    else:
        assert sum(f[2] for f in found) == size and sum(f[3] for f in found) == state_size
        assert max(f[2] for f in found) <= math.ceil(size / ranks) + 8 + 5 + 2 + 6 + 8 + 5


def test_all_messages_go_through_rank_0() -> None:
    run = run_ranks(train, 3, CentralStorageStrategy())
    assert {Op.REDUCE, Op.BROADCAST} <= {s.op for s in run.trace.spans}
    assert all(s.nbytes == 8 for s in run.trace.spans if s.op is Op.ALL_REDUCE)  # losses


class RemovesNaN(nn.Module):
    """The identity; removes NaN in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.register_hook(torch.nan_to_num)
        return x


def nan(strategy: Strategy):
    """Return the errors of three steps; in the second, the loss of rank 1 is NaN."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), RemovesNaN(), nn.Conv1d(2, 1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, clip: bool) -> Tensor:
        optimizer.zero_grad()
        factor = math.nan if dist.get_rank() == 1 and len(x) == 3 else 1
        loss = model(x).mean() * factor
        loss.backward()
        if clip:  # spreads NaN to all layers
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    errors = []
    for rows in (2, 3, 2):
        try:
            strategy.run(
                step, args=(torch.ones(rows, 2, 1), isinstance(strategy, FullyShardedStrategy))
            )
        except TrainingError as error:
            errors.append((error.rank, error.step, error.layer, str(error)))
    return errors, bool(whole(next(model.parameters())).isfinite().all())


@pytest.mark.parametrize("kind", [MirroredStrategy, CentralStorageStrategy, FullyShardedStrategy])
def test_nan_raises_on_all_ranks_and_changes_nothing(kind) -> None:
    for (error,), finite in run_ranks(nan, 2, kind()).results:
        assert error[:3] == (1, 2, "Conv1d.weight") and finite
        assert "Conv1d.weight is not finite on replica 1 in run 2" in error[3]


class RaisesInBackward(torch.autograd.Function):
    """The identity; raises in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise AssertionError("on purpose")


class Layer(nn.Linear):
    """A layer that may raise in the forward pass, or after its gradients have been computed."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        assert self.fails != "forward", "on purpose"
        return super().forward(RaisesInBackward.apply(x) if self.fails == "backward" else x)


def raises(strategy: Strategy, where: str):
    """Return the errors of four steps, and the weights; in the second step, rank 1 raises."""
    torch.manual_seed(0)
    with strategy.scope():
        layers = [nn.Linear(6, 4), nn.Sequential(nn.Tanh(), Layer(4, 3)), nn.Linear(3, 2)]
        model = nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(fails: str) -> None:
        optimizer.zero_grad()
        layers[1][1].fails = fails
        assert fails != "before", "on purpose"
        F.cross_entropy(model(X), Y).backward()
        assert fails != "late", "on purpose"
        optimizer.step()

    errors = []
    for n in range(4):
        rank = dist.get_rank() if dist.is_initialized() else 1
        try:
            strategy.run(step, args=(where if n == 1 and rank == 1 else "",))
        except (StrategyError, AssertionError) as error:
            errors.append(f"{n} {type(error).__name__} {error}")
    return errors, [whole(w) for w in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (MirroredStrategy, "late"),
        (CentralStorageStrategy, "late"),
        *[(FullyShardedStrategy, where) for where in ("before", "forward", "backward", "late")],
    ],
)
def test_exception_in_one_replica_reaches_all(kind, where: str) -> None:
    _, expected = raises(Strategy(), where)
    ((error,), weights), ((other_error,), others) = run_ranks(raises, 2, kind(), where).results
    assert other_error.startswith("1 AssertionError on purpose")
    assert "needs all replicas, but some have left the run: replica 1" in error
    assert "replica 1 raised AssertionError: on purpose" in error
    for found in (weights, others):  # the other steps equal those of one process
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def step_with_closure(strategy: Strategy) -> str:
    with strategy.scope():
        optimizer = torch.optim.LBFGS(nn.Linear(6, 2).parameters())
    return error_message(
        StrategyError, strategy.run, lambda: optimizer.step(lambda: torch.zeros(()))
    )


def test_step_with_a_closure_raises() -> None:
    for message in run_ranks(step_with_closure, 2, CentralStorageStrategy()).results:
        assert "LBFGS.step(closure) was called under CentralStorageStrategy" in message


def sparse(strategy: Strategy):
    """Run two steps with sparse gradients; return their losses, or the error."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x % 2)
        loss.backward()
        optimizer.step()
        return loss

    try:
        (x,) = strategy.distribute_dataset(torch.tensor([1, 1, 3]), global_batch=3)
        losses = [strategy.run(step, args=(x,)) for _ in range(2)]
        return [strategy.reduce("mean", loss).item() for loss in losses]
    except StrategyError as error:
        return str(error)


def test_sparse_gradients_are_converted_or_raise() -> None:
    expected = sparse(Strategy())
    for kind in (MirroredStrategy, CentralStorageStrategy):
        for found in run_ranks(sparse, 2, kind()).results:
            assert found == pytest.approx(expected, abs=1e-12)
    for message in run_ranks(sparse, 2, FullyShardedStrategy()).results:
        assert "The gradient of Embedding.weight is sparse" in message and "sparse=False" in message
