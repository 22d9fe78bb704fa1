"""Times until a hang is explained, and until an interrupted cluster is usable again."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.driver import Log, Samples, interleave, torch_timeout
from benchmarks.figure import Figure, fill
from distkit.errors import DeadlockError

#: Number of interrupts of each kind per repetition.
INTERRUPTS = 15

FIGURES = {
    "finding / torch": Figure(
        "from the last rank blocking to the error, slowest in the catalog",
        "s",
        reference="torch's timeout, which names no rank",
        limit=2.0,
        target=0.5,
        absolute=True,
    ),
    "median": Figure(
        "from the last rank blocking to the error, median of the catalog",
        "s",
        limit=0.3,
        absolute=True,
    ),
    "interrupt": Figure(
        "from the interrupt of a hung run to a usable cluster, median",
        "s",
        limit=0.5,
        target=0.1,
        absolute=True,
    ),
    "stop": Figure(
        "from the interrupt of an endless loop to a usable cluster, median",
        "s",
        limit=0.5,
        target=0.1,
        absolute=True,
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Run the catalog's programs that hang, then interrupt hung and endless runs."""
    import distkit as dk
    from distkit_examples.hangs import ALL

    hangs = [case for case in ALL.values() if case.outcome == "hangs" and not case.servers]
    with dk.Cluster(2) as two, dk.Cluster(3) as three:
        clusters = {2: two, 3: three}
        findings = interleave(
            "hang",
            reps,
            log,
            lambda: {c.program.__name__: _measure_diagnosis(clusters[c.ranks], c) for c in hangs},
        )
        times = interleave(
            "hang: interrupts",
            reps * INTERRUPTS,
            log,
            lambda: {"interrupt": _measure_hung_run(three), "stop": _measure_endless_run(three)},
        )
    repetitions = [*zip(*findings.values(), strict=True)]
    samples: Samples = {"finding": [*map(max, repetitions)], "torch": [torch_timeout()], **times}
    samples["median"] = [seconds for repetition in repetitions for seconds in repetition]
    return fill(FIGURES, samples), {**samples, "by program": findings}


def _measure_diagnosis(cluster: Any, case: Any) -> float:
    """Return the time between the blocking of the last rank and the error [s]."""
    run = cluster.submit(case.program)
    try:
        run.wait(60)
    except DeadlockError:
        return time.monotonic() - float(max(e.time for e in run.trace if e.state == "blocked"))
    raise AssertionError(f"{case.program.__name__} does not hang")


def _measure_hung_run(cluster: Any) -> float:
    """Return the time from interrupting a hung run to the end of the next run [s]."""
    from distkit_examples.hangs import ring_of_recvs

    cluster.submit(ring_of_recvs, wait_forever=True)
    while not cluster.diagnose():
        time.sleep(0.02)
    return _measure_interrupt(cluster)


def _measure_endless_run(cluster: Any) -> float:
    """Return the time from interrupting an endless run to the end of the next run [s]."""

    def all_reduces() -> None:
        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(4))

    run = cluster.submit(all_reduces)
    while not len(run.trace):
        time.sleep(0.02)
    return _measure_interrupt(cluster)


def _measure_interrupt(cluster: Any) -> float:
    """Return the time from an interrupt to the end of the next run [s]."""
    start = time.perf_counter()
    cluster.interrupt()
    cluster.submit(abs, -1).wait()
    return time.perf_counter() - start
