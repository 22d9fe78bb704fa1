"""What an examination has found: plain data. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from distkit.cluster.gpus import Gpus, examine
from distkit.cluster.plan import COMFORTABLE, RANK_BYTES

Json = dict[str, Any]

#: The machine that the doctor runs on.
HERE = "here"


@dataclass
class Facts:
    """Everything about machines, by their labels; ``HERE`` is the doctor's own.

    Args:
        machines: what each machine says of itself, as ``probe.machine()`` does; only those that
            answered.
        targets: of each host: its name, and how ssh finds it from here (door, port, target).
        lost: of each host that did not answer, or not to the end: the ``words`` of ssh or of the
            doctor, and the ``stage`` at which it was lost.
        names: of each machine: the addresses that it knows of the others.
        addresses: of each host, as the others see it.
        ways: from each machine to each other: see :meth:`way`.
        clocks: of each host: its clock minus this machine's, and the error of that [s].
        shared: "home" and "folder": their paths here, and who sees the same files there.
    """

    machines: dict[str, Json] = field(default_factory=dict)
    targets: dict[str, Json] = field(default_factory=dict)
    lost: dict[str, Json] = field(default_factory=dict)
    names: dict[str, dict[str, Json]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    ways: dict[str, dict[str, Json]] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    shared: dict[str, Json] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """The machines that answered, without the doctor's own."""
        return [label for label in self.machines if label != HERE]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every two machines, once."""
        return combinations(self.machines, 2)

    def way(self, a: str, b: str) -> Json:
        """The facts about the way from a to b; empty if it was not tried.

        ``tcp``: why no connection was made, "" if one was; ``arrived``: whether a datagram did.
        """
        return self.ways.get(a, {}).get(b, {})


def cores(machine: Json) -> int:
    """Processors that may be used: affinity, cut to the cgroup's quota, at least 1."""
    quota = machine["cores"]["quota"]
    return max(1, math.ceil(min(float(machine["cores"]["usable"]), quota or math.inf)))


def fitting(machine: Json) -> int:
    """The number of ranks that have room in memory."""
    return int(machine["memory"]["free"] // RANK_BYTES)


def comfortable(machine: Json) -> int:
    """The number of ranks that start quickly and take turns without long waits."""
    return int(min(fitting(machine), COMFORTABLE * cores(machine)))


def gpus(machine: Json) -> Gpus:
    """The GPUs that ranks may use there, or why they may not."""
    return examine(machine["gpus"], machine.get("torch") or {})
