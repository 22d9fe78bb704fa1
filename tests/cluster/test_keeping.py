"""Clusters that stay when their kernel ends: found again with all they had, and gone in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from laboratories import laboratory, needs, say
from waiting import alive, until

import distkit as dk
from distkit import kvstore
from distkit.cli import main
from distkit.cluster.processes import door
from distkit.errors import StartError

ROOT = Path(__file__).parents[2]

#: A kernel: makes a cluster with arguments in JSON, uses it as it is told, and says who is there.
KERNEL = """
import json, os, sys
import psutil, torch, torch.distributed as dist
import distkit as dk

def goes_on():
    x = torch.ones(1)
    while True:
        dist.all_reduce(x)
        x.fill_(1)

options, use = json.loads(sys.argv[1]), sys.argv[2]
cluster = dk.Cluster(**options)
cluster.execute("kept = [10 * rank]")
if use == "runs":
    run = cluster.submit(goes_on)
    while len(run.trace.events) < 60:
        pass
elif use == "steps":
    cluster.step(goes_on).next()
room = cluster._room
everybody = psutil.Process().children(recursive=True)
print(json.dumps([room.folder, [p.pid for p in everybody]]), flush=True)
if use != "exits":
    sys.stdin.read()
"""

#: The one after it.
NEXT = """
import json, sys, warnings
import distkit as dk
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    cluster = dk.Cluster.attach(sys.argv[1])
seen = cluster.execute("kept").results, [str(w.message) for w in said]
hosts = [row[1] for row in cluster.status().rows]
cluster.stop()
print(json.dumps([*seen, hosts]))
"""


def total() -> float:
    x = torch.ones(2)
    dist.all_reduce(x)
    return x[0].item()


def push() -> float:
    store = kvstore.create("dist_sync")
    store.init("w", torch.zeros(2))
    store.push("w", torch.ones(2))
    out = torch.zeros(2)
    store.pull("w", out=out)
    return out[0].item()


class Kernel:
    """A process with a cluster that is kept."""

    def __init__(self, use: str = "idles", **options: Any) -> None:
        self.name = options.setdefault("name", f"test-{uuid.uuid4().hex[:8]}")
        told = json.dumps({"ranks": 2, "device": "cpu", "keep": "10min"} | options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, told, use], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, "the kernel has failed"
        self.folder, pids = json.loads(said)
        self.everybody = [psutil.Process(pid) for pid in pids]

    def kill(self) -> None:
        """End it, as the kernel's restarter may."""
        self.process.kill()
        self.process.communicate()

    def left(self) -> list[psutil.Process]:
        """Those of its processes that are there."""
        return [p for p in self.everybody if alive(p)]

    def gone(self) -> bool:
        """True if nothing is left."""
        return not (Path(self.folder).exists() or self.left())


@pytest.fixture
def kernel() -> Iterator[Callable[..., Kernel]]:
    made: list[Kernel] = []

    def make(use: str = "idles", **options: Any) -> Kernel:
        made.append(Kernel(use, **options))
        return made[-1]

    yield make
    for one in made:
        one.kill()
        if (kept := door.named(one.name)) is not None:
            door.end(kept)
        until(one.gone, 30)


@pytest.mark.parametrize("where", [{}, {"engines": "local"}], ids=["here", "behind a tunnel"])
def test_a_killed_kernels_ranks_and_variables_stay(
    where: dict[str, str], kernel: Callable[..., Kernel], capsys: pytest.CaptureFixture[str]
) -> None:
    before = kernel("runs", **where)
    assert main(["clusters"]) == 0
    told = rf"{before.name} +2 ranks +its kernel is process {before.process.pid} on"
    assert re.search(told, capsys.readouterr().out)
    with pytest.raises(StartError, match=rf"another kernel.*process {before.process.pid} on"):
        dk.Cluster.attach(before.name)
    before.kill()
    with pytest.warns(UserWarning, match="goes_on was interrupted on all ranks; the kernel that"):
        cluster = dk.Cluster.attach(before.name)
    assert not any(row[2] not in [p.pid for p in before.everybody] for row in cluster.status().rows)
    assert "stays for 10 min without a kernel" in repr(cluster)
    assert dk.Cluster.attach(before.name) is cluster
    interrupted = cluster.interrupted
    assert interrupted is not None
    assert len(interrupted.trace.events) > 60  # of the latest, in the black boxes
    run = cluster.execute("kept")
    assert isinstance(run, dk.Run)
    assert run.results == [[0], [10]]
    assert cluster.run(total).results == [2.0, 2.0]
    assert cluster.step(total).next().finish().results == [2.0, 2.0]
    with pytest.raises(dk.DeadlockError, match="rank 0"):
        cluster.run(hang)
    end(cluster, "rank 1")
    assert cluster.run(total).results == [2.0, 2.0]
    cluster.stop()
    until(before.gone, 30)
    assert before.name not in [one.name for one in door.kept()]


def end(cluster: dk.Cluster, name: str) -> None:
    def found() -> tuple[int, str]:
        return next((row[2], row[4]) for row in cluster.status().rows if row[0] == name)

    pid, state = found()
    cluster.kill(name)
    until(lambda: found()[0] != pid and found()[1] == state, 30)


def hang() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.barrier()


def test_a_stepped_run_servers_and_a_rank_that_ends_meanwhile(
    kernel: Callable[..., Kernel],
) -> None:
    before = kernel("steps", servers=1)
    before.kill()
    kept = door.named(before.name)
    assert kept is not None and kept.left is not None and 300 < kept.left <= 600
    with pytest.warns(UserWarning, match="goes_on was interrupted"):
        cluster = dk.Cluster.attach(before.name)
    assert [row[4] for row in cluster.status().rows] == ["idle", "idle", "serving", "serving"]
    assert cluster.run(total).results == [2.0, 2.0]
    pids = [row[2] for row in cluster.status().rows]
    del cluster  # the next one may have it
    until(lambda: "no kernel" in door.find(before.name).standing, 30)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pids[1]), 30)
    with pytest.warns(UserWarning, match="rank 1 ended while there was no kernel"):
        cluster = dk.Cluster.attach(before.name)
    now = [row[2] for row in cluster.status().rows]
    assert now[0] == pids[0] and now[1] != pids[1] and now[2:] == pids[2:]
    run = cluster.execute("globals().get('kept')")
    assert isinstance(run, dk.Run)
    assert run.results == [[0], None]
    assert cluster.run(push).results == [2.0, 2.0]
    end(cluster, "server 0")
    assert cluster.run(push).results == [2.0, 2.0]


@pytest.mark.parametrize("where", [{}, {"engines": "local"}], ids=["here", "behind a tunnel"])
def test_when_the_time_is_over_nothing_is_left(
    where: dict[str, str], kernel: Callable[..., Kernel]
) -> None:
    before = kernel("exits", keep=1.0, **where)
    assert before.process.wait(30) == 0
    until(before.gone, 30)


def test_names_and_the_command(
    kernel: Callable[..., Kernel], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartError, match="is of a cluster that is kept: say how long, keep='1h'"):
        dk.Cluster(2, name="mine")
    before = kernel()
    with pytest.raises(StartError, match=f"{before.name}.*is kept already.*distkit clusters"):
        dk.Cluster(2, keep="1h", name=before.name)
    with pytest.raises(StartError, match=f"Clusters that are kept on.*'{before.name}'"):
        dk.Cluster.attach("unknown")
    before.kill()
    assert main(["clusters", "--stop", before.name]) == 0
    until(before.gone, 30)
    assert main(["clusters", "--stop", before.name]) == 1
    assert "that is kept. Clusters that are kept on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("keep", ["soon", -1, 0, "0h", True, "1 year", float("nan"), "-1h"])
def test_a_time_that_is_none(keep: Any) -> None:
    with pytest.raises(StartError, match=r"keep=.*keep='1h', '90min' or '2d', or a number"):
        dk.Cluster(2, keep=keep)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"hosts": {"alpha": 1, "beta": 1}}, marks=needs("sshd", "openssh-server")),
        pytest.param(
            {"ranks": 2, "engines": "slurm", "options": "--ntasks-per-node=1"},
            marks=needs("slurmctld", "slurm-wlm"),
        ),
    ],
    ids=["ssh", "slurm"],
)
def test_machines_and_jobs_stay(where: dict[str, Any]) -> None:
    """The kernel is on one host, the ranks on two others, and tunnels between them."""
    told = {"keep": "10min", "name": "far", "device": "cpu"} | where
    with laboratory(["alpha", "beta"], shared=[ROOT]) as lab:
        (lab.slurm if "engines" in where else lab.ssh)()
        first = lab.popen(
            "head",
            [sys.executable, "-c", KERNEL, json.dumps(told), "runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert first.stdout is not None
        assert first.stdout.readline()
        first.kill()
        first.communicate()
        python = [sys.executable, "-c", NEXT, "far"]
        then = lab.run("head", python, capture_output=True, text=True)
        assert then.returncode == 0, then.stderr
        kept, said, hosts = json.loads(then.stdout.splitlines()[-1])
        assert kept == [[0], [10]] and hosts == ["alpha", "beta"]
        assert "goes_on was interrupted on all ranks" in said[0]

        until(lambda: "distkit.cluster" not in say(lab, "alpha", "ps -eo args"), 30)
        if "engines" in where:
            until(lambda: not say(lab, "head", "squeue --noheader"), 30)
