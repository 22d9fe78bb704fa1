"""What an examination has found, and what is judged of it: plain data. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from distkit._format import joined
from distkit.cluster.gpus import Gpus, examine
from distkit.cluster.plan import COMFORTABLE, RANK_BYTES
from distkit.events import _StringEnum

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


# -- checks ---------------------------------------------------------------------------------------


class Level(_StringEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # it runs, but not as one might expect
    FAILURE = "failure"  # ranks will not start, or not work together


@dataclass(frozen=True)
class Check:
    """What was found, where, and the remedy.

    Args:
        kind: what was examined, and what is wrong with it: "names.loopback".
        level: how bad it is.
        message: what was found, and on which machine.
        remedy: what to do about it.
        hosts: the machines concerned, the one to repair first.
    """

    kind: str
    level: Level
    message: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


def fine(kind: str, message: str, *hosts: str) -> Check:
    """Something that is as it should be."""
    return Check(kind, Level.OK, message, "", hosts)


def warning(kind: str, message: str, remedy: str, *hosts: str) -> Check:
    """Something that will surprise."""
    return Check(kind, Level.WARNING, message, remedy, hosts)


def failure(kind: str, message: str, remedy: str, *hosts: str) -> Check:
    """Something that has to be repaired."""
    return Check(kind, Level.FAILURE, message, remedy, hosts)


def on(host: str) -> str:
    """Where: "here" or "on alpha"."""
    return host if host == HERE else f"on {host}"


def named(*hosts: str) -> str:
    """Machines in a sentence.

    >>> named("here", "alpha", "beta")
    'this machine, alpha and beta'
    """
    return joined(["this machine" if host == HERE else host for host in hosts])
