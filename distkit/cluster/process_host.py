"""A machine that runs ranks of a cluster.

This module describes this machine; :mod:`distkit_hosts.remote` describes and starts others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distkit.cluster.processes.forkserver import ForkServer
from distkit.cluster.processes.rank_spec import inherited

#: Maximum drift of a clock [s/s]: the rate at which the operating system may slew it.
DRIFT = 5e-4


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset of another host's clock from this host's.

    Args:
        seconds: the difference [s] when the other clock shows ``at``.
        error: maximum error of the difference [s].
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

    def error_at(self, remote: float) -> float:
        """Return the maximum error of the offset at a time of the other clock [s]."""
        return self.error + DRIFT * abs(remote - self.at)

    def to_here(self, remote: float) -> float:
        """Convert a time of the other host's clock to this host's [s]."""
        return remote - self.seconds


@dataclass
class ProcessHost:
    """A machine with ranks of a cluster; in this class, the local machine.

    Args:
        server: forks and kills processes, and reports their ends.
        folder: the cluster's folder on the machine.
        ranks: the numbers of its ranks.
        servers: the numbers of its parameter servers.
        address: its address for other machines; "" if there are none.
    """

    server: ForkServer
    folder: str
    ranks: Sequence[int]
    servers: Sequence[int] = ()
    address: str = ""

    @property
    def clock(self) -> Offset | None:
        """The offset of its clock; None for this machine, or before the first measurement."""
        return None

    def spec_fields(self, rank: int, hosts: Sequence[ProcessHost]) -> dict[str, Any]:
        """Return the machine's fields of Spec for a rank."""
        return {"folder": self.folder, **inherited()}

    def certainly(self, since: float, until: float) -> tuple[float, float]:
        """Convert an interval to this machine's clock; the maximum error shortens it."""
        return since, until

    def remove_store(self, name: str) -> None:
        """Remove the rendezvous stores of a run."""
        with suppress(OSError):  # the folder was removed
            for file in Path(self.folder).glob(f"{name}-*"):
                file.unlink(missing_ok=True)
