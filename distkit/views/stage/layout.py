"""Arranges the ranks on a stage. No side effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from distkit.trace.log import grouped

if TYPE_CHECKING:
    from distkit.views.stage.projection import Stage

Pair = tuple[int, int]
Point = tuple[float, float]


def arrange(ranks: Sequence[int], hosts: Mapping[int, str]) -> dict[int, Point]:
    """Return the position of every rank, x and y in [0, 1].

    The ranks of each host form a row. On a single host, the ranks form a circle.

    Args:
        ranks: all ranks.
        hosts: host names by rank, if there are several.

    >>> arrange([0, 1, 2, 3], {})[0]
    (0.5, 0.0)
    """
    rows = [*grouped(ranks, hosts.get).values()]
    return _rows(rows) if 1 < len(rows) < len(ranks) else _circle(ranks)


def _circle(ranks: Sequence[int]) -> dict[int, Point]:
    """Place the ranks clockwise from the top, and two ranks side by side."""
    n, first = len(ranks), math.pi if len(ranks) == 2 else -math.pi / 2
    angles = [first + 2 * math.pi * i / n for i in range(n)]
    return {
        rank: (round(0.5 + math.cos(angle) / 2, 4), round(0.5 + math.sin(angle) / 2, 4))
        for rank, angle in zip(ranks, angles, strict=True)
    }


def _rows(rows: Sequence[Sequence[int]]) -> dict[int, Point]:
    """Place centered rows from top to bottom, with equal distances between ranks."""
    longest = max(map(len, rows))
    return {
        rank: (
            round(0.5 + (i - (len(row) - 1) / 2) / max(longest - 1, 1), 4),
            round(y / (len(rows) - 1), 4),
        )
        for y, row in enumerate(rows)
        for i, rank in enumerate(row)
    }


#: Maximum numbers of ranks with strips, and of ranks with numbers.
MAX_STRIPS, MAX_NUMBERS = 12, 40
#: Horizontal gap between cards, its minimum, vertical gap between cards, margin of the field, gap
#: between a badge and its strip, maximum width of the field [px].
CARD_GAP, MIN_CARD_GAP, ROW_GAP, FIELD_MARGIN, BADGE_GAP, MAX_WIDTH = 62, 30, 46, 14, 6, 860
#: Width of a chunk, minimum and maximum width of a strip, and its approximate height; height of a
#: host's name above its cards [px].
CHUNK_WIDTH, MIN_STRIP_WIDTH, MAX_STRIP_WIDTH, STRIP_HEIGHT, NAME_HEIGHT = 36, 72, 180, 50, 16


class Field:
    """The geometry of a stage: a card per rank, with a badge and a strip for its tensor.

    ``centers`` contains the center of each card. ``card`` is the size of a card, and ``strip`` the
    size of a strip. With more than ``MAX_STRIPS`` ranks, a card is only a badge of ``radius``.
    """

    def __init__(self, stage: Stage) -> None:
        n, names = len(stage.places), stage.names.items()
        most = max((len(change.pieces) for _, change in stage.changes), default=0)
        self.strip = (0.0, 0.0)
        self.radius = 22 if n <= 8 else 12 if n <= MAX_NUMBERS else 4
        if most and n <= MAX_STRIPS:
            layer = max(2, round(STRIP_HEIGHT / n))  # a whole number of pixels per rank
            self.strip = (
                float(min(max(MIN_STRIP_WIDTH, CHUNK_WIDTH * most), MAX_STRIP_WIDTH)),
                float(n * layer),
            )
            self.radius = 15
        #: Space above the cards for the names of ranks and of hosts.
        self.rank_gap = 15 if any(name != f"rank {rank}" for rank, name in names) else 0
        self.host_gap = NAME_HEIGHT if stage.hosts else 0
        x_spread, y_spread = self._spread([*stage.places.values()])
        w, h = self.card
        self.width = x_spread + w + 2 * FIELD_MARGIN
        self.height = y_spread + h + 2 * FIELD_MARGIN + self.rank_gap + self.host_gap
        left, top = FIELD_MARGIN + w / 2, FIELD_MARGIN + h / 2 + self.rank_gap + self.host_gap
        self.centers: dict[int, Point] = {
            rank: (round(left + x * x_spread), round(top + y * y_spread))
            for rank, (x, y) in stage.places.items()
        }
        self._host_of = stage.hosts

    @property
    def hosts(self) -> dict[str, tuple[float, float, float, float]]:
        """The area of each host's name and cards: left, top, right and bottom."""
        (w, h), space = self.card, self.rank_gap + self.host_gap
        areas = {}
        for host, ranks in grouped(self._host_of, lambda rank: self._host_of[rank]).items():
            xs, ys = zip(*(self.centers[rank] for rank in ranks), strict=True)
            left, right = min(xs) - w / 2, max(xs) + w / 2
            areas[host] = left, min(ys) - h / 2 - space, right, max(ys) + h / 2
        return areas

    @property
    def card(self) -> tuple[float, float]:
        """Width and height of a card."""
        strip, high = self.strip
        badge = 2 * self.radius
        return (badge + BADGE_GAP + strip if strip else badge), max(high, badge)

    def cell(self, rank: int, i: int, count: int) -> tuple[float, float, float]:
        """Return the upper left corner and the width of a piece of a rank's tensor."""
        (x, y), (w, _), (strip, high) = self.centers[rank], self.card, self.strip
        return x + w / 2 - strip + i * strip / count, y - high / 2, strip / count

    def badge(self, rank: int) -> Point:
        """Return the center of a rank's badge."""
        x, y = self.centers[rank]
        return x - self.card[0] / 2 + self.radius, y

    def ends(self, a: int, b: int, offset: float = 0) -> tuple[Point, Point]:
        """Return the ends of a line from the edge of one card to the edge of another."""
        (x1, y1), (x2, y2) = self.edge(a, self.centers[b]), self.edge(b, self.centers[a])
        length = math.dist(self.centers[a], self.centers[b]) or 1.0
        dx = -offset * (self.centers[b][1] - self.centers[a][1]) / length
        dy = offset * (self.centers[b][0] - self.centers[a][0]) / length
        return (x1 + dx, y1 + dy), (x2 + dx, y2 + dy)

    def edge(self, rank: int, to: Point) -> Point:
        """Return the point on a card's edge that faces another point."""
        (x, y), (w, h) = self.centers[rank], self.card
        length = math.dist((x, y), to) or 1.0
        ux, uy = (to[0] - x) / length, (to[1] - y) / length
        distance = min((w / 2 + 6) / max(abs(ux), 1e-9), (h / 2 + 6) / max(abs(uy), 1e-9))
        distance = min(distance, 0.45 * length)
        return x + ux * distance, y + uy * distance

    def hub(self, members: Iterable[int]) -> Point:
        """Return the center of a collective's members."""
        points = [self.centers[rank] for rank in members if rank in self.centers] or [(0.0, 0.0)]
        return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)

    def _spread(self, places: Sequence[Point]) -> tuple[float, float]:
        """Return the distances between the outermost cards at which no cards overlap."""
        n, (w, h), levels = len(places), self.card, len({y for _, y in places})
        circle = n > 2 and not self.host_gap
        height = max(levels - 1, 0) * (h + ROW_GAP + self.rank_gap)
        if circle:
            height = 230 if n <= 4 else 310
        if n > MAX_STRIPS:
            return 700, 400
        distances = [
            abs(x1 - x2)
            for i, (x1, y1) in enumerate(places)
            for x2, y2 in places[:i]
            if abs(y1 - y2) * height < h + 12 + self.rank_gap
        ]
        min_distance = min(distances, default=1.0) or 1.0
        available = MAX_WIDTH - 2 * FIELD_MARGIN
        if (
            self.strip[0]
            and (excess := w - (min_distance * available - MIN_CARD_GAP) / (1 + min_distance)) > 0
        ):
            self.strip = max(8.0, self.strip[0] - excess), self.strip[1]
        gap = CARD_GAP if self.strip[0] and n > 2 else 2 * CARD_GAP
        width = min((self.card[0] + gap) / min_distance, available - self.card[0])
        return (max(width, 1.15 * height) if circle else width), height
