"""Positions of a stage's ranks and their tensors, in pixels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from distkit.views.scene.frame import Json
from distkit.views.stage.layout import SQUARE, Point

#: The largest numbers of ranks with a strip, and with a number.
STRIPS, NUMBERS = 16, 40
#: Pixels between two cards, side by side, at least, and one below the other; at the edge, between
#: a badge and its strip; the widest field.
APART, NEAR, AWAY, EDGE, GAP, WIDEST = 62, 30, 46, 14, 6, 860
#: Pixels for the name of a host, above its cards.
NAMED = 16
ROUND = ("circle", "ring", "star")


class Field:
    """A card per rank: a badge with the rank's number, and a strip for its tensor.

    ``at`` has the center of each card, ``card`` its size, ``strip`` the size of a strip; with more
    than ``STRIPS`` ranks a card is only a badge of ``radius``.
    """

    def __init__(self, stage: Json) -> None:
        nodes, n = stage["nodes"], len(stage["nodes"])
        most = max((len(c["pieces"]) for c in stage["changes"]), default=0)
        self.strip = (_wide(most), _high(n)) if most and n <= STRIPS else (0.0, 0.0)
        self.radius = _radius(n, strips=bool(self.strip[0]))
        self.above = 15 if any(node["name"] != f"rank {node['rank']}" for node in nodes) else 0
        #: Space above the cards for the hosts' names.
        self.named = NAMED if any("host" in node for node in nodes) else 0
        wide, deep = self._spread(stage)
        w, h = self.card
        self.width = wide + w + 2 * EDGE
        self.height = deep + h + 2 * EDGE + self.above + self.named
        left, top = EDGE + w / 2, EDGE + h / 2 + self.above + self.named
        self.at: dict[int, Point] = {
            node["rank"]: (round(left + node["x"] * wide), round(top + node["y"] * deep))
            for node in nodes
        }
        self._host_of = {node["rank"]: node["host"] for node in nodes if "host" in node}

    @property
    def hosts(self) -> dict[str, list[Point]]:
        """The corners of the area of each host's cards and its name."""
        (w, h), above = self.card, self.above + self.named
        corners: dict[str, list[Point]] = defaultdict(list)
        for rank, host in self._host_of.items():
            x, y = self.at[rank]
            corners[host] += [
                (x + side, y + end) for side in (-w / 2, w / 2) for end in (-h / 2 - above, h / 2)
            ]
        return {host: hull(points) for host, points in corners.items()}

    @property
    def card(self) -> tuple[float, float]:
        """Width and height of a card."""
        strip, high = self.strip
        badge = 2 * self.radius
        return (badge + GAP + strip if strip else badge), max(high, badge)

    def cell(self, rank: int, i: int, of: int) -> tuple[float, float, float]:
        """The upper left corner of a piece of a rank's tensor, and its width."""
        (x, y), (w, _), (strip, high) = self.at[rank], self.card, self.strip
        return x + w / 2 - strip + i * strip / of, y - high / 2, strip / of

    def badge(self, rank: int) -> Point:
        """The center of a rank's badge."""
        x, y = self.at[rank]
        return x - self.card[0] / 2 + self.radius, y

    def ends(self, a: int, b: int, aside: float = 0) -> tuple[Point, Point]:
        """A line from the edge of one card to the edge of another."""
        (x1, y1), (x2, y2) = self.edge(a, self.at[b]), self.edge(b, self.at[a])
        length = math.dist(self.at[a], self.at[b]) or 1.0
        dx = -aside * (self.at[b][1] - self.at[a][1]) / length
        dy = aside * (self.at[b][0] - self.at[a][0]) / length
        return (x1 + dx, y1 + dy), (x2 + dx, y2 + dy)

    def edge(self, rank: int, to: Point) -> Point:
        """The point at the edge of a card towards another point."""
        (x, y), (w, h) = self.at[rank], self.card
        length = math.dist((x, y), to) or 1.0
        ux, uy = (to[0] - x) / length, (to[1] - y) / length
        if self.strip[0]:
            far = min((w / 2 + 6) / max(abs(ux), 1e-9), (h / 2 + 6) / max(abs(uy), 1e-9))
        else:
            far = self.radius + 4
        far = min(far, 0.45 * length)
        return x + ux * far, y + uy * far

    def hub(self, members: list[int]) -> Point:
        """The center of a collective's members, where they meet."""
        points = [self.at[rank] for rank in members if rank in self.at] or [(0.0, 0.0)]
        return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)

    def _spread(self, stage: Json) -> tuple[float, float]:
        """The distances of the outermost cards, such that none overlap."""
        nodes, n = stage["nodes"], len(stage["nodes"])
        _, h = self.card
        levels = len({node["y"] for node in nodes})
        down = h + AWAY + self.above
        deep = (levels - 1) * down
        circle = stage["kind"] in ROUND and n > 2 and n not in SQUARE
        if circle:
            deep = 230 if n <= 4 else 310 if n <= STRIPS else 400
        deep = min(deep, 430) if self.strip[0] else min(max(deep, 300), 460)
        if n > STRIPS:
            return 700, deep
        apart = [
            abs(a["x"] - b["x"])
            for i, a in enumerate(nodes)
            for b in nodes[:i]
            if abs(a["y"] - b["y"]) * deep < h + 12 + self.above
        ]
        least = min(apart, default=1.0) or 1.0
        w, room = self.card[0], WIDEST - 2 * EDGE
        if self.strip[0] and (over := w - (least * room - NEAR) / (1 + least)) > 0:
            self.strip = max(8.0, self.strip[0] - over), self.strip[1]
        gap = APART if self.strip[0] and n > 2 else 2 * APART
        wide = min((self.card[0] + gap) / least, room - self.card[0])
        if circle:
            return max(wide, 1.15 * deep), deep
        return wide, max(deep, min(0.5 * wide, 130 * (levels - 1), 430))


def hull(points: Iterable[Point]) -> list[Point]:
    """The corners of the convex hull of these points.

    >>> hull([(0, 0), (2, 0), (1, 1), (2, 2), (0, 2)])
    [(0, 0), (2, 0), (2, 2), (0, 2)]
    """

    def half(ordered: Iterable[Point]) -> list[Point]:
        found: list[Point] = []
        for x, y in ordered:
            while len(found) > 1 and _turn(found[-2], found[-1], (x, y)) <= 0:
                found.pop()
            found.append((x, y))
        return found[:-1]

    ordered = sorted(set(points))
    return half(ordered) + half(reversed(ordered))


def _turn(a: Point, b: Point, c: Point) -> float:
    """Positive if the path over these points turns towards the y axis."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _wide(pieces: int) -> float:
    return max(72.0, pieces * (36.0 if pieces <= 4 else 24.0 if pieces <= 8 else 11.0))


def _high(ranks: int) -> float:
    """A whole number of pixels for each rank's layer."""
    return float(max(1, ranks) * max(2, round(50 / max(1, ranks))))


def _radius(ranks: int, strips: bool) -> float:
    if strips:
        return 15 if ranks <= 8 else 12
    return 22 if ranks <= 8 else 17 if ranks <= STRIPS else 12 if ranks <= NUMBERS else 4
