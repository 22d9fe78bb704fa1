"""One backup for each server: a crash loses nothing that was acknowledged.

::

    worker ──push──► primary ──copy──► backup        the primary handles the push, and answers
           ◄──ack───         ◄──ack───               nobody before its backup has it, too

The backup handles the same messages in the same order, and so has the same values to the bit. When
the primary has ended, the backup serves in its place; workers repeat what was not acknowledged,
and a push that the backup knows counts once. A second crash may lose values.

Source: primary-backup replication as in Alsberg & Day, 1976; the ring is Li et al.'s, 2014.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from distkit.kvstore.protocol.messages import (
    Assign,
    AtBarrier,
    Departed,
    Init,
    Message,
    Push,
    Request,
    SetOptimizer,
)

#: What changes a server's values, or how they will change.
Change: TypeAlias = Push | AtBarrier | SetOptimizer | Assign | Departed | Init


class Copy(Request):
    """From server ``node`` to its backup: handle this message as I did."""

    message: Change


def backup_of(server: int, servers: int) -> int:
    """The server that has copies of another's values, both numbered from 0.

    >>> [backup_of(server, servers=3) for server in range(3)]
    [1, 2, 0]
    """
    return (server + 1) % servers


class Backup:
    """The primary's side: the answers that wait for copies to arrive.

    Args:
        run: number of the run.
        node: the primary's id.
        to: the backup's id; None if there is none.
    """

    def __init__(self, run: int, node: int, to: int | None = None) -> None:
        self._run, self._node, self.to = run, node, to
        self._made = self._arrived = 0
        self._held: deque[tuple[int, Message]] = deque()

    def copy(self, message: Message) -> list[Copy]:
        """What is sent to the backup before this message is handled."""
        if self.to is None or not isinstance(message, Change):
            return []
        self._made += 1
        return [Copy(self._run, self._node, self._made, message)]

    def hold(self, answers: Sequence[Message]) -> list[Message]:
        """The answers that may leave now: the others wait until all copies so far have arrived."""
        if not self._held and self._arrived == self._made:
            return list(answers)
        self._held += [(self._made, answer) for answer in answers]
        return []

    def arrived(self, number: int) -> list[Message]:
        """The backup has this copy: the answers that waited for it."""
        self._arrived = max(self._arrived, number)
        found: list[Message] = []
        while self._held and self._held[0][0] <= number:
            found.append(self._held.popleft()[1])
        return found

    def lost(self) -> list[Message]:
        """The backup has ended: nothing waits for it any more."""
        self.to = None
        return self.arrived(self._made)
