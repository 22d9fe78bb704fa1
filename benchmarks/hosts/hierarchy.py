"""All-reduce over a slow network between hosts: hierarchical against rings, and as predicted.

A ring of n ranks on m hosts sends 2(n-1)/n K from host to host, a ring of hosts 2(m-1)/m K: with
3 x 2 ranks that is 1.25 times as much. More than that is due to what gloo's ring wastes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.figure import Figure, figure
from benchmarks.hosts.jobs import EACH, GLOO, HIERARCHICAL, RING, SHARED
from benchmarks.hosts.life import HOSTS, laboratory, only
from distkit.simulation import cost
from distkit.simulation.fitting import fit
from distkit.simulation.network import Link

#: What each host sends at most, and receives at most.
RATE = "100mbit"


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Each way to reduce in turn, and pings and sums of the same run for the formulas."""
    found: list[dict[str, Any]] = []
    for n in range(reps):
        with laboratory() as lab:
            for host in HOSTS:
                lab.slow(host, RATE)
            found.append(only(lab, "reducing"))
        took = {name: median(times) for name, times in found[-1]["took"].items()}
        said = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in took.items())
        say(f"hosts: all-reduce {n + 1}: {said}")
    took = {name: [t for one in found for t in one["took"][name]] for name in found[0]["took"]}
    nbytes = found[0]["nbytes"]
    expected = [predicted(one, nbytes) for one in found]
    factors = [e[RING] / e[SHARED] for e in expected]
    measured = [median(one["took"][GLOO]) / median(one["took"][SHARED]) for one in found]
    apart = [abs(m / f - 1) for m, f in zip(measured, factors, strict=True)]
    what = f"all-reduce of {nbytes / 1e6:.3g} MB between 3 x 2 ranks over {RATE}"
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


def predicted(found: dict[str, Any], nbytes: int) -> dict[str, float]:
    """What the formulas say, with alpha and beta from pings of the same run [s]."""
    adds = _by_size(found["adds"])
    between, messages, memory = (
        fit(_by_size(found[name]), adds).link for name in ("between", "messages", "memory")
    )
    each = next(iter(EACH.values()))

    def hierarchical(inside: Link) -> float:
        options: dict[str, Any] = {"devices_per_host": each, "inside": inside}
        return float(cost.hierarchical(sum(EACH.values()), nbytes, between, **options))

    return {
        RING: float(cost.ring(sum(EACH.values()), nbytes, between)),
        HIERARCHICAL: hierarchical(messages),
        SHARED: hierarchical(memory),
    }


def _by_size(found: dict[str, list[float]]) -> dict[int, list[float]]:
    return {int(size): times for size, times in found.items()}
