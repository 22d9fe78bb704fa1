"""The scene of a run with a parameter server: cards with keys and inboxes, workers, what flies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width
from distkit.views.scene.marks import (
    Scene,
    Shape,
    arrow,
    circle,
    line,
    path,
    picture,
    pieces,
    rect,
    remembered,
    steps,
    text,
    title,
)
from distkit.views.scene.painter import cut
from distkit.views.scene.units import count, human_bytes
from distkit.views.servers.layout import WIDTH
from distkit.views.servers.staleness import brief
from distkit.views.servers.state import stretches

LINK, CARD, NOW, ROW, ARC, PERSON, FLIGHT, TOKEN = range(8)  # each is drawn above those before it
#: So many workers of an update, and so many workers' waiting are drawn; pulls that wait.
NAMED, LANES, MANY = 8, 8, 5
#: The stripes that show who waits: where they are, their distance and height; the side's width.
LEFT, RIGHT, PITCH, BAR, SIDE = 78, WIDTH - 68, 12, 7, 200
MAX_LETTERS = 28_000  # of all stripes: shorter ones are joined in a long run
NOTHING = "this trace has no requests to a parameter server"
LEGEND: list[tuple[list[Shape], float, str]] = [
    (
        [rect(30, 16, "own", y=2, r=4), text("∇v1", "label", x=15, y=14, anchor="middle")],
        30,
        "gradient computed from version 1",
    ),
    ([circle(6, "ring", x=8, y=10)], 16, "pull"),
    ([circle(6, "held", x=8, y=10)], 16, "pull that waits"),
    (
        [
            rect(32, 17, "pill", x=1, y=1.5, r=8.5),
            text("v1", "version", x=17, y=14.5, anchor="middle"),
        ],
        34,
        "weights, version 1",
    ),
    ([text("2 late", "late", y=14)], 38, "2 updates in between"),
]


def draw(run: Json) -> Json:
    """The picture of a run, for both painters.

    Args:
        run: what ``projection.project`` found.
    """
    return _Painter(run).picture()


class _Painter:
    def __init__(self, run: Json) -> None:
        self.run = run
        self.lane: dict[int, int] = {rank: lane for rank, lane, _ in run["lanes"]}
        self.people = {w["rank"]: w for w in run["workers"]}
        self.slots = {(g[0], g[1], g[2]): g[4] for g in run["gradients"]}
        self.took = {(row, begin): late for row, _, begin, _, late in run["updates"]}
        self.servers = {row["server"] for row in run["rows"]}
        cards, workers = run["cards"], run["workers"]
        self.point = {c["rank"]: (c["x"] + c["w"] / 2, c["y"] + c["h"]) for c in cards}
        self.point |= {n["rank"]: (n["x"], n["y"]) for n in (*workers, *run["scheduler"])}
        floor = max([70, *(w["y"] + w["r"] for w in workers), *(y for _, y in self.point.values())])
        self.stripes = floor + 46
        height = self.stripes + PITCH * min(len(workers), LANES) + 2
        self.scene = Scene(WIDTH, height, run["start"])
        self.side = Scene(SIDE, 170, run["start"])

    def picture(self) -> Json:
        run = self.run
        self._links()
        self._cards()
        self._scheduler()
        for i, row in enumerate(run["rows"]):
            if row["shown"]:
                self._row(i, row)
        self._inboxes()
        self._versions()
        self._statuses()
        for i, beat in enumerate(run["beats"]):
            self._beat(i, beat)
        self._waiting()
        self._counters()
        self._staleness()
        nothing = not run["beats"] and not run["cards"]
        waiting = "waiting for the first message to a server"
        return picture(
            self.scene,
            title=run["title"] or "Servers",
            end=run["end"],
            view="servers",
            facts=run["facts"],
            notices=run["notices"],
            said=run["said"],
            live=run["live"],
            empty=(waiting if run["live"] else NOTHING) if nothing else "",
            legend=LEGEND,
            opening=self.scene.when(run["opening"]),
            beats=[self._told(beat) for beat in run["beats"]],
            list={"name": "updates", "all": "all keys", "rows": list(self._updates())},
            scale=[LEFT / WIDTH, RIGHT / WIDTH],
            side=self.side.plain(),
        )

    def _told(self, beat: Json) -> Json:
        when, end = self.scene.when, beat["end"]
        told = {key: beat[key] for key in ("who", "more", "where") if beat.get(key)}
        return {"begin": when(beat["begin"]), "end": None if end is None else when(end), **told}

    def _lane(self, rank: int) -> int:
        return self.lane.get(rank, 7)

    # -- what stays -------------------------------------------------------------------------

    def _links(self) -> None:
        for w in self.people.values():
            for c in self.run["cards"]:
                self.scene.add(0, 0, line((w["x"], w["y"] - w["r"]), self.point[c["rank"]], "link"))

    def _cards(self) -> None:
        for c in self.run["cards"]:
            self.scene.add(
                c["x"],
                c["y"],
                rect(c["w"], c["h"], "card", r=10),
                rect(11, 11, "own", x=12, y=13, r=3, lane=self._lane(c["rank"])),
                text(c["name"], "name", x=30, y=23),
                layer=CARD,
            )
            if c["more"]:
                words = text(f"and {c['more']} more keys", "words", x=12, y=c["h"] - 8)
                self.scene.add(c["x"], c["y"], words, layer=CARD)
        for stub in self.run["stubs"]:
            words = text(stub["text"], "words", y=5, anchor="middle")
            self.scene.add(stub["x"], stub["y"], words, layer=CARD)

    def _scheduler(self) -> None:
        run = self.run
        for s in run["scheduler"]:
            here = (s["x"], s["y"])
            box = rect(124, 54, "card", x=-62, y=-27, r=27)
            name = text(s["name"], "name", y=-2, anchor="middle")
            self.scene.add(*here, box, name, layer=CARD)
            all_ = run["everybody"]
            present = [(begin, end, node) for node, _, begin, end in run["present"]]
            for begin, end, nodes in pieces([(-math.inf, None, -1), *present]):
                n = len(nodes) - 1
                told = f"all {all_} registered" if n >= all_ else f"{n} of {all_} registered"
                words = text(told, "words", y=16, anchor="middle")
                self.scene.add(*here, words, begin=begin, end=end, layer=CARD)
            for node, _, begin, end in run["present"]:
                if node in self.point:
                    way = line(self.point[node], here, "dots")
                    self.scene.add(0, 0, way, begin=begin, end=end)

    def _row(self, i: int, row: Json) -> None:
        """The marks of a key that are always there: its name and size, and an empty inbox."""
        x, y, w = row["x"], row["y"], row["w"]
        name = cut(row["key"], w - 50, 13)
        part = "part {} of {}".format(*row["part"]) if row["part"] else ""
        size = " · ".join(filter(None, [human_bytes(row["nbytes"]) if row["nbytes"] else "", part]))
        after = 7.9 * len(name) + 8
        shapes = [
            rect(w + 10, 47, "hover", x=-5, y=-2),
            title(", ".join(filter(None, [row["key"], size]))),
            text(name, "key", y=17),
        ]
        if after + text_width(size, 11.5) < w - 42:
            shapes.append(text(size, "small", x=after, y=17))
        if len(row["slots"]) < self.run["quorum"]:
            (left, top, wide, _) = row["slots"][0]
            shapes.append(rect(wide, 9, "slot", x=left - x, y=top - y + 4, r=4.5))
        else:
            for n, (left, top, wide, high) in enumerate(row["slots"]):
                shapes.append(rect(wide, high, "slot", x=left - x, y=top - y, r=4))
                team = self.run["team"]
                if n < len(team) and wide > 14:  # who is missing is named in its empty place
                    middle = left - x + wide / 2
                    shapes.append(
                        text(str(team[n]), "small", x=middle, y=top - y + 12.5, anchor="middle")
                    )
        self.scene.add(x, y, *shapes, layer=ROW)

    # -- states ----------------------------------------------------------------------------

    def _inboxes(self) -> None:
        """Gradients in their places, and pulls that wait."""
        lying: dict[tuple[int, int], list[Any]] = defaultdict(list)
        rows, quorum = self.run["rows"], self.run["quorum"]
        for row, worker, begin, end, slot, version, _ in self.run["gradients"]:
            if rows[row]["shown"]:
                few = len(rows[row]["slots"]) >= quorum
                lying[row, slot if few else -1].append((begin, end, (worker, version)))
        for (row, slot), spans in lying.items():
            slots = rows[row]["slots"]
            x, y, w, h = slots[min(max(slot, 0), len(slots) - 1)]
            for begin, end, here in pieces(spans):
                worker, version = here[0]
                over = (x, y)
                if slot < 0:
                    part = max(1.0, w * min(1.0, len(here) / quorum))
                    told = text(f"{len(here)}/{quorum}", "small", x=w + 6, y=13)
                    drawing: tuple[Shape, ...] = rect(part, 9, "full", y=4, r=4.5), told
                else:
                    words = f"×{len(here)}" if len(here) > 1 else f"∇v{version}"
                    over = (x - 0.5, y - 0.5)  # the edge of the empty place
                    drawing = _box(w + 1, h + 1, words, self._lane(worker))
                self.scene.add(*over, *drawing, begin=begin, end=end, layer=ROW)
        held: dict[int, list[Any]] = defaultdict(list)
        for row, worker, begin, end in self.run["held"]:
            if rows[row]["shown"]:
                held[row].append((begin, end, worker))
        for row, waits in held.items():
            x, y = rows[row]["wait"]
            fits = min(MANY, int((rows[row]["x"] + rows[row]["w"] - x - 44) / 15))
            for begin, end, workers in pieces(waits):
                rings = tuple(self._rings(workers, fits))
                self.scene.add(x, y, *rings, begin=begin, end=end, layer=ROW)

    def _rings(self, workers: list[int], fits: int) -> Iterator[Shape]:
        """A ring for each pull that waits, as far as they fit."""
        n = len(workers)
        if fits < n and fits < 2:
            yield text(f"{n} wait", "small", x=-5, y=4)
            return
        shown = n if n <= fits else fits - 1
        for i, worker in enumerate(workers[:shown]):
            yield circle(6, "held", x=15 * i, lane=self._lane(worker))
        if shown < n:
            yield text(f"+{n - shown}", "small", x=15 * shown - 3, y=4)

    def _versions(self) -> None:
        """The version of each key, and what the last update took."""
        found: dict[int, list[Any]] = defaultdict(lambda: [(-math.inf, None, None)])
        for i, version, begin, end, late in self.run["versions"]:
            found[i].append((begin, end, (version, late)))
        for i, row in enumerate(self.run["rows"]):
            for begin, end, known in pieces(found[i]) if row["shown"] else ():
                version, late = known[-1] or (None, [])
                value: tuple[Shape, ...] = _pill(version, "pill", "version")
                if version is None:
                    value = (text("no value yet", "small", x=19, y=4, anchor="end"),)
                self.scene.add(*row["pill"], *value, begin=begin, end=end, layer=ROW)
                if last := tuple(self._last(late)):
                    corner = row["x"] + row["w"], row["y"] + 39
                    self.scene.add(*corner, *last, begin=begin, end=end, layer=ROW)

    def _last(self, took: Sequence[tuple[int, int]]) -> Iterator[Shape]:
        """The workers of the last update, and how late their gradients were."""
        late = max((n for _, n in took), default=0)
        words = f"{late} late" if late else "fresh" if len(took) == 1 else ""
        if words:
            yield text(words, "late" if late else "small", anchor="end")
        left = -text_width(words, 14) - 13 if words else -6
        for i, (worker, _) in enumerate(reversed(took[:4])):
            yield circle(4.2, "own", x=left - 11 * i, y=-4, lane=self._lane(worker))

    def _statuses(self) -> None:
        """The activity of each worker, and for whom it waits."""
        found: dict[int, list[Any]] = defaultdict(lambda: [(-math.inf, None, ("", "", []))])
        for node, kind, begin, end, words, awaited in self.run["status"]:
            found[node].append((begin, end, (kind, words, awaited)))
        for rank, person in self.people.items():
            for begin, end, all_ in pieces(found[rank]):
                kind, words, awaited = all_[-1]
                self._person(person, kind, words, begin, end)
                for other in awaited if kind == "waits" else ():
                    if other in self.people:
                        to = self.people[other]["x"]
                        arc = _arc(person["x"], to, person["y"], person["r"])
                        self.scene.add(0, 0, *arc, begin=begin, end=end, layer=ARC)

    def _person(self, person: Json, kind: str, words: str, begin: float, end: float | None) -> None:
        """A worker: hollow and dashed while it waits, pale when it has ended."""
        r, room, waits = person["r"], person["room"], kind == "waits"
        lane = self._lane(person["rank"])
        style = {"waits": "waiting", "ended": "faded"}.get(kind, "own")
        look = "hollow" if kind in ("waits", "ended") else "number"
        number = str(person["rank"])
        shapes = [
            circle(r, style, lane=lane),
            text(number, look, y=r * 0.34, anchor="middle", lane=lane, size=r * 0.95),
        ]
        if words == "died":
            d = f"M{-r} {-r}L{r} {r}M{r} {-r}L{-r} {r}"
            shapes.append(path(d, "cross"))
        if room >= 66:
            size = 0 if r > 20 else 11.0
            name, said = cut(person["name"], room, 12), _fitting(words, room, size or 13)
            shapes.append(text(name, "name", y=r + 17, anchor="middle", size=size))
            look = "strong" if waits else "words"
            shapes += [text(said, look, y=r + 33, anchor="middle", size=size)] if said else []
        told = f"{person['name']} {words}".strip()
        self.scene.add(
            person["x"],
            person["y"],
            title(told, aloud=waits),
            *shapes,
            begin=begin,
            end=end,
            layer=PERSON,
        )

    # -- what is under way --------------------------------------------------------------------

    def _beat(self, i: int, beat: Json) -> None:
        """A beat on its way, and what shows it when it has just ended."""
        begin, end, kind = beat["begin"], beat["end"], beat["kind"]
        row = self.run["rows"][beat["row"]] if "row" in beat else None
        if row and row["shown"] and end is not None:
            now = rect(row["w"] + 10, 47, "now", x=-5, y=-2, r=7)
            self.scene.rest(i, row["x"], row["y"], now, layer=NOW)
        if kind == "update":
            if row and row["shown"] and end is not None:
                self._merge(i, beat, row)
            return
        if (ends := self._ends(beat, row)) is None:
            return
        a, b = ends
        lane = self._lane(beat["src"])
        lost, wrong = end is None, bool(beat.get("refused"))
        plain = "wrong" if wrong else "answer" if kind == "book" else ""
        way = line(a, b, "lost" if lost else plain or "flight", lane=lane)
        self.scene.add(0, 0, way, begin=begin, end=end, layer=FLIGHT)
        token = self._token(beat, kind, lane)
        if end is None:
            middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
            self.scene.add(*middle, *token, begin=begin, layer=TOKEN)
            return
        self.scene.add(*a, *token, begin=begin, end=end, to=b, layer=TOKEN)
        head = "bad" if wrong else "gray" if kind == "book" else "own"
        self.scene.rest(i, 0, 0, *arrow(a, b, plain or "past", head, lane=lane), layer=FLIGHT)

    def _token(self, beat: Json, kind: str, lane: int) -> tuple[Shape, ...]:
        """Messages in flight: a gradient with its version, weights, a question."""
        version = beat.get("v", 0)
        if kind == "push":
            words = f"∇v{version}"
            w = 8 * len(words) + 10
            return tuple(_box(w, 18, words, lane, x=-w / 2, y=-9))
        if kind == "weights" or (kind == "init" and beat.get("nbytes")):
            return _pill(version, "pill", "version")
        return (circle(6, "ring", lane=self._lane(beat["dst"]) if kind == "book" else lane),)

    def _merge(self, i: int, beat: Json, row: Json) -> None:
        """The gradients of an update go from their places into the value."""
        px, py = row["pill"]
        for (x, y, w, h), (worker, _) in zip(
            row["slots"], self.took[beat["row"], beat["begin"]], strict=False
        ):
            box = rect(w, h, "merging", r=4, lane=self._lane(worker))
            to = px - w / 2, py - h / 2
            self.scene.add(x, y, box, begin=beat["begin"], end=beat["end"], to=to, layer=TOKEN)
        self.scene.rest(i, px, py, *_pill(beat["v"], "full", "reversed"), layer=TOKEN)

    def _ends(
        self, beat: Json, row: Json | None
    ) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """From where to where a beat goes; None: it is not drawn."""
        src, dst, kind = beat["src"], beat["dst"], beat["kind"]
        a, b = self._place(src), self._place(dst)
        if a is None or b is None or src == dst:
            return None
        if row and "slots" in row:
            slots = row["slots"]
            slot = self.slots.get((beat["row"], src, beat["end"]), 0) if kind == "push" else 0
            x, y, w, h = slots[min(slot, len(slots) - 1)]
            spots = {"push": (x + w / 2, y + h / 2), "pull": row["wait"], "init": row["pill"]}
            b = spots.get(kind, b)
            a = row["pill"] if kind == "weights" else a
        return self._edge(src, a, b), self._edge(dst, b, a)

    def _place(self, rank: int) -> tuple[float, float] | None:
        if rank in self.point:
            return self.point[rank]
        role = "server" if rank in self.servers else "worker"
        stubs = (s for s in self.run["stubs"] if s["role"] == role)
        return next(((s["x"], s["y"]) for s in stubs), None)

    def _edge(self, rank: int, a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
        """The edge of a worker or the scheduler instead of its middle."""
        length = math.dist(a, b) or 1.0
        ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
        if any(node["rank"] == rank for node in self.run["scheduler"]):
            far = min(64 / max(abs(ux), 1e-9), 30 / max(abs(uy), 1e-9))
        else:
            far = self.people[rank]["r"] + 4 if rank in self.people else 0
        return a[0] + ux * far, a[1] + uy * far

    # -- below and beside ---------------------------------------------------------------------

    def _updates(self) -> Iterator[list[Any]]:
        """The updates as rows of a list."""
        for i, beat in enumerate(self.run["beats"]):
            if beat["kind"] == "update" and beat["end"] is not None and "row" in beat:
                row = self.run["rows"][beat["row"]]
                late = self.took[beat["row"], beat["begin"]]
                part = " {}/{}".format(*row["part"]) if row["part"] else ""
                who = [[self._lane(w), str(w), f"{n} late" if n else ""] for w, n in late[:NAMED]]
                others = max(0, len(late) - NAMED)
                yield [i, row["key"], row["key"], part, f"v{beat['v']}", who, others]

    def _waiting(self) -> None:
        """Per worker the whole run: full while it waits for others, pale while it computes."""
        run = self.run
        span = max(run["end"] - run["start"], 1e-12)
        workers = run["workers"][:LANES]
        spent = {w["rank"]: stretches(run, w["rank"]) for w in workers}
        for least in (0.5, 1.0, 2.0, 8.0):
            paths = {r: _stripes(s, run["start"], span, least) for r, s in spent.items()}
            if sum(len(d) for found in paths.values() for d in found.values()) < MAX_LETTERS:
                break
        for i, w in enumerate(workers):
            y = self.stripes + PITCH * i
            waited = sum(
                b - max(a, run["start"]) for kind, a, b in spent[w["rank"]] if kind == "waits"
            )
            self.scene.add(
                0,
                y,
                text(w["name"], "small", x=LEFT - 8, y=8, anchor="end"),
                text(f"waits {100 * waited / span:.0f} %", "small", x=RIGHT + 8, y=8),
                *(
                    path(d, "own" if kind == "waits" else "pale", lane=self._lane(w["rank"]))
                    for kind, d in paths[w["rank"]].items()
                ),
            )
        if workers:
            cursor = rect(1.4, PITCH * len(workers) + 1, "full", x=-0.7)
            a, b = (LEFT, self.stripes - 2), (RIGHT, self.stripes - 2)
            self.scene.add(*a, cursor, end=run["end"], to=b, steady=True, layer=TOKEN)
            self.scene.add(*b, cursor, begin=run["end"], layer=TOKEN)

    def _counters(self) -> None:
        """Pushes, pulls and updates until now."""
        base = self.run["base"]
        of = {"pushes": ("push", "there"), "pulls": ("weights", "back"), "updates": ("update", "")}
        for i, (noun, (kind, way)) in enumerate(of.items()):
            done = [b for b in self.run["beats"] if b["kind"] == kind and b["end"] is not None]
            sizes = [base.get(way, 0), *(b.get("nbytes", 0) for b in done)]
            sums = list(accumulate(sizes))
            for begin, end, n in steps(b["end"] for b in done):
                whole = base[noun] + n
                self.side.add(70 * i, 18, text(f"{whole:,}", "figure"), begin=begin, end=end)
                if way:
                    size = text(human_bytes(sums[n]), "small")
                    self.side.add(70 * i, 47, size, begin=begin, end=end)
            self.side.add(70 * i, 33, text(noun, "small"))

    def _staleness(self) -> None:
        """A histogram of the gradients until now: its bins are those of the whole run."""
        drawn, side, base = self.run["staleness"], self.side, self.run["base"]["late"]
        pitch, high, floor = drawn["pitch"], drawn["high"], 84 + drawn["high"]
        taken = sorted((g[3], g[6]) for g in self.run["gradients"] if g[6] is not None)
        for begin, end, n in steps([end for end, _ in taken[:1]]):
            words = "gradients, by staleness" if n or any(base) else "no gradient applied yet"
            side.add(0, 66, text(words, "small"), begin=begin, end=end)
        side.add(0, floor, path(f"M0 0H{pitch * len(base):.1f}", "axis"))
        for y, words in zip((30, 43), drawn["axis"], strict=True):
            side.add(0, floor + y, text(words, "small"))
        for i, label in enumerate(drawn["labels"]):
            side.add((i + 0.5) * pitch, floor + 14, text(label, "tick", anchor="middle"))
            for begin, end, n in steps([end for end, which in taken if which == i]):
                if whole := base[i] + n:
                    tall = max(2.0, high * whole / max(drawn["totals"]))
                    told = f"{count(whole, 'gradient')} of staleness {drawn['ranges'][i]}"
                    bar = rect(pitch - 2, tall, "bad" if i else "gray", x=1, y=-tall, r=1)
                    number = text(brief(whole), "count", x=pitch / 2, y=-tall - 4, anchor="middle")
                    side.add(i * pitch, floor, title(told), bar, number, begin=begin, end=end)


@remembered
def _box(
    w: float, h: float, words: str, lane: int, *, x: float = 0, y: float = 0
) -> tuple[Shape, ...]:
    """A gradient: as many words on it as fit."""
    box = rect(w, h, "own", x=x, y=y, r=4, lane=lane)
    if w < 5 + 6 * len(words):
        return (box,)
    return box, text(words, "label", x=x + w / 2, y=y + h / 2 + 4, anchor="middle", lane=lane)


@remembered
def _pill(version: int | None, style: str, words: str) -> tuple[Shape, ...]:
    """A version, around its middle."""
    told = f"v{version}"
    w = max(34, 8 * len(told) + 14)
    return (
        rect(w, 20, style, x=-w / 2, y=-10, r=10),
        text(told, words, y=4.5, anchor="middle"),
    )


@remembered
def _arc(a: float, b: float, y: float, r: float) -> tuple[Shape, ...]:
    """Waits: a curve from worker to worker."""
    side = math.copysign(0.72 * r, b - a)
    x1, x2, low = a + side, b - side, y - 0.82 * r
    high = low - min(max(abs(b - a) * 0.22, 22), 74)
    dx = (x2 - x1) * 0.22
    bend = f"{x1 + dx:.1f} {high:.1f} {x2 - dx:.1f} {high:.1f}"
    _, head = arrow((x2 - dx, high), (x2, low), "arc", "full")
    return path(f"M{x1:.1f} {low:.1f}C{bend} {x2:.1f} {low:.1f}", "arc"), head


@remembered
def _fitting(words: str, room: float, size: float) -> str:
    """The activity of a worker, in as few words as its place asks for."""
    for short in (words, words.replace("worker ", "")):
        if text_width(short, size) <= room:
            return short
    return cut(short.removeprefix("barrier: ").removeprefix("waits "), room, 0.9 * size)


def _stripes(
    spent: list[tuple[str, float, float]], start: float, span: float, least: float
) -> dict[str, str]:
    """Waiting and computing as areas; shorter stretches than ``least`` pixels are left out."""
    found: dict[str, str] = defaultdict(str)
    reached = 0.0
    for kind, begin, end in spent:
        a, b = (
            LEFT + min(max((t - start) / span, 0.0), 1.0) * (RIGHT - LEFT) for t in (begin, end)
        )
        if b - a >= least and b > reached:
            a = max(a, reached)
            found[kind] += f"M{a:.1f} 2h{b - a:.1f}v{BAR}h{a - b:.1f}z"
            reached = b
    return found
