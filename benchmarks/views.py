"""The timeline in JupyterLab: how soon it is drawn, how smoothly it moves, how much a file keeps.

What was measured is the whole way: from running the cell ``Timeline(trace)`` to the first
picture on the screen of a browser without a window.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import lab, live
from benchmarks.figure import Figure, figure
from benchmarks.step import notebook
from distkit.events import Event, Op, State
from distkit.trace.trace import Trace

RANKS = 8
SIZES = (100_000, 1_000_000)

#: A file is written, loaded and drawn; ``n`` was put in by the cell before.
_OPEN = """
import distkit as dk
trace = dk.Trace.load("{file}")
"""

#: In the page: run the next cell, and resolve with the milliseconds until a timeline is drawn.
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

#: In the page: show all, then zoom in and out and pan, one turn of the wheel per frame; how long
#: each frame took, and how long the processor worked for it [ms].
_MOVE = """(frames) => new Promise((resolve) => {
    const canvas = [...document.querySelectorAll('[data-drawn] canvas[role]')].at(-1);
    const box = canvas.getBoundingClientRect();
    const [x, y] = [box.left + 0.4 * box.width, box.top + 0.4 * box.height];
    const at = { clientX: x, clientY: y, bubbles: true, cancelable: true };
    canvas.dispatchEvent(new PointerEvent('pointermove', { ...at, movementX: 3 }));
    canvas.closest('[data-drawn]').querySelector('[aria-label="show all"]').click();
    const [intervals, work] = [[], []];
    let last = null, n = 0;
    const turn = (time) => {
        const begun = performance.now();
        if (n > 21) intervals.push(time - last);
        last = time;
        if (n === frames) return resolve({ intervals, work });
        const part = (Math.floor(n++ / 20) + 3) % 4;
        if (n > 20) canvas.dispatchEvent(new WheelEvent('wheel', { ...at,
            deltaY: [-60, 0, 60, 0][part], deltaX: [0, 40, 0, -40][part] }));
        requestAnimationFrame(turn);
        const after = new MessageChannel();
        after.port1.onmessage = () => n > 21 && work.push(performance.now() - begun);
        after.port2.postMessage(null);
    };
    requestAnimationFrame(turn);
})"""


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """First pictures and frames of long traces in JupyterLab, and the sizes of static pictures."""
    why = lab.missing()
    seen = {} if why else _in_lab(reps, say)
    went = {} if why else live.measure(reps, say)
    opened: list[list[float]] = [seen.get(f"open_{n}", []) for n in SIZES]
    sizes = _static()
    limits = [{"must": 1000.0, "aim": 300.0}, {"must": 5000.0, "aim": 1000.0}]
    figures = [
        _figure(f"{n:,} events: Timeline(trace) to first picture", "ms", times, why, limit)
        for n, times, limit in zip(SIZES, opened, limits, strict=True)
    ]
    figures += [
        _figure(
            "pan and zoom at 100,000 events: a frame",
            "ms",
            seen.get("frames", []),
            why,
            {"must": 33.4, "aim": 16.8},
        ),  # two frames of a 60 Hz screen, and one
        _figure(
            "live view's lag behind a running 4-rank job, 95th percentile",
            "ms",
            went.get("lag_p95", []),
            why,
            {"must": 300, "aim": 100},
        ),
        _figure(
            "live view's cost to the job's samples/s",
            "%",
            went.get("cost", []),
            why,
            {"must": 5, "aim": 2},
        ),
        _figure(
            "static picture of a timeline, the largest",
            "kB",
            [max(sizes.values())],
            "",
            {"must": 150, "aim": 60},
        ),
    ]
    return figures, {**seen, "live": went, "static_kB": sizes}


def _figure(
    name: str, unit: str, samples: list[float], why: str, limits: dict[str, float]
) -> Figure:
    """The median of some samples against absolute limits; ``why`` there are none."""
    must, aim = limits["must"], limits["aim"]
    if samples:
        return figure(name, unit, samples, must=must, aim=aim, absolute=True)
    return Figure(name, unit, None, reference=why, must=must, aim=aim, absolute=True)


def long_trace(events: int) -> Trace:
    """A run of messages and all-reduces on eight ranks: three events per operation."""
    found, at = [], 0.0
    for seq in range(events // (3 * RANKS)):
        reduces = seq % 3 == 2
        for r in range(RANKS):
            op = Op.ALL_REDUCE if reduces else (Op.SEND if (r + seq) % 2 else Op.RECV)
            step = 1 if seq % 3 else -1
            peer = None if reduces else (r + (step if (r + seq) % 2 else -step)) % RANKS
            for k, state in enumerate((State.SCHEDULED, State.STARTED, State.COMPLETED)):
                now = at + 1e-6 * k + (0.01 * r + (0.4 + 0.1 * (op is Op.SEND)) * (k == 2)) * 1e-3
                found.append(
                    Event(
                        r,
                        seq,
                        op,
                        state,
                        now,
                        peer,
                        "world",
                        4096,
                        (1024,),
                        "float32",
                        where="train.py:31",
                    )
                )
        at += 0.6e-3
    return Trace(found, {"name": "a long run", "world_size": RANKS, "backend": "gloo"})


def _static() -> dict[str, float]:
    """Size of the static picture of traces of several lengths [kB]."""
    from distkit.views import Timeline

    return {
        str(n): len(Timeline(long_trace(n))._svg().encode()) / 1000 for n in (100, 1_000, SIZES[0])
    }


def _in_lab(reps: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Milliseconds until traces are drawn, and of frames while the picture moves."""
    say("views: writing traces")
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        root = Path(folder, "notebooks")
        root.mkdir()
        cells = []
        for n in SIZES:
            long_trace(n).save(root / f"{n}.trace")
            cells += [_OPEN.format(file=f"{n}.trace"), *["dk.Timeline(trace)"] * reps]
        (root / "views.ipynb").write_text(notebook(*cells))
        environ = {**os.environ, **lab.surroundings(Path(folder))}
        with lab.serve(root, Path(folder), environ) as server, lab.browse() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(server.address("views.ipynb"))
            page.wait_for_function(lab.IDLE, timeout=60_000)
            return _watch(page, reps, say)


def _watch(page: Any, reps: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for n in SIZES:
        started = time.perf_counter()
        lab.command(page, "notebook:run-cell-and-select-next")
        page.wait_for_function(lab.IDLE, timeout=120_000)
        found[f"load_{n}"] = [1e3 * (time.perf_counter() - started)]
        say(
            f"views: {n:,} events, {reps} times; loading the file took "
            f"{found[f'load_{n}'][0] / 1e3:.1f} s"
        )
        found[f"open_{n}"] = [float(page.evaluate(_DRAWN)) for _ in range(reps)]
        page.wait_for_function(lab.IDLE, timeout=120_000)
        if n == SIZES[0]:
            moved = page.evaluate(_MOVE, 240)
            found["frames"], found["work"] = moved["intervals"], moved["work"]
            work = moved["work"]
            say(
                f"views: a frame takes {median(moved['intervals']):.1f} ms, of which work "
                f"{median(work):.1f} ms, p95 {quantiles(work, n=20)[-1]:.1f}"
            )
    return found
