"""Gradients of a watched training loop as plain data: before and after the all-reduce, drift, loss.

The agreement of all ranks, the mean cosine of their gradients, is exact: it follows from the norms
of the gradients and of their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distkit._format import count
from distkit.events import Summary
from distkit.trace.log import EventLog
from distkit.trace.training import ByRank, Step, Training, mean_loss, read, shares_of
from distkit.views.scene.frame import Json, clean, name
from distkit.views.scene.painter import thinned
from distkit.views.scene.summaries import (
    average,
    distance,
    headline,
    in_columns,
    key,
    largest,
    number,
    rounded,
)

#: Maximum numbers of drawn ranks, layers, and values over all steps.
MAX_RANKS, MAX_LAYERS, MAX_VALUES = 16, 32, 60_000

#: Tolerance for sums in a different order, relative to the largest value.
ROUNDING = 1e-4

#: All ranks have equally many examples.
EQUAL: Mapping[int, float] = {}


@dataclass(frozen=True)
class Reduced:
    """The result of reducing a layer's gradients in one step.

    ``kind`` is "sum", "mean", "own" (not averaged), "other", or "" while unknown.
    """

    kind: str
    same: bool

    def scale(self, ranks: int) -> int:
        """Return the divisor that gives the average."""
        return ranks if self.kind == "sum" else 1


def project(trace: EventLog, *, live: bool = False) -> Json:
    """Return the gradients of a trace."""
    training = read(trace)
    ranks, layers = trace.ranks[:MAX_RANKS], list(training.layers)[:MAX_LAYERS]
    looked = [n for n, step in sorted(training.steps.items()) if step.before or step.after]
    each = max(1, len(layers)) * (64 * (len(ranks) + 2) + len(ranks) ** 2 // 2)
    kept = thinned(looked, max(2, MAX_VALUES // each))
    head = headline(trace)
    if training.steps:
        head["facts"].append(count(len(training.steps), "step"))
    weights = next(iter(training.weights.get(0, {}).values()), None)
    if weights:
        head["facts"].append(count(weights[1].size, "weight"))
    rates = {r.lr for step in training.steps.values() for r in step.reports.values()}
    if len(rates) == 1 and math.isfinite(*rates):
        head["facts"].append(f"learning rate {number(rates.pop())}")
    return {
        **head,
        "live": live,
        "ranks": [{"rank": r, "lane": i, "name": name(trace.info, r)} for i, r in enumerate(ranks)],
        "layers": [
            {"name": clean(layer), "shape": list(training.layers[layer])} for layer in layers
        ],
        "steps": [_step(n, training.steps[n], layers, trace.ranks) for n in kept],
        "curves": curves(training, ranks),
        "verdicts": _verdicts(trace, training, looked),
        "notices": _notices(trace, training),
        "total": len(training.steps),
    }


def _notices(trace: EventLog, training: Training) -> list[str]:
    found = []
    if len(trace.ranks) > MAX_RANKS:
        found.append(
            f"the first {MAX_RANKS} of {len(trace.ranks):,} ranks are drawn; "
            "all of them are compared"
        )
    if len(training.layers) > MAX_LAYERS:
        found.append(f"the first {MAX_LAYERS} of {len(training.layers):,} layers are drawn")
    return found


# -- one step --------------------------------------------------------------------------


def _step(n: int, step: Step, layers: list[str], ranks: list[int]) -> Json:
    return {"n": n + 1, "layers": [_layer(step, layer, ranks) for layer in layers]}


def _layer(step: Step, layer: str, ranks: list[int]) -> Json:
    before, after = step.before.get(layer, {}), step.after.get(layer, {})
    alone = next(iter(step.alone.get(layer, {}).values()), None)
    shares = shares_of(step)
    found = reduced(before, after, len(ranks), shares)
    shown = [before.get(r) for r in ranks[:MAX_RANKS]]
    scaled = {r: _divided(s, found.scale(len(ranks))) for r, s in after.items()}
    one = found.same or not scaled
    afters = [scaled.get(r) for r in ([*scaled][:1] if one else ranks[:MAX_RANKS])]
    values = [v for s in (*shown, *afters, alone) if s for v in s.values]
    apart = [distance(s, alone) for s in afters if s and alone]
    agreed = agreement(before, after, found, shares, alone)
    return {
        "before": [in_columns(s) if s else None for s in shown],
        "after": [in_columns(s) if s else None for s in afters],
        "alone": in_columns(alone) if alone else None,
        "apart": rounded(max(apart, default=math.nan)),
        "kind": found.kind,
        "same": found.same,
        "most": rounded(largest(values)),
        "agreement": _short(agreed),
    }


def _divided(s: Summary, by: float) -> Summary:
    if by == 1:
        return s
    return replace(
        s, values=tuple(v / by for v in s.values), norm=s.norm / by, min=s.min / by, max=s.max / by
    )


def _weighted(share: float, s: Summary) -> Summary:
    """Return a weighted gradient; without examples it is NaN and counts as zero."""
    if share:
        return _divided(s, 1 / share)
    return Summary((0.0,) * len(s.values), 0.0, 0.0, 0.0, s.size)


def _short(x: float) -> float | None:
    return round(x, 3) if math.isfinite(x) else None


def reduced(
    before: ByRank, after: ByRank, ranks: int, shares: Mapping[int, float] = EQUAL
) -> Reduced:
    """Compare the optimizer's gradient with the gradients of the ranks."""
    if not after or len(before) < ranks or len(after) < ranks:
        return Reduced("", len({key(s) for s in after.values()}) == 1)
    same = len({key(s) for s in after.values()}) == 1
    if ranks == 1:
        return Reduced("own", True)
    if all(key(before[r]) == key(after[r]) for r in after) and not same:
        return Reduced("own", same)
    mean = average([_weighted(shares.get(r, 1.0), s) for r, s in before.items()])
    result = next(iter(after.values())).values
    for kind, scale in (("mean", 1), ("sum", ranks)):
        if same and _equal(mean, [v / scale for v in result]):
            return Reduced(kind, same)
    return Reduced("other", same)


def agreement(
    before: ByRank,
    after: ByRank,
    found: Reduced,
    shares: Mapping[int, float] = EQUAL,
    alone: Summary | None = None,
) -> float:
    """Return the mean cosine of all pairs of ranks, weighted by norms, from the norms alone.

    If gradients were not averaged, the norm of a single process's gradient is used, if known.
    """
    if not found.kind or len(before) < 2:
        return math.nan
    weighted = [_weighted(shares.get(r, 1.0), s) for r, s in before.items()]
    norms = [s.norm for s in weighted]
    if found.kind in ("sum", "mean"):
        total = next(iter(after.values())).norm * (1 if found.kind == "sum" else len(norms))
    elif alone and _equal(average(weighted), alone.values):
        total = alone.norm * len(norms)
    else:
        return math.nan
    squares = sum(x * x for x in norms)
    pairs = sum(norms) ** 2 - squares
    return max(-1.0, min(1.0, (total**2 - squares) / pairs)) if pairs > 0 else math.nan


def _equal(mean: Sequence[float], values: Sequence[float]) -> bool:
    """Return True if the values are equal up to rounding."""
    off = largest(m - v for m, v in zip(mean, values, strict=False))
    return len(mean) == len(values) and off <= ROUNDING * largest([*mean, *values])


# -- verdicts on the whole loop ------------------------------------------------------------


def _verdicts(trace: EventLog, training: Training, looked: Iterable[int]) -> list[Json]:
    """Return the verdicts: "same" or "different", and a sentence."""
    ranks = len(trace.ranks)
    cells = [(n, layer, training.steps[n]) for n in looked for layer in training.layers]
    found = [
        (n, layer, reduced(s.before.get(layer, {}), s.after.get(layer, {}), ranks, shares_of(s)))
        for n, layer, s in cells
    ]
    done = [(n, layer, r) for n, layer, r in found if r.kind]
    verdicts = [_after(done, ranks)] if done and ranks > 1 else []
    verdicts += _against_one(training, done, ranks)
    return verdicts + _drift(trace, training)


def _verdict(same: bool, text: str) -> Json:
    return {"word": "same" if same else "different", "expected": True, "text": text}


def _after(done: list[tuple[int, str, Reduced]], ranks: int) -> Json:
    kinds = {r.kind for _, _, r in done}
    if kinds == {"own"}:
        return _verdict(False, "every rank keeps its own gradient: nothing was averaged")
    wrong = [(n, layer) for n, layer, r in done if not r.same]
    if wrong:
        n, layer = wrong[0]
        return _verdict(False, f"the ranks' gradients still differ after step {n + 1}, {layer}")
    what = f": the {kinds.pop()} of all {ranks}" if len(kinds) == 1 and "other" not in kinds else ""
    return _verdict(True, f"after the all-reduce every rank has the same gradient{what}")


def _against_one(
    training: Training, done: list[tuple[int, str, Reduced]], ranks: int
) -> list[Json]:
    off = most = 0.0
    seen = False
    for n, layer, found in done:
        alone = next(iter(training.steps[n].alone.get(layer, {}).values()), None)
        if alone is None:
            continue
        seen, most = True, max(most, largest(alone.values))
        for s in training.steps[n].after[layer].values():
            off = max(off, distance(_divided(s, found.scale(ranks)), alone))
    if not seen:
        return []
    if off <= ROUNDING * most:
        return [
            _verdict(
                True,
                f"one process computes the same, to {off:.0e}"
                if off
                else "one process computes exactly the same",
            )
        ]
    return [_verdict(False, f"one process's gradient differs by up to {number(off)}")]


def _drift(trace: EventLog, training: Training) -> list[Json]:
    complete = {n: w for n, w in sorted(training.weights.items()) if len(w) > 1}
    if not complete:
        return []
    apart = [n for n, w in complete.items() if len({crc for crc, _ in w.values()}) > 1]
    if not apart:
        every = len(complete) > len(training.steps)  # and before the first
        when = "at every step" if every else f"in all {len(complete)} comparisons"
        part = any(s.sampled for w in complete.values() for _, s in w.values())
        which = (
            "the compared part of the replicas' weights is"
            if part
            else ("the replicas' weights are")
        )
        return [_verdict(True, f"{which} bitwise equal {when}")]
    weights = complete[max(complete)]
    first = min(weights)
    base = weights[first][1].values
    if any(len(s.values) != len(base) for _, s in weights.values()):
        return [_verdict(False, "the replicas' weights have different shapes")]
    far = {r: math.dist(s.values, base) for r, (_, s) in weights.items()}
    rank = max(far, key=lambda r: (far[r], -r))
    since = f"after step {apart[0]}" if apart[0] else "from the start"
    return [
        _verdict(
            False,
            f"the replicas' weights differ {since}: {name(trace.info, rank)} is {far[rank]:.2g} "
            f"from {name(trace.info, first)} after step {max(complete)}",
        )
    ]


#: Maximum number of points of a curve.
MAX_POINTS = 300

Points = list[tuple[int, float]]


def curves(training: Training, ranks: Sequence[int]) -> Json:
    """Return lines by name; x is a step from 1, y is None if unknown."""
    return {
        "loss": _loss(training, ranks),
        "drift": _drift_lines(training, ranks),
    }


def _line(rank: int | None, points: Points) -> Json:
    return {"rank": rank, "points": [[n, rounded(y)] for n, y in thinned(points, MAX_POINTS)]}


def _loss(training: Training, ranks: Sequence[int]) -> list[Json]:
    told = [(n + 1, step.reports) for n, step in sorted(training.steps.items()) if step.reports]
    lines = [_line(r, [(n, t[r].loss) for n, t in told if r in t]) for r in ranks]
    means = [(n + 1, mean_loss(s)) for n, s in sorted(training.steps.items()) if s.reports]
    return [*lines, _line(None, means)]


def _drift_lines(training: Training, ranks: Sequence[int]) -> list[Json]:
    """Return the distance of each replica's weights from the first's, 0 if bitwise equal."""
    lines: dict[int, Points] = {r: [] for r in ranks}
    for n, weights in sorted(training.weights.items()):
        crc, base = weights[min(weights)]
        for r in lines.keys() & weights.keys():
            mine, s = weights[r]
            if len(s.values) != len(base.values):
                continue  # undefined for different shapes
            lines[r].append((n, 0.0 if mine == crc else math.dist(s.values, base.values)))
    return [_line(r, points) for r, points in lines.items() if points]
