"""The connections of a rank's process groups, and the machines that do not answer on them."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d as c10d

#: TCP_INFO and the size of its part that is read.
_INFO = (11, 136)

#: In it: how often the oldest packet was repeated, packets under way, how long no news came [ms].
_ACKNOWLEDGED = struct.Struct("=2xB21xI28xI")

#: A machine that acknowledges nothing for so long [s], and of so many repetitions, is not reached.
UNHEARD, REPEATED = 1.0, 3


class Wires:
    """The connections that the process groups of this rank have opened."""

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}  # fd -> inode

    def note_groups(self, made: Callable[[Any], object]) -> None:
        """Note those of each group that is made from now on, which ``made`` is called with."""
        helper = c10d._new_process_group_helper

        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            with self._noting():
                result = helper(*args, **kwargs)
            made(result[0] if isinstance(result, tuple) else result)
            return result

        c10d._new_process_group_helper = new_process_group_helper

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
