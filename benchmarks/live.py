"""A live timeline in JupyterLab: how far it lags behind its run, and what it costs the run.

The run is synchronous SGD on four ranks, as in the demonstration. *Lag* is the time from the
recording of an event on its rank until a browser has painted a picture with it; one clock
serves all processes of a host. *Cost* compares samples/s with and without the view, in turn,
both recorded. Kernel and browser compute on the same processors as the ranks: how much is
told besides.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from benchmarks import lab
from benchmarks.step import notebook

RANKS, WARM, STEPS = 4, 50, 1000

_SETUP = """
import json, psutil, time
import distkit as dk
from benchmarks.live import RANKS, STEPS, WARM, train

def begin(steps=STEPS):
    global run, taken, busy
    taken, busy = [], sum(psutil.Process().cpu_times()[:2])
    run = cluster.submit(train, WARM, steps)
    return run

def tell():
    run.wait()
    told = {"taken": taken, "rate": sum(run.results), "seconds": run.seconds,
            "kernel": sum(psutil.Process().cpu_times()[:2]) - busy,
            "epoch": time.time() - time.monotonic()}
    with open("told.jsonl", "a") as file:
        print(json.dumps(told), file=file)

class Watched(dk.Timeline):
    def _take(self, events):  # which events are in which patch
        patch = super()._take(events)
        if patch is not None:
            taken.append((self._patches, [e.time for e in events]))
        return patch

cluster = dk.Cluster(RANKS).wait()
begin(WARM).wait()
"""
#: The cells after the first, run again and again.
_WITH, _WITHOUT, _TELL, _STOP = 1, 2, 3, 4
_TEXTS = "Watched(begin())", "begin(); None", "tell()", "cluster.stop()"

#: In the page: notes ``[patches in the picture, seconds since 1970]`` whenever one was painted.
_NOTE = """() => {
    window.painted = [];
    const after = new MessageChannel();
    after.port1.onmessage = ({ data }) =>
        painted.push([data, (performance.timeOrigin + performance.now()) / 1000]);
    new MutationObserver((all) => after.port2.postMessage(Number(all.at(-1).target.dataset.taken)))
        .observe(document.body, { subtree: true, attributeFilter: ['data-taken'] });
}"""


def measure(reps: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """``reps`` pairs of runs: lag [ms] and cost [%] of each, and processor time [s per s]."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        root = Path(folder, "notebooks")
        root.mkdir()
        (root / "live.ipynb").write_text(notebook(_SETUP, *_TEXTS))
        environ = {**os.environ, **lab.surroundings(Path(folder))}
        with lab.serve(root, Path(folder), environ) as server, lab.browse() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(server.address("live.ipynb"))
            page.wait_for_function(lab.IDLE, timeout=60_000)
            page.evaluate(_NOTE)
            _run(page, 0)
            for rep in range(reps):
                say(f"live: {rep + 1} of {reps}")
                for name, value in _pair(page, root / "told.jsonl").items():
                    found.setdefault(name, []).append(value)
            _run(page, _STOP)
    return found


def _pair(page: Any, file: Path) -> dict[str, float]:
    """One run with the view, and one without."""
    page.evaluate("() => { painted.length = 0; }")
    times = [_browser_time()]
    for cell in (_WITH, _WITHOUT):
        _run(page, cell)
        _run(page, _TELL)
        times.append(_browser_time())
    seen = page.evaluate("() => painted")
    watched, alone = map(json.loads, file.read_text().splitlines()[-2:])
    lags = lag(watched["taken"], seen, watched["epoch"])
    return {
        "lag_p95": 1e3 * quantiles(lags, n=20)[-1],
        "lag_median": 1e3 * median(lags),
        "cost": 100 * (1 - watched["rate"] / alone["rate"]),
        "rate_watched": watched["rate"],
        "rate_alone": alone["rate"],
        "kernel_watched": watched["kernel"] / watched["seconds"],
        "kernel_alone": alone["kernel"] / alone["seconds"],
        "browser_watched": (times[1] - times[0]) / watched["seconds"],
        "browser_alone": (times[2] - times[1]) / alone["seconds"],
        "events": float(sum(len(events) for _, events in watched["taken"])),
        "seen": len(lags),
    }


def lag(
    taken: list[tuple[int, list[float]]], painted: list[tuple[int, float]], epoch: float
) -> list[float]:
    """Seconds from each event to the first picture with it.

    Args:
        taken: patches by number, and the times of their events on the monotonic clock.
        painted: how many patches each picture had, and when it was painted, in seconds since 1970.
        epoch: when the monotonic clock was 0, in seconds since 1970.

    What was recorded before the first picture is left out: how soon that opens is another figure.

    >>> lag([(0, [1.0]), (1, [1.5, 2.0]), (2, [3.0])], [(1, 11.2), (2, 12.5), (3, 13.5)], 10.0)
    [1.0, 0.5, 0.5]
    """
    counts, times = [n for n, _ in painted], [at - epoch for _, at in painted]
    first = [(bisect_right(counts, n), events) for n, events in taken]
    return [times[i] - t for i, events in first if i < len(times) for t in events if t > times[0]]


def _run(page: Any, cell: int) -> None:
    """Run a cell to its end."""
    page.evaluate("i => { jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", cell)
    lab.command(page, "notebook:run-cell")
    page.wait_for_function(lab.IDLE, timeout=120_000)


def _browser_time() -> float:
    """Processor seconds of the browser's living processes so far."""
    family = psutil.Process().children(recursive=True)
    return sum(sum(p.cpu_times()[:2]) for p in family if "chrom" in p.name())


def train(warm: int, steps: int) -> float:
    """On each rank: this rank's samples/s of synchronous SGD, after some steps to get warm."""
    import time

    import torch.distributed as dist
    import torch.nn.functional as F

    from distkit import demos
    from distkit.algorithms.sgd import sync_sgd_step
    from distkit.data.shards import shard

    images, labels = shard(*demos.digits())
    net, size = demos.model(), demos.BATCH
    batches = len(images) // size
    for step in range(warm + steps):
        if step == warm:
            dist.barrier()
            started = time.perf_counter()
        rows = slice(step % batches * size, (step % batches + 1) * size)
        sync_sgd_step(net, (images[rows], labels[rows]), F.cross_entropy, demos.LR)
    dist.barrier()
    return steps * size / (time.perf_counter() - started)
