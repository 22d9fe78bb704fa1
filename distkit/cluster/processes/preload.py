"""The zygote's preparations: ranks share these modules and hooks, in memory and in time.

Importing this module brings the modules. Nothing here may start a thread or open a socket.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

# Engines have no debugger attached; debugpy would cost each of them 0.1 s and 15 MB.
sys.modules["debugpy"] = None  # type: ignore[assignment]
import ipykernel.debugger  # noqa: E402
import ipykernel.ipkernel  # noqa: E402

del sys.modules["debugpy"]

import encodings.idna  # noqa: E402
import pydoc  # noqa: E402

import ipyparallel.engine.app  # noqa: E402
import IPython.core.completerlib  # noqa: E402
import IPython.core.oinspect  # noqa: E402
import IPython.extensions.storemagic  # noqa: E402
import numpy.random  # noqa: E402
import torch.distributed  # noqa: E402
import torch.nn.parallel  # noqa: E402
import tornado.platform.asyncio  # noqa: E402

import distkit.cluster.processes.roles  # noqa: E402
import distkit.cluster.rank.rank  # noqa: E402, F401
from distkit.recording import tap, witness  # noqa: E402

__all__ = ["IPython", "encodings", "ipykernel", "ipyparallel", "numpy", "pydoc", "torch", "tornado"]


class _WithoutModules:
    """``sys`` without its modules."""

    modules: dict[str, Any] = {}  # noqa: RUF012 (no field: nothing is ever added)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


@cache
def hook() -> None:
    """Hook torch, once for all ranks."""
    # a kernel lists all modules for its debugger: each rank would copy 8 MB of shared pages
    vars(ipykernel.ipkernel)["sys"] = _WithoutModules()
    tap.tap.install()
    witness.look_after_backward()
