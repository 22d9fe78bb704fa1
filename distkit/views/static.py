"""The static painter: the picture as SVG, for places where no widget lives.

GitHub, nbconvert, a printed page. It brings its own light card, so that it is legible on
dark pages too, and no style sheet, script or id, so that several fit on one page.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from itertools import pairwise

from distkit.views.geometry import Geometry, text_width
from distkit.views.projection import Json
from distkit.views.theme import WARNING_LIGHT, rank_color
from distkit.views.units import count, human_bytes, human_seconds, round_step, time_unit

#: At most so many operations on so many ranks, and so many bytes; a line says what is left out.
MAX_BARS, MAX_LANES, MAX_BYTES = 200, 48, 60_000
WIDTH = 960
INK, GRAY, FONT = "#17202a", "#5b6773", "Helvetica, Arial, 'Liberation Sans', sans-serif"


def to_svg(picture: Json) -> str:
    """The picture of a run as an SVG document of at most 60 kB.

    >>> from distkit.events import Trace
    >>> from distkit.views.projection import project
    >>> to_svg(project(Trace())).startswith("<svg ")
    True
    """
    limit = MAX_BARS
    svg = _Painter(_part(picture, limit)).svg()
    while len(svg.encode()) > MAX_BYTES and limit > 10:
        limit = limit * 3 // 4
        svg = _Painter(_part(picture, limit)).svg()
    return svg


def _part(picture: Json, limit: int) -> Json:
    """The first operations on the first ranks, with a notice of what that leaves out."""
    lanes = picture["lanes"][:MAX_LANES]
    ranks = {lane["rank"] for lane in lanes}
    bars = sorted((b for b in picture["bars"] if b["rank"] in ranks), key=lambda b: b["start"])
    more, notices, end = bars[limit:], list(picture["notices"]), picture["end"]
    if more:
        end = more[0]["start"]
        cut = human_seconds(end - picture["start"])
        notices.append(f"only the first {cut} are drawn here: {limit} of "
                       f"{count(picture['operations'], 'operation')}")  # fmt: skip
    if len(picture["lanes"]) > MAX_LANES:
        notices.append(f"only the first {MAX_LANES} ranks are drawn here")
    return {**picture, "lanes": lanes, "bars": bars[:limit], "notices": notices, "cut": end}


class _Painter:
    def __init__(self, picture: Json) -> None:
        self.picture, self.view = picture, _view(picture)
        self.notices = picture["notices"]
        self.bars = {bar["id"]: bar for bar in picture["bars"]}
        self.at = Geometry(picture, self.view, WIDTH, 62 + 22 * len(self.notices))
        self.colors = {rank: rank_color(i) for i, rank in enumerate(self.at.lanes)}

    def svg(self) -> str:
        height = self.at.bottom + 74
        size = (f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" '
                'style="max-width:100%;height:auto"')  # fmt: skip
        card = (f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="12" '
                'fill="#fff" stroke="#dde3e9"/>')  # fmt: skip
        parts = [card, *self._head(), *self._lanes()]
        if not self.bars:
            parts.append(_text(24, self.at.bottom - 8, "nothing was recorded", GRAY))
        else:
            parts += self._axis()
            shafts, heads = self._arrows()
            marks = [bar for bar in self.bars.values() if bar["kind"] == "mark"]
            parts += [*map(self._bar, marks), *self._ribbons(), *shafts]
            parts += [self._bar(b) for b in self.bars.values() if b["kind"] != "mark"] + heads
        name = escape(self.picture["title"] or "Timeline")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} font-family="{FONT}" '
            f'font-size="12"><title>{name}</title>{"".join(parts)}{"".join(self._foot())}</svg>'
        )

    # -- around -------------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        title = self.picture["title"] or "Timeline"
        yield _text(24, 32, title, INK, 'font-size="16" font-weight="700"')
        facts = " · ".join(self.picture["facts"])
        yield _text(36 + text_width(title, 16), 32, facts, GRAY)
        x = WIDTH - 24.0
        for kind, word in reversed(_LEGEND):
            if any(bar["kind"] == kind for bar in self.bars.values()):
                x -= text_width(word, 12)
                yield _text(x, 32, word, GRAY)
                yield _rect(x - 29, 22, 22, 12, *_fill(kind, GRAY))
                x -= 48
        for i, notice in enumerate(self.notices):
            yield _text(24, 56 + 22 * i, f"! {notice}", WARNING_LIGHT)

    def _lanes(self) -> Iterator[str]:
        for (rank, lane), height in zip(self.at.lanes.items(), self.at.heights, strict=True):
            top = self.at.tops[rank]
            middle = top + height / 2
            width = self.at.right - self.at.left + 8
            yield _rect(self.at.left - 4, top, width, height, 'fill="#f5f6f8"', "", 6)
            yield f'<circle cx="29" cy="{middle:.1f}" r="5" fill="{self.colors[rank]}"/>'
            up = 4 if lane["detail"] else 0
            yield _text(42, middle + 4.5 - up * 1.5, lane["name"], INK,
                        'font-size="13" font-weight="700"')  # fmt: skip
            if up:
                yield _text(42, middle + 14, lane["detail"], GRAY)

    def _axis(self) -> Iterator[str]:
        at, zero = self.at, self.picture["start"] or 0.0
        top = min(at.tops.values()) - 6
        first, last = self.view[0] - zero, self.view[1] - zero
        step = round_step(last - first, 8)
        scale, unit = time_unit(last * 0.999)
        digits = max(0, -math.floor(math.log10(step * scale) + 1e-9))
        for n in range(math.ceil(first / step - 1e-9), math.floor(last / step) + 1):
            x = at.x(zero + n * step)
            yield _line(x, top, x, at.bottom, "#e9ecef", 1)
            label = "0" if n == 0 else f"{n * step * scale:.{digits}f} {unit}"
            yield _text(x, at.bottom + 18, label, GRAY, 'text-anchor="middle"')
        yield _line(at.left - 4, at.bottom, at.right + 4, at.bottom, "#aab2ba", 1)

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
        yield _text(24, y, told, INK, 'font-weight="700" xml:space="preserve"')
        busy = [f"{lane['name']} {lane['busy']:.0%}" for lane in p["lanes"]]
        x, line = 60 + text_width(told, 12.5), f"in communication: {', '.join(busy)}"
        if busy and x + text_width(line, 12) < WIDTH - 20:
            yield _text(x, y, line, GRAY)

    # -- the picture ----------------------------------------------------------------

    def _bar(self, bar: Json) -> str:
        x, y, width, height = self.at.box(bar)
        failed, is_open = bar["state"] == "failed", bar["end"] is None and bar["kind"] != "mark"
        color = WARNING_LIGHT if failed else self.colors[bar["rank"]]
        fill, stroke = _fill("open" if is_open else "recv" if failed else bar["kind"], color)
        radius = height / 2 if bar["kind"] == "request" else 3
        ink = _ink(bar, color)
        label = next(
            (t for t in _words(bar, self.at.lanes) if t and text_width(t, 11.5) < width - 8), ""
        )
        text = _text(x + 5, y + height / 2 + 4, label, ink, 'font-size="11.5"') if (
            label and height >= 11) else ""  # fmt: skip
        return _rect(x, y, width, height, fill, stroke, radius) + text

    def _ribbons(self) -> Iterator[str]:
        ties: dict[str, list[Json]] = defaultdict(list)
        for bar in self.bars.values():
            if "tie" in bar:
                ties[bar["tie"]].append(bar)
        for members in ties.values():
            members.sort(key=lambda bar: self.at.tops[bar["rank"]])
            mixed = len({bar["op"] for bar in members}) > 1
            for above, below in pairwise(members):
                yield self._ribbon(above, below, WARNING_LIGHT if mixed else INK)

    def _ribbon(self, above: Json, below: Json, color: str) -> str:
        x1, y1, w1, h1 = self.at.box(above)
        x2, y2, w2, _ = self.at.box(below)
        top, middle = y1 + h1, (y1 + h1 + y2) / 2
        path = (
            f"M{x1:.1f} {top:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
            f"h{w2:.1f}C{x2 + w2:.1f} {middle:.1f} {x1 + w1:.1f} {middle:.1f} "
            f"{x1 + w1:.1f} {top:.1f}z"
        )
        paint = f'fill="{color}" fill-opacity=".08" stroke="{color}" stroke-opacity=".2"'
        return f'<path d="{path}" {paint}/>'

    def _arrows(self) -> tuple[list[str], list[str]]:
        """The shafts, which run behind the bars, and the heads, which lie on them."""
        shafts, heads = [], []
        for arrow in self.picture["arrows"]:
            if arrow.get("send") not in self.bars and arrow.get("recv") not in self.bars:
                continue
            path = self.at.path(arrow, self.bars)
            whole = arrow["sent"] is not None and arrow["received"] is not None
            color = self.colors.get(arrow["src"], GRAY) if whole else WARNING_LIGHT
            shafts.append(_line(*path, color, 1.6, "" if whole else ' stroke-dasharray="4"'))
            x, y = path[2:] if arrow["sent"] is not None else path[:2]
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#fff" stroke="{color}"/>'
            heads.append(_head(*path, color) if whole else dot)
        return shafts, heads


_LEGEND = (("send", "send"), ("recv", "receive"), ("collective", "collective"),
           ("request", "request"), ("mark", "computation"))  # fmt: skip


def _view(picture: Json) -> tuple[float, float]:
    """The first and the last time to draw, with a margin; a wider one for what is still open."""
    start, end = picture["start"] or 0.0, picture["cut"] or 0.0
    span = max(end - start, 1e-6)
    stuck = any(bar["end"] is None and bar["kind"] != "mark" for bar in picture["bars"])
    return start - 0.012 * span, start + span * (1.12 if stuck else 1.02)


def _words(bar: Json, lanes: dict[int, Json]) -> list[str]:
    """What may stand in a bar, the longest first."""
    op, peer = bar["op"], lanes.get(bar.get("peer", -1), {}).get("name", "")
    if bar["kind"] == "mark":
        return [bar.get("label", "")]
    if bar["state"] == "failed":
        return [f"✕ {op} failed", "✕"]
    if bar["end"] is None:
        return [f"still in {op} from {peer}" if peer and op == "recv" else "", f"still in {op}", op]
    if bar["kind"] == "send":
        return [f"send to {peer}", "send"]
    if bar["kind"] == "recv":
        return [f"recv from {peer}", "recv"]
    detail = bar.get("label", "") or (human_bytes(bar["nbytes"]) if bar["nbytes"] else "")
    return [f"{op} {detail}".rstrip(), op]


def _fill(kind: str, color: str) -> tuple[str, str]:
    """How a kind of operation is filled and outlined."""
    if kind == "mark":
        return f'fill="{INK}" fill-opacity=".09"', ""
    if kind in ("send", "collective"):
        return f'fill="{color}"', ""
    tint = _tint(color, {"request": 0.42, "open": 0.2}.get(kind, 0.16))
    dash = ' stroke-dasharray="5 3"' if kind == "open" else ""
    return f'fill="{tint}"', f'stroke="{color}" stroke-width="1.4"{dash}'


def _tint(color: str, strength: float) -> str:
    """A colour on white paper, opaque."""
    mixed = (round(255 + strength * (c - 255)) for c in _channels(color))
    return f"#{''.join(f'{c:02x}' for c in mixed)}"


def _channels(color: str) -> tuple[int, ...]:
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def _ink(bar: Json, color: str) -> str:
    if bar["kind"] == "mark":
        return GRAY
    if bar["end"] is None:
        return WARNING_LIGHT
    if bar["kind"] not in ("send", "collective") or bar["state"] == "failed":
        return INK
    red, green, blue = _channels(color)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#fff"


def _rect(x: float, y: float, w: float, h: float, fill: str, stroke: str, rx: float = 3) -> str:
    if stroke:  # inside the box, as on the canvas
        x, y, w, h = x + 0.7, y + 0.7, max(w - 1.4, 0.8), h - 1.4
    radius = min(rx, w / 2, h / 2)
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:.1f}"'
    return f"<rect {shape} {fill}{' ' + stroke if stroke else ''}/>"


def _text(x: float, y: float, text: str, color: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" {more}>{escape(text)}</text>'


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float, more: str = ""
) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{color}" stroke-width="{width}"{more}/>'


def _head(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    size = min(9.0, length)
    bx, by, half = x2 - ux * size, y2 - uy * size, 0.42 * size
    points = ((x2, y2), (bx - uy * half, by + ux * half), (bx + uy * half, by - ux * half))
    place = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{place}" fill="{color}" stroke="#fff" stroke-width=".8"/>'
