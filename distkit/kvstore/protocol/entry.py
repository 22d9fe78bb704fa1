"""State of a server: of each key, and of the pushes that it has accepted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.messages import Init, Key, Pull, Push, Reply, Request
from distkit.kvstore.protocol.optimizer import State
from distkit.kvstore.protocol.placement import Layout, dtype_name
from distkit.kvstore.protocol.sparse import unpack

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Entry:
    """A key on this server.

    ``value`` is replaced, never changed in place: an answer on its way keeps the version it
    was asked for. ``rounds`` holds the gradients that wait for their round to be complete, by
    round and worker; ``clocks`` counts each worker's gradients; ``waiting`` are the pulls that
    wait, with their worker's clock when they came; ``dropped`` counts gradients that were late.
    ``slots`` are what the optimizer keeps, and ``updates`` counts those that it made.
    """

    layout: Layout
    value: Tensor
    first: tuple[int, int]  # node and number of the init
    version: int = 0
    slots: State = field(default_factory=dict)
    updates: int = 0
    rounds: dict[int, dict[int, Push]] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    waiting: dict[tuple[int, int], tuple[Pull, int]] = field(default_factory=dict)
    dropped: Counter[int] = field(default_factory=Counter)

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
        return cls(layout, value, (init.node, init.number))

    @property
    def arrived(self) -> dict[int, Push]:
        """The gradients of the present round that are here, by worker."""
        return self.rounds.get(self.version, {})

    def take_round(self) -> list[Push]:
        """They leave, in the order of workers: the same sum in every run."""
        arrived = self.rounds.pop(self.version)
        return [arrived[worker] for worker in sorted(arrived)]

    def reply(self, request: Request, value: Tensor | None = None) -> Reply:
        """Done, at the present version."""
        return Reply(
            request.run,
            request.node,
            request.number,
            self.version,
            self.layout.shape,
            self.layout.dtype,
            value,
            self.dropped[request.node] if self.dropped else 0,
        )


class Update(NamedTuple):
    """An update by ``pushes`` about to be applied to ``entry``, which has this ``version``."""

    key: Key
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


@dataclass
class Ledger:
    """The accepted pushes: one that arrives twice counts once.

    A worker tells with each push below which number it has all answers (``settled``): a push
    with such a number is an echo, and needs no place in memory.
    """

    _settled: dict[int, int] = field(default_factory=dict)
    _accepted: dict[int, set[int]] = field(default_factory=dict)

    def over(self, node: int, number: int) -> bool:
        """True if all of this node's pushes with a lower number are."""
        return self._settled.get(node, 0) >= number

    def knows(self, push: Push) -> bool:
        """True if it was accepted before."""
        echo = push.number < self._settled.get(push.node, 0)
        return echo or push.number in self._accepted.get(push.node, ())

    def accept(self, push: Push) -> None:
        """It counts, now."""
        self.end(push.node, push.settled)
        self._accepted.setdefault(push.node, set()).add(push.number)

    def end(self, node: int, settled: int) -> None:
        """Whatever still comes of this node with a lower number is an echo."""
        if settled > self._settled.get(node, 0):
            self._settled[node] = settled
            self._accepted[node] = {n for n in self._accepted.get(node, ()) if n >= settled}
