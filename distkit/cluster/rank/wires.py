"""The other machines of a run that do not answer a rank."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

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
    import psutil  # which also knows the peers of connections that are not made yet

    connections = psutil.Process().net_connections("tcp")
    return sorted({c.raddr.ip for c in connections if c.raddr and _is_lost(c.fd)})


def _is_lost(fd: int) -> bool:
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, *_INFO)  # only Linux has it
        repeated, unacknowledged, silent = _ACKNOWLEDGED.unpack(info[: _ACKNOWLEDGED.size])
        return bool(repeated >= REPEATED and unacknowledged and silent > 1000 * UNHEARD)
    return False
