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
