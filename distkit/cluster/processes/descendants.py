"""Ending what ranks started: children, their children, and daemons that left for their own session.

On Linux each rank, the zygote and the reaper adopt the orphans below them (they are child
subreapers), so that no process escapes: what a rank started and left goes to the zygote when the
rank ends, and to the reaper when the zygote does. Elsewhere there are only process groups.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

#: How long orphans may take to end after SIGKILL [s]: one that waits for a disk takes long.
PATIENCE = 5.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to end this process when its parent ends; elsewhere the lifeline does it alone."""
    _control(_PR_SET_PDEATHSIG, by)


def adopt_orphans(adopt: bool = True) -> None:
    """Ask Linux to make this process the parent of descendants whose parents have ended, or not."""
    _control(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # of no use to the kernel, which imports this, too

        ctypes.CDLL(None).prctl(option, value)


def children() -> list[int]:
    """The pids of this process's children, also of those that have ended and wait to be reaped."""
    if sys.platform != "linux":
        return []
    try:  # as the kernel lists them: nobody but this process takes one off the list
        lists = [task.joinpath("children") for task in Path("/proc/self/task").iterdir()]
        return [int(pid) for each in lists for pid in each.read_text().split()]
    except OSError:  # it keeps no such lists
        import psutil

        return [child.pid for child in psutil.Process().children()]


def end_children(but: Container[int] = ()) -> None:
    """Kill this process's children but these: they are nobody else's, and not yet reaped."""
    for pid in children():
        if pid not in but:
            with suppress(ProcessLookupError, PermissionError):  # it became another user's
                os.kill(pid, signal.SIGKILL)


def end_orphans(but: Container[int]) -> None:
    """Wait until all children but these have ended; kill those that do not end by themselves."""
    end = time.monotonic() + PATIENCE
    while left := [pid for pid in children() if pid not in but]:
        if time.monotonic() > end:
            end_children(but)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def end_all_children() -> None:
    """Kill them, and theirs, which are then this process's; wait until all have ended."""
    end = time.monotonic() + PATIENCE
    with suppress(ChildProcessError):  # there are no more
        while time.monotonic() < end:
            end_children()
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
