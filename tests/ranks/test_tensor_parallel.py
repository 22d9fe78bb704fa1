"""Column and row parallel layers, compared with plain layers and torch's DTensor."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training import error_message

import distkit as dk
from distkit.events import Op
from distkit_parallel import ColumnLinear, Layout, RowLinear


def mlp(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias), nn.GELU(), nn.Linear(8, 6, bias)).double()


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)


def results_of(model: nn.Module) -> list[torch.Tensor]:
    """Return outputs, input gradients and parameter gradients."""
    x = batch()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(("n", "bias"), [(1, True), (2, False), (4, True)])
def test_column_then_row_layers_equal_plain_layers_and_dtensor(n: int, bias: bool) -> None:
    def program() -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        up, act, down = mlp(bias)
        with dk.mark("reference"):
            result = results_of(nn.Sequential(ColumnLinear(up), act, RowLinear(down)))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        sharded = parallelize_module(mlp(bias), init_device_mesh("cpu", (n,)), plan)
        with CommDebugMode() as counted:
            expected = results_of(sharded)
        expected = [t.to_local() if isinstance(t, DTensor) else t for t in expected]
        return result, expected, sum(counted.get_comm_counts().values())

    plain = results_of(mlp(bias))
    run = dk.run_ranks(program, n)
    for rank, (result, expected, messages) in enumerate(run.results):
        for mine, other in zip(result, expected, strict=True):
            assert torch.allclose(mine, other, rtol=0, atol=1e-12)
        for mine, full in zip(result[:2], plain[:2], strict=True):
            assert torch.allclose(mine, full, rtol=0, atol=1e-12)
        dims = [0, *([0] if bias else []), 1]
        for mine, full, dim in zip(result[2:], plain[2:], dims, strict=False):
            assert torch.allclose(mine, full.chunk(n, dim)[rank], rtol=0, atol=1e-12)
        spans = [span for span in run.trace.spans if span.rank == rank]
        (mark,) = [span for span in spans if span.op is Op.MARK]
        sent = Counter(s.op for s in spans if s is not mark and s.start < mark.end)
        assert sent == {Op.ALL_REDUCE: 2}
        assert messages == 2 or n == 1


def test_indivisible_features_raise() -> None:
    def program() -> list[str]:
        return [
            error_message(dk.errors.LayoutError, layer, nn.Linear(7, 7))
            for layer in (ColumnLinear, RowLinear)
        ]

    for errors in dk.run_ranks(program, 2).results:
        assert all(
            text.startswith("7 features cannot be divided evenly among 2 tensor-parallel ranks")
            for text in errors
        )


def test_layers_on_a_subgroup_use_its_ranks() -> None:
    """Two replicas of two halves, on a layout's mesh."""

    def program() -> torch.Tensor:
        group = Layout(dp=2, tp=2).mesh()["tp"].get_group()
        up, act, down = mlp(True)
        return results_of(nn.Sequential(ColumnLinear(up, group), act, RowLinear(down, group)))[0]

    full = results_of(mlp(True))[0]
    for result in dk.run_ranks(program, 4).results:
        assert torch.allclose(result, full, rtol=0, atol=1e-12)
