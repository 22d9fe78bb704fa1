"""Splitting models into stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from distkit_parallel import split


class Residual(nn.Module):
    """A block with a skip connection inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def chain() -> nn.Sequential:
    return nn.Sequential(*(Residual() for _ in range(4)))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_in_sequence_equal_the_model(stages: int) -> None:
    model = chain()
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


def test_more_stages_than_layers_raise() -> None:
    with pytest.raises(ValueError, match="from 1 to the number of layers, 4; got 5"):
        split(chain(), 5)


def test_layer_with_state_can_repeat_only_within_a_stage() -> None:
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


def test_model_that_is_not_sequential_raises() -> None:
    with pytest.raises(TypeError, match=r"expects an nn.Sequential, not Residual: put its layers"):
        split(Residual(), 2)
