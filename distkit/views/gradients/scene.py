"""Draws gradients as a table of layers per step, and curves of the whole loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distkit._format import count
from distkit.events import Summary
from distkit.trace.log import EventLog
from distkit.trace.training import Training
from distkit.views.gradients.projection import Curve, Gradients, Layer, drifts, losses, project
from distkit.views.scene.frame import Json, clean, facts, name, omissions
from distkit.views.scene.marks import Scene, line, path, picture, rect, text, title
from distkit.views.scene.renderer import cut, thinned
from distkit.views.scene.summaries import figure, number, plain
from distkit.views.scene.values import Cell, Head, Table, norm

#: Maximum numbers of drawn ranks, layers, and values over all steps.
MAX_RANKS, MAX_LAYERS, MAX_VALUES = 16, 32, 60_000
#: Widths of the scene and of layer names; height of a tensor [px].
WIDTH, NAME_WIDTH, TENSOR_HEIGHT = 720, 112, 32
#: Widths of curves and axis; height and pitch of a curve [px].
CURVE_WIDTH, AXIS_WIDTH, CURVE_HEIGHT, CURVE_PITCH = 200, 32, 30, 57
HINT = "run the loop inside `with dk.watch_gradients(model) as watch`, and call watch.step()"


#: Column name of each kind of reduction, and alternative texts below it, longest first.
RESULTS = {
    "sum": ("average", ["the sum of all {n}, divided by {n}", "sum of {n} / {n}", "sum / {n}"]),
    "mean": ("average", ["the mean of all {n}", "mean of {n}"]),
    "own": ("after", ["nothing was averaged", "own gradient"]),
    "other": ("after", ["neither the sum nor the mean", "no mean"]),
    "": ("after", ["not averaged yet", "not yet"]),
}
AGREEMENT = (
    "mean cosine: of all pairs of ranks' gradients, weighted by their norms. "
    "All values contribute, through the norms of the gradients and of their sum. "
    "1: the same direction, 0: unrelated, below 0: opposed"
)
DRIFT = (
    "the largest distance of a rank's weights from those of the first rank: the square root of the "
    "sum of the squared differences. Replicas that see the same gradients stay equal"
)


def draw(trace: EventLog, *, live: bool = False) -> Json:
    """Return the picture of a training loop, for both renderers.

    Args:
        trace: the run.
        live: whether the run is in progress.
    """
    found = project(trace)
    training, ranks, layers = found.training, trace.ranks[:MAX_RANKS], len(found.training.layers)
    step_values = max(1, min(layers, MAX_LAYERS)) * 64 * (len(ranks) + 2)
    shown = thinned(list(found.steps), max(2, MAX_VALUES // step_values))
    scene, side = Scene(WIDTH, 20), Scene(CURVE_WIDTH, 0)
    tables = [_step(scene, k, trace, found, n) for k, n in enumerate(shown)]
    scene.height = max(tables, default=scene.height)
    named = [
        ("loss", losses(training, ranks), "the mean of all ranks, and each rank"),
        ("replica drift", drifts(training, ranks), DRIFT),
    ]
    curves = [curve for curve in named if curve[1]]
    for i, curve in enumerate(curves):
        _curve(side, i * CURVE_PITCH, *curve, [n + 1 for n in shown])
    side.height = len(curves) * CURVE_PITCH
    total, last = len(training.steps), max(0.0, len(shown) - 1.0)
    note = f"values of {len(shown):,} of {count(total, 'step')}" if len(shown) < total else ""
    hint = "waiting for the first step" if live else f"nothing was watched: {HINT}"
    return picture(
        scene,
        title=clean(trace.info.name) or "Gradients",
        view="gradients",
        facts=[*facts(trace.info, len(trace.ranks)), *_facts(training)],
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
        max_height=max(440, scene.height),
        keyframes=[
            {"begin": float(k), "end": float(k), "caption": f"step {n + 1}", "details": note}
            for k, n in enumerate(shown)
        ],
        stills=[[0, scene.height]] if shown else [],
        side=side.plain() if curves else None,
    )


def _facts(training: Training) -> Iterator[str]:
    """Yield the numbers of steps and weights."""
    if training.steps:
        yield count(len(training.steps), "step")
    for _, weights in list(training.weights.get(0, {}).values())[:1]:
        yield count(weights.size, "weight")


# -- a step ---------------------------------------------------------------------------------


def _step(scene: Scene, k: int, trace: EventLog, found: Gradients, n: int) -> float:
    """Draw the table of a step; return its bottom edge."""
    ranks, shapes = trace.ranks[:MAX_RANKS], list(found.training.layers.items())[:MAX_LAYERS]
    layers = {layer: found.steps[n][layer] for layer, _ in shapes}
    names = {RESULTS[layer.reduction.kind][0] for layer in layers.values()}
    alone = any(layer.alone for layer in layers.values())
    heads: list[Head] = [(name(trace.info, r), "", lane) for lane, r in enumerate(ranks)]
    heads.append((names.pop() if len(names) == 1 else "after", "", None))
    heads += [("one process", "", None)] * alone
    table = Table(scene, k, heads, NAME_WIDTH, WIDTH, TENSOR_HEIGHT)
    for layer_name, shape in shapes:
        layer = layers[layer_name]
        first = next(iter(layer.before.values()), None)
        notes = [" × ".join(map(str, shape)), f"colors: ±{figure(number(layer.most))}"]
        if first and len(first.values) < first.size:
            notes.append(f"{len(first.values)} of {first.size:,} values")
        if math.isfinite(layer.agreement):
            notes.append(f"mean cosine {figure(round(layer.agreement, 3))}")
            table.add(
                0, table.bottom + 4, title(AGREEMENT), rect(NAME_WIDTH, TENSOR_HEIGHT + 24, "hover")
            )
        cells = [*_cells(layer, trace.ranks), *([_single_process_cell(layer)] if alone else [])]
        table.row(clean(layer_name), notes, cells, layer.most)
    return table.bottom


def _cells(layer: Layer, ranks: list[int]) -> Iterator[Cell]:
    """Yield the cells of the ranks' gradients, and the result."""
    kind, same = layer.reduction.kind, layer.reduction.same
    for i, rank in enumerate(ranks[:MAX_RANKS]):
        after = layer.after[0 if same else i] if layer.after and kind != "own" else None
        yield _cell(layer.before.get(rank), reference=after)
    if not layer.after or not same:
        missing = "≠ by rank" if layer.after else "–"
        yield Cell(None, missing=missing, wrong=bool(layer.after))
    else:
        notes = [option.format(n=len(ranks)) for option in RESULTS[kind][1]]
        yield _cell(layer.after[0], ("small", notes))


def _single_process_cell(layer: Layer) -> Cell:
    """Return the cell of the single-process gradient."""
    off = figure(number(layer.largest_difference))
    known = math.isfinite(layer.largest_difference)
    return _cell(layer.alone, *([("small", [f"up to {off} off", f"± {off}"])] if known else []))


def _cell(
    s: Summary | None, *lines: tuple[str, Sequence[str]], reference: Summary | None = None
) -> Cell:
    if s is None:
        return Cell(None)
    drawn = plain(s)
    return Cell(drawn, [norm(drawn), *lines], plain(reference)["values"] if reference else ())


# -- the whole loop -------------------------------------------------------------------------


def _curve(
    scene: Scene, top: float, name: str, lines: list[Curve], hint: str, shown: list[int]
) -> None:
    """Draw lines over steps, and the value at the current step."""
    points = [point for _, line in lines for point in line.items()]
    first, last = min(n for n, _ in points), max(n for n, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(0.0, *(y for _, y in points))
    x_scale, y_scale = (
        (CURVE_WIDTH - AXIS_WIDTH - 6) / ((last - first) or 1),
        CURVE_HEIGHT / ((high - low) or 1.0),
    )

    def point(n: int, y: float) -> tuple[float, float]:
        return AXIS_WIDTH + (n - first) * x_scale, 19 + CURVE_HEIGHT - (y - low) * y_scale

    mean = next((line for rank, line in lines if rank is None), None)
    curve = mean or {n: max(line.get(n, low) for _, line in lines) for n, _ in points}
    ends = f"{name}: {figure(curve[min(curve)])} → {figure(curve[max(curve)])}"
    scene.add(
        0, top, title(ends, aloud=True), text(cut(name, CURVE_WIDTH - 60, 12), "strong", y=12)
    )
    axis = [line(point(first, 0.0), point(last, 0.0), "base")]
    for value in {low, high}:
        y = point(first, value)[1] + 4
        axis.append(text(figure(value), "tick", x=AXIS_WIDTH - 4, y=y, anchor="end", size=9))
    for lane, (rank, values) in enumerate(lines):
        d = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(point, values, values.values()))
        axis.append(path(f"M{d}h3", "mean" if rank is None else "graph", lane=lane))
    scene.add(0, top, title(hint), rect(CURVE_WIDTH, CURVE_HEIGHT + 8, "hover", y=15), *axis)
    for k, n in enumerate(shown):
        x, latest = (
            point(max(n, first), 0.0)[0],
            max((m for m in curve if m <= n), default=min(curve)),
        )
        value_text = text(figure(curve[latest]), "strong", x=CURVE_WIDTH - 6, y=12, anchor="end")
        cursor = line((x, 15), (x, 21 + CURVE_HEIGHT), "dashes")
        scene.add(0, top, value_text, cursor, begin=float(k), end=k + 1.0, layer=1)
