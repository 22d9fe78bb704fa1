"""A server in a run, with its :class:`KVServer` and its copies of another server's values.

With one backup per server, a crash loses no acknowledged push.

::

    worker ──push──► primary ──copy──► backup        the primary handles the push, and responds
           ◄──ack───         ◄──ack───               only after the backup has received it

The backup handles the same messages in the same order, so both hold bitwise identical values. When
the primary has exited, the backup takes over; workers repeat unacknowledged requests, and a push
that the backup has accepted is not applied again. A second crash may lose values.

Source: primary-backup replication as in Alsberg & Day, 1976; the ring is Li et al.'s, 2014.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from distkit.kvstore.protocol.messages import (
    AddressBook,
    Change,
    Copy,
    Departed,
    Message,
    Reply,
    Request,
    Response,
)
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.transport.node import Node
from distkit.kvstore.transport.recording import record_update


def backup_of(server: int, servers: int) -> int:
    """Return the server that holds copies of another server's values, both numbered from 0.

    >>> [backup_of(server, servers=3) for server in range(3)]
    [1, 2, 0]
    """
    return (server + 1) % servers


class Backup:
    """The primary's side of replication. It holds responses until the copies have arrived.

    Args:
        node: id of the primary.
        target: id of the backup that receives the copies, or None if there is none.
    """

    def __init__(self, node: int, target: int | None = None) -> None:
        self._node, self.target = node, target
        self._copies_sent = self._copies_acknowledged = 0
        self._held_responses: deque[tuple[int, Message]] = deque()

    def copy(self, message: Message) -> list[Copy]:
        """Return the copy to send to the backup before this message is handled."""
        if self.target is None or not isinstance(message, Change):
            return []
        self._copies_sent += 1
        return [Copy(self._node, self._copies_sent, message)]

    def hold(self, responses: Sequence[Message]) -> list[Message]:
        """Return responses that may be sent; hold the others until the backup has the copies."""
        self._held_responses += [(self._copies_sent, response) for response in responses]
        return self.acknowledge(self._copies_acknowledged)

    def acknowledge(self, number: int) -> list[Message]:
        """Record that the backup has all copies up to ``number``; return the released responses."""
        self._copies_acknowledged = max(self._copies_acknowledged, number)
        responses: list[Message] = []
        while self._held_responses and self._held_responses[0][0] <= number:
            responses.append(self._held_responses.popleft()[1])
        return responses

    def handle_loss(self) -> list[Message]:
        """Record that the backup has exited; return the responses that waited for it."""
        self.target = None
        return self.acknowledge(self._copies_sent)


class ServerSession:
    """Passes a server's requests to its KVServer and replicates them, without I/O.

    ``stores`` holds, by server id, the stores that it serves: its own, and those of servers that it
    has taken over from. ``replicas`` holds its copies of other servers' stores.

    Args:
        node: the server's identity in the cluster.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stores: dict[int, KVServer] = {}
        self.replicas: dict[int, KVServer] = {}
        self.backup = Backup(node.id)
        self._departed: list[Departed] = []  # notices of workers' exits

    def handle_response(self, response: Response) -> list[Message]:
        """Handle a response from the scheduler or the backup; return messages to send."""
        match response:
            case AddressBook():
                self._start(response)
            case Departed():
                return self._handle_departure(response)
            case Reply():
                return self.backup.acknowledge(response.number)
        return []

    def _start(self, book: AddressBook) -> None:
        """Create the stores of this server and of the servers that it backs up."""
        n, options = self.node, book.options
        workers = [node for node in book.endpoints if node < n.workers]
        new_server = partial(
            KVServer,
            options.rule,
            workers,
            on_crash=options.on_crash,
            require_optimizer=not options.rule.has_rounds,
        )
        self.stores = {n.id: new_server(update_context=record_update)}
        if options.replication > 1:
            self.backup = Backup(n.id, n.workers + backup_of(n.index, n.servers))
            primaries = [i for i in range(n.servers) if backup_of(i, n.servers) == n.index]
            self.replicas = {n.workers + i: new_server() for i in primaries}

    def handle(self, request: Request, server: int) -> list[Message]:
        """Handle a worker's request to ``server``, or a copy from a primary."""
        if isinstance(request, Copy):
            return self._apply_copy(request)
        if server != self.node.id:
            return [*self._take_over(server).handle(request)]
        copies = self.backup.copy(request)
        return [*copies, *self.backup.hold(self.stores[server].handle(request))]

    # -- as a backup ------------------------------------------------------------

    def _apply_copy(self, copy: Copy) -> list[Message]:
        """Apply a copy and acknowledge it; the primary sends the responses.

        Late copies from a server that was taken over are ignored.
        """
        if copy.node not in self.replicas:
            return []
        self.replicas[copy.node].handle(copy.message)
        return [Reply(copy.node, copy.number)]

    def _take_over(self, server: int) -> KVServer:
        """Take over from a server that has exited, and return its store."""
        if server in self.replicas:
            store = self.stores[server] = self.replicas.pop(server)
            store.update_context = partial(record_update, server=server)
            for departed in self._departed:
                store.handle(departed)
        return self.stores[server]

    # -- nodes that exit ---------------------------------------------------------

    def _handle_departure(self, departed: Departed) -> list[Message]:
        node = departed.peer
        if node >= self.node.workers:
            if node in self.replicas:
                self._take_over(node)
            return self.backup.handle_loss() if node == self.backup.target else []
        self._departed.append(departed)
        copies = self.backup.copy(departed)
        responses = [r for store in self.stores.values() for r in store.handle(departed)]
        return [*copies, *self.backup.hold(responses)]
