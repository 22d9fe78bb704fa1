"""Training resumes from a checkpoint under another strategy or number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import error_message, training_step, whole

from distkit import run_ranks
from distkit.errors import RankError, StrategyError
from distkit_strategies import (
    CentralStorageStrategy,
    FullyShardedStrategy,
    MirroredStrategy,
    Strategy,
    Variable,
    load,
    load_weights,
    save,
    save_weights,
    state_dict,
)

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def train(strategy: Strategy, folder: Path, action: str, hidden: int = 7):
    """Load a checkpoint and train an epoch, or train, save a checkpoint and train another epoch."""
    torch.manual_seed(3 if action == "save" else 4)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if action == "save" else 0.5)
    epoch = 0
    if action == "load":
        epoch = load(strategy, folder, model, optimizer, epoch=0)["epoch"]
    step = training_step(model, optimizer)
    for x, y in strategy.distribute_dataset((X, Y), global_batch=12):
        strategy.run(step, args=(x, y))
    if action == "save":
        save(strategy, folder, model, optimizer, epoch=epoch + 1)
        for x, y in strategy.distribute_dataset((X, Y), global_batch=12):
            strategy.run(step, args=(x, y))
    return epoch, [whole(w) for w in model.parameters()], len(optimizer.state)


def train_on(ranks: int, strategy: Strategy, folder: Path, action: str) -> list:
    """Return the result of each rank or, with 0 ranks, of this process."""
    if not ranks:
        return [train(strategy, folder, action)]
    return run_ranks(train, ranks, strategy, folder, action).results


@pytest.mark.parametrize(
    ("before", "ranks", "after", "ranks_after"),
    [
        (FullyShardedStrategy, 3, FullyShardedStrategy, 2),
        (CentralStorageStrategy, 2, Strategy, 0),
        (MirroredStrategy, 2, CentralStorageStrategy, 2),
    ],
)
def test_training_resumes_on_other_ranks(
    tmp_path: Path, before, ranks: int, after, ranks_after: int
) -> None:
    weights = train_on(ranks, before(), tmp_path, "save")[0][1]
    found = train_on(ranks_after, after(), tmp_path, "load")
    for epoch, resumed, _ in found:
        assert epoch == 1
        torch.testing.assert_close(resumed, weights, rtol=0, atol=1e-12)
    if after is CentralStorageStrategy:
        assert [kept for *_, kept in found] == [4, 0]


@pytest.mark.parametrize("kind", [FullyShardedStrategy, CentralStorageStrategy])
def test_checkpoint_from_another_model_raises_on_all_ranks(tmp_path: Path, kind) -> None:
    train(Strategy(), tmp_path, "save")
    with pytest.raises(
        RankError, match=r"0.weight is \(7, 6\) in the checkpoint and \(8, 6\)"
    ) as caught:
        run_ranks(train, 2, kind(), tmp_path, "load", hidden=8)
    assert "ranks 0 and 1 raised" in str(caught.value)


AGGREGATIONS = ["SUM", "MEAN", "ONLY_FIRST_REPLICA"]
DTYPES = {"float": torch.float32, "short": torch.bfloat16, "count": torch.int64}


def metrics(strategy: Strategy) -> nn.ModuleDict:
    with strategy.scope():
        variables = {
            f"{aggregation}_{kind}": Variable(
                torch.zeros(64, dtype=dtype), synchronization="ON_READ", aggregation=aggregation
            )
            for aggregation in AGGREGATIONS
            for kind, dtype in DTYPES.items()
            if (aggregation, kind) != ("MEAN", "count")
        }
        return nn.ModuleDict(variables)


def read(strategy: Strategy, variables: nn.ModuleDict) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in state_dict(strategy, variables).items()}


def count(strategy: Strategy, folder: Path):
    """Change the copies and save them in three ways; return the state of all replicas."""
    variables, r = metrics(strategy), strategy._replica

    def change() -> None:
        for variable in variables.values():
            many = 1e4 * torch.randn(60, generator=torch.Generator().manual_seed(r))
            variable.assign(torch.cat([torch.tensor([4.0 - r, 10 * r, -7 - r, 0]), many]))

    strategy.run(change)
    save(strategy, folder / "dcp", variables)
    save_weights(strategy, folder / "one.safetensors", variables)
    state = state_dict(strategy, variables)
    if strategy._chief:
        torch.save(state, folder / "state.pt")
    strategy.reduce("sum", 0)  # wait until it is written
    return read(strategy, variables)


LOADS = {
    "load": lambda strategy, folder, variables: load(strategy, folder / "dcp", variables),
    "load_weights": lambda _, folder, variables: load_weights(
        folder / "one.safetensors", variables
    ),
    "load_state_dict": lambda _, folder, variables: variables.load_state_dict(
        torch.load(folder / "state.pt")
    ),
}


def restore(strategy: Strategy, folder: Path):
    """Return the variables after each way of loading, and this replica's copies after the last."""
    found = []
    for read_from in LOADS.values():
        variables = metrics(strategy)
        read_from(strategy, folder, variables)
        found.append(read(strategy, variables))
    return found, {name: value.tolist() for name, value in variables.state_dict().items()}


@pytest.mark.parametrize(("before", "after"), [(3, 1), (2, 5)])
def test_saving_and_loading_changes_no_variable(before: int, after: int, tmp_path: Path) -> None:
    first, *others = run_ranks(count, before, MirroredStrategy(), tmp_path).results
    assert all(other == first for other in others)
    copies = []
    for found, mine in run_ranks(restore, after, MirroredStrategy(), tmp_path).results:
        assert found == [first] * len(LOADS)
        copies.append(mine)
    for name, together in first.items():
        mine = [copy[name] for copy in copies]
        if name.startswith("SUM"):
            assert [sum(parts) for parts in zip(*mine, strict=True)] == together
        else:
            assert mine == [together] * after


def save_and_load_a_sum(strategy: Strategy, folder: Path) -> list[float]:
    """Save 4 and 3 on two replicas, as floats and integers; return this replica's loaded parts."""
    with strategy.scope():
        variables = nn.ModuleList(
            Variable(torch.tensor(0, dtype=dtype), synchronization="ON_READ", aggregation="SUM")
            for dtype in (torch.float32, torch.int32)
        )
    strategy.run(lambda: [v.assign(4 - dist.get_rank()) for v in variables])
    save(strategy, folder, variables)
    load(strategy, folder, variables)
    return [v.value.item() for v in variables]


def test_each_replica_gets_its_part_of_a_sum_as_in_tensorflow(tmp_path: Path) -> None:
    """TensorFlow restores 3.5 and 3.5; for integers it would restore 3 and 3, and lose 1."""
    assert run_ranks(save_and_load_a_sum, 2, MirroredStrategy(), tmp_path).results == [
        [3.5, 4],
        [3.5, 3],
    ]


def cannot_write(strategy: Strategy, file: Path) -> list[str]:
    """Return the errors from writing into a file instead of a folder."""
    with strategy.scope():
        model = nn.Linear(2, 2)
    messages = [
        error_message(StrategyError, save, strategy, file / "checkpoint", model),
        error_message(StrategyError, save_weights, strategy, file / "weights.safetensors", model),
    ]
    strategy.reduce("sum", torch.ones(1))  # the strategy is still usable
    return messages


@pytest.mark.parametrize("kind", [MirroredStrategy, CentralStorageStrategy])
def test_write_error_on_the_chief_raises_on_all_ranks(tmp_path: Path, kind) -> None:
    file = tmp_path / "file"
    file.touch()
    for messages in run_ranks(cannot_write, 2, kind(), file).results:
        assert "The checkpoint in" in messages[0] and "was not saved: replica 0: " in messages[0]
        assert "weights.safetensors was not written: replica 0: " in messages[1]
        assert all("Error" in text and "Traceback" not in text for text in messages)


class Tied(nn.Module):
    """The last layer shares the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 3), nn.Linear(3, 7)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))


def train_tied(strategy: Strategy, file: Path, action: str) -> Tensor:
    torch.manual_seed(3 if action == "save" else 4)
    with strategy.scope():
        model = Tied()
    if action == "save":
        save_weights(strategy, file, model)
    else:
        load_weights(file, model)
    assert model.out.weight is model.words.weight
    return strategy.run(model, args=(torch.arange(7),))


@pytest.mark.parametrize("kind", [MirroredStrategy, FullyShardedStrategy])
def test_tied_weight_is_saved_once_and_stays_tied(tmp_path: Path, kind) -> None:
    file = tmp_path / "weights.safetensors"
    saved = run_ranks(train_tied, 2, kind(), file, "save").results[0]
    torch.testing.assert_close(train_tied(Strategy(), file, "load"), saved)
    for found in run_ranks(train_tied, 2, kind(), file, "load").results:
        torch.testing.assert_close(found, saved)
