"""Evaluation counts every sample once, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distkit as dk


def images(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rows, 9, generator=generator), torch.arange(rows) % 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Dropout(), nn.Linear(12, 5))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def evaluations() -> list[float]:
    net = model().train()
    data = images(301)
    found = [dk.data.evaluate(net, data), dk.data.evaluate(net, data, loss, batch=10)]
    assert net.training
    return found


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_evaluation_is_identical_on_any_number_of_ranks(ranks: int) -> None:
    expected = evaluations()
    x, y = images(301)
    with torch.no_grad():
        outputs = model().eval()(x)
    assert expected[0] == (outputs.argmax(1) == y).double().mean().item()
    assert expected[1] == pytest.approx(loss(outputs, y).mean().item())
    assert dk.run_ranks(evaluations, ranks).results == [expected] * ranks


def test_fewer_samples_than_ranks_are_evaluated() -> None:
    found = dk.run_ranks(lambda: dk.data.evaluate(model(), images(1)), 3).results
    assert found == [dk.data.evaluate(model(), images(1))] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((images(0),), "no samples"),
        ((images(8), F.cross_entropy), r"shape \(\) for 8 samples.*reduction='none'"),
    ],
)
def test_invalid_evaluation_raises(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dk.data.evaluate(model(), *arguments)
