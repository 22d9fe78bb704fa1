"""Coordinates in the static picture: the same rules as js/layout.js, for a fixed width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from distkit.views.scene.frame import Json
from distkit.views.scene.theme import SIZES

#: The length of an arrow's head [pixels].
INSIDE = 10
#: The height of a host's name above its lanes [pixels].
HEAD = 22

#: Widths of Helvetica's letters, in parts of the font size; no font is measured here.
_WIDTHS = {
    c: w
    for letters, w in (
        (" fijlt.,:;|'![]()/", 0.3),
        ('r-"*', 0.36),
        ("mMwW@%…→", 0.87),
        ("ABCDEFGHJKLNOPQRSTUVXYZ&", 0.7),
    )
    for c in letters
}


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


def text_width(text: str, size: float) -> float:
    """About how wide a text is, in pixels."""
    return size * sum(_WIDTHS.get(c, 0.56) for c in text)


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
