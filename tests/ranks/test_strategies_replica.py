"""The API of replica functions: collectives with gradients, losses, variables."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import error_message

from distkit import run_ranks
from distkit.errors import StrategyError
from distkit_strategies import (
    FullyShardedStrategy,
    InputContext,
    MirroredStrategy,
    Strategy,
    Variable,
    compute_average_loss,
    get_replica_context,
    scale_regularization_loss,
    state_dict,
    synchronize_buffers,
)

X = torch.arange(24.0, dtype=torch.float64).view(8, 3) / 10


def shard(strategy: Strategy) -> Tensor:
    return X[strategy._replica :: strategy.num_replicas_in_sync]


# -- collectives ---------------------------------------------------------------------------------


def test_gradients_flow_through_the_collectives() -> None:
    """Each replica's loss is Σ y² with y = Σ_r x_r, plus a weighted sum of all rows."""

    def gradients(strategy: Strategy):
        def step() -> tuple[Tensor, Tensor, Tensor]:
            context = get_replica_context()
            r = context.replica_id_in_sync_group
            x = torch.full((2,), r + 1.0, requires_grad=True)
            context.all_reduce("sum", {"y": x})["y"].square().sum().backward()
            z = torch.full((r + 1,), 1.0, requires_grad=True)
            ((r + 1) * context.all_gather(z) * torch.arange(6.0)).sum().backward()
            return x.grad, z.grad, context.all_reduce("mean", torch.tensor(r))

        return strategy.run(step)

    begins = [0, 1, 3]
    for r, (x, z, mean) in enumerate(run_ranks(gradients, 3, MirroredStrategy()).results):
        assert x.tolist() == [2 * 6.0 * 3] * 2  # three replicas, each 2 y
        assert z.tolist() == [6.0 * (begins[r] + k) for k in range(r + 1)]
        assert mean == 1.0


def test_merge_call_runs_across_replicas() -> None:
    def merge(strategy: Strategy):
        def step() -> Tensor:
            context = get_replica_context()
            mine = context.replica_id_in_sync_group + 1
            return context.merge_call(lambda s, x, k: s.reduce("sum", k * x), (mine,), {"k": 10})

        return strategy.run(step).item(), get_replica_context().replica_id_in_sync_group

    assert run_ranks(merge, 2, MirroredStrategy()).results == [(30, 0), (30, 0)]


def test_dataset_function_creates_the_batches_of_each_replica() -> None:
    def batches(strategy: Strategy):
        def make(context: InputContext) -> list[Tensor]:
            size = context.get_per_replica_batch_size(4)
            return [torch.full((size,), context.input_pipeline_id)]

        return [b.tolist() for b in strategy.distribute_datasets_from_function(make)]

    assert run_ranks(batches, 2, MirroredStrategy()).results == [[[0, 0]], [[1, 1]]]
    with pytest.raises(StrategyError, match="9 cannot be divided among 2 replicas"):
        InputContext(2, 0, 2).get_per_replica_batch_size(9)


# -- losses --------------------------------------------------------------------------------------


def train_on_average_loss(strategy: Strategy, global_batch: int | None = None):
    """Run a step with a loss per example, sample weights and regularization."""
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(3, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: Tensor) -> Tensor:
        losses = model(x).square().sum(1)
        loss = compute_average_loss(losses * x[:, 0], global_batch_size=global_batch)
        loss = loss + scale_regularization_loss(model.weight.square())
        loss.backward()
        optimizer.step()
        return loss

    loss = strategy.run(step, args=(shard(strategy),))
    return strategy.reduce("sum", loss), model.weight.detach()


@pytest.mark.parametrize("global_batch", [None, 8])
def test_average_loss_divides_by_the_global_batch(global_batch: int | None) -> None:
    loss, weight = train_on_average_loss(Strategy())
    for found in run_ranks(train_on_average_loss, 3, MirroredStrategy(), global_batch).results:
        torch.testing.assert_close(found, (loss, weight), rtol=0, atol=1e-12)
    torch.manual_seed(0)
    w = nn.Linear(3, 1, bias=False).double().weight
    by_hand = (X[:, 0] * (X @ w.T).squeeze().square()).mean() + w.square().sum()
    torch.testing.assert_close(loss, by_hand.detach(), rtol=0, atol=1e-12)


def test_losses_of_a_row_are_added_as_in_tensorflow() -> None:
    losses = torch.tensor([[0.5, 1.0], [1.5, 4.5]])
    assert compute_average_loss(losses).item() == 3.75
    assert compute_average_loss(losses, global_batch_size=0).item() == 0.0


@pytest.mark.parametrize(
    ("compute", "losses", "message"),
    [
        *[
            (
                partial(compute_average_loss, global_batch_size=size),
                torch.ones(2),
                "needs an integer global_batch_size",
            )
            for size in (-1, 2.5, "4", [4])
        ],
        *[
            (compute, [1.0, 2.0], r"needs a tensor; got \[1.0, 2.0\] \(list\)")
            for compute in (compute_average_loss, scale_regularization_loss)
        ],
    ],
)
def test_invalid_losses_and_global_batches_raise(compute, losses, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        compute(losses)


def test_losses_in_the_wrong_context_raise() -> None:
    strategy = Strategy()
    with pytest.raises(StrategyError, match=r'not a scalar.*reduction="none"'):
        strategy.run(lambda: compute_average_loss(torch.tensor(1.0)))
    with strategy.scope(), pytest.raises(StrategyError, match="outside of a replica function"):
        compute_average_loss(torch.ones(2))

    def too_small(strategy: Strategy) -> str:
        with strategy.scope():
            model = nn.Linear(3, 2).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(x: Tensor) -> None:
            (model(x).mean() + scale_regularization_loss(model.weight)).backward()
            optimizer.step()

        return error_message(StrategyError, strategy.run, step, (X,))

    for kind in (MirroredStrategy, FullyShardedStrategy):
        for message in run_ranks(too_small, 2, kind()).results:
            assert "in a step with a mean loss" in message


# -- variables -----------------------------------------------------------------------------------


def test_variables_are_aggregated_on_access() -> None:
    def change(strategy: Strategy):
        with strategy.scope():
            total = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
            mean = Variable(0.0, synchronization="ON_READ", aggregation="MEAN")
            first = Variable(0, aggregation="ONLY_FIRST_REPLICA")
            written = Variable(dist.get_rank() + 5.0, aggregation="MEAN")
            total.assign(6.0)
        everything = nn.ModuleList([total, mean, first, written])

        def step(k: float) -> list[float]:
            total.assign_add(k)
            mean.assign(k)
            first.assign_add(int(k))
            written.assign_sub(k)
            return [v.read_value().item() for v in (total, mean, first, written)]

        inside = strategy.run(step, args=(dist.get_rank() + 1.0,))
        saved = [value.item() for value in state_dict(strategy, everything).values()]
        assert saved == [9.0, 1.5, 1, 3.5]
        synchronize_buffers(strategy, everything)
        with strategy.scope():
            return inside, [v.read_value().item() for v in (total, mean, first, written)]

    for r, (inside, outside) in enumerate(run_ranks(change, 2, MirroredStrategy()).results):
        assert inside == [3.0 + r + 1, r + 1.0, 1, 3.5]
        assert outside == [9.0, 1.5, 1, 3.5]


def test_variables_created_in_run_must_be_equal() -> None:
    def make(strategy: Strategy):
        torch.manual_seed(dist.get_rank())
        with strategy.scope():
            model = nn.Linear(1, 1)
        kept = []

        def step() -> float:
            kept or kept.append(Variable(torch.rand(()), aggregation="MEAN"))
            kept[0].assign_add(1.0)
            return kept[0].read_value().item()

        found = [strategy.run(step), strategy.run(step)]
        outside = nn.Parameter(torch.rand(2))
        errors = [
            error_message(StrategyError, strategy.run, create)
            for create in (lambda: nn.Linear(2, 3), lambda: model.register_parameter("b", outside))
        ]
        strategy.run(lambda: setattr(model, "again", model.weight))  # a parameter of the strategy
        strategy.run(nn.Softmax)
        return found, errors, strategy.reduce("sum", 1).item()

    one, other = run_ranks(make, 2, MirroredStrategy()).results
    (first, second), (linear, registered), replicas = one
    assert one == other and replicas == 2
    assert second == pytest.approx(first + 1)
    assert "Linear.weight was created inside `run` of MirroredStrategy" in linear
    assert "Linear.b was created inside `run`" in registered
    Strategy().run(lambda: nn.Linear(2, 3))  # permitted with one replica


def test_write_without_aggregation_raises() -> None:
    def write(strategy: Strategy) -> str:
        with strategy.scope():
            kept = Variable(0.0)
        return error_message(StrategyError, strategy.run, kept.assign, (1.0,))

    for message in run_ranks(write, 2, MirroredStrategy()).results:
        assert "aggregation is NONE" in message


def test_saved_batch_norm_statistics_are_aggregated() -> None:
    def normalize(strategy: Strategy):
        with strategy.scope():
            model = nn.BatchNorm1d(3).double()
        strategy.run(model, args=(shard(strategy),))
        mine, saved = model.running_mean.clone(), state_dict(strategy, model)
        assert torch.equal(model.running_mean, mine)
        synchronize_buffers(strategy, model)
        assert torch.equal(model.running_mean, saved["running_mean"])
        return mine, saved

    (one, saved), (other, saved_by_other) = run_ranks(normalize, 2, MirroredStrategy()).results
    assert not torch.equal(one, other)
    torch.testing.assert_close(saved["running_mean"], (one + other) / 2)
    torch.testing.assert_close(saved, saved_by_other)
    assert saved["num_batches_tracked"] == 1
