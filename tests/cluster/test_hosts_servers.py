"""Parameter servers on two simulated hosts, including crashes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import waiting
import zmq

import distkit as dk
from distkit import kvstore
from distkit.kvstore.transport.connection import RemoteConnection
from tests.support.kvstore_nodes import LARGE, push_until_stopped
from tests.support.laboratories import laboratory, needs
from tests.support.machines import ALPHA, BETA, two_machines

wait_until = partial(waiting.wait_until, timeout=60)

needs_sshd = needs("sshd", "openssh-server")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    """Workers 0 and 1 and server 0 on one machine; worker 2 and server 1 on the other."""
    with two_machines(2, 1, servers=2) as cluster:
        yield cluster


def push_ones(mode: str, dying_rank: int | None = None, **options) -> float:
    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init(["w", "large"], [torch.zeros(4), torch.zeros(LARGE)])
    for n in range(20):
        kv.pushpull(["w", "large"], [torch.ones(4), torch.ones(LARGE)])
        if n == 9 and kv.rank == dying_rank:
            os.kill(os.getpid(), signal.SIGKILL)
    kv.barrier()
    small, large = kv.pull(["w", "large"])
    assert large.unique().tolist() == [small[0].item()]
    return small[0].item()


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_workers_push_to_servers_on_both_machines(cluster, mode: str) -> None:
    before = time.monotonic()
    run = cluster.run(push_ones, mode)
    assert run.results == [60.0] * 3
    hosts = {about.name: about.host for about in run.trace.info.ranks.values()}
    assert [hosts[n] for n in ("server 0", "server 1", "scheduler")] == [ALPHA, BETA, ALPHA]
    assert {event.rank for event in run.trace.events} == set(range(6))
    assert all(before - 1 < e.time < time.monotonic() + 1 for e in run.trace.events)


def test_worker_is_replaced_on_its_machine(cluster) -> None:
    def die_once(flag: str) -> float:
        kv = kvstore.create("dist_sync", on_crash="replace")
        kv.set_optimizer(kvstore.SGD(learning_rate=-1))
        kv.init("w", torch.zeros(4))
        if kv.rank == 2 and not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push("w", torch.ones(4))
        return kv.pull("w")[0].item()

    flag = Path(cluster._supervisor.folder, "died")
    with pytest.warns(dk.errors.CommunicationWarning, match="was replaced"):
        run = cluster.run(die_once, str(flag))
    assert run.results == [3.0] * 3 and flag.exists()


def test_backup_server_takes_over(cluster, tmp_path) -> None:
    started, stop = tmp_path / "started", tmp_path / "stop"
    run = cluster.submit(push_until_stopped, str(started), str(stop), replication=2)
    wait_until(started.exists)
    cluster.kill("server 0")
    stop.touch()
    with pytest.warns(dk.errors.CommunicationWarning, match=r"exited during push_until_stopped"):
        assert run.wait(60).results == [0.0] * 3
    assert [r.name for r in run.trace.info.replaced] == ["server 0"]
    assert cluster.run(push_ones, "dist_sync", replication=2).results == [60.0] * 3


def remote_addresses(mode: str) -> list[str]:
    """Return the addresses of the other machines that this worker is connected to."""
    kv = kvstore.create(mode)
    kv.barrier()
    connections = kv._requests._link._connections
    remote = [c for c in connections.values() if isinstance(c, RemoteConnection)]
    endpoints = [c._sock.getsockopt_string(zmq.LAST_ENDPOINT) for c in remote]
    return sorted({end.split(":")[1] for end in endpoints})


def pass_around() -> None:
    """Pass a tensor around the ring of workers 20 times, each time after a barrier."""
    x, rank = torch.ones(2), dist.get_rank()
    for _ in range(20):
        dist.barrier()
        if rank:
            dist.recv(x, rank - 1)
        dist.send(x, (rank + 1) % 3)
        if not rank:
            dist.recv(x, 2)


@needs_sshd
def test_servers_run_on_laboratory_hosts(tmp_path) -> None:
    """Laboratory hosts have separate networks, clocks and process ids."""
    with (
        laboratory(["alpha", "beta"], shared=[tmp_path], skew={"beta": 5}) as lab,
        dk.Cluster(hosts={"alpha": 2, "beta": 1}, servers=2, **lab.options()) as cluster,
    ):
        alpha, beta = f"//{lab.address('alpha')}", f"//{lab.address('beta')}"
        assert cluster.run(remote_addresses, "dist_sync").results == [[beta], [beta], [alpha]]
        before = time.monotonic()
        run = cluster.run(push_ones, "dist_sync")
        assert run.results == [60.0] * 3
        assert all(before - 1 < e.time < time.monotonic() + 1 for e in run.trace.events)
        trace = cluster.run(pass_around).trace
        clock = trace.info.clocks["beta"]
        assert abs(clock.ahead - 5) <= 2 * clock.error < 0.1
        assert all(m.sent < m.received + clock.error for m in trace.messages)
        assert trace.host_traffic[("alpha", "beta")] == (20, 160)
        started, stop = tmp_path / "started", tmp_path / "stop"
        run = cluster.submit(push_until_stopped, str(started), str(stop), replication=2)
        wait_until(started.exists)
        cluster.kill("server 1")
        stop.touch()
        with pytest.warns(dk.errors.CommunicationWarning, match="exited during push_until_stopped"):
            assert run.wait(60).results == [0.0] * 3
        assert cluster.run(push_ones, "dist_sync").results == [60.0] * 3
