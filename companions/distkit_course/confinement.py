"""Limits of the processes in which an answer runs: time, memory, output and processes.

They do not keep an answer from files and processes of the same user: a container does.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
from typing import Any, TextIO

import psutil

#: Of each rank: processor time and time [s], memory and a file [bytes], printed characters, and
#: processes beyond those of its user. (Linux does not count the processes of root.)
CPU, SECONDS, MEMORY, FILE, PRINTED, PROCESSES = 6, 40, 1 << 29, 1 << 26, 1_000_000, 200

#: Memory of the process that judges, beyond what it has at first [bytes].
JUDGE = 2 << 30


def confine() -> None:
    """Bound this rank, and what it starts, from now on."""
    from distkit.cluster.rank.rank import Rank  # of no use to the kernel

    folder = Rank.here.spec.folder
    tempfile.tempdir = folder
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_CPU, int(spent) + CPU, 1)
    _limit(resource.RLIMIT_FSIZE, FILE)
    _limit(resource.RLIMIT_CORE, 0)
    limit_memory(MEMORY)
    if sys.platform == "linux" and os.getuid():
        _limit_processes(_threads() + PROCESSES)
    sys.stdout, sys.stderr = _Bounded(sys.stdout), _Bounded(sys.stderr)


def limit_memory(more: int) -> None:
    """Limit the memory of this process to so many bytes above its use now, on Linux."""
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + more)


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


def _threads() -> int:
    """The number of threads of this user's processes."""
    every = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    mine = [one for one in every if one["uids"] and one["uids"].real == os.getuid()]
    return sum(one["num_threads"] or 0 for one in mine)


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
