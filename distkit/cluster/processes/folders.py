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

    The lock is a file descriptor, which locks the folder while it is open.

    Raises:
        StartError: the temporary folder is full, not writable, or has too long a path.
    """
    parent, needed = tempfile.gettempdir(), space_needed(processes)
    try:
        status = os.statvfs(parent)
        free = status.f_bavail * status.f_frsize
        if free < needed:
            raise OSError(errno.ENOSPC, f"{human_bytes(needed)} needed, {human_bytes(free)} free")
        folder = tempfile.mkdtemp(prefix="distkit-")  # mkdtemp uses mode 0700
        if len(os.fsencode(folder)) > MAX_PATH:
            Path(folder).rmdir()
            raise OSError(errno.ENAMETOOLONG, "its path is too long for sockets")
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # without locks, stale folders are not swept either
            fcntl.flock(lock, fcntl.LOCK_SH)
        Path(folder, OWNER).write_text(f"{os.getpid()}\n")  # an unlocked folder may be removed now
        return folder, lock
    except OSError as error:
        raise StartError(
            f"cannot create a folder in {parent} ({error.strerror}). "
            "Free some space there, or set TMPDIR to a writable folder with a short path."
        ) from error


def space_needed(processes: int) -> int:
    """Return the space for the files of a cluster with a number of processes [bytes]."""
    return _BASE + processes * _EACH


def is_ours(folder: str | Path) -> bool:
    """Return True if a folder belongs to this user, and others have no access."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        return private and status.st_uid == os.getuid()
    return False


def sweep(parent: str) -> None:
    """Remove this user's stale folders."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and is_ours(entry.path) and _is_stale(entry.path):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_stale(folder: str) -> bool:
    """Return True if the process that created a folder has ended, and locks it no more."""
    if not Path(folder, OWNER).exists():
        return False
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # locked: in use
        return False
    finally:
        os.close(lock)
