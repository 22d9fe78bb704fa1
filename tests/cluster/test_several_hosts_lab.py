"""The trace of a run on laboratory hosts, one of which has a wrong clock."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from laboratories import laboratory

import distkit as dk
from distkit_hosts.laboratory.starting import PATH

JOB = """
import sys
import distkit as dk, torch, torch.distributed as dist

def chat():
    x, rank = torch.ones(2), dist.get_rank()
    ring = [0, 2, 3]
    for _ in range(40):
        dist.barrier()
        if rank in ring:
            place = ring.index(rank)
            if place:
                dist.recv(x, ring[place - 1])
            dist.send(x, ring[(place + 1) % 3])
            if not place:
                dist.recv(x, ring[-1])
    total = torch.arange(100_000.0) + rank
    with dk.algorithms.use_algorithm("auto"):
        dist.all_reduce(total)
    return torch.equal(total, 4 * torch.arange(100_000.0) + 6)

with dk.Cluster(hosts={"alpha": 3, "beta": 1}) as cluster:
    run = cluster.run(chat)
    assert run.results == [True] * 4
    run.trace.save(sys.argv[1])
"""


@pytest.mark.skipif(not shutil.which("sshd", path=PATH), reason="there is no sshd here")
def test_messages_between_hosts_are_in_order_within_the_error_of_clocks(tmp_path: Path) -> None:
    saved = tmp_path / "run.trace"
    with laboratory(["alpha", "beta"], skew={"beta": 5}, shared=[tmp_path]) as lab:
        lab.ssh()
        tmp_path.joinpath("job.py").write_text(JOB)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, tmp_path / "job.py", saved]
        ran = lab.run("head", command, capture_output=True, text=True, timeout=120, env=environ)
    assert ran.returncode == 0, ran.stderr
    trace = dk.Trace.load(saved)

    assert trace.hosts == {0: "alpha", 1: "alpha", 2: "alpha", 3: "beta"}
    clock = trace.info.clocks["beta"]
    assert abs(clock.ahead - 5) <= 2 * clock.error < 0.1
    assert all(m.sent < m.received + clock.error for m in trace.messages)
    barriers = [c for c in trace.collectives if c[0].op == "barrier"]
    assert len(barriers) == 40
    assert all(max(s.start for s in c) < min(s.end for s in c) + clock.error for c in barriers)
    # 40 times round of 8 bytes; and between the leaders, 2 times half of 400 kB
    assert trace.host_traffic == {
        ("alpha", "alpha"): (40, 320),
        ("alpha", "beta"): (42, 320 + 400_000),
        ("beta", "alpha"): (42, 320 + 400_000),
    }
