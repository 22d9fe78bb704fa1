"""How long it takes until four ranks have done their first all_reduce, and to import distkit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from benchmarks import starters
from benchmarks.driver import Driver
from benchmarks.figure import Figure, figure

#: Warm calls of run_ranks, and imports, for each repetition of the slow measurements.
WARM, IMPORTS = 12, 4


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """The start-up figures; ``reps`` fresh processes for each contender."""
    samples = _clusters(reps, say)
    say("start: warm run_ranks")
    samples.update(_warm(reps * WARM))
    say("start: imports")
    samples.update(_imports(reps * IMPORTS))
    heavy = _loaded_by_import()
    figures = [
        *_figures(samples),
        Figure(
            "torch and ipyparallel imported by `import distkit`",
            "modules",
            len(heavy),
            must=0,
            aim=0,
            absolute=True,
        ),
    ]
    return figures, {"samples": samples, "imported": heavy}


def _figures(s: dict[str, list[float]]) -> list[Figure]:
    accelerate = "accelerate's notebook_launcher"
    if not s["accelerate"]:
        accelerate = "reference missing: pip install accelerate"
    first = "Cluster(4) in a fresh process to its first all_reduce"
    return [
        figure(first, "s", s["first"], "stock ipyparallel.Cluster(n=4)", s["stock"], must=0.25),
        figure(first, "s", s["first"], 'python -c "import torch"', s["torch"], aim=1.3),
        figure(
            "a second Cluster(4) beside it to its first all_reduce",
            "s",
            s["second"],
            "the first",
            s["first"],
            must=1.2,
            aim=0.6,
            absolute=True,
        ),
        figure(
            "run_ranks(fn, 4), warm, to its first all_reduce",
            "s",
            s["run_ranks"],
            accelerate,
            s["accelerate"],
            must=5,
            aim=1.5,
        ),
        figure("import distkit", "s", s["distkit"], "import numpy", s["numpy"], must=3),
    ]


def _clusters(reps: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Fresh processes in turn: ours with a second cluster, plain torch, stock ipyparallel."""
    samples: dict[str, list[float]] = {"first": [], "second": [], "torch": [], "stock": []}
    for i in range(reps):
        say(f"start: fresh processes, {i + 1} of {reps}")
        with Driver(starters.CLUSTER) as ours:
            samples["first"].append(ours.ask())
            samples["second"].append(ours.ask())
        started = time.monotonic()
        _python("import torch")
        samples["torch"].append(time.monotonic() - started)
        with Driver(starters.STOCK) as stock:
            samples["stock"].append(stock.ask())
    return samples


def _warm(reps: int) -> dict[str, list[float]]:
    """Two warm processes, taking turns."""
    samples: dict[str, list[float]] = {"run_ranks": [], "accelerate": []}
    contenders = {"run_ranks": Driver(starters.RUN_RANKS)}
    if find_spec("accelerate") is not None:
        contenders["accelerate"] = Driver(starters.ACCELERATE)
    try:
        for rep in range(reps + 2):
            for name, driver in contenders.items():
                seconds = driver.ask()
                if rep >= 2:  # the first ones warm it up
                    samples[name].append(seconds)
    finally:
        for driver in contenders.values():
            driver.close()
    return samples


def _imports(reps: int) -> dict[str, list[float]]:
    """Import times in fresh interpreters, without the interpreter's own start."""
    samples: dict[str, list[float]] = {"distkit": [], "numpy": []}
    for _ in range(reps):
        for name, seconds in samples.items():
            seconds.append(
                float(
                    _python(
                        "from time import perf_counter\nstart = perf_counter()\n"
                        f"import {name}\nprint(perf_counter() - start)"
                    )
                )
            )
    return samples


def _loaded_by_import() -> list[str]:
    loaded = _python("import sys, distkit\nprint(*sys.modules)").split()
    return [name for name in ("torch", "ipyparallel") if name in loaded]


def _python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout
