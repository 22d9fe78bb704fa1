"""The connections of a rank's process groups, and how to cut them.

A blocked gloo call cannot be interrupted, but its connections can be shut down: then it raises at
once.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d as c10d

#: How long the threads of a group get to finish what they are doing [s].
REST = 0.02

#: A group that is to be left while much travels gets this long to come to rest [s].
MOVING = 0.5

#: TCP_INFO and its size; in it, how many bytes of a connection have arrived, there and here.
_INFO, _BYTES = (11, 136), slice(120, 136)

#: In it: how often the oldest packet was repeated, packets under way, how long no news came [ms].
_ACKNOWLEDGED = struct.Struct("=2xB21xI28xI")

#: A machine that acknowledges nothing for so long [s], and of so many repetitions, is not reached.
UNHEARD, REPEATED = 1.0, 3


class Wires:
    """The connections that the process groups of this rank have opened."""

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}  # fd -> inode
        self.severed = False

    def note_groups(self, made: Callable[[Any], object] = lambda group: None) -> None:
        """Note those of each group that is made from now on, which ``made`` is called with."""
        helper = c10d._new_process_group_helper

        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            with self._noting():
                result = helper(*args, **kwargs)
            made(result[0] if isinstance(result, tuple) else result)
            return result

        c10d._new_process_group_helper = new_process_group_helper

    def clear(self) -> None:
        """Forget them: they are closed, and others will be opened."""
        self._noted.clear()
        self.severed = False

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Remember the connections that are opened meanwhile: they are the group's."""
        before = set(_connections())
        try:
            yield
        finally:
            for fd, inode in _connections():
                if (fd, inode) not in before:
                    self._noted[fd] = inode

    def sever(self) -> None:
        """Shut them down, so that a call blocked on them raises.

        Only for reading: gloo then closes them itself, and what it still writes does not fail.
        Only connected sockets: to shut gloo's listening socket down aborts the process.
        """
        for wire in self._wires():
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RD)
        self._noted.clear()
        self.severed = True

    def rest(self, wait: Callable[[float], bool]) -> None:
        """Wait until nothing travels on the group's connections, or ``wait`` says to go on.

        gloo forgets what it is writing or reading when a connection breaks, and whoever waits for
        it waits for ever (``Pair::signalException`` in its ``transport/tcp/pair.cc``).
        """
        before, end = None, time.monotonic() + MOVING
        with suppress(OSError):  # only Linux tells
            while time.monotonic() < end:
                now = [w.getsockopt(socket.IPPROTO_TCP, *_INFO)[_BYTES] for w in self._wires()]
                if now == before or wait(REST):
                    return
                before = now

    def unreached(self) -> list[str]:
        """The addresses of other machines that do not acknowledge what was sent to them."""
        lost = set()
        for wire in self._wires():
            with suppress(OSError, struct.error):  # only Linux tells; or it has just been closed
                repeated, unacknowledged, silent = _ACKNOWLEDGED.unpack(
                    wire.getsockopt(socket.IPPROTO_TCP, *_INFO)[: _ACKNOWLEDGED.size]
                )
                if repeated >= REPEATED and unacknowledged and silent > 1000 * UNHEARD:
                    lost.add(str(wire.getpeername()[0]))
        return sorted(lost)

    def _wires(self) -> Iterator[socket.socket]:
        """The group's connections that are open, each while it is looked at."""
        open_now = dict(_connections())
        for fd, inode in list(self._noted.items()):
            if open_now.get(fd) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as wire:
                    yield wire


def _connections() -> list[tuple[int, int]]:
    """``(fd, inode)`` of this process's connected TCP sockets."""
    found = []
    for name in Path("/dev/fd").iterdir():
        fd = int(name.name)
        try:
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                    s.getpeername()
                    found.append((fd, status.st_ino))
        except OSError:  # closed meanwhile, or not connected
            continue
    return found
