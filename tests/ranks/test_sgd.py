"""Synchronous SGD on ranks, compared with one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import distkit as dk
from distkit.algorithms.batch_norm import SyncBatchNorm
from distkit.algorithms.sgd import accumulated_sgd_step, local_sgd_round
from distkit.data import DistributedDataset

OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda net: 0.2,
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.2),
    "momentum, weight decay": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True
    ),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
}


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 5)).to(dtype)


def images(rows: int = 300) -> tuple[Tensor, Tensor]:
    """Return reproducible random images and their labels."""
    draw = torch.Generator().manual_seed(1)
    return torch.rand(rows, 9, generator=draw).double(), torch.arange(rows) % 5


def flat(model: nn.Module) -> Tensor:
    return torch.cat([w.detach().reshape(-1) for w in model.parameters()])


def train_in_one_process(batch: int, optimizer: str, rows: int = 300) -> Tensor:
    """Train in one process with torch's optimizer."""
    model = net()
    chosen = OPTIMIZERS["SGD" if optimizer == "plain" else optimizer](model)
    for x, y in zip(*(part.split(batch) for part in images(rows)), strict=True):
        chosen.zero_grad()
        F.cross_entropy(model(x), y).backward()
        chosen.step()
    return flat(model)


def train_on_ranks(batch: int, optimizer: str, rows: int = 300) -> Tensor:
    """Train on ranks, each with its shard of the batch."""
    model = net()
    dk.algorithms.sync_initial_weights(model)
    rate, rank, n = OPTIMIZERS[optimizer](model), dist.get_rank(), dist.get_world_size()
    for shard in DistributedDataset(images(rows), batch, replica=rank, replicas=n):
        dk.algorithms.sync_sgd_step(model, shard, F.cross_entropy, rate)
    return flat(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_and_uneven_shards_equal_one_process(optimizer: str) -> None:
    """Batches of 64 on 3 ranks, with 44 rows in the last."""
    weights = dk.run_ranks(train_on_ranks, 3, 64, optimizer).results
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert torch.allclose(weights[0], train_in_one_process(64, optimizer), rtol=0, atol=1e-12)


def test_rank_without_examples_participates() -> None:
    """The last batch has one row for four ranks."""
    weights = dk.run_ranks(train_on_ranks, 4, 4, "SGD", 13).results
    assert torch.allclose(weights[3], train_in_one_process(4, "SGD", 13), rtol=0, atol=1e-12)


def test_replicas_are_bitwise_identical_after_1000_steps() -> None:
    def train() -> Tensor:
        model, (x, y) = net(torch.float32), dk.data.shard(*images())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        with dk.algorithms.use_algorithm("auto"):
            for step in range(1000):
                rows = torch.arange(8 * step, 8 * step + 8 - dist.get_rank()) % len(x)
                dk.algorithms.sync_sgd_step(
                    model, (x[rows].float(), y[rows]), F.cross_entropy, optimizer
                )
        return flat(model)

    first, second = dk.run_ranks(train, 2).results
    assert torch.equal(first, second)
    assert not torch.allclose(first, flat(net(torch.float32)), atol=0.1)


def test_gradient_is_divided_once_by_the_global_batch() -> None:
    def mean(counts: Sequence[int | None]) -> list[float | None]:
        w, unused = torch.zeros(2, requires_grad=True), torch.zeros((), requires_grad=True)
        n = counts[dist.get_rank()]
        (w * torch.arange(1.0 if n is None else float(n)).mean()).sum().backward()
        dk.algorithms.sync_gradients([w, unused], n)
        return [*w.grad.tolist(), unused.grad]

    results = dk.run_ranks(mean, 3, [1, 2, 6]).results
    expected = (0 + 1 + 15) / 9
    assert all(found[:2] == pytest.approx([expected, expected]) for found in results)
    assert [found[2] for found in results] == [None] * 3
    assert dk.run_ranks(mean, 2, [None, None]).results == [[0.0, 0.0, None]] * 2
    assert dk.run_ranks(mean, 2, [0, 0]).results == [[0.0, 0.0, None]] * 2


def test_unused_layer_is_unchanged() -> None:
    """As in one process, weight decay applies to parameters with a gradient on any rank."""

    def train() -> list[Tensor]:
        model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "one", "no")})
        nn.init.ones_(model["one"].weight), nn.init.ones_(model["no"].weight)
        x = torch.arange(1.0, 5.0).view(2, 2) if dist.get_rank() else torch.ones(2, 2)
        loss = model["all"](x).mean() + (model["one"](x).mean() if dist.get_rank() else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        loss.backward()
        dk.algorithms.sync_gradients(model, len(x))
        optimizer.step()
        return [model["one"].weight.detach(), model["no"].weight.detach()]

    for one, unused in dk.run_ranks(train, 2).results:
        assert torch.allclose(one, torch.tensor([[0.85, 0.8]]))  # 1 - 0.1 (mean / 2 + 0.5)
        assert torch.equal(unused, torch.ones(1, 2))


def test_gradients_are_reduced_in_one_call() -> None:
    run = dk.run_ranks(train_on_ranks, 2, 100, "SGD", 200)
    calls = [s for s in run.trace.spans if s.rank == 0 and s.op == "all_reduce"]
    weights = [w.numel() for w in net().parameters()]
    assert [s.shape for s in calls] == [(sum(weights) + len(weights) + 1,)] * 2


# -- less communication --------------------------------------------------------------------


def test_accumulated_gradients_equal_one_large_batch() -> None:
    def accumulated() -> Tensor:
        model, (x, y) = net(), dk.data.shard(*images())
        parts = list(zip(x.split(7), y.split(7), strict=True))
        for batches in (parts[:2], parts[2:]):  # one of them is shorter
            accumulated_sgd_step(model, batches, F.cross_entropy, 0.2)
        return flat(model)

    def whole() -> Tensor:
        model, (x, y) = net(), images()
        for rows in (slice(0, 42), slice(42, 300)):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            model.zero_grad()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.2).step()
        return flat(model)

    run = dk.run_ranks(accumulated, 3)
    assert all(torch.allclose(w, whole(), rtol=0, atol=1e-12) for w in run.results)
    assert len(run.trace.collectives) == 2


def test_local_sgd_with_one_step_is_synchronous_sgd() -> None:
    def local(every: int) -> tuple[Tensor, Tensor]:
        model, (x, y) = net(), dk.data.shard(*images(240))
        batches = list(zip(x.split(10), y.split(10), strict=True))
        for i in range(0, len(batches), every):
            losses = local_sgd_round(model, batches[i : i + every], F.cross_entropy, 0.2)
        return flat(model), losses

    frequent, rare = (dk.run_ranks(local, 3, every) for every in (1, 4))
    assert torch.allclose(
        frequent.results[0][0], train_in_one_process(30, "SGD", 240), rtol=0, atol=1e-12
    )
    assert (len(frequent.trace.collectives), len(rare.trace.collectives)) == (8, 2)
    assert rare.results[0][1].shape == (4,)
    assert all(torch.equal(w, rare.results[0][0]) for w, _ in rare.results)
    assert not torch.allclose(rare.results[0][0], frequent.results[0][0], atol=1e-4)


# -- dk.equal ------------------------------------------------------------------------------


def record_training(change: str = "") -> None:
    """Record four training steps, with the mistake that ``change`` names."""
    rank, n, model = dist.get_rank(), dist.get_world_size(), net()
    if change == "initial" and rank == 1:
        model[2].weight.data += 0.1
    groups: list[dict[str, Any]] = [{"params": [w]} for w in model.parameters()]
    groups[1]["weight_decay"] = 5.0 if change == "decay" else 0.0  # of 0.bias
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    reduce = (lambda x: None) if change == "unreduced" else dist.all_reduce
    with dk.watch_gradients(model) as watch:
        for x, y in DistributedDataset(images(40), 11, replica=rank, replicas=n):
            loss = dk.algorithms.sync_sgd_step(
                model, (x, y), F.cross_entropy, optimizer, all_reduce=reduce
            )
            watch.step(loss=loss, lr=0.1, samples=len(x))


def test_training_is_independent_of_the_number_of_ranks() -> None:
    one = dk.run_ranks(record_training, 1)
    found = dk.equal(dk.run_ranks(record_training, 3), one)
    assert found
    assert found.largest < 1e-10
    assert found.compared == "all 4 steps and 4 parameters"
    assert dk.equal(one, dk.run_ranks(record_training, 1)).exact


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("initial", (0, "weights", "2.weight", 1)),
        ("decay", (1, "weights", "0.bias", 0)),
        ("unreduced", (1, "gradient", "2.bias", 0)),
    ],
)
def test_first_difference_is_named(change: str, first: tuple[int, str, str, int]) -> None:
    found = dk.equal(dk.run_ranks(record_training, 2, change), dk.run_ranks(record_training, 1))
    assert not found
    assert (found.first.step, found.first.what, found.first.layer, found.first.rank) == first


# -- batch normalization -------------------------------------------------------------------

Norm = Callable[[int], nn.Module]


def train_with_norm(norm: Norm, x: Tensor, y: Tensor, step: Callable[..., object]) -> Tensor:
    """Return weights and statistics after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 6), norm(6), nn.Linear(6, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for rows in torch.arange(len(x)).chunk(2):
        step(model, (x[rows], y[rows]), F.cross_entropy, optimizer)
    return torch.cat([part.detach().reshape(-1).double() for part in model.state_dict().values()])


def torch_step(model: nn.Module, batch: Any, loss_fn: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_fn(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("norm", "ours", "exact"),
    [
        (nn.LayerNorm, nn.LayerNorm, True),
        (nn.BatchNorm1d, nn.BatchNorm1d, False),  # each replica normalizes by its own shard
        (nn.BatchNorm1d, SyncBatchNorm, True),
    ],
)
def test_only_synchronized_batch_norm_equals_one_process(
    norm: Norm, ours: Norm, exact: bool
) -> None:
    def ranks() -> Tensor:
        return train_with_norm(ours, *dk.data.shard(*images(64)), dk.algorithms.sync_sgd_step)

    expected = train_with_norm(norm, *images(64), torch_step)
    for found in dk.run_ranks(ranks, 2).results:
        assert torch.allclose(found, expected, rtol=0, atol=1e-11) == exact
