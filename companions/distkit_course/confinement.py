"""Resource limits for the processes that run an answer: time, memory, output and processes.

They do not protect the user's files and processes from an answer; a container does.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
from typing import Any, TextIO

import psutil

#: Limits for each rank: CPU time [s], wall time [s], additional memory [bytes], size of a file
#: [bytes], characters per output stream, additional processes (Linux does not limit root's).
CPU, SECONDS, MEMORY, FILE, PRINTED, PROCESSES = 6, 40, 1 << 29, 1 << 26, 1_000_000, 200

#: Memory limit of the judge process, in addition to its initial use [bytes].
JUDGE = 2 << 30


def confine() -> None:
    """Apply the limits to this rank and its child processes."""
    from distkit.cluster.rank.rank import Rank  # not needed by the kernel

    folder = Rank.current.spec.folder
    tempfile.tempdir = folder
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_CPU, int(spent) + CPU, 1)
    _limit(resource.RLIMIT_FSIZE, FILE)
    _limit(resource.RLIMIT_CORE, 0)
    limit_memory(MEMORY)
    if sys.platform == "linux" and os.getuid():
        _limit_processes(_threads() + PROCESSES)
    sys.stdout, sys.stderr = _BoundedStream(sys.stdout), _BoundedStream(sys.stderr)


def limit_memory(extra: int) -> None:
    """Limit this process to ``extra`` bytes above its current memory use, on Linux."""
    if sys.platform == "linux":
        _limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + extra)


def _limit(resource_id: int, limit: int, margin: int = 0) -> None:
    """Set a soft limit, and a hard limit ``margin`` above it if there is none yet."""
    _, hard = resource.getrlimit(resource_id)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(
        resource_id, (soft, soft + margin if hard == resource.RLIM_INFINITY else hard)
    )


def _limit_processes(limit: int) -> None:
    """Limit the user's processes, unless those in other containers already exceed the limit."""
    previous = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, previous[1]))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        resource.setrlimit(resource.RLIMIT_NPROC, previous)
    else:
        _limit(resource.RLIMIT_NPROC, limit)


def _threads() -> int:
    """Return how many threads this user's processes have."""
    processes = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    own_processes = [
        info for info in processes if info["uids"] and info["uids"].real == os.getuid()
    ]
    return sum(info["num_threads"] or 0 for info in own_processes)


class _BoundedStream:
    """A text stream that raises OSError after PRINTED characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, PRINTED

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            raise OSError(f"it prints more than {PRINTED:,} characters")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
