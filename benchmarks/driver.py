"""Alternate contenders and measure programs in fresh Python processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from distkit.errors import DistkitError

Log = Callable[[str], None]
Samples = dict[str, list[float]]


def interleave(
    name: str, reps: int, log: Log, *contenders: Callable[[], Mapping[str, float]]
) -> Samples:
    """Measure each contender ``reps`` times, alternating; return the samples by name."""
    samples: Samples = defaultdict(list)
    for rep in range(reps):
        log(f"{name}: {rep + 1} of {reps}")
        for contender in contenders:
            for key, value in contender().items():
                samples[key].append(value)
    return dict(samples)


def open_mpi_environ() -> dict[str, str]:
    """Return the environment, with permission for Open MPI to run as root."""
    permissions = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]
    return {**os.environ, **dict.fromkeys(permissions, "1")}


def torch_timeout(nccl: bool = False) -> float:
    """Return torch's default timeout of a collective [s]."""
    from torch.distributed import constants

    timeout = constants.default_pg_nccl_timeout if nccl else None  # None in a build without NCCL
    return (timeout or constants.default_pg_timeout).total_seconds()


#: Environment variable that marks all processes that a driver starts, directly or indirectly.
MARK = "DISTKIT_BENCH"

#: Prepended to each program: ``reply(value)`` sends a value, ``request()`` waits for a request.
_PROLOGUE = """
import json, os, sys, time
_replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # keep the output of libraries out of the replies
def reply(value):
    print(json.dumps(value), file=_replies, flush=True)
def request():
    return bool(sys.stdin.readline())
folder = sys.argv[1]
"""


class Driver:
    """A program in a fresh Python process; exiting the ``with`` block kills its processes.

    Args:
        program: the source, which may use the names in ``_PROLOGUE``, such as the temporary
            ``folder``.
    """

    def __init__(self, program: str) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="distkit-bench-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        environ = {
            **os.environ,
            MARK: self.mark,
            "IPYTHONDIR": str(folder / "ipython"),
            "GLOO_SOCKET_IFNAME": "lo",
            "IPP_NONINTERACTIVE": "1",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROLOGUE + program, str(folder)],
                env=environ,
                stderr=log,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=folder,
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, line: str = "", timeout: float = 180.0) -> Any:
        """Send a line, which the program may read as a request, and return its next reply."""
        _pipe(self.process.stdin).write(f"{line}\n".encode())
        return self.reply(timeout)

    def reply(self, timeout: float = 180.0) -> Any:
        """Wait for the program's next reply.

        Raises:
            DistkitError: the program exited, or did not reply within ``timeout`` [s].
        """
        stdout = _pipe(self.process.stdout)
        ready, _, _ = select.select([stdout], [], [], timeout)
        line = stdout.readline() if ready else b""
        if not line:
            log = self._log.read_text(errors="replace")[-2000:].strip()
            raise DistkitError(f"a measured program did not reply. The end of its log:\n{log}")
        return json.loads(line)

    def close(self) -> None:
        """Close the program's input, wait up to 20 s for its exit, and kill remaining processes."""
        _pipe(self.process.stdin).close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        kill_marked(self.mark)
        _pipe(self.process.stdout).close()
        self._folder.cleanup()


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the live processes with this mark and their descendants (sshd drops the mark)."""
    processes = {p for p in psutil.process_iter() if _mark(p) == mark}
    return [*processes, *(descendants(processes) - processes)]


def descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the live descendants of these processes."""
    children = defaultdict(set)
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            children[process.info["ppid"]].add(process)
    found, pending = set[psutil.Process](), [p.pid for p in processes]
    while pending:
        new = children.pop(pending.pop(), set())
        found |= new
        pending += [p.pid for p in new]
    return found


def kill_marked(mark: str) -> None:
    """Kill the processes with this mark and their descendants."""
    while remaining := marked_processes(mark):
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(remaining, timeout=5)


def _mark(process: psutil.Process) -> str:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process.environ().get(MARK, "") if alive else ""
    except (psutil.Error, OSError):  # it has exited, or belongs to another user
        return ""


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
