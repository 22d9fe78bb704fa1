"""The specification of a rank: its settings and its seeds.

The kernel imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import inspect
import operator
import os
import random
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from distkit.cluster.notebook import Cell

#: Exit status of a rank whose program has closed the channel to the kernel.
CHANNEL_CLOSED = 86


@dataclass(frozen=True)
class Spec:
    """Specification of a forked rank.

    Args:
        rank: the rank.
        world_size: number of ranks.
        folder: folder of the rank's files.
        name: prefix of the names of these files.
        backend: "gloo" or "nccl", never "auto".
        device: torch's name of a device, never "auto".
        threads: torch's intra-op thread count.
        store: prefix of the names of the rendezvous stores.
        environ: environment variables.
        path: ``sys.path``.
        cwd: working directory.
        port: a free port on rank 0's machine, for programs that use ``MASTER_PORT`` themselves.
        address: address of rank 0's machine.
        interface: network interface to the other machines, or "" if there are none.
        host: number of the rank's machine.
        hosts: number of machines.
        local_rank: number of the rank on its machine.
        local_world_size: number of ranks on its machine.
    """

    rank: int
    world_size: int
    folder: str
    name: str = "rank"
    backend: str = "gloo"
    device: str = "cpu"
    threads: int = 1
    store: str = "store"
    environ: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    cwd: str = "."
    port: int = 0
    address: str = "localhost"
    interface: str = ""
    host: int = 0
    hosts: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def torchrun_environ(self) -> dict[str, str]:
        """torchrun's environment variables; each machine is a group of ranks."""
        rank, world_size = str(self.rank), str(self.world_size)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "ROLE_RANK": rank,
            "GROUP_RANK": str(self.host),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
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
            # keeps NCCL on loopback; ranks on several machines replace it later
            **({"NCCL_SOCKET_IFNAME": "=lo"} if self.backend == "nccl" else {}),
        }


def inherited_fields() -> dict[str, Any]:
    """Return the fields of Spec that a rank inherits from this process."""
    return {"environ": dict(os.environ), "path": list(sys.path), "cwd": str(Path.cwd())}


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port on an address of this machine."""
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


# -- seeds -----------------------------------------------------------------------------------------
#
# Ranks are forked from one process, so by default they would all draw the same numbers. Each run
# has a seed, stored in its trace (``trace.info.seed``), and each rank derives its own seed from it.


def call_seed(fn: Any, kwargs: dict[str, Any], seed: Any) -> tuple[int | None, dict[str, Any]]:
    """Return the seed of a run, and the keyword arguments of its function.

    ``seed`` is also passed to the function's parameter ``seed``, if it has one. A run without a
    seed draws one, which is not passed; a cell without a seed keeps the state of the ranks'
    generators.

    Raises:
        TypeError: the seed is not an integer.

    >>> call_seed(lambda seed: None, {}, 7)
    (7, {'seed': 7})
    >>> call_seed(len, {}, 7)
    (7, {})
    """
    if seed is None:
        return (None if isinstance(fn, Cell) else secrets.randbits(32)), kwargs
    with suppress(TypeError, ValueError):  # a script, or a function written in C
        if "seed" in inspect.signature(fn).parameters:
            kwargs = {**kwargs, "seed": seed}
    try:
        return operator.index(seed), kwargs
    except TypeError:
        raise TypeError(f"seed must be an integer, not {seed!r}") from None


def rank_seed(seed: int, rank: int, incarnation: int = 0) -> int:
    """Return a rank's 64-bit seed.

    ``incarnation`` is the number of times that the rank has been replaced.

    >>> rank_seed(0, 0) == rank_seed(0, 0), rank_seed(0, 0) == rank_seed(0, 1)
    (True, False)
    """
    return int.from_bytes(
        blake2b(f"{seed} {rank} {incarnation}".encode(), digest_size=8).digest(), "big"
    )


def set_seeds(seed: int | None = None) -> None:
    """Seed the generators of torch, numpy and Python; if ``seed`` is None, draw a random seed."""
    import torch

    seed = secrets.randbits(64) if seed is None else seed
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:  # a later import seeds it randomly
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])
