"""Contenders that take turns, and fresh Python processes that measure themselves."""

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

Say = Callable[[str], None]
Samples = dict[str, list[float]]


def take_turns(
    name: str, reps: int, say: Say, *contenders: Callable[[], Mapping[str, float]]
) -> Samples:
    """Measure each contender ``reps`` times, in turn; the samples by their names."""
    samples: Samples = defaultdict(list)
    for rep in range(reps):
        say(f"{name}: {rep + 1} of {reps}")
        for contender in contenders:
            for key, value in contender().items():
                samples[key].append(value)
    return dict(samples)


def open_mpi_environ() -> dict[str, str]:
    """This environment, and what lets Open MPI run programs for root."""
    allowed = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]
    return {**os.environ, **dict.fromkeys(allowed, "1")}


def torch_timeout(nccl: bool = False) -> float:
    """Default time after which torch gives up a collective [s]; the error names no rank."""
    from torch.distributed import constants

    nccls = constants.default_pg_nccl_timeout if nccl else None  # None in a build without NCCL
    return (nccls or constants.default_pg_timeout).total_seconds()


#: Carried by every process that a driver starts, directly or not.
MARK = "DISTKIT_BENCH"

#: What a program begins with: ``answer(value)`` sends, ``asked()`` waits until it should go on.
_PROLOGUE = """
import json, os, sys, time
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
def answer(value):
    print(json.dumps(value), file=_answers, flush=True)
def asked():
    return bool(sys.stdin.readline())
folder = sys.argv[1]
"""


class Driver:
    """A program in a fresh Python. Leaving the ``with`` block ends all that it started.

    Args:
        program: its text; see ``_PROLOGUE`` for what it may use. ``folder`` is its own.
    """

    def __init__(self, program: str) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="distkit-bench-")
        here = Path(self._folder.name)
        self._log = here / "log"
        environ = {
            **os.environ,
            MARK: self.mark,
            "IPYTHONDIR": str(here / "ipython"),
            "GLOO_SOCKET_IFNAME": "lo",
            "IPP_NONINTERACTIVE": "1",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROLOGUE + program, str(here)],
                env=environ,
                stderr=log,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=here,
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, line: str = "", within: float = 180.0) -> Any:
        """Have the program go on, and return its next answer; it may read the line."""
        _pipe(self.process.stdin).write(f"{line}\n".encode())
        return self.answer(within)

    def answer(self, within: float = 180.0) -> Any:
        """The program's next answer.

        Raises:
            DistkitError: it ended, or did not answer ``within`` this time [s].
        """
        stdout = _pipe(self.process.stdout)
        ready, _, _ = select.select([stdout], [], [], within)
        line = stdout.readline() if ready else b""
        if not line:
            log = self._log.read_text(errors="replace")[-2000:].strip()
            raise DistkitError(f"a measured program did not answer; the end of its log:\n{log}")
        return json.loads(line)

    def close(self) -> None:
        """End the program, gently if it can, and whatever it leaves behind."""
        _pipe(self.process.stdin).close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        end(self.mark)
        _pipe(self.process.stdout).close()
        self._folder.cleanup()


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that carry this mark, and those below them: sshd passes no mark on."""
    found = {p for p in psutil.process_iter() if _mark(p) == mark}
    return [*found, *(below(found) - found)]


def below(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """The living processes that descend from these."""
    children = defaultdict(set)
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            children[process.info["ppid"]].add(process)
    found, ahead = set[psutil.Process](), [p.pid for p in processes]
    while ahead:
        new = children.pop(ahead.pop(), set())
        found |= new
        ahead += [p.pid for p in new]
    return found


def end(mark: str) -> None:
    """Kill the processes with this mark, one by one."""
    while left := marked(mark):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def _mark(process: psutil.Process) -> str:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process.environ().get(MARK, "") if alive else ""
    except (psutil.Error, OSError):  # gone, or another user's
        return ""


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
