"""How well the simulator predicts what the parameter server takes on this machine.

One cluster is the ruler: a worker alone, then several at once, with one server. From what it shows
the simulator says what other clusters take, of other sizes, rules and stragglers; these are then
measured, in turns with the ruler, and no row of the ruler is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.figure import Figure, figure
from benchmarks.serving_workers import each, on_ruler, on_worker

if TYPE_CHECKING:
    from distkit.cluster.cluster import Cluster
    from distkit.simulation import Host

#: The ruler's workers, and the bytes that it pushes and pulls: how often.
CROWD = 4
RULER = {1 << 10: 150, 1 << 16: 100, 1 << 18: 80, 1 << 20: 40, 1 << 22: 15, 1 << 24: 8}

#: What is predicted: workers and servers; bytes and how often, with no computation.
CLUSTERS = ((2, 1), (2, 2), (4, 2))
ROUNDS = {1 << 12: 100, 1 << 17: 80, 1 << 21: 20, 1 << 23: 10}

#: Training: steps of each worker, bytes, the straggler's factor.
STEPS, NBYTES, SLOW = 25, 3 << 18, 3.0

#: The rules: a store's type and options, and what the simulator is told.
RULES: dict[str, tuple[str, dict[str, Any], float]] = {
    "dist_sync": ("dist_sync", {}, 0),
    "dist_async": ("dist_async", {}, float("inf")),
    "SSP, staleness 2": ("dist_async", {"staleness": 2}, 2),
}


class Case(NamedTuple):
    """A row: ``compute`` is "none", "device" (the processor is free meanwhile) or "processor"."""

    workers: int
    servers: int
    rule: str
    nbytes: int
    steps: int
    compute: str = "none"
    slow: float = 1.0

    def __str__(self) -> str:
        what = "" if self.compute == "none" else f"training, computing on a {self.compute}: "
        straggler = f", one worker {self.slow:g} times slower" if self.slow != 1 else ""
        return (
            f"{what}push + pull of {self.nbytes >> 10} KB, {self.workers} workers + "
            f"{self.servers} server{'s' * (self.servers > 1)}, {self.rule}{straggler}"
        )


def cases() -> list[Case]:
    """All rows."""
    rounds = [
        Case(w, s, rule, nbytes, steps)
        for w, s in CLUSTERS
        for rule in ("dist_sync", "dist_async")
        for nbytes, steps in ROUNDS.items()
    ]
    kinds = (("device", 1.0), ("device", SLOW), ("processor", 1.0))
    training = [
        Case(w, s, rule, NBYTES, STEPS, compute, slow)
        for w, s in (CLUSTERS[0], CLUSTERS[-1])
        for rule in RULES
        for compute, slow in kinds
    ]
    return rounds + training


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Calibrate, predict and measure; the error of each row in percent."""
    rows = predicted(cases(), reps, say)
    return [
        figure(
            f"error of the parameter server's calibrated predictions, {len(found)} {what}",
            "%",
            [100 * abs(row["predicted"] / row["measured"] - 1) for row in found],
            must=25,
            absolute=True,
        )
        for what, found in (
            ("rounds of push + pull", [row for row in rows if row["unit"] == "s"]),
            ("trainings: steps/s", [row for row in rows if row["unit"] == "steps/s"]),
        )
    ], {"parameter_server": rows}


def predicted(asked: Iterable[Case], reps: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """What the model says of each case, and the median of what was seen."""
    from distkit.cluster.cluster import Cluster

    asked = list(asked)
    rates: list[list[float]] = [[] for _ in asked]
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ruler = stack.enter_context(Cluster(workers=CROWD, servers=1)).wait()
        clusters = {
            size: stack.enter_context(Cluster(workers=size[0], servers=size[1]))
            for size in sorted({case[:2] for case in asked})
        }
        for rep in range(reps):
            say(f"simulate: the parameter server, {rep + 1} of {reps}")
            samples.append(calibrate(ruler))
            for case, found in zip(asked, rates, strict=True):
                found.append(seen(clusters[case[:2]], case))
    host, units = model(samples)
    return [
        row(case, simulated(host, units, case), median(found))
        for case, found in zip(asked, rates, strict=True)
    ]


def row(case: Case, predicted: float, measured: float) -> dict[str, Any]:
    """Seconds of a round without computation, else steps per second of all workers."""
    unit = "steps/s" if case.compute != "none" else "s"
    if unit == "s":
        predicted, measured = case.workers / predicted, case.workers / measured
    return {
        "name": str(case),
        **case._asdict(),
        "unit": unit,
        "predicted": predicted,
        "measured": measured,
    }


# -- what the model says ---------------------------------------------------------------------


def model(samples: list[dict[str, Any]]) -> tuple[Host, dict[str, float]]:
    """A host, and the seconds of each kind of computation, from what the ruler showed each time."""
    from distkit.cluster import limits
    from distkit.simulation import Host

    def table(what: str) -> dict[Any, float]:
        return {key: median(s[what][key] for s in samples) for key in samples[0][what]}

    processors = limits.cpus()
    host = Host.of(
        processors, CROWD, table("alone"), table("crowd"), table("work"), table("served")
    )
    units = table("compute")
    units["processor"] *= min(1.0, processors / CROWD)  # all computed at once
    return host, units


def simulated(host: Host, units: dict[str, float], case: Case) -> float:
    """Gradients per second, as the simulator plays them."""
    from distkit.kvstore.protocol.placement import place
    from distkit.kvstore.protocol.terms import BIGARRAY_BOUND
    from distkit.simulation import Stragglers, parameter_server

    parts = place("w", case.nbytes // 4, case.servers, BIGARRAY_BOUND)
    return parameter_server(
        case.workers,
        [4 * (part.stop - part.start) for part in parts],
        case.servers,
        replace(host, computes=case.compute == "processor"),
        units[case.compute],
        steps=case.steps,
        staleness=RULES[case.rule][2],
        stragglers=Stragglers(slow={0: case.slow}),
        record=False,
    ).rate


# -- what is seen ----------------------------------------------------------------------------


def calibrate(ruler: Cluster) -> dict[str, Any]:
    """One look at the ruler: by size, seconds of a round alone and in the crowd, and its work."""
    server = ruler._room.nodes.children[CROWD].pid
    shown = ruler._submit(on_ruler, (RULER, server), {}, record=False).wait().results

    def mean(what: str) -> dict[Any, float]:
        return {key: sum(s[what][key] for s in shown) / CROWD for key in shown[0][what]}

    served = {size: seconds / CROWD for size, seconds in mean("served").items()}
    return {
        "alone": {size: each(times) for size, times in shown[0]["alone"].items()},
        "crowd": {size: CROWD / rate([s["crowd"][size] for s in shown]) for size in RULER},
        "work": {size: seconds + served[size] for size, seconds in mean("mine").items()},
        "served": served,
        "compute": mean("compute"),
    }


def seen(cluster: Cluster, case: Case) -> float:
    """Gradients per second of a cluster at work."""
    mode, options, _ = RULES[case.rule]
    what = mode, options, case.nbytes, case.steps, case.compute, case.slow
    return rate(cluster._submit(on_worker, what, {}, record=False).wait().results)


def rate(times: Sequence[Sequence[float]]) -> float:
    """Steps per second of all workers, from the times between the steps of each."""
    from distkit.simulation import Served

    start = min(mine[0] for mine in times)
    ends = [(end - start, w) for w, mine in enumerate(times) for end in mine[1:]]
    return Served(finished=[end for end, _ in ends], workers=[w for _, w in ends]).rate
