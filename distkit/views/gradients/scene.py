"""Draws gradients as a table of layers per step, and curves of the whole loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distkit._format import count
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import (
    Scene,
    line,
    path,
    picture,
    rect,
    text,
    title,
)
from distkit.views.scene.painter import cut
from distkit.views.scene.summaries import figure
from distkit.views.scene.values import Cell, Head, Table, norm

#: Widths of the scene and of layer names; height of a tensor [px].
WIDTH, LEFT, HIGH = 720, 112, 32
#: Widths of curves and axis; height and pitch of a curve [px].
SIDE, AXIS, CURVE, PITCH = 200, 32, 30, 57
HINT = "put the loop into with dk.watch_gradients(model) as watch, and call watch.step()"


class Line(NamedTuple):
    """A curve over the steps of one rank, or the mean of all ranks."""

    rank: Json | None
    points: dict[int, float]


#: Column name of each kind of reduction, and alternative texts below it, longest first.
RESULTS = {
    "sum": ("average", ["the sum of all {n}, divided by {n}", "sum of {n} / {n}", "sum / {n}"]),
    "mean": ("average", ["the mean of all {n}", "mean of {n}"]),
    "own": ("after", ["nothing was averaged", "own gradient"]),
    "other": ("after", ["neither the sum nor the mean", "no mean"]),
    "": ("after", ["not averaged yet", "not yet"]),
}
AGREEMENT = (
    "agreement: the mean cosine of all pairs of ranks' gradients, weighted by their norms. "
    "All values count, through the norms of the gradients and of their sum. "
    "1: the same direction, 0: unrelated, below 0: opposed"
)
DRIFT = (
    "the largest distance of a rank's weights from those of the first rank: the square root of the "
    "sum of the squared differences. Replicas that see the same gradients stay equal"
)


def draw(data: Json) -> Json:
    """Return the picture of a training loop, for both painters.

    Args:
        data: the result of ``projection.project``.
    """
    steps, scene, side = data["steps"], Scene(WIDTH, 20), Scene(SIDE, 0)
    tables = (_step(scene, k, step, data) for k, step in enumerate(steps))
    scene.height = max(tables, default=scene.height)
    curves = [*_curves(data)]
    for i, curve in enumerate(curves):
        _curve(side, i * PITCH, *curve, [step["n"] for step in steps])
    side.height = len(curves) * PITCH
    sampled = len(steps) < data["total"]
    note = f"values of {len(steps):,} of {count(data['total'], 'step')}" if sampled else ""
    last = max(0.0, len(steps) - 1.0)
    hint = "waiting for the first step" if data["live"] else f"nothing was watched: {HINT}"
    return picture(
        scene,
        title=data["title"] or "Gradients",
        view="gradients",
        facts=data["facts"],
        notices=data["notices"],
        verdicts=data["verdicts"],
        live=data["live"],
        empty="" if steps or curves else hint,
        unit="shown step" if sampled else "step",
        end=last,
        opening=last if data["live"] else 0.0,
        high=max(440, scene.height),
        keyframes=[
            {"begin": float(k), "end": float(k), "who": f"step {step['n']}", "more": note}
            for k, step in enumerate(steps)
        ],
        stills=[[0, scene.height]] if steps else [],
        side=side.plain() if curves else None,
    )


# -- a step ---------------------------------------------------------------------------------


def _step(scene: Scene, k: int, step: Json, data: Json) -> float:
    """Draw the table of a step; return its bottom edge."""
    ranks, cells = data["ranks"], step["layers"]
    names = {RESULTS[cell["kind"]][0] for cell in cells}
    alone = any(cell["alone"] for cell in cells)
    heads: list[Head] = [(r["name"], "", r["lane"]) for r in ranks]
    heads.append((names.pop() if len(names) == 1 else "after", "", None))
    heads += [("one process", "", None)] * alone
    table = Table(scene, k, heads, LEFT, WIDTH, HIGH)
    for layer, cell in zip(data["layers"], cells, strict=True):
        first = next(filter(None, cell["before"]), None)
        sampled = first and len(first["values"]) < first["size"]
        notes = [" × ".join(map(str, layer["shape"])), f"colours: ±{figure(cell['most'])}"]
        notes += (
            [f"{len(first['values'])} of {first['size']:,} values"] if first and sampled else []
        )
        if cell["agreement"] is not None:
            notes.append(f"agreement {figure(cell['agreement'])}")
            table.add(0, table.bottom + 4, title(AGREEMENT), rect(LEFT, HIGH + 24, "hover"))
        table.row(layer["name"], notes, [*_cells(cell, len(ranks), alone)], cell["most"] or 0.0)
    return table.bottom


def _cells(cell: Json, ranks: int, alone: bool) -> Iterator[Cell]:
    """Yield the cells of the ranks' gradients, the result, and the single-process gradient."""
    after, by_rank = cell["after"], not cell["same"] and cell["kind"] != "own"
    for i, s in enumerate(cell["before"]):
        result = (after[i] if by_rank else after[0]) if after and cell["kind"] != "own" else None
        reference: Sequence[float | str] = result["values"] if result else ()
        yield Cell(s, [norm(s)] if s else [], reference)
    _, words = RESULTS[cell["kind"]]
    if after and cell["same"]:
        notes = [option.format(n=ranks) for option in words]
        yield Cell(after[0], [norm(after[0]), ("small", notes)])
    else:
        yield Cell(None, missing="≠ by rank" if after else "–", wrong=bool(after))
    if alone:
        s, off = cell["alone"], figure(cell["apart"])
        distance = [] if cell["apart"] is None else [("small", [f"up to {off} off", f"± {off}"])]
        yield Cell(s, [norm(s), *distance] if s else [])


# -- the whole loop -------------------------------------------------------------------------


def _curves(data: Json) -> Iterator[tuple[str, list[Line], str]]:
    """Yield name, lines and tooltip of each curve with data."""
    curves = data["curves"]
    named = [
        ("loss", curves["loss"], "the mean of all ranks, and each rank"),
        ("replica drift", curves["drift"], DRIFT),
    ]
    lanes = {r["rank"]: r for r in data["ranks"]}
    for name, lines, hint in named:
        known = [
            Line(lanes.get(line["rank"]), {n: y for n, y in line["points"] if y is not None})
            for line in lines
        ]
        if any(line.points for line in known):
            yield name, [line for line in known if line.points], hint


def _curve(
    scene: Scene, top: float, name: str, lines: list[Line], hint: str, shown: list[int]
) -> None:
    """Draw lines over steps, and the value at the current step."""
    points = [point for line in lines for point in line.points.items()]
    first, last = min(n for n, _ in points), max(n for n, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(0.0, *(y for _, y in points))
    x_scale, y_scale = (SIDE - AXIS - 6) / ((last - first) or 1), CURVE / ((high - low) or 1.0)

    def place(n: int, y: float) -> tuple[float, float]:
        return AXIS + (n - first) * x_scale, 19 + CURVE - (y - low) * y_scale

    mean = next((line.points for line in lines if line.rank is None), None)
    curve = mean or {n: max(line.points.get(n, low) for line in lines) for n, _ in points}
    ends = f"{name}: {figure(curve[min(curve)])} → {figure(curve[max(curve)])}"
    scene.add(0, top, title(ends, aloud=True), text(cut(name, SIDE - 60, 12), "strong", y=12))
    axis = [line(place(first, 0.0), place(last, 0.0), "base")]
    for value in {low, high}:
        y = place(first, value)[1] + 4
        axis.append(text(figure(value), "tick", x=AXIS - 4, y=y, anchor="end", size=9))
    for rank, values in lines:
        d = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, values, values.values()))
        axis.append(path(f"M{d}h3", "graph" if rank else "mean", lane=rank["lane"] if rank else 0))
    scene.add(0, top, title(hint or name), rect(SIDE, CURVE + 8, "hover", y=15), *axis)
    for k, n in enumerate(shown):
        x, latest = (
            place(max(n, first), 0.0)[0],
            max((m for m in curve if m <= n), default=min(curve)),
        )
        value_text = text(figure(curve[latest]), "strong", x=SIDE - 6, y=12, anchor="end")
        cursor = line((x, 15), (x, 21 + CURVE), "dashes")
        scene.add(0, top, value_text, cursor, begin=float(k), end=k + 1.0, layer=1)
