"""Kills every pair of a cluster's processes in every state, and checks what is left."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.driver import Driver, marked
from distkit.errors import DistkitError

_KERNEL = ("kernel", "fork server")
_ENGINES = ("controller", "worker 0", "worker 1")
_RANKS = ("worker 0", "worker 1", "server 0", "scheduler")

#: What a cluster does, and the processes it then has.
STATES = {
    "idle": _KERNEL,
    "running": (*_KERNEL, *_RANKS),
    "stepping": (*_KERNEL, *_RANKS),
    "running a cell": (*_KERNEL, "controller", *_RANKS),
    "after a cell": (*_KERNEL, *_ENGINES),
}
GAPS = (0.0, 0.01)

#: Time for everything to end [s], and for a kernel to reply [s]; the kernel's waits are shorter.
WITHIN, TIMEOUT = 5.0, 90.0


class Case(NamedTuple):
    """The processes to kill, the state of the cluster, and the time between both kills [s]."""

    first: str
    second: str
    state: str
    gap: float

    def __str__(self) -> str:
        return f"{self.first} and {self.second}, {self.state}, {self.gap * 1000:.0f} ms apart"


CASES = [
    Case(*pair, state, gap)
    for state, processes in STATES.items()
    for pair in itertools.combinations(processes, 2)
    for gap in GAPS
]

#: The kernel: runs one case after the other until it is killed.
KERNEL = '''
import tempfile, threading
os.environ["TMPDIR"] = tempfile.tempdir = {temporary!r}
import distkit
import psutil

WORK = """
def work(steps, flag):
    import subprocess, time
    import distkit, torch, torch.distributed as dist
    from distkit import kvstore
    if steps > 5:  # a killed rank's child must end, too
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    store = kvstore.create("dist_sync") if kvstore.current_node() else None  # a cell has no servers
    if store:
        store.init("w", torch.zeros(20_000))
    for step in range(steps):
        x = torch.ones(20_000)
        dist.all_reduce(x)
        distkit.algorithms.shared_memory_all_reduce(x)
        if store:
            store.push("w", x)
            store.pull("w", out=x)
        if step == 5 and dist.get_rank() == 0:
            open(flag, "w").close()
        time.sleep(0.005)
    return len(x)
"""
exec(WORK)
flag = f"{{folder}}/flag"

def until_working():
    while not os.path.exists(flag):
        time.sleep(0.01)
    os.remove(flag)

def attempt(do):
    try:
        do()
    except distkit.errors.DistkitError:
        pass
    except BaseException as error:
        return [f"{{type(error).__name__}}: {{error}}"]
    return []

def check(cluster):
    assert cluster.submit(work, 2, flag).wait(20).results == [20_000, 20_000]

def run_cell(cluster, steps):
    return attempt(lambda: cluster.execute(f"{{WORK}}\\nwork({{steps}}, {{flag!r}})"))

def started():  # the fork server of the ranks, and its parent
    (parent,) = psutil.Process().children()
    return parent, parent.children()[0]

while state := sys.stdin.readline().strip():
    cluster = distkit.Cluster(workers=2, servers=1)
    check(cluster)
    run = stepper = cell = None
    if state == "running":
        run = cluster.submit(work, 10**6, flag)
        until_working()
    if state == "stepping":
        stepper = cluster.step(work, 10**6, flag)
    if state == "running a cell":
        cell = threading.Thread(target=run_cell, args=[cluster, 10**6])
        cell.start()
        until_working()
    if state == "after a cell":
        run_cell(cluster, 2)
    pids = {{name: pid for name, _, pid, *_ in cluster.status().rows}}
    pids["fork server"] = started()[1].pid
    for child in {{c.pid for c in started()[1].children()}} - {{*pids.values()}}:
        pids["controller"] = child
    reply(pids)
    request()
    errors = []
    if stepper is not None:
        errors += attempt(stepper.next)
        run = stepper.run
        run.interrupt()
    if run is not None:
        errors += attempt(lambda: run.wait(20))
    if cell is not None:
        cluster.interrupt()
        cell.join(20)
        errors += ["the cell does not end"] * cell.is_alive()
    errors += attempt(lambda: check(cluster))
    if state.endswith("a cell"):
        errors += run_cell(cluster, 2)
    errors += attempt(cluster.stop)
    with distkit.Cluster(2) as another:
        another.wait()
    reply([errors, [os.getpid(), *(p.pid for p in started())]])
'''


class Kernels:
    """Runs a kernel, and replaces it when it was killed.

    Args:
        temporary: the folder for the kernels' temporary files.
    """

    def __init__(self, temporary: str) -> None:
        self._temporary = temporary
        self._kernel = self._fresh()

    def close(self) -> None:
        """End the kernel."""
        self._kernel.close()

    def _fresh(self) -> Driver:
        return Driver(KERNEL.format(temporary=self._temporary))

    def faults(self, case: Case) -> list[str]:
        """Kill two processes: return leftovers after :data:`WITHIN` and unexpected errors."""
        before = _segments()
        try:
            found = self._kill(case)
        except DistkitError as error:  # the kernel hangs, or cannot start a new cluster
            found = [str(error)]
            self._replace()
        files = _settled(lambda: [p.name for p in Path(self._temporary).glob("dis*")])
        return [*found, *files, *_settled(lambda: sorted(_segments() - before))]

    def _kill(self, case: Case) -> list[str]:
        pids = {**self._request(case.state), "kernel": self._kernel.process.pid}
        os.kill(pids[case.first], signal.SIGKILL)
        time.sleep(case.gap)
        with suppress(ProcessLookupError):  # the first kill ended it, too
            os.kill(pids[case.second], signal.SIGKILL)
        left = []
        if case.first == "kernel":
            self._kernel.process.wait()
            left = self._left([])
            self._replace()
            self._request("idle")
        errors, living = self._request()
        return [*left, *errors, *self._left(living)]

    def _request(self, line: str = "") -> Any:
        return self._kernel.request(line, timeout=TIMEOUT)

    def _replace(self) -> None:
        self._kernel.close()
        self._kernel = self._fresh()

    def _left(self, living: list[int]) -> list[str]:
        """The kernel's processes that should have ended."""
        mark = self._kernel.mark
        return _settled(lambda: [_title(p) for p in marked(mark) if p.pid not in living])


def _settled(look: Callable[[], list[str]]) -> list[str]:
    """What is left after :data:`WITHIN`."""
    end = time.monotonic() + WITHIN
    while (left := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())[-80:]}"
    return str(process.pid)


def _segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("distkit*")}
