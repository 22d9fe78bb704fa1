"""The static painter of the stage: up to six moments of a run in one picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from distkit.views.scene import svg
from distkit.views.scene.geometry import text_width
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT, rank_color
from distkit.views.scene.units import human_seconds
from distkit.views.stage.projection import FLIGHT, held_at, moments, sentence
from distkit.views.timeline.projection import Json

MAX_BYTES, WIDTH, GAP = 60_000, 960, 24
#: Up to so many ranks have a strip, and up to so many a number.
MAX_STRIPS, MAX_NUMBERS = 16, 32
NEGATIVE, POSITIVE = "#0072b2", "#e08200"


def to_svg(picture: Json) -> str:
    """The storyboard of a run as an SVG document of at most 60 kB."""
    for most in (6, 4, 3, 2, 1):
        drawn = _board(picture, most)
        if len(drawn.encode()) <= MAX_BYTES:
            return drawn
    return _board({**picture, "links": picture["links"][:300]}, 1)


def _board(picture: Json, most: int) -> str:
    shown = moments(picture, most) if picture["beats"] else []
    columns = 3 if len(shown) in (3, 5, 6) else min(len(shown), 2) or 1
    width = (WIDTH - 2 * GAP - (columns - 1) * GAP) / columns
    height = {1: 400.0, 2: 0.66 * width}.get(columns, 0.95 * width)
    notices = picture["notices"] + ([picture["said"]] if picture["said"] else [])
    top = 60 + 20 * len(picture["notices"])
    parts = [*_head(picture)]
    for i, (time, beats) in enumerate(shown):
        x, y = GAP + (i % columns) * (width + GAP), top + (i // columns) * (height + GAP)
        parts += _Frame(picture, time, beats, (x, y, width, height)).draw()
    foot = top + math.ceil(len(shown) / columns) * (height + GAP) + 4
    if not shown:
        parts.append(svg.text(GAP, top + 10, "nothing was said", GRAY))
        foot = top + 30
    for i, words in enumerate(_wrap(notices[-1] if picture["said"] else "")):
        parts.append(svg.text(GAP, foot + 18 * i, words, GRAY))
    return svg.document(WIDTH, foot + 30, picture["title"] or "Stage", "".join(parts))


def _head(picture: Json) -> Iterator[str]:
    title = picture["title"] or "Stage"
    yield svg.heading(GAP, 34, title, " · ".join(picture["facts"]), 17)
    for i, notice in enumerate(picture["notices"]):
        yield svg.text(GAP, 58 + 20 * i, f"! {notice}", WARNING_LIGHT)


def _wrap(words: str, width: float = WIDTH - 2 * GAP) -> list[str]:
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, 12.5) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class _Frame:
    """One moment: ranks in their places, the messages that led to it, what everybody holds."""

    def __init__(
        self, picture: Json, time: float, beats: list[Json], box: tuple[float, float, float, float]
    ) -> None:
        self.picture, self.time, self.beats, self.box = picture, time, beats, box
        nodes = picture["nodes"]
        step = beats[0]["round"] + FLIGHT if beats else 0.0  # nobody is ahead of the others
        self.strips = held_at(picture, step, "rounds") if len(nodes) <= MAX_STRIPS else {}
        self.radius = 13.0 if len(nodes) <= MAX_STRIPS else 9 if len(nodes) <= MAX_NUMBERS else 3
        self.ranks = [node["rank"] for node in nodes]
        self.lanes = {node["rank"]: i for i, node in enumerate(nodes)}
        self.at = {node["rank"]: self._place(node) for node in nodes}

    def _place(self, node: Json) -> tuple[float, float]:
        x, y, width, height = self.box
        aside, above, below = (88, 78, 60) if len(self.ranks) <= MAX_STRIPS else (20, 48, 24)
        wide, deep = width - 2 * aside, height - above - below
        if self.picture["kind"] in ("ring", "star") and len(self.ranks) > 2:  # round
            wide = deep = min(wide, deep)
        middle, level = x + width / 2, y + (height + above - below) / 2
        return middle + (node["x"] - 0.5) * wide, level + (node["y"] - 0.5) * deep

    def draw(self) -> Iterator[str]:
        x, y, width, height = self.box
        yield svg.rect(x, y, width, height, 'fill="#f5f6f8"', "", 10)
        yield svg.text(x + 14, y + 22, self._title(), INK, 'font-size="12.5" font-weight="700"')
        yield svg.text(
            x + width - 14,
            y + 22,
            human_seconds(self.time - self.picture["start"]),
            GRAY,
            'text-anchor="end"',
        )
        lines = (f"M{self._spot(a)}L{self._spot(b)}" for a, b, *_ in self.picture["links"])
        yield f'<path d="{"".join(lines)}" fill="none" stroke="#d5dbe1" stroke-width="1.2"/>'
        for beat in self.beats[:64]:
            yield from self._beat(beat)
        yield from map(self._node, self.picture["nodes"]) if self.radius > 5 else self._dots()
        yield from self._strips()

    def _title(self) -> str:
        if not self.beats:
            return "before"
        if len(self.beats) == 1:
            names = {n["rank"]: n["name"].removeprefix("rank ") for n in self.picture["nodes"]}
            return sentence(self.beats[0], names).split(",")[0]
        rounds = 1 + max(beat["round"] for beat in self.picture["beats"])
        return f"round {self.beats[0]['round'] + 1} of {rounds}"

    def _beat(self, beat: Json) -> Iterator[str]:
        if "members" in beat:
            middle = hub(beat["members"], self.at)
            for rank in beat["members"]:
                if rank in self.at:
                    yield svg.line(*self.at[rank], *middle, self._color(rank), 1.8)
            yield f'<circle cx="{middle[0]:.1f}" cy="{middle[1]:.1f}" r="4.5" fill="{INK}"/>'
        elif beat["src"] in self.at and beat["dst"] in self.at:
            path = _short(self.at[beat["src"]], self.at[beat["dst"]], self.radius + 3)
            color = WARNING_LIGHT if beat["end"] is None else self._color(beat["src"])
            dash = ' stroke-dasharray="4"' if beat["end"] is None else ""
            yield svg.line(*path, color, 2, dash) + svg.arrow_head(*path, color)

    def _color(self, rank: int) -> str:
        return rank_color(self.lanes[rank])

    def _spot(self, rank: int) -> str:
        return "{:.0f} {:.0f}".format(*self.at[rank])

    def _node(self, node: Json) -> str:
        (x, y), color, r = self.at[node["rank"]], self._color(node["rank"]), self.radius
        more = f'text-anchor="middle" font-size="{r + 1:.0f}" font-weight="700"'
        number = svg.text(x, y + r * 0.36, str(node["rank"]), svg.readable(color), more)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{color}"/>{number}'

    def _dots(self) -> Iterator[str]:
        """Very many ranks: one path of dots for each colour."""
        spots: dict[str, str] = defaultdict(str)
        for rank in self.ranks:
            spots[self._color(rank)] += f"M{self._spot(rank)}h0"
        for color, path in spots.items():
            yield f'<path d="{path}" stroke="{color}" stroke-width="6" stroke-linecap="round"/>'

    def _strips(self) -> Iterator[str]:
        """What everybody holds: a path per contributor for the whole frame."""
        tracks, gaps, cells = "", "", ""
        layers: dict[tuple[str, int], str] = defaultdict(str)
        for node in self.picture["nodes"]:
            pieces = self.strips.get(node["rank"])
            if not pieces:
                continue
            width, height = _size(pieces)
            x, y = beside(self.at[node["rank"]], node["out"], self.radius + 7, width, height)
            each = width / len(pieces)
            tracks += _box(x, y, width, height)
            gaps += "".join(_box(x + i * each - 0.6, y, 1.2, height) for i in range(1, len(pieces)))
            if not self.picture["known"]:
                for i, piece in enumerate(pieces):
                    cells += "".join(_values(piece, x + i * each, y, each, height))
                continue
            for key, rank, first, last in _runs(pieces):
                thick = height / len(self.ranks)
                top = y + self.lanes[rank] * thick
                layers[key, rank] += _box(x + first * each, top, (last - first) * each, thick)
        yield f'<path d="{tracks}" fill="#e2e6ea"/>' if tracks else ""
        yield cells
        for (key, rank), path in layers.items():
            more = ' fill-opacity=".35"' if key == "maybe" else ""
            yield f'<path d="{path}" fill="{self._color(rank)}"{more}/>'
        yield f'<path d="{gaps}" fill="#f5f6f8"/>' if gaps else ""


def _runs(pieces: list[Json]) -> Iterator[tuple[str, int, int, int]]:
    """Neighbouring pieces with the same contributor: sure or maybe, who, from where to where."""
    for key in ("sure", "maybe"):
        for rank in sorted({rank for piece in pieces for rank in piece.get(key, ())}):
            first = None
            for i, piece in enumerate([*pieces, {}]):
                inside = rank in piece.get(key, ())
                if inside and first is None:
                    first = i
                elif not inside and first is not None:
                    yield key, rank, first, i
                    first = None


def _box(x: float, y: float, w: float, h: float) -> str:
    return f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z"


def _values(piece: Json, x: float, y: float, w: float, h: float) -> Iterator[str]:
    """Values as colours: zero is paper, positive orange, negative blue."""
    values = [v for v in piece.get("values", ()) if isinstance(v, float | int)]
    most = max(map(abs, values), default=0) or 1
    for i, v in enumerate(values):
        color = svg.tint(NEGATIVE if v < 0 else POSITIVE, abs(v) / most)
        yield svg.rect(x + i * w / len(values), y, w / len(values), h, f'fill="{color}"', "", 0)


def _size(pieces: list[Json]) -> tuple[float, float]:
    """Width and height of a strip."""
    return (max(40.0, min(64.0, 16.0 * len(pieces))), 20.0)


def _short(
    a: tuple[float, float], b: tuple[float, float], by: float
) -> tuple[float, float, float, float]:
    """A line between two points that stays ``by`` away from both."""
    length = math.dist(a, b) or 1.0
    dx, dy = (b[0] - a[0]) / length * by, (b[1] - a[1]) / length * by
    return a[0] + dx, a[1] + dy, b[0] - dx, b[1] - dy


def hub(members: list[int], at: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Where the members of a collective meet: in their middle."""
    points = [at[rank] for rank in members if rank in at] or [(0.0, 0.0)]
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def beside(
    at: tuple[float, float], out: tuple[float, float], away: float, w: float, h: float
) -> tuple[float, float]:
    """The corner of a box that lies ``away`` from a point, in the direction ``out``."""
    (x, y), (ux, uy) = at, out
    reach = away + abs(ux) * w / 2 + abs(uy) * h / 2
    return x + ux * reach - w / 2, y + uy * reach - h / 2
