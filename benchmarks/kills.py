"""Two processes of a cluster killed, in every pair and state: what stays, and what comes next."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.driver import Driver, marked
from benchmarks.figure import Figure, figure
from distkit.errors import DistkitError

PARTS = ("kernel", "zygote", "controller", "worker 0", "worker 1", "server 0", "scheduler")
STATES = ("idle", "running", "stepping")
GAPS = (0.0, 0.01)

#: How long what was killed has to leave nothing behind [s], and how long a kernel may be silent
#: before it counts as hanging [s]. Each of its own waits is shorter.
WITHIN, SILENT = 5.0, 90.0


@dataclass(frozen=True)
class Case:
    """Who is killed, in which state of the cluster, and how long after the other [s]."""

    first: str
    second: str
    state: str
    gap: float

    def __str__(self) -> str:
        return f"{self.first} and {self.second}, {self.state}, {self.gap * 1000:.0f} ms apart"


#: All of them, shuffled: the first n are a sample of all.
CASES = [
    Case(*pair, state, gap)
    for pair in itertools.combinations(PARTS, 2)
    for state in STATES
    for gap in GAPS
]
random.Random(11).shuffle(CASES)

#: The kernel: serves one case after the other, until it is killed itself.
KERNEL = """
import tempfile
os.environ["TMPDIR"] = tempfile.tempdir = {temporary!r}
import distkit
from distkit.cluster.processes import forkserver
from distkit.cluster.processes.descendants import children
import psutil

def work(steps):
    import subprocess, time
    import torch, torch.distributed as dist
    from distkit import kvstore
    if steps > 5:  # what a killed rank leaves must end, too
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    store = kvstore.create("dist_sync")
    store.init("w", torch.zeros(20_000))
    for step in range(steps):
        x = torch.ones(20_000)
        dist.all_reduce(x)
        distkit.shared_memory_all_reduce(x)
        store.push("w", x)
        store.pull("w", out=x)
        time.sleep(0.005)
    return len(x)

def attempt(do):
    try:
        do()
        return "well"
    except distkit.DistkitError as error:
        return f"{{type(error).__name__}}: {{error}}".splitlines()[0]
    except BaseException as error:
        return f"unclear: {{type(error).__name__}}: {{error}}"

def once(cluster):
    assert cluster.submit(work, 2).wait(20).results == [20_000, 20_000]

while state := sys.stdin.readline().strip():
    cluster = distkit.Cluster(workers=2, servers=1)
    once(cluster)
    run = stepper = None
    if state == "running":
        run = cluster.submit(work, 10**6)
        while len(run.trace) < 20:
            time.sleep(0.01)
    if state == "stepping":
        stepper = cluster.step(work, 10**6)
    pids = {{name: pid for name, _, pid, *_ in cluster.status().rows}}
    reaper = psutil.Process(forkserver.server().process.pid)
    pids.update(zygote=reaper.children()[0].pid, controller=cluster._room._controller.pid)
    answer(pids)
    asked()
    told = {{}}
    if stepper is not None:
        told["stepper"] = attempt(stepper.next)
        run = stepper.run
        run.interrupt()
    if run is not None:
        told["run"] = attempt(lambda: run.wait(20))
    told["next"] = attempt(lambda: once(cluster))
    told["stop"] = attempt(cluster.stop)
    with distkit.Cluster(2) as another:
        told["new"] = attempt(another.wait)
    reaper = psutil.Process(forkserver.server().process.pid)
    told["living"] = [os.getpid(), reaper.pid, *(c.pid for c in reaper.children())]
    answer(told)
"""


@dataclass
class Outcome:
    """What one case left after :data:`WITHIN` seconds, and what the kernel said of it."""

    case: Case
    processes: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def hangs(self) -> bool:
        """True if something waited for longer than it may, or failed with an unclear error."""
        said = [str(self.told.get(key, "well")) for key in ("stepper", "run", "next", "stop")]
        unclear = any(text.startswith(("unclear", "no answer")) for text in said)
        return unclear or self.told.get("new") != "well"


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Try the first ``reps`` of :data:`CASES`."""
    outcomes = []
    with TemporaryDirectory(prefix="kills-") as temporary, Kernels(temporary) as kernels:
        for n, case in enumerate(CASES[:reps], 1):
            outcomes.append(kernels.try_out(case))
            say(_line(n, min(reps, len(CASES)), outcomes[-1]))
    name = f"after two of a cluster's processes were killed, all of {len(outcomes)} cases"
    limits: dict[str, Any] = {"must": 0, "aim": 0, "absolute": True}
    return [
        figure(
            f"{what} left {WITHIN:.0f} s {name}",
            what,
            [float(sum(len(getattr(o, what)) for o in outcomes))],
            **limits,
        )
        for what in ("processes", "folders", "segments")
    ] + [
        figure(
            f"no next run, no clear error or no new cluster {name}",
            "cases",
            [float(sum(o.hangs for o in outcomes))],
            **limits,
        ),
    ], {"outcomes": [asdict(o) for o in outcomes]}


def _line(n: int, of: int, outcome: Outcome) -> str:
    left = {k: len(getattr(outcome, k)) for k in ("processes", "folders", "segments")}
    good = not outcome.hangs and not any(left.values())
    verdict = "good" if good else f"BAD {left} {outcome.processes} {outcome.told}"
    return f"kills: {n} of {of}: {outcome.case}: {outcome.seconds:.1f} s, {verdict}"


class Kernels:
    """A kernel at a time, and another when it was killed.

    Args:
        temporary: the folder for temporary files of them all.
    """

    def __init__(self, temporary: str) -> None:
        self._temporary = temporary
        self._kernel = self._fresh()

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        self._kernel.close()

    def _fresh(self) -> Driver:
        return Driver(KERNEL.format(temporary=self._temporary))

    def try_out(self, case: Case) -> Outcome:
        """Kill two, and see what is left and what comes next."""
        outcome, start = Outcome(case), time.monotonic()
        segments = _segments()
        try:
            self._kill(case)
            outcome.processes = self._what_stays(case)
            outcome.told = self._what_comes(case)
            outcome.processes += self._left(self._kernel.mark, set(outcome.told["living"]))
        except DistkitError as error:
            outcome.told = {"next": f"no answer: {error}"}
            self._renew()
        outcome.folders = _until_none(lambda: [p.name for p in Path(self._temporary).glob("dis*")])
        outcome.segments = sorted(_segments() - segments)
        outcome.seconds = time.monotonic() - start
        return outcome

    def _kill(self, case: Case) -> None:
        pids = self._begin(case.state)
        os.kill(pids[case.first], signal.SIGKILL)
        time.sleep(case.gap)
        with suppress(ProcessLookupError):  # the first one's death was its own
            os.kill(pids[case.second], signal.SIGKILL)

    def _begin(self, state: str) -> dict[str, int]:
        """Have the kernel bring a cluster into this state; the pids of all its processes."""
        pids = self._kernel.ask(state, within=SILENT)
        return {**pids, "kernel": self._kernel.process.pid}

    def _what_stays(self, case: Case) -> list[str]:
        """What is left of a killed kernel; the next one takes its place."""
        if case.first != "kernel":
            return []
        self._kernel.process.wait()
        left = self._left(self._kernel.mark, set())
        self._renew()
        return left

    def _what_comes(self, case: Case) -> dict[str, Any]:
        """What the kernel, or the next one, says to its next run and to a new cluster."""
        if case.first == "kernel":
            self._begin("idle")
        return dict(self._kernel.ask(within=SILENT))

    def _renew(self) -> None:
        self._kernel.close()
        self._kernel = self._fresh()

    def _left(self, mark: str, living: set[int]) -> list[str]:
        """The processes that carry this mark and should have ended by now."""

        def look() -> list[str]:
            return [_named(p) for p in marked(mark) if p.pid not in living]

        return _until_none(look)


def _until_none(look: Callable[[], list[str]]) -> list[str]:
    """What is there, when it does not go within some seconds."""
    end = time.monotonic() + WITHIN
    while (left := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _named(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())[-80:]}"
    return str(process.pid)


def _segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("*") if p.name.startswith("distkit")}
