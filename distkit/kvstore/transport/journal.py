"""The journal of a scheduler for its successor: a small file in the cluster's folder.

It is written after each change and before anybody hears of it. A lock on it, which ends with the
process that holds it, keeps a second scheduler out.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any


def file_of(socket: Path) -> Path:
    """The journal of the scheduler with this socket."""
    return socket.with_suffix(".journal")


def _told(socket: Path) -> dict[str, Any]:
    """The last entry of its scheduler; nothing if there is none."""
    try:
        return dict(json.loads(file_of(socket).read_bytes().partition(b"\n")[0]))
    except (OSError, ValueError):
        return {}


def begun(socket: Path, run: int) -> bool:
    """True if its scheduler has seen all that this run needs, and told them of each other."""
    told = _told(socket)
    return told.get("run") == run and bool(told["begun"])


def copies(socket: Path) -> tuple[dict[int, list[int]], bool]:
    """By server, the processes that have its values; and whether these are as many as should be."""
    told = _told(socket)
    found = {int(n): list(holders) for n, holders in told.get("copies", ())}
    replication = told["terms"]["replication"] if told.get("terms") else 1
    return found, bool(found) and all(len(h) == replication for h in found.values())


class Journal:
    """The file, opened by the one scheduler that there may be.

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, b""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def read(self) -> dict[str, Any] | None:
        """The last entry; None if there is none."""
        line, ended, _ = os.pread(self._file, 1 << 24, 0).partition(b"\n")
        return dict(json.loads(line)) if ended else None

    def write(self, told: dict[str, Any]) -> None:
        """Keep this instead of what was there.

        One system call: it is whole or not there.
        """
        line = json.dumps(told).encode() + b"\n"
        if line != self._last:
            os.pwrite(self._file, line, 0)
            self._last = line

    def close(self) -> None:
        """Remove it, and let go of it."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)
