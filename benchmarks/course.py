"""The course: how long each lesson takes, its memory, and how soon the first picture is there."""

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

from benchmarks import lab
from benchmarks.driver import MARK, Samples, Say, end, marked
from benchmarks.figure import Figure, figure, fill
from benchmarks.memory import pss
from distkit.errors import DistkitError
from distkit.pytest_plugin import NotebookFailed, execute

LESSONS = sorted(Path(__file__).parents[1].glob("notebooks/[0-9]*.ipynb"))
FIRST = next(path for path in LESSONS if path.name.startswith("01_"))

#: From one look at the memory to the next [s].
PERIOD = 0.3

_MEMORY = "peak memory (PSS) of kernel and ranks"

FIGURES = {
    "all": Figure(f"all {len(LESSONS)} lessons, one after the other", "min", must=6, absolute=True),
    "failed": Figure("lessons that fail", "lessons", must=0, absolute=True),
    "left": Figure("processes left after the course", "processes", must=0, absolute=True),
    "most": Figure(f"{_MEMORY}: the largest lesson", "MB", must=1500, aim=900, absolute=True),
    "first": Figure(f"{_MEMORY}: {FIRST.stem}", "MB", must=500, aim=350, absolute=True),
    "opening": Figure(
        "lesson 1 opened in JupyterLab, all cells run, to the first picture of a message",
        "s",
        must=10,
        aim=4,
        absolute=True,
    ),
}


def measure(reps: int, say: Say) -> tuple[list[Figure], dict[str, Any]]:
    """Every lesson once; the first one opened ``reps`` times in a warm JupyterLab."""
    seconds, peaks, failed = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _marked(folder) as mark:
        for path in LESSONS:
            began = time.perf_counter()
            with _peak(mark) as peak:
                failed[path.stem] = _run(path)
            peaks[path.stem], seconds[path.stem] = max(peak), time.perf_counter() - began
            say(f"course: {path.stem}: {seconds[path.stem]:.0f} s {failed[path.stem]}")
        left = len(marked(mark))
        end(mark)
    why = lab.missing()
    samples: Samples = {
        "all": [sum(seconds.values()) / 60],
        "failed": [len([*filter(None, failed.values())])],
        "left": [left],
        "most": [max(peaks.values())],
        "first": [peaks[FIRST.stem]],
        "opening": [] if why else _opened(reps, say),
    }
    each = [figure(f"lesson {name}", "s", [seconds[name]]) for name in seconds]
    details = {"seconds": seconds, "peaks": peaks, "failed": failed}
    return [*fill(FIGURES, samples, why), *each], details


@contextmanager
def _marked(folder: str) -> Iterator[str]:
    """An environment for kernels that reads nothing of the user's, with a mark of its own."""
    mark, compiled = uuid.uuid4().hex, str(Path(folder, "compiled"))
    around = {MARK: mark, "TORCHINDUCTOR_CACHE_DIR": compiled}
    with patch.dict(os.environ, {**around, **lab.surroundings(Path(folder))}):
        yield mark


@contextmanager
def _peak(mark: str) -> Iterator[list[float]]:
    """Memory of the processes with this mark, looked at again and again [MB]."""
    found, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(PERIOD):
            with suppress(OSError, DistkitError):  # one has just ended
                found.append(sum(pss(p.pid) for p in marked(mark)) / 1e6)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def _run(lesson: Path) -> str:
    """Run a lesson; what went wrong, "" for nothing."""
    notebook = nbformat.read(lesson, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="bench-") as here:
        try:
            execute(notebook, Path(here))
        except NotebookFailed as error:
            return str(error)[-2000:]
    return ""


def _opened(reps: int, say: Say) -> list[float]:
    """Seconds, with a new kernel each time; the first one warms the caches."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = shutil.copytree(FIRST.parent, Path(folder, "notebooks"))
        environ = {**os.environ, **lab.surroundings(Path(folder))}
        with lab.serve(root, Path(folder), environ) as server, lab.browse() as browser:
            for turn in range(reps + 1):
                seconds.append(_open(browser, server))
                say(f"course: lesson 1 opened, {turn} of {reps}: {seconds[-1]:.1f} s")
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
    took = time.perf_counter() - began
    page.wait_for_function(lab.IDLE)
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    return took
