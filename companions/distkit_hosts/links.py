"""Links between machines that lose messages: ranks notice them, and the notebook reports them."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress

#: TCP_INFO and the size of its part that is read.
_INFO = (11, 136)

#: Its fields: repetitions of the oldest packet, packets in flight, time since the last packet [ms].
_ACKNOWLEDGED = struct.Struct("=2xB21xI28xI")

#: A machine is unreached after this time without an acknowledgement [s], and these repetitions.
UNHEARD, REPEATED = 1.0, 3

#: Interval of checks for such machines [s].
LOOK = 0.5


def watch(report: Callable[[list[str]], None], over: threading.Event) -> None:
    """Call ``report`` from a thread whenever the set of unreached machines changes.

    Args:
        report: called with the addresses of all unreached machines.
        over: ends the watch.
    """
    threading.Thread(target=_watch, args=(report, over), daemon=True).start()


def _watch(report: Callable[[list[str]], None], over: threading.Event) -> None:
    known = list[str]()
    while not over.wait(LOOK):
        if (now := unreached()) != known:
            known = now
            report(now)


def unreached() -> list[str]:
    """Return the addresses that do not acknowledge what this process sends, or do not accept."""
    import psutil  # which also knows the peers of connections that are not made yet

    connections = psutil.Process().net_connections("tcp")
    return sorted({c.raddr.ip for c in connections if c.raddr and _is_lost(c.fd)})


def _is_lost(fd: int) -> bool:
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, *_INFO)  # only Linux has it
        repeated, unacknowledged, silent = _ACKNOWLEDGED.unpack(info[: _ACKNOWLEDGED.size])
        return bool(repeated >= REPEATED and unacknowledged and silent > 1000 * UNHEARD)
    return False


class Links:
    """The links of a run that lose messages, as its ranks report them."""

    def __init__(self) -> None:
        #: For two machines, the ranks on one that do not reach the other.
        self._lost: dict[frozenset[str], set[int]] = defaultdict(set)

    def update(self, rank: int, here: str, machines: list[str]) -> Iterator[str]:
        """Record the machines that a rank on ``here`` cannot reach, and yield changes of links."""
        lost = {frozenset((here, other)) for other in machines}
        for two in lost | {two for two, ranks in self._lost.items() if rank in ranks}:
            ranks = self._lost[two]
            known = bool(ranks)
            (ranks.add if two in lost else ranks.discard)(rank)
            if known != bool(ranks):
                yield (_works if known else _loses)(rank, here, *sorted(two))


def _loses(rank: int, here: str, first: str, second: str) -> str:
    """Return the message about a link; a rank cannot tell in which direction it loses packets."""
    return (
        f"the link between {first} and {second} loses messages: what rank {rank} on {here} sends "
        "has not been acknowledged for a second. The run continues when the link does; "
        f"cluster.interrupt() ends it. distkit doctor --hosts {first},{second} names the direction."
    )


def _works(rank: int, here: str, first: str, second: str) -> str:
    return f"the link between {first} and {second} works again"
