"""What a recorded run on a GPU shows: device, stream, memory and the GPU's own time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.views.timeline.columns import project

DEVICE = "cuda:0"


def reduce_on(device: str) -> float:
    """An all-reduce of values, with more memory in use than before."""
    kept = torch.ones(1 << 20, device=device)
    dist.all_reduce(kept)
    return float(kept[0])


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])  # by NCCL, and by what ranks of one GPU use
def test_a_call_on_a_gpu_tells_device_stream_memory_and_time(ranks: int) -> None:
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
    picture = project(run.trace)
    assert all(lane["memory"] for lane in picture["lanes"])
    assert all(bar["gpu"].startswith(DEVICE) for bar in picture["bars"])


@pytest.mark.gpu
def test_graphs_and_compiled_programs_run_while_they_are_recorded() -> None:
    def program() -> list[float]:
        x = torch.ones(8, device=DEVICE)
        dist.all_reduce(x)  # the communicator is made before anything is captured
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
