"""One thing that was examined, and what was found. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distkit.events import _Word
from distkit.views.scene.units import joined
from distkit_hosts.checkup.facts import HERE


class Level(_Word):
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
