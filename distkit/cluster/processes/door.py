"""The door of a cluster that is kept: where the next kernel finds it when the last one has ended.

It is a Unix socket in the cluster's folder, which only its user can enter, and belongs to the
zygote. What the next kernel has to know is in the zygote's memory, and in no file.
"""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.cluster.processes.channel import Channel
from distkit.errors import StartError

#: The name of the socket, in the cluster's folder.
NAME = "door"

#: Who comes to the door says what he wants within this time [s] ...
KNOCK = 5.0

#: ... and waits so long for an answer [s]: a busy machine answers late, one that has ended refuses
#: at once.
ANSWER = 30.0

#: A cluster that was told to end has ended within this time [s].
ENDS = 15.0


class Door:
    """The zygote's side.

    Args:
        folder: the cluster's own.
        keep: how long to wait for the next kernel [s].
    """

    def __init__(self, folder: str, keep: float) -> None:
        self._sock, self._keep = socket.socket(socket.AF_UNIX), keep
        self._sock.bind(f"{folder}/{NAME}")
        self._sock.listen()
        self._until = math.inf  # when it will have waited for too long
        self._ended = False
        #: For whoever looks; and for the next kernel.
        self.about: dict[str, Any] = {}
        self.state = b""

    def fileno(self) -> int:
        """For selectors."""
        return self._sock.fileno()

    def wait(self) -> None:
        """The kernel has ended: wait for the next one."""
        self._until = time.monotonic() + self._keep

    @property
    def alone(self) -> bool:
        """True if there is no kernel."""
        return self._until < math.inf

    @property
    def over(self) -> bool:
        """True if nobody has come in time, or somebody has come to end it."""
        return self._ended or time.monotonic() > self._until

    def answer(self) -> Channel | None:
        """Answer who is at the door; the line to the next kernel, if it is one."""
        sock = self._sock.accept()[0]
        sock.settimeout(KNOCK)
        with suppress(OSError, EOFError):
            line = Channel(sock)
            wants, holder = line.recv()
            enters = wants == "attach" and self.alone
            left = self._until - time.monotonic() if self.alone else None
            line.send((self.about, left, self.state if enters else b""))
            self._ended = wants == "end"
            if enters:
                sock.settimeout(None)
                self._until, self.about = math.inf, {**self.about, "holder": holder}
                return line
        sock.close()
        return None

    def close_here(self) -> None:
        """In a fork of the zygote: it is not the fork's."""
        self._sock.close()


@dataclass(frozen=True)
class Keep:
    """How a cluster is kept: under which name, and for how long without a kernel [s]."""

    name: str
    seconds: float

    @property
    def time(self) -> str:
        """For how long, in words."""
        return in_words(self.seconds)


@dataclass(frozen=True)
class Kept:
    """A cluster of this user that is kept on this machine.

    Args:
        folder: its own.
        about: its ``name``; ``what`` it has; the ``holder``, its kernel's pid and machine, now or
            until it ended.
        left: seconds until it ends, if no kernel comes; None while it has one.
        state: what the kernel that has come in knows of it.
        line: of that kernel, to the zygote.
    """

    folder: str
    about: dict[str, Any]
    left: float | None
    state: bytes = field(default=b"", repr=False)
    line: Channel | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What ``attach`` calls it."""
        return str(self.about["name"])

    @property
    def standing(self) -> str:
        """Who has it, or for how long it waits."""
        pid, host = self.about["holder"]
        if self.left is not None:
            return f"no kernel since process {pid} ended; stays for {in_words(self.left)}"
        this = " (this one)" if pid == os.getpid() else ""
        return f"its kernel is process {pid} on {host}{this}"


def myself() -> tuple[int, str]:
    """This kernel, for others: its pid and machine."""
    return os.getpid(), platform.node()


def kept() -> list[Kept]:
    """The clusters of this user that are kept on this machine, by name."""
    found = []
    for door in Path(tempfile.gettempdir()).glob(f"distkit-*/{NAME}"):
        with suppress(OSError, EOFError):  # it has just ended
            if folders.is_ours(door.parent):  # what comes from it is unpickled
                found.append(_knock(door.parent, "look"))
    return sorted(found, key=lambda one: one.name)


def named(name: str) -> Kept | None:
    """The cluster that is kept under this name, None if there is none."""
    return next((one for one in kept() if one.name == name), None)


def find(name: str) -> Kept:
    """The cluster that is kept under this name.

    Raises:
        StartError: there is none; the message names those that there are.
    """
    if (one := named(name)) is not None:
        return one
    raise StartError(f"there is no cluster {name!r} that is kept. {others()}")


def others() -> str:
    """The names of those that are kept, in a sentence."""
    names = ", ".join(repr(one.name) for one in kept()) or "none"
    return f"Clusters that are kept on this machine: {names}."


def enter(one: Kept) -> Kept:
    """Be the kernel of a cluster that has none.

    Raises:
        StartError: it has one, or has just ended.
    """
    try:
        entered = _knock(Path(one.folder), "attach")
    except (OSError, EOFError):
        raise StartError(f"the cluster {one.name!r} has just ended.") from None
    if not entered.state:
        raise StartError(
            f"{one.name!r} is held by another kernel: {entered.standing}. End that one, and attach "
            "then; or make a cluster of your own under another name."
        )
    return entered


def end(one: Kept) -> None:
    """End a cluster, whoever has it, and wait until its folder is gone.

    Raises:
        StartError: it does not end.
    """
    with suppress(OSError, EOFError):
        _knock(Path(one.folder), "end")
    late = time.monotonic() + ENDS
    while folders.is_there(one.folder):
        if time.monotonic() > late:
            raise StartError(f"{one.name!r} has not ended within {ENDS:.0f} s: {one.folder}.")
        time.sleep(0.02)


def _knock(folder: Path, wants: str) -> Kept:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(ANSWER)
    line = Channel(sock)
    try:
        sock.connect(str(folder / NAME))
        line.send((wants, myself()))
        about, left, state = line.recv()
    except (OSError, EOFError):
        line.close()
        raise
    sock.settimeout(None)
    if not state:
        line.close()
    return Kept(str(folder), about, left, state, line if state else None)


_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def seconds(keep: str | float) -> float:
    """A time as a user gives it [s].

    Raises:
        StartError: it is none, or not more than 0.

    >>> seconds("1h"), seconds("1.5 min"), seconds(20)
    (3600.0, 90.0, 20.0)
    """
    parts = re.fullmatch(r"(\d+\.?\d*) ?(s|min|h|d|)", str(keep).strip())
    if isinstance(keep, bool) or not parts or not float(parts[1]) > 0:
        raise StartError(
            f"keep={keep!r}: say how long the cluster is to stay without a kernel, more than 0: "
            "keep='1h', '90min' or '2d', or a number of seconds."
        )
    return float(parts[1]) * _UNITS[parts[2]]


def in_words(time: float) -> str:
    """A time with one unit.

    >>> in_words(5400), in_words(3600), in_words(7.4)
    ('90 min', '1 h', '7.4 s')
    """
    for unit, size in list(_UNITS.items())[::-1]:
        if time >= 2 * size or time == size:
            return f"{time / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{time:.1f} s"


def choose(name: str, keep: str | float) -> Keep:
    """How to keep a cluster that is about to be made; without a name, one that is free.

    Raises:
        StartError: there is one of that name, or the time cannot be read.
    """
    taken = {one.name: one for one in kept()}
    if name in taken:
        raise StartError(
            f"a cluster named {name!r} is kept already ({taken[name].standing}). Go on with it: "
            f"dk.Cluster.attach({name!r}); end it: distkit clusters --stop {name}; or give another "
            "name=…."
        )
    free = (f"kept-{n}" for n in range(1, len(taken) + 2))
    return Keep(name or next(n for n in free if n not in taken), seconds(keep))
