"""State of a server of one key."""

from __future__ import annotations

from msgspec import Struct, field
from torch import Tensor

from distkit.kvstore.protocol.messages import Init, Key, Pull, Push, Reply, Request
from distkit.kvstore.protocol.optimizer import Updater
from distkit.kvstore.protocol.placement import Layout


class Entry(Struct, eq=False):
    """A key on this server.

    ``value`` is replaced, never changed in place: an answer on its way keeps the version it
    was asked for. ``rounds`` holds the gradients that wait for their round to be complete, by
    round and worker; ``clocks`` counts each worker's gradients; ``waiting`` are the pulls that
    wait, with their worker's clock when they came; ``dropped`` counts gradients that were late.
    ``accepted`` is the number of each author's latest push; ``floor`` the number below which all
    functions are over.
    """

    key: Key
    layout: Layout
    value: Tensor
    first: tuple[int, int]  # node and number of the init
    version: int = 0
    updater: Updater | None = None
    rounds: dict[int, dict[int, Push]] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    waiting: dict[tuple[int, int], tuple[Pull, int]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    floor: int = 0

    @classmethod
    def of(cls, init: Init) -> Entry:
        """A new key, with its first value."""
        assert init.value is not None
        layout, value = Layout(init.shape, init.dtype), init.value
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
        """True if it was accepted before.

        A worker repeats its pushes in order, and a function that runs again makes the same ones:
        the number of the latest one tells.
        """
        author, number = push.author
        over = author < 0 and -1 - author < self.floor
        return over or number <= self.accepted.get(author, -1)

    def accept(self, push: Push) -> None:
        """It counts, now."""
        author, number = push.author
        if push.once and push.once[2] > self.floor:
            self.floor = push.once[2]
            left = {a: n for a, n in self.accepted.items() if a >= 0 or -1 - a >= self.floor}
            self.accepted = left
        self.accepted[author] = number

    def reply(self, request: Request, value: Tensor | None = None) -> Reply:
        """Done, at the present version."""
        head, who = (request.run, request.node, request.number), request.node
        return Reply(*head, self.version, value, self.dropped.get(who, 0), self.clocks.get(who, 0))
