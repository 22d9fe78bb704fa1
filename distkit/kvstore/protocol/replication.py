"""Copies of a server's values on other servers: a crash loses nothing that was acknowledged.

::

    worker ──push──► primary ──copy──► backups        the primary handles the push, and tells
           ◄──ack───         ◄──ack───                nobody before every backup has it, too

A backup handles the same messages in the same order, and so has the same values to the bit. When
the primary has ended, a backup takes its address over. Workers repeat what was not acknowledged;
the ledger of pushes knows which of it had arrived. With replication factor R each value is on R
servers, in a ring, and R − 1 of these may crash at once. A process that comes to take a dead one's
place in the ring gets whole copies; when it has them, as many may crash again.

Source: primary-backup replication as in Alsberg & Day, 1976; the ring is Li et al.'s, 2014.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from typing import TypeAlias, TypeGuard

from msgspec.structs import replace

from distkit.kvstore.protocol.entry import Entry, ServerState
from distkit.kvstore.protocol.messages import (
    Departed,
    Init,
    Message,
    Push,
    Request,
    Rest,
    SetOptimizer,
    SetState,
)
from distkit.kvstore.protocol.optimizer import from_spec
from distkit.kvstore.protocol.server import KVServer

#: What changes a server's values, or how they will change.
Change: TypeAlias = Push | Rest | SetOptimizer | SetState | Departed | Init


class Portion(Request):
    """A part of the state of server ``node``: what concerns all, or one key; ``left`` more come."""

    kept: ServerState | Entry
    left: int


class Copy(Request):
    """From server ``node`` to its backup ``to``: handle this message as I did."""

    to: int
    message: Change | Portion


def ring(server: int, servers: int, replication: int) -> list[int]:
    """Those who have a server's values, numbered from 0: itself, then its backups in order.

    >>> ring(2, servers=4, replication=3)
    [2, 3, 0]
    """
    return [(server + k) % servers for k in range(replication)]


def changes(message: Message) -> TypeGuard[Change]:
    """True if the backups must have it."""
    return isinstance(message, Change) and not (isinstance(message, Init) and message.value is None)


def portions(run: int, server: int, store: KVServer) -> list[Portion]:
    """All that a server keeps: what concerns all its keys, then one portion for each key.

    Pulls that wait are not among it: who waits asks again whoever serves next.
    """
    whole: list[ServerState | Entry]
    whole = [store.state, *(replace(entry, waiting={}) for entry in store.entries.values())]
    last = len(whole) - 1
    return [Portion(run, server, n, deepcopy(kept), last - n) for n, kept in enumerate(whole)]


def restore(store: KVServer, found: Iterable[Portion]) -> KVServer:
    """A fresh server becomes the one that these portions are of."""
    for kept in (portion.kept for portion in found):
        if isinstance(kept, ServerState):
            store.state = kept
            store.optimizer = kept.rule and from_spec(*kept.rule)
        else:
            store.entries[kept.key] = kept
    return store


class Backups:
    """The primary's side: which copies are under way, and the answers that wait for them.

    ``nodes`` have all that was acknowledged, and nothing is before they have it; ``joining`` are
    those to whom a whole copy is under way, and nobody waits for them.

    Args:
        run: number of the run.
        node: the primary's id.
        nodes: the ids of its backups.
        first: numbers of copies count from here.
    """

    def __init__(self, run: int, node: int, nodes: Collection[int], first: int = 0) -> None:
        self._run, self._node, self.nodes, self._number = run, node, list(nodes), first
        self.joining: dict[int, int] = {}  # with the last copy of all that there was
        self._under_way: dict[int, int] = {}  # copy: backup
        self._held: deque[tuple[int, list[Message]]] = deque()

    def copies(self, message: Message) -> list[Copy]:
        """One for each backup."""
        if not (self.nodes or self.joining) or not changes(message):
            return []
        return self._copied(message, [*self.nodes, *self.joining])

    def _copied(self, message: Change | Portion, nodes: Collection[int]) -> list[Copy]:
        found = []
        for to in nodes:
            self._number += 1
            self._under_way[self._number] = to
            found.append(Copy(self._run, self._node, self._number, to, message))
        return found

    def begin(self, node: int, everything: Iterable[Portion]) -> list[Copy]:
        """A whole copy for a backup; one that is not among :attr:`nodes` joins them with it."""
        found = [copy for message in everything for copy in self._copied(message, [node])]
        if node not in self.nodes:
            self.joining[node] = self._number
        return found

    def hold(self, answers: Sequence[Message]) -> list[Message]:
        """Those that may leave now: the others wait until all copies so far have arrived."""
        if not self._under_way and not self._held:
            return list(answers)
        if answers:
            self._held.append((self._number, list(answers)))
        return self._released()

    def arrived(self, number: int) -> list[int]:
        """A backup has this copy: the backups whose copy is a whole one with it."""
        self._under_way.pop(number, None)
        whole = [node for node, last in self.joining.items() if last == number]
        for node in whole:
            del self.joining[node]
            self.nodes.append(node)
        return whole

    def lost(self, node: int) -> list[Message]:
        """A backup has ended: nobody waits for it any more."""
        self.nodes = [n for n in self.nodes if n != node]
        self.joining.pop(node, None)
        self._under_way = {n: to for n, to in self._under_way.items() if to != node}
        return self._released()

    def _released(self) -> list[Message]:
        waited = (n for n, to in self._under_way.items() if to not in self.joining)
        oldest = next(waited, self._number + 1)
        found: list[Message] = []
        while self._held and self._held[0][0] < oldest:
            found += self._held.popleft()[1]
        return found
