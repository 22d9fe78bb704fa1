"""Runs on a GPU are recorded with device, stream, memory and GPU times."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from devices import on_devices

import distkit as dk
from distkit.events import State
from distkit.views.timeline.columns import Columns

DEVICE = "cuda:0"


def reduce_on(device: str) -> float:
    """All-reduce a tensor that occupies 4 MiB on the device."""
    x = torch.ones(1 << 20, device=device)
    dist.all_reduce(x)
    return float(x[0])


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])  # one: NCCL; two, which share a GPU: gloo
def test_recorder_never_synchronizes(ranks: int) -> None:
    def program() -> float:
        from distkit.recording.recorder import current

        x, recorder = torch.ones(1 << 16, device="cuda"), current()
        assert recorder is not None
        dist.all_reduce(x)  # the first call initializes NCCL
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if dist.get_backend() == "nccl" else "default")
        try:
            for _ in range(20):
                recorder._cpu_time = -60.0  # makes the recorder summarize all values
                dist.all_reduce(x)
                recorder.poll()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return float(x[0])

    with dk.Cluster(ranks, device=DEVICE) as cluster:
        run = cluster.run(program)
    assert run.results == [float(ranks**21)] * ranks
    spans = [s for s in run.trace.spans if s.op == "all_reduce"]
    assert all(s.after is not None for s in spans) and len(spans) == 21 * ranks


@on_devices
def test_compiled_collectives_are_recorded(device: str) -> None:
    def program(device: str) -> float:
        from torch.distributed import _functional_collectives as functional

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(2 * x, "sum", dist.group.WORLD) + 1

        return [step(torch.ones(4, device=device)) for _ in range(3)][-1].sum().item()

    with dk.Cluster(2, device=device) as cluster:
        run = cluster.run(program, device)
    assert run.results == [20.0] * 2
    for rank in range(2):
        spans = [s for s in run.trace.spans if s.op == "all_reduce" and s.rank == rank]
        assert [(s.state, s.after.values[0]) for s in spans] == [(State.COMPLETED, 4.0)] * 3
        assert all(s.attributes.get("device", "cpu") == device for s in spans)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])  # one: NCCL; two, which share a GPU: gloo
def test_gpu_call_records_device_stream_memory_and_time(ranks: int) -> None:
    with dk.Cluster(ranks, device=DEVICE) as cluster:
        run = cluster.run(reduce_on, DEVICE)
    assert run.results == [ranks] * ranks
    (span, *_) = run.trace.spans
    assert span.attributes["device"] == DEVICE
    assert span.attributes["memory"] >= 4 << 20
    assert span.attributes["stream"] >= 0
    assert span.after.values[0] == ranks
    if ranks == 1:
        assert 0 < span.attributes["device_seconds"] < 10
    assert all(bar["gpu"].startswith(DEVICE) for bar in Columns(run.trace).picture()["bars"])


@pytest.mark.gpu
def test_graphs_and_compiled_programs_run_while_they_are_recorded() -> None:
    def program() -> list[float]:
        x = torch.ones(8, device=DEVICE)
        dist.all_reduce(x)  # creates the communicator before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
            x += 1
        graph.replay()
        double = torch.compile(lambda y: 2 * y)
        y = double(x)
        dist.all_reduce(y)
        return y.tolist()

    with dk.Cluster(1, device=DEVICE) as cluster:
        run = cluster.run(program)
    assert run.results == [[4.0] * 8]
    assert len(run.trace.collectives) >= 2
