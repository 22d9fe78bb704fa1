"""Ranks on other machines, simulated with the ipyparallel launcher "local"."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

import distkit as dk
from distkit import kvstore
from distkit.cluster import Run
from distkit.errors import ClusterError, DeadlockError, RankDied, RunError, StartError
from distkit.kvstore.transport.node import new_keys, open_socket
from distkit_hosts.remote.tunnel import Multiplexer, Tunnel
from tests.support.training import sum_over_ranks
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(3, engines="local") as cluster:
        yield cluster


def hang() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def agent_of(cluster: dk.Cluster) -> psutil.Process:
    return psutil.Process(cluster._supervisor.hosts[0].server.facts["pid"])


def test_runs_hangs_and_crashes_behave_as_on_one_machine(cluster: dk.Cluster) -> None:
    assert cluster.run(sum_over_ranks).results == [6.0, 6.0, 6.0]
    with pytest.raises(DeadlockError, match="rank 0 waits in recv"):
        cluster.run(hang)
    with pytest.raises(RankDied, match="rank 1"):
        cluster.run(die)
    assert cluster.run(sum_over_ranks).results == [6.0, 6.0, 6.0]


def test_kill_ends_the_named_process(cluster: dk.Cluster) -> None:
    run = cluster.submit(time.sleep, 60)
    pids = {row[0]: row[2] for row in cluster.status().rows}
    cluster.kill("rank 2")
    assert not psutil.pid_exists(pids["rank 2"])
    with pytest.raises(RankDied, match="process of rank 2 exited"):
        run.wait(30)
    assert cluster.run(sum_over_ranks).results == [6.0, 6.0, 6.0]
    with pytest.raises(ClusterError, match="'rank 3' does not exist"):
        cluster.kill("rank 3")


def test_stepping_and_cells_work_on_hosts(cluster: dk.Cluster) -> None:
    assert cluster.step(sum_over_ranks).next(rank=0).finish().results == [6.0, 6.0, 6.0]
    run = cluster.execute("rank + world_size")
    assert isinstance(run, Run)
    assert run.results == [3, 4, 5]


def test_large_results_arrive_while_ranks_print(cluster: dk.Cluster) -> None:
    def print_and_return() -> torch.Tensor:
        print("x" * 1_000_000)
        return torch.full((3_000_000,), dist.get_rank())

    run = cluster.run(print_and_return)
    assert [int(x.sum()) for x in run.results] == [0, 3_000_000, 6_000_000]
    assert [len(run.output[rank]) for rank in range(3)] == [1_000_001] * 3


def test_cluster_uses_the_given_port_and_stops_all_processes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        chosen = f"127.0.0.1:{port}"
        with (
            pytest.raises(StartError, match=f"{port}: Address already in use.*a free port"),
            dk.Cluster(1, engines="local", interface=chosen) as cluster,
        ):
            cluster.wait()
    with dk.Cluster(1, engines="local", interface=chosen) as cluster:
        assert cluster.run(sum_over_ranks).results == [1.0]
        agent = agent_of(cluster)
        assert {c.raddr.port for c in agent.net_connections("tcp") if c.raddr} == {port}
        processes = [agent, *agent.children(recursive=True)]
        folder = cluster._supervisor.hosts[0].folder
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    wait_until(lambda: not Path(folder).exists())


def test_lost_machine_is_reported_and_its_ranks_end() -> None:
    with dk.Cluster(2, engines="local") as cluster:
        cluster.run(sum_over_ranks)
        agent = agent_of(cluster)
        descendants = agent.children(recursive=True)
        agent.kill()
        with pytest.raises((RunError, StartError), match=f"{socket.gethostname()} is lost"):
            cluster.run(sum_over_ranks)
        _, alive = psutil.wait_procs(descendants, timeout=10)
        assert not alive


KERNEL = """
import sys, distkit as dk
cluster = dk.Cluster(2, engines="local")
cluster.wait()
print(cluster._supervisor.hosts[0].server.facts["pid"], flush=True)
sys.stdin.read()
"""


def test_ranks_end_when_their_kernel_is_killed() -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert kernel.stdout is not None
    agent = psutil.Process(int(kernel.stdout.readline()))
    processes = [agent, *agent.children(recursive=True)]
    kernel.kill()
    kernel.communicate()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def push_once() -> float:
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(1))
    kv.push("w", torch.ones(1))
    return kv.pull("w").item()


OTHER_OWNER = """
import sys, ipyparallel
cluster = ipyparallel.Cluster(n=2, engines="local")
with cluster:
    print(cluster.cluster_file, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def existing_cluster() -> Iterator[ipyparallel.Cluster]:
    """An ipyparallel cluster started by another process, which exits with this one."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        yield ipyparallel.Cluster.from_file(cluster_file=owner.stdout.readline().strip())


def test_ranks_run_in_an_existing_ipyparallel_cluster(
    existing_cluster: ipyparallel.Cluster,
) -> None:
    with (
        existing_cluster.connect_client_sync() as client,
        dk.Cluster.attach(client, servers=1) as cluster,
    ):
        assert cluster.run(sum_over_ranks).results == [3.0, 3.0]
        assert cluster.run(push_once).results == [2.0, 2.0]
        cluster.stop()
        assert client[:].apply_sync(lambda: 1) == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": "slurmm"}, "not an ipyparallel launcher"),
        ({"engines": "local", "acount": "x"}, "'acount' is not an option"),
        ({"engines": "mpi", "mpi_cmd": ["no-mpiexec"]}, "no-mpiexec is not installed here"),
        ({"engines": "local", "device": "cuda:99"}, r"on \S+: device='cuda:99'"),
        ({"engines": "local", "engine_cmd": ["sh", "-c", "echo lost; exit 3"]}, "lost"),
    ],
)
def test_failed_start_reports_the_cause(options: dict[str, object], message: str) -> None:
    with pytest.raises(StartError, match=message), dk.Cluster(**options) as cluster:  # type: ignore[arg-type]
        cluster.wait()


# -- the tunnel ------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Tunnel, Tunnel, Multiplexer]]:
    """Both ends of a tunnel, and the multiplexer of the listening end."""
    keys, accepted = new_keys(), list[Tunnel]()
    server = Multiplexer("tcp://127.0.0.1:*", keys, listen=True, accept=accepted.append)
    client = Multiplexer(server.endpoint, keys, listen=False)
    tunnel = client.connect()
    server.start()
    client.start()
    tunnel.send("hello")
    wait_until(lambda: accepted)
    yield accepted[0], tunnel, server
    client.close()
    server.close()


def test_clients_with_unknown_keys_are_rejected(ends: tuple[Tunnel, Tunnel, Multiplexer]) -> None:
    _, _, server = ends
    stranger = open_socket(zmq.Context.instance(), zmq.DEALER, new_keys())
    rejected = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    with stranger, rejected:
        stranger.connect(server.endpoint)
        stranger.send_multipart([b"data"])
        assert rejected.poll(10_000)
    assert len(server.tunnels) == 1
