"""A checkpoint of one strategy and number of ranks goes on under another, to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from distkit import run_ranks
from distkit.errors import RankError
from distkit.strategies import (
    CentralStorageStrategy,
    FullyShardedStrategy,
    MirroredStrategy,
    Strategy,
    load,
    load_weights,
    save,
    save_weights,
)

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def whole(w: Tensor) -> Tensor:
    return (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone()


def train(strategy: Strategy, folder: Path, wanted: str, hidden: int = 7):
    """An epoch, which begins at the checkpoint if it is to load one."""
    torch.manual_seed(3 if wanted == "save" else 4)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if wanted == "save" else 0.5)
    epoch = 0
    if wanted == "load":
        epoch = load(strategy, folder, model, optimizer, epoch=0)["epoch"]

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for x, y in strategy.distribute_dataset((X, Y), global_batch=12):
        strategy.run(step, args=(x, y))
    if wanted == "save":
        save(strategy, folder, model, optimizer, epoch=epoch + 1)
        save_weights(strategy, folder / "weights.safetensors", model)
        for x, y in strategy.distribute_dataset((X, Y), global_batch=12):
            strategy.run(step, args=(x, y))
    return epoch, [whole(w) for w in model.parameters()], len(optimizer.state)


def on(ranks: int, strategy: Strategy, folder: Path, wanted: str) -> list:
    """By rank, or of this process if there are no ranks."""
    if not ranks:
        return [train(strategy, folder, wanted)]
    return run_ranks(train, ranks, strategy, folder, wanted).results


@pytest.mark.parametrize(
    ("before", "ranks", "after", "others"),
    [
        (FullyShardedStrategy, 3, FullyShardedStrategy, 2),
        (CentralStorageStrategy, 2, Strategy, 0),
        (Strategy, 0, CentralStorageStrategy, 2),
        (MirroredStrategy, 2, FullyShardedStrategy, 3),
    ],
)
def test_training_goes_on_elsewhere(tmp_path: Path, before, ranks: int, after, others: int) -> None:
    weights = on(ranks, before(), tmp_path, "save")[0][1]
    found = on(others, after(), tmp_path, "load")
    for epoch, there, _ in found:
        assert epoch == 1
        torch.testing.assert_close(there, weights, rtol=0, atol=1e-12)
    if after is CentralStorageStrategy:
        assert [kept for *_, kept in found] == [4, 0]


def weights_alone(strategy: Strategy, file: Path) -> list[Tensor]:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    load_weights(file, model)
    return [whole(w) for w in model.parameters()]


def test_safetensors_of_a_sharded_model(tmp_path: Path) -> None:
    run_ranks(train, 2, FullyShardedStrategy(), tmp_path, "save")
    file = tmp_path / "weights.safetensors"
    plain = weights_alone(Strategy(), file)
    for found in run_ranks(weights_alone, 3, FullyShardedStrategy(), file).results:
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("kind", [FullyShardedStrategy, CentralStorageStrategy])
def test_a_checkpoint_of_another_model_is_an_error_on_all_ranks(tmp_path: Path, kind) -> None:
    train(Strategy(), tmp_path, "save")
    with pytest.raises(RankError, match=r"0.weight is \(7, 6\) there and \(8, 6\) here") as told:
        run_ranks(train, 2, kind(), tmp_path, "load", hidden=8)
    assert "Other ranks that raised: 1" in str(told.value)


def with_buffers(strategy: Strategy, folder: Path) -> list[float]:
    """A buffer that is not saved, beside one that is."""
    with strategy.scope():
        model = nn.BatchNorm1d(2)
        model.register_buffer("scratch", torch.ones(3), persistent=False)
    model.running_mean.fill_(7.0)
    save(strategy, folder, model)
    model.running_mean.zero_()
    load(strategy, folder, model)
    return model.running_mean.tolist()


def test_a_buffer_that_is_not_persistent_is_not_saved(tmp_path: Path) -> None:
    assert run_ranks(with_buffers, 2, MirroredStrategy(), tmp_path).results == [[7.0, 7.0]] * 2
