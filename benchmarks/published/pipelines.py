"""Throughput of pipelines: simulated schedules compared with the Zero Bubble paper.

There are two sets of rows. In "own constant", the speed of each schedule is fitted on its row of 24
micro-batches. For ZB-1P, the fraction of time for the weights' gradients, which fill the bubble, is
also fitted. In "1F1B's constant", interleaving is predicted from 1F1B: with v stages per rank, it
sends v times as many messages, in the thread that computes. The cost of a message is fitted on one
row of the smaller model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from benchmarks.published import tables
from benchmarks.published.rows import Row
from distkit_parallel.schedules import PIPELINES
from distkit_simulation.network import Link, Network
from distkit_simulation.training import pipeline

RANKS, MICROBATCHES = 8, tables.ZERO_BUBBLE_MICROBATCHES


def rows() -> list[Row]:
    """Return every row of the table."""
    return [*_own_constant(), *_from_1f1b()]


@cache
def seconds(
    order: str, microbatches: int, chunks: int = 1, weights: float = 1 / 3, message: float = 0.0
) -> float:
    """Return the time of a step, in units of a rank's time for a micro-batch, like ``message``.

    >>> seconds("1f1b", 1)
    8.0
    """
    trace = pipeline(
        RANKS,
        microbatches,
        (1 - weights) / 2,
        (1 + weights) / 2,
        0,
        Network(Link(message, 0)),
        order=order,
        chunks=chunks,
        weights=weights,
        overlap=False,
    )
    return round(trace.seconds, 9)


def chunks(model: str) -> int:
    """Return the number of stages per rank; the first and the last stage have one layer fewer.

    >>> chunks("1.5B"), chunks("6.2B")
    (3, 4)
    """
    return (tables.ZERO_BUBBLE_MODELS[model][0] + 2) // RANKS


def share_of_weights(model: str) -> float:
    """Return the share of the weights' gradients at which 1F1B and ZB-1P compute equally fast.

    The bubble of ZB-1P is (p-1)(F + I - W), and that of 1F1B is (p-1)(F + I + W).
    """
    m, rates = MICROBATCHES[0], tables.ZERO_BUBBLE[model]
    speed = rates["1F1B"][0] * (1 + PIPELINES["1f1b"].bubble_ratio(RANKS, m))
    bubble = (speed / rates["ZB-1P"][0] - 1) * m / (RANKS - 1)
    return (1 - bubble) / 2


def _own_constant() -> list[Row]:
    predictions = []
    for model, rates in tables.ZERO_BUBBLE.items():
        weights, v = share_of_weights(model), chunks(model)
        steps = {
            "ZB-2P": list(map(float, MICROBATCHES)),  # no bubble, but twice the activations
            "ZB-1P": [seconds("zero_bubble", m, weights=weights) for m in MICROBATCHES],
            "1F1B": [seconds("1f1b", m) for m in MICROBATCHES],
            "1F1B-I": [seconds("interleaved", m, v) for m in MICROBATCHES],
        }
        for name, step in steps.items():
            speed = rates[name][0] * step[0] / MICROBATCHES[0]
            predictions += _rows("own constant", model, rates, name, speed, step, fitted=1)
    return predictions


def _from_1f1b() -> list[Row]:
    """Scale the time of a message by its size and by the compute time of a micro-batch."""
    small, large = tables.ZERO_BUBBLE
    ratio = _activations(large) / _activations(small) * _work(small) / _work(large)
    message = _message(small)
    return [
        *_interleaving(small, message, fitted=1),
        *_interleaving(large, message * ratio, fitted=0),
    ]


def _interleaving(model: str, message: float, fitted: int) -> list[Row]:
    rates, step = tables.ZERO_BUBBLE[model], seconds("1f1b", MICROBATCHES[0], message=message)
    speed = rates["1F1B"][0] * step / MICROBATCHES[0]
    steps = [seconds("interleaved", m, chunks(model), message=message) for m in MICROBATCHES]
    return _rows("1F1B's constant", model, rates, "1F1B-I", speed, steps, fitted)


def _activations(model: str) -> float:
    """Return the bytes of a message, up to a constant factor."""
    _, hidden, samples = tables.ZERO_BUBBLE_MODELS[model]
    return float(hidden * samples)


def _work(model: str) -> float:
    """Return the time of a micro-batch, up to a constant factor."""
    return tables.ZERO_BUBBLE_MODELS[model][2] / tables.ZERO_BUBBLE[model]["1F1B"][0]


def _message(model: str) -> float:
    """Return the time of a message that matches the first row of 1F1B-I (secant method)."""
    rates, m = tables.ZERO_BUBBLE[model], MICROBATCHES[0]

    def error(message: float) -> float:
        ratio = seconds("1f1b", m, message=message) / seconds(
            "interleaved", m, chunks(model), message=message
        )
        return ratio - rates["1F1B-I"][0] / rates["1F1B"][0]

    x, y = 0.0, 0.02
    while abs(error(y)) > 1e-9:
        x, y = y, y - error(y) * (y - x) / (error(y) - error(x))
    return y


def _rows(
    table: str,
    model: str,
    rates: Mapping[str, Sequence[float]],
    name: str,
    speed: float,
    steps: Sequence[float],
    fitted: int,
) -> list[Row]:
    """Return the rows of a schedule; ``speed`` is the speed of computation alone [samples/s]."""
    return [
        Row(
            f"Zero Bubble, {table}",
            f"{model}, {name}, {m} micro-batches",
            "samples/s",
            rate,
            speed * m / step,
            i < fitted,
            speed,
        )
        for i, (m, rate, step) in enumerate(zip(MICROBATCHES, rates[name], steps, strict=True))
    ]
