"""Stepping: how long a step takes from Python, and from a click in JupyterLab to its picture."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks import lab
from benchmarks.figure import Figure, figure

RANKS = 4

#: The notebook whose cockpit is clicked through.
_CELL = f"""
import distkit as dk
from benchmarks.step import reduce_often

cluster = dk.Cluster({RANKS})
stepper = cluster.step(reduce_often, %d)
stepper
"""

#: In the page: click on a button, and resolve with the milliseconds until the cockpit has drawn.
_CLICK = """(name) => new Promise((resolve) => {
    const root = document.querySelector('[data-cockpit="ready"]');
    const before = root.dataset.moment;
    const started = performance.now();
    new MutationObserver((_, observer) => {
        if (root.dataset.moment === before) return;
        observer.disconnect();
        requestAnimationFrame(() => resolve(performance.now() - started));
    }).observe(root, { attributes: true, attributeFilter: ['data-moment'] });
    root.querySelector(name).click();
})"""


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """``reps`` steps of an all-reduce on four ranks, from Python and by clicks."""
    calls, stock = _calls(reps, say)
    why = lab.missing()
    clicks = [] if why else _clicks(reps, say)
    limits: dict[str, Any] = {"absolute": True}
    return [
        figure(
            f"stepper.next(), {RANKS} ranks, round trip",
            "ms",
            calls,
            f"ipyparallel's apply_sync of nothing on {RANKS} engines",
            stock,
            must=60,
            aim=20,
            **limits,
        ),
        Figure(
            "click on Next in JupyterLab to the picture, 95th percentile",
            "ms",
            _p95(clicks) if clicks else None,
            min(clicks, default=None),
            max(clicks, default=None),
            len(clicks),
            why,
            must=250,
            aim=100,
            **limits,
        ),
    ], {"next_ms": calls, "apply_sync_ms": stock, "click_ms": clicks}


def reduce_often(count: int) -> None:
    """What is stepped through: ``count`` all-reduces of eight numbers."""
    import torch
    import torch.distributed as dist

    x = torch.ones(8)
    for _ in range(count):
        dist.all_reduce(x)


def _calls(reps: int, say: Callable[[str], None]) -> tuple[list[float], list[float]]:
    """Milliseconds of each next(), and of ipyparallel's own round trip in between."""
    from distkit.cluster.cluster import Cluster

    ours, stock = [], []
    with Cluster(RANKS) as cluster:
        stepper = cluster.step(reduce_often, reps + 1)
        view = cluster._room.engines._client[:]
        for rep in range(reps):
            if rep % 20 == 0:
                say(f"step: next() {rep + 1} of {reps}")
            started = time.perf_counter()
            stepper.next()
            ours.append(1e3 * (time.perf_counter() - started))
        stepper.finish()
        for _ in range(reps):
            started = time.perf_counter()
            view.apply_sync(os.getpid)
            stock.append(1e3 * (time.perf_counter() - started))
    return ours, stock


def _clicks(reps: int, say: Callable[[str], None]) -> list[float]:
    """Milliseconds from a click on Next in JupyterLab until the cockpit shows the new moment."""
    say("step: starting JupyterLab and a browser")
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        root = Path(folder, "notebooks")
        root.mkdir()
        (root / "step.ipynb").write_text(notebook(_CELL % (reps + 20), "cluster.stop()"))
        environ = {**os.environ, **lab.surroundings(Path(folder))}
        with lab.serve(root, Path(folder), environ) as server, lab.browse() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 1600})
            page.goto(server.address("step.ipynb"))
            page.wait_for_function(lab.IDLE, timeout=60_000)
            lab.command(page, "notebook:run-cell-and-select-next")
            page.wait_for_selector('[data-cockpit="ready"]', timeout=60_000)
            say(f"step: {reps} clicks")
            clicks = [float(page.evaluate(_CLICK, ".dk-next")) for _ in range(reps)]
            lab.command(page, "notebook:run-cell-and-select-next")
            page.wait_for_function(lab.IDLE, timeout=20_000)
            return clicks


def notebook(*cells: str) -> str:
    """The text of a notebook file with these cells."""
    made: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "execution_count": None,
            "metadata": {},
            "outputs": [],
            "id": f"cell-{i}",
            "source": text,
        }
        for i, text in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
