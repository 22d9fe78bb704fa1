"""Private folders of clusters and runs; they contain sockets and rendezvous files.

The folders of a kernel have a common prefix. The subreaper removes them after the kernel has
exited for any reason.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from distkit._format import human_bytes
from distkit.errors import StartError

#: Maximum length of a folder's path; a socket's path has at most 107 bytes on Linux, 103 on macOS.
MAX_PATH = 90

#: Space for a cluster's files, and for the files of each process [bytes].
_BASE, _PER_PROCESS = 1_000_000, 250_000

_numbers = itertools.count(1)  # names of folders; short, because sockets' paths are limited


def new_prefix() -> str:
    """Return a prefix of the names of folders that are removed together."""
    return f"distkit-{secrets.token_hex(3)}-"


def make(prefix: str, processes: int = 1) -> str:
    """Create a folder for a number of processes, with mode 0700.

    Raises:
        StartError: the temporary folder is full, not writable, or has too long a path.
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
    """Return the space for the files of a cluster with a number of processes [bytes]."""
    return _BASE + processes * _PER_PROCESS


def remove_all(prefix: str) -> None:
    """Remove the folders with a prefix."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)
