"""What is left 5 s after the process that made a cluster was killed: processes and folders."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import starters
from benchmarks.driver import Driver, marked
from benchmarks.figure import Figure, figure

#: How many clusters live at once, and how long they get after the kill [s].
TOGETHER, WITHIN = 4, 5.0


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Kill ``reps`` drivers of a ready Cluster(4), and one of stock ipyparallel."""
    processes: list[float] = []
    folders: list[bool] = []
    for done in range(0, reps, TOGETHER):
        batch = min(TOGETHER, reps - done)
        say(f"orphans: {done + 1} to {done + batch} of {reps}")
        for left, folder in _kill([starters.READY] * batch):
            processes.append(left)
            folders.append(folder)
    say("orphans: stock ipyparallel")
    stock = [float(left) for left, _ in _kill([starters.STOCK])]
    name = f"left {WITHIN:.0f} s after SIGKILL of the kernel, all of {reps} trials"
    limits: dict[str, Any] = {"must": 0, "aim": 0, "absolute": True}
    reference = "one trial of stock ipyparallel.Cluster(n=4)"
    return [
        figure(f"processes {name}", "processes", [sum(processes)], reference, stock, **limits),
        figure(f"folders {name}", "folders", [float(sum(folders))], **limits),
    ], {"processes": processes, "folders": folders, "stock": stock}


def _kill(texts: list[str]) -> list[tuple[int, bool]]:
    """Start drivers, kill them once all are ready; what each has left: processes, its folder."""
    with ExitStack() as stack:
        drivers = [stack.enter_context(Driver(text)) for text in texts]
        answers = [driver.ask() for driver in drivers]
        for driver in drivers:
            driver.process.kill()
            driver.process.wait()
        time.sleep(WITHIN)
        return [
            (len(marked(driver.mark)), isinstance(folder, str) and Path(folder).exists())
            for driver, folder in zip(drivers, answers, strict=True)
        ]
