"""The first lesson in JupyterLab: from opening it to the first picture of a real message."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import lab
from benchmarks.course.lessons import FIRST
from benchmarks.figure import Figure, figure

#: The lesson is opened so often, with a new kernel each time; the first one warms the caches.
TIMES = 5


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """The median of some; ``reps`` do not matter."""
    name = "lesson 1 opened in JupyterLab, all cells run, to the first picture of a message"
    if why := lab.missing():
        return [Figure(name, "s", None, must=10, aim=4, absolute=True, note=why)], {}
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = shutil.copytree(FIRST.parent, Path(folder, "notebooks"))
        environ = {**os.environ, **lab.surroundings(Path(folder))}
        with lab.serve(root, Path(folder), environ) as server, lab.browse() as browser:
            for n in range(TIMES):
                seconds.append(_open(browser, server))
                say(f"course: lesson 1 opened, {n + 1} of {TIMES}: {seconds[-1]:.1f} s")
    return [figure(name, "s", seconds[1:], must=10, aim=4, absolute=True)], {"seconds": seconds}


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
