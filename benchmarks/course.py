"""Duration and memory use of each lesson, and the time to the first view in lesson 1."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from benchmarks import lab
from benchmarks.driver import MARK, Log, Samples, kill_marked, marked_processes
from benchmarks.figure import Figure, figure, fill
from benchmarks.memory import pss
from distkit.errors import DistkitError

LESSONS = sorted(Path(__file__).parents[1].glob("notebooks/[0-9]*.ipynb"))
FIRST = next(path for path in LESSONS if path.name.startswith("01_"))

#: Interval between two memory samples [s].
PERIOD = 0.3

_MEMORY = "peak memory (PSS) of kernel and ranks"

FIGURES = {
    "all": Figure(f"all {len(LESSONS)} lessons in sequence", "min", limit=6, absolute=True),
    "failed": Figure("lessons that fail", "lessons", limit=0, absolute=True),
    "left": Figure("processes left after the course", "processes", limit=0, absolute=True),
    "most": Figure(f"{_MEMORY}: the largest lesson", "MB", limit=1500, target=900, absolute=True),
    "first": Figure(f"{_MEMORY}: {FIRST.stem}", "MB", limit=500, target=350, absolute=True),
    "opening": Figure(
        "lesson 1 in JupyterLab, from opening the notebook to the first view",
        "s",
        limit=10,
        target=4,
        absolute=True,
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Run every lesson once; open lesson 1 ``reps`` times in a warm JupyterLab."""
    seconds, peaks, failed = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _marked(folder) as mark:
        for path in LESSONS:
            began = time.perf_counter()
            with _peak(mark) as peak:
                failed[path.stem] = _run(path)
            peaks[path.stem], seconds[path.stem] = max(peak), time.perf_counter() - began
            log(f"course: {path.stem}: {seconds[path.stem]:.0f} s {failed[path.stem]}")
        remaining = len(marked_processes(mark))
        kill_marked(mark)
    reason = lab.missing()
    samples: Samples = {
        "all": [sum(seconds.values()) / 60],
        "failed": [len([*filter(None, failed.values())])],
        "left": [remaining],
        "most": [max(peaks.values())],
        "first": [peaks[FIRST.stem]],
        "opening": [] if reason else _time_openings(reps, log),
    }
    lessons = [figure(f"lesson {name}", "s", [seconds[name]]) for name in seconds]
    details = {"seconds": seconds, "peaks": peaks, "failed": failed}
    return [*fill(FIGURES, samples, reason), *lessons], details


@contextmanager
def _marked(folder: str) -> Iterator[str]:
    """Isolate kernels from the user's Jupyter settings and mark their processes."""
    mark, compiled = uuid.uuid4().hex, str(Path(folder, "compiled"))
    environ = {MARK: mark, "TORCHINDUCTOR_CACHE_DIR": compiled}
    with patch.dict(os.environ, {**environ, **lab.isolated_environment(Path(folder))}):
        yield mark


@contextmanager
def _peak(mark: str) -> Iterator[list[float]]:
    """Sample the memory of the processes with this mark [MB]."""
    samples, stopped = [0.0], threading.Event()

    def watch() -> None:
        while not stopped.wait(PERIOD):
            with suppress(OSError, DistkitError):  # a process may have just exited
                samples.append(sum(pss(p.pid) for p in marked_processes(mark)) / 1e6)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        stopped.set()
        watcher.join()


def _run(lesson: Path) -> str:
    """Run a lesson and return its error, or ""."""
    notebook = nbformat.read(lesson, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
        except (CellExecutionError, DeadKernelError) as error:
            return str(error)[-2000:]
    return ""


def _time_openings(reps: int, log: Log) -> list[float]:
    """Return the times to the first view in new kernels [s], after a warm-up run."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = shutil.copytree(FIRST.parent, Path(folder, "notebooks"))
        environ = {**os.environ, **lab.isolated_environment(Path(folder))}
        with lab.serve(root, Path(folder), environ) as server, lab.browse() as browser:
            for rep in range(reps + 1):
                seconds.append(_open(browser, server))
                log(f"course: lesson 1 opened, {rep} of {reps}: {seconds[-1]:.1f} s")
    return seconds[1:]


def _open(browser: Any, server: lab.Lab) -> float:
    page = browser.new_page(viewport={"width": 1280, "height": 1600})
    page.set_default_timeout(120_000)
    began = time.perf_counter()
    page.goto(server.address(FIRST.name))
    page.wait_for_function(lab.IDLE)
    page.evaluate("() => void jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_selector(".distkit-timeline[data-drawn], .distkit-timeline [data-drawn]")
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
    seconds = time.perf_counter() - began
    page.wait_for_function(lab.IDLE)
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    return seconds
