"""Ranks that others start on several hosts, with clocks of their own: torchrun, Slurm, MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from laboratories import laboratory

from distkit.laboratory import Laboratory
from distkit.laboratory.tools import PATH
from distkit.trace.trace import Trace

ROOT = Path(__file__).parents[2]
DISTKIT = [sys.executable, "-m", "distkit"]
LONG, SKEW = 200, 5

SCRIPT = """
import os
import torch, torch.distributed as dist

mpi, slurm = "OMPI_COMM_WORLD_", "SLURM_"
if "RANK" not in os.environ:  # as scripts do that are made for these
    said = mpi + "RANK", mpi + "SIZE"
    if said[0] not in os.environ:
        said = slurm + "PROCID", slurm + "NTASKS"
    os.environ["RANK"], os.environ["WORLD_SIZE"] = (os.environ[name] for name in said)
dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
x = torch.ones(100)
for _ in range(20):
    dist.all_reduce(x)
for _ in range(5):
    if rank == 0:
        dist.send(x, last)
        dist.recv(x, last)
    elif rank == last:
        dist.recv(x, 0)
        dist.send(x, 0)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    shared = tmp_path_factory.mktemp("shared")
    shared.joinpath("train.py").write_text(SCRIPT)
    here = Path.cwd()
    os.chdir(shared)
    try:
        with laboratory(["alpha", "beta"], skew={"beta": SKEW}, shared=[shared, ROOT]) as lab:
            yield lab
    finally:
        os.chdir(here)


@pytest.fixture
def environment(hosts: Laboratory) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": hosts.address("alpha"),
        "MASTER_PORT": "29501",
    }


def check(folder: str, ranks: int) -> None:
    """The trace of the ranks of both hosts, in which no message comes before it was sent."""
    trace = Trace.load(folder)
    assert trace.ranks == [*range(ranks)]
    assert {about["host"] for about in trace.meta["ranks"].values()} == {"alpha", "beta"}
    clocks, first = trace.meta["clocks"], trace.meta["ranks"]["0"]["host"]
    other = clocks["beta" if first == "alpha" else "alpha"]
    ahead = SKEW if first == "alpha" else -SKEW
    assert abs(other["ahead"] - ahead) <= other["error"] < 0.05
    assert len(trace.messages) == 10
    assert all(m.sent < m.received for m in trace.messages)
    assert len(trace.collectives) == 20
    for spans in trace.collectives:
        assert max(s.start for s in spans) < min(s.end for s in spans)
    assert trace.diagnose() == []


def test_torchrun_on_two_hosts(hosts: Laboratory, environment: dict[str, str]) -> None:
    rendezvous = f"--rdzv-endpoint={hosts.address('alpha')}:29500"
    nodes = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", rendezvous]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, "train.py"]
    command = [*DISTKIT, "trace", "--out", "torchrun", "--", *torchrun]
    both = [hosts.popen(host, command, env=environment) for host in ("alpha", "beta")]
    assert [process.wait(LONG) for process in both] == [0, 0]
    check("torchrun", 4)


@pytest.mark.skipif(not shutil.which("slurmctld", path=PATH), reason="there is no Slurm here")
def test_srun_on_two_hosts(hosts: Laboratory, environment: dict[str, str]) -> None:
    hosts.slurm()
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "train.py"]
    command = [*DISTKIT, "trace", "--out", "srun", "--", *command]
    ran = hosts.run("head", command, env=environment, timeout=LONG, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check("srun", 2)


@pytest.mark.skipif(not shutil.which("ompi_info"), reason="there is no Open MPI here")
def test_mpiexec(hosts: Laboratory, environment: dict[str, str]) -> None:
    environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpiexec", *as_root, "--oversubscribe", "-n", "2", sys.executable, "train.py"]
    command = [*DISTKIT, "trace", "--out", "mpi", "--", *command]
    ran = subprocess.run(command, env=environment, timeout=LONG, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    trace = Trace.load("mpi.gz")
    assert (trace.ranks, len(trace.collectives)) == ([0, 1], 20)
