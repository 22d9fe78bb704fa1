"""Ranks that torchrun, Slurm or MPI starts on one or several hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from laboratories import laboratory, needs
from slurm import start_slurm

from distkit.trace.trace import Trace
from distkit_hosts.laboratory import Laboratory

ROOT = Path(__file__).parents[2]
DISTKIT = [sys.executable, "-m", "distkit"]
#: Timeout of a launcher, and how far beta's clock is ahead of the other hosts' clocks [s].
TIMEOUT, SKEW = 200, 5


SCRIPT = """
import os
import torch, torch.distributed as dist

mpi, slurm = "OMPI_COMM_WORLD_", "SLURM_"
if "RANK" not in os.environ:  # as in scripts written for MPI or Slurm
    names = mpi + "RANK", mpi + "SIZE"
    if names[0] not in os.environ:
        names = slurm + "PROCID", slurm + "NTASKS"
    os.environ["RANK"], os.environ["WORLD_SIZE"] = (os.environ[name] for name in names)
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
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory, shared by all hosts."""
    shared = tmp_path_factory.mktemp("shared")
    shared.joinpath("train.py").write_text(SCRIPT)
    previous = Path.cwd()
    os.chdir(shared)
    yield shared
    os.chdir(previous)


@pytest.fixture(scope="module")
def hosts(shared: Path) -> Iterator[Laboratory]:
    with laboratory(["alpha", "beta"], skew={"beta": SKEW}, shared=[shared, ROOT]) as lab:
        yield lab


def environment(hosts: Laboratory) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/companions",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": hosts.address("alpha"),
        "MASTER_PORT": "29501",
    }


def start(hosts: Laboratory, names: Sequence[str], folder: str, command: Sequence[str]) -> list:
    """Start a launcher on each of the named hosts, and record its ranks."""
    command = [*DISTKIT, "trace", "--out", folder, "--", *command]
    return [hosts.popen(host, command, env=environment(hosts)) for host in names]


def torchrun(hosts: Laboratory, folder: str) -> list:
    """Start torchrun on each host, with two ranks."""
    rendezvous = f"--rdzv-endpoint={hosts.address('alpha')}:29500"
    nodes = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", rendezvous]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "train.py"]
    return start(hosts, ["alpha", "beta"], folder, command)


def srun(hosts: Laboratory, folder: str) -> list:
    """Start srun on the head, with one rank on each host."""
    start_slurm(hosts)
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "train.py"]
    return start(hosts, ["head"], folder, command)


def check_trace(folder: str, ranks: int) -> None:
    """Check the trace's hosts, clock offset, messages and collectives."""
    trace = Trace.load(folder)
    assert trace.ranks == [*range(ranks)]
    assert {rank.host for rank in trace.info.ranks.values()} == {"alpha", "beta"}
    clocks, first = trace.info.clocks, trace.info.ranks[0].host
    other = clocks["beta" if first == "alpha" else "alpha"]
    ahead = SKEW if first == "alpha" else -SKEW
    assert abs(other.ahead - ahead) <= other.error < 0.05
    assert len(trace.messages) == 10
    assert all(m.sent < m.received for m in trace.messages)
    assert len(trace.collectives) == 20
    for spans in trace.collectives:
        assert max(s.start for s in spans) < min(s.end for s in spans)
    assert trace.diagnose() == []


LAUNCHERS = [
    pytest.param(torchrun, 4, id="torchrun"),
    pytest.param(srun, 2, id="srun", marks=needs("slurmctld", "slurm-wlm")),
]


@pytest.mark.parametrize(("launch", "ranks"), LAUNCHERS)
def test_clocks_of_two_hosts_are_aligned(hosts: Laboratory, launch, ranks: int) -> None:
    assert {p.wait(TIMEOUT) for p in launch(hosts, launch.__name__)} == {0}
    check_trace(launch.__name__, ranks)


@pytest.mark.skipif(not shutil.which("ompi_info"), reason="Open MPI is not installed")
def test_mpiexec_run_is_recorded(hosts: Laboratory) -> None:
    local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpiexec", *as_root, "--oversubscribe", "-n", "2", sys.executable, "train.py"]
    command = [*DISTKIT, "trace", "--out", "mpi", "--", *command]
    completed = subprocess.run(
        command, env=environment(hosts) | local, timeout=TIMEOUT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    trace = Trace.load("mpi.gz")
    assert (trace.ranks, len(trace.collectives)) == ([0, 1], 20)
