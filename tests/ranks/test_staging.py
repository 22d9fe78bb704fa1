"""Ranks that share a GPU send messages through host memory, and use gloo's collectives.

Without a GPU, a fake device is used for messages: see :mod:`standin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distkit as dk
from distkit.cluster import Run

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("pretend:0", marks=pytest.mark.stand_in),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ],
)


gpu = pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=pytest.mark.gpu)])


def run_on_shared_device(fn: Callable[..., Any], device: str, *args: Any, ranks: int = 2) -> Run:
    """Run ``fn(device, group, *args)`` on ranks that share a device, in a group for this device."""

    def program() -> Any:
        group = dist.group.WORLD
        if device.startswith("pretend"):
            import standin

            standin.install()
            standin.stage_messages()
            group = dist.new_group(backend="cpu:gloo,pretend:gloo")
        return fn(device, group, *args)

    if device.startswith("pretend"):
        return dk.run_ranks(program, ranks)
    with dk.Cluster(ranks, device=device, backend="gloo") as cluster:
        return cluster.run(program)


KINDS = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int16,
]


@devices
def test_messages_equal_those_on_the_cpu(device: str) -> None:
    def ring(device: str, group: Any, dtype: torch.dtype) -> list[Any]:
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        mine = (torch.arange(4.0) + 10 * rank + 1).to(dtype).to(device)
        first, second, third = (torch.zeros(4).to(dtype).to(device) for _ in range(3))
        right, left = (rank + 1) % n, (rank - 1) % n
        sends = [dist.isend(mine, right, group, tag=t) for t in (1, 2)]
        receives = [dist.irecv(t, left, group, tag=i) for i, t in ((2, second), (1, first))]
        sends.append(dist.isend(mine.clone(), right, group, tag=3))
        receives.append(dist.irecv(third, group=group, tag=3))  # from any source
        for work in (*receives, *sends):
            assert work is not None
            work.wait()
        send = dist.P2POp(dist.isend, first, right, group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, second, left, group)]):
            work.wait()
        return [t.cpu().to(torch.complex128).tolist() for t in (first, second, third)]

    def both(device: str, group: Any) -> Any:
        return [(ring("cpu", group, t), ring(device, group, t)) for t in KINDS]

    for results in run_on_shared_device(both, device).results:
        for dtype, (expected, found) in zip(KINDS, results, strict=True):
            assert (dtype, found) == (dtype, expected)


@devices
def test_reference_implementations_reduce_device_tensors(device: str) -> None:
    def program(device: str, group: Any) -> list[list[float]]:
        small = torch.arange(6.0).view(2, 3).to(device)
        large = torch.ones(1 << 17, device=device)
        dk.algorithms.shared_memory_all_reduce(small.t(), group=group)
        dk.algorithms.shared_memory_all_reduce(large, group=group)
        dk.algorithms.ring_all_reduce(small, group=group)
        return [small.flatten().tolist(), large[::65_536].tolist()]

    for small, large in run_on_shared_device(program, device).results:
        assert small == [4 * i for i in range(6)]
        assert large == [2.0, 2.0]


class Small(nn.Module):
    """Two layers, which the FSDP test shards separately."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def train_small_model(
    device: str, group: Any, wrap: Callable[[nn.Module, Any], nn.Module]
) -> list[float]:
    """Return the losses of a small model on this rank's data."""
    torch.manual_seed(0)
    model = wrap(Small().to(device), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank(group))
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    losses = []
    for _ in range(3):
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@gpu
def test_ddp_equals_the_cpu_and_is_recorded(device: str) -> None:
    def ddp(model: nn.Module, group: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, process_group=group)

    run = run_on_shared_device(train_small_model, device, ddp)
    for found, expected in zip(
        run.results, run_on_shared_device(train_small_model, "cpu", ddp).results, strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-5)
    reduced = [s for s in run.trace.spans if s.attributes.get("gradients")]
    assert len(reduced) == 2 * 3
    assert all("test_staging" in s.where and s.end is not None for s in reduced)


@gpu
def test_sharded_models_equal_the_cpu(device: str) -> None:
    def fsdp(model: nn.Module, group: Any) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        kind = next(model.parameters()).device.type
        mesh = DeviceMesh.from_group(group, kind)
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for found, expected in zip(
        run_on_shared_device(train_small_model, device, fsdp).results,
        run_on_shared_device(train_small_model, "cpu", fsdp).results,
        strict=True,
    ):
        assert found == pytest.approx(expected, rel=1e-5)
