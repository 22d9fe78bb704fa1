"""Facts that a rank is given about itself. Imported by both sides; imports nothing heavy."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.cluster.gpus import CPU, Seat

#: DistributedDataParallel and optimizers import this for seconds, in each run unless it is there.
LATE = "torch._dynamo"

#: The exit status of a rank whose program has closed the line to its starter.
LINE_CLOSED = 86


@dataclass(frozen=True)
class Spec:
    """All that a forked rank is told about itself.

    ``name`` is what the names of its files in ``folder`` begin with; ``threads`` is torch's
    intra-op thread count; ``backend`` and ``seat`` are decided, not "auto"; ``meeting`` names the
    store in which the group meets; ``port`` is a free one, for programs that meet at
    ``MASTER_PORT`` by themselves, at the ``address`` of rank 0's machine. Of ``hosts`` machines it
    is number ``host``, and there it is number ``local_rank`` of ``local_world_size``; ``interface``
    leads to the others, "" when there are none.
    """

    rank: int
    world_size: int
    folder: str
    name: str = "rank"
    backend: str = "gloo"
    seat: Seat = CPU
    threads: int = 1
    meeting: str = "store"
    environ: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    cwd: str = "."
    port: int = 0
    address: str = "localhost"
    interface: str = ""
    host: int = 0
    hosts: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None

    @property
    def device(self) -> str:
        """The device, as the rank names it."""
        return self.seat.device

    @property
    def launched(self) -> dict[str, str]:
        """The environment variables that torchrun sets; a machine is a group of ranks."""
        rank, world_size = str(self.rank), str(self.world_size)
        local = self.rank if self.local_rank is None else self.local_rank
        locals_ = self.local_world_size or self.world_size
        return {
            "RANK": rank,
            "LOCAL_RANK": str(local),
            "ROLE_RANK": rank,
            "GROUP_RANK": str(self.host),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(locals_),
            "ROLE_WORLD_SIZE": world_size,
            "GROUP_WORLD_SIZE": str(self.hosts),
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": str(self.threads),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": Path(self.folder).name,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # no agent listens on MASTER_PORT
            "TORCHELASTIC_ERROR_FILE": f"{self.folder}/error-{rank}.json",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            **self.seat.environ(self.backend),
        }


def surroundings() -> dict[str, Any]:
    """Surroundings that a rank takes over from its starter, as fields of Spec."""
    return {"environ": dict(os.environ), "path": list(sys.path), "cwd": str(Path.cwd())}


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
