"""Detect links between machines that lose messages: ranks notice, the notebook reports."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress

#: TCP_INFO, and the number of its bytes that are read.
_INFO = (11, 136)

#: Its fields: retransmissions of the oldest packet, packets in flight, age of the last packet [ms].
_ACKNOWLEDGED = struct.Struct("=2xB21xI28xI")

#: Silence [s] and retransmissions after which a machine counts as unreachable.
MAX_SILENCE, MIN_RETRANSMISSIONS = 1.0, 3

#: Interval of checks for unreachable machines [s].
CHECK_INTERVAL = 0.5


def watch(report: Callable[[list[str]], None], over: threading.Event) -> None:
    """Call ``report`` from a thread whenever the set of unreachable machines changes.

    Args:
        report: called with the addresses of all unreachable machines.
        over: an event that ends the watch.
    """
    threading.Thread(target=_watch, args=(report, over), daemon=True).start()


def _watch(report: Callable[[list[str]], None], over: threading.Event) -> None:
    reported = list[str]()
    while not over.wait(CHECK_INTERVAL):
        if (now := unreached()) != reported:
            reported = now
            report(now)


def unreached() -> list[str]:
    """Return the addresses that do not acknowledge data of this process, or do not accept."""
    import psutil  # it also knows the peers of pending connections

    connections = psutil.Process().net_connections("tcp")
    return sorted({c.raddr.ip for c in connections if c.raddr and _is_lost(c.fd)})


def _is_lost(fd: int) -> bool:
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as sock:
        info = sock.getsockopt(socket.IPPROTO_TCP, *_INFO)  # only Linux has it
        retransmissions, unacknowledged, silence = _ACKNOWLEDGED.unpack(info[: _ACKNOWLEDGED.size])
        return bool(
            retransmissions >= MIN_RETRANSMISSIONS
            and unacknowledged
            and silence > 1000 * MAX_SILENCE
        )
    return False


class Links:
    """The links of a run that lose messages, according to its ranks."""

    def __init__(self) -> None:
        #: For two machines, the ranks on one that cannot reach the other.
        self._lost: dict[frozenset[str], set[int]] = defaultdict(set)

    def update(self, rank: int, here: str, machines: list[str]) -> Iterator[str]:
        """Record the machines that a rank on ``here`` cannot reach; yield each change of a link."""
        lost = {frozenset((here, other)) for other in machines}
        for pair in lost | {pair for pair, ranks in self._lost.items() if rank in ranks}:
            ranks = self._lost[pair]
            was_lost = bool(ranks)
            (ranks.add if pair in lost else ranks.discard)(rank)
            if was_lost != bool(ranks):
                yield (_recovered if was_lost else _loses)(rank, here, *sorted(pair))


def _loses(rank: int, here: str, first: str, second: str) -> str:
    """Return the message about a link; a rank does not know which direction loses packets."""
    return (
        f"the link between {first} and {second} loses messages: data of rank {rank} on {here} has "
        "not been acknowledged for a second. The run continues when the link recovers; "
        f"cluster.interrupt() ends it. distkit doctor --hosts {first},{second} names the direction."
    )


def _recovered(rank: int, here: str, first: str, second: str) -> str:
    return f"the link between {first} and {second} works again"
