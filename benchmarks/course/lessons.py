"""The lessons: how long all take one after the other, and what is left when they are over."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import psutil

from benchmarks.driver import MARK, end, marked
from benchmarks.figure import Figure, figure
from benchmarks.lab import surroundings
from distkit.pytest_plugin import NotebookFailed, execute

#: All lessons, and the first one with a message.
LESSONS = sorted(Path(__file__).parents[2].glob("notebooks/[0-9]*.ipynb"))
FIRST = next(path for path in LESSONS if path.name.startswith("01_"))

#: Places where what is left would lie; temporary folders are this run's own.
_SHARED = Path("/dev/shm")


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Every lesson, once; the same every time, so ``reps`` do not matter."""
    mark, before = uuid.uuid4().hex, _files(_SHARED)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        around = {MARK: mark, "TMPDIR": str(folder / "tmp"), **surroundings(folder / "jupyter")}
        around["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # of torch, meant to stay
        (folder / "tmp").mkdir()
        seconds, failed = {}, {}
        for path in LESSONS:
            began = time.perf_counter()
            with patch.dict(os.environ, around):
                failed[path.stem] = _run(path, folder)
            seconds[path.stem] = time.perf_counter() - began
            say(f"course: {path.stem}: {failed[path.stem] or 'ran'} ({seconds[path.stem]:.0f} s)")
        stayed = left(mark)
        files = sorted(map(str, _files(folder / "tmp") | (_files(_SHARED) - before)))
        end(mark)
    return [
        figure(
            f"all {len(LESSONS)} lessons, one after the other",
            "min",
            [sum(seconds.values()) / 60],
            must=15,
            aim=8,
            absolute=True,
        ),
        none("lessons that fail", len(list(filter(None, failed.values())))),
        none("processes left after the course", len(stayed)),
        none("ports left after the course", sum(stayed.values())),
        none("files left after the course, in memory and in temporary folders", len(files)),
    ], {"seconds": seconds, "failed": failed, "files": files}


def none(name: str, count: float) -> Figure:
    """A number that has to be 0."""
    return figure(name, "", [float(count)], must=0, aim=0, absolute=True)


def _run(lesson: Path, folder: Path) -> str:
    """Run a lesson; what went wrong, "" for nothing."""
    notebook = nbformat.read(lesson, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=folder) as here:
        try:
            execute(notebook, Path(here))
        except NotebookFailed as error:
            return str(error)[-2000:]
    return ""


def _files(folder: Path) -> set[Path]:
    """All that lies in a folder; the notebooks' kernels write nothing there themselves."""
    return set(folder.iterdir()) if folder.exists() else set()


def left(mark: str, within: float = 10.0) -> dict[int, int]:
    """The processes that are still there, and at how many ports each listens."""
    psutil.wait_procs(marked(mark), timeout=within)
    return {
        p.pid: sum(c.status == psutil.CONN_LISTEN for c in p.net_connections("inet"))
        for p in marked(mark)
    }
