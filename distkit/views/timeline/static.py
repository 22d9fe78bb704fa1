"""Paints a timeline as SVG for front ends without widgets, such as GitHub, nbconvert and print.

The picture has a light card, so that it is legible on dark pages. It has no style sheet, script or
id, so that a page can contain several pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from distkit._format import count, human_bytes, human_seconds, ticks
from distkit.views.scene import svg
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.svg import text_width
from distkit.views.scene.theme import (
    GRAY,
    INK,
    SIZES,
    TRACES_LIGHT,
    WARNING_LIGHT,
    rank_color,
    work_color,
)

#: Maximum numbers of operations and ranks drawn; a notice reports the rest.
MAX_BARS, MAX_LANES = 200, 48
#: Width of the picture, right edge of the lanes, height of a host name above them [px].
WIDTH, RIGHT, HEAD = 960, 926.0, 22
GAP, PAD = SIZES["gap"], SIZES["pad"]


def to_svg(picture: Json) -> str:
    """Return the picture of a run as an SVG document of at most 60 kB.

    >>> from distkit.trace.log import EventLog
    >>> from distkit.views.timeline.columns import Columns
    >>> to_svg(Columns(EventLog()).picture(MAX_BARS)).startswith("<svg ")
    True
    """
    limits = (int(MAX_BARS * 0.75**n) for n in range(11))
    return svg.fitting(_document(picture, limit) for limit in limits)


def _document(picture: Json, limit: int) -> str:
    body, height = paint(picture, limit)
    return svg.document(WIDTH, height, picture["title"] or "Timeline", body)


def paint(
    picture: Json, limit: int = MAX_BARS // 2, until: float | None = None
) -> tuple[str, float]:
    """Return the picture without its card, for use in another one, and its height.

    Args:
        picture: a projection's snapshot.
        limit: maximum number of operations; a notice reports the rest.
        until: time after which the picture is dimmed [s].
    """
    return _Painter(_part(picture, limit), until).paint()


def _part(picture: Json, limit: int) -> Json:
    """Return the picture limited to the first operations and ranks."""
    lanes = picture["lanes"][:MAX_LANES]
    ranks = {lane["rank"] for lane in lanes}
    bars = sorted((b for b in picture["bars"] if b["rank"] in ranks), key=lambda b: b["start"])
    end, notes = picture["end"], []
    if len(lanes) < len(picture["lanes"]):
        notes.append(f"the first {MAX_LANES} ranks are drawn here")
    if len(bars) > limit:
        end = bars[limit]["start"]
        operations = count(picture["operations"], "operation")
        duration = human_seconds(end - picture["start"])
        notes.append(f"the first {duration} are drawn here: {limit} of {operations}")
    return {
        **picture,
        "lanes": lanes,
        "bars": bars[:limit],
        "notices": [*picture["notices"], *notes],
        "notes": [*picture["notes"], *notes],
        "cut": end,
    }


class _Lane:
    """A lane: rows of communication above rows of marked computation [px]."""

    top = 0.0
    begins = False  # whether it is the first lane of a host

    def __init__(self, data: Json, number: int) -> None:
        self.data, self.color = data, rank_color(data.get("color", number))
        rows = max(1, data["rows"]) * (SIZES["row"] + GAP) - GAP
        marks = data["marks"] * (SIZES["mark"] + GAP)
        self.rows = min(rows, SIZES["max_rows"])
        self.marks = min(marks, SIZES["max_rows"] / 2 + GAP)
        self.height: float = 2 * PAD + self.rows + self.marks

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    def edge(self, *, bottom: bool) -> float:
        """Return the top or bottom edge of the communication rows."""
        return self.top + PAD + (self.rows if bottom else 0)

    def row(self, bar: Json) -> tuple[float, float]:
        """Return the top and the height of a bar."""
        top, height, rows = self.top + PAD, self.rows, self.data["rows"]
        if bar["kind"] == "mark":
            top, height, rows = top + self.rows + GAP, self.marks - GAP, self.data["marks"]
        pitch = (height + GAP) / max(1, rows)
        return top + bar["row"] * pitch, pitch - min(GAP, pitch * 0.2)


class _Painter:
    def __init__(self, picture: Json, until: float | None = None) -> None:
        self.picture, self.until, self.notices = picture, until, flagged(picture)
        self.lanes = {lane["rank"]: _Lane(lane, i) for i, lane in enumerate(picture["lanes"])}
        self.bars = {bar["id"]: bar for bar in picture["bars"]}
        lanes, n = self.lanes.values(), max(1, len(self.lanes))
        names = (text_width(lane.data["name"], 14) for lane in lanes)
        details = (text_width(lane.data["detail"], 12) for lane in lanes)
        self.left = min(62 + max([22.0, *names, *details]), 230)
        free = min(SIZES["height"], n * SIZES["pitch"]) - sum(lane.height for lane in lanes)
        gap = min(max(free / n, SIZES["min_gap"]), SIZES["max_gap"])
        y, host = 62.0 + 22 * len(self.notices), None
        for lane in lanes:
            lane.begins = lane.data.get("host") not in (None, host)
            host = lane.data.get("host")
            lane.top = y + HEAD * lane.begins
            y = lane.top + lane.height + gap
        self.bottom = y + (10 - gap if lanes else 60)
        below = 40 if picture.get("bare") else 96 if picture["compared"] else 74
        self.height = self.bottom + below
        self.top = min((lane.top for lane in lanes), default=0.0) - 6
        end = picture["cut"] or 0.0
        start = picture["start"] or 0.0
        span = max(end - start, 1e-6)
        stuck = any(bar["end"] is None and bar["kind"] != "mark" for bar in picture["bars"])
        self.view = start - 0.012 * span, start + span * (1.12 if stuck else 1.02)

    def paint(self) -> tuple[str, float]:
        parts = [*self._head(), *self._lanes(), *self._inside(), *self._dim_later()]
        if not self.picture.get("bare"):
            parts += self._foot()
        return "".join(parts), self.height

    def _inside(self) -> Iterator[str]:
        """Yield the content of the lanes."""
        if not self.bars:
            yield svg.text(24, self.bottom - 8, "nothing was recorded", GRAY)
            return
        yield from self._axis()
        arrows = [*map(self._arrow, self._drawn_arrows())]
        marks = [bar for bar in self.bars.values() if bar["kind"] == "mark"]
        yield from map(self._bar, marks)
        yield from self._bands()
        yield from (shaft for shaft, _ in arrows)  # the heads cover the bars
        yield from (self._bar(bar) for bar in self.bars.values() if bar["kind"] != "mark")
        yield from (head for _, head in arrows)
        yield from self._deaths()

    def x(self, time: float) -> float:
        """Return the x coordinate of a time, clamped to the plot."""
        first, last = self.view
        part = (time - first) / (last - first)
        return self.left + min(max(part, 0.0), 1.0) * (RIGHT - self.left)

    # -- frame --------------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        title = self.picture["title"] or "Timeline"
        yield svg.heading(24, 32, title, " · ".join(self.picture["facts"]))
        kinds, x = {bar["kind"] for bar in self.bars.values()}, WIDTH - 24.0
        for kind, label in reversed(LEGEND.items()):
            if kind in kinds:
                x -= text_width(label, 12)
                yield svg.text(x, 32, label, GRAY)
                yield svg.rect(
                    x - 29, 22, 22, 12, *_fill(kind, work_color("") if kind == "mark" else GRAY)
                )
                x -= 48
        for i, notice in enumerate(self.notices):
            yield svg.text(24, 56 + 22 * i, notice, svg.notice_color(notice))

    def _lanes(self) -> Iterator[str]:
        for lane in self.lanes.values():
            data, top, height = lane.data, lane.top, lane.height
            if lane.begins:
                yield svg.text(24, top - 8, data["host"], GRAY, 'font-weight="700"')
                x = 36 + text_width(data["host"], 13.5)
                yield svg.line(x, top - 12, RIGHT + 4, top - 12, "#d3d9df", 1)
            width = RIGHT - self.left + 8
            yield svg.rect(self.left - 4, top, width, height, 'fill="#f5f6f8"', "", 6)
            if "run" in data:  # the run's colour at both ends of the lane
                fill = f'fill="{TRACES_LIGHT[data["run"] % len(TRACES_LIGHT)]}"'
                yield svg.rect(self.left - 8, top, 3, height, fill, "", 1)
                if data["end"] <= self.view[1]:
                    yield svg.rect(self.x(data["end"]), top, 2, height, fill, "", 1)
            yield f'<circle cx="29" cy="{lane.middle:.1f}" r="5" fill="{lane.color}"/>'
            rise = 6 if data["detail"] else 0
            bold = 'font-size="13" font-weight="700"'
            yield svg.text(42, lane.middle + 4.5 - rise, data["name"], INK, bold)
            if rise:
                yield svg.text(42, lane.middle + 14, data["detail"], GRAY)

    def _axis(self) -> Iterator[str]:
        zero = self.picture["start"] or 0.0
        for time, label in ticks(*(t - zero for t in self.view)):
            x = self.x(zero + time)
            yield svg.line(x, self.top, x, self.bottom, "#e9ecef", 1)
            yield svg.text(x, self.bottom + 18, label, GRAY, 'text-anchor="middle"')
        yield svg.line(self.left - 4, self.bottom, RIGHT + 4, self.bottom, "#aab2ba", 1)

    def _foot(self) -> Iterator[str]:
        picture, y, parts = self.picture, self.bottom + 50, []
        if picture["messages"] or not picture["collectives"]:
            parts.append(
                f"{count(picture['messages'], 'message')}, {human_bytes(picture['message_bytes'])}"
            )
        if picture["collectives"]:
            size = human_bytes(picture["collective_bytes"])
            parts.append(f"{count(picture['collectives'], 'collective')}, {size}")
        parts.append(human_seconds((picture["end"] or 0) - (picture["start"] or 0)))
        line = "   ·   ".join(parts)
        yield svg.text(24, y, line, INK, 'font-weight="700" xml:space="preserve"')
        line = "   ·   ".join(f"{value} {label}" for value, label, _ in picture["compared"])
        yield svg.text(24, y + 22, line, GRAY, 'xml:space="preserve"') if line else ""

    def _dim_later(self) -> Iterator[str]:
        """Dim times after the moment shown."""
        if self.until is not None and self.until < self.view[1]:
            x, height = self.x(self.until), self.bottom - self.top
            white = 'fill="#fff" fill-opacity=".8"'
            yield svg.rect(x, self.top, RIGHT + 5 - x, height, white, "", 0)
            yield svg.line(x, self.top, x, self.bottom, INK, 1.2)

    # -- the picture ----------------------------------------------------------------

    def _box(self, bar: Json) -> tuple[float, float, float, float]:
        """Return x, y, width and height; open bars extend to the right edge or a rank's death."""
        lane, left = self.lanes[bar["rank"]], self.x(bar["start"])
        end = lane.data.get("died") if bar["end"] is None else bar["end"]
        right = RIGHT + 3 if end is None else self.x(end)
        y, height = lane.row(bar)
        least = 14 if bar["op"] == "touch" else 2.5
        return left, y, max(right - left - 1, least), height

    def _bar(self, bar: Json) -> str:
        x, y, width, height = self._box(bar)
        lane, look = self.lanes[bar["rank"]], _look(bar)
        color = WARNING_LIGHT if look == "failed" else lane.color
        if look == "mark":
            color = work_color(bar.get("label", ""))
        radius = height / 2 if bar["kind"] == "request" else 3
        box = svg.rect(x, y, width, height, *_fill(look, color), radius)
        open_ = "died in" if "died" in lane.data else self.picture["open"]
        peer = self.lanes.get(bar.get("peer", -1))
        labels = _labels(bar, peer.data["name"] if peer else "", open_) if height >= 11 else []
        label = next((t for t in labels if t and text_width(t, 11.5) < width - 8), "")
        if not label:
            return box
        label_color = svg.readable(color) if look in SOLID else INKS.get(look, INK)
        return box + svg.text(x + 5, y + height / 2 + 4, label, label_color, 'font-size="11.5"')

    def _deaths(self) -> Iterator[str]:
        """Yield a cross and the text "died" for each dead rank."""
        for lane in self.lanes.values():
            died, (first, last) = lane.data.get("died"), self.view
            if died is None or not first <= died <= last:
                continue
            x, y = self.x(died), lane.middle
            right = x + 48 < RIGHT
            side = "" if right else ' text-anchor="end"'
            bold = f'font-weight="700" font-size="12"{side}'
            for rise in (-5, 5):
                yield svg.line(x - 5, y - rise, x + 5, y + rise, WARNING_LIGHT, 2.4)
            yield svg.text(x + (10 if right else -10), y + 4, "died", WARNING_LIGHT, bold)

    def _bands(self) -> Iterator[str]:
        ties: dict[str, list[Json]] = defaultdict(list)
        for bar in self.bars.values():
            if "tie" in bar and _look(bar) != "paused":
                ties[bar["tie"]].append(bar)
        for members in ties.values():
            members.sort(key=lambda bar: self.lanes[bar["rank"]].top)
            mixed = len({bar["op"] for bar in members}) > 1
            for above, below in pairwise(members):
                yield self._band(above, below, WARNING_LIGHT if mixed else INK)

    def _band(self, above: Json, below: Json, color: str) -> str:
        """Return a band between two bars; across other lanes it is only an outline."""
        x1, y1, w1, h1 = self._box(above)
        x2, y2, w2, _ = self._box(below)
        top, middle = y1 + h1, (y1 + h1 + y2) / 2
        order = list(self.lanes)
        adjacent = order.index(below["rank"]) == order.index(above["rank"]) + 1
        path = (
            f"M{x1:.1f} {top:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
            f"{'h' if adjacent else 'm'}{w2:.1f}{'' if adjacent else ' 0'}"
            f"C{x2 + w2:.1f} {middle:.1f} {x1 + w1:.1f} {middle:.1f} "
            f"{x1 + w1:.1f} {top:.1f}{'z' if adjacent else ''}"
        )
        fill = f'fill="{color}" fill-opacity=".08"' if adjacent else 'fill="none"'
        return (
            f'<path d="{path}" {fill} stroke="{color}" stroke-opacity=".{2 if adjacent else 4}"/>'
        )

    def _drawn_arrows(self) -> list[Json]:
        """Return the arrows with a drawn end."""
        arrows = self.picture["arrows"]
        return [a for a in arrows if a.get("send") in self.bars or a.get("recv") in self.bars]

    def _arrow(self, arrow: Json) -> tuple[str, str]:
        """Return the shaft and the head of an arrow."""
        send, recv = self.bars.get(arrow.get("send")), self.bars.get(arrow.get("recv"))
        order = [rank for rank in self.lanes if rank in (arrow["src"], arrow["dst"])]
        down = order.index(arrow["dst"]) >= order.index(arrow["src"]) if len(order) == 2 else True
        y1 = self._edge(send, arrow["src"], bottom=down)
        y2 = self._edge(recv, arrow["dst"], bottom=not down)
        if arrow["sent"] is None or send is None:  # unmatched: draw a stub
            x1 = x2 = self.x(recv["start"] if recv else self.view[0]) + 4
        else:
            x1 = self.x(arrow["sent"])
            x2 = x1 + 26 if arrow["received"] is None else self.x(arrow["received"])
        if arrow["sent"] is not None and arrow["received"] is not None:
            lane = self.lanes.get(arrow["src"])
            color = lane.color if lane else GRAY
            shaft = svg.line(x1, y1, x2, y2, color, 1.6)
            return shaft, svg.arrow_head(x1, y1, x2, y2, color)
        shaft = svg.line(x1, y1, x2, y2, WARNING_LIGHT, 1.6, ' stroke-dasharray="4"')
        x, y = (x1, y1) if arrow["sent"] is None else (x2, y2)
        circle = f'cx="{x:.1f}" cy="{y:.1f}" r="4"'
        return shaft, f'<circle {circle} fill="#fff" stroke="{WARNING_LIGHT}"/>'

    def _edge(self, bar: Json | None, rank: int, *, bottom: bool) -> float:
        """Return the edge of a bar, or of its lane if the bar is missing."""
        if rank not in self.lanes:
            return self.bottom
        if bar is None:
            return self.lanes[rank].edge(bottom=bottom)
        y, height = self.lanes[rank].row(bar)
        return y + height if bottom else y


LEGEND = {
    "send": "send",
    "recv": "receive",
    "collective": "collective",
    "request": "request",
    "store": "store",
    "mark": "step or computation",
}
#: Looks with a solid fill; tints and label colours that differ from the defaults.
SOLID = ("send", "collective", "mark")
TINTS = {"request": 0.42, "open": 0.2, "paused": 0.06, "recv": 0.06}
INKS = {"touch": "#fff", "paused": GRAY, "open": WARNING_LIGHT}


def _labels(bar: Json, peer: str, open_: str) -> list[str]:
    """Return possible labels of a bar, longest first."""
    op, label, look = bar["op"], bar.get("label", ""), _look(bar)
    call = f"{op}({label})" if bar["kind"] == "store" else op
    size = human_bytes(bar["nbytes"]) if bar["nbytes"] else ""
    name = f"{op} {label}".rstrip()
    from_peer = f"{open_} {op} from {peer}" if peer and op == "recv" else ""
    return {
        "mark": [label, label.partition(" (")[0]],
        "touch": [label, "!"],
        "failed": [f"✕ {op} failed", "✕"],
        "paused": [f"paused before {op}", "paused", op],
        "open": [from_peer, f"{open_} {call}", f"{open_} {op}", op],
        "send": [f"send to {peer}", "send"],
        "recv": [f"recv from {peer}", "recv"],
        "store": [call, op],
    }.get(look, [f"{name} {size}".rstrip(), name, op])


def _look(bar: Json) -> str:
    """Return the look of a bar, which depends on its kind and state."""
    if bar["kind"] == "mark":
        return "touch" if bar["op"] == "touch" else "mark"
    if bar["end"] is None:
        return "paused" if bar["state"] == "scheduled" else "open"
    return "failed" if bar["state"] == "failed" else str(bar["kind"])


def _fill(look: str, color: str) -> tuple[str, str]:
    """Return the fill and stroke attributes of a bar."""
    if look in ("touch", *SOLID):
        return f'fill="{WARNING_LIGHT if look == "touch" else color}"', ""
    dash = ' stroke-dasharray="5 3"' if look in ("open", "paused") else ""
    tint = svg.tint(color, TINTS.get(look, 0.16))
    return f'fill="{tint}"', f'stroke="{color}" stroke-width="{1 if look == "recv" else 1.4}"{dash}'
