"""A moment of a parameter server as SVG: cards with keys and inboxes, workers, the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT, rank_color
from distkit.views.scene.units import human_bytes
from distkit.views.servers.state import Moment, RowState

CARD, EDGE = "#f7f8f9", "#c9d0d7"
MIDDLE, END = 'text-anchor="middle"', 'text-anchor="end"'


class Scene:
    """Paints one moment, as js/serversscene.js does in the browser."""

    def __init__(self, picture: Json, now: Moment) -> None:
        self.picture, self.now = picture, now
        self.lane = {rank: i for rank, i, _ in picture["lanes"]}
        self.people = {w["rank"]: w for w in picture["workers"]}

    def color(self, rank: int) -> str:
        """The colour of a rank."""
        return rank_color(self.lane.get(rank, 7))

    def body(self) -> str:
        """The scene, ``picture["width"]`` by ``picture["height"]`` pixels."""
        return "".join([*self._links(), *self._cards(), *self._scheduler(), *self._people()])

    def _links(self) -> Iterator[str]:
        cards, workers = self.picture["cards"], self.picture["workers"]
        lines = [
            f"M{w['x']:.0f} {w['y'] - w['r']:.0f}L{c['x'] + c['w'] / 2:.0f} {c['y'] + c['h']}"
            for w in workers
            for c in cards
        ]
        yield f'<path d="{"".join(lines)}" stroke="#e3e7eb" stroke-width="1.5" fill="none"/>'
        for rank, (kind, _, awaited) in self.now.status.items():
            for other in awaited if kind == "waits" and rank in self.people else ():
                if other in self.people:
                    yield _arc(self.people[rank], self.people[other])

    def _cards(self) -> Iterator[str]:
        edge = f'stroke="{EDGE}"'
        for c in self.picture["cards"]:
            yield svg.rect(c["x"], c["y"], c["w"], c["h"], f'fill="{CARD}"', edge, 10)
            fill = f'fill="{self.color(c["rank"])}"'
            yield svg.rect(c["x"] + 12, c["y"] + 14, 11, 11, fill, "", 3)
            yield svg.text(c["x"] + 30, c["y"] + 24, c["name"], INK, 'font-weight="700"')
            if c["more"]:
                y = c["y"] + c["h"] - 8
                yield svg.text(c["x"] + 12, y, f"and {c['more']} more keys", GRAY)
        for stub in self.picture["stubs"]:
            yield svg.text(stub["x"], stub["y"] + 5, stub["text"], GRAY, MIDDLE)
        for row, state in zip(self.picture["rows"], self.now.rows, strict=True):
            if row["shown"]:
                yield from self._row(row, state)

    def _row(self, row: Json, state: RowState) -> Iterator[str]:
        x, y, w = row["x"], row["y"], row["w"]
        name = cut(row["key"], w - 50)
        code = f'font-family="{svg.CODE}" font-size="12" font-weight="700"'
        yield svg.text(x, y + 18, name, INK, code)
        part = " · part {} of {}".format(*row["part"]) if row["part"] else ""
        size = human_bytes(row["nbytes"]) + part
        if row["nbytes"] and 7.4 * len(name) + text_width(size, 11) + 18 < w - 38:
            yield svg.text(x + 7.4 * len(name) + 10, y + 18, size, GRAY, 'font-size="11"')
        if state.version is None:
            yield svg.text(x + w, y + 18, "no value yet", GRAY, END)
        else:
            words = f"v{state.version}"
            wide = max(34, 8 * len(words) + 14)
            edge = f'stroke="{INK}" stroke-width="1.3"'
            yield svg.rect(x + w - wide, y + 4, wide, 20, 'fill="#fff"', edge, 10)
            bold = f'{MIDDLE} font-weight="700"'
            yield svg.text(x + w - wide / 2, y + 18.5, words, INK, bold)
        yield from self._inbox(row, state)
        yield from self._last(x + w, y + 41, state)

    def _inbox(self, row: Json, state: RowState) -> Iterator[str]:
        quorum, team = self.picture["quorum"], self.picture["team"]
        edge = f'stroke="{EDGE}" stroke-dasharray="3 2.5"'
        small = f'{MIDDLE} font-size="11"'
        if len(row["slots"]) < quorum:
            x, y, w, h = row["slots"][0]
            part = min(1.0, len(state.slots) / quorum)
            yield svg.rect(x, y + 4, w, 9, 'fill="#eef0f2"', "", 4)
            yield svg.rect(x, y + 4, max(1.0, w * part), 9, f'fill="{INK}"', "", 4)
            words = f"{len(state.slots)}/{quorum}"
            yield svg.text(x + w + 6, y + 13, words, GRAY, 'font-size="11"')
        else:
            for i, (x, y, w, h) in enumerate(row["slots"]):
                here = [(worker, v) for slot, worker, v in state.slots if slot == i]
                if not here:
                    yield svg.rect(x, y, w, h, 'fill="#fff"', edge, 4)
                    if i < len(team) and w > 14:
                        yield svg.text(x + w / 2, y + 12.5, str(team[i]), GRAY, small)
                    continue
                color = self.color(here[0][0])
                yield svg.rect(x, y, w, h, f'fill="{color}"', "", 4)
                words = f"×{len(here)}" if len(here) > 1 else f"∇v{here[0][1]}"
                if w >= 5 + 6 * len(words):
                    yield svg.text(x + w / 2, y + 12.5, words, svg.readable(color), small)
        x, y = row["wait"]
        fits = min(5, int((row["x"] + row["w"] - x - 44) / 15))
        if len(state.held) > fits:
            yield svg.text(x - 5, y + 4, f"{len(state.held)} wait", GRAY, 'font-size="11"')
            return
        for i, worker in enumerate(state.held):
            ring = f'stroke="{self.color(worker)}" stroke-width="2.6" stroke-dasharray="3.2 2.2"'
            yield f'<circle cx="{x + 15 * i:.1f}" cy="{y}" r="6" fill="#fff" {ring}/>'

    def _last(self, x: float, y: float, state: RowState) -> Iterator[str]:
        """The workers of the last update, and how late their gradients were."""
        late = max((n for _, n in state.last), default=0)
        words = f"{late} late" if late else "fresh" if len(state.last) == 1 else ""
        if words:
            bold = ' font-weight="700"' if late else ""
            color = WARNING_LIGHT if late else GRAY
            yield svg.text(x, y, words, color, f'{END} font-size="11.5"{bold}')
            x -= text_width(words, 13) + 11
        for i, (worker, _) in enumerate(reversed(state.last[:4])):
            fill = self.color(worker)
            yield f'<circle cx="{x - 5 - 11 * i:.1f}" cy="{y - 4}" r="4.2" fill="{fill}"/>'

    def _scheduler(self) -> Iterator[str]:
        for s in self.picture["scheduler"]:
            x, y, here = s["x"], s["y"], len(self.now.present)
            all_ = self.picture["everybody"]
            words = f"all {all_} registered" if here >= all_ else f"{here} of {all_} registered"
            yield svg.rect(x - 62, y - 27, 124, 54, f'fill="{CARD}"', f'stroke="{EDGE}"', 27)
            yield svg.text(x, y - 2, s["name"], INK, f'{MIDDLE} font-weight="700"')
            yield svg.text(x, y + 15, words, GRAY, f'{MIDDLE} font-size="11"')

    def _people(self) -> Iterator[str]:
        for w in self.people.values():
            kind, text, _ = self.now.status.get(w["rank"], ("", "", []))
            x, y, r, color = w["x"], w["y"], w["r"], self.color(w["rank"])
            place, waits = f'cx="{x:.1f}" cy="{y}" r="{r}"', kind == "waits"
            look = f'fill="{color}"'
            if waits:
                look = f'fill="#fff" stroke="{color}" stroke-width="3" stroke-dasharray="5.5 4"'
            pale = ' opacity=".35"' if kind == "ended" else ""
            yield f"<circle {place} {look}{pale}/>"
            ink = INK if waits else svg.readable(color)
            size = f'{MIDDLE} font-size="{r * 0.9:.0f}" font-weight="700"'
            yield svg.text(x, y + r * 0.33, str(w["rank"]), ink, size)
            if w["room"] >= 66:
                room = w["room"]
                said = text.replace("worker ", "") if 6.8 * len(text) > room else text
                name = cut(w["name"], room)
                yield svg.text(x, y + r + 19, name, INK, f'{MIDDLE} font-weight="700"')
                yield svg.text(x, y + r + 37, cut(said, room + 14), INK if waits else GRAY, MIDDLE)


def _arc(a: Json, b: Json) -> str:
    """Who waits for whom, a curve from worker to worker."""
    way = 1 if b["x"] > a["x"] else -1
    x1, x2 = a["x"] + way * a["r"] * 0.72, b["x"] - way * b["r"] * 0.72
    y = a["y"] - a["r"] * 0.82
    high = y - min(max(abs(b["x"] - a["x"]) * 0.22, 22), 74)
    dx = (x2 - x1) * 0.22
    curve = f"M{x1:.1f} {y:.1f}C{x1 + dx:.1f} {high:.1f} {x2 - dx:.1f} {high:.1f} {x2:.1f} {y:.1f}"
    head = svg.arrow_head(x2 - dx, high, x2, y, INK)
    return (
        f'<path d="{curve}" fill="none" stroke="{INK}" stroke-width="1.6" '
        f'stroke-dasharray="4 4"/>{head}'
    )


def cut(text: str, room: float) -> str:
    """As much of a text as fits."""
    fits = max(1, int(room / 7.4))
    return text if len(text) <= fits else f"{text[: fits - 1]}…"
