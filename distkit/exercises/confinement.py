"""What an answer may use of the machine: it runs on ranks of its own, and cannot do harm there.

Its ranks have little processor time, memory and output, and are killed when their time is up. On
Linux with Landlock they write only into their own folder, which is removed with them, and signal
only what they have started.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TextIO

#: Of each rank: processor time and time [s], memory and a file [bytes], printed characters, and
#: processes beyond those of its user. (Linux does not count the processes of root.)
CPU, SECONDS, MEMORY, FILE, PRINTED, PROCESSES = 6, 40, 1 << 29, 1 << 26, 1_000_000, 200

#: Landlock's system calls and flags, as in linux/landlock.h.
_CREATE, _ADD, _RESTRICT, _VERSION, _BENEATH, _SCOPE_SIGNAL = 444, 445, 446, 1, 1, 2
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
#: Everything that changes a file system: writing, removing, making each kind of file.
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_NO_NEW_PRIVILEGES = 38


def confine() -> None:
    """Bound this rank, and what it starts, from now on."""
    from distkit.cluster.rank.rank import Rank  # of no use to the kernel

    folder = Rank.here.spec.folder
    tempfile.tempdir = folder
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_CPU, int(spent) + CPU, 1)
    _limit(resource.RLIMIT_FSIZE, FILE)
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, _data() + MEMORY)
        if os.getuid():
            own = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _is_mine(p)]
            _limit_processes(sum(map(_threads, own)) + PROCESSES)
        _write_only_in(folder)
    sys.stdout, sys.stderr = _Bounded(sys.stdout), _Bounded(sys.stderr)


def _limit(which: int, most: int, more: int = 0) -> None:
    """Lower a limit, for good; ``more`` is between the signal that warns and the one that kills."""
    _, hard = resource.getrlimit(which)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (least, least + more if hard == resource.RLIM_INFINITY else hard))


def _limit_processes(most: int) -> None:
    """Limit them, unless the user's in other containers count, too: then there are too many."""
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, before[1]))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        resource.setrlimit(resource.RLIMIT_NPROC, before)
    else:
        _limit(resource.RLIMIT_NPROC, most)


def _data() -> int:
    """The private memory of this process [bytes]."""
    (line,) = (s for s in _status("self") if s.startswith("VmData"))
    return 1024 * int(line.split()[1])


def _status(process: str) -> list[str]:
    try:
        return Path("/proc", process, "status").read_text().splitlines()
    except OSError:  # it has just ended
        return []


def _is_mine(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid()
    except OSError:
        return False


def _threads(process: Path) -> int:
    return sum(int(s.split()[1]) for s in _status(process.name) if s.startswith("Threads"))


def landlock() -> int:
    """The version of Landlock that the kernel has; 0 or less for none."""
    return int(_libc().syscall(_CREATE, None, 0, _VERSION))


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None)


def _write_only_in(folder: str) -> None:
    """Have the kernel refuse changes of other files, and signals to other processes."""
    version, libc = landlock(), _libc()
    if version < 1:  # a kernel without it: files have their permissions
        return
    changes = _CHANGES | (_TRUNCATE if version >= 3 else 0)
    scope = _SCOPE_SIGNAL if version >= 6 else 0
    rules = struct.pack("QQQ", changes, 0, scope)[: 24 if version >= 6 else 8]
    ruleset = libc.syscall(_CREATE, rules, len(rules), 0)
    for path, allowed in ((folder, changes), (os.devnull, changes & (_WRITE_FILE | _TRUNCATE))):
        place = os.open(path, os.O_PATH)
        libc.syscall(_ADD, ruleset, _BENEATH, struct.pack("=Qi", allowed, place), 0)
        os.close(place)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.syscall(_RESTRICT, ruleset, 0):
        raise OSError("the answer could not be confined with Landlock")
    os.close(ruleset)


class _Bounded:
    """A stream that refuses to go on after so many characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, PRINTED

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            raise OSError(f"it prints more than {PRINTED:,} characters")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
