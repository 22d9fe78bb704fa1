"""Ranks on the three hosts of a laboratory, which are Linux namespaces.

The laboratory's head node runs ``python -m benchmarks.hosts JOB``, which prints JSON.
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

from benchmarks.driver import Log, Samples, interleave, open_mpi_environ
from benchmarks.figure import Figure, fill
from distkit.errors import LaboratoryError

if TYPE_CHECKING:
    from distkit_hosts.laboratory import Laboratory

HOSTS = ("alpha", "beta", "gamma")
EACH = dict.fromkeys(HOSTS, 2)
ROOT = Path(__file__).resolve().parents[1]

#: SKEW is the offset of beta's clock, and EXIT_GRACE is the time in which processes must exit [s].
SKEW, EXIT_GRACE = 5, 5.0

#: RATE limits the bandwidth of each host in each direction. An all-reduce of REDUCED bytes is
#: repeated TIMES times.
RATE, REDUCED, TIMES = "100mbit", 1 << 22, 7

#: Substrings of the command lines of a cluster's processes.
_OURS = ("distkit_hosts.remote.agent", "distkit.imports", "ipyparallel")

FIGURES = {
    "start_distkit / start_ipyparallel": Figure(
        "from the start of 3 x 2 ranks over SSH to the first all_reduce",
        "s",
        reference="ipyparallel SSH cluster, torch, gloo",
        limit=0.5,
        target=0.25,
    ),
    "hang": Figure(
        "from the start of a program that hangs on 3 hosts to its error",
        "s",
        absolute=True,
        limit=2.0,
        target=0.5,
    ),
    "partition": Figure(
        "from a silent partition to its error", "s", absolute=True, limit=5.0, target=2.0
    ),
    "left": Figure(
        f"processes left {EXIT_GRACE:.0f} s after the kernel was killed or a link was cut",
        "processes",
        absolute=True,
        limit=0,
    ),
    "hierarchical / gloo": Figure(
        f"all-reduce of 4 MB, 3 x 2 ranks over {RATE}, shared_memory",
        "s",
        reference="gloo's ring",
        limit=1 / 1.3,
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Measure all figures; if a laboratory cannot be created, report the reason instead."""
    try:
        samples = _measure(reps, log)
    except LaboratoryError as error:
        return fill(FIGURES, {}, note=f"not measured: {error}"), {}
    return fill(FIGURES, samples), samples


def _measure(reps: int, log: Log) -> Samples:
    """Time starts, kills, cut links, hangs, and all-reduces."""
    samples = interleave(
        "hosts: start",
        reps,
        log,
        lambda: _measure_start("start_distkit"),
        lambda: _measure_start("start_ipyparallel"),
    )
    for rep in range(reps):
        for fault in ("kill", "cut"):
            log(f"hosts: {fault}, {rep + 1} of {reps}")
            for name, value in _measure_fault(fault).items():
                samples.setdefault(name, []).append(value)
    with laboratory() as lab:
        samples["hang"] = [line["seconds"] for line in run_job(lab, "measure_hangs")]
        for host in HOSTS:
            lab.slow(host, RATE)
        log("hosts: limited bandwidth")
        samples |= run_job(lab, "measure_all_reduce")[0]
    samples["left"] = [sum(samples["left"])]  # the limit applies to all trials together
    return samples


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    """Create three hosts with SSH access to each other, one with a skewed clock."""
    from distkit_hosts.laboratory import Laboratory

    with Laboratory(HOSTS, skew={"beta": SKEW}) as lab:
        lab.ssh()
        yield lab


def start_job(lab: Laboratory, job: str) -> subprocess.Popen[str]:
    """Start a job on the head node."""
    environ = open_mpi_environ()
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "companions")])
    command = [sys.executable, "-m", "benchmarks.hosts", job]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return lab.popen("head", command, cwd=ROOT, env=environ, **pipes)


def run_job(lab: Laboratory, job: str) -> list[dict[str, Any]]:
    """Run a job and return the lines of JSON that it printed."""
    out, _ = start_job(lab, job).communicate(timeout=300)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _measure_start(job: str) -> dict[str, float]:
    with laboratory() as lab:
        (line,) = run_job(lab, job)
    assert line["results"] == [6.0] * 6, line
    return {job: line["seconds"]}


def _measure_fault(fault: str) -> dict[str, float]:
    """Return the number of processes left after :data:`EXIT_GRACE` and the time to an error [s]."""
    with laboratory() as lab:
        job = start_job(lab, "run_until_killed")
        assert job.stdout is not None
        job.stdout.readline()
        began, times = time.monotonic(), {}
        if fault == "kill":
            job.kill()
        else:
            lab.cut("beta")
            ready, _, _ = select.select([job.stdout], [], [], EXIT_GRACE)
            reported = json.loads(job.stdout.readline())["at"] if ready else math.inf
            times["partition"] = reported - began
        while (remaining := _count_processes(lab, fault)) and time.monotonic() < began + EXIT_GRACE:
            time.sleep(0.05)
        job.kill()
        job.communicate()
    return {**times, "left": remaining}


def _count_processes(lab: Laboratory, fault: str) -> int:
    """Count the cluster's processes; those on the head node count only after a kill."""
    listings = [
        lab.run(host, ["ps", "-eo", "args"], capture_output=True, text=True).stdout
        for host in lab.hosts
        if host != "head" or fault == "kill"
    ]
    return sum(
        any(part in line for part in _OURS) for text in listings for line in text.splitlines()
    )


# -- jobs on the head node ------------------------------------------------------------------------


def print_json(**fields: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(fields), flush=True)


def total() -> float:
    """Return the result of an all-reduce, which is the number of ranks."""
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def start_distkit() -> None:
    """Start a distkit cluster and run its first all-reduce."""
    began = time.perf_counter()
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        results = cluster.run(total).results
        print_json(seconds=time.perf_counter() - began, results=results)


def start_ipyparallel() -> None:
    """Start an ipyparallel SSH cluster and run the first all-reduce with torch and gloo."""
    began = time.perf_counter()
    import ipyparallel
    from traitlets.config import Config

    config = Config()
    config.SSHEngineSetLauncher.engines = dict(EACH)
    config.SSHEngineSetLauncher.remote_python = sys.executable
    controller = _address("alpha")
    with ipyparallel.Cluster(
        n=6, engines="ssh", config=config, controller_ip=controller, controller_location=controller
    ) as client:
        client.wait_for_engines(6, timeout=180)
        address = client[:].apply_sync(_address, "head")[0]
        replies = [client[i].apply_async(_join, rank, address) for rank, i in enumerate(client.ids)]
        results = [reply.get() for reply in replies]
        print_json(seconds=time.perf_counter() - began, results=results)


def _address(target: str) -> str:
    """Return this host's address on the route to another host."""
    import socket  # the function also runs on an engine

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


def _join(rank: int, address: str) -> float:
    import os

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29511", rank=rank, world_size=6)
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def _reduce_forever() -> None:
    while True:
        total()


def run_until_killed() -> None:
    """Communicate until this process is killed or a host is lost."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        cluster.run(total)
        run = cluster.submit(_reduce_forever)
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


def measure_hangs() -> None:
    """Measure the time from starting a program that hangs to its error."""
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
    """Return the times of alternating all-reduces on the slowest rank [s]."""
    import torch
    import torch.distributed as dist

    import distkit as dk

    x = torch.ones(REDUCED // 4)

    def seconds(algorithm: Callable[[], AbstractContextManager[None]]) -> float:
        dist.barrier()
        began = time.perf_counter()
        with algorithm():
            dist.all_reduce(x)
        elapsed = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def round_of_calls() -> dict[str, float]:
        hierarchical = seconds(lambda: dk.algorithms.use_algorithm("shared_memory"))
        return {"hierarchical": hierarchical, "gloo": seconds(nullcontext)}

    round_of_calls()  # warm-up: opens connections
    return interleave("all-reduce", TIMES, lambda line: None, round_of_calls)


def measure_all_reduce() -> None:
    """Time all-reduces between the hosts."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        print_json(**cluster.run(_times).results[0])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
