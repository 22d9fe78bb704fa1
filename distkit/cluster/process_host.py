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
    def clock(self) -> Any:
        """The offset of its clock, as from :mod:`distkit_hosts.clocks`; None for this machine."""
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
