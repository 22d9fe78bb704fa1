"""How much memory the processes of a four-rank cluster take: the sum of their PSS.

PSS (proportional set size) divides each page by the number of processes that map it, so that what
forked ranks share counts once. Linux only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.driver import Driver, Say, take_turns
from benchmarks.figure import Figure, fill
from benchmarks.start import FIRST, STOCK
from distkit.errors import DistkitError

#: From the first all_reduce until memory is read [s].
SETTLE = 1.0

#: A cluster that is idle, and then runs.
CLUSTER = (
    FIRST
    + """
def often():
    import torch, torch.distributed as dist
    while True:
        dist.all_reduce(torch.ones(1000))

asked()
cluster = distkit.Cluster(4)
cluster.run(first)
answer("idle")
asked()
run = cluster.submit(often)
while len(run.trace) < 100:
    time.sleep(0.01)
answer("running")
asked()
cluster.interrupt()
"""
)

_STOCK = "stock ipyparallel.Cluster(n=4)"

FIGURES = {
    "idle / stock": Figure(
        "memory (PSS) of the processes of an idle Cluster(4)",
        "MB",
        reference=_STOCK,
        must=0.5,
        aim=0.35,
    ),
    "running / idle": Figure(
        "memory (PSS) of the processes of a running Cluster(4)", "MB", reference="the idle one"
    ),
    "processes / stock processes": Figure("processes of Cluster(4)", "processes", reference=_STOCK),
}


def measure(reps: int, say: Say) -> tuple[list[Figure], dict[str, Any]]:
    """PSS and number of the processes that a driver started, the driver itself not counted."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise DistkitError("bench memory reads /proc/PID/smaps_rollup, which Linux has (>= 4.14).")
    samples = take_turns("memory", reps, say, _ours, _stock)
    return fill(FIGURES, samples), samples


def _ours() -> dict[str, float]:
    with Driver(CLUSTER) as driver:
        idle = _below(driver)
        running, _ = _below(driver)
    return {"idle": idle[0], "processes": idle[1], "running": running}


def _stock() -> dict[str, float]:
    with Driver(STOCK) as driver:
        return dict(zip(("stock", "stock processes"), _below(driver), strict=True))


def _below(driver: Driver) -> tuple[float, float]:
    """Memory [MB] and number of the processes below a driver at its next answer."""
    driver.ask()
    time.sleep(SETTLE)
    below = psutil.Process(driver.process.pid).children(recursive=True)
    return sum(pss(p.pid) for p in below) / 1e6, len(below)


def pss(pid: int) -> int:
    """Proportional set size of a process [bytes]."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise DistkitError(f"/proc/{pid}/smaps_rollup has no line with Pss.")
