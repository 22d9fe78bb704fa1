"""Draws a timeline as SVG for front ends without widgets, such as GitHub, nbconvert and print.

The picture has a light background, so that it is legible on dark pages. It has no style sheet,
script or id, so that a page can contain several pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from distkit._format import count, human_bytes, human_seconds, ticks
from distkit.views.scene import svg
from distkit.views.scene.frame import Json, notice_lines
from distkit.views.scene.svg import text_width
from distkit.views.scene.theme import (
    GRAY,
    INK,
    SIZES,
    TRACES_LIGHT,
    WARNING_LIGHT,
    WORK_LIGHT,
    rank_color,
    work_kind,
)
from distkit.views.scene.values import fitting

#: At most MAX_BARS operations and MAX_LANES ranks are drawn; a notice states how many.
MAX_BARS, MAX_LANES = 200, 48
#: Sizes [px]. RIGHT is the right edge of the lanes, and HEAD is the length of an arrowhead. A label
#: may follow a mark that is at least MIN_LABELED wide.
WIDTH, RIGHT, HOST_HEIGHT, HEAD, MIN_LABELED = 960, 926.0, 22, 10, 12
GAP, PAD, BOLD = SIZES["gap"], SIZES["pad"], 'font-size="13" font-weight="700"'

#: The legend's text for each kind of bar.
LEGEND = {
    "send": "send",
    "recv": "receive",
    "collective": "collective",
    "request": "request",
    "store": "store",
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
    "": "computation",
}
#: The opacity of a bar by style; an opaque bar has no outline.
OPACITIES = {
    "send": 1.0,
    "collective": 1.0,
    "mark": 1.0,
    "touch": 1.0,
    "request": 0.42,
    "open": 0.2,
    "paused": 0.06,
    "recv": 0.06,
    "store": 0.16,
    "failed": 0.16,
}

#: x, y, width, height.
Box = tuple[float, float, float, float]


def to_svg(picture: Json) -> str:
    """Return the picture of a run as an SVG document, of at most 60 kB if possible.

    >>> from distkit.trace.log import EventLog
    >>> from distkit.views.timeline.columns import Columns
    >>> to_svg(Columns(EventLog()).picture(MAX_BARS)).startswith("<svg ")
    True
    """
    return svg.fitting(_document(picture, int(MAX_BARS * 0.75**n)) for n in range(11))


def _document(picture: Json, limit: int) -> str:
    body, height = render(picture, limit)
    return svg.document(WIDTH, height, picture["title"] or "Timeline", body)


def render(picture: Json, limit: int = MAX_BARS // 2) -> tuple[str, float]:
    """Return the SVG elements of a picture without its background, and their height.

    Args:
        picture: a picture with bars and arrows as objects, such as that of ``Columns.picture``.
        limit: maximum number of operations; a notice states how many are drawn.
    """
    renderer = _Renderer(_limited(picture, limit))
    return "".join(renderer.render()), renderer.height


def totals(picture: Json) -> list[str]:
    """Return the numbers of messages and collectives, their sizes, and the duration as text."""
    if picture["start"] is None:
        return []
    sums = [
        f"{count(picture[f'{word}s'], word)} ({human_bytes(picture[f'{word}_bytes'])})"
        for word in ("message", "collective")
        if picture[f"{word}s"]
    ]
    return [*sums, human_seconds(picture["end"] - picture["start"])]


def _limited(picture: Json, limit: int) -> Json:
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
        "notes": [*picture["notes"], *notes],
        "cut": end,
    }


class _Lane:
    """The geometry of a lane [px]: rows of communication above rows of marked computation."""

    def __init__(self, data: Json, number: int, top: float) -> None:
        self.data, self.top = data, top
        self.color = rank_color(data.get("color", number))
        self.rows = min(max(1, data["rows"]) * (SIZES["row"] + GAP) - GAP, SIZES["max_rows"])
        self.marks = min(data["marks"] * (SIZES["mark"] + GAP), SIZES["max_rows"] / 2 + GAP)
        self.height = 2 * PAD + self.rows + self.marks
        self.middle = top + self.height / 2

    def row(self, bar: Json) -> tuple[float, float]:
        """Return the top and the height of a bar."""
        top, height, rows = self.top + PAD, self.rows, self.data["rows"]
        if bar["kind"] == "mark":
            top, height, rows = top + self.rows + GAP, self.marks - GAP, self.data["marks"]
        pitch = (height + GAP) / max(1, rows)
        return top + bar["row"] * pitch, pitch - min(GAP, pitch * 0.2)


class _Renderer:
    def __init__(self, picture: Json) -> None:
        self.picture, self.notices = picture, notice_lines(picture)
        self.lanes: dict[int, _Lane] = {}
        self.hosts: dict[str, float] = {}  # top of each host's first lane
        self.bottom = self._arrange(62.0 + 22 * len(self.notices))
        self.height = self.bottom + (40 if picture.get("bare") else 74)
        widths = [
            max(text_width(lane["name"], 14), text_width(lane["detail"], 12))
            for lane in picture["lanes"]
        ]
        self.left = min(62 + max([22.0, *widths]), 230)
        start = picture["start"] or 0.0
        span = max((picture["cut"] or 0.0) - start, 1e-6)
        has_open = any(bar["end"] is None and bar["kind"] != "mark" for bar in picture["bars"])
        self.view = start - 0.012 * span, start + span * (1.12 if has_open else 1.02)
        self.boxes = {bar["id"]: self._box(bar) for bar in picture["bars"]}
        #: Labels that fit into at least one of their marks, in full or shortened.
        self.fitting_labels = {
            bar["label"]
            for bar in picture["bars"]
            if bar["kind"] == "mark" and "label" in bar and self._label_in_bar(bar)
        }
        # a collective is named once: on the first rank with space for its longest text
        ended = sorted(
            (b for b in picture["bars"] if "collective" in b and b["state"] == "completed"),
            key=lambda bar: (len(self._label(bar)[0]), -self.lanes[bar["rank"]].top),
        )
        self.unnamed = {bar["id"] for bar in ended}.difference(
            {(bar["collective"], bar["op"]): bar["id"] for bar in ended}.values()
        )

    def _arrange(self, y: float) -> float:
        """Place the lanes below ``y`` and return their bottom edge."""
        drawn = self.picture["lanes"]
        if not drawn:
            return y + 60
        gap = min(max(SIZES["height"] / len(drawn) - 48, SIZES["min_gap"]), SIZES["max_gap"])
        for number, data in enumerate(drawn):
            if "host" in data and data["host"] not in self.hosts:
                y += HOST_HEIGHT
                self.hosts[data["host"]] = y
            lane = self.lanes[data["rank"]] = _Lane(data, number, y)
            y += lane.height + gap
        return y + 10 - gap

    def render(self) -> Iterator[str]:
        """Yield the elements of the picture, from back to front."""
        yield from self._head()
        yield from self._lanes()
        if self.boxes:
            yield from self._content()
        else:
            yield svg.text(24, self.bottom - 8, "nothing was recorded", GRAY)
        if not self.picture.get("bare"):
            yield self._foot()

    def _content(self) -> Iterator[str]:
        """Yield the time axis and the content of the lanes."""
        yield from self._axis()
        arrows = [
            self._arrow(arrow)
            for arrow in self.picture["arrows"]
            if arrow.get("send") in self.boxes or arrow.get("recv") in self.boxes
        ]
        drawn = [self._bar(bar) for bar in self.picture["bars"]]
        yield from self._bands()
        yield from (box for box, _ in drawn)
        yield from (shaft for shaft, _ in arrows)
        yield from (label for _, label in drawn)  # keeps labels legible above the arrows
        yield from (head for _, head in arrows)
        yield from self._deaths()

    def x(self, time: float) -> float:
        """Return the x coordinate of a time, clamped to the plot."""
        first, last = self.view
        return self.left + min(max((time - first) / (last - first), 0), 1) * (RIGHT - self.left)

    # -- frame --------------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        title, facts = self.picture["title"] or "Timeline", " · ".join(self.picture["facts"])
        kinds, x = {_kind(bar) for bar in self.picture["bars"]}, WIDTH - 24.0
        for kind, label in reversed(LEGEND.items()):
            if kind in kinds:
                x -= text_width(label, 12)
                yield svg.text(x, 32, label, GRAY)
                style, color = (
                    ("mark", WORK_LIGHT[kind]) if kind in WORK_LIGHT else (kind, rank_color(0))
                )
                yield svg.rect(x - 29, 22, 22, 12, *_fill(style, color))
                x -= 48
        space = x - 24 - text_width(title, 17) - 14
        yield svg.heading(24, 32, title, facts if text_width(facts, 12) < space else "")
        for i, notice in enumerate(self.notices):
            yield svg.text(24, 56 + 22 * i, notice, svg.notice_color(notice))

    def _lanes(self) -> Iterator[str]:
        for host, top in self.hosts.items():
            yield svg.text(24, top - 8, host, GRAY, 'font-weight="700"')
            x = 36 + text_width(host, 13.5)
            yield svg.line(x, top - 12, RIGHT + 4, top - 12, "#d3d9df", 1)
        for lane in self.lanes.values():
            data, top, height, x = lane.data, lane.top, lane.height, self.left - 4
            yield svg.rect(x, top, RIGHT + 4 - x, height, 'fill="#f5f6f8"', "", 6)
            if "run" in data:  # the run's color at its heading and at its end
                fill = f'fill="{TRACES_LIGHT[data["run"] % len(TRACES_LIGHT)]}"'
                x, heading = self.x(data["end"]), self.hosts[data["host"]] == top
                yield svg.rect(x, top, 2, height, fill, "", 1)
                yield svg.rect(10, top - 17, 10, 10, fill, "", 1) if heading else ""
                end = 'text-anchor="middle" font-size="11"'
                yield svg.text(x + 1, top - 8, "end", GRAY, end) if heading else ""
            yield f'<circle cx="29" cy="{lane.middle:.1f}" r="5" fill="{lane.color}"/>'
            rise = 6 if data["detail"] else 0
            yield svg.text(42, lane.middle + 4.5 - rise, data["name"], INK, BOLD)
            yield svg.text(42, lane.middle + 14, data["detail"], GRAY) if rise else ""

    def _axis(self) -> Iterator[str]:
        zero, top = self.picture["start"] or 0.0, next(iter(self.lanes.values())).top - 6
        for time, label in ticks(*(t - zero for t in self.view)):
            x = self.x(zero + time)
            yield svg.line(x, top, x, self.bottom, "#e9ecef", 1)
            yield svg.text(x, self.bottom + 18, label, GRAY, 'text-anchor="middle"')
        yield svg.line(self.left - 4, self.bottom, RIGHT + 4, self.bottom, "#aab2ba", 1)

    def _foot(self) -> str:
        hosts = (f"{value} {label}" for value, label, _ in self.picture["host_totals"])
        bold = 'font-weight="700" xml:space="preserve"'
        return svg.text(
            24, self.bottom + 50, "   ·   ".join([*totals(self.picture), *hosts]), INK, bold
        )

    # -- the picture ----------------------------------------------------------------

    def _box(self, bar: Json) -> Box:
        """Return the box of a bar; open bars extend to the right edge or their rank's death."""
        lane, left = self.lanes[bar["rank"]], self.x(bar["start"])
        end = lane.data.get("died") if bar["end"] is None else bar["end"]
        right = RIGHT + 3 if end is None else self.x(end)
        y, height = lane.row(bar)
        return left, y, max(right - left - 1, 14 if bar["op"] == "touch" else 2.5), height

    def _bar(self, bar: Json) -> tuple[str, str]:
        (x, y, width, height), style = self.boxes[bar["id"]], _style(bar)
        color = self.lanes[bar["rank"]].color
        if style in ("failed", "touch"):
            color = WARNING_LIGHT
        elif style == "mark":
            color = WORK_LIGHT[_kind(bar)]
        label, follows = ("", False) if bar["id"] in self.unnamed else self._label(bar)
        opacity = 0 if follows else OPACITIES[style]
        ink = svg.readable(color) if opacity == 1 else (WARNING_LIGHT if style == "open" else INK)
        halo = (
            f'font-size="11.5" stroke="{svg.tint(color, opacity)}" stroke-width="3" '
            'paint-order="stroke" stroke-linejoin="round"'
        )
        start = x + width + 4 if follows else x + min(5, width / 6)
        return (
            svg.rect(
                x,
                y,
                width,
                height,
                *_fill(style, color),
                height / 2 if bar["kind"] == "request" else 3,
            ),
            svg.text(start, y + height / 2 + 4, label, ink, halo) if label else "",
        )

    def _label(self, bar: Json) -> tuple[str, bool]:
        """Return the longest label that fits, and whether it is placed after the bar.

        A mark's label is placed after it if none of the marks with that label is wide enough.
        """
        (x, y, width, height), style = self.boxes[bar["id"]], _style(bar)
        if style != "mark" or width < MIN_LABELED or bar.get("label") in self.fitting_labels:
            return self._label_in_bar(bar), False
        later_boxes = (left for left, top, *_ in self.boxes.values() if left > x and top == y)
        space = min(later_boxes, default=RIGHT) - x - width - 10
        return fitting(self._labels(bar, style), space, 11.5) if height >= 11 else "", True

    def _label_in_bar(self, bar: Json) -> str:
        (_, _, width, height), labels = self.boxes[bar["id"]], self._labels(bar, _style(bar))
        return fitting(labels, width - min(8, width / 4), 11.5) if height >= 11 else ""

    def _labels(self, bar: Json, style: str) -> list[str]:
        """Return the possible labels of a bar, longest first."""
        op, label, call = bar["op"], bar.get("label", ""), bar["op"]
        if bar["kind"] == "mark":
            name, arrow, _ = label.partition(" → ")
            short = "" if arrow else label[len(label.rstrip("0123456789")) :]
            return [label, name.partition(" (")[0], {"touch": "!", "failed": "✕"}.get(style, short)]
        if style == "failed":
            return [f"✕ {op} failed", "✕"]
        if bar["kind"] == "store":
            call = f"{op}({label})"
        elif bar["kind"] in ("send", "recv") and bar.get("peer") in self.lanes:
            peer = self.lanes[bar["peer"]].data["name"]
            call = label or f"{op} {'to' if op == 'send' else 'from'} {peer}"
        if style in ("open", "paused"):
            ended = "died in" if "died" in self.lanes[bar["rank"]].data else self.picture["open"]
            verb = "paused before" if style == "paused" else ended
            return [f"{verb} {call}", f"{verb} {op}", op]
        if bar["kind"] in ("send", "recv", "store"):
            return [call, op]
        name, size = f"{op} {label}".rstrip(), bar["nbytes"]
        return [f"{name} {human_bytes(size)}" if size else name, name, op]

    def _deaths(self) -> Iterator[str]:
        """Yield a cross and the text "died" for each dead rank."""
        for lane in self.lanes.values():
            died = lane.data.get("died")
            if died is None or died > self.view[1]:
                continue
            x, y = self.x(died), lane.middle
            for rise in (-5, 5):
                yield svg.line(x - 5, y - rise, x + 5, y + rise, WARNING_LIGHT, 2.4)
            yield svg.text(x + 10, y + 4, "died", WARNING_LIGHT, 'font-weight="700"')

    def _bands(self) -> Iterator[str]:
        """Yield bands that connect the members of each collective, from lane to lane."""
        collectives: dict[str, list[Json]] = defaultdict(list)
        for bar in self.picture["bars"]:
            if "collective" in bar and _style(bar) != "paused":
                collectives[bar["collective"]].append(bar)
        order = list(self.lanes)
        for members in collectives.values():
            members.sort(key=lambda bar: order.index(bar["rank"]))
            color = WARNING_LIGHT if len({bar["op"] for bar in members}) > 1 else INK
            for upper, lower in pairwise(members):
                adjacent = order.index(lower["rank"]) == order.index(upper["rank"]) + 1
                yield _band(self.boxes[upper["id"]], self.boxes[lower["id"]], color, adjacent)

    def _arrow(self, arrow: Json) -> tuple[str, str]:
        """Return the shaft and the head of an arrow; an arrow with a missing end is a stub."""
        send, recv = self.boxes.get(arrow.get("send")), self.boxes.get(arrow.get("recv"))
        (y1, h1), (y2, h2) = self._extent(send, arrow["src"]), self._extent(recv, arrow["dst"])
        down = 1 if y2 >= y1 else -1
        if recv and recv[2] < HEAD:  # the head would cover the bar
            lane = self.lanes[arrow["dst"]]
            y2, h2 = lane.middle, lane.height - 2 * PAD
        y1 += down * h1 / 2
        # the arrow ends at the edge of the lane or its rows, or else in the middle of the bar
        y2 -= down * h2 / 2 if not recv or h2 > self.lanes[arrow["dst"]].height - 2 * PAD - 1 else 0
        sent, received = arrow["sent"], arrow["received"]
        if sent is None:
            x1 = x2 = (recv[0] if recv else self.left) + 4
        else:
            x1 = self.x(sent)
            x2 = x1 + 26 if received is None else self.x(received)
        if sent is not None and received is not None:
            color = self.lanes[arrow["src"]].color if arrow["src"] in self.lanes else GRAY
            shaft = svg.line(x1, y1, x2, y2, color, 1.6)
            return shaft, svg.arrow_head(x1, y1, x2, y2, color)
        shaft = svg.line(x1, y1, x2, y2, WARNING_LIGHT, 1.6, ' stroke-dasharray="4"')
        x, y = (x1, y1 + 5 * down) if sent is None else (x2, y2 - 5 * down)
        return shaft, (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#fff" stroke="{WARNING_LIGHT}"/>'
        )

    def _extent(self, box: Box | None, rank: int) -> tuple[float, float]:
        """Return the middle and the height of a bar, or of its lane if the bar is missing."""
        if box:
            return box[1] + box[3] / 2, box[3]
        lane = self.lanes.get(rank)
        return (lane.middle, lane.height) if lane else (self.bottom, 0.0)


def _band(upper: Box, lower: Box, color: str, adjacent: bool) -> str:
    """Return a band between two bars; a band that crosses other lanes is only an outline."""
    (x1, y1, w1, h1), (x2, y2, w2, _) = upper, lower
    top, middle = y1 + h1, (y1 + h1 + y2) / 2
    path = (
        f"M{x1:.1f} {top:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
        f"h{w2:.1f}C{x2 + w2:.1f} {middle:.1f} {x1 + w1:.1f} {middle:.1f} "
        f"{x1 + w1:.1f} {top:.1f}z"
    )
    fill = f'fill="{color}" fill-opacity=".08"' if adjacent else 'fill="none"'
    return f'<path d="{path}" {fill} stroke="{color}" stroke-opacity=".{2 if adjacent else 4}"/>'


def _kind(bar: Json) -> str:
    return work_kind(bar.get("label", "")) if _style(bar) == "mark" else str(bar["kind"])


def _style(bar: Json) -> str:
    """Return the style of a bar, which depends on its kind and state."""
    if bar["op"] == "touch":
        return "touch"
    if bar["end"] is None and bar["kind"] != "mark":
        return "paused" if bar["state"] == "scheduled" else "open"
    kind = "recv" if bar["op"] == "barrier" else str(bar["kind"])  # a barrier only waits
    return "failed" if bar["state"] == "failed" else kind


def _fill(style: str, color: str) -> tuple[str, str]:
    """Return the fill and stroke attributes of a bar."""
    opacity = OPACITIES[style]
    dash = ' stroke-dasharray="5 3"' if style in ("open", "paused") else ""
    stroke = f'stroke="{color}" stroke-width="{1 if style == "recv" else 1.4}"{dash}'
    return f'fill="{svg.tint(color, opacity)}"', "" if opacity == 1 else stroke
