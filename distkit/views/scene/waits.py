"""Draws the wait-for graph: a circle per rank, and an arrow to each rank it waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable

from distkit.diagnosis.rank_state import RankState, RankStatus
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import Scene, Shape, arrow, circle, text, title
from distkit.views.scene.renderer import body
from distkit.views.scene.theme import GRAY, MARKS

#: Maximum number of circles in a picture.
MAX_CIRCLES = 16
#: Sizes [px]. GAP is between a circle and its arrows, ARROW_DISTANCE between opposite arrows.
RADIUS, GAP, ARROW_DISTANCE = 15.0, 3.0, 11.0
#: Scale of the picture below a notebook's error.
SCALE = 1.6
#: Legend texts by style. All except the first are shown only if their style is in use. ``{}``
#: becomes the ranks' states.
LEGEND = {
    "arrow": "arrow: waits for",
    "held": "dashed: blocked",
    "own": "filled: {}",
    "wrong": "red: ranks wait for each other",
}

Point = tuple[float, float]


def wait_for_graph(states: Iterable[RankState]) -> Json | None:
    """Return the wait-for graph as a scene with its styles.

    Blocked ranks have dashed circles, and the arrows of a cycle are red. The result is None if no
    rank is blocked, or if the graph would have more than ``MAX_CIRCLES`` circles.

    >>> wait_for_graph([RankState(0, RankStatus.RUNNING)]) is None
    True
    """
    known = {s.rank: s for s in states}
    waits_for = {s.rank: s.waits_for for s in known.values() if s.status is RankStatus.BLOCKED}
    edges = {(r, other) for r, others in waits_for.items() for other in others if other != r}
    ranks = sorted({*waits_for, *(other for _, other in edges)})
    if not waits_for or len(ranks) > MAX_CIRCLES:
        return None
    centers = dict(zip(ranks, _circle_positions(len(ranks)), strict=True))
    scene = Scene(*(max(p[i] for p in centers.values()) + RADIUS + 2 for i in (0, 1)))
    description = "; ".join(str(known[r]) for r in waits_for)
    scene.add(0, 0, title(description, aloud=True))
    for a, b in sorted(edges):
        shift = ARROW_DISTANCE / 2 if (b, a) in edges else 0.0
        scene.add(0, 0, *_shifted_arrow(centers[a], centers[b], shift, _reaches(b, a, edges)))
    for rank, (x, y) in centers.items():
        circle_style, style = ("held", "version") if rank in waits_for else ("own", "label")
        number = text(str(rank), style, y=4, anchor="middle", lane=rank, size=12.5)
        scene.add(x, y, circle(RADIUS, circle_style, lane=rank), number, layer=1)
    filled = sorted({s.status for s in known.values() if s.rank in centers.keys() - waits_for})
    plain = scene.plain()
    used = {style for _, style, *_ in plain["shapes"]}
    return {
        "scene": plain,
        "legend": " · ".join(
            LEGEND[s].format(" or ".join(filled)) for s in LEGEND if s in used or s == "arrow"
        ),
        "styles": {s: MARKS[s] for s in sorted(used & MARKS.keys())},
        "description": description,
    }


def waits_svg(states: Iterable[RankState]) -> str:
    """Return the wait-for graph as an SVG document; "" if there is none."""
    graph = wait_for_graph(states)
    if graph is None:
        return ""
    scene = graph["scene"]
    bottom = SCALE * scene["height"] + 28
    width = 32 + max(SCALE * scene["width"], svg.text_width(graph["legend"], 13))
    left = (width - SCALE * scene["width"]) / 2
    marks = f'<g transform="translate({left:.1f} 8) scale({SCALE})">{body(scene, 0.0)}</g>'
    marks += svg.text(16, bottom, graph["legend"], GRAY, 'font-size="12.5"')
    return svg.document(width, bottom + 14, "which rank waits for which", marks)


def _circle_positions(n: int) -> list[Point]:
    """Return positions clockwise from the top; up to three are in reading order."""
    radius = 36.0 if n < 4 else max(44.0, 26 / math.sin(math.pi / n))
    step = (-2 if n == 3 else 2) * math.pi / n
    angles = [step * k + (math.pi if n < 3 else -math.pi / 2) for k in range(n)]
    ring = [(radius * math.cos(t), radius * math.sin(t)) for t in angles]
    left, top = (min(p[i] for p in ring) - RADIUS - 2 for i in (0, 1))
    return [(x - left, y - top) for x, y in ring]


def _shifted_arrow(a: Point, b: Point, shift: float, cyclic: bool) -> tuple[Shape, ...]:
    """Return an arrow between two circles, shifted so that opposite arrows do not overlap."""
    style, head = ("wrong", "bad") if cyclic else ("mean", "full")
    ux, uy = ((q - p) / math.dist(a, b) for p, q in zip(a, b, strict=True))
    inset = RADIUS + GAP
    start = a[0] + inset * ux - shift * uy, a[1] + inset * uy + shift * ux
    end = b[0] - inset * ux - shift * uy, b[1] - inset * uy + shift * ux
    return arrow(start, end, style, head)


def _reaches(a: object, b: object, edges: Iterable[tuple[object, object]]) -> bool:
    """Return True if there is a path from ``a`` to ``b``."""
    reached, pending = set(), [a]
    while pending:
        reached.add(node := pending.pop())
        pending += [end for start, end in edges if start == node and end not in reached]
    return b in reached
