"""All-reduce over a slow network between hosts: hierarchical against rings, and as predicted.

In a ring of n ranks on m hosts, machine after machine, each host sends 2(n-1)/n K; in a ring of
hosts 2(m-1)/m K. With 3 x 2 ranks the first is 1.25 times as much, so a hierarchy cannot be faster
by more than that, but for what gloo's ring wastes. Where a launcher deals the ranks round the
machines (MPI's ``--map-by node``, Slurm's ``cyclic``), every message of a ring in the order of the
ranks goes to another host: 2.5 times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.figure import Figure, figure
from benchmarks.hosts.jobs import EACH, GLOO, HIERARCHICAL, RING, SHARED
from benchmarks.hosts.life import HOSTS, laboratory, only
from distkit_simulation import cost
from distkit_simulation.fitting import fit
from distkit_simulation.network import Link

#: What each host sends at most, and receives at most.
RATE = "100mbit"

#: How ranks are placed: the job, and how many messages of a ring leave a host at once.
PLACED = {"machine after machine": ("reducing", 1), "round the machines": ("dealing", 2)}


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Each way to reduce in turn, and pings and sums of the same run for the formulas."""
    found: dict[str, list[dict[str, Any]]] = {placed: [] for placed in PLACED}
    for n in range(reps):
        with laboratory() as lab:
            for host in HOSTS:
                lab.slow(host, RATE)
            for placed, (job, _) in PLACED.items():
                found[placed].append(only(lab, job))
                took = {name: median(times) for name, times in found[placed][-1]["took"].items()}
                said = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in took.items())
                say(f"hosts: all-reduce {n + 1}, ranks {placed}: {said}")
    # the pings of both are between neighbours in blocks
    links = [_links(one) for one in found["machine after machine"]]
    figures, details = [], {}
    for placed, (_, at_once) in PLACED.items():
        expected = [predicted(each, found[placed][0]["nbytes"], at_once) for each in links]
        more, details[placed] = _compare(placed, found[placed], expected, say)
        figures += more
    return figures, details


def _compare(
    placed: str,
    found: list[dict[str, Any]],
    expected: list[dict[str, float]],
    say: Callable[[str], None],
) -> tuple[list[Figure], dict[str, Any]]:
    """The rows of one placement."""
    took = {name: [t for one in found for t in one["took"][name]] for name in found[0]["took"]}
    factors = [e[RING] / e[SHARED] for e in expected]
    measured = [median(one["took"][GLOO]) / median(one["took"][SHARED]) for one in found]
    apart = [abs(m / f - 1) for m, f in zip(measured, factors, strict=True)]
    what = (
        f"all-reduce of {found[0]['nbytes'] / 1e6:.3g} MB between 3 x 2 ranks, {placed}, over "
        f"{RATE}"
    )
    say(f"hosts: {median(measured):.2f} times as fast as gloo; predicted {median(factors):.2f}")
    return [
        figure(
            f"hierarchical {what}", "s", took[SHARED], GLOO, took[GLOO], must=1 / 1.3, aim=1 / 1.3
        ),
        figure(f"the same, its formula [{median(factors):.3g}]", "", apart, absolute=True, aim=0.1),
        *(
            figure(f"{name} {what}", "s", took[name], "its formula", [e[name] for e in expected])
            for name in (RING, HIERARCHICAL, SHARED)
        ),
    ], {"took": took, "predicted": expected, "factors": factors, "measured": measured}


def _links(found: dict[str, Any]) -> list[Link]:
    """Between hosts, inside by messages and by memory: alpha and beta from pings of a run."""
    adds = _by_size(found["adds"])
    return [fit(_by_size(found[name]), adds).link for name in ("between", "messages", "memory")]


def predicted(links: list[Link], nbytes: int, at_once: int) -> dict[str, float]:
    """What the formulas say [s], if so many of a ring's messages leave a host at once."""
    between, messages, memory = links
    n, each = sum(EACH.values()), next(iter(EACH.values()))

    def hierarchical(inside: Link) -> float:
        options: dict[str, Any] = {"devices_per_host": each, "inside": inside}
        return float(cost.hierarchical(n, nbytes, between, **options))

    divided = replace(
        between,
        beta=at_once * between.beta,
        switches=tuple((m, alpha, at_once * beta) for m, alpha, beta in between.switches),
    )
    return {
        RING: float(cost.ring(n, nbytes, divided)),
        HIERARCHICAL: hierarchical(messages),
        SHARED: hierarchical(memory),
    }


def _by_size(found: dict[str, list[float]]) -> dict[int, list[float]]:
    return {int(size): times for size, times in found.items()}
