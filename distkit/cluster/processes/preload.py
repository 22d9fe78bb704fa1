"""Preloads the fork server, so that ranks share these modules and hooks, and start faster.

Importing this module imports the modules. Nothing here may start a thread or open a socket.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module

import numpy.random  # noqa: F401
import torch.distributed
import torch.nn.parallel  # noqa: F401

import distkit.cluster.processes.roles
import distkit.cluster.rank.rank  # noqa: F401
from distkit.recording.tap import tap


@cache
def hook() -> None:
    """Hook torch, once for all ranks."""
    tap.install()


@cache
def engines() -> None:
    """Import the modules of engines and their controller before any is forked."""
    # no debugger is attached to an engine: debugpy would cost each engine 0.1 s and 15 MB
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    for name in (
        "ipykernel.debugger",
        "ipyparallel.controller.app",
        "ipyparallel.engine.app",
        "IPython.core.completerlib",
        "IPython.extensions.storemagic",
        "tornado.platform.asyncio",
    ):
        import_module(name)
    del sys.modules["debugpy"]
