"""Data classes for the facts that the doctor collects, and for the checks based on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distkit._format import joined
from distkit.cluster.gpus import Gpus, examine
from distkit.cluster.plan import PROCESSES_PER_CORE, RANK_BYTES
from distkit.events import _StringEnum

Json = dict[str, Any]

#: The machine that the doctor runs on.
HERE = "here"


@dataclass
class Facts:
    """The facts about machines, by their labels; ``HERE`` is the machine of the doctor.

    Args:
        machines: the result of ``probe.machine()`` on each machine that responded.
        targets: the name of each host as passed to ssh, optionally with a user.
        lost: for each host that stopped answering, the ``message`` from ssh or the doctor,
            and the ``stage`` of the examination.
        names: for each machine, the addresses to which it resolves the names of the hosts.
        addresses: the address of each machine, as the others see it.
        ways: the connections between machines: see :meth:`way`.
        folder: the path of the current folder here.
        sees: whether each machine sees a file of that folder.
    """

    machines: dict[str, Json] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    lost: dict[str, Json] = field(default_factory=dict)
    names: dict[str, dict[str, Json]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    ways: dict[str, dict[str, Json]] = field(default_factory=dict)
    folder: str = ""
    sees: dict[str, bool] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """The machines that answered, without the machine of the doctor."""
        return [label for label in self.machines if label != HERE]

    def way(self, a: str, b: str) -> Json:
        """Return the facts about connections from a to b; empty if none was tried.

        ``tcp`` is the error of the connection, or "" if there was none; ``arrived`` is whether a
        datagram arrived.
        """
        return self.ways.get(a, {}).get(b, {})


def cores(machine: Json) -> int:
    """Return the number of usable processors: those of the affinity, up to the cgroup's quota."""
    quota = machine["cores"]["quota"]
    return max(1, math.ceil(min(float(machine["cores"]["usable"]), quota or math.inf)))


def comfortable(machine: Json) -> int:
    """Return the number of ranks that fit into memory and share the processors well."""
    return int(min(machine["memory"]["free"] // RANK_BYTES, PROCESSES_PER_CORE * cores(machine)))


def gpus(machine: Json) -> Gpus:
    """Return the GPUs that ranks may use there, or the reason why they cannot."""
    return examine(machine["gpus"], machine.get("torch") or {})


# -- checks ---------------------------------------------------------------------------------------


class Level(_StringEnum):
    """The severity of a check."""

    OK = "ok"
    WARNING = "warning"  # ranks run, but not as expected
    FAILURE = "failure"  # ranks do not start, or do not work together


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        kind: the subject, and the problem if there is one: "names.loopback".
        level: the severity.
        message: the finding, and the machine that has it.
        remedy: the steps that repair it.
        hosts: the machines concerned, starting with the one to fix.
    """

    kind: str
    level: Level
    message: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


def fine(kind: str, message: str, *hosts: str) -> Check:
    """Return a check that found no problem."""
    return Check(kind, Level.OK, message, "", hosts)


def warning(kind: str, message: str, remedy: str, *hosts: str) -> Check:
    """Return a check that found a problem that does not prevent ranks from running."""
    return Check(kind, Level.WARNING, message, remedy, hosts)


def failure(kind: str, message: str, remedy: str, *hosts: str) -> Check:
    """Return a check that found a problem that must be repaired."""
    return Check(kind, Level.FAILURE, message, remedy, hosts)


def on(host: str) -> str:
    """Return the location of a machine: "here" or "on alpha"."""
    return host if host == HERE else f"on {host}"


def named(*hosts: str) -> str:
    """Return machines as a list in a sentence.

    >>> named("here", "alpha", "beta")
    'this machine, alpha and beta'
    """
    return joined(["this machine" if host == HERE else host for host in hosts])
