"""Consistency models: which gradients an update applies and which workers a pull waits for.

The functions have no side effects.

=============  =======================================  =====================================
model          an update applies                        a pull waits for
=============  =======================================  =====================================
synchronous    the sum of one gradient per worker       the workers missing from this round
backup b       the first N − b gradients of a round;    as above, until N − b have arrived
               late ones are dropped
asynchronous   each gradient as it arrives              no worker
bounded s      each gradient as it arrives              workers more than s gradients behind
=============  =======================================  =====================================

N is the number of workers. With ``s = 0`` no worker runs ahead; ``s = ∞`` is asynchronous. A
worker's *clock* counts its gradients of a key, and any rounds that it has missed. The server, the
simulation, the diagnosis and the Servers view use these rules.

Sources: Li et al., 2014; Chen et al., Revisiting distributed synchronous SGD, 2016 (backup
workers); Ho et al., More effective distributed ML via a stale synchronous parallel parameter
server, 2013.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Synchronous:
    """A model in which updates sum one gradient per worker, except for the ``backup`` slowest.

    >>> Synchronous().awaits(clock=1, version=0, arrived={0}, members={0, 1, 2}, clocks={})
    {1, 2}
    """

    backup: int = 0
    staleness: ClassVar[None] = None
    has_rounds: ClassVar[bool] = True

    def assign_round(self, clock: int, pulled: int, version: int) -> tuple[int, int] | None:
        """Return the round of a gradient and its worker's next clock, or None if it is too late.

        The round is ``clock``, or ``version`` (with backup workers, ``pulled``) if that is larger.
        ``clock`` is the worker's clock, ``pulled`` the version that the gradient was computed from,
        and ``version`` the current version, which is also the number of the current round.
        """
        n = max(clock, pulled if self.backup else version)
        return (n, n + 1) if n >= version else None

    def complete(self, arrived: Collection[int], members: Collection[int]) -> bool:
        """Return whether the gradients of these workers complete a round."""
        return bool(arrived) and len(set(members).difference(arrived)) <= self.backup

    def required_clock(self, clock: int) -> int:
        """Return the clock that a worker must have reached for a pull not to wait for it."""
        return clock

    def awaits(
        self,
        clock: int,
        version: int,
        arrived: Collection[int],
        members: Collection[int],
        clocks: Mapping[int, int],
    ) -> set[int]:
        """Return the workers that a pull waits for; ``clock`` is the pulling worker's clock.

        These are the workers missing from the current round, or none once the pulling worker's
        gradients have been applied.
        """
        return set() if version >= self.required_clock(clock) else set(members).difference(arrived)


@dataclass(frozen=True)
class Asynchronous:
    """A model in which each gradient is an update.

    If ``staleness`` is set, pulls wait for workers that are too far behind.

    >>> Asynchronous(staleness=3).awaits(5, 9, (), members={0, 1, 2}, clocks={0: 5, 1: 2, 2: 1})
    {2}
    """

    staleness: int | None = None
    backup: ClassVar[int] = 0
    has_rounds: ClassVar[bool] = False

    def assign_round(self, clock: int, pulled: int, version: int) -> tuple[int, int] | None:
        """Return the current version as the round, since gradients are applied immediately."""
        return version, clock + 1

    def complete(self, arrived: Collection[int], members: Collection[int]) -> bool:
        """Return whether a gradient has arrived."""
        return bool(arrived)

    def required_clock(self, clock: int) -> int:
        """Return the pulling worker's clock minus ``staleness``, or 0 if there is no bound."""
        return 0 if self.staleness is None else clock - self.staleness

    def awaits(
        self,
        clock: int,
        version: int,
        arrived: Collection[int],
        members: Collection[int],
        clocks: Mapping[int, int],
    ) -> set[int]:
        """Return the workers that are more than ``staleness`` gradients behind."""
        minimum = self.required_clock(clock)
        return {m for m in members if clocks.get(m, 0) < minimum}


#: ``backup``: number of workers that a round does not wait for. ``staleness``: number of gradients
#: by which a worker may be ahead, if bounded. ``has_rounds``: whether gradients are applied in
#: rounds.
Rule = Synchronous | Asynchronous


def rule_of(mode: str, *, staleness: int | None = None, backup: int = 0, **others: Any) -> Rule:
    """Return the consistency model of a store; ``others`` are options that do not affect it.

    >>> rule_of("dist_sync", backup=1, on_crash="continue")
    Synchronous(backup=1)
    """
    return Synchronous(backup) if mode.startswith("dist_sync") else Asynchronous(staleness)
