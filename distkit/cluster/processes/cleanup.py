"""Creates and removes private folders and kills the descendants of ranks.

A folder contains sockets and rendezvous files. All folders of a Jupyter kernel or a script have a
common prefix, and the subreaper removes them after that process exits, for whatever reason.

A rank's descendants are its children, their children and so on, including daemons. On Linux, each
rank, the fork server and its parent are child subreapers: they adopt their orphaned descendants, so
no process escapes. The fork server adopts a rank's remaining children when the rank exits, and
its parent adopts them when the fork server exits. Other systems have only process groups.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from distkit._format import human_bytes
from distkit.errors import StartError

#: Maximum length of a folder's path [bytes]. The limit for a socket's path is 107 bytes on Linux
#: and 103 bytes on macOS.
MAX_PATH = 90

#: Space for the files that a cluster's processes share, and for the files of each process [bytes].
_BASE, _PER_PROCESS = 1_000_000, 250_000

_numbers = itertools.count(1)  # folder names are short because socket paths are limited

#: Timeout for orphans to exit after SIGKILL [s]; a process in uninterruptible sleep exits late.
END_TIMEOUT = 5.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


# -- folders ---------------------------------------------------------------------------------------


def new_prefix() -> str:
    """Return a prefix for the names of folders that are removed together."""
    return f"distkit-{secrets.token_hex(3)}-"


def make_folder(prefix: str, processes: int = 1) -> str:
    """Create a folder with mode 0700 for the files of ``processes`` processes.

    Raises:
        StartError: the temporary folder is full or not writable, or its path is too long.
    """
    parent, needed = tempfile.gettempdir(), space_needed(processes)
    try:
        status = os.statvfs(parent)
        free = status.f_bavail * status.f_frsize
        if free < needed:
            raise OSError(errno.ENOSPC, f"{human_bytes(needed)} needed, {human_bytes(free)} free")
        folder = f"{parent}/{prefix}{next(_numbers)}"
        if len(os.fsencode(folder)) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, "its path is too long for sockets")
        Path(folder).mkdir(mode=0o700)
        return folder
    except OSError as error:
        raise StartError(
            f"cannot create a folder in {parent} ({error.strerror}). "
            "Free some space there, or set TMPDIR to a writable folder with a short path."
        ) from error


def space_needed(processes: int) -> int:
    """Return the space needed for the files of a cluster with ``processes`` processes [bytes]."""
    return _BASE + processes * _PER_PROCESS


def remove_folders(prefix: str) -> None:
    """Remove all folders with this prefix."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)


# -- descendants -----------------------------------------------------------------------------------


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """On Linux, make the system send ``signum`` to this process when its parent exits.

    On other systems, a process notices only that its lifeline closes.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process a child subreaper on Linux: the parent of its orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # here, because the kernel process imports this module but not ctypes

        ctypes.CDLL(None).prctl(option, value)


def children() -> list[int]:
    """Return the pids of this process's children, including zombies; empty except on Linux."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in lists for pid in file.read_text().split()]


def kill_children(exclude: Container[int] = ()) -> None:
    """Kill this process's children, except ``exclude``.

    Their pids are valid, since Linux does not reuse the pid of a child that has not been reaped.
    """
    for pid in children():
        if pid not in exclude:
            with suppress(ProcessLookupError, PermissionError):  # exited, or has another user id
                os.kill(pid, signal.SIGKILL)


def kill_all_children() -> None:
    """Kill all children, including those adopted meanwhile; wait up to ``END_TIMEOUT`` seconds."""
    deadline = time.monotonic() + END_TIMEOUT
    with suppress(ChildProcessError):  # no children are left
        while time.monotonic() < deadline:
            kill_children()
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
