"""Data classes for the facts that the doctor collects, and for the checks based on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distkit._format import joined
from distkit.cluster.plan import PROCESSES_PER_CORE, RANK_BYTES, Gpus, examine
from distkit.events import _StringEnum

Json = dict[str, Any]

#: The machine that the doctor runs on.
HERE = "here"


@dataclass
class Facts:
    """Facts about machines, by label; the label of the doctor's own machine is ``HERE``.

    Args:
        machines: the result of ``probe.machine()`` on each machine that responded, plus the result
            of ``probe.torch()`` as the item ``torch``.
        targets: the name of each host as passed to ssh, optionally with a user.
        lost: for each host that stopped responding, the ``message`` from ssh or the doctor,
            and the ``stage`` of the checkup that it had reached.
        names: for each machine, the addresses that it resolves the hosts' names to.
        addresses: for each machine, the address that the other machines connect to.
        connections: the connections between machines; see :meth:`connection`.
        folder: the path of the current directory on this machine.
        folder_visible: whether each machine can read a file in that folder.
    """

    machines: dict[str, Json] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    lost: dict[str, Json] = field(default_factory=dict)
    names: dict[str, dict[str, Json]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    connections: dict[str, dict[str, Json]] = field(default_factory=dict)
    folder: str = ""
    folder_visible: dict[str, bool] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """The other machines that responded."""
        return [label for label in self.machines if label != HERE]

    def connection(self, a: str, b: str) -> Json:
        """Return the facts about connections from ``a`` to ``b``; empty if none was attempted.

        ``tcp`` is the error of the connection, or "" if there was none; ``arrived`` is whether a
        datagram arrived.
        """
        return self.connections.get(a, {}).get(b, {})


def cores(machine: Json) -> int:
    """Return the number of usable cores: the CPU affinity, limited by the cgroup's quota."""
    quota = machine["cores"]["quota"]
    return max(1, math.ceil(min(float(machine["cores"]["usable"]), quota or math.inf)))


def recommended_ranks(machine: Json) -> int:
    """Return the recommended maximum number of ranks, given the memory and cores."""
    return int(min(machine["memory"]["free"] // RANK_BYTES, PROCESSES_PER_CORE * cores(machine)))


def gpus(machine: Json) -> Gpus:
    """Return the GPUs that ranks can use on a machine, or the reason that there are none."""
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
        kind: the subject, such as "names"; most problems add a suffix, as in "names.loopback".
        level: the severity.
        message: the finding, with the name of the machine.
        remedy: the steps that fix it.
        hosts: the machines concerned.
    """

    kind: str
    level: Level
    message: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


def passed(kind: str, message: str, *hosts: str) -> Check:
    """Return a check that found no problem."""
    return Check(kind, Level.OK, message, "", hosts)


def warning(kind: str, message: str, remedy: str, *hosts: str) -> Check:
    """Return a check with a problem that does not prevent ranks from running."""
    return Check(kind, Level.WARNING, message, remedy, hosts)


def failure(kind: str, message: str, remedy: str, *hosts: str) -> Check:
    """Return a check with a problem that must be fixed."""
    return Check(kind, Level.FAILURE, message, remedy, hosts)


def on(host: str) -> str:
    """Return "here" for this machine, or "on alpha" for the machine alpha."""
    return host if host == HERE else f"on {host}"


def named(*hosts: str) -> str:
    """Format a list of machines for a sentence.

    >>> named("here", "alpha", "beta")
    'this machine, alpha and beta'
    """
    return joined(["this machine" if host == HERE else host for host in hosts])
