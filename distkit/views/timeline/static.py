"""The static painter: the picture as SVG, for places where no widget lives.

GitHub, nbconvert, a printed page. It brings its own light card, so that it is legible on
dark pages too, and no style sheet, script or id, so that several fit on one page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from distkit._format import count, human_bytes, human_seconds, ticks
from distkit.trace.columns import Floats
from distkit.views.scene import svg
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.svg import text_width
from distkit.views.scene.theme import GRAY, INK, SIZES, TRACES_LIGHT, WARNING_LIGHT, rank_color

#: At most so many operations on so many ranks are drawn; a line says what is left out.
MAX_BARS, MAX_LANES = 200, 48
#: On so many ranks at most a long run is drawn twice: as a whole, and its first operations.
MAX_BOTH = 16
WIDTH = 960


def to_svg(picture: Json) -> str:
    """The picture of a run as an SVG document of at most 60 kB.

    >>> from distkit.trace.log import EventLog
    >>> from distkit.views.timeline.columns import Columns
    >>> to_svg(Columns(EventLog()).picture(MAX_BARS)).startswith("<svg ")
    True
    """
    limits = (int(MAX_BARS * 0.75**n) for n in range(11))
    return svg.fitting(_document(picture, limit) for limit in limits)


def _document(picture: Json, limit: int) -> str:
    """All of a short run; of a long one how busy the ranks were, and its first operations."""
    part = _part(picture, limit)
    name = picture["title"] or "Timeline"
    if part["cut"] == picture["end"] or not picture["coverage"]:
        painter = _Painter(part)
        return svg.document(WIDTH, painter.height, name, painter.body())
    *notices, cut = part["notices"]
    if len(part["lanes"]) > MAX_BOTH:
        told = f"{count(picture['operations'], 'operation')}: too many to draw individually"
        whole = _Overview({**part, "notices": [*notices, told]})
        below = 66 if part["compared"] else 44
        body = whole.body() + "".join(whole._foot())
        return svg.document(WIDTH, whole.height + below, name, body)
    whole = _Overview({**part, "notices": notices})
    first = _Painter({**part, "title": cut, "facts": [], "notices": []})
    body = f'{whole.body()}<g transform="translate(0 {whole.height:.0f})">{first.body()}</g>'
    return svg.document(WIDTH, whole.height + first.height, name, body)


def whole(picture: Json, limit: int) -> tuple[str, float]:
    """All of a run without a card, to stand in another picture; and its height.

    Args:
        picture: a projection's snapshot.
        limit: if it has more operations, how busy the ranks were is drawn instead of them.
    """
    part, notices = _part(picture, limit), picture["notices"]
    whole = part["cut"] == picture["end"] or not picture["coverage"]
    painter = _Painter(part) if whole else _Overview({**part, "notices": notices})
    return painter.body(), painter.height


def paint(picture: Json, until: float | None = None) -> tuple[str, float]:
    """The picture without its card, to stand in another one; and its height.

    Args:
        picture: a projection's snapshot.
        until: what is later lies under a veil [s].
    """
    painter = _Painter(_part(picture, MAX_BARS // 2), until)
    return painter.body(), painter.height


def _part(picture: Json, limit: int) -> Json:
    """The first operations on the first ranks, with a notice of what that leaves out."""
    lanes = picture["lanes"][:MAX_LANES]
    ranks = {lane["rank"] for lane in lanes}
    bars = sorted((b for b in picture["bars"] if b["rank"] in ranks), key=lambda b: b["start"])
    more, notices, end = bars[limit:], list(picture["notices"]), picture["end"]
    if len(picture["lanes"]) > MAX_LANES:
        notices.append(f"only the first {MAX_LANES} ranks are drawn here")
    if more:
        end = more[0]["start"]
        cut = human_seconds(end - picture["start"])
        notices.append(f"the first {cut}: {limit} of {count(picture['operations'], 'operation')}")
    return {**picture, "lanes": lanes, "bars": bars[:limit], "notices": notices, "cut": end}


class _Painter:
    room = SIZES["height"]  # for the lanes, if they need no more

    def __init__(self, picture: Json, until: float | None = None) -> None:
        self.picture, self.view, self.until = picture, _view(picture), until
        self.notices = flagged(picture)
        self.bars = {bar["id"]: bar for bar in picture["bars"]}
        self.at = Geometry(picture, self.view, WIDTH, 62 + 22 * len(self.notices), self.room)
        self.colors = {
            rank: rank_color(lane.get("color", i))
            for i, (rank, lane) in enumerate(self.at.lanes.items())
        }

        self.height = self.at.bottom + (96 if picture["compared"] else 74)
        if picture.get("bare"):
            self.height = self.at.bottom + 40

    def body(self) -> str:
        parts = [*self._head(), *self._lanes()]
        if not self.bars:
            parts.append(svg.text(24, self.at.bottom - 8, "nothing was recorded", GRAY))
        else:
            parts += self._axis()
            shafts, heads = self._arrows()
            marks = [bar for bar in self.bars.values() if bar["kind"] == "mark"]
            parts += [*map(self._bar, marks), *self._ribbons(), *shafts]
            parts += [self._bar(b) for b in self.bars.values() if b["kind"] != "mark"] + heads
            parts += self._deaths()
        return "".join([*parts, *self._veil(), *([] if self.picture.get("bare") else self._foot())])

    # -- around -------------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        title = self.picture["title"] or "Timeline"
        yield svg.heading(24, 32, title, " · ".join(self.picture["facts"]))
        x = WIDTH - 24.0
        for kind, word in reversed(_LEGEND):
            if any(bar["kind"] == kind for bar in self.bars.values()):
                x -= text_width(word, 12)
                yield svg.text(x, 32, word, GRAY)
                yield svg.rect(x - 29, 22, 22, 12, *_fill(kind, GRAY))
                x -= 48
        for i, notice in enumerate(self.notices):
            yield svg.text(24, 56 + 22 * i, notice, svg.notice_color(notice))

    def _lanes(self) -> Iterator[str]:
        for (rank, lane), head in zip(self.at.lanes.items(), self.at.heads, strict=True):
            if head:
                yield from self._host(lane["host"], self.at.tops[rank] - 8)
        for (rank, lane), height in zip(self.at.lanes.items(), self.at.heights, strict=True):
            top = self.at.tops[rank]
            middle = top + height / 2
            width = self.at.right - self.at.left + 8
            yield svg.rect(self.at.left - 4, top, width, height, 'fill="#f5f6f8"', "", 6)
            if "run" in lane:
                yield from self._run(lane, top, height)
            if "memory" in lane:
                yield self._memory(lane, top, height)
            yield f'<circle cx="29" cy="{middle:.1f}" r="5" fill="{self.colors[rank]}"/>'
            up = 4 if lane["detail"] else 0
            yield svg.text(
                42, middle + 4.5 - up * 1.5, lane["name"], INK, 'font-size="13" font-weight="700"'
            )
            if up:
                yield svg.text(42, middle + 14, lane["detail"], GRAY)

    def _run(self, lane: Json, top: float, height: float) -> Iterator[str]:
        """The colour of the run of a lane before it, and where that run ends."""
        fill = f'fill="{TRACES_LIGHT[lane["run"] % len(TRACES_LIGHT)]}"'
        yield svg.rect(self.at.left - 8, top, 3, height, fill, "", 1)
        yield svg.rect(self.at.x(lane["end"]), top, 2, height, fill, "", 1)

    def _memory(self, lane: Json, top: float, height: float) -> str:
        """Steps behind the bars: the memory that a rank has in use on its GPU."""
        times, shares = zip(*lane["memory"], strict=True)
        edge = self.at.right + 4
        xs = [min(max(self.at.x(time), self.at.left - 4), edge) for time in times]
        steps = "".join(
            f"V{top + height - share * (height - 2):.1f}H{until:.1f}"
            for share, until in zip(shares, [*xs[1:], edge], strict=True)
        )
        path = f"M{xs[0]:.1f} {top + height:.1f}{steps}V{top + height:.1f}z"
        return f'<path d="{path}" fill="{self.colors[lane["rank"]]}" fill-opacity=".22"/>'

    def _host(self, name: str, y: float) -> Iterator[str]:
        """A host's name, and a rule above its lanes."""
        yield svg.text(24, y, name, GRAY, 'font-weight="700"')
        x = 36 + text_width(name, 13.5)
        yield svg.line(x, y - 4, self.at.right + 4, y - 4, "#d3d9df", 1)

    def _axis(self) -> Iterator[str]:
        at, zero = self.at, self.picture["start"] or 0.0
        top = min(at.tops.values()) - 6
        first, last = self.view[0] - zero, self.view[1] - zero
        for time, label in ticks(first, last):
            x = at.x(zero + time)
            yield svg.line(x, top, x, at.bottom, "#e9ecef", 1)
            yield svg.text(x, at.bottom + 18, label, GRAY, 'text-anchor="middle"')
        yield svg.line(at.left - 4, at.bottom, at.right + 4, at.bottom, "#aab2ba", 1)

    def _foot(self) -> Iterator[str]:
        p, y = self.picture, self.at.bottom + 50
        parts = []
        if p["messages"] or not p["collectives"]:
            parts.append(f"{count(p['messages'], 'message')}, {human_bytes(p['message_bytes'])}")
        if p["collectives"]:
            size = human_bytes(p["collective_bytes"])
            parts.append(f"{count(p['collectives'], 'collective')}, {size}")
        parts.append(human_seconds((p["end"] or 0) - (p["start"] or 0)))
        told = "   ·   ".join(parts)
        yield svg.text(24, y, told, INK, 'font-weight="700" xml:space="preserve"')
        busy = [f"{lane['name']} {lane['busy']:.0%}" for lane in p["lanes"]]
        x = 48 + text_width(told, 14)  # it is bold
        rest = f"in communication: {', '.join(busy)}"
        if busy and x + text_width(rest, 12) < WIDTH - 20:
            yield svg.text(x, y, rest, GRAY)
        told = "   ·   ".join(f"{value} {label}" for value, label, _ in p["compared"])
        yield svg.text(24, y + 22, told, GRAY, 'xml:space="preserve"') if told else ""

    def _veil(self) -> Iterator[str]:
        """Over what is later than the moment shown."""
        at, first = self.at, min(self.at.tops.values(), default=0) - 6
        if self.until is None or self.until >= self.view[1]:
            return
        x, height = at.x(self.until), at.bottom - first
        yield svg.rect(x, first, at.right + 5 - x, height, 'fill="#fff" fill-opacity=".8"', "", 0)
        yield svg.line(x, first, x, at.bottom, INK, 1.2)

    # -- the picture ----------------------------------------------------------------

    def _bar(self, bar: Json) -> str:
        x, y, width, height = self.at.box(bar)
        color = WARNING_LIGHT if bar["state"] == "failed" else self.colors[bar["rank"]]
        fill, stroke = _fill(_look(bar), color)
        radius = height / 2 if bar["kind"] == "request" else 3
        box = svg.rect(x, y, width, height, fill, stroke, radius)
        dead = "died" in self.at.lanes[bar["rank"]]
        words = _words(bar, self.at.lanes, "died in" if dead else self.picture["open"])
        fitting = (t for t in words if t and text_width(t, 11.5) < width - 8)
        label = next(fitting, "") if height >= 11 else ""
        if not label:
            return box
        ink, size = _ink(bar, color), 'font-size="11.5"'
        return box + svg.text(x + 5, y + height / 2 + 4, label, ink, size)

    def _deaths(self) -> Iterator[str]:
        """A cross where a rank died, and the word."""
        for (rank, lane), height in zip(self.at.lanes.items(), self.at.heights, strict=True):
            died, (first, last) = lane.get("died"), self.view
            if died is None or not first <= died <= last:
                continue
            x, y = self.at.x(died), self.at.tops[rank] + height / 2
            right = x + 48 < self.at.right
            side = "" if right else ' text-anchor="end"'
            bold = f'font-weight="700" font-size="12"{side}'
            for rise in (-5, 5):
                yield svg.line(x - 5, y - rise, x + 5, y + rise, WARNING_LIGHT, 2.4)
            yield svg.text(x + (10 if right else -10), y + 4, "died", WARNING_LIGHT, bold)

    def _ribbons(self) -> Iterator[str]:
        ties: dict[str, list[Json]] = defaultdict(list)
        for bar in self.bars.values():
            if "tie" in bar and _look(bar) != "paused":
                ties[bar["tie"]].append(bar)
        for members in ties.values():
            members.sort(key=lambda bar: self.at.tops[bar["rank"]])
            mixed = len({bar["op"] for bar in members}) > 1
            for above, below in pairwise(members):
                yield self._ribbon(above, below, WARNING_LIGHT if mixed else INK)

    def _ribbon(self, above: Json, below: Json, color: str) -> str:
        """A band from lane to lane; past the lanes of others only its edges."""
        x1, y1, w1, h1 = self.at.box(above)
        x2, y2, w2, _ = self.at.box(below)
        top, middle = y1 + h1, (y1 + h1 + y2) / 2
        order = list(self.at.lanes)
        next_ = order.index(below["rank"]) == order.index(above["rank"]) + 1
        path = (
            f"M{x1:.1f} {top:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
            f"{'h' if next_ else 'm'}{w2:.1f}{'' if next_ else ' 0'}"
            f"C{x2 + w2:.1f} {middle:.1f} {x1 + w1:.1f} {middle:.1f} "
            f"{x1 + w1:.1f} {top:.1f}{'z' if next_ else ''}"
        )
        fill = f'fill="{color}" fill-opacity=".08"' if next_ else 'fill="none"'
        return f'<path d="{path}" {fill} stroke="{color}" stroke-opacity=".{2 if next_ else 4}"/>'

    def _arrows(self) -> tuple[list[str], list[str]]:
        """The shafts, which run behind the bars, and the heads, which lie on them."""
        shafts, heads = [], []
        for arrow in self.picture["arrows"]:
            if arrow.get("send") not in self.bars and arrow.get("recv") not in self.bars:
                continue
            path = self.at.path(arrow, self.bars)
            whole = arrow["sent"] is not None and arrow["received"] is not None
            color = self.colors.get(arrow["src"], GRAY) if whole else WARNING_LIGHT
            shafts.append(svg.line(*path, color, 1.6, "" if whole else ' stroke-dasharray="4"'))
            x, y = path[2:] if arrow["sent"] is not None else path[:2]
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#fff" stroke="{color}"/>'
            heads.append(svg.arrow_head(*path, color) if whole else dot)
        return shafts, heads


class _Overview(_Painter):
    """A long run as a whole: how much of each moment every rank spent in communication."""

    room = 0

    def __init__(self, picture: Json) -> None:
        lanes = [{**lane, "rows": 1, "marks": 0} for lane in picture["lanes"]]
        whole = {"bars": [], "cut": picture["end"], "opening": None}
        super().__init__({**picture, "lanes": lanes, **whole})
        self.height = self.at.bottom + 30

    def body(self) -> str:
        told = svg.text(
            WIDTH - 24, 32, "how busy each rank was with communication", GRAY, 'text-anchor="end"'
        )
        return "".join(
            [
                *self._head(),
                told,
                *self._lanes(),
                *self._axis(),
                *map(self._area, self.at.lanes),
                *self._deaths(),
            ]
        )

    def _area(self, rank: int) -> str:
        """As high as the rank was busy; pale above the part in which it only waited."""
        busy, waited = (self.picture[part][rank] for part in ("coverage", "waited"))
        return self._steps(rank, busy, 0.36) + self._steps(rank, busy - waited, 1)

    def _steps(self, rank: int, shares: Floats, opacity: float) -> str:
        """Steps from the bottom of the lane."""
        at = self.at
        top, height = at.tops[rank], at.heights[list(at.lanes).index(rank)]
        left, right = at.x(self.picture["start"]), at.x(self.picture["end"])
        width, base = (right - left) / len(shares), round(top + height)
        tops = groupby(round(share * (height - 2)) for share in shares.tolist())
        steps = "".join(f"V{base - max(0, tall)}h{len([*same]) * width:.2f}" for tall, same in tops)
        fill = f'fill="{self.colors[rank]}" fill-opacity="{opacity:g}"'
        return f'<path d="M{left:.1f} {base}{steps}V{base}z" {fill}/>'


_LEGEND = (
    ("send", "send"),
    ("recv", "receive"),
    ("collective", "collective"),
    ("request", "request"),
    ("store", "store"),
    ("mark", "step or computation"),
)


def _view(picture: Json) -> tuple[float, float]:
    """The first and the last time to draw, with a margin; a wider one for what is still open."""
    end = picture["cut"] or 0.0
    start = picture["opening"] if (picture["opening"] or end) < end else picture["start"] or 0.0
    span = max(end - start, 1e-6)
    stuck = any(bar["end"] is None and bar["kind"] != "mark" for bar in picture["bars"])
    return start - 0.012 * span, start + span * (1.12 if stuck else 1.02)


def _words(bar: Json, lanes: dict[int, Json], open_: str) -> list[str]:
    """What may stand in a bar, the longest first."""
    op, peer = bar["op"], lanes.get(bar.get("peer", -1), {}).get("name", "")
    called = f"{op}({bar.get('label', '')})" if bar["kind"] == "store" else op
    if bar["kind"] == "mark":
        label = bar.get("label", "")
        return [label, label.partition(" (")[0], "!" if op == "touch" else ""]
    if bar["state"] == "failed":
        return [f"✕ {op} failed", "✕"]
    if bar["state"] == "scheduled":
        return [f"paused before {op}", "paused", op]
    if bar["end"] is None:
        from_peer = [f"{open_} {op} from {peer}"] if peer and op == "recv" else []
        return [*from_peer, f"{open_} {called}", f"{open_} {op}", op]
    if bar["kind"] == "send":
        return [f"send to {peer}", "send"]
    if bar["kind"] == "recv":
        return [f"recv from {peer}", "recv"]
    if bar["kind"] == "store":
        return [called, op]
    size = human_bytes(bar["nbytes"]) if bar["nbytes"] else ""
    detail = f"{op} {bar.get('label', '')}".rstrip()
    return [f"{detail} {size}".rstrip(), detail, op]


def _look(bar: Json) -> str:
    """What decides how a bar is filled: its state, or what it is."""
    if bar["op"] == "touch":
        return "touch"
    if bar["kind"] == "mark":
        return "mark"
    if bar["end"] is None:
        return "paused" if bar["state"] == "scheduled" else "open"
    return "failed" if bar["state"] == "failed" else str(bar["kind"])


def _fill(look: str, color: str) -> tuple[str, str]:
    """How a bar is filled and outlined."""
    if look == "mark":
        return f'fill="{INK}" fill-opacity=".09"', ""
    if look == "touch":
        return f'fill="{WARNING_LIGHT}"', ""
    if look in ("send", "collective"):
        return f'fill="{color}"', ""
    tint = svg.tint(color, {"request": 0.42, "open": 0.2, "paused": 0.06}.get(look, 0.16))
    dash = ' stroke-dasharray="5 3"' if look in ("open", "paused") else ""
    return f'fill="{tint}"', f'stroke="{color}" stroke-width="1.4"{dash}'


def _ink(bar: Json, color: str) -> str:
    if bar["kind"] == "mark":
        return "#fff" if bar["op"] == "touch" else GRAY
    if bar["state"] == "scheduled":
        return GRAY
    if bar["end"] is None:
        return WARNING_LIGHT
    if bar["kind"] not in ("send", "collective") or bar["state"] == "failed":
        return INK
    return svg.readable(color)


#: The length of an arrow's head [pixels].
INSIDE = 10
#: The height of a host's name above its lanes [pixels].
HEAD = 22


def hosts_begin(lanes: Sequence[Json]) -> list[bool]:
    """True for the lanes that are the first of a host, where ranks are on several.

    >>> hosts_begin([{"host": "a"}, {"host": "a"}, {"host": "b"}])
    [True, False, True]
    """
    names = [lane.get("host") for lane in lanes]
    return [
        name is not None and name != before
        for before, name in zip([None, *names], names, strict=False)
    ]


class Geometry:
    """Times and lanes to pixels.

    Args:
        picture: a projection's snapshot.
        view: first and last time [s].
        width: of the whole picture, in pixels.
        top: where the lanes begin, in pixels.
        room: how high all lanes may be together, in pixels, if they need no more.
    """

    def __init__(
        self,
        picture: Json,
        view: tuple[float, float],
        width: float,
        top: float,
        room: float = SIZES["height"],
    ) -> None:
        self.view = view
        self.lanes: dict[int, Json] = {lane["rank"]: lane for lane in picture["lanes"]}
        names = [
            max(text_width(lane["name"], 14), text_width(lane["detail"], 12))
            for lane in self.lanes.values()
        ]
        self.left = min(max(84.0, 62 + max(names, default=0)), 230)
        self.right = width - 34.0
        self.heights = [
            2 * SIZES["pad"] + _rows(lane) + _marks(lane) for lane in self.lanes.values()
        ]
        n = len(self.heights)
        free = min(room, n * SIZES["pitch"]) - sum(self.heights)
        self.gap = min(max(free / max(1, n), SIZES["min_gap"]), SIZES["max_gap"])
        #: Above the first lane of each host.
        self.heads = [HEAD if begins else 0 for begins in hosts_begin(picture["lanes"])]
        pitches = (h + self.gap + head for h, head in zip(self.heights, self.heads, strict=True))
        tops = list(accumulate(pitches, initial=top))
        self.bottom = tops.pop() + (10 - self.gap if n else 60)
        tops = [top + head for top, head in zip(tops, self.heads, strict=True)]
        self.tops = dict(zip(self.lanes, tops, strict=True))

    def x(self, time: float) -> float:
        """The horizontal place of a time, within the picture."""
        first, last = self.view
        part = (time - first) / (last - first)
        return self.left + min(max(part, 0.0), 1.0) * (self.right - self.left)

    def box(self, bar: Json) -> tuple[float, float, float, float]:
        """x, y, width and height of a bar; an open one reaches to the right edge or a death."""
        lane = self.lanes[bar["rank"]]
        mark = bar["kind"] == "mark"
        top, whole = self.tops[bar["rank"]] + SIZES["pad"], _rows(lane)
        if mark:
            top, whole = top + whole + SIZES["gap"], _marks(lane) - SIZES["gap"]
        pitch = (whole + SIZES["gap"]) / max(1, lane["marks" if mark else "rows"])
        left = self.x(bar["start"])
        end = lane.get("died") if bar["end"] is None else bar["end"]
        right = self.right + 3 if end is None else self.x(end)
        height = pitch - min(SIZES["gap"], pitch * 0.2)
        least = 14 if bar["op"] == "touch" else 2.5
        return left, top + bar["row"] * pitch, max(right - left - 1, least), height

    def path(self, arrow: Json, bars: dict[str, Json]) -> tuple[float, float, float, float]:
        """From the sender's bar to the receiver's; a missing end is cut short."""
        send, recv = bars.get(arrow.get("send", "")), bars.get(arrow.get("recv", ""))
        order = list(self.lanes)
        down = _index(order, arrow["dst"]) >= _index(order, arrow["src"])
        y1 = self._edge(send, arrow["src"], bottom=down)
        y2 = self._tip(recv, arrow["dst"], down=down)
        if arrow["sent"] is None or send is None:
            begin = self.x((recv or {"start": self.view[0]})["start"]) + 4
            return begin, y1, begin, y2
        x1 = self.x(arrow["sent"])
        return x1, y1, x1 + 26 if arrow["received"] is None else self.x(arrow["received"]), y2

    def _tip(self, bar: Json | None, rank: int, *, down: bool) -> float:
        """Where an arrow ends: at its bar's edge; within it, where another row is before that."""
        y = self._edge(bar, rank, bottom=not down)
        if bar is None:
            return y
        lane = self.lanes[rank]
        hidden = bar["row"] > 0 if down else bar["row"] < lane["rows"] - 1 or lane["marks"] > 0
        inside = min(INSIDE, self.box(bar)[3]) if hidden else 0
        return y + (inside if down else -inside)

    def _edge(self, bar: Json | None, rank: int, *, bottom: bool) -> float:
        if bar is not None:
            _, y, _, height = self.box(bar)
            return y + height if bottom else y
        if rank not in self.lanes:
            return self.bottom
        return self.tops[rank] + SIZES["pad"] + (_rows(self.lanes[rank]) if bottom else 0)


def _index(order: list[int], rank: int) -> int:
    return order.index(rank) if rank in order else 0


def _rows(lane: Json) -> float:
    """The height of a lane's communication."""
    rows: int = max(1, lane["rows"]) * (SIZES["row"] + SIZES["gap"]) - SIZES["gap"]
    return min(rows, SIZES["max_rows"])


def _marks(lane: Json) -> float:
    """The height of a lane's marked computation."""
    if not lane["marks"]:
        return 0
    rows: int = lane["marks"] * (SIZES["mark"] + SIZES["gap"]) - SIZES["gap"]
    return SIZES["gap"] + min(rows, SIZES["max_rows"] / 2)
