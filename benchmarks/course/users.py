"""Many users on one machine, who all run the first lesson at once, each with a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.course.lessons import FIRST, left, none
from benchmarks.driver import MARK, end
from benchmarks.figure import Figure
from benchmarks.lab import surroundings
from distkit.cluster import limits

#: So many users must get through the lesson, and so many should.
MUST, AIM = 20, 40

#: A kernel and a cluster of two ranks need so much [bytes]; a cell takes at most so long [s].
EACH, PATIENCE = 500_000_000, 900


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Both numbers of users, once: the same every time, so ``reps`` do not matter."""
    figures, details = [], {}
    for users in (MUST, AIM):
        name = f"of {users} users at once, those whose lesson 1 fails"
        if limits.memory() < users * EACH:
            note = f"needs {users * EACH / 1e9:.0f} GB of memory"
            figures.append(Figure(name, "", None, absolute=True, note=note))
            continue
        began = time.perf_counter()
        failed, stayed = together(users)
        details[str(users)] = {"failed": failed, "seconds": time.perf_counter() - began}
        say(f"course: {users} users: {len(failed)} failed ({time.perf_counter() - began:.0f} s)")
        figures += [none(name, len(failed)), none(f"processes that {users} users leave", stayed)]
    return figures, details


def together(users: int) -> tuple[dict[int, str], int]:
    """What went wrong, by user, and how many processes are left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folders = [Path(name, str(user)) for user in range(users)]
        started = [_start(folder, mark) for folder in folders]
        codes = [process.wait() for process in started]
        said = [folder.joinpath("log").read_text()[-2000:] for folder in folders]
        stayed = len(left(mark))
        end(mark)
    return {user: said[user] for user, code in enumerate(codes) if code}, stayed


def _start(folder: Path, mark: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / FIRST.name).write_bytes(FIRST.read_bytes())
    command = [sys.executable, "-m", "jupyter", "execute", f"--timeout={PATIENCE}", FIRST.name]
    environ = {**os.environ, MARK: mark, **surroundings(folder)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
