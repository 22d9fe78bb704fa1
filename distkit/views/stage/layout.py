"""Arranges the ranks on a stage according to their messages. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from distkit.trace.log import grouped

if TYPE_CHECKING:
    from distkit.views.stage.projection import Stage

Pair = tuple[int, int]
Point = tuple[float, float]

#: The arrangements; ``pattern`` chooses one.
KINDS = ("circle", "ring", "star", "hosts")


def pattern(
    ranks: Sequence[int], sent: Sequence[Pair], hosts: Mapping[int, str] | None = None
) -> str:
    """Return the arrangement that fits a run: one of ``KINDS``.

    With several hosts, each host has a row. Otherwise the messages decide: a ring if all messages
    are between neighbours, a star if one rank takes part in every message, else a circle.

    Args:
        ranks: all ranks.
        sent: (sender, receiver) of each message, in the order of sending.
        hosts: host names by rank.

    >>> pattern(range(4), [(0, 1), (1, 2), (2, 3)]), pattern(range(4), [(1, 0), (2, 0), (3, 0)])
    ('ring', 'star')
    """
    sizes = Counter((hosts or {}).values())
    if len(sizes) > 1 and max(sizes.values()) > 1:
        return "hosts"
    index = {rank: i for i, rank in enumerate(ranks)}
    edges = {(index[min(p)], index[max(p)]) for p in sent if p[0] != p[1] and index.keys() >= {*p}}
    if not edges:
        return "circle"
    if all((b - a) % len(index) in (1, len(index) - 1) for a, b in edges):
        return "ring"
    hubs = [hub for hub in next(iter(edges)) if all(hub in edge for edge in edges)]
    return "star" if hubs else "circle"


def arrange(
    kind: str,
    ranks: Sequence[int],
    sent: Sequence[Pair] = (),
    hosts: Mapping[int, str] | None = None,
) -> dict[int, Point]:
    """Return the position of every rank, x and y in [0, 1].

    The arguments are those of :func:`pattern`, and its result ``kind``.

    >>> arrange("ring", [0, 1, 2, 3])[0]
    (0.5, 0.0)
    """
    if kind == "hosts":
        return _rows([*grouped(ranks, lambda r: (hosts or {}).get(r, "")).values()])
    return _star(ranks, sent) if kind == "star" else _ring(ranks)


def _ring(ranks: Sequence[int]) -> dict[int, Point]:
    """Place the ranks clockwise from the top, and two ranks side by side."""
    n, first = len(ranks), math.pi if len(ranks) == 2 else -math.pi / 2
    return {rank: _around(first + 2 * math.pi * i / n) for i, rank in enumerate(ranks)}


def _around(angle: float) -> Point:
    x, y = round(math.cos(angle), 4) + 0.0, round(math.sin(angle), 4) + 0.0
    return (round(0.5 + x / 2, 4), round(0.5 + y / 2, 4))


def _star(ranks: Sequence[int], sent: Sequence[Pair]) -> dict[int, Point]:
    """Place the rank with the most messages in the middle, the others around it."""
    count = Counter(chain.from_iterable(sent))
    hub = max(ranks, key=lambda rank: (count[rank], -rank), default=None)
    others = _ring([rank for rank in ranks if rank != hub])
    return others if hub is None else {hub: (0.5, 0.5), **others}


def _rows(rows: Sequence[Sequence[int]]) -> dict[int, Point]:
    """Place centered rows from top to bottom, with equal distances between ranks."""
    longest, count = max(map(len, rows), default=1), len(rows)
    return {
        rank: (
            round(0.5 + (i - (len(row) - 1) / 2) / max(longest - 1, 1), 4),
            round(y / (count - 1), 4) if count > 1 else 0.5,
        )
        for y, row in enumerate(rows)
        for i, rank in enumerate(row)
    }


#: Maximum numbers of ranks with strips, and of ranks with numbers.
STRIPS, NUMBERS = 12, 40
#: Horizontal distance of cards, its minimum, vertical distance of cards, margin of the field,
#: distance of a badge from its strip, maximum width of the field [px].
APART, NEAR, AWAY, EDGE, GAP, WIDEST = 62, 30, 46, 14, 6, 860
#: Height of a host's name above its cards [px].
NAMED = 16
ROUND = ("circle", "ring", "star")


class Field:
    """The geometry of a stage: a card per rank, with a badge and a strip for its tensor.

    ``at`` has the center of each card, ``card`` is the size of a card, ``strip`` that of a strip.
    With more than ``STRIPS`` ranks, a card is only a badge of ``radius``.
    """

    def __init__(self, stage: Stage) -> None:
        n, names = len(stage.places), stage.names.items()
        most = max((len(change.pieces) for _, change in stage.changes), default=0)
        self.strip = (_strip_width(most), _strip_height(n)) if most and n <= STRIPS else (0.0, 0.0)
        self.radius = _radius(n, strips=bool(self.strip[0]))
        #: Space above the cards for the names of ranks and of hosts.
        self.above = 15 if any(name != f"rank {rank}" for rank, name in names) else 0
        self.named = NAMED if stage.hosts else 0
        x_spread, y_spread = self._spread(stage)
        w, h = self.card
        self.width = x_spread + w + 2 * EDGE
        self.height = y_spread + h + 2 * EDGE + self.above + self.named
        left, top = EDGE + w / 2, EDGE + h / 2 + self.above + self.named
        self.at: dict[int, Point] = {
            rank: (round(left + x * x_spread), round(top + y * y_spread))
            for rank, (x, y) in stage.places.items()
        }
        self._host_of = stage.hosts

    @property
    def hosts(self) -> dict[str, tuple[float, float, float, float]]:
        """The area of each host's name and cards: left, top, right and bottom."""
        (w, h), above = self.card, self.above + self.named
        areas = {}
        for host, ranks in grouped(self._host_of, lambda rank: self._host_of[rank]).items():
            xs, ys = zip(*(self.at[rank] for rank in ranks), strict=True)
            left, right = min(xs) - w / 2, max(xs) + w / 2
            areas[host] = left, min(ys) - h / 2 - above, right, max(ys) + h / 2
        return areas

    @property
    def card(self) -> tuple[float, float]:
        """Width and height of a card."""
        strip, high = self.strip
        badge = 2 * self.radius
        return (badge + GAP + strip if strip else badge), max(high, badge)

    def cell(self, rank: int, i: int, of: int) -> tuple[float, float, float]:
        """Return the upper left corner and the width of a piece of a rank's tensor."""
        (x, y), (w, _), (strip, high) = self.at[rank], self.card, self.strip
        return x + w / 2 - strip + i * strip / of, y - high / 2, strip / of

    def badge(self, rank: int) -> Point:
        """Return the center of a rank's badge."""
        x, y = self.at[rank]
        return x - self.card[0] / 2 + self.radius, y

    def ends(self, a: int, b: int, offset: float = 0) -> tuple[Point, Point]:
        """Return the ends of a line from the edge of one card to the edge of another."""
        (x1, y1), (x2, y2) = self.edge(a, self.at[b]), self.edge(b, self.at[a])
        length = math.dist(self.at[a], self.at[b]) or 1.0
        dx = -offset * (self.at[b][1] - self.at[a][1]) / length
        dy = offset * (self.at[b][0] - self.at[a][0]) / length
        return (x1 + dx, y1 + dy), (x2 + dx, y2 + dy)

    def edge(self, rank: int, to: Point) -> Point:
        """Return the point on a card's edge that faces another point."""
        (x, y), (w, h) = self.at[rank], self.card
        length = math.dist((x, y), to) or 1.0
        ux, uy = (to[0] - x) / length, (to[1] - y) / length
        if self.strip[0]:
            distance = min((w / 2 + 6) / max(abs(ux), 1e-9), (h / 2 + 6) / max(abs(uy), 1e-9))
        else:
            distance = self.radius + 4
        distance = min(distance, 0.45 * length)
        return x + ux * distance, y + uy * distance

    def hub(self, members: Iterable[int]) -> Point:
        """Return the center of a collective's members."""
        points = [self.at[rank] for rank in members if rank in self.at] or [(0.0, 0.0)]
        return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)

    def _spread(self, stage: Stage) -> tuple[float, float]:
        """Return the distances between the outermost cards at which no cards overlap."""
        places, n = [*stage.places.values()], len(stage.places)
        _, h = self.card
        levels = len({y for _, y in places})
        pitch = h + AWAY + self.above
        height = (levels - 1) * pitch
        circle = stage.kind in ROUND and n > 2
        if circle:
            height = 230 if n <= 4 else 310 if n <= STRIPS else 400
        height = min(height, 430) if self.strip[0] else min(max(height, 300), 460)
        if n > STRIPS:
            return 700, height
        distances = [
            abs(x1 - x2)
            for i, (x1, y1) in enumerate(places)
            for x2, y2 in places[:i]
            if abs(y1 - y2) * height < h + 12 + self.above
        ]
        least = min(distances, default=1.0) or 1.0
        w, available = self.card[0], WIDEST - 2 * EDGE
        if self.strip[0] and (over := w - (least * available - NEAR) / (1 + least)) > 0:
            self.strip = max(8.0, self.strip[0] - over), self.strip[1]
        gap = APART if self.strip[0] and n > 2 else 2 * APART
        width = min((self.card[0] + gap) / least, available - self.card[0])
        if circle:
            return max(width, 1.15 * height), height
        return width, max(height, min(0.5 * width, 130 * (levels - 1), 430))


def _strip_width(pieces: int) -> float:
    return max(72.0, pieces * (36.0 if pieces <= 4 else 24.0 if pieces <= 8 else 11.0))


def _strip_height(ranks: int) -> float:
    """Return the height of a strip, an integer number of pixels per rank."""
    return float(max(1, ranks) * max(2, round(50 / max(1, ranks))))


def _radius(ranks: int, strips: bool) -> float:
    if strips:
        return 15 if ranks <= 8 else 12
    return 22 if ranks <= 8 else 17 if ranks <= STRIPS else 12 if ranks <= NUMBERS else 4
