"""The view of a parameter server: servers, keys, inboxes, workers, messages.

history.py reads the events, projection.py combines them and captions keyframes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeVar

from distkit._format import count, human_bytes
from distkit.views.scene.frame import Json, clean, flagged
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
from distkit.views.scene.svg import text_width
from distkit.views.servers import layout
from distkit.views.servers.history import Place, Request, Status
from distkit.views.servers.layout import WIDTH, bin_counts, bin_of, brief
from distkit.views.servers.projection import (
    Captions,
    Keyframe,
    Row,
    Serving,
    Version,
    facts,
    notes,
    notices,
    opening,
    rule_sentence,
)

Point = tuple[float, float]
#: Begin, end and subject.
Span = TypeVar("Span", bound=tuple[float, float | None, Any])

#: Layers, from the lowest: messages in flight do not cover keys and versions.
LINK, CARD, NOW, FLIGHT, ROW, ARC, WORKER, TOKEN = range(8)
#: The largest numbers of drawn workers of an update, wait bars, and waiting pulls.
NAMED, LANES, MANY = 8, 8, 5
#: Position, distance and height of the wait bars; width of the side panel [px].
LEFT, RIGHT, PITCH, BAR, SIDE = 78, WIDTH - 82, 12, 7, 200
MAX_LETTERS = 28_000  # of the paths of all wait bars: longer runs leave out short stretches
NOTHING = "this trace has no requests to a parameter server"
LEGEND: list[tuple[list[Shape], float, str]] = [
    (
        [rect(30, 16, "own", y=2, r=4), text("∇v1", "label", x=15, y=14, anchor="middle")],
        30,
        "gradient from version 1",
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


def draw(run: Serving) -> Json:
    """The picture of a run, for both painters.

    Args:
        run: the result of ``projection.project``.
    """
    return _Painter(run).picture()


class _Painter:
    def __init__(self, run: Serving) -> None:
        self.run, history = run, run.history
        self.lanes = {rank: lane for lane, rank in enumerate(run.trace.ranks)}
        self.quorum, workers = history.quorum(), history.of("worker")
        self.slot_owners = workers if self.quorum == len(workers) > 1 else []
        places = layout.places(history, run.rows, self.quorum)
        self.cards, self.stubs, self.spots = places.cards, places.stubs, places.rows
        self.workers = {w["rank"]: w for w in places.workers}
        self.scheduler = places.scheduler
        self.point = {c["rank"]: (c["x"] + c["w"] / 2, c["y"] + c["h"]) for c in self.cards}
        self.point |= {n["rank"]: (n["x"], n["y"]) for n in (*places.workers, *self.scheduler)}
        self.slots = self._slots(workers)
        feet = [w["y"] + w["r"] for w in places.workers]
        floor = max([70, *feet, *(y for _, y in self.point.values())])
        self.bars = floor + 46
        height = self.bars + PITCH * min(len(places.workers), LANES) + 2
        self.scene = Scene(WIDTH, height, run.start)
        self.side = Scene(SIDE, 170, run.start)

    def picture(self) -> Json:
        run, drawn = self.run, self.run.keyframes[self.run.first :]
        captions = Captions(run.history, run.waits, run.names)
        self._links()
        self._cards()
        self._scheduler()
        for at, spot in self.spots.items():
            if spot["shown"]:
                self._row(run.rows[at], spot)
                self._version(at, run.versions.get(at, []), spot)
        self._inboxes()
        self._statuses()
        for i, keyframe in enumerate(drawn):
            self._keyframe(i, keyframe)
        self._waiting()
        self._counters()
        self._staleness()
        nothing = not drawn and not self.cards
        waiting = "waiting for the first message to a server"
        return picture(
            self.scene,
            title=run.title,
            end=run.end,
            view="servers",
            facts=facts(run),
            notices=notices(run),
            notes=notes(run),
            said=rule_sentence(run.history),
            live=run.live,
            empty=(waiting if run.live else NOTHING) if nothing else "",
            legend=LEGEND if any(g.late for g in run.history.gradients) else LEGEND[:-1],
            opening=self.scene.when(opening(run)),
            keyframes=[self._caption(keyframe, *captions.of(keyframe)) for keyframe in drawn],
            list={"name": "updates", "all": "all keys", "rows": list(self._updates(drawn))},
            scale=[LEFT / WIDTH, RIGHT / WIDTH],
            side=self.side.plain(),
        )

    def _caption(self, keyframe: Keyframe, who: str, more: str) -> Json:
        where = (
            keyframe.subject.where.rpartition("/")[2]
            if isinstance(keyframe.subject, Request)
            else ""
        )
        more = " · ".join(filter(None, [more, keyframe.value]))
        words = {"who": who, "more": more, "where": clean(where)}
        end = None if keyframe.end is None else self.scene.when(keyframe.end)
        known = {key: text for key, text in words.items() if text}
        return {"begin": self.scene.when(keyframe.begin), "end": end, **known}

    def _lane(self, rank: int) -> int:
        return self.lanes.get(rank, 7)

    def _since(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The spans that have not ended when the picture begins."""
        return (s for s in spans if s[1] is None or s[1] > self.run.start)

    def _slots(self, workers: list[int]) -> dict[Request, int]:
        """The slot of each gradient in its inbox: its worker's, or the first free one."""
        own = {w: i for i, w in enumerate(workers)}
        busy: dict[Place, dict[int, float]] = defaultdict(dict)  # end of the last gradient by slot
        found = {}
        for g in self.run.history.gradients:
            mine, slot = busy[g.place], own.get(g.node, 0)
            if self.quorum < len(own):
                came = g.arrived or 0.0
                free = (i for i in range(self.quorum) if mine.get(i, -math.inf) <= came)
                slot = next(free, self.quorum - 1)
            mine[slot] = g.taken
            found[g] = slot
        return found

    # -- fixed marks ------------------------------------------------------------------------

    def _links(self) -> None:
        for w in self.workers.values():
            for c in self.cards:
                self.scene.add(0, 0, line((w["x"], w["y"] - w["r"]), self.point[c["rank"]], "link"))

    def _cards(self) -> None:
        for c in self.cards:
            self.scene.add(
                c["x"],
                c["y"],
                rect(c["w"], c["h"], "card", r=10),
                rect(11, 11, "own", x=12, y=13, r=3, lane=self._lane(c["rank"])),
                text(self.run.names[c["rank"]], "name", x=30, y=23),
                layer=CARD,
            )
            if c["more"]:
                words = text(f"and {c['more']} more keys", "words", x=12, y=c["h"] - 8)
                self.scene.add(c["x"], c["y"], words, layer=CARD)
        for stub in self.stubs:
            words = text(stub["text"], "words", y=5, anchor="middle")
            self.scene.add(stub["x"], stub["y"], words, layer=CARD)

    def _scheduler(self) -> None:
        history = self.run.history
        all_ = len(history.of("worker")) + len(history.of("server"))
        for s in self.scheduler:
            here = (s["x"], s["y"])
            box = rect(124, 54, "card", x=-62, y=-27, r=27)
            name = text("scheduler", "name", y=-2, anchor="middle")
            self.scene.add(*here, box, name, layer=CARD)
            for begin, end, nodes in pieces([(-math.inf, None, None), *history.present()]):
                n = len(nodes) - 1
                told = f"all {all_} registered" if n >= all_ else f"{n} of {all_} registered"
                words = text(told, "words", y=16, anchor="middle")
                self.scene.add(*here, words, begin=begin, end=end, layer=CARD)
            for begin, end, r in history.present():
                if r.node in self.point:
                    way = line(self.point[r.node], here, "dots")
                    self.scene.add(0, 0, way, begin=begin, end=end)

    def _row(self, row: Row, spot: Json) -> None:
        """The fixed marks of a key: its name, its size and an empty inbox."""
        x, y, w = spot["x"], spot["y"], spot["w"]
        name, size, after = _headed(row, w)
        shapes = [
            rect(w + 10, 47, "hover", x=-5, y=-2),
            title(", ".join(filter(None, [row.key, size]))),
            text(name, "key", y=17),
        ]
        if after + text_width(size, 11.5) < w - 42:
            shapes.append(text(size, "size", x=after, y=17))
        if len(spot["slots"]) < self.quorum:
            (left, top, wide, _) = spot["slots"][0]
            shapes.append(rect(wide, 9, "slot", x=left - x, y=top - y + 4, r=4.5))
        else:
            for n, (left, top, wide, high) in enumerate(spot["slots"]):
                shapes.append(rect(wide, high, "slot", x=left - x, y=top - y, r=4))
                if n < len(self.slot_owners) and wide > 14:  # an empty slot names its worker
                    at = {"x": left - x + wide / 2, "y": top - y + 12.5}
                    shapes.append(text(str(self.slot_owners[n]), "small", anchor="middle", **at))
        self.scene.add(x, y, *shapes, layer=ROW)

    # -- states ----------------------------------------------------------------------------

    def _inboxes(self) -> None:
        """Gradients in their slots, and waiting pulls."""
        lying: dict[tuple[Place, int], list[Any]] = defaultdict(list)
        for g, slot in self.slots.items():
            if (spot := self.spots[g.place])["shown"]:
                few = len(spot["slots"]) >= self.quorum
                lying[g.place, slot if few else -1].append((g.arrived, g.taken, g))
        for (at, slot), spans in lying.items():
            slots = self.spots[at]["slots"]
            x, y, w, h = slots[min(max(slot, 0), len(slots) - 1)]
            for begin, end, here in pieces(self._since(spans)):
                over = (x, y)
                if slot < 0:
                    part = max(1.0, w * min(1.0, len(here) / self.quorum))
                    told = text(f"{len(here)}/{self.quorum}", "small", x=w + 6, y=13)
                    drawing: tuple[Shape, ...] = rect(part, 9, "full", y=4, r=4.5), told
                else:
                    words = f"×{len(here)}" if len(here) > 1 else f"∇v{here[0].version}"
                    over = (x - 0.5, y - 0.5)  # covers the edge of the empty slot
                    drawing = _box(w + 1, h + 1, words, self._lane(here[0].node))
                self.scene.add(*over, *drawing, begin=begin, end=end, layer=ROW)
        held: dict[Place, list[Any]] = defaultdict(list)
        for w in self.run.waits:
            if w.kind == "pull" and w.asked:
                held[w.asked.place].append((w.begin, w.end, w.node))
        for at, waits in held.items():
            if (spot := self.spots[at])["shown"]:
                x, y = spot["wait"]
                fits = min(MANY, int((spot["x"] + spot["w"] - x - 44) / 15))
                for begin, end, workers in pieces(self._since(waits)):
                    rings = self._rings(workers, fits)
                    self.scene.add(x, y, *rings, begin=begin, end=end, layer=ROW)

    def _rings(self, workers: list[int], fits: int) -> Iterator[Shape]:
        """A ring for each waiting pull that fits."""
        n = len(workers)
        if fits < n and fits < 2:
            yield text(f"{n} wait", "small", x=-5, y=4)
            return
        shown = n if n <= fits else fits - 1
        for i, worker in enumerate(workers[:shown]):
            yield circle(6, "held", x=15 * i, lane=self._lane(worker))
        if shown < n:
            yield text(f"+{n - shown}", "small", x=15 * shown - 3, y=4)

    def _version(self, at: Place, versions: list[Version], spot: Json) -> None:
        """The version of a key, its values if they are few, and the workers of its last update."""
        none = text("no value yet", "small", x=19, y=4, anchor="end")
        first = versions[0][0] if versions else None
        self.scene.add(*spot["pill"], none, end=first, layer=ROW)
        for begin, end, (version, late, told) in self._since(versions):
            pill = _pill(version, "pill", "version")
            if told:
                values = _values(self.run.rows[at], spot["w"], version, told)
                self.scene.add(spot["x"], spot["y"], *values, begin=begin, end=end, layer=ROW)
            self.scene.add(*spot["pill"], *pill, begin=begin, end=end, layer=ROW)
            if last := self._last(late):
                corner = spot["x"] + spot["w"], spot["y"] + 39
                self.scene.add(*corner, *last, begin=begin, end=end, layer=ROW)

    def _last(self, took: Mapping[int, int]) -> list[Shape]:
        """The workers of the last update, and the staleness of their gradients."""
        late = max(took.values(), default=0)
        words = f"{late} late" if late else "fresh" if len(took) == 1 else ""
        left = -text_width(words, 14) - 13 if words else -6
        told = [text(words, "late" if late else "size", anchor="end")] if words else []
        return told + [
            circle(4.2, "own", x=left - 11 * i, y=-4, lane=self._lane(worker))
            for i, worker in enumerate(reversed(list(took)[:4]))
        ]

    def _statuses(self) -> None:
        """The activity of each worker, and arcs to the workers it waits for."""
        for rank, worker in self.workers.items():
            for begin, end, status in self._since(self.run.doing[rank]):
                self._worker(worker, status, begin, end)
                for other in status.awaited:
                    if other in self.workers:
                        to = self.workers[other]["x"]
                        arc = _arc(worker["x"], to, worker["y"], worker["r"])
                        self.scene.add(0, 0, *arc, begin=begin, end=end, layer=ARC)

    def _worker(self, worker: Json, status: Status, begin: float, end: float | None) -> None:
        """A worker: hollow and dashed while it waits, pale after it has ended."""
        r, room, waits = worker["r"], worker["room"], status.kind == "waits"
        rank, lane = worker["rank"], self._lane(worker["rank"])
        style = {"waits": "waiting", "ended": "pale"}.get(status.kind, "own")
        look = "hollow" if status.kind in ("waits", "ended") else "number"
        shapes = [
            circle(r, style, lane=lane),
            text(str(rank), look, y=r * 0.34, anchor="middle", lane=lane, size=r * 0.95),
        ]
        if status.text == "died":
            near, far = 0.4 * r, 1.1 * r  # beside the number
            cross = f"M{near} {-far}L{far} {-near}M{far} {-far}L{near} {-near}"
            shapes.append(path(cross, "cross"))
        if room >= 66:
            size = 0 if r > 20 else 11.0
            name = cut(self.run.names[rank], room, 12)
            told = _fitting(status.text, room, size or 13)
            shapes.append(text(name, "name", y=r + 17, anchor="middle", size=size))
            look = "strong" if waits else "words"
            shapes += [text(told, look, y=r + 33, anchor="middle", size=size)] if told else []
        words = title(f"{self.run.names[rank]} {status.text}".strip(), aloud=waits)
        here = worker["x"], worker["y"]
        self.scene.add(*here, words, *shapes, begin=begin, end=end, layer=WORKER)

    # -- messages in flight ------------------------------------------------------------------

    def _keyframe(self, i: int, keyframe: Keyframe) -> None:
        """A message in flight, and the frame that is held when it has ended."""
        begin, end = keyframe.begin, keyframe.end
        spot = (
            None
            if keyframe.kind in ("barrier", "death")
            else self.spots.get(keyframe.subject.place)
        )
        if spot and spot["shown"] and end is not None:
            now = rect(spot["w"] + 10, 47, "now", x=-5, y=-2, r=7)
            self.scene.hold_frame(i, spot["x"], spot["y"], now, layer=NOW)
            if keyframe.kind == "update":
                self._merge(i, keyframe, spot)
        if (ends := self._ends(keyframe, spot)) is None:
            return
        a, b = ends
        lane = self._lane(keyframe.src)
        plain = "wrong" if keyframe.lost else "answer" if keyframe.kind == "book" else ""
        head = "bad" if end is None else {"wrong": "bad", "answer": "gray"}.get(plain, "own")
        way = arrow(*ends, "lost" if end is None else plain or "flight", head, lane=lane)
        over = self._replaced(keyframe) if end is None else end
        self.scene.add(0, 0, *way, begin=begin, end=over, layer=FLIGHT)
        token = self._token(keyframe, lane)
        if end is None:
            middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
            self.scene.add(*middle, *token, begin=begin, end=over, layer=TOKEN)
            return
        self.scene.add(*a, *token, begin=begin, end=end, to=b, layer=TOKEN)
        self.scene.hold_frame(i, 0, 0, *arrow(a, b, plain or "past", head, lane=lane), layer=FLIGHT)

    def _replaced(self, keyframe: Keyframe) -> float | None:
        """The time when a sender that died later is replaced."""
        found = (death.subject for death in self.run.done("death") if death.src == keyframe.src)
        return next((again for _, _, again in found if again and again > keyframe.begin), None)

    def _token(self, keyframe: Keyframe, lane: int) -> tuple[Shape, ...]:
        """The token of a message: a gradient with its version, weights, or a request."""
        version = keyframe.subject.version
        if keyframe.kind == "push":
            words = f"∇v{version}"
            w = 8 * len(words) + 10
            return tuple(_box(w, 18, words, lane, x=-w / 2, y=-9))
        if keyframe.kind == "weights" or (keyframe.kind == "init" and keyframe.nbytes):
            return _pill(version, "pill", "version")
        return (
            circle(6, "ring", lane=self._lane(keyframe.dst) if keyframe.kind == "book" else lane),
        )

    def _merge(self, i: int, keyframe: Keyframe, spot: Json) -> None:
        """The gradients of an update move from their slots into the value."""
        px, py = spot["pill"]
        for (x, y, w, h), worker in zip(spot["slots"], keyframe.subject.late, strict=False):
            box = rect(w, h, "merging", r=4, lane=self._lane(worker))
            to = px - w / 2, py - h / 2
            self.scene.add(x, y, box, begin=keyframe.begin, end=keyframe.end, to=to, layer=TOKEN)
        self.scene.hold_frame(
            i, px, py, *_pill(keyframe.subject.version, "full", "reversed"), layer=TOKEN
        )

    def _ends(self, keyframe: Keyframe, spot: Json | None) -> tuple[Point, Point] | None:
        """The end points of a message; None if it is not drawn."""
        a, b = self._place(keyframe.src), self._place(keyframe.dst)
        if a is None or b is None or keyframe.src == keyframe.dst:
            return None
        if spot and "slots" in spot:
            slots, slot = spot["slots"], self.slots.get(keyframe.subject, 0)
            x, y, w, h = slots[min(slot, len(slots) - 1)]
            (px, py) = spot["pill"]
            below = {"push": (x + w / 2, y + h), "init": (px, py + 10)}  # below the marks there
            b = below.get(keyframe.kind, spot["wait"] if keyframe.kind == "pull" else b)
            a = spot["pill"] if keyframe.kind == "weights" else a
        return self._edge(keyframe.src, a, b), self._edge(keyframe.dst, b, a)

    def _place(self, rank: int) -> Point | None:
        role = self.run.history.roles.get(rank)
        stubs = ((s["x"], s["y"]) for s in self.stubs if s["role"] == role)
        return self.point.get(rank) or next(stubs, None)

    def _edge(self, rank: int, a: Sequence[float], b: Sequence[float]) -> Point:
        """The point at the edge of a worker or the scheduler."""
        length = math.dist(a, b) or 1.0
        ux, uy = (b[0] - a[0]) / length, (b[1] - a[1]) / length
        far = self.workers[rank]["r"] + 4 if rank in self.workers else 0
        if any(node["rank"] == rank for node in self.scheduler):
            far = min(64 / max(abs(ux), 1e-9), 30 / max(abs(uy), 1e-9))
        return a[0] + ux * far, a[1] + uy * far

    # -- bars and side panel ------------------------------------------------------------------

    def _updates(self, drawn: list[Keyframe]) -> Iterator[list[Any]]:
        """The updates as rows of the list."""
        for i, keyframe in enumerate(drawn):
            if keyframe.kind == "update" and keyframe.end is not None:
                row, late = (
                    self.run.rows[keyframe.subject.place],
                    keyframe.subject.late,
                )
                part = " {}/{}".format(*row.part) if row.part else ""
                some = list(late.items())[:NAMED]
                who = [[self._lane(w), str(w), f"{n} late" if n else ""] for w, n in some]
                others = max(0, len(late) - NAMED)
                yield [i, row.key, row.key, part, f"v{keyframe.subject.version}", who, others]

    def _waiting(self) -> None:
        """A bar per worker over the whole run: full while it waits, pale while it computes."""
        run, workers = self.run, list(self.workers)[:LANES]
        span = max(run.end - run.start, 1e-12)
        spent = {w: list(self._spent(w)) for w in workers}
        for least in (0.5, 1.0, 2.0, 8.0):
            paths = {r: _stripes(s, run.start, span, least) for r, s in spent.items()}
            if sum(len(d) for found in paths.values() for d in found.values()) < MAX_LETTERS:
                break
        for i, w in enumerate(workers):
            waited = sum(b - max(a, run.start) for kind, a, b in spent[w] if kind == "waits")
            styles = {"waits": "own", "works": "pale"}
            self.scene.add(
                0,
                self.bars + PITCH * i,
                text(run.names[w], "small", x=LEFT - 8, y=8, anchor="end"),
                rect(8, BAR, "own", x=RIGHT + 8, y=2, lane=self._lane(w)),  # as its waits are drawn
                text(f"waits {100 * waited / span:.0f} %", "small", x=RIGHT + 20, y=8),
                title(f"{run.names[w]}: full while it waits for others, pale while it computes"),
                *(path(d, styles[kind], lane=self._lane(w)) for kind, d in paths[w].items()),
            )
        for keyframe in run.done("death"):
            if keyframe.src in workers and keyframe.begin >= run.start:
                x = LEFT + (RIGHT - LEFT) * (keyframe.begin - run.start) / span
                y = self.bars + PITCH * workers.index(keyframe.src) + 2 + BAR / 2
                mark = (
                    path("M-4 -4L4 4M4 -4L-4 4", "cross"),
                    title(f"{run.names[keyframe.src]} dies"),
                )
                self.scene.add(x, y, *mark, layer=WORKER)
        if workers:
            cursor = rect(1.4, PITCH * len(workers) + 1, "full", x=-0.7)
            a, b = (LEFT, self.bars - 2), (RIGHT, self.bars - 2)
            self.scene.add(*a, cursor, end=run.end, to=b, steady=True, layer=TOKEN)
            self.scene.add(*b, cursor, begin=run.end, layer=TOKEN)

    def _spent(self, worker: int) -> Iterator[tuple[str, float, float]]:
        """The stretches in which a worker waits or computes."""
        stretches = self._since(self.run.doing[worker])
        for kind, some in groupby(stretches, key=lambda s: s[2].kind):
            first, *more = some
            *_, (_, end, _) = first, *more
            if kind in ("waits", "works"):
                yield kind, first[0], self.run.end if end is None else end

    def _counters(self) -> None:
        """Pushes, pulls and updates so far."""
        of = {"pushes": "push", "pulls": "weights", "updates": "update"}
        for i, (noun, kind) in enumerate(of.items()):
            done = self.run.done(kind)
            sums = list(accumulate((b.nbytes for b in done), initial=0))
            for begin, end, n in self._since(steps(b.end or 0.0 for b in done)):
                self.side.add(70 * i, 18, text(f"{n:,}", "figure"), begin=begin, end=end)
                if kind != "update":
                    size = text(human_bytes(sums[n]), "small")
                    self.side.add(70 * i, 47, size, begin=begin, end=end)
            self.side.add(70 * i, 33, text(noun, "small"))

    def _staleness(self) -> None:
        """A histogram of the gradients so far, with the bins of the whole run."""
        drawn, side = self.run.staleness, self.side
        pitch, high, floor = drawn["pitch"], drawn["high"], 84 + drawn["high"]
        gradients = (g for g in self.run.history.gradients if g.taken < math.inf)
        taken = sorted((g.taken, bin_of(drawn, g.late)) for g in gradients)
        for begin, end, n in steps([end for end, _ in taken[:1]]):
            words = "gradients, by staleness" if n else "no gradient applied yet"
            side.add(0, 66, text(words, "small"), begin=begin, end=end)
        side.add(0, floor, path(f"M0 0H{pitch * len(drawn['labels']):.1f}", "axis"))
        for y, words in zip((30, 43), drawn["axis"], strict=True):
            side.add(0, floor + y, text(words, "small"))
        for i, label in enumerate(drawn["labels"]):
            side.add((i + 0.5) * pitch, floor + 14, text(label, "tick", anchor="middle"))
            for begin, end, n in self._since(steps([end for end, which in taken if which == i])):
                if n:
                    tall = max(2.0, high * n / max(drawn["totals"]))
                    told = f"{count(n, 'gradient')} of staleness {drawn['ranges'][i]}"
                    bar = rect(pitch - 2, tall, "bad" if i else "gray", x=1, y=-tall, r=1)
                    number = text(brief(n), "count", x=pitch / 2, y=-tall - 4, anchor="middle")
                    side.add(i * pitch, floor, title(told), bar, number, begin=begin, end=end)


def _headed(row: Row, w: float) -> tuple[str, str, float]:
    """The name of a key, shortened to fit; its size in words, and the position of the size."""
    name = cut(row.key, w - 50, 13)
    size = " · ".join(filter(None, [human_bytes(row.nbytes) if row.nbytes else "", row.share]))
    return name, size, 7.9 * len(name) + 8


def _values(row: Row, w: float, version: int, told: str) -> Iterator[Shape]:
    """The values of a key: in a tooltip, and before its version if there is room."""
    yield rect(w + 10, 47, "hover", x=-5, y=-2)
    yield title(f"{row.key} v{version} = {told}")
    _, size, after = _headed(row, w)
    if after + text_width(size, 11.5) + 6.7 * len(told) < w - 54:
        yield text(told, "worth", x=w - 44, y=17, anchor="end")


@remembered
def _box(
    w: float, h: float, words: str, lane: int, *, x: float = 0, y: float = 0
) -> tuple[Shape, ...]:
    """A gradient, with its label if it fits."""
    box = rect(w, h, "own", x=x, y=y, r=4, lane=lane)
    if w < 5 + 6 * len(words):
        return (box,)
    return box, text(words, "label", x=x + w / 2, y=y + h / 2 + 4, anchor="middle", lane=lane)


@remembered
def _pill(version: int | None, style: str, words: str) -> tuple[Shape, ...]:
    """A version, centered."""
    told = f"v{version}"
    w = max(34, 8 * len(told) + 14)
    return (
        rect(w, 20, style, x=-w / 2, y=-10, r=10),
        text(told, words, y=4.5, anchor="middle"),
    )


@remembered
def _arc(a: float, b: float, y: float, r: float) -> tuple[Shape, ...]:
    """A curve from a waiting worker to another."""
    side = math.copysign(0.72 * r, b - a)
    x1, x2, low = a + side, b - side, y - 0.82 * r
    high = low - min(max(abs(b - a) * 0.22, 22), 74)
    dx = (x2 - x1) * 0.22
    bend = f"{x1 + dx:.1f} {high:.1f} {x2 - dx:.1f} {high:.1f}"
    _, head = arrow((x2 - dx, high), (x2, low), "arc", "full")
    return path(f"M{x1:.1f} {low:.1f}C{bend} {x2:.1f} {low:.1f}", "arc"), head


@remembered
def _fitting(words: str, room: float, size: float) -> str:
    """The activity of a worker, shortened to fit."""
    for short in (words, words.replace("worker ", "")):
        if text_width(short, size) <= room:
            return short
    return cut(short.removeprefix("barrier: ").removeprefix("waits "), room, 0.9 * size)


def _stripes(
    spent: list[tuple[str, float, float]], start: float, span: float, least: float
) -> dict[str, str]:
    """Paths of waiting and computing, without stretches shorter than ``least`` pixels."""
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


MAX_ROWS = 24  # keys in the table


def to_table(run: Serving) -> str:
    """The end of a run as text: keys and their versions, waits, and counters."""
    lines = [f"{run.title}: {', '.join(facts(run))}".rstrip(": ")]
    if not run.keyframes:
        return f"{lines[0]}\n  {NOTHING}"
    lying = Counter(g.place for g in run.history.gradients if g.taken > run.end)
    for at, row in list(run.rows.items())[:MAX_ROWS]:
        here = [version for begin, end, (version, *_) in run.versions.get(at, ()) if end > run.end]
        version = f"v{here[-1]}" if here else "no value"
        size = ", ".join(filter(None, [human_bytes(row.nbytes), row.share]))
        inbox = f", {count(lying[at], 'gradient')} in the inbox" if lying[at] else ""
        lines.append(f"  {run.names[row.server]}: {row.key} {version} ({size}){inbox}")
    if len(run.rows) > MAX_ROWS:
        lines.append(f"  … and {len(run.rows) - MAX_ROWS:,} more keys")
    last = {node: stretches[-1][2] for node, stretches in run.doing.items()}
    lines += [f"  {run.names[n]} {s.text}" for n, s in last.items() if s.kind == "waits"]
    pushes, pulls = run.done("push"), run.done("weights")
    told = [
        "1 push" if len(pushes) == 1 else f"{len(pushes):,} pushes",
        f" ({human_bytes(sum(b.nbytes for b in pushes))}), ",
        f"{count(len(pulls), 'pull')} ({human_bytes(sum(b.nbytes for b in pulls))}), ",
        count(len(run.done("update")), "update"),
    ]
    late = bin_counts(run.staleness)
    lines.append("  " + "".join(told) + (f"; gradients of staleness {late}" if late else ""))
    told = flagged({"notices": notices(run), "notes": notes(run)})
    return "\n".join([*lines, *(f"  {line}" for line in told)])
