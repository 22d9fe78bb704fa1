"""Speed of the simulator, and errors of calibrated predictions on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.driver import Log, interleave
from benchmarks.figure import Figure, fill

RANKS, MANY, GPUS = 4096, 1_000_000, 9_600

#: Numbers of ranks for which times are predicted and measured.
GROUPS = (2, 3, 4, 8)
#: Sizes of tensors for which times are predicted and measured [bytes].
TENSORS = (1 << 10, 1 << 16, 1 << 20, 1 << 23)

#: Numbers of ranks and batch sizes for which the training speedup is predicted.
SPEEDUP: dict[str, Any] = {"ranks": [1, 2, 4], "batch": [32, 256, 1024]}

FIGURES = {
    "ring": Figure(
        f"simulated ring all-reduce of {RANKS} ranks with jitter on every message",
        "s",
        limit=10,
        target=3.5,
        absolute=True,
    ),
    "forms": Figure(
        f"closed-form costs of all algorithms for each number of ranks up to {MANY:,}",
        "s",
        limit=1,
        target=0.1,
        absolute=True,
    ),
    "layouts": Figure(
        f"search over 256 layouts for {GPUS:,} GPUs", "s", limit=10, target=2, absolute=True
    ),
    "error": Figure(
        "error of calibrated predictions over algorithms, sizes and ranks",
        "%",
        limit=25,
        target=10,
        absolute=True,
    ),
    "speedup": Figure(
        "error of the predicted training speedup", "%", limit=20, target=10, absolute=True
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Time the simulator and the closed forms, then compare predictions with measurements."""
    import distkit as dk

    samples = interleave("simulate", reps, log, _measure_speed)
    rows = []
    for n in GROUPS:
        log(f"simulate: predicting and measuring {n} ranks")
        rows += predict_and_measure(n, TENSORS, reps)
    log("simulate: predicting and measuring the training speedup")
    speedups = dk.simulation.speedups(dk.sweep(parts, **SPEEDUP))
    samples["error"] = _errors(rows)
    samples["speedup"] = _errors([row for row in speedups if row["ranks"] > 1])
    return fill(FIGURES, samples), {**samples, "predictions": rows}


def _errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [100 * abs(row["predicted"] / row["measured"] - 1) for row in rows]


def _measure_speed() -> dict[str, float]:
    from distkit_parallel import Transformer
    from distkit_simulation import (
        A100,
        Link,
        Network,
        Stragglers,
        cost,
        exponential,
        finish_times,
        search_layouts,
    )

    gpt = Transformer.gpt(120, 12288, 96)
    link, jitter = Link(1e-6, 1e-9, 1e-10), Stragglers(jitter=exponential(1e-6))
    ranks = np.arange(1, MANY + 1)
    return {
        "ring": _seconds(
            lambda: finish_times("ring", RANKS, 4 * RANKS, Network(link), stragglers=jitter)
        ),
        "forms": _seconds(lambda: cost.table(ranks, 1e8, link)),
        "layouts": _seconds(
            lambda: search_layouts(gpt, A100, GPUS, batch=8 * GPUS, sequence=2048, zero=1)
        ),
    }


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def predict_and_measure(n: int, tensors: Sequence[int], reps: int) -> list[dict[str, Any]]:
    """Predict and measure every algorithm on ``n`` ranks [s].

    Calibration and measurement alternate on the same ranks, under the same load.
    """
    import distkit as dk
    from distkit_simulation import finish_times
    from distkit_simulation.calibration import SIZES, MeasuredNetwork, lower_quartile

    names = list(dk.algorithms.ALL_REDUCES)
    results = dk.run_ranks(interleave_on_rank, n, names, tensors, SIZES, reps, record=False).results
    network = MeasuredNetwork.of(SIZES, [*zip(*(batches for batches, _ in results), strict=True)])
    return [
        {
            "algorithm": name,
            "ranks": n,
            "bytes": nbytes,
            "predicted": float(finish_times(name, n, nbytes, network).max()),
            "measured": float(
                lower_quartile(np.mean([measured[name][nbytes] for _, measured in results], 0))
            ),
        }
        for name in names
        for nbytes in tensors
    ]


def interleave_on_rank(
    names: Sequence[str], tensors: Sequence[int], sizes: Sequence[int], reps: int
) -> tuple[Any, Any]:
    """On this rank, alternate a calibration batch with a batch of calls of every algorithm."""
    import torch

    from distkit.algorithms.all_reduce import ALL_REDUCES
    from distkit_simulation.calibration import probe, times

    batches = []
    measured: dict[str, dict[int, list[float]]] = {}
    for _ in range(reps):
        batches.append(probe(sizes))
        for name in names:
            for nbytes in tensors:
                call = partial(ALL_REDUCES[name].reference, torch.ones(nbytes // 4))
                measured.setdefault(name, {}).setdefault(nbytes, []).append(times(call, nbytes))
    return batches, measured


def parts(batch: int) -> dict[str, float]:
    """Return this rank's time for each part of a training step [s]."""
    import torch
    import torch.nn.functional as F

    import distkit as dk

    images, labels = dk.data.digits()
    rows = torch.arange(batch) % len(images)
    examples = images[rows], labels[rows]
    return dk.simulation.measure_step(dk.demos.model(), examples, F.cross_entropy, blocks=15)
