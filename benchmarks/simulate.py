"""The simulator's speed, and how well a calibrated model predicts what all-reduces take here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figure import Figure, figure

RANKS, MANY = 4096, 1_000_000

#: Groups of ranks and tensors [bytes] that are predicted and measured.
GROUPS = (2, 3, 4, 8)
TENSORS = (1 << 10, 1 << 16, 1 << 20, 1 << 23)


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Time the simulator and the closed forms, then predict and measure in turns."""
    say(f"simulate: a ring of {RANKS} ranks")
    rings = [_seconds(_ring) for _ in range(reps)]
    say(f"simulate: all closed forms for 1 to {MANY:,} ranks")
    forms = [_seconds(_forms) for _ in range(reps)]
    rows = []
    for n in GROUPS:
        say(f"simulate: predicting and measuring {n} ranks")
        rows += predicted(n, TENSORS, reps)
    errors = [100 * abs(row["predicted"] / row["measured"] - 1) for row in rows]
    limits: dict[str, Any] = {"absolute": True}
    messages = 2 * RANKS * (RANKS - 1) / median(rings) / 1e6
    return [
        figure(
            f"simulated ring all-reduce of {RANKS} ranks with jitter of every message",
            "s",
            rings,
            f"{messages:.3g} million messages/s",
            must=10,
            aim=3.5,
            **limits,
        ),
        figure(
            f"closed forms of all algorithms for each of 1 to {MANY:,} ranks",
            "s",
            forms,
            must=1,
            aim=0.1,
            **limits,
        ),
        figure(
            f"error of calibrated predictions, {len(rows)} algorithms x sizes x ranks",
            "%",
            errors,
            must=25,
            aim=10,
            **limits,
        ),
    ], {"ring_s": rings, "forms_s": forms, "predictions": rows}


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _ring() -> None:
    from distkit_simulation import Link, Network, Stragglers, exponential, finish_times

    jitter = Stragglers(jitter=exponential(1e-6))
    finish_times("ring", RANKS, 4 * RANKS, Network(Link(1e-6, 1e-9, 1e-10)), stragglers=jitter)


def _forms() -> None:
    from distkit_simulation import Link, cost

    cost.table(np.arange(1, MANY + 1), 1e8, Link(1e-6, 1e-9, 1e-10))


def predicted(n: int, tensors: Sequence[int], reps: int) -> list[dict[str, Any]]:
    """Every algorithm on ``n`` ranks: what the calibrated model says, and what it takes [s].

    Calibration and measurement take turns on the same ranks, so that both see the same machine.
    """
    from distkit.cluster.runs.run_ranks import run_ranks
    from distkit_simulation import cost, finish_times
    from distkit_simulation.calibration import SIZES, Measured
    from distkit_simulation.fitting import quiet

    names = list(cost.ALL_REDUCES)
    results = run_ranks(take_turns, n, names, tensors, SIZES, reps, record=False).results
    machine = Measured.of([samples for samples, _ in results])
    rows = []
    for name in names:
        for nbytes in tensors:
            batches = np.mean([taken[name][nbytes] for _, taken in results], axis=0)
            took = float(finish_times(name, n, nbytes, machine).max())
            rows.append(
                {
                    "algorithm": name,
                    "ranks": n,
                    "bytes": nbytes,
                    "predicted": took,
                    "measured": float(quiet(batches)),
                }
            )
    return rows


def take_turns(
    names: Sequence[str], tensors: Sequence[int], sizes: Sequence[int], reps: int
) -> tuple[Any, Any]:
    """What each rank does: a batch of the calibration, a batch of every algorithm, and again."""
    import torch

    from distkit.algorithms.catalogue import ALL_REDUCES
    from distkit_simulation.calibration import probe, times

    samples: dict[str, dict[int, list[float]]] = {}
    taken: dict[str, dict[int, list[float]]] = {}
    for _ in range(reps):
        for pattern, by_size in probe(sizes, 1).items():
            for nbytes, batch in by_size.items():
                samples.setdefault(pattern, {}).setdefault(nbytes, []).extend(batch)
        for name in names:
            for nbytes in tensors:
                x, page = torch.ones(nbytes // 4), ALL_REDUCES[name].page
                seconds = times(partial(page, x), nbytes)
                taken.setdefault(name, {}).setdefault(nbytes, []).append(seconds)
    return samples, taken
