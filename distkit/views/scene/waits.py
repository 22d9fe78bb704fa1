"""Draws the wait-for graph: a circle per rank, and an arrow to each rank it waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable

from distkit._format import named
from distkit.diagnosis.rank_state import RankState, RankStatus
from distkit.trace.log import grouped
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import Scene, Shape, arrow, circle, text, title
from distkit.views.scene.painter import body
from distkit.views.scene.theme import GRAY, INK, MARKS, rank_color

#: With more than MAX_RANKS ranks, those that wait for the same ranks share a circle. With more than
#: MAX_CIRCLES circles, there is no picture.
MAX_RANKS, MAX_CIRCLES = 6, 16
#: Radius of a circle, gap between a circle and its arrows, distance of parallel arrows [px].
RADIUS, GAP, APART = 15.0, 3.0, 11.0

#: Scale of the picture next to a notebook's error, and height of a rank's row [px].
ZOOM, ROW = 1.35, 22.0
#: Width of a letter in each column of the rows [px].
LETTERS = 7.4, 7.3, 7.3, 7.5
CODE = f'font-family="{svg.CODE}"'
#: Legend texts by style; the legend has only the styles in use.
LEGEND = {
    "held": "dashed: blocked",
    "own": "filled: not blocked",
    "wrong": "red: they wait for each other",
}

Point = tuple[float, float]


def waits(states: Iterable[RankState]) -> Json | None:
    """Return the wait-for graph as a scene with its styles; None if no rank waits.

    Blocked ranks have dashed circles. Red arrows form a cycle.

    >>> waits([RankState(0, RankStatus.RUNNING)]) is None
    True
    """
    known = {s.rank: s for s in states}
    waits_for = {s.rank: s.waits_for for s in known.values() if s.status is RankStatus.BLOCKED}
    ranks = sorted({*waits_for, *(other for others in waits_for.values() for other in others)})
    groups = grouped(ranks, waits_for.get) if len(ranks) > MAX_RANKS else grouped(ranks, int)
    nodes = [tuple(group) for group in groups.values()]
    if not waits_for or len(nodes) > MAX_CIRCLES:
        return None
    centers = dict(zip(nodes, _circle_positions(len(nodes)), strict=True))
    node = {r: group for group in nodes for r in group}
    edges = {(node[r], node[other]) for r, others in waits_for.items() for other in others}
    scene = Scene(*(max(p[i] for p in centers.values()) + RADIUS + 2 for i in (0, 1)))
    description = "; ".join(str(known[r]) for r in waits_for)
    scene.add(0, 0, title(description, aloud=True))
    for a, b in sorted(edges):
        if a != b:
            bad = _reaches(b, a, edges)
            scene.add(
                0, 0, *_shifted_arrow(centers[a], centers[b], "wrong" if bad else "answer", bad)
            )
    for group, (x, y) in centers.items():
        scene.add(x, y, *_circle(group, group[0] in waits_for), layer=1)
    plain = scene.plain()
    used = {style for _, style, *_ in plain["shapes"]}
    return {
        "scene": plain,
        "styles": {s: MARKS[s] for s in sorted(used & MARKS.keys())},
        "said": description,
    }


def waits_svg(states: Iterable[RankState]) -> str:
    """Return the graph with each rank's call and line as an SVG document; "" if no rank waits."""
    known = {s.rank: s for s in states}
    graph = waits(known.values())
    if graph is None:
        return ""
    scene = graph["scene"]
    circles = sorted((lane, name) for tag, _, lane, _, name in scene["shapes"] if tag == "text")
    rows = [_row(name, known[r]) for r, name in circles]
    columns = zip(*rows, strict=True)
    widths = [max(map(len, cells)) * w for cells, w in zip(columns, LETTERS, strict=True)]
    left, height = 40 + ZOOM * scene["width"], ZOOM * scene["height"]
    bottom = max(height, ROW * len(rows)) + 32
    transform = f"translate(16 {(bottom - height) / 2 - 2:.1f}) scale({ZOOM})"
    parts = [f'<g transform="{transform}">{body(scene, 0.0)}</g>']
    for n, ((r, _), row) in enumerate(zip(circles, rows, strict=True)):
        styles = ((rank_color(r), 'font-weight="700"'), (INK, CODE), (GRAY, CODE), (GRAY, ""))
        for k, (cells, style) in enumerate(zip(row, styles, strict=True)):
            y = bottom / 2 + (n - (len(rows) - 1) / 2) * ROW + 2
            parts.append(svg.text(left + sum(widths[:k]), y, cells, *style))
    legend = " · ".join(["arrow: waits for", *(LEGEND[s] for s in LEGEND if s in graph["styles"])])
    parts.append(svg.text(16, bottom, legend, GRAY, 'font-size="11"'))
    width = max(left + sum(widths) + 14, 32 + 5.8 * len(legend))
    return svg.document(width, bottom + 14, "who waits for whom", "".join(parts))


def _row(name: str, state: RankState) -> tuple[str, str, str, str]:
    """Return the names of a circle's ranks, and the call, tensor and line of its first rank."""
    call = f"{state.call() or state.status}  "
    tensor = f"{state.dtype}{list(state.shape)}  " if state.dtype else ""
    return f"rank{'s' * (not name.isdigit())} {name}  ", call, tensor, state.where


def _circle_positions(n: int) -> list[Point]:
    """Return positions on a circle, starting at the left for two, at the top for more."""
    radius = 36.0 if n < 4 else max(44.0, 26 / math.sin(math.pi / n))
    turns = [2 * math.pi * k / n + (math.pi if n < 3 else -math.pi / 2) for k in range(n)]
    ring = [(radius * math.cos(t), radius * math.sin(t)) for t in turns]
    left, top = (min(p[i] for p in ring) - RADIUS - 2 for i in (0, 1))
    return [(x - left, y - top) for x, y in ring]


def _circle(ranks: tuple[int, ...], blocked: bool) -> tuple[Shape, ...]:
    """Return the circle that some ranks share, with a label and a tooltip."""
    lane, style = ranks[0], "version" if blocked else "label"
    name, size = (str(ranks[0]), 12.5) if len(ranks) == 1 else (f"{ranks[0]}…{ranks[-1]}", 9.5)
    number = text(name, style, y=4, anchor="middle", lane=lane, size=size)
    tooltip = title(named(ranks))
    return tooltip, circle(RADIUS, "held" if blocked else "own", lane=lane), number


def _shifted_arrow(a: Point, b: Point, style: str, bad: bool) -> tuple[Shape, ...]:
    """Return an arrow between two circles, shifted so that opposite arrows do not overlap."""
    length = math.dist(a, b)
    ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
    side, inset = APART / 2, RADIUS + GAP
    start = a[0] + inset * ux - side * uy, a[1] + inset * uy + side * ux
    end = b[0] - inset * ux - side * uy, b[1] - inset * uy + side * ux
    return arrow(start, end, style, "bad" if bad else "gray")


def _reaches(a: object, b: object, edges: Iterable[tuple[object, object]]) -> bool:
    """Return True if there is a path from ``a`` to ``b``."""
    reached, pending = set(), [a]
    while pending:
        reached.add(node := pending.pop())
        pending += [end for start, end in edges if start == node and end not in reached]
    return b in reached
