"""Whole training jobs: step times of vTrain's runs and of Megatron, and Megatron's memory.

Three constants of an A100 are fitted on 21 of vTrain's 109 runs, drawn at random within each model
size: the achievable fractions of peak FLOP/s, memory bandwidth, and the host's network bandwidth.
All other rows are scored, including Megatron's, whose hosts have twice as many NICs.

vtrain.csv is data/ground_truth_multi.csv of VIA-Research/vTrain: copyright (c) 2024, VIA Research
Group at KAIST, MIT license.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published import tables
from benchmarks.published.rows import Row
from distkit_parallel.layout import MEGATRON, Layout
from distkit_parallel.memory import GIB, Transformer
from distkit_simulation.job import A100, Job, Machine
from distkit_simulation.network import Link

#: Bandwidth of a host's NICs in vTrain's and Megatron's clusters [bytes/s].
NIC_BANDWIDTH = {"vTrain": 100e9, "Megatron": 200e9}
#: Relative error above which a run has less weight in the fit. Such runs may have been disturbed.
USUAL = 0.08


#: Megatron's configurations: FULL recomputes everything. SELECTIVE recomputes only attention, and
#: uses sequence parallelism.
FULL: dict[str, Any] = {"recompute": "full"}
SELECTIVE: dict[str, Any] = {"recompute": "selective", "sequence_parallel": True}


def rows() -> list[Row]:
    """Return every measured run of vTrain."""
    best = fit_shares()
    return [
        Row("vTrain", job.title, "s", seconds, replace(job, machine=machine(best)).seconds, fit)
        for job, seconds, fit in runs()
    ]


def megatron() -> list[Row]:
    """Return Megatron's steps, none of which are fitted."""
    gpus = machine(fit_shares(), "Megatron")
    return [
        Row(
            "Megatron",
            f"{name}, {options['recompute']}",
            "s",
            published,
            _megatron(name, gpus, options).seconds,
        )
        for name, (_, seconds, _) in tables.MEGATRON.items()
        for options, published in zip((FULL, SELECTIVE), seconds, strict=True)
    ]


def memory() -> list[Row]:
    """Return Megatron's memory on the first rank, without embeddings."""
    predictions = []
    for name, (_, _, published) in tables.MEGATRON.items():
        everything, selective = (
            _megatron(name, A100, options).stage_memory(0)
            for options in ({"recompute": "none"}, SELECTIVE)
        )
        states = everything["parameters"] + everything["gradients"] + everything["optimizer"]
        predicted = {
            "states": states,
            "none": everything["activations"],
            "selective": selective["activations"],
        }
        predictions += [
            Row("Megatron's memory", f"{name}, {kind}", "GiB", gib, nbytes / GIB)
            for (kind, nbytes), gib in zip(predicted.items(), published, strict=True)
        ]
    return predictions


def _megatron(name: str, gpus: Machine, options: dict[str, Any]) -> Job:
    (layers, hidden, heads, tp, pp, chunks, batch, size), *_ = tables.MEGATRON[name]
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return Job(
        Transformer.gpt(layers, hidden, heads),
        Layout(tp=tp, pp=pp, axes=MEGATRON),
        gpus,
        batch,
        2048,
        size,
        schedule,
        chunks,
        **options,
    )


def machine(shares: Sequence[float], cluster: str = "vTrain") -> Machine:
    """Return an A100 that reaches these shares of FLOP/s, memory and network bandwidth."""
    matmul, stream, between = shares
    link = Link.of(A100.between.alpha, between * NIC_BANDWIDTH[cluster])
    return replace(A100, matmul=matmul, stream=stream, between=link)


@cache
def runs() -> list[tuple[Job, float, bool]]:
    """Return vTrain's runs, each with its duration [s] and whether it is fitted."""
    with (Path(__file__).parent / "vtrain.csv").open() as file:
        table = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    return [(_run(row), row["milliseconds"] / 1e3, bool(row["fitted"])) for row in table]


def _run(row: dict[str, float]) -> Job:
    n = {name: int(value) for name, value in row.items()}
    layout = Layout(dp=n["data"], tp=n["tensor"], pp=n["pipeline"], axes=MEGATRON)
    model = Transformer.gpt(n["layers"], n["hidden"], n["heads"])
    return Job(model, layout, A100, n["batch"], n["sequence"], n["micro_batch"])


@cache
def fit_shares() -> list[float]:
    """Return the shares that best predict the fitted runs, found by coordinate search."""
    known = [(job, seconds) for job, seconds, fit in runs() if fit]

    def loss(shares: Sequence[float]) -> float:
        guess = machine(shares)
        errors = (math.log(replace(job, machine=guess).seconds / s) for job, s in known)
        return sum(math.sqrt(1 + (error / USUAL) ** 2) for error in errors)

    best, step = [0.8, 0.8, 0.8], 0.1
    while step > 1e-3:
        moves = [
            [*best[:i], best[i] * f, *best[i + 1 :]] for i in range(3) for f in (1 - step, 1 + step)
        ]
        better = min([best, *moves], key=loss)
        step = step if better != best else step / 2
        best = better
    return best
