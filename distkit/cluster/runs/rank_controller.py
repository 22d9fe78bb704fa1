"""The interface of a run to the owner of its ranks: a cluster, or the ranks of one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run


class RankController(Protocol):
    """Those who run it: whatever can release or end ranks."""

    def release(self, ranks: Iterable[int], run: int) -> None:
        """Get these ranks out of whatever they wait in."""

    def end(self, ranks: Iterable[int]) -> None:
        """End these ranks' processes; their deaths are reported to the run."""

    def replace(self, run: Run, rank: int, life: int) -> None:
        """Put another in the place of a rank that has ended, and have it begin anew."""

    def settle(self, run: int) -> None:
        """All have ended: have whoever else holds events of the run hand them over."""
