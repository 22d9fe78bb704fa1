"""The other machines of a run that do not answer a rank."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

#: TCP_INFO and the size of its part that is read.
_INFO = (11, 136)

#: In it: how often the oldest packet was repeated, packets under way, how long no news came [ms].
_ACKNOWLEDGED = struct.Struct("=2xB21xI28xI")

#: A machine that acknowledges nothing for so long [s], and of so many repetitions, is not reached.
UNHEARD, REPEATED = 1.0, 3

#: How often to look for such machines [s].
LOOK = 0.5


def watch(report: Callable[[list[str]], None], over: threading.Event) -> None:
    """Until ``over``, call ``report`` when other machines are not reached, or are again.

    Args:
        report: called with the addresses of all that are not reached.
        over: ends the call.
    """
    known = list[str]()
    while not over.wait(LOOK):
        if (now := unreached()) != known:
            known = now
            report(now)


def unreached() -> list[str]:
    """The addresses that do not acknowledge what this process sends, or do not accept."""
    lost = {fd for fd in _sockets() if _is_lost(fd)}
    if not lost:
        return []
    import psutil  # which also knows the peers of connections that are not made yet

    connections = psutil.Process().net_connections("tcp")
    return sorted({c.raddr.ip for c in connections if c.fd in lost and c.raddr})


def _is_lost(fd: int) -> bool:
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            info = one.getsockopt(socket.IPPROTO_TCP, *_INFO)  # only Linux has it
            repeated, unacknowledged, silent = _ACKNOWLEDGED.unpack(info[: _ACKNOWLEDGED.size])
            return bool(repeated >= REPEATED and unacknowledged and silent > 1000 * UNHEARD)
    return False


def _sockets() -> Iterator[int]:
    for name in Path("/dev/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name.name)).st_mode):
                yield int(name.name)
