"""State of a server: of each key, of the pushes that it has accepted, and of its workers.

A copy of a server is made of these; what a run's terms say is not among it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct, field
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Describe, Init, Key, Pull, Push, Reply, Request
from distkit.kvstore.protocol.placement import Layout, dtype_name
from distkit.kvstore.protocol.sparse import unpack


class Entry(Struct, array_like=True, tag=True, eq=False):
    """A key on this server.

    ``value`` is replaced, never changed in place: an answer on its way keeps the version it
    was asked for. ``rounds`` holds the gradients that wait for their round to be complete, by
    round and worker; ``clocks`` counts each worker's gradients; ``waiting`` are the pulls that
    wait, with their worker's clock when they came; ``dropped`` counts gradients that were late.
    ``functions`` counts the gradients of each function that may run again, from number ``floor``.
    ``slots`` are what the optimizer keeps, and ``updates`` counts those that it made.
    """

    key: Key
    layout: Layout
    value: Tensor
    first: tuple[int, int]  # node and number of the init
    version: int = 0
    slots: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0
    rounds: dict[int, dict[int, Push]] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    waiting: dict[tuple[int, int], tuple[Pull, int]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    functions: dict[int, int] = field(default_factory=dict)
    floor: int = 0

    @classmethod
    def of(cls, init: Init) -> Entry:
        """A new key, with its first value.

        Raises:
            KVStoreError: the value is packed, and not of this key.
        """
        assert init.value is not None
        layout, value = Layout(init.shape, init.dtype), init.value
        if init.codec:
            value = unpack(init.codec, value)
            if value.numel() > layout.size or dtype_name(value) != layout.dtype:
                raise KVStoreError(f"init of {init.key!r} as {layout} with other rows.")
            value = value.to_dense()
        return cls(init.key, layout, value, (init.node, init.number))

    @property
    def arrived(self) -> dict[int, Push]:
        """The gradients of the present round that are here, by worker."""
        return self.rounds.get(self.version, {})

    def take_round(self) -> list[Push]:
        """They leave, in the order of workers: the same sum in every run."""
        arrived = self.rounds.pop(self.version)
        return [arrived[worker] for worker in sorted(arrived)]

    def knows(self, push: Push) -> bool:
        """True if its function has run before, and this gradient of it was accepted then."""
        if not push.once:
            return False
        function, nth, _ = push.once
        return function < self.floor or nth < self.functions.get(function, 0)

    def accept(self, push: Push) -> None:
        """Count it for its function."""
        if push.once:
            function, nth, self.floor = *push.once[:2], max(self.floor, push.once[2])
            self.functions = {f: n for f, n in self.functions.items() if f >= self.floor}
            self.functions[function] = nth + 1

    def reply(self, request: Request, value: Tensor | None = None) -> Reply:
        """Done, at the present version."""
        head = request.run, request.node, request.number
        asked = isinstance(request, Describe)
        layout = (self.layout.shape, self.layout.dtype) if asked else None
        return Reply(*head, self.version, value, self.dropped.get(request.node, 0), layout)


class Update(NamedTuple):
    """An update by ``pushes`` about to be applied to ``entry``, which has this ``version``."""

    entry: Entry
    version: int
    pushes: list[Push]

    @property
    def workers(self) -> tuple[int, ...]:
        """Whose gradients they are."""
        return tuple(p.node for p in self.pushes)

    @property
    def staleness(self) -> tuple[int, ...]:
        """The staleness of each gradient: updates of the value since its worker pulled it."""
        return tuple(self.version - p.version for p in self.pushes)


class Ledger(Struct, array_like=True):
    """The accepted pushes: one that arrives twice counts once.

    A worker tells with each push below which number it has all answers (``settled``): a push
    with such a number is an echo, and needs no place in memory.
    """

    settled: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, set[int]] = field(default_factory=dict)

    def over(self, node: int, number: int) -> bool:
        """True if all of this node's pushes with a lower number are."""
        return self.settled.get(node, 0) >= number

    def knows(self, push: Push) -> bool:
        """True if it was accepted before."""
        echo = push.number < self.settled.get(push.node, 0)
        return echo or push.number in self.accepted.get(push.node, ())

    def accept(self, push: Push) -> None:
        """It counts, now."""
        self.end(push.node, push.settled)
        self.accepted.setdefault(push.node, set()).add(push.number)

    def end(self, node: int, settled: int) -> None:
        """Whatever still comes of this node with a lower number is an echo."""
        if settled > self.settled.get(node, 0):
            self.settled[node] = settled
            self.accepted[node] = {n for n in self.accepted.get(node, ()) if n >= settled}


class ServerState(Struct, array_like=True, tag=True):
    """What concerns all keys of a server.

    ``members`` are those whose gradients make the updates, ``givers`` those who may give first
    values: the first of them that is left does. ``gone`` have ended, and how; ``newcomers`` took
    or will take a place. ``over`` tells for each worker what it asked before it was given up.
    ``resting`` tells at which barrier a worker waits, ``barriers`` how many were passed, as far as
    is known here. ``asked`` are to give the value of a key that worker 0 did not. ``updates``
    counts those of the most updated key; ``rule`` is the optimizer, as it was set.
    """

    members: set[int]
    givers: set[int]
    gone: dict[int, str] = field(default_factory=dict)
    newcomers: set[int] = field(default_factory=set)
    ledger: Ledger = field(default_factory=Ledger)
    over: dict[int, int] = field(default_factory=dict)
    resting: dict[int, int] = field(default_factory=dict)
    barriers: int = 0
    asked: set[tuple[Key, int]] = field(default_factory=set)
    updates: int = 0
    rule: tuple[str, dict[str, Any]] | None = None
