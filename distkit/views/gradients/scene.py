"""Draws gradients as a table of layers per step, and curves of the whole loop."""

from __future__ import annotations

import math
from collections.abc import Iterator

from distkit._format import count
from distkit.events import Summary
from distkit.trace.log import EventLog
from distkit.views.gradients.projection import Curve, Gradients, Layer, drifts, losses, project
from distkit.views.scene.frame import Json, clean, facts, name, omissions
from distkit.views.scene.marks import Scene, line, path, picture, rect, text, title
from distkit.views.scene.renderer import cut, thinned
from distkit.views.scene.summaries import figure, plain
from distkit.views.scene.values import COLUMN_GAP, Cell, Head, Table, norm

#: Maximum numbers of drawn ranks, layers, and values over all steps.
MAX_RANKS, MAX_LAYERS, MAX_VALUES = 16, 32, 60_000
#: Widths of the scene and of layer names; height of a tensor [px].
WIDTH, NAME_WIDTH, TENSOR_HEIGHT = 720, 128, 44
#: Widths of curves and axis; height of one of two curves, and distance between them [px].
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
    # a curve without any value above zero, such as no drift, is only a verdict
    curves = [curve for curve in named if any(any(line.values()) for _, line in curve[1])]
    high = CURVE_HEIGHT if len(curves) > 1 else 2 * CURVE_HEIGHT
    for i, curve in enumerate(curves):
        _curve(side, i * (high + CURVE_GAP), high, *curve, [n + 1 for n in shown])
    side.height = len(curves) * (high + CURVE_GAP)
    total, last = len(training.steps), max(0.0, len(shown) - 1.0)
    start = list(training.weights.get(0, {}).values())
    note = f"values of {len(shown):,} of {count(total, 'step')}" if len(shown) < total else ""
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
            {"begin": float(k), "end": float(k), "caption": f"step {n + 1}", "details": note}
            for k, n in enumerate(shown)
        ],
        stills=[[0, scene.height]] if shown else [],
        side=side.plain() if curves else None,
    )


# -- a step ---------------------------------------------------------------------------------


def _step(scene: Scene, k: int, trace: EventLog, found: Gradients, n: int) -> float:
    """Draw the table of a step; return its bottom edge."""
    ranks, shapes = trace.ranks[:MAX_RANKS], list(found.training.layers.items())[:MAX_LAYERS]
    layers = {layer: found.steps[n][layer] for layer, _ in shapes}
    kinds = {layer.reduction.kind for layer in layers.values()}
    heads: list[Head] = [(name(trace.info, r), "own gradient", i) for i, r in enumerate(ranks)]
    result, role = RESULTS[kinds.pop() if len(kinds) == 1 else "other"]
    heads.append((result, role.format(n=len(trace.ranks)), None))
    one = any(layer.reference for layer in layers.values())
    heads += [("one process", "whole batch", None)] * one
    signs = ["→", "=" if all(x.equals_reference for x in layers.values()) else "≠"][: 1 + one]
    table = Table(scene, k, heads, NAME_WIDTH, WIDTH, TENSOR_HEIGHT, histograms=False)
    for x, sign in zip(table.places[len(ranks) :], signs, strict=True):
        table.add(x, 0, text(sign, "strong", x=-COLUMN_GAP - 5, y=28))
    for layer_name, shape in shapes:
        layer = layers[layer_name]
        drawn = {len(s.values) for s in layer.before.values() if len(s.values) < s.size}
        notes = [" × ".join(map(str, shape)) + "".join(f" ({n} shown)" for n in drawn)]
        if math.isfinite(layer.agreement):
            notes.append(f"mean cosine {figure(round(layer.agreement, 3))}")
            table.add(0, table.bottom + 4, title(AGREEMENT), rect(NAME_WIDTH, 44, "hover"))
        cells = [*_cells(layer, ranks), *[_cell(layer.reference)] * one]
        table.row(clean(layer_name), notes, cells, layer.most)
    return table.bottom


def _cells(layer: Layer, ranks: list[int]) -> Iterator[Cell]:
    """Yield the cells of the ranks' gradients, and the result."""
    yield from (_cell(layer.before.get(rank)) for rank in ranks)
    if layer.after and not layer.reduction.same:
        yield Cell(None, missing="≠ by rank", wrong=True)
    else:
        yield _cell(layer.after[0] if layer.after else None)


def _cell(s: Summary | None) -> Cell:
    return Cell(plain(s), [norm(plain(s))]) if s else Cell(None)


# -- the whole loop -------------------------------------------------------------------------


def _curve(
    scene: Scene,
    top: float,
    high: float,
    name: str,
    lines: list[Curve],
    hint: str,
    shown: list[int],
) -> None:
    """Draw lines over steps, and the value at the current step."""
    points = [point for _, line in lines for point in line.items()]
    first, last = min(n for n, _ in points), max(n for n, _ in points)
    low, most = min(y for _, y in points), max(y for _, y in points)
    x_scale, y_scale = (
        (CURVE_WIDTH - AXIS_WIDTH - 6) / ((last - first) or 1),
        high / ((most - low) or 1.0),
    )

    def point(n: int, y: float) -> tuple[float, float]:
        return AXIS_WIDTH + (n - first) * x_scale, 19 + high - (y - low) * y_scale

    mean = next((line for rank, line in lines if rank is None), None)
    curve = mean or {n: max(line.get(n, low) for _, line in lines) for n, _ in points}
    ends = title(f"{name}: {figure(curve[min(curve)])} → {figure(curve[max(curve)])}", aloud=True)
    scene.add(0, top, ends, text(cut(name, CURVE_WIDTH - 60, 12), "strong", y=12))
    axis = [
        line(point(first, low), point(last, low), "base"),
        *(
            text(
                figure(y), "tick", x=AXIS_WIDTH - 4, y=point(first, y)[1] + 4, anchor="end", size=9
            )
            for y in {low, most}
        ),
        text(f"step {first}", "tick", x=AXIS_WIDTH, y=high + 31, size=9),
        text(f"{last}", "tick", x=CURVE_WIDTH - 6, y=high + 31, anchor="end", size=9),
    ]
    for lane, (rank, values) in enumerate(lines):
        d = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(point, values, values.values()))
        axis.append(path(f"M{d}h3", "mean" if rank is None else "graph", lane=lane))
    scene.add(0, top, title(hint), rect(CURVE_WIDTH, high + 8, "hover", y=15), *axis)
    for k, n in enumerate(shown):
        x, _ = point(max(n, first), low)
        at = max((m for m in curve if m <= n), default=min(curve))
        scene.add(
            0,
            top,
            text(
                f"{figure(curve[at])} at step {at}",
                "strong",
                x=CURVE_WIDTH - 6,
                y=12,
                anchor="end",
                size=11,
            ),
            line((x, 15), (x, 21 + high), "dashes"),
            begin=float(k),
            end=k + 1.0,
            layer=1,
        )
