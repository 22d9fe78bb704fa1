"""Kills pairs of a cluster's processes in every state, and checks what they leave behind."""

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

from benchmarks.driver import Driver, marked_processes
from distkit.errors import DistkitError

_KERNEL = ("kernel", "fork server")
_ENGINES = ("controller", "worker 0", "worker 1")
_RANKS = ("worker 0", "worker 1", "server 0", "scheduler")

#: The states of a cluster, and the processes it has in each.
STATES = {
    "idle": _KERNEL,
    "running": (*_KERNEL, *_RANKS),
    "stepping": (*_KERNEL, *_RANKS),
    "running a cell": (*_KERNEL, *_ENGINES),
    "after a cell": (*_KERNEL, *_ENGINES),
}
GAPS = (0.0, 0.01)

#: Time limits for all processes to end, and for a kernel to reply [s]. The kernel's own limits are
#: shorter.
END_TIMEOUT, REPLY_TIMEOUT = 5.0, 90.0


class Case(NamedTuple):
    """The two processes to kill, the state of the cluster, and the time between the kills [s]."""

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

#: The program of the kernel, which runs one case after the other until it is killed.
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
    if steps > 5:  # the child of a killed rank must end, too
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

def attempt(action):
    try:
        action()
    except distkit.errors.DistkitError:
        pass
    except BaseException as error:
        return [f"{{type(error).__name__}}: {{error}}"]
    return []

def check(cluster):
    assert cluster.submit(work, 2, flag).wait(20).results == [20_000, 20_000]

def run_cell(cluster, steps):
    return attempt(lambda: cluster.execute(f"{{WORK}}\\nwork({{steps}}, {{flag!r}})"))

def fork_processes():  # the subreaper and the fork server
    (subreaper,) = psutil.Process().children()
    return subreaper, subreaper.children()[0]

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
    pids["fork server"] = fork_processes()[1].pid
    for child in {{c.pid for c in fork_processes()[1].children()}} - {{*pids.values()}}:
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
    reply([errors, [os.getpid(), *(p.pid for p in fork_processes())]])
'''


class Kernels:
    """Runs a kernel, and replaces it after it has been killed.

    Args:
        temporary: the folder for the kernels' temporary files.
    """

    def __init__(self, temporary: str) -> None:
        self._temporary = temporary
        self._kernel = self._start()

    def close(self) -> None:
        """Close the kernel."""
        self._kernel.close()

    def _start(self) -> Driver:
        return Driver(KERNEL.format(temporary=self._temporary))

    def faults(self, case: Case) -> list[str]:
        """Kill two processes; return unexpected errors, and leftovers after :data:`END_TIMEOUT`."""
        before = _segments()
        try:
            found = self._kill(case)
        except DistkitError as error:  # the kernel hangs, or cannot start a new cluster
            found = [str(error)]
            self._replace()
        files = _until_empty(lambda: [p.name for p in Path(self._temporary).glob("dis*")])
        return [*found, *files, *_until_empty(lambda: sorted(_segments() - before))]

    def _kill(self, case: Case) -> list[str]:
        pids = {**self._request(case.state), "kernel": self._kernel.process.pid}
        os.kill(pids[case.first], signal.SIGKILL)
        time.sleep(case.gap)
        with suppress(ProcessLookupError):  # the first kill also ended it
            os.kill(pids[case.second], signal.SIGKILL)
        remaining = []
        if case.first == "kernel":
            self._kernel.process.wait()
            remaining = self._leftovers([])
            self._replace()
            self._request("idle")
        errors, alive = self._request()
        return [*remaining, *errors, *self._leftovers(alive)]

    def _request(self, line: str = "") -> Any:
        return self._kernel.request(line, timeout=REPLY_TIMEOUT)

    def _replace(self) -> None:
        self._kernel.close()
        self._kernel = self._start()

    def _leftovers(self, alive: list[int]) -> list[str]:
        """Return the kernel's processes that should have ended."""
        mark = self._kernel.mark
        return _until_empty(
            lambda: [_title(p) for p in marked_processes(mark) if p.pid not in alive]
        )


def _until_empty(find: Callable[[], list[str]]) -> list[str]:
    """Return what still exists after :data:`END_TIMEOUT`."""
    end = time.monotonic() + END_TIMEOUT
    while (remaining := find()) and time.monotonic() < end:
        time.sleep(0.02)
    return remaining


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())[-80:]}"
    return str(process.pid)


def _segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("distkit*")}
