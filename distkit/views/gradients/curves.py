"""The curves of a training loop: loss, learning rate, speed, drift, and each layer's norm. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from distkit.trace.training import Training, mean_loss
from distkit.views.scene.frame import Json
from distkit.views.scene.summaries import rounded

#: At most so many points of a curve, of a layer's curves, and of the speed.
MAX_POINTS, MAX_LAYER_POINTS, WINDOWS = 300, 100, 40

Points = list[tuple[int, float]]


def curves(training: Training, layers: Sequence[str], ranks: Sequence[int]) -> Json:
    """Lines by name; the x of each point is a step from 1, the y None where nothing is known."""
    return {
        "loss": _loss(training, ranks),
        "lr": [
            _line(
                None,
                [
                    (n + 1, next(iter(step.told.values())).lr)
                    for n, step in sorted(training.steps.items())
                    if step.told
                ],
            )
        ],
        "rate": [_line(None, _rate(training))],
        "drift": _drift(training, ranks),
        "norms": [_norms(training, layer, ranks) for layer in layers],
    }


def _line(rank: int | None, points: Iterable[tuple[int, float]], most: int = MAX_POINTS) -> Json:
    return {"rank": rank, "points": [[n, rounded(y)] for n, y in thin(list(points), most)]}


def thin(points: Points, most: int) -> Points:
    """At most about so many of them, evenly chosen, the last one among them.

    >>> thin([(i, 0.0) for i in range(5)], 2)
    [(0, 0.0), (3, 0.0), (4, 0.0)]
    """
    stride = max(1, -(-len(points) // most))
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _loss(training: Training, ranks: Sequence[int]) -> list[Json]:
    told = [(n + 1, step.told) for n, step in sorted(training.steps.items()) if step.told]
    lines = [_line(r, [(n, t[r].loss) for n, t in told if r in t]) for r in ranks]
    means = [(n + 1, mean_loss(s)) for n, s in sorted(training.steps.items()) if s.told]
    return [*lines, _line(None, means)]


def _rate(training: Training) -> Points:
    """Samples of all ranks per second, over windows of some steps."""
    told = [(n + 1, step.told) for n, step in sorted(training.steps.items()) if step.told]
    width = max(1, -(-(len(told) - 1) // WINDOWS))
    points = []
    for start in range(0, len(told) - 1, width):
        window = told[start : start + width + 1]
        both = window[0][1].keys() & window[-1][1].keys()
        seconds = sum(window[-1][1][r].time - window[0][1][r].time for r in both)
        samples = sum(t.samples for _, by in window[1:] for t in by.values())
        if seconds > 0:
            points.append((window[-1][0], samples * len(both) / seconds))
    return points


def _drift(training: Training, ranks: Sequence[int]) -> list[Json]:
    """How far each replica's weights are from those of the first, 0 where bitwise equal."""
    lines: dict[int, Points] = {r: [] for r in ranks}
    for n, weights in sorted(training.weights.items()):
        crc, base = weights[min(weights)]
        for r in lines.keys() & weights.keys():
            mine, s = weights[r]
            if len(s.values) != len(base.values):
                continue  # replicas of another shape have no distance
            lines[r].append((n, 0.0 if mine == crc else math.dist(s.values, base.values)))
    return [_line(r, points) for r, points in lines.items() if points]


def _norms(training: Training, layer: str, ranks: Sequence[int]) -> list[Json]:
    looked = [(n + 1, step.before.get(layer, {})) for n, step in sorted(training.steps.items())]
    return [
        _line(r, [(n, by[r].norm) for n, by in looked if r in by], MAX_LAYER_POINTS) for r in ranks
    ]
