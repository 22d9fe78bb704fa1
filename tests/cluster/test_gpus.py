"""Clusters on GPUs, simulated on the CPU where possible."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from training import sum_over_ranks

import distkit as dk
from distkit.cluster import cluster as cluster_module
from distkit.cluster import machine
from distkit.cluster.plan import Plan


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_unusable_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(2, 0, "gloo", ("cuda:0", "cuda:0"), 1, "fake GPUs")
    monkeypatch.setattr(cluster_module, "make_plan", lambda *_, **__: plan)
    message = r"rank \d on cuda:0 cannot use its GPU: .*; install torch with CUDA"
    with dk.Cluster(2) as cluster, pytest.raises(dk.errors.RankDied, match=message) as caught:
        cluster.run(int)
    assert "Traceback" not in str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_gpus_without_cuda_support_in_torch_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"index": 0, "name": "H200", "uuid": "GPU-a"}
    monkeypatch.setattr(machine, "gpus", lambda: {"found": [gpu]})
    with pytest.raises(
        dk.errors.StartError, match=r"'cuda' was requested, but torch is built without CU"
    ):
        dk.Cluster(2, device="cuda")
    with dk.Cluster(2) as cluster:
        assert cluster.run(sum_over_ranks).results == [3.0, 3.0]
        assert "gloo on CPU: torch is built without CUDA" in cluster.status().note


def run_out_of_memory() -> float:
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return sum_over_ranks()


def fail_device_assert() -> None:
    class Stream:
        def query(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    if dist.get_rank() == 1:
        torch.cuda.is_initialized, torch.cuda.current_stream = lambda: True, Stream  # type: ignore
        Stream().query()
    sum_over_ranks()


def use_wrong_backend() -> None:
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="cuda:gloo"))


def test_next_cell_runs_after_a_gpu_failure() -> None:
    with dk.Cluster(2) as cluster:
        with pytest.raises(
            dk.errors.RankError, match=r"rank 1 on cpu ran out of memory\. Use smaller"
        ):
            cluster.run(run_out_of_memory)
        with pytest.raises(dk.errors.RankError, match="rank 1 on cpu: "):
            cluster.run(fail_device_assert)
        with pytest.raises(
            dk.errors.RankError, match=r"this tensor is on cpu\. Move it with x.to\("
        ):
            cluster.run(use_wrong_backend)
        assert cluster.run(sum_over_ranks).results == [3.0, 3.0]


def test_ranks_do_not_inherit_the_notebooks_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from a process that has not initialized CUDA."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    with dk.Cluster(2) as cluster:
        found = cluster.run(lambda: (torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()))
        assert found.results == [(False, False)] * 2


# -- on a real GPU ---------------------------------------------------------------------------------


def sum_on_gpu() -> tuple[float, int, str]:
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    return x.sum().item(), torch.cuda.current_device(), os.environ["CUDA_DEVICE_ORDER"]


@pytest.mark.gpu
def test_ranks_share_a_gpu() -> None:
    with dk.Cluster(2, device="cuda:0") as cluster:
        assert cluster.run(sum_on_gpu).results == [(8.0, 0, "PCI_BUS_ID")] * 2
        assert cluster.plan.backend == "gloo"

        def fill() -> None:
            if dist.get_rank() == 1:
                torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
            sum_on_gpu()

        with pytest.raises(
            dk.errors.RankError, match=r"rank 1 on cuda:0 ran out of memory\. Use smaller"
        ):
            cluster.run(fill)
        assert cluster.run(sum_on_gpu).results == [(8.0, 0, "PCI_BUS_ID")] * 2


@pytest.mark.gpu
def test_failed_gpu_kernel_ends_only_its_run() -> None:
    def index_out_of_bounds() -> None:
        table = torch.ones(2, device="cuda")
        table[torch.tensor([7 * dist.get_rank()], device="cuda")].sum().item()

    with dk.Cluster(2, device="cuda:0") as cluster:
        with pytest.raises(dk.errors.RankError, match="CUDA error"):
            cluster.run(index_out_of_bounds)
        assert cluster.run(sum_on_gpu).results[1][0] == 8.0


@pytest.mark.gpu
def test_notebook_that_uses_cuda_can_start_ranks() -> None:
    program = (
        "import torch, distkit as dk; x = torch.ones(1, device='cuda')\n"
        "def f(): return torch.ones(1, device='cuda').item()\n"
        "with dk.Cluster(2, device='cuda') as c: assert c.run(f).results == [1.0, 1.0]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.gpu(2)
def test_each_rank_has_a_gpu() -> None:
    with dk.Cluster(2, device="cuda") as cluster:
        assert [found[1] for found in cluster.run(sum_on_gpu).results] == [0, 1]
        assert cluster.plan.backend == "nccl"
