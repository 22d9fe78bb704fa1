"""Duration of a step from Python, and from a click in JupyterLab to the updated view."""

from __future__ import annotations

import time
from statistics import quantiles
from typing import Any

from benchmarks import lab
from benchmarks.driver import Driver, Log, interleave
from benchmarks.figure import Figure, fill
from benchmarks.start import STOCK

RANKS = 4

#: The cell that displays the cockpit.
_CELL = f"""
import distkit as dk
from benchmarks.step import reduce_often

cluster = dk.Cluster({RANKS})
stepper = cluster.step(reduce_often, %d)
stepper
"""

#: In the page, click Next and resolve with the milliseconds until the cockpit has drawn.
_CLICK = """() => new Promise((resolve) => {
    const root = document.querySelector('[data-cockpit="ready"]');
    const before = root.dataset.moment;
    const started = performance.now();
    new MutationObserver((_, observer) => {
        if (root.dataset.moment === before) return;
        observer.disconnect();
        requestAnimationFrame(() => resolve(performance.now() - started));
    }).observe(root, { attributes: true, attributeFilter: ['data-moment'] });
    root.querySelector('.dk-next').click();
})"""

FIGURES = {
    "next / apply": Figure(
        f"stepper.next(), {RANKS} ranks, round trip",
        "ms",
        reference=f"ipyparallel apply_sync of os.getpid on {RANKS} engines",
        limit=1.0,
    ),
    "p95": Figure(
        "from a click on Next in JupyterLab to the updated view, 95th percentile",
        "ms",
        limit=120,
        absolute=True,
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Time ``reps`` steps of an all-reduce on four ranks, from Python and with clicks."""
    samples = _measure_calls(reps, log)
    reason = lab.missing()
    if not reason:
        log(f"step: {reps} clicks in JupyterLab")
        samples["clicks"] = _measure_clicks(reps)
        samples["p95"] = [p95(samples["clicks"])]
    return fill(FIGURES, samples, reason), samples


def reduce_often(count: int) -> None:
    """Run ``count`` all-reduces of eight numbers."""
    import torch
    import torch.distributed as dist

    x = torch.ones(8)
    for _ in range(count):
        dist.all_reduce(x)


def _measure_calls(reps: int, log: Log) -> dict[str, list[float]]:
    """Return the durations of calls to next(), alternating with ipyparallel round trips [ms]."""
    import distkit as dk

    def step() -> dict[str, float]:
        start = time.perf_counter()
        stepper.next()
        return {"next": 1e3 * (time.perf_counter() - start)}

    with Driver(STOCK) as stock, dk.Cluster(RANKS) as cluster:
        stock.request()  # starts the cluster
        stepper = cluster.step(reduce_often, reps + 1)
        samples = interleave("step", reps, log, step, lambda: {"apply": 1e3 * stock.request()})
        stepper.finish()
    return samples


def _measure_clicks(reps: int) -> list[float]:
    """Return the times from a click on Next until the cockpit has drawn the new moment [ms]."""
    with lab.open_notebook(_CELL % (reps + 20), "cluster.stop()", height=1600) as (page, _):
        lab.command(page, "notebook:run-cell-and-select-next")
        page.wait_for_selector('[data-cockpit="ready"]', timeout=60_000)
        clicks = [float(page.evaluate(_CLICK)) for _ in range(reps)]
        lab.run_cell(page, 1)
    return clicks


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
