"""Models cut into stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from distkit.algorithms.pipeline import split


class Residual(nn.Module):
    """A block with a skip connection inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Chain(nn.Module):
    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.down, self.middle, self.deep, self.up = (Residual() for _ in range(4))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x).relu()
        x = self.deep(self.middle(first)) * 2
        return self.up(x + first if self.skip else x)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "model", [nn.Sequential(*(Residual() for _ in range(4))), Chain(skip=False)]
)
def test_stages_one_after_another_are_the_model(model: nn.Module, stages: int) -> None:
    x = torch.randn(3, 4)
    y = x
    parts = split(copy.deepcopy(model), stages)
    for stage in parts:
        y = stage(y)
    assert torch.equal(y, model(x))
    count = [sum(p.numel() for p in stage.parameters()) for stage in parts]
    assert sum(count) == sum(p.numel() for p in model.parameters())
    assert max(count) - min(count) <= 20
    names = {name for stage in parts for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}


def test_a_skip_connection_across_stages_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'add' of stage 2 needs the output of 'relu' of stage 0"):
        split(Chain(skip=True), 4)
    with pytest.raises(ValueError, match="skip connection across stages"):
        split(Chain(skip=True), 2)
    assert len(split(Chain(skip=True), 1)) == 1


def test_a_model_has_no_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="5 stages of a model of 4 layers: give from 1 to 4"):
        split(Chain(skip=False), 5)


def test_a_layer_may_come_twice_if_no_parameter_is_in_two_stages() -> None:
    linear, relu = nn.Linear(4, 4), nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, linear, linear, relu, nn.Linear(4, 4))
    x, parts = torch.randn(3, 4), split(model, 3)
    assert [len(part) for part in parts] == [2, 2, 2]
    assert torch.equal(nn.Sequential(*parts)(x), model(x))
    with pytest.raises(ValueError, match=r"'2.weight' of stage 0 and '3.weight' of stage 1 are"):
        split(model, 2)
    norm = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(ValueError, match=r"'0.running_mean' of stage 0 and '1.running_mean' of"):
        split(nn.Sequential(norm, norm), 2)


class Order(nn.Module):
    """Layers that are used in another order than they are defined in, one of them maybe twice."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        for name in self.used:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize(
    ("used", "stages", "says"),
    [
        ("cab", 2, "stage 0 would be empty: the model uses 'a', 'b' after layers of later stages"),
        ("ac", 3, "stage 1 would be empty: the model uses 'b' after .* or never"),
        ("abca", 3, "'a.weight' of stage 0 and 'a.weight' of stage 2 are one tensor"),
    ],
)
def test_layers_that_no_cut_can_keep_in_order_are_named(used: str, stages: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split(Order(used), stages)
    assert len(split(Order(used), 1)) == 1
