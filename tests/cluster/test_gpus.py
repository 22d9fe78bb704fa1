"""Clusters on GPUs. Where there are none, the CPU and a stand-in for MPS take their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from gpus import GIB
from waiting import alive, until

import distkit as dk
from distkit import probe
from distkit.cluster import cluster as cluster_module
from distkit.cluster.gpus import Gpu, Seat, mps_environ
from distkit.cluster.plan import Plan
from distkit.cluster.processes import forkserver, mps

GPU = Gpu(0, "H200", "GPU-a", 80 * GIB, 80 * GIB)

#: MPS's control program: its server leaves for a session of its own, as daemons do.
CONTROL = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then
    echo "$CUDA_VISIBLE_DEVICES" > gpu
    echo $$ > nvidia-cuda-mps-control.pid
    [ -e "$0.fails" ] && { echo 'No device to serve' > control.log; exit 3; }
    setsid sleep 1000 & echo $! > server
    wait
fi
read -r command server
case "$command" in
    get_server_list) cat server || { echo 'Cannot find MPS control daemon' >&2; exit 1; } ;;
    get_client_list) cat clients ;;
esac
"""


@pytest.fixture
def control(tmp_path: Path) -> str:
    """The program."""
    path = tmp_path / "nvidia-cuda-mps-control"
    path.write_text(CONTROL)
    path.chmod(0o755)
    return str(path)


def processes(folder: str) -> list[psutil.Process]:
    """The daemon and its server."""
    names = ("nvidia-cuda-mps-control.pid", "server")
    return [psutil.Process(int(Path(folder, "mps-0", name).read_text())) for name in names]


def gone(some: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(map(alive, some))


def test_ranks_in_engines_of_others_are_seated_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(dk.Cluster, "_open_far", lambda self, *given: opened.append(given))
    gpu = {"mps": "on", "memory_fraction": 0.1}
    dk.Cluster.attach(SimpleNamespace(ids=[0, 1]), servers=1, **gpu)
    ((wish, servers, _),) = opened
    assert (wish.mps, wish.memory_fraction, wish.count, servers) == ("on", 0.1, 2, 1)


def served(fork: forkserver.ForkServer, folder: str, control: str) -> tuple[Any, str]:
    """MPS's daemon on a GPU, and what it says when it begins."""
    child = fork.fork(
        "distkit.cluster.processes.mps:serve",
        folder=folder,
        log="mps-0.log",
        control=control,
        uuid=GPU.uuid,
        environ=mps_environ(folder, GPU),
    )
    return child, child.channel.recv()


@pytest.mark.parametrize("end", ["remove", "kill the zygote", "kill its parent"])
def test_mps_ends_with_its_cluster(
    end: str, fresh: forkserver.LocalForkServer, control: str
) -> None:
    folder = fresh.make_folder(1)
    child, why = served(fresh, folder, control)
    assert why == ""
    place = Path(folder, "mps-0")
    assert place.joinpath("gpu").read_text() == "GPU-a\n"
    assert place.stat().st_mode & 0o777 == 0o700
    environ = {**os.environ, **mps_environ(folder, GPU)}
    place.joinpath("clients").write_text("1\n")
    assert not mps.attached(control, environ)
    place.joinpath("clients").write_text(f"1\n{os.getpid()}\n")
    assert mps.attached(control, environ)
    both = processes(folder)
    assert not gone(both)()
    if end == "remove":
        fresh.remove(folder)
    elif end == "kill its parent":
        os.kill(child.pid, signal.SIGKILL)
    else:
        psutil.Process(fresh.process.pid).children()[0].kill()
    until(gone(both))
    child.let_go()


def test_mps_that_does_not_start_says_why(
    fresh: forkserver.LocalForkServer, control: str, tmp_path: Path
) -> None:
    Path(f"{control}.fails").touch()
    child, why = served(fresh, fresh.make_folder(1), control)
    assert why == "its daemon does not answer (exit status 3): No device to serve"
    assert child.wait(10)
    child.let_go()


def test_a_path_too_long_for_the_sockets_of_mps(fresh: forkserver.LocalForkServer) -> None:
    folder = fresh.make_folder(1)
    environ = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/{'x' * 80}"}
    child = fresh.fork("distkit.cluster.processes.mps:serve", folder=folder, log="mps-0.log",
                       control="", uuid="", environ=environ)  # fmt: skip
    assert "set a shorter TMPDIR" in child.channel.recv()
    child.let_go()


def planned(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Have clusters of two ranks planned so: on the CPU, as if it were the GPU."""
    seat = Seat(**{"device": "cpu", "gpu": GPU, "sharers": 2, "alone": True} | facts.pop("seat"))
    plan = Plan(2, 0, "gloo", (seat, seat), 1, "as if", **facts)
    monkeypatch.setattr(cluster_module, "make_plan", lambda *_, **__: plan)


def total() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def test_a_cluster_shares_its_gpu_by_mps(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, seat={"mps": control, "fraction": 0.25}, insists=True)

    def seen() -> list[str | None]:
        return [os.environ.get(f"CUDA_{n}") for n in ("VISIBLE_DEVICES", "MPS_PIPE_DIRECTORY")]

    with dk.Cluster(2) as cluster:
        assert cluster.run(total).results == [2.0, 2.0]
        folder = cluster._room.folder
        assert cluster.run(seen).results == [["GPU-a", f"{folder}/mps-0"]] * 2
        assert {row[3] for row in cluster.status().rows} == {"cpu = GPU 0, at most 20 GiB"}
        both = processes(folder)
        assert not gone(both)()
    until(gone(both))


def test_a_cluster_is_over_when_mps_ends(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, seat={"mps": control})
    with dk.Cluster(2) as cluster:
        cluster.wait()
        both = processes(cluster._room.folder)
        both[0].kill()
        until(lambda: cluster._room.stage == "failed")
        with pytest.raises(dk.StartError, match="the MPS daemon of GPU 0 ended"):
            cluster.run(total)
        until(gone(both))


def test_mps_that_was_asked_for_must_start(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{control}.fails").touch()
    planned(monkeypatch, seat={"mps": control}, insists=True)
    with (
        dk.Cluster(2) as cluster,
        pytest.raises(dk.StartError, match=r"mps='on' was asked for, .*No device to serve"),
    ):
        cluster.wait()


def test_without_mps_it_goes_on_and_says_so(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{control}.fails").touch()
    planned(monkeypatch, seat={"mps": control})
    with dk.Cluster(2) as cluster:
        assert cluster.run(total).results == [2.0, 2.0]
        assert "no MPS on these GPUs: GPU 0 on" in cluster.status().note
        assert "No device to serve" in cluster.status().note


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_rank_that_cannot_use_its_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, seat={"device": "cuda:0"})
    said = r"\(1\). rank \d on cuda:0 \(GPU 0, H200\) cannot use it: .*; install torch with CUDA"
    with dk.Cluster(2) as cluster, pytest.raises(dk.StartError, match=said) as refused:
        cluster.wait()
    assert "Traceback" not in str(refused.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_gpus_that_torch_is_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"index": 0, "name": "H200", "uuid": "GPU-a", "total": 80 * GIB, "free": 80 * GIB}
    monkeypatch.setattr(probe, "gpus", lambda: {"found": [gpu], "cuda": [13, 0]})
    with pytest.raises(dk.StartError, match=r"'cuda' was asked for, and torch is built without CU"):
        dk.Cluster(2, device="cuda")
    with dk.Cluster(2) as cluster:
        assert cluster.run(total).results == [2.0, 2.0]
        assert "gloo on CPU: torch is built without CUDA" in cluster.status().note
        assert "in use" not in cluster.status().note


def full() -> float:
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return total()


def ruined() -> None:
    class Stream:
        def query(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    if dist.get_rank() == 1:
        torch.cuda.is_initialized, torch.cuda.current_stream = lambda: True, Stream  # type: ignore
        Stream().query()
    total()


def foreign() -> None:
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="cuda:gloo"))


def test_after_a_failure_on_a_gpu_the_next_cell_runs() -> None:
    with dk.Cluster(2) as cluster:
        with pytest.raises(dk.RankError, match=r"rank 1 on cpu: it computes on the CPU. Use"):
            cluster.run(full)
        pids = cluster.run(os.getpid).results
        with pytest.raises(dk.RankError, match="Its process is replaced by another"):
            cluster.run(ruined)
        after = cluster.run(os.getpid).results
        assert (after[0] == pids[0], after[1] == pids[1]) == (True, False)
        with pytest.raises(dk.RankError, match=r"this tensor is on cpu: move it with x.to\("):
            cluster.run(foreign)
        assert cluster.run(total).results == [2.0, 2.0]


def test_ranks_know_nothing_of_the_notebooks_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forked from a process that has not touched it, whatever the notebook has."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    with dk.Cluster(2) as cluster:
        found = cluster.run(lambda: (torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()))
        assert found.results == [(False, False)] * 2


# -- on a real GPU ---------------------------------------------------------------------------------


def on_gpu() -> tuple[float, int, str]:
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    return x.sum().item(), torch.cuda.current_device(), os.environ["CUDA_DEVICE_ORDER"]


@pytest.mark.gpu
def test_ranks_share_a_gpu() -> None:
    with dk.Cluster(2, device="cuda:0") as cluster:
        assert cluster.run(on_gpu).results == [(8.0, 0, "PCI_BUS_ID")] * 2
        assert cluster.plan.backend == "gloo" and "in use" in cluster.status().note

        def fill() -> None:
            if dist.get_rank() == 1:
                torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
            on_gpu()

        with pytest.raises(dk.RankError, match=r"rank 1 on cuda:0 .*it may take .* hold: .*rank 1"):
            cluster.run(fill)
        assert cluster.run(on_gpu).results == [(8.0, 0, "PCI_BUS_ID")] * 2


@pytest.mark.gpu
def test_a_failed_kernel_costs_a_process() -> None:
    def wrong() -> None:
        table = torch.ones(2, device="cuda")
        table[torch.tensor([7 * dist.get_rank()], device="cuda")].sum().item()

    with dk.Cluster(2, device="cuda:0") as cluster:
        pids = cluster.run(os.getpid).results
        with pytest.raises(dk.RankError, match="Its process is replaced by another"):
            cluster.run(wrong)
        assert cluster.run(os.getpid).results[1] != pids[1]
        assert cluster.run(on_gpu).results[1][0] == 8.0


@pytest.mark.gpu
def test_ranks_share_a_gpu_by_mps() -> None:
    with dk.Cluster(2, device="cuda:0", mps="auto") as cluster:
        assert cluster.run(on_gpu).results[0][0] == 8.0
        if not cluster.plan.seats[0].mps:
            pytest.skip(cluster.status().note)
        daemons = [child.pid for child in cluster._room._daemons.values()]
    until(lambda: not any(map(psutil.pid_exists, daemons)))


@pytest.mark.gpu
def test_a_notebook_that_uses_cuda_has_ranks() -> None:
    program = (
        "import torch, distkit as dk; x = torch.ones(1, device='cuda')\n"
        "def f(): return torch.ones(1, device='cuda').item()\n"
        "with dk.Cluster(2, device='cuda') as c: assert c.run(f).results == [1.0, 1.0]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.gpu(2)
def test_each_rank_has_a_gpu() -> None:
    with dk.Cluster(2, device="cuda") as cluster:
        assert [found[1] for found in cluster.run(on_gpu).results] == [0, 1]
        assert cluster.plan.backend == "nccl"
