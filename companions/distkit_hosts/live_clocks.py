"""The clocks of other machines while their ranks tell events: which one reads which times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from distkit.trace.info import ClockOffset

if TYPE_CHECKING:
    from distkit.cluster.process_host import Offset


class LiveClocks:
    """The clock of each rank of a run, by comparisons that get surer."""

    def __init__(self) -> None:
        self._clocks: dict[int, Offset] = {}  # by which each rank's times are read
        self._reached: dict[int, float] = {}  # the last of these, by this machine's clock
        self._errors: dict[int, float] = {}  # the largest by which they may be wrong [s]

    def reader(
        self, rank: int, offset: Offset, first: float, last: float
    ) -> Callable[[float], float]:
        """What puts a rank's times, from ``first`` to ``last``, into this machine's.

        A rank keeps its first offset until a later one is much surer: they differ a little, and
        no rank's time goes back.
        """

        def error(clock: Offset) -> float:
            return max(clock.error_at(first), clock.error_at(last))

        known = self._clocks.get(rank, offset)
        known = self._clocks[rank] = offset if error(offset) < error(known) / 2 else known
        self._errors[rank] = max(error(known), self._errors.get(rank, 0.0))
        reached = self._reached.get(rank, -math.inf)
        self._reached[rank] = max(reached, known.to_here(last))
        return lambda there: max(reached, known.to_here(there))

    def compared(self, hosts: dict[int, str]) -> dict[str, ClockOffset]:
        """How far the clocks of other machines were ahead, and how sure that is.

        ``hosts``: that of each rank.
        """
        clocks, errors = dict[str, ClockOffset](), dict[str, float]()
        for rank, offset in sorted(self._clocks.items()):
            host = hosts[rank]
            errors[host] = max(self._errors[rank], errors.get(host, 0.0))
            clocks[host] = ClockOffset(offset.seconds, errors[host])
        return clocks
