"""A machine with ranks, as a cluster sees it: this one, or another one.

Those of other machines, and what starts them, are :mod:`distkit_hosts.remote`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distkit.cluster.plan import Plan
from distkit.cluster.processes.forkserver import ForkServer
from distkit.cluster.processes.rank_spec import surroundings

#: A clock gains or loses at most this much [s/s]: so fast the kernel may slew it to be right.
DRIFT = 5e-4


@dataclass(frozen=True, slots=True)
class Offset:
    """Another host's clock minus this one's.

    Args:
        seconds: the difference [s] when the other clock shows ``at``.
        error: the largest by which it may be wrong [s].
        at: the other host's clock at the latest round trip [s].

    >>> offset = Offset(seconds=5.0, error=1e-4, at=105.0)
    >>> round(offset.to_here(105.0), 6)
    100.0
    >>> round(offset.error_at(105.2), 6)
    0.0002
    """

    seconds: float
    error: float
    at: float

    def error_at(self, there: float) -> float:
        """The largest by which the offset may be wrong at an instant of the other clock [s]."""
        return self.error + DRIFT * abs(there - self.at)

    def to_here(self, there: float) -> float:
        """An instant of the other host's clock by this one's [s]."""
        return there - self.seconds


@dataclass
class ProcessHost:
    """This machine, with the ranks of a cluster.

    Args:
        server: forks processes, kills them, and hears of their ends.
        folder: of the cluster, there.
        ranks: the numbers of its ranks.
        servers: the numbers of its parameter servers.
        address: where other machines reach its processes; "" if there are none.
    """

    server: ForkServer
    folder: str
    ranks: Sequence[int]
    servers: Sequence[int] = ()
    address: str = ""

    @property
    def clock(self) -> Offset | None:
        """Its clock; None if it is this machine's, or has not been compared."""
        return None

    def surroundings(self, rank: int, hosts: Sequence[ProcessHost]) -> dict[str, Any]:
        """What a rank is told of its surroundings, as fields of Spec."""
        return {"folder": self.folder, **surroundings()}

    def certainly(self, since: float, until: float) -> tuple[float, float]:
        """An interval of its clock by this machine's, without what the error may take."""
        return since, until

    def forget(self, meeting: str) -> None:
        """Drop what ranks have told each other in the stores of a run."""
        with suppress(OSError):  # the folder was removed
            for file in Path(self.folder).glob(f"{meeting}-*"):
                file.unlink(missing_ok=True)


class Fleet(Protocol):
    """Other machines that are being started for a cluster."""

    def gather(self, plan: Plan) -> tuple[list[Any], Plan]:
        """Wait for all of them: the :class:`ProcessHost` of each, and a plan that fits them.

        Raises:
            StartError: one cannot be had; the message quotes what was said there.
        """

    def close(self) -> None:
        """End everything there."""
