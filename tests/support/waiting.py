"""How tests wait until something is so."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], object], within: float = 10.0) -> None:
    """Wait until something is so, at most so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not so within {within:g} s"
        time.sleep(0.005)


def alive(process: psutil.Process) -> bool:
    """False if a process has ended, also if that was a moment ago, or is not yet waited for."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
