"""Those who ask a server or the scheduler: who they are, and when their connections end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distkit.kvstore.protocol.messages import Request
from distkit.kvstore.transport.memory import Exchange, Pool
from distkit.kvstore.transport.scheduler import LIFE
from distkit.kvstore.transport.sockets import Ends, connection


@dataclass
class Peer:
    """A node that asks: who it is, the way back to it, and what both lend."""

    node: int
    run: int
    identity: bytes
    exchange: Exchange
    line: int = 0  # of its connections to this node, which this is
    last: int = 0  # number of its latest request
    #: The pulls that it waits for, each with the push that it came with, or itself: their numbers.
    open: dict[int, int] = field(default_factory=dict)

    @property
    def age(self) -> tuple[int, int]:
        """Greater for later connections of one node in one run."""
        return self.last // LIFE, self.line


class Peers:
    """The connections of a ROUTER that nodes ask by.

    ``ways`` has the latest of each node: answers go there.

    Args:
        ends: hears when connections end.
        pool: where tensors lie that are lent to them.
    """

    def __init__(self, ends: Ends, pool: Pool | None) -> None:
        self._ends, self._pool = ends, pool
        self._peers: dict[bytes, Peer] = {}  # by ZeroMQ's name of the connection
        self.ways: dict[int, Peer] = {}
        self._descriptors: dict[int, bytes] = {}  # of connections
        self._parted: list[bytes] = []  # connections that have ended

    def at(self, name: bytes) -> Peer:
        """The node at the other end of a connection; -1 while nobody knows which."""
        return self._peers.get(name) or Peer(-1, -1, name, Exchange(self._pool, writable=True))

    def know(self, peer: Peer, latest: Request, frame: Any) -> None:
        """It is the node that asked this; ``frame`` came from it.

        What came by an earlier connection than the present one may be read after what came by that.
        """
        peer.node, peer.run, peer.last = latest.node, latest.run, latest.number
        if peer.identity not in self._peers:
            self.look()
            self._descriptors[connection(frame)] = peer.identity
            self._peers[peer.identity] = peer
        way = self.ways.get(peer.node)
        same = way is not None and (way.node, way.run) == (peer.node, peer.run)
        if way is None or not same or way.age <= peer.age:
            self.ways[peer.node] = peer

    def look(self) -> None:
        """The connections that have ended: read before a new one may reuse a descriptor."""
        self._parted += [self._descriptors.pop(d, b"") for d in self._ends.broken()]

    @property
    def parted(self) -> bool:
        """True if connections have ended."""
        return bool(self._parted)

    def part(self) -> list[Peer]:
        """Those whose connections have ended without a last word, and who have no other."""
        names, self._parted = self._parted, []
        return [peer for name in names if (peer := self.forget(name)) is not None]

    def forget(self, name: bytes) -> Peer | None:
        """Nothing more comes by this connection: its node, unless that has another."""
        peer = self._peers.pop(name, None)
        if peer is None or self.ways.get(peer.node) is not peer:
            return None
        return self.ways.pop(peer.node)
