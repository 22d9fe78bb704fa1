"""A server of a run: its :class:`KVServer`, and its copies of another server's values.

With one backup for each server a crash loses nothing that was acknowledged.

::

    worker ──push──► primary ──copy──► backup        the primary handles the push, and answers
           ◄──ack───         ◄──ack───               nobody before its backup has it, too

The backup handles the same messages in the same order, and so has the same values to the bit. When
the primary has ended, the backup serves in its place; workers repeat what was not acknowledged,
and a push that the backup knows counts once. A second crash may lose values.

Source: primary-backup replication as in Alsberg & Day, 1976; the ring is Li et al.'s, 2014.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial

from distkit.kvstore.protocol.messages import (
    FINISHED,
    AddressBook,
    Answer,
    Change,
    Copy,
    Departed,
    Message,
    Register,
    Reply,
    Request,
)
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.recording import updating


def backup_of(server: int, servers: int) -> int:
    """The server that has copies of another's values, both numbered from 0.

    >>> [backup_of(server, servers=3) for server in range(3)]
    [1, 2, 0]
    """
    return (server + 1) % servers


class Backup:
    """The primary's side: the answers that wait for copies to arrive.

    Args:
        node: id of the primary.
        to: id of its backup, to which copies go; None if there is none.
    """

    def __init__(self, node: int, to: int | None = None) -> None:
        self._node, self.to = node, to
        self._made = self._arrived = 0
        self._held: deque[tuple[int, Message]] = deque()

    def copy(self, message: Message) -> list[Copy]:
        """What is sent to the backup before this message is handled."""
        if self.to is None or not isinstance(message, Change):
            return []
        self._made += 1
        return [Copy(self._node, self._made, message)]

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


class ServerSession:
    """Registers a server and hands its requests to its KVServer; no I/O.

    ``stores`` has its values, by server: with those of a server whose backup it was. ``replicas``
    has its copies of values of servers that are there.

    Args:
        node: the server's place in the cluster.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stores: dict[int, KVServer] = {}
        self.replicas: dict[int, KVServer] = {}
        self.backup = Backup(node.id)
        self._departed: list[Departed] = []  # workers

    def register(self, endpoint: str) -> Register:
        """The server's own request to the scheduler, with the endpoint it listens on."""
        return Register(self.node.id, 0, endpoint, pid=os.getpid())

    def handle_answer(self, answer: Answer) -> list[Message]:
        """Handle an answer of the scheduler, or of the backup."""
        match answer:
            case AddressBook():
                self._open(answer)
            case Departed():
                return self._depart(answer)
            case Reply():
                return self.backup.arrived(answer.number)
        return []

    def _open(self, book: AddressBook) -> None:
        """Serve from now on."""
        n, terms = self.node, book.terms
        workers = [node for node in book.endpoints if node < n.workers]
        must_update, on_crash = not terms.sync, terms.on_crash
        fresh = partial(KVServer, terms.rule, workers, on_crash=on_crash, must_update=must_update)
        self.stores = {n.id: fresh(watch=updating)}
        if terms.replication > 1:
            self.backup = Backup(n.id, n.workers + backup_of(n.index, n.servers))
            others = [i for i in range(n.servers) if backup_of(i, n.servers) == n.index]
            self.replicas = {n.workers + i: fresh() for i in others}

    def handle(self, request: Request, to: int) -> list[Message]:
        """Answer a worker's request to server ``to``, or a server whose backup this is."""
        if isinstance(request, Copy):
            return self._apply_copy(request)
        if to != self.node.id:
            return [*self._in_place_of(to).handle(request)]
        copies = self.backup.copy(request)
        return [*copies, *self.backup.hold(self.stores[to].handle(request))]

    # -- as a backup ------------------------------------------------------------

    def _apply_copy(self, copy: Copy) -> list[Message]:
        """Do as the primary did; its answers are the primary's to give.

        Copies from a server in whose place this one serves are acknowledged to nobody.
        """
        if copy.node not in self.replicas:
            return []
        self.replicas[copy.node].handle(copy.message)
        return [Reply(copy.node, copy.number)]

    def _in_place_of(self, server: int) -> KVServer:
        """The store of a server that has ended: its copy, from now on."""
        if server in self.replicas:
            store = self.stores[server] = self.replicas.pop(server)
            store.watch = partial(updating, server=server)
            for departed in self._departed:
                store.handle(departed)
        return self.stores[server]

    # -- others that end --------------------------------------------------------

    def leave(self, node: int, life: int, how: str) -> list[Message]:
        """The connection of a node has broken: if it has ended, the scheduler says so."""
        return []

    def finish(self, node: int, last: int) -> list[Message]:
        """A node has ended in order: its work is done, and this was its last request."""
        return self._depart(Departed(self.node.id, 0, node, FINISHED, last))

    def _depart(self, departed: Departed) -> list[Message]:
        who = departed.who
        if who >= self.node.workers:
            if who in self.replicas:
                self._in_place_of(who)
            return self.backup.lost() if who == self.backup.to else []
        self._departed.append(departed)
        copies = self.backup.copy(departed)
        answers = [a for store in self.stores.values() for a in store.handle(departed)]
        return [*copies, *self.backup.hold(answers)]
