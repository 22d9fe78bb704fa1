"""Memory used by the processes of a four-rank cluster, measured as the sum of their PSS.

PSS (proportional set size) divides each page by the number of processes that map it, so memory
shared by forked ranks counts once. This needs Linux.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.driver import Driver, Log, interleave
from benchmarks.figure import Figure, fill
from benchmarks.start import FIRST, STOCK
from distkit.errors import DistkitError

#: Delay before each measurement [s].
SETTLE = 1.0

#: A cluster that is first idle and then running.
CLUSTER = (
    FIRST
    + """
def reduce_forever():
    import torch, torch.distributed as dist
    while True:
        dist.all_reduce(torch.ones(1000))

request()
cluster = distkit.Cluster(4)
cluster.run(first)
reply("idle")
request()
run = cluster.submit(reduce_forever)
while len(run.trace) < 100:
    time.sleep(0.01)
reply("running")
request()
cluster.interrupt()
"""
)

_STOCK = "stock ipyparallel.Cluster(n=4)"

FIGURES = {
    "idle / stock": Figure(
        "memory (PSS) of the processes of an idle Cluster(4)",
        "MB",
        reference=_STOCK,
        limit=0.5,
        target=0.35,
    ),
    "running / stock": Figure(
        "memory (PSS) of the processes of a running Cluster(4)", "MB", reference=_STOCK, limit=0.5
    ),
    "processes / stock processes": Figure(
        "processes of a running Cluster(4)", "processes", reference=_STOCK
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Measure the number and the PSS of the processes that a driver starts."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise DistkitError(
            "bench memory needs /proc/PID/smaps_rollup: run it on Linux 4.14 or later."
        )
    samples = interleave("memory", reps, log, _measure_distkit, _measure_ipyparallel)
    return fill(FIGURES, samples), samples


def _measure_distkit() -> dict[str, float]:
    with Driver(CLUSTER) as driver:
        idle, _ = _descendants(driver)
        running, processes = _descendants(driver)
    return {"idle": idle, "running": running, "processes": processes}


def _measure_ipyparallel() -> dict[str, float]:
    with Driver(STOCK) as driver:
        return dict(zip(("stock", "stock processes"), _descendants(driver), strict=True))


def _descendants(driver: Driver) -> tuple[float, float]:
    """Return the memory [MB] and the number of a driver's descendants at its next reply."""
    driver.request()
    time.sleep(SETTLE)
    processes = psutil.Process(driver.process.pid).children(recursive=True)
    return sum(pss(p.pid) for p in processes) / 1e6, len(processes)


def pss(pid: int) -> int:
    """Return the proportional set size of a process [bytes]."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise DistkitError(f"/proc/{pid}/smaps_rollup has no Pss line.")
