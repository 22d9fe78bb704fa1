"""Copies of a server's values on other servers: a crash loses nothing that was acknowledged.

::

    worker ──push──► primary ──copy──► backups        the primary handles the push, and tells
           ◄──ack───         ◄──ack───                nobody before every backup has it, too

A backup handles the same messages in the same order, and so has the same values to the bit. When
the primary has ended, the first backup that is left takes its address over. Workers repeat what was
not acknowledged; the ledger of pushes knows which of it had arrived. With replication factor R
each value is on R servers, in a ring, and R − 1 of these may crash.

Source: primary-backup replication as in Alsberg & Day, 1976; the ring is Li et al.'s, 2014.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from distkit.kvstore.messages import (
    Answer,
    Copy,
    Departed,
    Init,
    Message,
    Push,
    Rest,
    SetOptimizer,
    SetState,
)
from distkit.kvstore.wire import filled, outline

#: What changes a server's values, or how they will change.
_CHANGES = (Push, Rest, SetOptimizer, SetState, Departed)


def ring(server: int, servers: int, replication: int) -> list[int]:
    """Those who have a server's values, numbered from 0: itself, then its backups in order.

    >>> ring(2, servers=4, replication=3)
    [2, 3, 0]
    """
    return [(server + k) % servers for k in range(replication)]


def changes(message: Message) -> bool:
    """Whether the backups must have it."""
    return isinstance(message, _CHANGES) or (
        isinstance(message, Init) and message.value is not None
    )


def original(copy: Copy) -> Message:
    """The message that was copied.

    Raises:
        KVStoreError: it is none.
    """
    return filled(copy.text, copy.value)


class Backups:
    """The primary's side: which copies are under way, and the answers that wait for them.

    Args:
        run: number of the run.
        node: the primary's id.
        nodes: the ids of its backups.
        first: numbers of copies count from here.
    """

    def __init__(self, run: int, node: int, nodes: Collection[int], first: int = 0) -> None:
        self._run, self._node, self.nodes, self._number = run, node, list(nodes), first
        self._under_way: dict[int, int] = {}  # copy: backup
        self._held: deque[tuple[int, list[Answer]]] = deque()

    def copies(self, message: Message) -> list[Copy]:
        """One for each backup."""
        if not self.nodes or not changes(message):
            return []
        text = outline(message)
        found = []
        for to in self.nodes:
            self._number += 1
            self._under_way[self._number] = to
            value = getattr(message, "value", None)
            found.append(Copy(self._run, self._node, self._number, to, text, value))
        return found

    def hold(self, answers: list[Answer]) -> list[Answer]:
        """Those that may leave now: the others wait until all copies so far have arrived."""
        if not self._under_way and not self._held:
            return answers
        if answers:
            self._held.append((self._number, answers))
        return self._released()

    def arrived(self, number: int) -> list[Answer]:
        """A backup has this copy: the answers that waited for it."""
        self._under_way.pop(number, None)
        return self._released()

    def lost(self, node: int) -> list[Answer]:
        """A backup has ended: nobody waits for it any more."""
        self.nodes = [n for n in self.nodes if n != node]
        self._under_way = {n: to for n, to in self._under_way.items() if to != node}
        return self._released()

    def _released(self) -> list[Answer]:
        oldest = next(iter(self._under_way), self._number + 1)
        found: list[Answer] = []
        while self._held and self._held[0][0] < oldest:
            found += self._held.popleft()[1]
        return found
