"""The stage: a card per rank with the chunks of its tensor, and messages on their way.

projection.py makes plain data of a run, by rounds and by time, contributions.py follows which
ranks contributed, layout.py has the places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from distkit._format import count, human_seconds, joined
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.marks import (
    Scene,
    Shape,
    arrow,
    circle,
    letters,
    line,
    path,
    picture,
    rect,
    remembered,
    text,
    title,
)
from distkit.views.scene.summaries import figure
from distkit.views.scene.svg import text_width
from distkit.views.stage.layout import NUMBERS, STRIPS, Field, Point
from distkit.views.stage.projection import (
    PANELS,
    Clock,
    by_rounds,
    by_time,
    panels,
    sentence,
)

#: Layers, from the lowest. The reader chooses contributions or values.
LINK, FLIGHT, CELL, CHUNK, VALUE, PLACE, DOT, TOKEN, CARGO, BADGE = range(10)
LAYERS = {"contributions": [CELL, CHUNK, TOKEN], "values": [VALUE, PLACE, CARGO]}
#: A member of a collective: its number, its lane, the edge of its card.
Home = tuple[int, int, Point]
#: The largest numbers of arrows of a keyframe, and of tokens of collectives.
ARROWS, MEETINGS = 64, 4_000
#: The largest number of changes with tooltips, and of values in them.
SAID, FIRST = 2_000, 8
NOTHING = "this trace has no messages and no collectives"


def draw(stage: Json) -> Json:
    """The picture of a run for both painters, on the clocks of rounds and of time.

    Args:
        stage: what ``projection.project`` found.
    """
    time, rounds = by_time(stage), by_rounds(stage)
    there = [stage["known"], _most(stage) > 0 or not stage["known"]]
    measured = _Painter(stage, time, None).scene
    scene = _Painter(stage, rounds, measured).scene
    waiting = "waiting for the first message"
    marks = {k: v for k, v in measured.plain().items() if k in ("marks", "holds")}
    other = {**_face(stage, time, measured), "end": measured.when(time.end), "scene": marks}
    return picture(
        scene,
        title=stage["title"] or "Stage",
        view="stage",
        facts=stage["facts"],
        notices=stage["notices"],
        notes=stage["notes"],
        said=stage["said"],
        live=stage["live"],
        empty="" if stage["keyframes"] else waiting if stage["live"] else NOTHING,
        layers=[list(choice) for choice, known in zip(LAYERS.items(), there, strict=True) if known],
        panels=panels(stage),
        clock=stage["clock"],
        clocks={"time": other, "rounds": {}},
        **_face(stage, rounds, scene),
    )


def _face(stage: Json, clock: Clock, scene: Scene) -> Json:
    """The parts that depend on the clock."""
    rows = (
        clock.rows if 1 + max((b["round"] for b in stage["keyframes"]), default=0) > PANELS else []
    )
    name = "rounds" if clock.unit else "messages"

    def when(time: float | None) -> float | None:
        return None if time is None else scene.when(time)

    return {
        "unit": clock.unit,
        "end": clock.end,  # ``picture`` makes it relative
        "home": scene.when(clock.home),
        "opening": scene.when(clock.home),
        "keyframes": [
            {**b, "begin": when(b["begin"]), "end": when(b["end"])} for b in clock.keyframes
        ],
        "list": {"name": name, "all": "all", "rows": rows} if rows else None,
    }


def _most(stage: Json) -> float:
    """The largest magnitude among all values."""
    pieces = (p for c in stage["changes"] for p in c["pieces"])
    values = (v for p in pieces for v in p.get("values", ()))
    return max((abs(v) for v in values if not isinstance(v, str)), default=0.0)


class _Painter:
    def __init__(self, stage: Json, clock: Clock, like: Scene | None) -> None:
        self.stage, self.clock = stage, clock
        self.field = Field(stage)
        self.strips = self.field.strip[0] > 0
        self.ranks = [node["rank"] for node in stage["nodes"]]
        self.lanes = {rank: i for i, rank in enumerate(self.ranks)}
        self.both = {
            p for a, b, there, back in stage["links"] if there and back for p in ((a, b), (b, a))
        }
        self.most = _most(stage)
        self.shown = {CELL: stage["known"], VALUE: self.most > 0 or not stage["known"]}
        self.scene = Scene(self.field.width, self.field.height, clock.start, like=like)
        self.cut: dict[int, int] = {}  # into how many pieces a rank's tensor is
        self.layers: dict[tuple[int, float, float], tuple[Shape, ...]] = {}
        self.homes: dict[tuple[int, ...], tuple[Point, tuple[Home, ...]]] = {}
        self._hosts()
        self._links()
        self._badges()
        if self.strips:
            self._tensors()
        members = sum(len(keyframe.get("members", ())) for _, keyframe in clock.flights)
        self.tokens = members <= MEETINGS
        arrows: dict[int, int] = {}
        for i, keyframe in clock.flights:
            if "members" in keyframe:
                self._meeting(i, keyframe)
            elif keyframe["src"] in self.lanes and keyframe["dst"] in self.lanes:
                arrows[i] = arrows.get(i, 0) + 1
                self._message(i, keyframe, holds=arrows[i] <= ARROWS)

    def _lane(self, rank: int) -> int:
        return self.lanes[rank] % 8

    # -- what stays -----------------------------------------------------------------------

    def _hosts(self) -> None:
        """An area around the cards of each host, and its name."""
        for name, area in self.field.hosts.items():
            corners = "L".join(f"{x:.0f} {y:.0f}" for x, y in area)
            x, y = min(area, key=lambda point: (point[1], point[0]))
            self.scene.add(0, 0, path(f"M{corners}Z", "host"), layer=LINK)
            self.scene.add(x, y + 8, text(name, "place"), layer=BADGE)

    def _links(self) -> None:
        ends = (self.field.ends(a, b) for a, b, *_ in self.stage["links"])
        d = "".join(f"M{a[0]:.0f} {a[1]:.0f}L{b[0]:.0f} {b[1]:.0f}" for a, b in ends)
        if d:
            self.scene.add(0, 0, path(d, "link"), layer=LINK)

    def _badges(self) -> None:
        r = self.field.radius
        if len(self.ranks) > NUMBERS:
            return self._dots()
        for node in self.stage["nodes"]:
            rank, lane = node["rank"], self._lane(node["rank"])
            number = text(
                str(rank), "number", y=r * 0.39, anchor="middle", lane=lane, size=round(1.1 * r)
            )
            badge = circle(r, "own", lane=lane), number
            self.scene.add(*self.field.badge(rank), *badge, layer=BADGE)
            if node["name"] != f"rank {rank}" and len(self.ranks) <= STRIPS:
                low = -self.field.card[1] / 2 - 6
                words = text(node["name"], "caption", y=low, anchor="middle")
                self.scene.add(*self.field.at[rank], words, layer=BADGE)

    def _dots(self) -> None:
        """Very many ranks: one path of dots for each colour."""
        spots: dict[int, str] = defaultdict(str)
        for rank, (x, y) in self.field.at.items():
            spots[self._lane(rank)] += f"M{x:g} {y:g}h0"
        self.scene.add(0, 0, *(path(d, "dot", lane=lane) for lane, d in spots.items()), layer=BADGE)

    # -- what ranks hold ------------------------------------------------------------------

    def _tensors(self) -> None:
        """Each piece of each tensor, from one change to the next."""
        held: dict[int, list[tuple[float, Json]]] = {}
        cut: dict[int, float] = {}  # since when
        first: dict[int, float] = {}
        for time, change in self.clock.changes:
            rank, at, pieces = change["rank"], change.get("at"), change["pieces"]
            if rank not in self.lanes:
                continue
            now = held.get(rank, [])
            if at is None and len(pieces) != len(now):
                self._strip(rank, now, cut.get(rank, time), time)
                held[rank], cut[rank] = [(time, piece) for piece in pieces], time
                first.setdefault(rank, time)
                continue
            for i, piece in enumerate(pieces) if at is None else [(at, pieces[0])]:
                if i < len(now) and now[i][1] != piece:
                    self._piece(rank, i, len(now), *now[i], time)
                    now[i] = time, piece
        for rank, now in held.items():
            self._strip(rank, now, cut[rank], None)
            self.cut[rank] = len(now)
        for rank in self.ranks:  # what is not known yet
            x, y, w = self.field.cell(rank, 0, 1)
            empty = rect(w - 1, self.field.strip[1] - 1, "slot", x=0.5, y=0.5, r=2)
            self.scene.add(x, y, empty, end=first.get(rank), layer=CELL)

    def _strip(
        self, rank: int, now: list[tuple[float, Json]], since: float, until: float | None
    ) -> None:
        """A rank's tensor until its chunks change, with their numbers."""
        for i, (begin, piece) in enumerate(now):
            self._piece(rank, i, len(now), begin, piece, until)
        n = len(now)
        if n < 2:
            return
        x, y, w = self.field.cell(rank, 0, n)
        places = tuple(round((i + 0.5) * w, 1) for i in range(n))
        high, digits = self.field.strip[1], "".join(map(str, range(n))) if n <= 10 else ""
        if self.shown[CELL]:
            cuts = "".join(f"M{i * w:.1f} 0v{high:g}" for i in range(1, n))
            marks = [path(cuts, "cut")]
            if digits and w > 16:
                marks.append(letters(digits, "chunk", places, y=high / 2 + 4.5))
            self.scene.add(x, y, *marks, begin=since, end=until, layer=CHUNK)
        if self.shown[VALUE] and digits and w > 30:
            numbers = letters(digits, "small", places, y=9)
            self.scene.add(x, y, numbers, begin=since, end=until, layer=PLACE)

    def _piece(
        self, rank: int, i: int, of: int, begin: float, piece: Json, end: float | None
    ) -> None:
        x, y, w = self.field.cell(rank, i, of)
        high = self.field.strip[1]
        if self.shown[CELL]:
            layers = self._layers(piece, round(w, 2), high)
            self.scene.add(x, y, *self._said(piece), *layers, begin=begin, end=end, layer=CELL)
        if self.shown[VALUE]:
            values = tuple(piece.get("values", ()))
            cells = _values(values, round(w - 2, 1), high, self.most, of > 1)
            self.scene.add(x, y, *self._said(piece), *cells, begin=begin, end=end, layer=VALUE)

    def _said(self, piece: Json) -> tuple[Shape, ...]:
        """The tooltip of a chunk: contributions and values."""
        if len(self.clock.changes) > SAID:
            return ()
        told = [
            f"{words} {joined([str(rank) for rank in piece[key]])}"
            for key, words in (("sure", "contributions of rank"), ("maybe", "perhaps of rank"))
            if piece.get(key)
        ]
        if values := piece.get("values", ()):
            more = " …" if len(values) > FIRST else ""
            told.append(f"values {', '.join(map(figure, values[:FIRST]))}{more}")
        return (title("; ".join(told)),) if told else ()

    def _layers(self, piece: Json, w: float, h: float) -> tuple[Shape, ...]:
        """A layer for each contributor."""
        known = id(piece), w, h  # a piece is there many times, and lives as long as the stage
        if known not in self.layers:
            sure, maybe = (
                tuple(self.lanes[r] for r in piece.get(key, ()) if r in self.lanes)
                for key in ("sure", "maybe")
            )
            self.layers[known] = _contributions(sure, maybe, w, h, len(self.ranks))
        return self.layers[known]

    # -- messages --------------------------------------------------------------------------

    def _message(self, i: int, keyframe: Json, holds: bool) -> None:
        src, dst, begin, end = keyframe["src"], keyframe["dst"], keyframe["begin"], keyframe["end"]
        a, b = self.field.ends(src, dst, 5 if (src, dst) in self.both else 0)
        lane, lost = self._lane(src), end is None
        way = arrow(a, b, "lost" if lost else "flight", "bad" if lost else "own", lane=lane)
        self.scene.add(0, 0, *way, begin=begin, end=end, layer=FLIGHT)
        if keyframe["sent"]:
            self._flies(keyframe, a, b)
        if not lost and holds:
            self.scene.hold_frame(i, 0, 0, *arrow(a, b, "past", "own", lane=lane), layer=FLIGHT)
            if self.strips and "at" in keyframe and self.cut.get(dst) == keyframe["of"]:
                x, y, w = self.field.cell(dst, keyframe["at"], keyframe["of"])
                outline = rect(w + 2, self.field.strip[1] + 3, "fresh", x=-1, y=-1.5, r=3)
                self.scene.hold_frame(i, x, y, outline, layer=BADGE)

    def _flies(self, keyframe: Json, a: Point, b: Point) -> None:
        """Move a message's piece from place to place, a whole tensor from card to card."""
        piece, of = keyframe.get("piece", {}), keyframe.get("of", 1)
        places: Sequence[Point] = (a, b)
        layers: dict[int, tuple[Shape, ...]] = {}
        size = (0.0, 0.0)
        if self.strips:
            high = self.field.strip[1]
            size = min(self.field.strip[0] / of - 2, 46), high
            places = tuple(
                self._spot(keyframe, r, p)
                for r, p in zip((keyframe["src"], keyframe["dst"]), (a, b), strict=True)
            )
            if piece.get("sure") or piece.get("maybe"):
                layers[TOKEN] = self._layers(piece, *size)
            if piece.get("values"):
                layers[CARGO] = _values(tuple(piece["values"]), *size, self.most, of > 1)
        dot = (circle(min(8, self.field.radius * 0.8), "token", lane=self._lane(keyframe["src"])),)
        if not layers:
            self._fly(keyframe, places, dot, DOT)
        for layer in (TOKEN, CARGO) if layers else ():
            if not self.shown[CELL if layer == TOKEN else VALUE]:
                continue
            if layer not in layers:
                self._fly(keyframe, places, dot, layer)
                continue
            number = str(keyframe["at"]) if "at" in keyframe and of <= 10 else ""
            parcel = _parcel(layers[layer], *size, number, layer == TOKEN)
            corner = (-size[0] / 2, -size[1] / 2)
            shifted = [(x + corner[0], y + corner[1]) for x, y in places]
            self._fly(keyframe, shifted, parcel, layer)

    def _spot(self, keyframe: Json, rank: int, edge: Point) -> Point:
        """The end point of a piece: its place in a rank's tensor, or the card's edge."""
        if "at" not in keyframe or self.cut.get(rank) != keyframe["of"]:
            return edge
        x, y, w = self.field.cell(rank, keyframe["at"], keyframe["of"])
        return x + w / 2, y + self.field.strip[1] / 2

    def _fly(
        self, keyframe: Json, places: Sequence[Point], drawing: Sequence[Shape], layer: int
    ) -> None:
        (x, y), to = places
        if keyframe["end"] is None:  # on its way for ever
            x, y = (x + to[0]) / 2, (y + to[1]) / 2
            self.scene.add(x, y, *drawing, begin=keyframe["begin"], layer=layer)
        else:
            self.scene.add(
                x, y, *drawing, begin=keyframe["begin"], end=keyframe["end"], to=to, layer=layer
            )

    # -- collectives ------------------------------------------------------------------------

    def _meeting(self, i: int, keyframe: Json) -> None:
        """Move every member to the hub and back with the result."""
        members = keyframe["members"]
        hub, homes = self._homes(tuple(members))
        middle = circle(5, "hub")
        self.scene.add(*hub, middle, begin=keyframe["begin"], end=keyframe["end"], layer=DOT)
        self.scene.hold_frame(i, *hub, middle, layer=DOT)
        self.scene.hold_frame(i, 0, 0, *_spokes(hub, homes, "past"), layer=FLIGHT)
        spans: dict[tuple[float, float | None], list[Home]] = defaultdict(list)
        for home in homes:
            spans[keyframe["starts"][home[0]], keyframe["ends"][home[0]]].append(home)
            if self.tokens:
                self._member(keyframe, home[0], home[2], hub)
        for (begin, end), some in spans.items():
            ways = _spokes(hub, tuple(some), "flight")
            self.scene.add(0, 0, *ways, begin=begin, end=end, layer=FLIGHT)

    def _homes(self, members: tuple[int, ...]) -> tuple[Point, tuple[Home, ...]]:
        """The hub of a collective, and the start points of its members."""
        if members not in self.homes:
            hub = self.field.hub(list(members))
            self.homes[members] = (
                hub,
                tuple(
                    (k, self._lane(rank), self.field.edge(rank, hub))
                    for k, rank in enumerate(members)
                    if rank in self.lanes
                ),
            )
        return self.homes[members]

    def _member(self, keyframe: Json, k: int, home: Point, hub: Point) -> None:
        rank, root, meet, end = (
            keyframe["members"][k],
            keyframe["root"],
            keyframe["meet"],
            keyframe["ends"][k],
        )
        dot = circle(min(8, self.field.radius * 0.8), "token", lane=self._lane(rank))
        goes = root is None or rank == root or not keyframe["gives"]
        comes = root is None or (rank != root) == keyframe["gives"]
        near = (home[0] + 0.94 * (hub[0] - home[0]), home[1] + 0.94 * (hub[1] - home[1]))
        if goes:
            self.scene.add(*home, dot, begin=keyframe["starts"][k], end=meet, to=near, layer=DOT)
        if comes and end is not None:
            self.scene.add(
                *near, dot, begin=max(meet, keyframe["starts"][k]), end=end, to=home, layer=DOT
            )
        elif goes and end is None:
            self.scene.add(*near, dot, begin=meet, layer=DOT)


@remembered
def _spokes(hub: Point, homes: tuple[Home, ...], style: str) -> tuple[Shape, ...]:
    """Lines from the members of a collective to the hub."""
    return tuple(line(home, hub, style, lane=lane) for _, lane, home in homes)


@remembered
def _contributions(
    sure: tuple[int, ...], maybe: tuple[int, ...], w: float, h: float, of: int
) -> tuple[Shape, ...]:
    """A chunk, with a coloured layer for each (possible) contributor."""
    each = h / of
    found = [rect(w, h, "now")]
    for style, lanes in (("own", sure), ("pale", maybe)):
        found += [rect(w, each, style, y=lane * each, lane=lane) for lane in lanes]
    return tuple(found)


@remembered
def _values(
    values: tuple[float | str, ...], w: float, h: float, most: float, numbered: bool
) -> tuple[Shape, ...]:
    """A chunk's values: the first as numbers if they fit, else all as colours."""
    found = [rect(w, h, "now")]
    if w < 28:
        each = w / max(1, len(values))
        for i, v in enumerate(values):
            found += _heat(v, most, i * each, 0, each, h)
        return tuple(found)
    top = 11.0 if numbered else 1.0
    if numbered:  # the chunk's number stands in a heading
        found.append(rect(w, 10.5, "gray", opacity=0.4))
    fits = int((h - top) / 9)
    shown = values if len(values) <= fits else values[: fits - 1]
    high = (h - top) / max(1, min(fits, len(values)))
    for i, v in enumerate(shown):
        y = top + i * high
        found += _heat(v, most, 0, y, w, high - 0.5)
        words, middle = _short(v, w - 9), y + high / 2 + 3.2
        found.append(text(words, "count", x=w / 2, y=middle, anchor="middle", size=9.5))
    if len(shown) < len(values):
        found.append(text("…", "small", x=w / 2, y=h - 3, anchor="middle"))
    return tuple(found)


def _short(v: float | str, room: float) -> str:
    """A number with the digits that fit."""
    words = figure(v)
    for digits in (2, 1):
        if text_width(words, 9.5) > room and not isinstance(v, str):
            words = f"{v:.{digits}g}".replace("-", "−")
    return words


def _heat(v: float | str, most: float, x: float, y: float, w: float, h: float) -> Iterator[Shape]:
    """The colour of a value; zero is the background."""
    if isinstance(v, str):
        yield rect(w, h, "odd", x=x, y=y)
    elif part := round(0.6 * min(1.0, abs(v) / most), 2) if most else 0:
        yield rect(w, h, "negative" if v < 0 else "positive", x=x, y=y, opacity=part)


@remembered
def _parcel(
    inside: tuple[Shape, ...], w: float, h: float, number: str, middle: bool
) -> tuple[Shape, ...]:
    """A piece in flight, from its upper left corner."""
    box = rect(w + 6, h + 6, "parcel", x=-3, y=-3, r=4)
    if not number or w < 14:
        return box, *inside
    style, y = ("chunk", h / 2 + 4.5) if middle else ("small", 9.0)
    return box, *inside, text(number, style, x=w / 2, y=y, anchor="middle")


#: The largest number of keyframes in the text.
MAX_ROWS = 24


def table(picture: Json, limit: int = MAX_ROWS) -> str:
    """The keyframes, one per line."""
    keyframes, start = picture["keyframes"], picture["start"]
    name = picture["title"] or "Stage"
    if not keyframes:
        return f"{name}: {NOTHING}"
    names = {node["rank"]: node["name"] for node in picture["nodes"]}
    rounds = 1 + max(keyframe["round"] for keyframe in keyframes)
    lines = [f"{name}: {' · '.join(picture['facts'])}, {count(rounds, 'round')}"]
    for keyframe in keyframes[:limit]:
        when = "never" if keyframe["end"] is None else human_seconds(keyframe["end"] - start)
        lines.append(f"  {when:>7}  {sentence(keyframe, names)}")
    if len(keyframes) > limit:
        lines.append(f"  … and {len(keyframes) - limit:,} more")
    lines += [f"  {line}" for line in flagged(picture)]
    return "\n".join([*lines, picture["said"]] if picture["said"] else lines)
