"""Arrangements of ranks on a stage, chosen by the messages, and their places. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from distkit.trace.log import grouped

if TYPE_CHECKING:
    from distkit.views.stage.projection import Stage

Pair = tuple[int, int]
Point = tuple[float, float]

#: The numbers of ranks of a ring that is drawn along the edges of a square.
SQUARE = range(7, 17)
#: The arrangements, of which ``pattern`` chooses one.
KINDS = ("circle", "ring", "star", "tree", "hypercube", "grid", "hosts", "roles")


def pattern(
    ranks: Sequence[int],
    sent: Sequence[Pair],
    roles: Mapping[int, str] | None = None,
    hosts: Mapping[int, str] | None = None,
) -> str:
    """Return the arrangement that fits a run: one of ``KINDS``.

    Servers and a scheduler get a separate row, and so do the ranks of each of several hosts.
    Otherwise the messages decide: a ring if all messages are between neighbours, a star if one rank
    takes part in every message, a tree if there is no cycle, a hypercube if the numbers of partners
    differ in one bit, a grid if partners are neighbours in rows and columns, else a circle.

    Args:
        ranks: all ranks.
        sent: (sender, receiver) of each message, in the order of sending.
        roles: roles by rank, such as "server".
        hosts: host names by rank.

    >>> pattern(range(4), [(0, 1), (1, 2), (2, 3)]), pattern(range(4), [(1, 0), (2, 0), (3, 0)])
    ('ring', 'star')
    """
    if len(set((roles or {}).values()) & {"worker", "server", "scheduler"}) > 1:
        return "roles"
    sizes = Counter((hosts or {}).values())
    if len(sizes) > 1 and max(sizes.values()) > 1:
        return "hosts"
    edges = {(min(p), max(p)) for p in sent if p[0] != p[1]}
    return (_shape(list(ranks), edges) if edges else "") or "circle"


def _shape(ranks: list[int], edges: set[Pair]) -> str:
    """Return the first shape that contains all these edges, or ""."""
    n = len(ranks)
    at = {rank: i for i, rank in enumerate(ranks)}
    ends = [(at[a], at[b]) for a, b in edges if a in at and b in at]
    if all((b - a) % n in (1, n - 1) for a, b in ends):
        return "ring"
    if any(all(hub in edge for edge in ends) for hub in ends[0]):
        return "star"
    if _acyclic(ends):
        return "tree"
    if n & (n - 1) == 0 and all((a ^ b).bit_count() == 1 for a, b in ends):
        return "hypercube"
    return "grid" if _columns(n, ends) else ""


def _acyclic(edges: Iterable[Pair]) -> bool:
    """Return True if there is no cycle: leaves can be taken off until nothing is left."""
    left = set(edges)
    while left:
        degree = Counter(chain.from_iterable(left))
        inner = {(a, b) for a, b in left if degree[a] > 1 and degree[b] > 1}
        if inner == left:
            return False
        left = inner
    return True


def _columns(n: int, edges: list[Pair] | None = None) -> int:
    """Return the columns of a grid of ``n`` ranks in which all edges join neighbours, or 0."""
    for rows in range(math.isqrt(n), 1, -1):
        columns = n // rows
        if rows * columns == n and all(_near(a, b, rows, columns) for a, b in edges or ()):
            return columns
    return 0


def _near(a: int, b: int, rows: int, columns: int) -> bool:
    """Return True if two places are neighbours in a row or a column, including around the edge."""
    down, across = abs(a // columns - b // columns), abs(a % columns - b % columns)
    return (down, across) in {(0, 1), (1, 0), (0, columns - 1), (rows - 1, 0)}


def arrange(
    kind: str,
    ranks: Sequence[int],
    sent: Sequence[Pair] = (),
    roles: Mapping[int, str] | None = None,
    hosts: Mapping[int, str] | None = None,
) -> dict[int, Point]:
    """Return the position of every rank: x, y in [0, 1]; arguments as in :func:`pattern`.

    >>> arrange("ring", [0, 1, 2, 3])[0]
    (0.5, 0.0)
    """
    if kind in _SHAPES:
        return _SHAPES[kind](list(ranks), sent)
    if kind == "roles":
        serving = {r for r, role in (roles or {}).items() if role in ("server", "scheduler")}
        rows = grouped(sorted(ranks, key=lambda r: (r in serving, r)), lambda r: r in serving)
        return _rows([*rows.values()])
    return _rows([*grouped(ranks, lambda r: (hosts or {}).get(r, "")).values()])


def _ring(ranks: list[int], sent: Sequence[Pair] = ()) -> dict[int, Point]:
    """Clockwise from the top; two ranks side by side, some along the edges of a square."""
    if len(ranks) in SQUARE:
        return dict(zip(ranks, _along_edges(len(ranks)), strict=True))
    n, first = len(ranks), math.pi if len(ranks) == 2 else -math.pi / 2
    return {rank: _around(first + 2 * math.pi * i / n) for i, rank in enumerate(ranks)}


def _along_edges(n: int) -> Iterator[Point]:
    """Clockwise from the upper left corner, with space for wide cards."""
    beside = 1 if n < 11 else 2 if n < 15 else 3  # between the corners, on the left and the right
    above = (n - 2 * beside + 1) // 2
    below = n - 2 * beside - above
    sides = [round((i + 1) / (beside + 1), 4) for i in range(beside)]
    yield from ((round(i / (above - 1), 4), 0.0) for i in range(above))
    yield from ((1.0, y) for y in sides)
    yield from ((round(1 - i / (below - 1), 4), 1.0) for i in range(below))
    yield from ((0.0, y) for y in reversed(sides))


def _around(angle: float) -> Point:
    x, y = round(math.cos(angle), 4) + 0.0, round(math.sin(angle), 4) + 0.0
    return (round(0.5 + x / 2, 4), round(0.5 + y / 2, 4))


def _star(ranks: list[int], sent: Sequence[Pair]) -> dict[int, Point]:
    """Return the rank with the most messages in the middle, the others around it."""
    count = Counter(chain.from_iterable(sent))
    hub = max(ranks, key=lambda rank: (count[rank], -rank), default=None)
    others = _ring([rank for rank in ranks if rank != hub])
    return others if hub is None else {hub: (0.5, 0.5), **others}


def _tree(ranks: list[int], sent: Sequence[Pair]) -> dict[int, Point]:
    """Return the root on top, and every rank below it by its number of hops."""
    joined: dict[int, dict[int, None]] = defaultdict(dict)
    for a, b in sent:
        joined[a][b] = joined[b][a] = None
    root, above = root_of(ranks, sent), dict[int, int | None]()  # its parent by rank, as in a walk
    stack: list[tuple[int, int | None]] = [(rank, None) for rank in reversed(ranks)]
    stack.append((root, None))
    while stack:
        rank, parent = stack.pop()
        if rank not in above and rank in ranks:
            above[rank] = parent
            stack += [(other, rank) for other in reversed(joined[rank])]
    below = grouped(above, above.__getitem__)
    depth: dict[int | None, int] = {None: -1}
    for rank, parent in above.items():
        depth[rank] = depth[parent] + 1
    slots = {rank: float(i) for i, rank in enumerate(r for r in above if r not in below)}
    for rank in (r for r in reversed(above) if r in below):
        slots[rank] = sum(slots[child] for child in below[rank]) / len(below[rank])
    deep, wide = (max([1, *places.values()]) for places in (depth, slots))
    return {rank: (round(slots[rank] / wide, 4), round(depth[rank] / deep, 4)) for rank in above}


def root_of(ranks: Sequence[int], sent: Sequence[Pair]) -> int:
    """Return the root of a tree: the only rank that sends first, or the last sender."""
    first: dict[int, int] = {}  # the sender of each rank's first message
    for a, b in sent:
        first.setdefault(a, a)
        first.setdefault(b, a)
    starters = [rank for rank in first if first[rank] == rank]
    if len(starters) == 1:
        return starters[0]
    senders = [a for a, _ in sent]
    when = {rank: senders.index(rank) if rank in senders else len(sent) for rank in first}
    return max(when, key=lambda rank: (when[rank], -rank), default=min(ranks, default=0))


def _grid(ranks: list[int], sent: Sequence[Pair] = ()) -> dict[int, Point]:
    at = {rank: i for i, rank in enumerate(ranks)}
    edges = [(at[a], at[b]) for a, b in set(sent) if a in at and b in at]
    n = len(ranks)
    columns = _columns(n, edges) or _columns(n) or max(1, math.ceil(math.sqrt(n)))
    return _rows([ranks[i : i + columns] for i in range(0, n, columns)])


def _rows(rows: Sequence[Sequence[int]]) -> dict[int, Point]:
    """Centered rows from top to bottom, with equal distances between ranks."""
    wide, deep = max(map(len, rows), default=1), len(rows)
    return {
        rank: (
            round(0.5 + (i - (len(row) - 1) / 2) / max(wide - 1, 1), 4),
            round(y / (deep - 1), 4) if deep > 1 else 0.5,
        )
        for y, row in enumerate(rows)
        for i, rank in enumerate(row)
    }


_SHIFTS = ((1.0, 0.0), (0.0, 1.0), (0.38, -0.3), (1.9, 0.0), (0.0, 1.9))


def _hypercube(ranks: list[int], sent: Sequence[Pair] = ()) -> dict[int, Point]:
    """Shift a rank by each bit of its number; place more than 32 ranks in a grid."""
    if not 0 < len(ranks) <= 2 ** len(_SHIFTS):
        return _grid(ranks)
    points = [
        tuple(sum(_SHIFTS[k][axis] for k in range(len(_SHIFTS)) if i >> k & 1) for axis in (0, 1))
        for i in range(len(ranks))
    ]
    low = [min(p[axis] for p in points) for axis in (0, 1)]
    size = [max(p[axis] for p in points) - low[axis] or 1.0 for axis in (0, 1)]
    return {
        rank: (round((p[0] - low[0]) / size[0], 4), round((p[1] - low[1]) / size[1], 4))
        for rank, p in zip(ranks, points, strict=True)
    }


_SHAPES: dict[str, Callable[[list[int], Sequence[Pair]], dict[int, Point]]] = {
    "circle": _ring,
    "ring": _ring,
    "star": _star,
    "tree": _tree,
    "grid": _grid,
    "hypercube": _hypercube,
}


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

    def __init__(self, stage: Stage) -> None:
        n, names = len(stage.places), stage.names.items()
        most = max((len(change.pieces) for _, change in stage.changes), default=0)
        self.strip = (_wide(most), _high(n)) if most and n <= STRIPS else (0.0, 0.0)
        self.radius = _radius(n, strips=bool(self.strip[0]))
        #: Space above the cards for names of ranks, and for those of hosts.
        self.above = 15 if any(name != f"rank {rank}" for rank, name in names) else 0
        self.named = NAMED if stage.hosts else 0
        wide, deep = self._spread(stage)
        w, h = self.card
        self.width = wide + w + 2 * EDGE
        self.height = deep + h + 2 * EDGE + self.above + self.named
        left, top = EDGE + w / 2, EDGE + h / 2 + self.above + self.named
        self.at: dict[int, Point] = {
            rank: (round(left + x * wide), round(top + y * deep))
            for rank, (x, y) in stage.places.items()
        }
        self._host_of = stage.hosts

    @property
    def hosts(self) -> dict[str, tuple[float, float, float, float]]:
        """The area of each host's cards and its name: left, top, right and bottom."""
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
        """Return the upper left corner of a piece of a rank's tensor, and its width."""
        (x, y), (w, _), (strip, high) = self.at[rank], self.card, self.strip
        return x + w / 2 - strip + i * strip / of, y - high / 2, strip / of

    def badge(self, rank: int) -> Point:
        """Return the center of a rank's badge."""
        x, y = self.at[rank]
        return x - self.card[0] / 2 + self.radius, y

    def ends(self, a: int, b: int, aside: float = 0) -> tuple[Point, Point]:
        """Return a line from the edge of one card to the edge of another."""
        (x1, y1), (x2, y2) = self.edge(a, self.at[b]), self.edge(b, self.at[a])
        length = math.dist(self.at[a], self.at[b]) or 1.0
        dx = -aside * (self.at[b][1] - self.at[a][1]) / length
        dy = aside * (self.at[b][0] - self.at[a][0]) / length
        return (x1 + dx, y1 + dy), (x2 + dx, y2 + dy)

    def edge(self, rank: int, to: Point) -> Point:
        """Return the point at the edge of a card towards another point."""
        (x, y), (w, h) = self.at[rank], self.card
        length = math.dist((x, y), to) or 1.0
        ux, uy = (to[0] - x) / length, (to[1] - y) / length
        if self.strip[0]:
            far = min((w / 2 + 6) / max(abs(ux), 1e-9), (h / 2 + 6) / max(abs(uy), 1e-9))
        else:
            far = self.radius + 4
        far = min(far, 0.45 * length)
        return x + ux * far, y + uy * far

    def hub(self, members: Iterable[int]) -> Point:
        """Return the center of a collective's members, where they meet."""
        points = [self.at[rank] for rank in members if rank in self.at] or [(0.0, 0.0)]
        return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)

    def _spread(self, stage: Stage) -> tuple[float, float]:
        """Return the distances of the outermost cards, such that none overlap."""
        places, n = [*stage.places.values()], len(stage.places)
        _, h = self.card
        levels = len({y for _, y in places})
        down = h + AWAY + self.above
        deep = (levels - 1) * down
        circle = stage.kind in ROUND and n > 2 and n not in SQUARE
        if circle:
            deep = 230 if n <= 4 else 310 if n <= STRIPS else 400
        deep = min(deep, 430) if self.strip[0] else min(max(deep, 300), 460)
        if n > STRIPS:
            return 700, deep
        apart = [
            abs(x1 - x2)
            for i, (x1, y1) in enumerate(places)
            for x2, y2 in places[:i]
            if abs(y1 - y2) * deep < h + 12 + self.above
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


def _wide(pieces: int) -> float:
    return max(72.0, pieces * (36.0 if pieces <= 4 else 24.0 if pieces <= 8 else 11.0))


def _high(ranks: int) -> float:
    """Return a whole number of pixels for each rank's layer."""
    return float(max(1, ranks) * max(2, round(50 / max(1, ranks))))


def _radius(ranks: int, strips: bool) -> float:
    if strips:
        return 15 if ranks <= 8 else 12
    return 22 if ranks <= 8 else 17 if ranks <= STRIPS else 12 if ranks <= NUMBERS else 4
