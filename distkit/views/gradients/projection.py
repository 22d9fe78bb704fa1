"""Projects a watched training loop to plain data: gradients, drift and loss.

The agreement is the mean cosine of the ranks' gradients. It is exact, because it follows from the
norms of the gradients and of their sum.
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

#: Tolerance for sums in another order, relative to the largest value.
ROUNDING = 1e-4

#: Shares of the examples if all ranks have the same number of them.
EQUAL: Mapping[int, float] = {}


@dataclass(frozen=True)
class Reduced:
    """The result of reducing a layer's gradients in one step.

    ``kind`` is "sum", "mean", "own" (not averaged), "other", or "" if unknown.
    """

    kind: str
    same: bool

    def scale(self, ranks: int) -> int:
        """Return the divisor that gives the average."""
        return ranks if self.kind == "sum" else 1


def project(trace: EventLog, *, live: bool = False) -> Json:
    """Return the gradients, curves and verdicts of a trace."""
    training = read(trace)
    ranks, layers = trace.ranks[:MAX_RANKS], list(training.layers)[:MAX_LAYERS]
    recorded = [n for n, step in sorted(training.steps.items()) if step.before or step.after]
    step_values = max(1, len(layers)) * (64 * (len(ranks) + 2) + len(ranks) ** 2 // 2)
    shown = thinned(recorded, max(2, MAX_VALUES // step_values))
    header = headline(trace)
    if training.steps:
        header["facts"].append(count(len(training.steps), "step"))
    weights = next(iter(training.weights.get(0, {}).values()), None)
    if weights:
        header["facts"].append(count(weights[1].size, "weight"))
    rates = {report.lr for step in training.steps.values() for report in step.reports.values()}
    if len(rates) == 1 and math.isfinite(*rates):
        header["facts"].append(f"learning rate {number(rates.pop())}")
    return {
        **header,
        "live": live,
        "ranks": [{"rank": r, "lane": i, "name": name(trace.info, r)} for i, r in enumerate(ranks)],
        "layers": [
            {"name": clean(layer), "shape": list(training.layers[layer])} for layer in layers
        ],
        "steps": [_step(n, training.steps[n], layers, trace.ranks) for n in shown],
        "curves": curves(training, ranks),
        "verdicts": _verdicts(trace, training, recorded),
        "notices": _notices(trace, training),
        "total": len(training.steps),
    }


def _notices(trace: EventLog, training: Training) -> list[str]:
    notices = []
    if len(trace.ranks) > MAX_RANKS:
        notices.append(
            f"the first {MAX_RANKS} of {len(trace.ranks):,} ranks are drawn; all ranks are compared"
        )
    if len(training.layers) > MAX_LAYERS:
        notices.append(f"the first {MAX_LAYERS} of {len(training.layers):,} layers are drawn")
    return notices


# -- one step --------------------------------------------------------------------------


def _step(n: int, step: Step, layers: list[str], ranks: list[int]) -> Json:
    return {"n": n + 1, "layers": [_layer(step, layer, ranks) for layer in layers]}


def _layer(step: Step, layer: str, ranks: list[int]) -> Json:
    before, after = step.before.get(layer, {}), step.after.get(layer, {})
    alone = next(iter(step.alone.get(layer, {}).values()), None)
    shares = shares_of(step)
    reduction = reduced(before, after, len(ranks), shares)
    shown = [before.get(r) for r in ranks[:MAX_RANKS]]
    scaled = {r: _divided(s, reduction.scale(len(ranks))) for r, s in after.items()}
    identical = reduction.same or not scaled
    afters = [scaled.get(r) for r in ([*scaled][:1] if identical else ranks[:MAX_RANKS])]
    values = [v for s in (*shown, *afters, alone) if s for v in s.values]
    distances = [distance(s, alone) for s in afters if s and alone]
    cosine = agreement(before, after, reduction, shares, alone)
    return {
        "before": [in_columns(s) if s else None for s in shown],
        "after": [in_columns(s) if s else None for s in afters],
        "alone": in_columns(alone) if alone else None,
        "apart": rounded(max(distances, default=math.nan)),
        "kind": reduction.kind,
        "same": reduction.same,
        "most": rounded(largest(values)),
        "agreement": _short(cosine),
    }


def _divided(s: Summary, by: float) -> Summary:
    if by == 1:
        return s
    return replace(
        s, values=tuple(v / by for v in s.values), norm=s.norm / by, min=s.min / by, max=s.max / by
    )


def _weighted(share: float, s: Summary) -> Summary:
    """Return a weighted gradient. The gradient of a rank without examples counts as zero."""
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
    reduction: Reduced,
    shares: Mapping[int, float] = EQUAL,
    alone: Summary | None = None,
) -> float:
    """Return the mean cosine of all pairs of ranks, weighted by norms.

    Without an average, it uses the norm of the single-process gradient, if known.
    """
    if not reduction.kind or len(before) < 2:
        return math.nan
    weighted = [_weighted(shares.get(r, 1.0), s) for r, s in before.items()]
    norms = [s.norm for s in weighted]
    if reduction.kind in ("sum", "mean"):
        total = next(iter(after.values())).norm * (1 if reduction.kind == "sum" else len(norms))
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


def _verdicts(trace: EventLog, training: Training, recorded: Iterable[int]) -> list[Json]:
    """Return the verdicts, each with "same" or "different" and a sentence."""
    ranks = len(trace.ranks)
    cells = [(n, layer, training.steps[n]) for n in recorded for layer in training.layers]
    reductions = [
        (n, layer, reduced(s.before.get(layer, {}), s.after.get(layer, {}), ranks, shares_of(s)))
        for n, layer, s in cells
    ]
    known = [(n, layer, r) for n, layer, r in reductions if r.kind]
    verdicts = [_after(known, ranks)] if known and ranks > 1 else []
    verdicts += _against_one(training, known, ranks)
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
    result = (
        f": the {kinds.pop()} of all {ranks}" if len(kinds) == 1 and "other" not in kinds else ""
    )
    return _verdict(True, f"after the all-reduce every rank has the same gradient{result}")


def _against_one(
    training: Training, done: list[tuple[int, str, Reduced]], ranks: int
) -> list[Json]:
    off = most = 0.0
    any_known = False
    for n, layer, reduction in done:
        alone = next(iter(training.steps[n].alone.get(layer, {}).values()), None)
        if alone is None:
            continue
        any_known, most = True, max(most, largest(alone.values))
        for s in training.steps[n].after[layer].values():
            off = max(off, distance(_divided(s, reduction.scale(ranks)), alone))
    if not any_known:
        return []
    if off <= ROUNDING * most:
        return [
            _verdict(
                True,
                f"one process computes the same, to within {off:.0e}"
                if off
                else "one process computes exactly the same",
            )
        ]
    return [_verdict(False, f"one process's gradient differs by up to {number(off)}")]


def _drift(trace: EventLog, training: Training) -> list[Json]:
    complete = {n: w for n, w in sorted(training.weights.items()) if len(w) > 1}
    if not complete:
        return []
    differing = [n for n, w in complete.items() if len({crc for crc, _ in w.values()}) > 1]
    if not differing:
        all_steps = len(complete) > len(training.steps)  # one more before the first step
        when = "at every step" if all_steps else f"in all {len(complete)} comparisons"
        sampled = any(s.sampled for w in complete.values() for _, s in w.values())
        subject = (
            "the compared part of the replicas' weights is"
            if sampled
            else ("the replicas' weights are")
        )
        return [_verdict(True, f"{subject} bitwise equal {when}")]
    weights = complete[max(complete)]
    first = min(weights)
    base = weights[first][1].values
    if any(len(s.values) != len(base) for _, s in weights.values()):
        return [_verdict(False, "the replicas' weights have different shapes")]
    distances = {r: math.dist(s.values, base) for r, (_, s) in weights.items()}
    rank = max(distances, key=lambda r: (distances[r], -r))
    since = f"after step {differing[0]}" if differing[0] else "from the start"
    return [
        _verdict(
            False,
            f"the replicas' weights differ {since}: {name(trace.info, rank)} is "
            f"{distances[rank]:.2g} from {name(trace.info, first)} after step {max(complete)}",
        )
    ]


#: Maximum number of points of a curve.
MAX_POINTS = 300

Points = list[tuple[int, float]]


def curves(training: Training, ranks: Sequence[int]) -> Json:
    """Return lines by name; x is the step, counted from 1, and y is None if unknown."""
    return {
        "loss": _loss(training, ranks),
        "drift": _drift_lines(training, ranks),
    }


def _line(rank: int | None, points: Points) -> Json:
    return {"rank": rank, "points": [[n, rounded(y)] for n, y in thinned(points, MAX_POINTS)]}


def _loss(training: Training, ranks: Sequence[int]) -> list[Json]:
    reports = [(n + 1, step.reports) for n, step in sorted(training.steps.items()) if step.reports]
    lines = [_line(r, [(n, report[r].loss) for n, report in reports if r in report]) for r in ranks]
    means = [(n + 1, mean_loss(s)) for n, s in sorted(training.steps.items()) if s.reports]
    return [*lines, _line(None, means)]


def _drift_lines(training: Training, ranks: Sequence[int]) -> list[Json]:
    """Return the distance of each replica's weights from the first, 0 if bitwise equal."""
    lines: dict[int, Points] = {r: [] for r in ranks}
    for n, weights in sorted(training.weights.items()):
        crc, base = weights[min(weights)]
        for r in lines.keys() & weights.keys():
            checksum, s = weights[r]
            if len(s.values) != len(base.values):
                continue  # undefined for different shapes
            lines[r].append((n, 0.0 if checksum == crc else math.dist(s.values, base.values)))
    return [_line(r, points) for r, points in lines.items() if points]
