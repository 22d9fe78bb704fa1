"""How much memory the processes of a four-rank cluster take: the sum of their PSS.

PSS (proportional set size) shares each page among the processes that map it, so that what
forked ranks share counts once. Linux only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import starters
from benchmarks.driver import Driver
from benchmarks.figure import Figure, figure
from distkit.errors import DistkitError

#: From the first all_reduce until memory is read, so that starting up has ended [s].
SETTLE = 1.0


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """PSS and number of the processes that a driver started, the driver itself not counted."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise DistkitError("bench memory reads /proc/PID/smaps_rollup, which Linux has (>= 4.14).")
    tables: dict[str, list[list[dict[str, Any]]]] = {"distkit": [], "stock": []}
    for i in range(reps):
        for name, program in (("distkit", starters.READY), ("stock", starters.STOCK)):
            say(f"memory: {name}, {i + 1} of {reps}")
            tables[name].append(_processes(program))
    sums = {
        name: [sum(p["pss_mb"] for p in table) for table in found] for name, found in tables.items()
    }
    counts = {name: [float(len(table)) for table in found] for name, found in tables.items()}
    stock = "stock ipyparallel.Cluster(n=4)"
    figures = [
        figure(
            "memory (PSS) of the processes of Cluster(4)",
            "MB",
            sums["distkit"],
            stock,
            sums["stock"],
            must=0.5,
            aim=0.35,
        ),
        figure("processes of Cluster(4)", "processes", counts["distkit"], stock, counts["stock"]),
    ]
    return figures, {"processes": {name: found[-1] for name, found in tables.items()}}


def _processes(program: str) -> list[dict[str, Any]]:
    """A table of the processes below a driver that has done its first all_reduce."""
    with Driver(program) as driver:
        driver.ask()
        time.sleep(SETTLE)
        below = psutil.Process(driver.process.pid).children(recursive=True)
        return [
            {
                "pid": p.pid,
                "parent": p.ppid(),
                "pss_mb": pss(p.pid) / 1e6,
                "command": " ".join(p.cmdline()[1:])[:80],
            }
            for p in below
        ]


def pss(pid: int) -> int:
    """Proportional set size of a process [bytes]."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise DistkitError(f"/proc/{pid}/smaps_rollup has no line with Pss.")
