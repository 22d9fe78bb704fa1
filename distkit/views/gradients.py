"""Draws a watched training loop: a table of gradients for each step, and curves of drift and loss.

The agreement is the mean cosine similarity over all pairs of ranks' gradients, weighted by the
product of their norms. It follows from the norms of the gradients and of their sum, so it does not
depend on how many values were recorded. If a layer has more than 65,536 elements, these norms are
estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distkit._format import count
from distkit.events import Summary
from distkit.trace.log import EventLog
from distkit.trace.training import ByRank, Step, Training, mean_loss, read, shares_of
from distkit.views.scene.frame import Json, clean, dotted, facts, name, omissions
from distkit.views.scene.marks import Scene, line, path, picture, rect, text, title
from distkit.views.scene.renderer import cut, thinned
from distkit.views.scene.values import (
    COLUMN_GAP,
    Cell,
    Head,
    Table,
    average,
    distance,
    figure,
    key,
    largest,
    norm,
    number,
    plain,
)

#: Tolerance for sums that were computed in a different order, relative to the largest value.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Layer:
    """The gradients of a layer in one step: each rank's, the average, and a single process's.

    ``after`` has only one entry if all ranks have the same result. ``kind`` is how the gradients
    were reduced: "sum", "mean", "own" (not averaged), "other", or "" if unknown. ``agreement`` is
    NaN if unknown.
    """

    before: ByRank
    after: list[Summary | None]
    reference: Summary | None
    kind: str
    agreement: float

    @property
    def same(self) -> bool:
        """Whether all ranks have the same result."""
        return len(self.after) == 1

    @property
    def largest_difference(self) -> float:
        """The largest difference of a value from the single-process gradient; NaN if unknown."""
        return max(
            (distance(s, self.reference) for s in self.after if s and self.reference),
            default=math.nan,
        )

    @property
    def equals_reference(self) -> bool:
        """Whether the result equals the single-process gradient, up to rounding."""
        magnitude = largest(self.reference.values) if self.reference else 0.0
        return self.largest_difference <= ROUNDING * magnitude

    @property
    def max_magnitude(self) -> float:
        """The largest magnitude of all values."""
        summaries = [*self.before.values(), *self.after, self.reference]
        return largest(v for s in summaries if s for v in s.values)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a training loop: the layers of each step with values, and verdicts."""

    training: Training
    steps: dict[int, dict[str, Layer]]
    verdicts: list[Json]


def project(trace: EventLog) -> Gradients:
    """Return the gradients and verdicts of a trace."""
    training = read(trace)
    steps = {
        n: {name: _layer(step, name, trace.ranks) for name in training.layers}
        for n, step in sorted(training.steps.items())
        if step.before or step.after
    }
    return Gradients(training, steps, _verdicts(trace, training, steps))


def _layer(step: Step, name: str, ranks: list[int]) -> Layer:
    before, after = step.before.get(name, {}), step.after.get(name, {})
    reference = next(iter(step.reference.get(name, {}).values()), None)
    shares = shares_of(step)
    weighted = [_weight(shares.get(r, 1.0), s) for r, s in before.items()]
    mean = average(weighted)
    kind = reduction(before, after, mean, len(ranks))
    scaled = {r: _divide(s, len(ranks) if kind == "sum" else 1) for r, s in after.items()}
    results: list[Summary | None] = [scaled.get(r) for r in ranks] if scaled else []
    if _all_equal(after):
        results = results[:1]
    # the norm of the mean is known if a recorded tensor has the values of the mean
    means = [s for s in (*results[:1], reference) if kind and s and _equal(mean, s.values)]
    cosine = agreement(weighted, means[0]) if means else math.nan
    return Layer(before, results, reference, kind, cosine)


def _all_equal(summaries: ByRank) -> bool:
    """Return True if all ranks have the same values; False if no values are known."""
    return len({key(s) for s in summaries.values()}) == 1


def _divide(s: Summary, by: float) -> Summary:
    if by == 1:
        return s
    return replace(
        s, values=tuple(v / by for v in s.values), norm=s.norm / by, min=s.min / by, max=s.max / by
    )


def _weight(weight: float, s: Summary) -> Summary:
    """Return a weighted gradient. The gradient of a rank without examples counts as zero."""
    if weight:
        return _divide(s, 1 / weight)
    return Summary((0.0,) * len(s.values), 0.0, 0.0, 0.0, s.size)


def reduction(before: ByRank, after: ByRank, mean: Sequence[float], ranks: int) -> str:
    """Return how the gradients of the ranks were reduced; see :class:`Layer`.

    Args:
        before: the gradient of each rank.
        after: the gradient that each rank's optimizer applies.
        mean: the mean of the gradients, weighted by the ranks' numbers of examples.
        ranks: the number of ranks.
    """
    if not after or len(before) < ranks or len(after) < ranks:
        return ""
    same = _all_equal(after)
    if ranks == 1 or (not same and all(key(before[r]) == key(after[r]) for r in after)):
        return "own"
    result = next(iter(after.values())).values
    for kind, scale in (("mean", 1), ("sum", ranks)):
        if same and _equal(mean, [v / scale for v in result]):
            return kind
    return "other"


def agreement(gradients: Sequence[Summary], mean: Summary) -> float:
    """Return the mean cosine similarity over all pairs of ranks, weighted by the product of norms.

    Args:
        gradients: the gradients, weighted by the ranks' numbers of examples.
        mean: their mean.
    """
    norms = [s.norm for s in gradients]
    squares = sum(x * x for x in norms)
    pairs = sum(norms) ** 2 - squares
    total = mean.norm * len(norms)
    return max(-1.0, min(1.0, (total**2 - squares) / pairs)) if pairs > 0 else math.nan


def _equal(mean: Sequence[float], values: Sequence[float]) -> bool:
    """Return True if the values are equal up to rounding."""
    difference = largest(m - v for m, v in zip(mean, values, strict=False))
    return len(mean) == len(values) and difference <= ROUNDING * largest([*mean, *values])


# -- verdicts on the whole loop ------------------------------------------------------------


def _verdicts(
    trace: EventLog, training: Training, steps: Mapping[int, Mapping[str, Layer]]
) -> list[Json]:
    """Return the verdicts, each with "same" or "different" and a sentence."""
    reduced = [
        (n, name, layer)
        for n, layers in steps.items()
        for name, layer in layers.items()
        if layer.kind
    ]
    verdicts = (
        [_reduction_verdict(reduced, len(trace.ranks))] if reduced and len(trace.ranks) > 1 else []
    )
    return (
        verdicts
        + _reference_verdict([layer for *_, layer in reduced])
        + _drift_verdict(trace, training)
    )


def _verdict(same: bool, text: str) -> Json:
    return {"word": "same" if same else "different", "expected": True, "text": text}


def _reduction_verdict(reduced: list[tuple[int, str, Layer]], ranks: int) -> Json:
    kinds = {layer.kind for *_, layer in reduced}
    if kinds == {"own"}:
        return _verdict(False, "every rank keeps its own gradient: nothing was averaged")
    for n, layer_name, layer in reduced:
        if not layer.same:
            return _verdict(
                False, f"after step {n + 1}, the ranks' gradients of {layer_name} still differ"
            )
    result = f": the {kinds.pop()} over all {ranks} ranks" if kinds in ({"sum"}, {"mean"}) else ""
    return _verdict(True, f"after the all-reduce every rank has the same gradient{result}")


def _reference_verdict(layers: list[Layer]) -> list[Json]:
    compared = [layer for layer in layers if layer.reference]
    difference = max((layer.largest_difference for layer in compared), default=0.0)
    magnitude = max(
        (largest(layer.reference.values) for layer in compared if layer.reference), default=0.0
    )
    if not compared:
        return []
    if difference > ROUNDING * magnitude:
        return [
            _verdict(False, f"the single-process gradient differs by up to {number(difference)}")
        ]
    precision = f"the same, to within {difference:.0e}" if difference else "exactly the same"
    return [_verdict(True, f"one process computes {precision}")]


def _drift_verdict(trace: EventLog, training: Training) -> list[Json]:
    complete = {n: w for n, w in sorted(training.weights.items()) if len(w) > 1}
    if not complete:
        return []
    differing = [n for n, w in complete.items() if len({crc for crc, _ in w.values()}) > 1]
    if not differing:
        all_steps = len(complete) > len(training.steps)  # also compared before the first step
        when = "at every step" if all_steps else f"in all {len(complete)} comparisons"
        part = (
            "compared part of the replicas' weights is"
            if any(s.sampled for w in complete.values() for _, s in w.values())
            else "replicas' weights are"
        )
        return [_verdict(True, f"the {part} bitwise equal {when}")]
    distances = _distances(complete[max(complete)])
    when = f"first differ after step {differing[0]}" if differing[0] else "differ from the start"
    rank, max_drift = max(distances.items(), key=lambda item: (item[1], -item[0]))
    return [
        _verdict(
            False,
            f"the replicas' weights {when}; after step {max(complete)}, {name(trace.info, rank)} "
            f"is at a distance of about {max_drift:.2g} from {name(trace.info, min(distances))}",
        )
    ]


def _distances(weights: Mapping[int, tuple[str, Summary]]) -> dict[int, float]:
    """Return the distance of each replica's weights from the first replica's; 0 if bitwise equal.

    With more than 64 weights, it is estimated from sketches of the weights. Replicas with a
    different number of values are omitted.
    """
    checksum, base = weights[min(weights)]
    return {
        r: 0.0 if crc == checksum else math.dist(s.values, base.values)
        for r, (crc, s) in weights.items()
        if len(s.values) == len(base.values)
    }


#: Maximum number of points of a curve.
MAX_POINTS = 300

#: A curve: its rank, or None for the mean over all ranks, and its values by step.
Curve = tuple[int | None, dict[int, float]]


def losses(training: Training, ranks: Sequence[int]) -> list[Curve]:
    """Return the loss of each rank and the mean loss, by step, counted from 1."""
    steps = {n + 1: step for n, step in sorted(training.steps.items()) if step.reports}
    by_rank: list[Curve] = [
        (r, {n: step.reports[r].loss for n, step in steps.items() if r in step.reports})
        for r in ranks
    ]
    return _finite([*by_rank, (None, {n: mean_loss(step) for n, step in steps.items()})])


def drifts(training: Training, ranks: Sequence[int]) -> list[Curve]:
    """Return the distance of each replica's weights from the first replica's, by step."""
    steps = {n: _distances(weights) for n, weights in sorted(training.weights.items())}
    return _finite([(r, {n: d[r] for n, d in steps.items() if r in d}) for r in ranks])


def _finite(curves: list[Curve]) -> list[Curve]:
    """Return the finite points of curves, at most MAX_POINTS of each."""
    finite = [(r, [(n, y) for n, y in line.items() if math.isfinite(y)]) for r, line in curves]
    return [(r, dict(thinned(points, MAX_POINTS))) for r, points in finite if points]


# -- the picture -----------------------------------------------------------------------------------

#: At most MAX_RANKS ranks and MAX_LAYERS layers are drawn, with about MAX_VALUES values in all.
MAX_RANKS, MAX_LAYERS, MAX_VALUES = 16, 32, 60_000
#: Sizes [px].
WIDTH, NAME_WIDTH, TENSOR_HEIGHT = 720, 128, 44
#: Sizes of the curves and their axes, and the distance between two curves [px].
CURVE_WIDTH, AXIS_WIDTH, CURVE_HEIGHT, CURVE_GAP = 200, 32, 84, 38


#: Heading of the result of each kind of reduction, and the text below it.
RESULTS = {
    "sum": ("mean", "sum of all {n} / {n}"),
    "mean": ("mean", "of all {n}"),
    "own": ("after", "not averaged"),
    "other": ("after", "not the mean"),
    "": ("after", "not yet averaged"),
}
AGREEMENT = (
    "mean cosine: the mean cosine similarity over all pairs of ranks' gradients, weighted by the "
    "product of their norms. It takes all values into account, including those that are not shown "
    "(in layers with more than 65,536 values, a sample). "
    "1: the same direction, 0: unrelated, below 0: opposed"
)
DRIFT = (
    "the largest distance of a rank's weights from the first rank's weights: the square root of "
    "the sum of the squared differences, estimated to within about 20% for more than 64 weights. "
    "Replicas that apply the same gradients stay identical"
)


def draw(trace: EventLog, *, live: bool = False) -> Json:
    """Return the picture of a training loop for the SVG and browser renderers.

    Args:
        trace: the run.
        live: whether the run is in progress.
    """
    found = project(trace)
    training, ranks, layers = found.training, trace.ranks[:MAX_RANKS], len(found.training.layers)
    step_values = max(1, min(layers, MAX_LAYERS)) * 64 * (len(ranks) + 2)
    shown = thinned(list(found.steps), max(2, MAX_VALUES // step_values))
    scene, side = Scene(WIDTH, 20), Scene(CURVE_WIDTH, 0)
    scene.height = max(
        (_step(scene, k, trace, found, n) for k, n in enumerate(shown)), default=scene.height
    )
    named = [
        (
            "loss",
            losses(training, ranks),
            "the mean over the examples of all ranks, and the loss of each rank",
        ),
        ("replica drift", drifts(training, ranks), DRIFT),
    ]
    # a curve of zeros, such as the drift of identical replicas, adds nothing to the verdict
    curves = [curve for curve in named if any(any(line.values()) for _, line in curve[1])]
    height = CURVE_HEIGHT if len(curves) > 1 else 2 * CURVE_HEIGHT
    steps = [n for _, lines, _ in curves for _, line in lines for n in line]
    for i, curve in enumerate(curves):  # all on the same axis
        _curve(
            side,
            i * (height + CURVE_GAP),
            height,
            (min(steps), max(steps)),
            *curve,
            [n + 1 for n in shown],
        )
    side.height = len(curves) * (height + CURVE_GAP)
    total, last = len(training.steps), max(0.0, len(shown) - 1.0)
    start = list(training.weights.get(0, {}).values())
    note = f"values of {len(shown):,} of {count(total, 'step')}" if len(shown) < total else ""
    loss = {
        n: f"mean loss {figure(mean_loss(step))}"
        for n, step in training.steps.items()
        if step.reports
    }
    captions = [  # the clock shows the number of a step if every step is drawn
        dotted([f"step {n + 1}" * bool(note or n not in loss), loss.get(n, "")]) for n in shown
    ]
    hint = (
        "waiting for the first step"
        if live
        else "nothing was watched: run the loop inside `with dk.watch_gradients(model) as watch`, "
        "and call watch.step()"
    )
    return picture(
        scene,
        title=clean(trace.info.name) or "Gradients",
        view="gradients",
        facts=[
            *facts(trace.info, len(trace.ranks)),
            *[count(total, "step")] * bool(total),
            *[count(weights.size, "weight") for _, weights in start[:1]],
        ],
        notices=omissions(
            ("ranks are drawn; all ranks are compared", len(ranks), len(trace.ranks)),
            ("layers are drawn", min(layers, MAX_LAYERS), layers),
        ),
        verdicts=found.verdicts,
        live=live,
        empty="" if shown or curves else hint,
        unit="shown step" if note else "step",
        end=last,
        opening=last if live else 0.0,
        max_height=max(340, scene.height),
        keyframes=[
            {"begin": float(k), "end": float(k), "caption": caption, "details": note}
            for k, caption in enumerate(captions)
        ],
        stills=[[0, scene.height]] if shown else [],
        side=side.plain() if curves else None,
    )


# -- a step ---------------------------------------------------------------------------------


def _step(scene: Scene, k: int, trace: EventLog, found: Gradients, n: int) -> float:
    """Draw the table of a step; return its bottom edge."""
    ranks, shapes = trace.ranks[:MAX_RANKS], list(found.training.layers.items())[:MAX_LAYERS]
    layers = {layer: found.steps[n][layer] for layer, _ in shapes}
    kinds = {layer.kind for layer in layers.values()}
    heads: list[Head] = [(name(trace.info, r), "own gradient", i) for i, r in enumerate(ranks)]
    result, role = RESULTS[kinds.pop() if len(kinds) == 1 else "other"]
    heads.append((result, role.format(n=len(trace.ranks)), None))
    compared = any(layer.reference for layer in layers.values())
    heads += [("one process", "whole batch", None)] * compared
    signs = ["→", "=" if all(x.equals_reference for x in layers.values()) else "≠"][: 1 + compared]
    table = Table(scene, k, heads, NAME_WIDTH, WIDTH, TENSOR_HEIGHT, histograms=False)
    for x, sign in zip(table.positions[len(ranks) :], signs, strict=True):
        table.add(x, 0, text(sign, "strong", x=-COLUMN_GAP - 5, y=28))
    for layer_name, shape in shapes:
        layer = layers[layer_name]
        drawn = {len(s.values) for s in layer.before.values() if len(s.values) < s.size}
        notes = [" × ".join(map(str, shape)) + "".join(f" ({n} shown)" for n in drawn)]
        if math.isfinite(layer.agreement):
            notes.append(f"mean cosine {figure(round(layer.agreement, 3))}")
            table.add(0, table.bottom + 4, title(AGREEMENT), rect(NAME_WIDTH, 44, "hover"))
        table.row(
            clean(layer_name),
            notes,
            [*_cells(layer, ranks), *[_cell(layer.reference)] * compared],
            layer.max_magnitude,
        )
    return table.bottom


def _cells(layer: Layer, ranks: list[int]) -> Iterator[Cell]:
    """Yield the cells of the ranks' gradients and of the result."""
    yield from (_cell(layer.before.get(rank)) for rank in ranks)
    if layer.after and not layer.same:
        yield Cell(None, missing="≠ by rank", wrong=True)
    else:
        yield _cell(layer.after[0] if layer.after else None)


def _cell(s: Summary | None) -> Cell:
    return Cell(plain(s), [norm(plain(s))]) if s else Cell(None)


# -- the whole loop -------------------------------------------------------------------------


def _curve(
    scene: Scene,
    top: float,
    height: float,
    steps: tuple[int, int],
    name: str,
    lines: list[Curve],
    hint: str,
    shown: list[int],
) -> None:
    """Draw curves over the steps, and the value at each shown step."""
    points = [point for _, line in lines for point in line.items()]
    first, last = steps
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    x_scale, y_scale = (
        (CURVE_WIDTH - AXIS_WIDTH - 6) / ((last - first) or 1),
        height / ((highest - lowest) or 1.0),
    )

    def point(n: int, y: float) -> tuple[float, float]:
        return AXIS_WIDTH + (n - first) * x_scale, 19 + height - (y - lowest) * y_scale

    mean = next((line for rank, line in lines if rank is None), None)
    curve = mean or {n: max(line.get(n, lowest) for _, line in lines) for n, _ in points}
    ends = title(f"{name}: {figure(curve[min(curve)])} → {figure(curve[max(curve)])}", aloud=True)
    scene.add(0, top, ends, text(cut(name, CURVE_WIDTH - 60, 12), "strong", y=12))
    axis = [
        line(point(first, lowest), point(last, lowest), "base"),
        *(
            text(figure(y), "tick", x=AXIS_WIDTH - 4, y=point(first, y)[1] + 4, anchor="end")
            for y in {lowest, highest}
        ),
        text(f"step {first}", "tick", x=AXIS_WIDTH, y=height + 31),
        text(f"{last}", "tick", x=CURVE_WIDTH - 6, y=height + 31, anchor="end"),
    ]
    for lane, (rank, values) in enumerate(lines):
        d = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(point, values, values.values()))
        axis.append(path(f"M{d}h3", "mean" if rank is None else "graph", lane=lane))
    scene.add(0, top, title(hint), rect(CURVE_WIDTH, height + 8, "hover", y=15), *axis)
    for k, n in enumerate(shown):
        x, _ = point(max(n, first), lowest)
        step = max((m for m in curve if m <= n), default=min(curve))
        scene.add(
            0,
            top,
            text(
                f"{figure(curve[step])} at step {step}",
                "strong",
                x=CURVE_WIDTH - 6,
                y=12,
                anchor="end",
                size=11,
            ),
            line((x, 15), (x, 21 + height), "dashes"),
            begin=float(k),
            end=k + 1.0,
            layer=1,
        )
