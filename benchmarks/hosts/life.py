"""Ranks on three machines: how soon they are there, and what becomes of them when things break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, figure
from distkit_hosts.laboratory import Laboratory

HOSTS = ("alpha", "beta", "gamma")
ROOT = Path(__file__).resolve().parents[2]

#: By how much beta's clock is ahead [s].
SKEW = 5

#: Nothing may be left after this time [s].
GONE = 5.0

#: What belongs to a cluster, in the command lines of processes.
_OURS = ("distkit.cluster.hosts.agent", "processes/boot.py", "ipyparallel")

#: Open MPI runs nothing for root without these.
AS_ROOT = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1")

#: Trials of each kind for each repetition.
TRIALS = 5


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Starts in turn with ipyparallel's; hangs and clocks; kernels killed and links cut."""
    started = {who: list[float]() for who in ("ours", "theirs")}
    for n in range(2 * reps):
        for who in started:
            with laboratory() as lab:
                said = only(lab, who)
            assert said["results"] == [6.0] * 6, said
            started[who].append(said["seconds"])
            say(f"hosts: start {n + 1}: {who} {said['seconds']:.1f} s")
    hangs, errors = _hangs(say)
    left, told = [], []
    for n in range(TRIALS * reps):
        for how in ("the kernel is killed", "a link is cut"):
            processes, seconds, words = _break(how)
            left.append(float(len(processes)))
            told += [seconds] if seconds is not None else []
            say(f"hosts: {how} ({n + 1}): {len(processes)} left; {seconds or 0:.1f} s; {words}")
    return [
        figure(
            "3 x 2 ranks by SSH, to the first all_reduce",
            "s",
            started["ours"],
            "ipyparallel's SSH cluster, torch, gloo",
            started["theirs"],
            must=0.5,
            aim=0.25,
        ),
        figure("hang over 3 hosts, to its finding", "s", hangs, absolute=True, must=2.0, aim=0.5),
        figure(
            f"offset of a clock {SKEW} s ahead, error",
            "ms",
            errors,
            absolute=True,
            must=1.0,
            aim=0.2,
        ),
        figure("silent partition, to its message", "s", told, absolute=True, must=5.0, aim=2.0),
        figure(
            f"processes left {GONE:.0f} s after a kill or a cut, {len(left)} trials",
            "processes",
            [sum(left)],
            absolute=True,
            must=0,
            aim=0,
        ),
    ], {"started": started, "hangs": hangs, "errors": errors, "told": told, "left": left}


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    """Three hosts, one with a clock of its own, that let each other in."""
    with Laboratory(HOSTS, skew={"beta": SKEW}) as lab:
        lab.ssh()
        yield lab


def start(lab: Laboratory, job: str) -> subprocess.Popen[str]:
    """A job on the head."""
    environ = {**os.environ, **AS_ROOT, "PYTHONPATH": f"{ROOT}:{ROOT}/companions"}
    return lab.popen(
        "head",
        [sys.executable, "-m", "benchmarks.hosts.jobs", job],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def said_by(job: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All that a job says until its end."""
    out, _ = job.communicate(timeout=300)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def only(lab: Laboratory, job: str) -> dict[str, Any]:
    """The one line that a job says."""
    (said,) = said_by(start(lab, job))
    return said


def _hangs(say: Callable[[str], None]) -> tuple[list[float], list[float]]:
    """The lengths of hangs [s], and the errors of clocks [ms]."""
    with laboratory() as lab:
        said = said_by(start(lab, "hanging"))
    hangs = [line["seconds"] for line in said if "error" in line]
    clocks = {line["host"]: line for line in said if "host" in line}
    errors = [1000 * abs(c["offset"] - SKEW * (host == "beta")) for host, c in clocks.items()]
    say(f"hosts: hangs of {max(hangs):.2f} s, clocks wrong by {max(errors):.3f} ms")
    return hangs, errors


def _break(how: str) -> tuple[list[str], float | None, str]:
    """What is left of a cluster after :data:`GONE`; when the loss was told, and how."""
    with laboratory() as lab:
        job = start(lab, "working")
        assert job.stdout is not None
        job.stdout.readline()
        began = time.monotonic()
        if how == "a link is cut":
            lab.cut("beta")
        else:
            job.kill()
        said = _words(job, began + GONE)
        while time.monotonic() < began + GONE and _left(lab, job):
            time.sleep(0.05)
        left = _left(lab, job)
        job.kill()
        job.communicate()
    seconds = said["at"] - began if "at" in said else None
    return left, seconds, said.get("error", "")


def _left(lab: Laboratory, job: subprocess.Popen[str]) -> list[str]:
    """What is left; a kernel that is still there has a process to fork from on its machine."""
    lives = job.poll() is None
    return [line for line in processes(lab) if not (lives and line.startswith("head:"))]


def _words(job: subprocess.Popen[str], until: float) -> dict[str, Any]:
    """What a job says when it has lost a machine; {} when it says nothing in time."""
    import select

    assert job.stdout is not None
    ready, _, _ = select.select([job.stdout], [], [], max(0.0, until - time.monotonic()))
    line = job.stdout.readline() if ready else ""
    return dict(json.loads(line)) if line else {}


def processes(lab: Laboratory) -> list[str]:
    """What still runs of a cluster, on all hosts."""
    left = []
    for host in lab.hosts:
        listed = lab.run(host, ["ps", "-eo", "args"], capture_output=True, text=True).stdout
        left += [f"{host}: {line}" for line in listed.splitlines() if any(o in line for o in _OURS)]
    return left
