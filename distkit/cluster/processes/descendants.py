"""Kills the descendants of ranks: children, their children, and daemons in their own sessions.

On Linux each rank, the fork server and its parent are child subreapers: they adopt the orphans
below them, so no process escapes. The fork server adopts a rank's remaining children when the
rank exits, and its parent adopts them when the fork server exits. Other systems have only process
groups.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

#: Timeout for orphans to exit after SIGKILL [s]; a process in uninterruptible sleep exits late.
END_TIMEOUT = 5.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux kill this process when its parent exits; elsewhere only the lifeline does."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process a child subreaper on Linux: the parent of its orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # here: the kernel process imports this module but does not need it

        ctypes.CDLL(None).prctl(option, value)


def children() -> list[int]:
    """Return the pids of this process's children, including zombies; [] except on Linux."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in lists for pid in file.read_text().split()]


def end_children(exclude: Container[int] = ()) -> None:
    """Kill this process's children, except ``exclude``; pids stay valid until they are reaped."""
    for pid in children():
        if pid not in exclude:
            with suppress(ProcessLookupError, PermissionError):  # it has changed its user id
                os.kill(pid, signal.SIGKILL)


def end_all_children() -> None:
    """Kill all children, and their children once adopted; wait until all have exited."""
    end = time.monotonic() + END_TIMEOUT
    with suppress(ChildProcessError):  # no children are left
        while time.monotonic() < end:
            end_children()
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
