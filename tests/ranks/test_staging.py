"""Host staging for GPUs that ranks share: staged calls equal gloo's own on the CPU.

Where there is no GPU, a device that is none stands in for it: see :mod:`standin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distkit as dk

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("pretend:0", marks=pytest.mark.stand_in),
        pytest.param("cuda:0", marks=pytest.mark.gpu),
    ],
)


def shared(fn: Callable[..., Any], device: str, *args: Any, ranks: int = 2) -> dk.Run:
    """Run ``fn(device, group, *args)`` on ranks that share a device, in a group for it."""

    def program() -> Any:
        group = dist.group.WORLD
        if device.startswith("pretend"):
            import standin

            standin.install()
            standin.stage()
            group = dist.new_group(backend="cpu:gloo,pretend:gloo")
        return fn(device, group, *args)

    if device.startswith("pretend"):
        return dk.run_ranks(program, ranks)
    with dk.Cluster(ranks, device=device, backend="gloo") as cluster:
        return cluster.run(program)


def everything(device: str, group: Any, dtype: torch.dtype) -> dict[str, list[Any]]:
    """What each collective and message leaves in its buffers, or the error that it raises."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    mine = (torch.arange(4.0) + 10 * rank + 1).to(dtype).to(device)
    many = [mine.clone() for _ in range(n)]

    def room(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape).to(dtype).to(device)

    def rooms() -> list[torch.Tensor]:
        return [room(mine) for _ in range(n)]

    def in_place(call: Callable[..., Any], **how: Any) -> list[torch.Tensor]:
        x = mine.clone()
        call(x, group=group, **how)
        return [x]

    def filled(call: Callable[..., Any], into: Any, *given: Any, **how: Any) -> Any:
        work = call(into, *given, group=group, async_op=True, **how)
        work.wait()
        return into

    def messages(*ops: dist.P2POp) -> None:
        for work in dist.batch_isend_irecv(list(ops)):
            work.wait()

    def ring() -> list[torch.Tensor]:
        first, second = room(mine), room(mine)
        right, left = (rank + 1) % n, (rank - 1) % n
        there = [dist.isend(mine, right, group, tag=t) for t in (1, 2)]
        back = [dist.irecv(t, left, group, tag=i) for i, t in ((2, second), (1, first))]
        for work in (*back, *there):
            assert work is not None
            work.wait()
        messages(
            dist.P2POp(dist.isend, first, right, group),
            dist.P2POp(dist.irecv, second, left, group),
        )
        return [first, second]

    def in_flight() -> list[torch.Tensor]:
        into = [rooms() for _ in range(3)]
        works = [dist.all_gather(r, mine + i, group, async_op=True) for i, r in enumerate(into)]
        if rank == 0:  # the others take part when they have this
            dist.send(mine, 1, group)
        elif rank == 1:
            dist.recv(room(mine), 0, group)
        failed: list[RuntimeError] = []
        for work in reversed(works):
            assert work is not None
            try:
                work.wait()
            except RuntimeError as error:  # the others are waited for all the same
                failed.append(error)
        if failed:
            raise failed[0]
        return [t for r in into for t in r]

    def coalesced() -> list[torch.Tensor]:
        a, b = mine.clone(), many[0].clone()
        dist.all_reduce_coalesced([a, b], group=group)
        return [a, b]

    long, base = torch.cat(many), dist.all_gather_single
    calls: dict[str, Callable[[], list[torch.Tensor]]] = {
        "all_reduce": lambda: in_place(dist.all_reduce),
        "broadcast": lambda: in_place(dist.broadcast, src=1),
        "reduce": lambda: in_place(dist.reduce, dst=1)[: rank == 1],
        "all_gather": lambda: filled(dist.all_gather, rooms(), mine),
        "all_gather_single": lambda: [filled(base, room(long), mine)],
        "reduce_scatter": lambda: [filled(dist.reduce_scatter, room(mine), many)],
        "reduce_scatter_single": lambda: [filled(dist.reduce_scatter_single, room(mine), long)],
        "all_to_all": lambda: filled(dist.all_to_all, rooms(), many),
        "all_to_all_single": lambda: [filled(dist.all_to_all_single, room(long), long)],
        "scatter": lambda: [filled(dist.scatter, room(mine), many if rank == 0 else None, src=0)],
        "gather": lambda: filled(dist.gather, *((mine, rooms()) if rank == 0 else (mine,)), dst=0),
        "coalesced": coalesced,
        "ring": ring,
        "in flight": in_flight,
    }
    found: dict[str, list[Any]] = {}
    for name, call in calls.items():
        try:
            result = call()
            flat = [result] if isinstance(result, torch.Tensor) else result
            found[name] = [t.cpu().to(torch.complex128).tolist() for t in flat]
        except (RuntimeError, ValueError, TypeError) as error:
            found[name] = [str(error).partition("\n")[0]]
    return found


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
def test_each_call_gives_what_it_gives_on_the_cpu(device: str) -> None:
    def both(device: str, group: Any) -> Any:
        return [(everything("cpu", group, t), everything(device, group, t)) for t in KINDS]

    for results in shared(both, device).results:
        for dtype, (expected, found) in zip(KINDS, results, strict=True):
            assert (dtype, found) == (dtype, expected)


@devices
def test_tensors_of_any_layout_and_functional_collectives(device: str) -> None:
    def program(device: str, group: Any) -> list[Any]:
        from torch.distributed import _functional_collectives as functional

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        whole = (torch.arange(12.0) + rank).view(3, 4).to(device)
        turned, every_other = whole.t(), whole[:, ::2]
        dist.all_reduce(turned, group=group)
        parts = [torch.zeros(3, 2, device=device) for _ in range(n)]
        dist.all_gather(parts, every_other, group=group)
        total = functional.all_reduce(every_other, "sum", group) + 0
        rows = functional.all_gather_tensor(every_other, 0, group) + 0
        futures = [torch.zeros(2, device=device) for _ in range(n)]
        work = dist.all_gather(futures, torch.ones(2, device=device), group, async_op=True)
        assert work is not None
        told = work.get_future().wait()
        shown = (whole, *parts, total, rows, *futures, *tree(told))
        return [t.cpu().tolist() for t in shown]

    def tree(value: Any) -> list[torch.Tensor]:
        return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in tree(v)]

    def plain(device: str, group: Any) -> list[Any]:
        return program("cpu", group)

    assert shared(program, device).results == shared(plain, device).results


class Small(nn.Module):
    """Two layers, of which FSDP shards each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def trained(device: str, group: Any, wrap: Callable[[nn.Module, Any], nn.Module]) -> list[float]:
    """Losses of some steps of a small model, on this rank's own data."""
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


@devices
def test_ddp_trains_as_on_the_cpu_and_its_calls_are_recorded(device: str) -> None:
    def ddp(model: nn.Module, group: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, process_group=group)

    run = shared(trained, device, ddp)
    for found, expected in zip(run.results, shared(trained, "cpu", ddp).results, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    reduced = [s for s in run.trace.spans if s.attributes.get("gradients")]
    assert len(reduced) == 2 * 3
    assert all("test_staging" in s.where and s.end is not None for s in reduced)


@devices
def test_pages_and_shared_memory_reduce_what_is_on_the_device(device: str) -> None:
    def program(device: str, group: Any) -> list[list[float]]:
        small = torch.arange(6.0).view(2, 3).to(device)
        large = torch.ones(1 << 17, device=device)
        dk.shared_memory_all_reduce(small.t(), group=group)
        dk.shared_memory_all_reduce(large, group=group)
        dk.ring_all_reduce(small, group=group)
        return [small.flatten().tolist(), large[::65_536].tolist()]

    for small, large in shared(program, device).results:
        assert small == [4 * i for i in range(6)]
        assert large == [2.0, 2.0]


@devices
def test_sharded_models_train_as_on_the_cpu(device: str) -> None:
    def fsdp(model: nn.Module, group: Any) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        kind = next(model.parameters()).device.type
        mesh = DeviceMesh.from_group(group, kind)
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for found, expected in zip(
        shared(trained, device, fsdp).results, shared(trained, "cpu", fsdp).results, strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-5)


@devices
def test_dtensors_are_redistributed(device: str) -> None:
    def program(device: str, group: Any) -> list[float]:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh.from_group(group, device.partition(":")[0])
        rows = distribute_tensor(torch.arange(16.0).view(4, 4).to(device), mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        product = (columns @ columns).full_tensor()
        return [*product.flatten().tolist(), rows.sum().full_tensor().item()]

    expected = torch.arange(16.0).view(4, 4)
    for found in shared(program, device).results:
        assert found == [*(expected @ expected).flatten().tolist(), 120.0]
