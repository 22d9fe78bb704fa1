"""The private folders of clusters and runs: made, locked while somebody lives in them, swept.

Sockets and rendezvous files live there. The kernel holds a shared ``flock`` on each folder, which
ends with it, however it ends: a folder of ours that nobody holds is left over, and the next start
removes it. Programs that clean temporary folders (systemd-tmpfiles) pass by
what is locked.
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

#: A folder's path is at most so long: a socket's ends at 107 bytes on Linux, 103 on macOS.
LONGEST = 90
_NAME = re.compile(r"distkit-[a-z0-9_]{8}")

#: The file by which a folder is known to be ours; it holds the pid of the process that made it.
OWNER = "owner"

#: What a cluster writes there, and each of its processes [bytes].
_BASE, _EACH = 1_000_000, 250_000


def make(processes: int = 1) -> tuple[str, int]:
    """A new folder that only this user can enter, for so many processes, and what holds it.

    Raises:
        StartError: the temporary folder is full, cannot be written to, or has too long a path.
    """
    parent = tempfile.gettempdir()
    try:
        check_room(parent, processes)
        folder = tempfile.mkdtemp(prefix="distkit-")  # made with mode 0700
        if len(os.fsencode(folder)) <= LONGEST:
            held = hold(folder)  # before it is known as ours, and may be swept
            Path(folder, OWNER).write_text(f"{os.getpid()}\n")
            return folder, held
        Path(folder).rmdir()
        raise OSError(errno.ENAMETOOLONG, "its path is too long for sockets")
    except OSError as error:
        raise StartError(
            f"cannot create a folder in {parent} ({error.strerror}). "
            "Free some space there, or set TMPDIR to a folder with a short path that can be "
            "written to."
        ) from error


def room(processes: int) -> int:
    """Bytes that a cluster of so many processes writes there."""
    return _BASE + processes * _EACH


def check_room(parent: str, processes: int) -> None:
    """See whether a cluster of so many processes has room for its files.

    Raises:
        StartError: the file system is too small, or full.
    """
    status = os.statvfs(parent)
    needed, free = room(processes), status.f_bavail * status.f_frsize
    if free < needed:
        raise StartError(
            f"{parent} has {human_bytes(free)} left, and {processes} processes need "
            f"{human_bytes(needed)} there for their sockets, logs and black boxes. Free some "
            "space, or set TMPDIR to a folder with more."
        )


def hold(folder: str) -> int:
    """Lock a folder for as long as this file descriptor is open."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks is not swept either
        fcntl.flock(held, fcntl.LOCK_SH)
    return held


def is_ours(folder: str | Path) -> bool:
    """True if it is this user's folder, closed to others, and so are the sockets in it."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        return private and status.st_uid == os.getuid()
    return False


def is_there(folder: str) -> bool:
    """True if a folder still has what its maker put there."""
    return Path(folder, OWNER).exists()


def sweep(parent: str) -> list[str]:
    """Remove the folders of this user in which nobody lives any more; return their names."""
    swept = []
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                swept.append(entry.name)
    return swept


def _is_left(entry: os.DirEntry[str]) -> bool:
    """True if it is a folder of ours whose makers have all ended."""
    with suppress(OSError):
        return is_ours(entry.path) and is_there(entry.path) and _is_free(entry.path)
    return False


def _is_free(folder: str) -> bool:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # somebody lives there
        return False
    finally:
        os.close(held)
