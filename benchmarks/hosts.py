"""Ranks on three machines, in a laboratory of hosts made of namespaces.

``python -m benchmarks.hosts JOB`` is what runs on the laboratory's head; it prints JSON.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.driver import Samples, Say, open_mpi_environ, take_turns
from benchmarks.figure import Figure, fill
from distkit.errors import LaboratoryError

if TYPE_CHECKING:
    from distkit_hosts.laboratory import Laboratory

HOSTS = ("alpha", "beta", "gamma")
EACH = dict.fromkeys(HOSTS, 2)
ROOT = Path(__file__).resolve().parents[1]

#: By how much beta's clock is ahead, and how long processes have to end [s].
SKEW, GONE = 5, 5.0

#: What each host sends at most, and receives at most; bytes that are reduced, and how often.
RATE, REDUCED, TIMES = "100mbit", 1 << 22, 7

#: What belongs to a cluster, in the command lines of processes.
_OURS = ("distkit.cluster.hosts.agent", "processes/boot.py", "ipyparallel")

FIGURES = {
    "ours / theirs": Figure(
        "3 x 2 ranks by SSH, to the first all_reduce",
        "s",
        reference="ipyparallel's SSH cluster, torch, gloo",
        must=0.5,
        aim=0.25,
    ),
    "hang": Figure("hang over 3 hosts, to its error", "s", absolute=True, must=2.0, aim=0.5),
    "partition": Figure("silent partition, to its message", "s", absolute=True, must=5.0, aim=2.0),
    "left": Figure(
        f"processes left {GONE:.0f} s after the kernel was killed, or a link cut",
        "processes",
        absolute=True,
        must=0,
    ),
    "hierarchical / gloo": Figure(
        f"hierarchical all-reduce of 4 MB, 3 x 2 ranks over {RATE}",
        "s",
        reference="gloo's own ring",
        must=1 / 1.3,
    ),
}


def measure(reps: int, say: Say) -> tuple[list[Figure], dict[str, Any]]:
    """All figures; none, and the reason, where there can be no laboratory."""
    try:
        samples = _samples(reps, say)
    except LaboratoryError as error:
        return fill(FIGURES, {}, note=f"not measured: {error}"), {}
    return fill(FIGURES, samples), samples


def _samples(reps: int, say: Say) -> Samples:
    """Starts in turn with ipyparallel's; kernels killed and links cut; hangs; all-reduces."""
    samples = take_turns(
        "hosts: start", reps, say, lambda: _start("ours"), lambda: _start("theirs")
    )
    for turn in range(reps):
        for how in ("kill", "cut"):
            say(f"hosts: {how}, {turn + 1} of {reps}")
            for name, value in _break(how).items():
                samples.setdefault(name, []).append(value)
    with laboratory() as lab:
        samples["hang"] = [line["seconds"] for line in run(lab, "hanging")]
        for host in HOSTS:
            lab.slow(host, RATE)
        say("hosts: slow lines")
        samples |= run(lab, "reducing")[0]
    samples["left"] = [sum(samples["left"])]  # one process of one trial is too many
    return samples


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    """Three hosts, one with a clock of its own, that let each other in."""
    from distkit_hosts.laboratory import Laboratory

    with Laboratory(HOSTS, skew={"beta": SKEW}) as lab:
        lab.ssh()
        yield lab


def begin(lab: Laboratory, job: str) -> subprocess.Popen[str]:
    """Start a job on the head."""
    environ = open_mpi_environ()
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "companions")])
    command = [sys.executable, "-m", "benchmarks.hosts", job]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return lab.popen("head", command, cwd=ROOT, env=environ, **pipes)


def run(lab: Laboratory, job: str) -> list[dict[str, Any]]:
    """The lines of a job."""
    out, _ = begin(lab, job).communicate(timeout=300)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _start(who: str) -> dict[str, float]:
    with laboratory() as lab:
        (line,) = run(lab, who)
    assert line["results"] == [6.0] * 6, line
    return {who: line["seconds"]}


def _break(how: str) -> dict[str, float]:
    """The processes left after :data:`GONE`; the seconds until the loss of a host is reported."""
    with laboratory() as lab:
        job = begin(lab, "working")
        assert job.stdout is not None
        job.stdout.readline()
        began, found = time.monotonic(), {}
        if how == "kill":
            job.kill()
        else:
            lab.cut("beta")
            ready, _, _ = select.select([job.stdout], [], [], GONE)
            at = json.loads(job.stdout.readline())["at"] if ready else math.inf
            found["partition"] = at - began
        while (left := _left(lab, how)) and time.monotonic() < began + GONE:
            time.sleep(0.05)
        job.kill()
        job.communicate()
    return {**found, "left": left}


def _left(lab: Laboratory, how: str) -> int:
    """What is left; the fork server of a living kernel is on the head."""
    listed = [
        lab.run(host, ["ps", "-eo", "args"], capture_output=True, text=True).stdout
        for host in lab.hosts
        if host != "head" or how == "kill"
    ]
    return sum(any(o in line for o in _OURS) for text in listed for line in text.splitlines())


# -- jobs on the head ------------------------------------------------------------------------------


def print_json(**fields: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(fields), flush=True)


def total() -> float:
    """One all-reduce; the sum is the number of ranks."""
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def ours() -> None:
    """Start, and the first all-reduce."""
    began = time.perf_counter()
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        results = cluster.run(total).results
        print_json(seconds=time.perf_counter() - began, results=results)


def theirs() -> None:
    """The same by hand: ipyparallel's own SSH cluster, torch, gloo."""
    began = time.perf_counter()
    import ipyparallel
    from traitlets.config import Config

    config = Config()
    config.SSHEngineSetLauncher.engines = dict(EACH)
    config.SSHEngineSetLauncher.remote_python = sys.executable
    here = _address("alpha")
    with ipyparallel.Cluster(
        n=6, engines="ssh", config=config, controller_ip=here, controller_location=here
    ) as client:
        client.wait_for_engines(6, timeout=180)
        address = client[:].apply_sync(_address, "head")[0]
        replies = [client[i].apply_async(_join, rank, address) for rank, i in enumerate(client.ids)]
        results = [reply.get() for reply in replies]
        print_json(seconds=time.perf_counter() - began, results=results)


def _address(towards: str) -> str:
    """This host's own address on the way to another."""
    import socket  # on an engine

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((towards, 9))
        return str(way.getsockname()[0])


def _join(rank: int, address: str) -> float:
    import os

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29511", rank=rank, world_size=6)
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def _for_ever() -> None:
    while True:
        total()


def working() -> None:
    """Work until it is killed, or a machine is lost."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        cluster.run(total)
        run = cluster.submit(_for_ever)
        print_json(working=True)
        try:
            run.wait()
        except dk.errors.RunError as error:
            print_json(at=time.monotonic(), error=str(error))


def _hang() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.barrier()


def hanging() -> None:
    """How long a hang lasts over three machines."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        cluster.run(total)
        for _ in range(5):
            began = time.monotonic()
            try:
                cluster.run(_hang)
            except dk.errors.DeadlockError as error:
                print_json(seconds=time.monotonic() - began, error=str(error))


def _times() -> Samples:
    """On each rank: seconds of all-reduces, in turn, until the last rank is done."""
    import torch
    import torch.distributed as dist

    import distkit as dk

    x = torch.ones(REDUCED // 4)

    def seconds(algorithm: Callable[[], AbstractContextManager[None]]) -> float:
        dist.barrier()
        began = time.perf_counter()
        with algorithm():
            dist.all_reduce(x)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    def turn() -> dict[str, float]:
        hierarchical = seconds(lambda: dk.algorithms.use_algorithm("shared_memory"))
        return {"hierarchical": hierarchical, "gloo": seconds(nullcontext)}

    turn()  # connections are made
    return take_turns("all-reduce", TIMES, lambda line: None, turn)


def reducing() -> None:
    """How long all-reduces take between the machines."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        print_json(**cluster.run(_times).results[0])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
