"""The cockpit's static painter: source, markers, cards and timeline as SVG, and as a table."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator

from distkit._format import aligned
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width
from distkit.views.scene.painter import body
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT, rank_color
from distkit.views.timeline.static import WIDTH, paint

#: At most so many lines of source, of characters in one, of ranks' cards, of cells of a strip.
MAX_LINES, MAX_CHARS, MAX_CARDS, MAX_CELLS = 20, 60, 8, 32
LINE, CARD, LEFT, SPLIT = 18, 96, 24, 560
COLUMNS = ("rank", "state", "call", "line", "waits for")


def to_svg(steps: Json, picture: Json) -> str:
    """The moment shown as an SVG document.

    Args:
        steps: a snapshot of :class:`~distkit.views.cockpit.projection.Stepping`.
        picture: a snapshot of the timeline's projection.
    """
    return _Panel(steps, picture).document()


def to_table(steps: Json, picture: Json) -> str:
    """The moment shown as a table to read in a terminal."""
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}
    rows = [COLUMNS]
    for r in shown(steps)["ranks"]:
        waits = ", ".join(names.get(w, f"rank {w}") for w in r.get("waits", ()))
        rows.append(
            (
                names.get(r["rank"], str(r["rank"])),
                r["doing"],
                r.get("call", ""),
                r.get("where", ""),
                waits,
            )
        )
    ranks = shown(steps)["ranks"]
    why = [
        f"{row[0]}: {r['reason']}"
        for row, r in zip(rows[1:], ranks, strict=True)
        if r.get("reason") and not r.get("waits")
    ]
    return "\n".join(
        [
            f"{steps['name']}: {step(steps)}",
            *(f"  {line}".rstrip() for line in [*aligned(rows), *why]),
            *(f"  ! {remark['message']} {remark['remedy']}".rstrip() for remark in remarks(steps)),
        ]
    )


def shown(steps: Json) -> Json:
    """The moment shown."""
    moment: Json = steps["moments"][steps["position"]][1]
    return moment


def step(steps: Json) -> str:
    """Which moment that is, in words."""
    position, last = steps["position"], len(steps["moments"]) - 1
    told = f"step {position} of {last}" if last else "before the first step"
    told += " · You stopped it here." * bool(steps["stopped"] and position == last)
    return told + (", looking back" if position < last else "")


def remarks(steps: Json) -> list[Json]:
    """What is wrong at the moment shown, as in js/cockpit.js."""
    now = steps["position"] == len(steps["moments"]) - 1
    circle = shown(steps).get("circle")
    if not now or not steps["remarks"]:
        return [{**circle, "remedy": ""}] if circle else []
    first, *more = steps["remarks"]
    return [{**first, "graph": steps.get("graph")}, *more]


_NUMBER = 'text-anchor="middle" font-size="11" font-weight="700"'


class _Panel:
    """Paints one moment, from the top down."""

    def __init__(self, steps: Json, picture: Json) -> None:
        self.steps, self.picture, self.moment = steps, picture, shown(steps)
        self.bars = {bar["id"]: bar for bar in picture["bars"]}
        self.lanes = {lane["rank"]: lane for lane in picture["lanes"]}
        self.order = {rank: i for i, rank in enumerate(self.lanes)}

    def document(self) -> str:
        parts, y = [*self._head()], 52.0
        for remark in remarks(self.steps):
            graph = remark.get("graph")
            scene = graph["scene"] if graph else {"width": 0, "height": 0}
            room = WIDTH - 2 * LEFT - scene["width"]
            lines = textwrap.wrap(f"{remark['message']} {remark['remedy']}", int(room / 6.5))
            tall = max(17 * len(lines) + 8, scene["height"])
            parts += [svg.rect(LEFT, y, 4, tall, f'fill="{WARNING_LIGHT}"', "", 2)]
            parts += [svg.text(LEFT + 14, y + 17 + 17 * i, t, INK) for i, t in enumerate(lines)]
            if graph:
                place = f'transform="translate({LEFT + room:.1f} {y:.1f})"'
                parts.append(f"<g {place}>{body(scene, 0.0)}</g>")
            y += tall + 12
        source, cards = [*self._source(y)], [*self._cards(y)]
        ranks = len(self.moment["ranks"])
        tall = math.ceil(min(ranks, MAX_CARDS) / (1 if ranks <= 4 else 2)) * (CARD + 8)
        y += max(LINE * self._rows + 44, tall + (24 if ranks > MAX_CARDS else 0)) + 8
        until = self.moment["time"] if "looking" in step(self.steps) else None
        drawn, height = paint({**self.picture, "title": ""}, until)
        below = f'<g transform="translate(0 {y:.0f})">{drawn}</g>'
        name = f"{self.steps['name']}, {step(self.steps)}"
        return svg.document(WIDTH, y + height, name, "".join([*parts, *source, *cards, below]))

    def _head(self) -> Iterator[str]:
        name = self.steps["name"]
        yield svg.heading(LEFT, 32, name, step(self.steps))
        doing: dict[str, int] = defaultdict(int)
        for r in self.moment["ranks"]:
            doing[r["doing"]] += 1
        told = "   ".join(f"{n} {word}" for word, n in doing.items())
        yield svg.text(WIDTH - LEFT, 32, told, GRAY, 'text-anchor="end" xml:space="preserve"')

    def _color(self, rank: int) -> str:
        return rank_color(self.order.get(rank, 0))

    def _pin(self, x: float, y: float, r: Json) -> str:
        """A rank's number; hollow and dashed while it is blocked, hollow when it failed."""
        color, blocked = self._color(r["rank"]), r["doing"] == "blocked"
        if r["doing"] in ("failed", "died", "released"):
            ink = GRAY if r["doing"] == "released" else WARNING_LIGHT
            edge = f'stroke="{color if r["doing"] == "released" else WARNING_LIGHT}"'
            number = svg.text(x + 10, y + 12, str(r["rank"]), ink, _NUMBER)
            return svg.rect(x, y, 20, 16, 'fill="#fff"', f'{edge} stroke-width="1.5"', 8) + number
        fill, stroke = f'fill="{color}"', ""
        if blocked:
            fill = f'fill="{svg.tint(color, 0.2)}"'
            stroke = f'stroke="{color}" stroke-width="1.5" stroke-dasharray="3 2"'
        ink = INK if blocked else svg.readable(color)
        return svg.rect(x, y, 20, 16, fill, stroke, 3 if blocked else 8) + svg.text(
            x + 10, y + 12, str(r["rank"]), ink, _NUMBER
        )

    # -- the source ------------------------------------------------------------------

    def _source(self, y: float) -> Iterator[str]:
        """The lines around the markers, of the file that has most of them."""
        at: dict[str, dict[int, list[Json]]] = defaultdict(lambda: defaultdict(list))
        for r in self.moment["ranks"]:
            label, _, line = r.get("where", "").rpartition(":")
            if line.isdigit():
                at[label][int(line)].append(r)
        known = [label for label in self.steps["sources"] if label in at]
        self._rows, width = 0, SPLIT - LEFT - 20
        if not (known or self.steps["sources"]):
            return
        label = max(
            known,
            key=lambda f: sum(map(len, at[f].values())),
            default=next(iter(self.steps["sources"])),
        )
        window = _window(self.steps["sources"][label], list(at[label]) or self._spoken(label))
        self._rows = len(window)
        box = 'stroke="#dde3e9"'
        yield svg.rect(LEFT, y, width, LINE * len(window) + 36, 'fill="#fff"', box, 8)
        yield svg.text(LEFT + 14, y + 19, label, INK, 'font-weight="700"')
        for i, (number, words) in enumerate(window):
            yield from self._line(y + 28 + LINE * i, number, words, at[label].get(number, []))

    def _spoken(self, label: str) -> list[int]:
        """The first line of a file that communicates: what to show of it without markers."""
        places = (bar.get("where", "").rpartition(":") for bar in self.picture["bars"])
        return sorted(int(n) for file, _, n in places if file == label and n.isdigit())[:1]

    def _line(self, y: float, number: int, words: str, here: list[Json]) -> Iterator[str]:
        if here:
            yield svg.rect(LEFT + 1, y, SPLIT - LEFT - 22, LINE, 'fill="#f0f2f4"', "", 0)
        crowd = len(here) > 3
        here = sorted(here, key=lambda r: r["doing"] == "paused")  # the others in sight
        for i, r in enumerate(here[: 2 if crowd else 3]):
            yield self._pin(LEFT + 6 + 22 * i, y + 1, r)
        if crowd:
            yield svg.text(LEFT + 52, y + 13, f"+{len(here) - 2}", GRAY, 'font-size="11"')
        code = f'font-family="{svg.CODE}" font-size="11" xml:space="preserve"'
        yield svg.text(LEFT + 96, y + 13, str(number), GRAY, f'{code} text-anchor="end"')
        shown = words if len(words) <= MAX_CHARS else f"{words[: MAX_CHARS - 1]}…"
        yield svg.text(LEFT + 108, y + 13, shown, INK, code)

    # -- the cards -------------------------------------------------------------------

    def _cards(self, y: float) -> Iterator[str]:
        ranks = self.moment["ranks"]
        columns = 1 if len(ranks) <= 4 else 2
        width = (WIDTH - LEFT - SPLIT - 8 * (columns - 1)) / columns
        for i, r in enumerate(ranks[:MAX_CARDS]):
            x = SPLIT + (i % columns) * (width + 8)
            yield from self._card(x, y + (CARD + 8) * (i // columns), width, r)
        if len(ranks) > MAX_CARDS:
            more = f"… and {len(ranks) - MAX_CARDS} more ranks"
            yield svg.text(SPLIT, y + (CARD + 8) * (MAX_CARDS // columns) + 16, more, GRAY)

    def _card(self, x: float, y: float, width: float, r: Json) -> Iterator[str]:
        yield svg.rect(x, y, width, CARD, 'fill="#fff"', 'stroke="#dde3e9"', 8)
        yield self._pin(x + 10, y + 9, r)
        lane = self.lanes.get(r["rank"], {})
        name, host = lane.get("name", f"rank {r['rank']}"), lane.get("host")
        yield svg.text(x + 38, y + 21, name, INK, 'font-weight="700"')
        if host:
            yield svg.text(x + 46 + text_width(name, 12.5), y + 21, f"on {host}", GRAY)
        yield svg.text(x + width - 12, y + 21, r["doing"], GRAY, 'text-anchor="end"')
        told, left = r.get("call", ""), x + 12
        if told:
            yield svg.text(left, y + 41, told, INK, f'font-family="{svg.CODE}" font-size="11.5"')
            left += 12 + 7 * len(told)
        reason = textwrap.shorten(
            r.get("reason", ""), int((x + width - 8 - left) / 6) or 1, placeholder="…"
        )
        yield svg.text(left, y + 41, reason, WARNING_LIGHT)
        now, last = self.bars.get(r.get("now", "")), self.bars.get(r.get("last", ""))
        before = (now or {}).get("values", [None])[0]
        after = ((last or {}).get("values", []) or [None])[-1]
        found = [("before", before), ("done", after)]
        for i, (when, s) in enumerate((w, s) for w, s in found if s and s["values"]):
            yield from _strip(x + 12, y + 52 + 20 * i, width - 24, when, s)


def _window(source: str, marked: list[int]) -> list[tuple[int, str]]:
    """The numbered lines to show: as many as fit, around the marked ones."""
    lines = list(enumerate(source.expandtabs(4).splitlines(), 1))
    middle = (min(marked) + max(marked)) // 2 if marked else 0
    if marked and max(marked) - min(marked) >= MAX_LINES:
        middle = marked[0]
    first = max(0, min(middle - MAX_LINES // 2, len(lines) - MAX_LINES))
    return lines[first : first + MAX_LINES]


def _strip(x: float, y: float, width: float, when: str, summary: Json) -> Iterator[str]:
    """Values as colours: zero is paper, positive orange, negative blue."""
    values = [v for v in summary["values"] if isinstance(v, float | int)]
    values = values[:: max(1, math.ceil(len(values) / MAX_CELLS))]
    most = max((abs(v) for v in values), default=0) or 1.0
    yield svg.text(x, y + 11, when, GRAY, 'font-size="11"')
    low, high = summary["min"], summary["max"]
    told = f"{low:.3g} to {high:.3g}" if values else "no finite values"
    left, wide = x + 44, width - 44
    if width > 240:
        yield svg.text(x + width, y + 11, told, GRAY, 'font-size="11" text-anchor="end"')
        wide -= 96
    yield svg.rect(left, y, wide, 14, 'fill="#f2f4f6"', "", 2)
    cell = wide / max(1, len(values))
    for i, v in enumerate(values):
        color = svg.tint("#e08200" if v >= 0 else "#0072b2", abs(v) / most)
        place = f"M{left + i * cell:.1f} {y:.0f}h{cell:.1f}v14h-{cell:.1f}z"
        if v:
            yield f'<path fill="{color}" shape-rendering="crispEdges" d="{place}"/>'
