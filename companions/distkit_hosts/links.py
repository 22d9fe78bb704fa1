"""Links between machines that lose messages: a rank notices, the notebook tells."""

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

#: In it: how often the oldest packet was repeated, packets under way, how long no news came [ms].
_ACKNOWLEDGED = struct.Struct("=2xB21xI28xI")

#: A machine that acknowledges nothing for so long [s], and of so many repetitions, is not reached.
UNHEARD, REPEATED = 1.0, 3

#: How often to look for such machines [s].
LOOK = 0.5


def watch(report: Callable[[list[str]], None], over: threading.Event) -> None:
    """Until ``over``, call ``report`` from a thread when machines are not reached, or are again.

    Args:
        report: called with the addresses of all that are not reached.
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


class Links:
    """The links of a run that lose messages, by what its ranks cannot reach."""

    def __init__(self) -> None:
        #: Two machines, and the ranks that do not reach the other of them.
        self._lost: dict[frozenset[str], set[int]] = defaultdict(set)

    def update(self, rank: int, here: str, machines: list[str]) -> Iterator[str]:
        """Note which machines a rank on ``here`` cannot reach; yield each change of a link once."""
        lost = {frozenset((here, other)) for other in machines}
        for two in lost | {two for two, ranks in self._lost.items() if rank in ranks}:
            ranks = self._lost[two]
            known = bool(ranks)
            (ranks.add if two in lost else ranks.discard)(rank)
            if known != bool(ranks):
                yield (_works if known else _loses)(rank, here, *sorted(two))


def _loses(rank: int, here: str, first: str, second: str) -> str:
    """Messages between two machines are lost, or the answers to them: a rank cannot tell which."""
    return (
        f"the link between {first} and {second} loses messages: what rank {rank} on {here} sends "
        "has not been acknowledged for a second. The run continues when the link does; "
        f"cluster.interrupt() ends it. distkit doctor --hosts {first},{second} names the direction."
    )


def _works(rank: int, here: str, first: str, second: str) -> str:
    return f"the link between {first} and {second} works again"
