"""Many users on one machine run the first lesson concurrently, each with a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab import isolated_environment
from distkit.cluster import machine

LESSON = next(Path(__file__).parents[3].glob("notebooks/01_*.ipynb"))

#: Memory of a kernel and a cluster of two ranks [bytes], and timeout of a cell [s].
MEMORY, CELL_TIMEOUT = 500_000_000, 900


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("users", [20, 40])
def test_concurrent_users_all_finish_the_lesson(
    users: int, tmp_path: Path, leftovers: Callable[[], list[str]]
) -> None:
    if machine.memory() < users * MEMORY:
        pytest.skip(f"needs {users * MEMORY / 1e9:.0f} GB of memory")
    folders = [tmp_path / str(user) for user in range(users)]
    processes = [*map(start, folders)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [folder.joinpath("log").read_text()[-2000:] for folder in folders]
    assert not [log for log, code in zip(logs, codes, strict=True) if code]
    assert not leftovers()


def start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / LESSON.name).write_bytes(LESSON.read_bytes())
    command = [sys.executable, "-m", "jupyter", "execute", f"--timeout={CELL_TIMEOUT}", LESSON.name]
    environ = {**os.environ, **isolated_environment(folder)}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
