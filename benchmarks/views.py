"""Time to the first picture, frame time and live lag of the timeline in JupyterLab.

The first picture is timed from running the cell ``Timeline(trace)`` until a headless browser has
painted it. A live run is synchronous SGD on four ranks. The *lag* is the time from the recording of
an event until the browser has painted it (all processes of a host share one clock). The *cost*
compares the samples/s of two recorded runs, one with a view and one without. The kernel and the
browser share the CPUs with the ranks.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import lab
from benchmarks.driver import Log, Samples, interleave
from benchmarks.figure import Figure, fill
from benchmarks.step import p95
from distkit.events import Event, Op, State
from distkit.trace.info import RunInfo
from distkit.trace.trace import Trace

#: Long traces have RANKS ranks, and SIZES are their numbers of events. A live run has LIVE ranks,
#: WARM warm-up steps and STEPS timed steps.
RANKS, SIZES = 8, (100_000, 1_000_000)
LIVE, WARM, STEPS = 4, 50, 1000

#: In the page, run the next cell and resolve with the milliseconds until a timeline is drawn.
_DRAWN = """() => new Promise((resolve) => {
    const known = new Set(document.querySelectorAll('[data-drawn]'));
    const started = performance.now();
    new MutationObserver((_, observer) => {
        if (![...document.querySelectorAll('[data-drawn]')].some((el) => !known.has(el))) return;
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - started)));
    }).observe(document.body, { subtree: true, childList: true, attributeFilter: ['data-drawn'] });
    jupyterapp.commands.execute('notebook:run-cell-and-select-next');
})"""

#: In the page, show all, then zoom and pan with one wheel event per frame, and resolve with the
#: duration of each frame [ms].
_MOVE = """(frames) => new Promise((resolve) => {
    const canvas = [...document.querySelectorAll('[data-drawn] canvas[role]')].at(-1);
    const box = canvas.getBoundingClientRect();
    const [x, y] = [box.left + 0.4 * box.width, box.top + 0.4 * box.height];
    const at = { clientX: x, clientY: y, bubbles: true, cancelable: true };
    canvas.dispatchEvent(new PointerEvent('pointermove', { ...at, movementX: 3 }));
    canvas.closest('[data-drawn]').querySelector('[aria-label="show the whole run"]').click();
    const intervals = [];
    let last = null, n = 0;
    const turn = (time) => {
        if (n > 21) intervals.push(time - last);
        last = time;
        if (n === frames) return resolve(intervals);
        const part = (Math.floor(n++ / 20) + 3) % 4;
        if (n > 20) canvas.dispatchEvent(new WheelEvent('wheel', { ...at,
            deltaY: [-60, 0, 60, 0][part], deltaX: [0, 40, 0, -40][part] }));
        requestAnimationFrame(turn);
    };
    requestAnimationFrame(turn);
})"""

#: In the page, append ``[number of updates so far, seconds since 1970]`` after each paint.
_WATCH_PAINTS = """() => {
    window.painted = [];
    const after = new MessageChannel();
    after.port1.onmessage = ({ data }) =>
        painted.push([data, (performance.timeOrigin + performance.now()) / 1000]);
    new MutationObserver((all) => after.port2.postMessage(Number(all.at(-1).target.dataset.taken)))
        .observe(document.body, { subtree: true, attributeFilter: ['data-taken'] });
}"""

_SETUP = """
import json, time
import distkit as dk
from benchmarks.views import LIVE, STEPS, WARM, train

def submit(steps=STEPS):
    global run, taken
    taken, run = [], cluster.submit(train, WARM, steps)
    return run

def save_result():
    run.wait()
    result = [taken, sum(run.results), time.time() - time.monotonic()]
    with open("results.jsonl", "a") as file:
        print(json.dumps(result), file=file)

class Watched(dk.Timeline):
    seen = 0

    def _process(self, trace, live):  # records the new events of each update
        super()._process(trace, live)
        if live:
            taken.append((self._updates, trace.table.time[self.seen:].tolist()))
            self.seen = len(trace)

cluster = dk.Cluster(LIVE).wait()
submit(WARM).wait()
"""
#: Indices of the cells after the first, and their sources.
_WITH, _WITHOUT, _SAVE, _STOP = 1, 2, 3, 4
_CELLS = "Watched(submit())", "submit(); None", "save_result()", "cluster.stop()"

_OPEN = "{:,} events: from Timeline(trace) to the first picture"

FIGURES = {
    "open 100000": Figure(_OPEN.format(SIZES[0]), "ms"),
    "open 1000000": Figure(_OPEN.format(SIZES[1]), "ms"),
    # the limit is two frames of a 60 Hz screen, and the target is one frame
    "frame": Figure(
        "pan and zoom at 100,000 events: time of a frame",
        "ms",
        limit=33.4,
        target=16.8,
        absolute=True,
    ),
    "lag": Figure(
        "lag of a live view behind a running 4-rank job, 95th percentile",
        "ms",
        limit=150,
        absolute=True,
    ),
    "cost": Figure(
        "cost of a live view in samples/s of the job", "%", limit=3, target=2, absolute=True
    ),
    "static": Figure(
        "largest static image of a timeline", "kB", limit=150, target=60, absolute=True
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Measure first pictures and frames of long traces, live runs, and sizes of static images."""
    reason = lab.missing()
    samples = {} if reason else {**_in_lab(reps, log), **_live(reps, log)}
    samples["static"] = [max(map(_static, (100, 1_000, SIZES[0])))]
    return fill(FIGURES, samples, reason), samples


def long_trace(events: int) -> Trace:
    """Return a trace of messages and all-reduces on eight ranks."""
    recorded, at = [], 0.0
    for seq in range(events // (3 * RANKS)):
        reduces = seq % 3 == 2
        for r in range(RANKS):
            op = Op.ALL_REDUCE if reduces else (Op.SEND if (r + seq) % 2 else Op.RECV)
            step = 1 if seq % 3 else -1
            peer = None if reduces else (r + (step if (r + seq) % 2 else -step)) % RANKS
            seconds = 1e-5 * r + (4e-4 + 1e-4 * (op is Op.SEND))
            for state, now in (
                (State.SCHEDULED, at),
                (State.STARTED, at + 1e-6),
                (State.COMPLETED, at + 2e-6 + seconds),
            ):
                event = Event(r, seq, op, state, now, peer, "world", 4096, (1024,), "float32")
                recorded.append(replace(event, where="train.py:31"))
        at += 0.6e-3
    return Trace(recorded, RunInfo(name="a long run", world_size=RANKS, backend="gloo"))


def _static(events: int) -> float:
    """Return the size of the static image of a trace [kB]."""
    from distkit.views.timeline.view import Timeline

    return len(Timeline(long_trace(events))._svg().encode()) / 1000


def _in_lab(reps: int, log: Log) -> Samples:
    """Return the times to load and to draw traces, and the frame times of pan and zoom [ms]."""
    samples: Samples = {}
    cells = [
        cell
        for n in SIZES
        for cell in (
            f"import distkit as dk\ntrace = dk.Trace.load('{n}.trace')",
            *["dk.Timeline(trace)"] * reps,
        )
    ]
    log("views: writing traces")
    with lab.open_notebook(*cells, files=_write_traces) as (page, _):
        for n in SIZES:
            log(f"views: {n:,} events, {reps} times")
            start = time.perf_counter()
            lab.command(page, "notebook:run-cell-and-select-next")
            page.wait_for_function(lab.IDLE, timeout=120_000)
            samples[f"load {n}"] = [1e3 * (time.perf_counter() - start)]
            samples[f"open {n}"] = [float(page.evaluate(_DRAWN)) for _ in range(reps)]
            page.wait_for_function(lab.IDLE, timeout=120_000)
            if n == SIZES[0]:
                samples["frame"] = page.evaluate(_MOVE, 240)
    return samples


def _write_traces(root: Path) -> None:
    for n in SIZES:
        long_trace(n).save(root / f"{n}.trace")


# -- live ----------------------------------------------------------------------------------------


def _live(reps: int, log: Log) -> Samples:
    """Return the lag [ms] and the cost [%] from ``reps`` pairs of runs."""
    with lab.open_notebook(_SETUP, *_CELLS) as (page, root):
        page.evaluate(_WATCH_PAINTS)
        lab.run_cell(page, 0)
        samples = interleave("views: live", reps, log, lambda: _pair(page, root / "results.jsonl"))
        lab.run_cell(page, _STOP)
    return samples


def _pair(page: Any, file: Path) -> dict[str, float]:
    """Run once with the view and once without."""
    page.evaluate("() => { painted.length = 0; }")
    for cell in (_WITH, _SAVE, _WITHOUT, _SAVE):
        lab.run_cell(page, cell)
    painted = page.evaluate("() => painted")
    (taken, watched, epoch), (_, unwatched, _) = map(json.loads, file.read_text().splitlines()[-2:])
    return {"lag": 1e3 * p95(lag(taken, painted, epoch)), "cost": 100 * (1 - watched / unwatched)}


def lag(
    taken: Sequence[tuple[int, list[float]]], painted: Sequence[tuple[int, float]], epoch: float
) -> list[float]:
    """Return the time from each event to the first picture that shows it [s].

    Args:
        taken: the number of each update and the times of its events on the monotonic clock.
        painted: the number of updates before each picture, and its time in seconds since 1970.
        epoch: the zero of the monotonic clock in seconds since 1970.

    Events recorded before the first picture are omitted.

    >>> lag([(0, [1.0]), (1, [1.5, 2.0]), (2, [3.0])], [(1, 11.2), (2, 12.5), (3, 13.5)], 10.0)
    [1.0, 0.5, 0.5]
    """
    counts, times = [n for n, _ in painted], [at - epoch for _, at in painted]
    first = [(bisect_right(counts, n), events) for n, events in taken]
    return [times[i] - t for i, events in first if i < len(times) for t in events if t > times[0]]


def train(warm: int, steps: int) -> float:
    """Return this rank's throughput in synchronous SGD, after warm-up steps [samples/s]."""
    import torch.distributed as dist
    import torch.nn.functional as F

    import distkit as dk

    images, labels = dk.data.shard(*dk.data.digits())
    net, size = dk.demos.model(), dk.demos.BATCH
    batches = [*zip(images.split(size), labels.split(size), strict=True)][:-1]
    for step in range(warm + steps):
        if step == warm:
            dist.barrier()
            start = time.perf_counter()
        dk.algorithms.sync_sgd_step(net, batches[step % len(batches)], F.cross_entropy, dk.demos.LR)
    dist.barrier()
    return steps * size / (time.perf_counter() - start)
