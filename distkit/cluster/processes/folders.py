"""Private folders of clusters and runs: created, locked while in use, removed when stale.

They contain sockets and rendezvous files. The kernel process holds a shared ``flock`` on each
folder, which is released however the process ends. An unlocked folder of ours is stale, and the
next start removes it. Programs that clean temporary folders (systemd-tmpfiles) skip locked ones.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from distkit._format import human_bytes
from distkit.errors import StartError

#: Maximum length of a folder's path; a socket's path has at most 107 bytes on Linux, 103 on macOS.
MAX_PATH = 90
_NAME = re.compile(r"distkit-[a-z0-9_]{8}")

#: The file that marks a folder as ours; it contains the pid of the process that created it.
OWNER = "owner"

#: Space for a cluster's files, and for the files of each process [bytes].
_BASE, _EACH = 1_000_000, 250_000


def make(processes: int = 1) -> tuple[str, int]:
    """Create a folder for a number of processes, with mode 0700; return it and its lock.

    Raises:
        StartError: the temporary folder is full, not writable, or has too long a path.
    """
    parent = tempfile.gettempdir()
    try:
        check_space(parent, processes)
        folder = tempfile.mkdtemp(prefix="distkit-")  # mkdtemp uses mode 0700
        if len(os.fsencode(folder)) <= MAX_PATH:
            lock = hold(folder)  # an unlocked folder with an owner file may be removed
            Path(folder, OWNER).write_text(f"{os.getpid()}\n")
            return folder, lock
        Path(folder).rmdir()
        raise OSError(errno.ENAMETOOLONG, "its path is too long for sockets")
    except OSError as error:
        raise StartError(
            f"cannot create a folder in {parent} ({error.strerror}). "
            "Free some space there, or set TMPDIR to a writable folder with a short path."
        ) from error


def space_needed(processes: int) -> int:
    """Return the space for the files of a cluster with a number of processes [bytes]."""
    return _BASE + processes * _EACH


def check_space(parent: str, processes: int) -> None:
    """Check that a file system has space for the files of a cluster.

    Raises:
        StartError: the file system is too small, or full.
    """
    status = os.statvfs(parent)
    needed, free = space_needed(processes), status.f_bavail * status.f_frsize
    if free < needed:
        raise StartError(
            f"{parent} has {human_bytes(free)} free, and {processes} processes need "
            f"{human_bytes(needed)} there for their sockets, logs and black boxes. Free some "
            "space, or set TMPDIR to a folder with more."
        )


def hold(folder: str) -> int:
    """Lock a folder for as long as the returned file descriptor is open."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # without locks, stale folders are not swept either
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def is_ours(folder: str | Path) -> bool:
    """Return True if a folder belongs to this user, and others have no access."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        return private and status.st_uid == os.getuid()
    return False


def has_owner(folder: str) -> bool:
    """Return True if a folder still has its owner file."""
    return Path(folder, OWNER).exists()


def sweep(parent: str) -> list[str]:
    """Remove this user's stale folders; return their names."""
    swept = []
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and _is_stale(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                swept.append(entry.name)
    return swept


def _is_stale(entry: os.DirEntry[str]) -> bool:
    """Return True if a folder is ours and its owners have all ended."""
    with suppress(OSError):
        return is_ours(entry.path) and has_owner(entry.path) and _is_unlocked(entry.path)
    return False


def _is_unlocked(folder: str) -> bool:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # locked: in use
        return False
    finally:
        os.close(lock)
