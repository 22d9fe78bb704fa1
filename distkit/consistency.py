"""Consistency models: which gradients make an update, and whom a pull waits for. Pure.

=============  =======================================  =====================================
model          an update applies                        a pull waits for
=============  =======================================  =====================================
synchronous    the sum of one gradient of each worker   the workers missing in this round
backup b       the first N − b gradients of a round;    as above; whoever is late does not
               late ones are dropped                    count
asynchronous   each gradient as it comes                nobody
bounded s      each gradient as it comes                workers more than s gradients behind
=============  =======================================  =====================================

``s = 0`` lets nobody run ahead, ``s = ∞`` is asynchronous. A worker's *clock* counts its
gradients of a key. The server decides by these rules, the simulation plays by them, diagnosis and
the Servers view tell by them who waits for whom. Sources: Li et al., 2014; Chen et al., Revisiting
distributed synchronous SGD, 2016 (backup workers); Ho et al., More effective distributed ML via a
stale synchronous parallel parameter server, 2013.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Synchronous:
    """One gradient of every worker, less ``backup`` of them, makes an update.

    >>> Synchronous().awaits(clock=1, version=0, arrived={0}, members={0, 1, 2}, clocks={})
    {1, 2}
    """

    backup: int = 0
    staleness: ClassVar[None] = None
    halts: ClassVar[bool] = True

    def place(self, clock: int, pulled: int, version: int) -> tuple[int, int] | None:
        """The round that a gradient belongs to and its worker's next clock; None: too late.

        With backup workers, the round of the weights that it was computed from. ``clock`` is its
        worker's, ``pulled`` the version it was computed from, ``version`` the present one, which
        is the number of the present round.
        """
        n = max(clock, pulled if self.backup else version)
        return (n, n + 1) if n >= version else None

    def complete(self, arrived: Collection[int], members: Collection[int]) -> bool:
        """True if the gradients of these workers make an update: all are there, or enough."""
        return bool(arrived) and len(set(members).difference(arrived)) <= self.backup

    def needs(self, clock: int) -> int:
        """The number of gradients of each worker that a pull needs: as many as its own."""
        return clock

    def awaits(
        self,
        clock: int,
        version: int,
        arrived: Collection[int],
        members: Collection[int],
        clocks: Mapping[int, int],
    ) -> set[int]:
        """The workers that a pull waits for, asked when its own worker was at ``clock``.

        Those who miss, until its own gradients are in.
        """
        return set() if version >= self.needs(clock) else set(members).difference(arrived)


@dataclass(frozen=True)
class Asynchronous:
    """Each gradient is an update; nobody runs more than ``staleness`` gradients ahead.

    >>> Asynchronous(staleness=3).awaits(5, 9, (), members={0, 1, 2}, clocks={0: 5, 1: 2, 2: 1})
    {2}
    """

    staleness: int | None = None
    backup: ClassVar[int] = 0
    halts: ClassVar[bool] = False

    def place(self, clock: int, pulled: int, version: int) -> tuple[int, int] | None:
        """At once."""
        return version, clock + 1

    def complete(self, arrived: Collection[int], members: Collection[int]) -> bool:
        """One is enough."""
        return bool(arrived)

    def needs(self, clock: int) -> int:
        """Up to ``staleness`` fewer than its own."""
        return 0 if self.staleness is None else clock - self.staleness

    def awaits(
        self,
        clock: int,
        version: int,
        arrived: Collection[int],
        members: Collection[int],
        clocks: Mapping[int, int],
    ) -> set[int]:
        """Those who are too far behind."""
        least = self.needs(clock)
        return {m for m in members if clocks.get(m, 0) < least}


#: ``backup``: how many workers a round does not wait for. ``staleness``: by how many gradients a
#: worker may be ahead, where that is bounded. ``halts``: whether gradients are applied in rounds,
#: so that the others cannot go on without a worker.
Rule = Synchronous | Asynchronous


def synchronous(mode: str) -> bool:
    """True if a store of this mode applies gradients in rounds."""
    return mode.startswith("dist_sync")


def rule_of(mode: str, *, staleness: int | None = None, backup: int = 0, **others: Any) -> Rule:
    """The consistency model of a store; ``others`` of its terms say nothing about it.

    >>> rule_of("dist_sync", backup=1, on_crash="continue")
    Synchronous(backup=1)
    """
    return Synchronous(backup) if synchronous(mode) else Asynchronous(staleness)
