"""Hangs: how soon they are explained, whether rightly, and how soon the cluster is usable again."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import random_programs
from benchmarks.figure import Figure, figure
from distkit.errors import CommunicationWarning, DeadlockError, RunError

#: Programs that are correct, for false alarms, and hung runs that are interrupted in a row.
PROGRAMS, INTERRUPTS = 200, 50

#: How long torch itself waits before it gives up, and names nobody [s].
STOCK = 1800.0


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Every program of the catalogue ``reps`` times; correct programs; interrupts in a row."""
    from distkit.cluster.cluster import Cluster

    with Cluster(2) as two, Cluster(3) as three:
        found, wrong = _catalogue({2: two, 3: three}, reps, say)
        interrupts = _interrupts(three, INTERRUPTS, say)
        stops = _stops(three, INTERRUPTS, say)
    alarms = _false_alarms(PROGRAMS, say)
    slowest = [max(times[i] for times in found.values()) for i in range(reps)]
    absolute: dict[str, Any] = {"absolute": True}
    return [
        figure(
            f"last rank blocking to its finding, the slowest of {len(found)} hangs",
            "s",
            slowest,
            "torch's own timeout, which names nobody",
            [STOCK],
            must=2.0,
            aim=0.5,
            **absolute,
        ),
        figure(
            "programs of the catalogue with other findings than the right one",
            "programs",
            [float(len(wrong))],
            must=0,
            aim=0,
            **absolute,
        ),
        figure(
            f"false alarms in {PROGRAMS} random correct programs",
            "alarms",
            [float(len(alarms))],
            must=0,
            aim=0,
            **absolute,
        ),
        figure(
            f"interrupt of a hung run to a usable cluster, the slowest of {INTERRUPTS}",
            "s",
            [max(interrupts)],
            must=3.0,
            aim=0.5,
            **absolute,
        ),
        figure(
            f"interrupt of an endless loop to a usable cluster, the slowest of {INTERRUPTS}",
            "s",
            [max(stops)],
            must=3.0,
            aim=0.5,
            **absolute,
        ),
    ], {
        "finding_s": found,
        "wrong": wrong,
        "alarms": alarms,
        "interrupt_s": interrupts,
        "stop_s": stops,
    }


def _catalogue(
    clusters: dict[int, Any], reps: int, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], list[str]]:
    """By name: seconds from the last rank's blocking to the finding; and what was found wrong."""
    from distkit import hangs
    from distkit.events import State

    found: dict[str, list[float]] = {}
    wrong: list[str] = []
    for name, case in hangs.ALL.items():
        say(f"hang: {name}")
        for _ in range(reps):
            run = clusters[case.ranks].submit(case.program)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CommunicationWarning)
                try:
                    run.wait(60)
                except (RunError, TimeoutError):
                    clusters[case.ranks].interrupt()
            first = next(iter(run.findings), None)
            if first is None or (first.kind, first.culprits) != (case.kind, case.culprits):
                wrong.append(f"{name}: {first}")
            if isinstance(run.error, DeadlockError):
                blocked = [e.time for e in run.trace if e.state is State.BLOCKED]
                found.setdefault(name, []).append(run._conductor.explained - max(blocked))
            elif case.how == "hangs":
                wrong.append(f"{name}: ended with {run.error!r}")
    return {name: times for name, times in found.items() if len(times) == reps}, wrong


def _false_alarms(count: int, say: Callable[[str], None]) -> list[str]:
    """What is said against programs that are correct by construction."""
    said: list[str] = []
    for done in range(0, count, 20):
        say(f"hang: correct programs, {done} of {count}")
        said += random_programs.false_alarms(min(20, count - done), seed=done)
    return said


def _interrupts(cluster: Any, count: int, say: Callable[[str], None]) -> list[float]:
    """Seconds from an interrupt of a hung run until the next run has ended."""
    from distkit import hangs

    seconds = []
    for number in range(count):
        say(f"hang: interrupt {number + 1} of {count}")
        run = cluster.submit(hangs.ring_of_recvs, wait_forever=True)
        while not cluster.diagnose():  # until it hangs
            time.sleep(0.02)
        seconds.append(_interrupt(cluster))
        assert run.finished
    return seconds


def _interrupt(cluster: Any) -> float:
    """Seconds until the next run has ended."""
    started = time.perf_counter()
    cluster.interrupt()
    cluster.submit(abs, -1).wait()
    return time.perf_counter() - started


def _stops(cluster: Any, count: int, say: Callable[[str], None]) -> list[float]:
    """Like :func:`_interrupts`, of ranks that communicate all the time."""

    def all_reduces() -> None:
        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(4))

    seconds = []
    for number in range(count):
        say(f"hang: stop {number + 1} of {count}")
        run = cluster.submit(all_reduces)
        while not run.trace.events:
            time.sleep(random.uniform(0.01, 0.3))
        seconds.append(_interrupt(cluster))
    return seconds
