"""Draws the stage: a card per rank with the chunks of its tensor, and moving messages.

projection.py positions the ranks and converts a run into rounds of keyframes, and contributions.py
traces the contributions of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

from distkit._format import joined
from distkit.trace.log import EventLog, grouped
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import (
    Scene,
    Shape,
    arrow,
    cached_drawing,
    circle,
    letters,
    line,
    path,
    picture,
    rect,
    text,
    title,
)
from distkit.views.stage.contributions import Change, Piece
from distkit.views.stage.projection import MAX_CALLS, Keyframe, Point, Stage, project

#: Layers, lowest first.
LINK, FLIGHT, CELL, CHUNK, DOT, TOKEN, BADGE = range(7)
#: At most MAX_ARROWS arrows are held at the end of a round. At most MAX_DIRECTED links show their
#: directions; if there are more, none does.
MAX_ARROWS, MAX_DIRECTED = 64, 24
#: Strips are drawn for at most MAX_STRIPS ranks, and rank numbers for at most MAX_NUMBERS ranks.
MAX_STRIPS, MAX_NUMBERS = 12, 40
#: Sizes [px]. BADGE_GAP is between a badge and its strip, and MAX_WIDTH is the maximum width of the
#: field.
CARD_GAP, MIN_CARD_GAP, ROW_GAP, FIELD_MARGIN, BADGE_GAP, MAX_WIDTH = 62, 30, 46, 14, 6, 860
#: Sizes of strips, of their chunks, and of host names [px]. The height of a strip is approximate.
CHUNK_WIDTH, MIN_STRIP_WIDTH, MAX_STRIP_WIDTH, STRIP_HEIGHT, NAME_HEIGHT = 36, 72, 180, 50, 16


def draw(trace: EventLog, *, live: bool = False, max_calls: int = MAX_CALLS) -> Json:
    """Return the picture of a run for the SVG and browser renderers. Its unit of time is the round.

    Args:
        trace: the run.
        live: whether the run is in progress.
        max_calls: maximum number of calls in the drawn keyframes; a note states how many are drawn.
    """
    stage = project(trace, live, max_calls)
    return picture(_Renderer(stage).scene, **stage.frame)


# -- geometry -----------------------------------------------------------------------------


class Field:
    """The geometry of a stage: a card per rank, with a badge and a strip for its tensor.

    ``centers`` contains the center of each card. ``card`` is the size of a card, and ``strip`` the
    size of a strip. With more than ``MAX_STRIPS`` ranks, or without known contributions, a card is
    only a badge of ``radius``.
    """

    def __init__(self, stage: Stage) -> None:
        n, names = len(stage.positions), stage.names.items()
        max_pieces = max((len(change.pieces) for _, change in stage.changes), default=0)
        self.strip = (0.0, 0.0)
        self.radius = 22 if n <= 8 else 12 if n <= MAX_NUMBERS else 4
        if max_pieces and n <= MAX_STRIPS:
            layer = max(2, round(STRIP_HEIGHT / n))  # a whole number of pixels per rank
            self.strip = (
                float(min(max(MIN_STRIP_WIDTH, CHUNK_WIDTH * max_pieces), MAX_STRIP_WIDTH)),
                float(n * layer),
            )
            self.radius = 15
        #: Space above the cards for the names of ranks and of hosts.
        self.rank_gap = 15 if any(name != f"rank {rank}" for rank, name in names) else 0
        self.host_gap = NAME_HEIGHT if stage.hosts else 0
        x_spread, y_spread = self._spread([*stage.positions.values()])
        w, h = self.card
        self.width = x_spread + w + 2 * FIELD_MARGIN
        self.height = y_spread + h + 2 * FIELD_MARGIN + self.rank_gap + self.host_gap
        left, top = FIELD_MARGIN + w / 2, FIELD_MARGIN + h / 2 + self.rank_gap + self.host_gap
        self.centers: dict[int, Point] = {
            rank: (round(left + x * x_spread), round(top + y * y_spread))
            for rank, (x, y) in stage.positions.items()
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
        strip, height = self.strip
        badge = 2 * self.radius
        return (badge + BADGE_GAP + strip if strip else badge), max(height, badge)

    def cell(self, rank: int, i: int, count: int) -> tuple[float, float, float]:
        """Return the upper left corner and the width of a piece of a rank's tensor."""
        (x, y), (w, _), (strip, height) = self.centers[rank], self.card, self.strip
        return x + w / 2 - strip + i * strip / count, y - height / 2, strip / count

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

    def _spread(self, positions: Sequence[Point]) -> tuple[float, float]:
        """Return the distances between the outermost cards; shorten strips if cards overlap."""
        n, (w, h), levels = len(positions), self.card, len({y for _, y in positions})
        circle = n > 2 and not self.host_gap
        height = max(levels - 1, 0) * (h + ROW_GAP + self.rank_gap)
        if circle:
            height = 230 if n <= 4 else 310
        if n > MAX_STRIPS:
            return 700, 400
        distances = [
            abs(x1 - x2)
            for i, (x1, y1) in enumerate(positions)
            for x2, y2 in positions[:i]
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


# -- marks --------------------------------------------------------------------------------


class _Renderer:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.field = Field(stage)
        self.strips = self.field.strip[0] > 0
        self.lanes = {rank: i for i, rank in enumerate(stage.names)}
        self.scene = Scene(self.field.width, self.field.height)
        self.piece_counts: dict[int, int] = {}  # number of pieces of each rank's tensor
        self._draw_hosts()
        self._draw_links()
        self._draw_badges()
        if self.strips:
            self._draw_tensors()
        for i, members in enumerate(stage.rounds):
            for n, keyframe in enumerate(members):
                self._draw_keyframe(i, keyframe.in_rounds(), n < MAX_ARROWS)

    # -- static marks --------------------------------------------------------------------

    def _draw_hosts(self) -> None:
        """Draw each host as an area around its cards, with a name."""
        for name, (left, top, right, bottom) in self.field.hosts.items():
            self.scene.add(left, top, rect(right - left, bottom - top, "host", r=4), layer=LINK)
            self.scene.add(left, top + 8, text(name, "place"), layer=BADGE)

    def _draw_links(self) -> None:
        """Draw a line between ranks that communicate, with directions if there are few lines."""
        links = sorted({(min(pair), max(pair)) for pair in self.stage.sent})
        ends = (self.field.ends(a, b) for a, b in links)
        d = "".join(f"M{a[0]:.0f} {a[1]:.0f}L{b[0]:.0f} {b[1]:.0f}" for a, b in ends)
        if d:
            self.scene.add(0, 0, path(d, "link"), layer=LINK)
        for a, b in sorted(self.stage.sent) if len(links) <= MAX_DIRECTED else []:
            _, head = arrow(*self.field.ends(a, b), "link", "direction")
            self.scene.add(0, 0, head, layer=LINK)

    def _draw_badges(self) -> None:
        """Draw a badge per rank, with a number if it fits, and any name other than "rank N"."""
        r = self.field.radius
        for rank, name in self.stage.names.items():
            lane, (x, y) = self.lanes[rank], self.field.badge(rank)
            self.scene.add(x, y, circle(r, "own", lane=lane), layer=BADGE)
            if len(self.lanes) <= MAX_NUMBERS:
                number = text(
                    str(rank),
                    "number",
                    y=r * 0.39,
                    anchor="middle",
                    lane=lane,
                    size=round(1.1 * r),
                )
                self.scene.add(x, y, number, layer=BADGE)
            if name != f"rank {rank}" and len(self.lanes) <= MAX_STRIPS:
                caption = text(name, "caption", y=-self.field.card[1] / 2 - 6, anchor="middle")
                self.scene.add(*self.field.centers[rank], caption, layer=BADGE)

    # -- tensors of ranks -----------------------------------------------------------------

    def _draw_tensors(self) -> None:
        """Draw each piece of each tensor between changes."""
        changes = grouped(self.stage.changes, lambda change: change[1].rank)
        nothing: tuple[Piece, ...] = ()
        for rank in self.lanes:
            rank_changes = changes.get(rank, [])
            contents = [
                *accumulate((change for _, change in rank_changes), _apply_change, initial=nothing)
            ]
            begins = [time for time, _ in rank_changes]
            spans = [*zip(begins, contents[1:], [*begins[1:], None], strict=False)]
            for n, group in groupby(spans, key=lambda span: len(span[1])):
                self._draw_strip(rank, n, [*group])
            self.piece_counts[rank] = len(contents[-1])
            # an empty strip is shown until the first change
            x, y, w = self.field.cell(rank, 0, 1)
            empty = rect(w - 1, self.field.strip[1] - 1, "slot", x=0.5, y=0.5, r=2)
            self.scene.add(x, y, empty, end=spans[0][0] if spans else None, layer=CELL)

    def _draw_strip(
        self, rank: int, n: int, spans: list[tuple[float, tuple[Piece, ...], float | None]]
    ) -> None:
        """Draw a rank's tensor, with chunk numbers, while it has n chunks."""
        (x, y, w), height = self.field.cell(rank, 0, n), self.field.strip[1]
        for i in range(n):
            cells = [(begin, pieces[i], end) for begin, pieces, end in spans]
            for _, group in groupby(cells, key=lambda cell: (cell[1].certain, cell[1].possible)):
                same = [*group]
                begin, piece, _ = same[0]
                shapes = *_tooltip(piece), *self._layers(piece, round(w, 2))
                self.scene.add(x + i * w, y, *shapes, begin=begin, end=same[-1][2], layer=CELL)
        if n < 2:
            return
        interval: Any = {"begin": spans[0][0], "end": spans[-1][2], "layer": CHUNK}
        cuts = path("".join(f"M{i * w:.1f} 0v{height:g}" for i in range(1, n)), "cut")
        self.scene.add(x, y, cuts, **interval)
        if n <= 10 and w > 16:
            centers = tuple(round((i + 0.5) * w, 1) for i in range(n))
            digits = "".join(map(str, range(n)))
            self.scene.add(x, y, letters(digits, "chunk", centers, y=height / 2 + 4.5), **interval)

    def _layers(self, piece: Piece, w: float) -> tuple[Shape, ...]:
        """Return the shapes of a piece's contributions."""
        certain, possible = (
            tuple(self.lanes[r] for r in sorted(ranks)) for ranks in (piece.certain, piece.possible)
        )
        return _contributions(certain, possible, w, self.field.strip[1], len(self.lanes))

    # -- messages --------------------------------------------------------------------------

    def _draw_keyframe(self, i: int, keyframe: Keyframe, holds: bool) -> None:
        if keyframe.meeting_time is not None:
            self._draw_collective(i, keyframe, keyframe.meeting_time)
        elif self.lanes.keys() >= {*keyframe.senders, *keyframe.receivers}:
            self._draw_message(i, keyframe, holds)

    def _draw_message(self, i: int, keyframe: Keyframe, holds: bool) -> None:
        """Draw an arrow, the moving piece, and the frame held at the end."""
        (src,), (dst,), end = keyframe.senders, keyframe.receivers, keyframe.end
        a, b = self.field.ends(src, dst, 5 if (dst, src) in self.stage.sent else 0)
        lane, lost, payload = self.lanes[src], end is None, keyframe.payload
        shapes = arrow(a, b, "lost" if lost else "flight", "bad" if lost else "own", lane=lane)
        self.scene.add(0, 0, *shapes, begin=keyframe.begin, end=end, layer=FLIGHT)
        if keyframe.sent:
            self._move_piece(keyframe, a, b)
        if lost or not holds:
            return
        self.scene.hold_frame(i, 0, 0, *arrow(a, b, "past", "own", lane=lane), layer=FLIGHT)
        if self.strips and payload.at is not None and self.piece_counts.get(dst) == payload.total:
            x, y, w = self.field.cell(dst, payload.at, payload.total)
            outline = rect(
                payload.count * w + 2, self.field.strip[1] + 3, "fresh", x=-1, y=-1.5, r=3
            )
            self.scene.hold_frame(i, x, y, outline, layer=BADGE)

    def _move_piece(self, keyframe: Keyframe, a: Point, b: Point) -> None:
        """Move a message's piece, or a dot if the piece is unknown or there are no strips."""
        payload, (src,), (dst,) = keyframe.payload, keyframe.senders, keyframe.receivers
        times: Any = {"begin": keyframe.begin, "end": keyframe.end}
        if not self.strips or not (payload.piece.certain or payload.piece.possible):
            self.scene.add(*a, *self._dot(src), to=b, layer=DOT, **times)
            return
        w, h = self.field.strip
        w = min(w * payload.count / payload.total - 2, 46)
        ends = self._end_point(keyframe, src, a), self._end_point(keyframe, dst, b)
        corner, to = ((x - w / 2, y - h / 2) for x, y in ends)
        digits = payload.chunks if payload.total <= 10 else ""
        parcel = _parcel(self._layers(payload.piece, w), w, h, digits)
        self.scene.add(*corner, *parcel, to=to, layer=TOKEN, **times)

    def _dot(self, rank: int) -> tuple[Shape, ...]:
        return (circle(min(8, self.field.radius * 0.8), "token", lane=self.lanes[rank]),)

    def _end_point(self, keyframe: Keyframe, rank: int, edge: Point) -> Point:
        """Return the end point of a piece: its position in a rank's tensor, or the card's edge."""
        payload = keyframe.payload
        if payload.at is None or self.piece_counts.get(rank) != payload.total:
            return edge
        x, y, w = self.field.cell(rank, payload.at, payload.total)
        return x + payload.count * w / 2, y + self.field.strip[1] / 2

    # -- collectives ------------------------------------------------------------------------

    def _draw_collective(self, i: int, keyframe: Keyframe, meeting_time: float) -> None:
        """Move a dot from each sender to the hub, and from the hub to each receiver."""
        hub, middle, begin = self.field.hub(keyframe.senders), circle(5, "hub"), keyframe.begin
        self.scene.add(*hub, middle, begin=begin, end=keyframe.end, layer=DOT)
        self.scene.hold_frame(i, *hub, middle, layer=DOT)
        ends = dict(zip(keyframe.senders, keyframe.ends, strict=True))
        homes = {rank: self.field.edge(rank, hub) for rank in ends if rank in self.lanes}
        flight, past = (
            [line(home, hub, style, lane=self.lanes[rank]) for rank, home in homes.items()]
            for style in ("flight", "past")
        )
        self.scene.add(0, 0, *flight, begin=begin, end=keyframe.end, layer=FLIGHT)
        self.scene.hold_frame(i, 0, 0, *past, layer=FLIGHT)
        for rank, home in homes.items():
            self._draw_member(keyframe, rank, home, hub, (begin, meeting_time, ends[rank]))

    def _draw_member(
        self,
        keyframe: Keyframe,
        rank: int,
        home: Point,
        hub: Point,
        times: tuple[float, float, float | None],
    ) -> None:
        root, (begin, meeting_time, end), dot = keyframe.root, times, self._dot(rank)
        sends = root is None or rank == root or not keyframe.members_receive
        receives = root is None or (rank != root) == keyframe.members_receive
        near = (home[0] + 0.94 * (hub[0] - home[0]), home[1] + 0.94 * (hub[1] - home[1]))
        if sends:
            self.scene.add(*home, *dot, begin=begin, end=meeting_time, to=near, layer=DOT)
        if receives and end is not None:
            self.scene.add(*near, *dot, begin=max(meeting_time, begin), end=end, to=home, layer=DOT)
        elif sends and end is None:
            self.scene.add(*near, *dot, begin=meeting_time, layer=DOT)


def _apply_change(pieces: tuple[Piece, ...], change: Change) -> tuple[Piece, ...]:
    """Return the pieces of a tensor after a change."""
    if (first := change.at) is None:
        return change.pieces
    return (
        (*pieces[:first], *change.pieces, *pieces[first + len(change.pieces) :]) if pieces else ()
    )


@cached_drawing
def _tooltip(piece: Piece) -> tuple[Shape, ...]:
    """Return the tooltip of a chunk, which lists its contributions."""
    parts = (
        ("contributions of", piece.certain),
        ("possible contributions of", piece.possible),
    )
    lines = [
        f"{label} rank{'s' * (len(ranks) > 1)} {joined([str(r) for r in sorted(ranks)])}"
        for label, ranks in parts
        if ranks
    ]
    return (title("; ".join(lines)),) if lines else ()


@cached_drawing
def _contributions(
    certain: tuple[int, ...], possible: tuple[int, ...], w: float, h: float, ranks: int
) -> tuple[Shape, ...]:
    """Return a chunk with a colored layer for each certain or possible contributor."""
    layer_height = h / ranks
    shapes = [rect(w, h, "now")]
    for style, lanes in (("own", certain), ("pale", possible)):
        shapes += [rect(w, layer_height, style, y=lane * layer_height, lane=lane) for lane in lanes]
    return tuple(shapes)


@cached_drawing
def _parcel(layers: tuple[Shape, ...], w: float, h: float, digits: str) -> Sequence[Shape]:
    """Return a piece in flight, relative to its upper left corner."""
    box = rect(w + 6, h + 6, "parcel", x=-3, y=-3, r=4)
    fitting = digits if w >= 14 else ""
    return box, *layers, text(fitting, "chunk", x=w / 2, y=h / 2 + 4.5, anchor="middle")
