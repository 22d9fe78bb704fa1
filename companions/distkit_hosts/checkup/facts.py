"""What an examination has found: plain data, and a few questions to it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations, permutations
from typing import Any

import numpy as np

from distkit.cluster.gpus import Gpus, examine
from distkit.cluster.plan import COMFORTABLE, RANK_BYTES
from distkit_simulation.fitting import NO_TIME, lines, quiet, regimes

Json = dict[str, Any]

#: The machine that the doctor runs on.
HERE = "here"


@dataclass
class Facts:
    """Everything about machines, by their labels; ``HERE`` is the doctor's own.

    Args:
        machines: what each machine says of itself, as ``checkup.probe.machine()`` does;
            only those that could be asked.
        targets: of each host: its name, and how ssh finds it from here (door, port, target).
        lost: the words of ssh, or of ours, about those that could not be asked, or not to the end.
        names: of each machine: what it knows of the names of the others.
        addresses: of each host, as the others see it.
        ways: from each machine to each other: see :meth:`way`.
        clocks: of each host: offset from here, and its error [s].
        monotonic: the same of the clocks that count from the start of a machine.
        shared: "home" and "folder": their paths here, and who sees the same files there.
        knocked: lost hosts whose ssh server answers: to whom.
        ports: which ports were tried beside any.
    """

    machines: dict[str, Json] = field(default_factory=dict)
    targets: dict[str, Json] = field(default_factory=dict)
    lost: dict[str, Json] = field(default_factory=dict)
    names: dict[str, dict[str, Json]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    ways: dict[str, dict[str, Json]] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    shared: dict[str, Json] = field(default_factory=dict)
    knocked: dict[str, list[str]] = field(default_factory=dict)
    ports: tuple[int, ...] = ()

    @property
    def hosts(self) -> list[str]:
        """The machines that could be asked, without the doctor's own."""
        return [label for label in self.machines if label != HERE]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every two machines, once."""
        return combinations(self.machines, 2)

    def ordered(self) -> Iterator[tuple[str, str]]:
        """Every two machines, in both directions."""
        return permutations(self.machines, 2)

    def way(self, a: str, b: str) -> Json:
        """The facts about the way from a to b; empty if it was not tried.

        ``tcp``: by port, why no connection was made, "" if one was; ``sent`` and ``arrived``:
        sizes of datagrams; ``source``, ``interface``, ``mtu``: where packets leave; ``samples``:
        seconds of a message and its acknowledgement, by bytes; ``error``: what ended that.
        """
        return self.ways.get(a, {}).get(b, {})

    def links(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Latency [s] and seconds per byte of every way that was measured."""
        every = {(a, b): fitted(self.way(a, b).get("samples", {})) for a, b in self.ordered()}
        return {way: link for way, link in every.items() if link}

    def to_dict(self) -> Json:
        """Plain data, with the fitted links in place of their samples."""
        plain, links = asdict(self), self.links()
        for a, of in plain["ways"].items():
            for b, way in of.items():
                way.pop("samples", None)
                way["alpha"], way["beta"] = links.get((a, b), (None, None))
        return plain


def fitted(samples: dict[str, list[float]]) -> tuple[float, float] | None:
    """Latency of one way [s] and seconds per byte; None with fewer than two sizes.

    Small messages tell the one, and large ones the other: a slow link's buffers hide it from small
    ones. Where noise hides the line's slope, the largest message alone tells the bandwidth.

    >>> alpha, beta = fitted({"1": [2e-4], "1000": [3e-4], "1000000": [1.002e-1]})
    >>> round(alpha * 1e6), round(beta * 1e9)
    (100, 100)
    """
    if len(samples) < 2:
        return None
    sizes = np.array([int(size) for size in samples], float)
    times = np.array([quiet(taken) for taken in samples.values()])
    protocols = lines(sizes, times, regimes(sizes, times))
    alpha, beta = protocols[0][0] / 2, protocols[-1][1]
    return alpha, beta if beta > NO_TIME else float(times[-1] / sizes[-1])


def cores(machine: Json) -> int:
    """Processors that may be used: affinity, cut to the cgroup's quota, at least 1."""
    quota = machine["cores"]["quota"]
    return max(1, math.ceil(min(float(machine["cores"]["usable"]), quota or math.inf)))


def fitting(machine: Json) -> int:
    """So many ranks have room in memory."""
    return int(machine["memory"]["free"] // RANK_BYTES)


def comfortable(machine: Json) -> int:
    """So many ranks start quickly and take turns without long waits."""
    return int(min(fitting(machine), COMFORTABLE * cores(machine)))


def gpus(machine: Json) -> Gpus:
    """The GPUs that ranks may use there, or why they may not."""
    return examine(machine["gpus"], machine.get("torch") or {})
