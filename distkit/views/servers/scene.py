"""Draws a parameter server: servers with keys and inboxes, workers, and messages.

history.py reads the events, projection.py turns them into captioned keyframes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from distkit._format import count, human_bytes
from distkit.views.scene.frame import Json, clean, flagged
from distkit.views.scene.marks import (
    Scene,
    Shape,
    arrow,
    cached_drawing,
    circle,
    line,
    path,
    picture,
    pieces,
    rect,
    steps,
    text,
    title,
)
from distkit.views.scene.painter import cut
from distkit.views.scene.svg import text_width
from distkit.views.servers.history import MAX_WORKERS, Request, ServerKey, Status, Version
from distkit.views.servers.projection import (
    Keyframe,
    Row,
    Serving,
    facts,
    notes,
    notices,
    opening,
    rule_sentence,
)

Point = tuple[float, float]

#: Layers, from the lowest: messages in flight do not cover keys and versions.
LINK, CARD, NOW, FLIGHT, ROW, ARC, WORKER, TOKEN = range(8)
#: Widths of the picture, and of the area left of a scheduler and of undrawn servers [px].
WIDTH, FIELD = 720, 580
#: Maximum numbers of drawn servers, keys per server, workers of an update, waiting pulls and wait
#: bars.
MAX_SERVERS, MAX_KEYS, NAMED, MANY, LANES = 4, 6, 8, 5, 8
HEAD, TALL, GAP, MARGIN, AISLE = 36, 50, 20, 8, 136  # heights, and distance to the workers
#: Position, distance and height of the wait bars; width of the side panel [px].
LEFT, RIGHT, PITCH, BAR, SIDE = 78, WIDTH - 82, 12, 7, 200
#: The last bin of the histogram counts gradients of at least this staleness; width and height of
#: the histogram [px].
LATEST, ROOM, HIGH = 9, 200.0, 36
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


@dataclass(frozen=True, slots=True)
class Spot:
    """The geometry of a key: its box, the width of an inbox slot, and where pulls wait."""

    x: float
    y: float
    w: float
    slot: float
    wait: float

    @property
    def pill(self) -> Point:
        """The center of the version."""
        return self.x + self.w - 19, self.y + 13


def draw(run: Serving) -> Json:
    """Return the picture of a run, for both painters.

    Args:
        run: the result of ``projection.project``.
    """
    return _Painter(run).picture()


class _Painter:
    def __init__(self, run: Serving) -> None:
        self.run, history = run, run.history
        self.lanes = {rank: lane for lane, rank in enumerate(run.trace.ranks)}
        servers, self.workers, scheduler = map(history.ranks_of, ("server", "worker", "scheduler"))
        self.quorum, total = history.quorum, len(self.workers)
        #: The owners of the slots of each inbox; none if workers share slots.
        self.owners = self.workers if self.quorum == total > 1 else []
        self.field = FIELD if scheduler or len(servers) > MAX_SERVERS else WIDTH
        self.point: dict[int, Point] = {}  # end points of messages, by rank
        self.spots: dict[ServerKey, Spot] = {}  # of drawn keys
        self.scene, self.side = Scene(WIDTH, 0, run.start), Scene(SIDE, 170, run.start)
        self.servers, self.workers = servers[:MAX_SERVERS], self.workers[:MAX_WORKERS]
        bottom = self._servers(servers)
        self.radius, spots = 22.0 if total <= 6 else 17.0, max(1, min(total, MAX_WORKERS + 1))
        self.pitch = min(240.0, self.field / spots)
        left, self.row = (self.field - self.pitch * (spots - 1)) / 2, bottom + AISLE
        places = [round(left + i * self.pitch, 1) for i in range(spots)]
        self.center = dict(zip(self.workers, places, strict=False))
        top = self.row - self.radius
        self.point |= {rank: (x, top) for rank, x in self.center.items()}
        if hidden := total - len(self.workers):
            self._stub(history.ranks_of("worker"), (places[-1], self.row), f"+ {hidden:,}")
        self.scheduler = (WIDTH - 66, bottom + AISLE / 2 - 14)
        self.point |= dict.fromkeys(scheduler, (WIDTH - 128, self.scheduler[1]))
        self.bars = (self.row + self.radius if self.workers else 70.0) + 46
        self.scene.height = self.bars + PITCH * min(len(self.workers), LANES) + 2

    def picture(self) -> Json:
        run, drawn = self.run, self.run.keyframes[self.run.first :]
        for a in self.workers:
            for b in self.servers:
                self.scene.add(0, 0, line(self.point[a], self.point[b], "link"))
        if run.history.ranks_of("scheduler"):
            self._scheduler()
        for place, spot in self.spots.items():
            self._row(run.rows[place], spot)
            self._versions(run.rows[place], run.history.versions[place], spot)
        self._inboxes()
        for worker in self.workers:
            self._statuses(worker)
        for i, keyframe in enumerate(drawn):
            self._keyframe(i, keyframe)
        self._waiting()
        self._counters()
        self._staleness()
        waiting = "waiting for the first message to a server" if run.live else NOTHING
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
            empty="" if drawn or run.history.ranks_of("server") else waiting,
            legend=LEGEND if any(g.late for g in run.history.gradients) else LEGEND[:-1],
            opening=self.scene.when(opening(run)),
            keyframes=[self._caption(keyframe) for keyframe in drawn],
            list={"name": "updates", "all": "all keys", "rows": list(self._updates(drawn))},
            scale=[LEFT / WIDTH, RIGHT / WIDTH],
            side=self.side.plain(),
        )

    def _caption(self, keyframe: Keyframe) -> Json:
        is_request = isinstance(keyframe.subject, Request)
        where = keyframe.subject.span.where.rpartition("/")[2] if is_request else ""
        texts = {"who": keyframe.who, "more": keyframe.more, "where": clean(where)}
        end = None if keyframe.end is None else self.scene.when(keyframe.end)
        present = {key: text for key, text in texts.items() if text}
        return {"begin": self.scene.when(keyframe.begin), "end": end, **present}

    def _lane(self, rank: int) -> int:
        return self.lanes.get(rank, 7)

    # -- fixed marks ------------------------------------------------------------------------

    def _servers(self, servers: list[int]) -> float:
        """Draw the cards of servers, all of equal height; return their bottom edge."""
        drawn = self.servers
        keys: dict[int, list[ServerKey]] = defaultdict(list)
        for place in self.run.rows:
            keys[place[0]].append(place)
        n, most = max(1, len(drawn)), max((len(keys[s]) for s in drawn), default=0)
        width = min(340.0, (self.field - 2 * MARGIN - GAP * (n - 1)) / n)
        left = (self.field - n * width - GAP * (n - 1)) / 2
        height = HEAD + TALL * max(1, min(most, MAX_KEYS)) + (22 if most > MAX_KEYS else 6)
        for i, server in enumerate(drawn):
            x, w, server_keys = round(left + i * (width + GAP), 1), round(width, 1), keys[server]
            note = (
                f"and {len(server_keys) - MAX_KEYS} more keys"
                if len(server_keys) > MAX_KEYS
                else ""
            )
            shapes = (
                rect(w, height, "card", r=10),
                rect(11, 11, "own", x=12, y=13, r=3, lane=self._lane(server)),
                text(self.run.names[server], "name", x=30, y=23),
                text(note, "words", x=12, y=height - 8),
            )
            self.scene.add(x, MARGIN, *shapes[: 4 if note else 3], layer=CARD)
            self.point[server] = x + w / 2, MARGIN + height
            for nth, place in enumerate(server_keys[:MAX_KEYS]):
                slot = min(38.0, max(w - 138, 0.4 * w) / self.quorum)
                wait = x + 12 + self.quorum * slot + 11
                self.spots[place] = Spot(x + 12, MARGIN + HEAD + TALL * nth, w - 24, slot, wait)
        if hidden := len(servers) - len(drawn):
            self._stub(servers, (WIDTH - 64, 40), f"+ {hidden:,} servers")
        return MARGIN + height if drawn else 80.0 - AISLE

    def _stub(self, ranks: list[int], place: Point, words: str) -> None:
        """Draw a placeholder for the undrawn nodes of a role."""
        self.point = dict.fromkeys(ranks, place) | self.point
        self.scene.add(*place, text(words, "words", y=5, anchor="middle"), layer=CARD)

    def _scheduler(self) -> None:
        history = self.run.history
        registered, total = history.registered, len(history.ranks_of("worker", "server"))
        box = rect(124, 54, "card", x=-62, y=-27, r=27)
        name = text("scheduler", "name", y=-2, anchor="middle")
        self.scene.add(*self.scheduler, box, name, layer=CARD)
        for begin, end, n in steps(sorted(registered.values())):
            label = f"all {total} registered" if n >= total else f"{n} of {total} registered"
            shape = text(label, "words", y=16, anchor="middle")
            self.scene.add(*self.scheduler, shape, begin=begin, end=end, layer=CARD)

    def _row(self, row: Row, spot: Spot) -> None:
        """Draw the name, size and empty inbox of a key."""
        name, x_size = _shortened_name(row, spot.w)
        shapes = [
            rect(spot.w + 10, 47, "hover", x=-5, y=-2),
            title(", ".join(filter(None, [row.key, row.size]))),
            text(name, "key", y=17),
        ]
        if x_size + text_width(row.size, 11.5) < spot.w - 42:
            shapes.append(text(row.size, "size", x=x_size, y=17))
        for n in range(self.quorum):
            x, w = n * spot.slot, _slot_width(spot)
            shapes.append(rect(w, 17, "slot", x=x, y=26, r=min(4, w / 2)))
            if self.owners and w > 14:  # an empty slot names its worker
                owner = str(self.owners[n])
                shapes.append(text(owner, "small", x=x + w / 2, y=38.5, anchor="middle"))
        self.scene.add(spot.x, spot.y, *shapes, layer=ROW)

    # -- states ----------------------------------------------------------------------------

    def _slot_of(self, g: Request) -> int:
        """Return the inbox slot of a gradient: that of its worker, or the next one."""
        own = self.owners.index(g.node) if g.node in self.owners else g.nth - 1
        return min(max(own, 0), self.quorum - 1)

    def _inboxes(self) -> None:
        """Draw the gradients in inboxes, and waiting pulls."""
        waiting: dict[tuple[Spot, int], list[Any]] = defaultdict(list)
        for g in self.run.history.gradients:
            if g.place in self.spots:
                waiting[self.spots[g.place], self._slot_of(g)].append((g.arrived, g.taken, g))
        for (spot, slot), spans in waiting.items():
            position = (
                spot.x + slot * spot.slot - 0.5,
                spot.y + 25.5,
            )  # covers the empty slot's edge
            for begin, end, gradients in pieces(spans):
                words = f"×{len(gradients)}" if len(gradients) > 1 else f"∇v{gradients[0].version}"
                box = _box(_slot_width(spot) + 1, 18, words, self._lane(gradients[0].node))
                self.scene.add(*position, *box, begin=begin, end=end, layer=ROW)
        held: dict[Spot, list[Any]] = defaultdict(list)
        for r in self.run.history.requests:
            if r.held and r.place in self.spots:
                held[self.spots[r.place]].append((r.arrived, r.answered, r.node))
        for spot, waits in held.items():
            fits = max(0, min(MANY, int((spot.x + spot.w - spot.wait - 44) / 15)))
            for begin, end, workers in pieces(waits):
                rings = self._rings(workers, fits)
                self.scene.add(spot.wait, spot.y + 34.5, *rings, begin=begin, end=end, layer=ROW)

    def _rings(self, workers: list[int], fits: int) -> Iterator[Shape]:
        """Yield a ring for each waiting pull that fits."""
        shown = len(workers) if len(workers) <= fits else max(0, fits - 1)
        for i, worker in enumerate(workers[:shown]):
            yield circle(6, "held", x=15 * i, lane=self._lane(worker))
        if shown < len(workers):
            yield text(f"+{len(workers) - shown}", "small", x=15 * shown - 3, y=4)

    def _versions(self, row: Row, versions: list[Version], spot: Spot) -> None:
        """Draw the versions of a key, its values if few, and the workers of the last update."""
        none = text("no value yet", "small", x=19, y=4, anchor="end")
        first = versions[0][0] if versions else None
        self.scene.add(*spot.pill, none, end=first, layer=ROW)
        ends = [*(time for time, *_ in versions[1:]), None]
        for (begin, version, late, values), end in zip(versions, ends, strict=False):
            interval: Any = {"begin": begin, "end": end, "layer": ROW}
            if values:
                self.scene.add(spot.x, spot.y, *_values(row, spot.w, version, values), **interval)
            self.scene.add(*spot.pill, *_pill(version, "pill", "version"), **interval)
            if late:
                self.scene.add(spot.x + spot.w, spot.y + 39, *self._last_update(late), **interval)

    def _last_update(self, staleness: Mapping[int, int]) -> list[Shape]:
        """Return the workers of the last update, and the staleness of their gradients."""
        late = max(staleness.values())
        words = f"{late} late" if late else "fresh" if len(staleness) == 1 else ""
        left = -text_width(words, 14) - 13 if words else -6
        shapes = [text(words, "late" if late else "size", anchor="end")] if words else []
        return shapes + [
            circle(4.2, "own", x=left - 11 * i, y=-4, lane=self._lane(worker))
            for i, worker in enumerate(reversed(list(staleness)[:4]))
        ]

    def _statuses(self, worker: int) -> None:
        """Draw the activity of a worker, and arcs to the workers it waits for."""
        x, y = self.center[worker], self.row
        for begin, end, status in self.run.status[worker]:
            shapes = self._worker(worker, status)
            self.scene.add(x, y, *shapes, begin=begin, end=end, layer=WORKER)
            for other in status.awaited:
                if other in self.center:
                    arc = _arc(x, self.center[other], y, self.radius)
                    self.scene.add(0, 0, *arc, begin=begin, end=end, layer=ARC)

    def _worker(self, rank: int, status: Status) -> list[Shape]:
        """Return a worker: hollow and dashed while it waits, pale once it has ended."""
        r, name, waits = self.radius, self.run.names[rank], status.kind == "waits"
        style = {"waits": "waiting", "ended": "pale"}.get(status.kind, "own")
        text_style, lane = "number" if style == "own" else "hollow", self._lane(rank)
        shapes = [
            title(f"{name} {status.text}".strip(), aloud=waits),
            circle(r, style, lane=lane),
            text(str(rank), text_style, y=r * 0.34, anchor="middle", lane=lane, size=r * 0.95),
        ]
        if status.text == "died":
            near, far = 0.4 * r, 1.1 * r  # next to the number
            cross = f"M{near} {-far}L{far} {-near}M{far} {-far}L{near} {-near}"
            shapes.append(path(cross, "cross"))
        if self.pitch >= 66:
            size = 0 if r > 20 else 11.0
            below, text_style = cut(name, self.pitch, 12), "strong" if waits else "words"
            shapes.append(text(below, "name", y=r + 17, anchor="middle", size=size))
            status_text = status.text
            if text_width(status_text, size or 13) > self.pitch:
                status_text = cut(status_text.replace("worker ", ""), self.pitch, 11)
            if status_text:
                shapes.append(text(status_text, text_style, y=r + 33, anchor="middle", size=size))
        return shapes

    # -- messages in flight ------------------------------------------------------------------

    def _keyframe(self, i: int, keyframe: Keyframe) -> None:
        """Draw a message in flight, and the frame held at its end."""
        begin, end, lane = keyframe.begin, keyframe.end, self._lane(keyframe.src)
        spot = self.spots.get(getattr(keyframe.subject, "place", (-1, "")))
        if spot and end is not None:
            now = rect(spot.w + 10, 47, "now", x=-5, y=-2, r=7)
            self.scene.hold_frame(i, spot.x, spot.y, now, layer=NOW)
            if keyframe.kind == "update":
                self._merge(i, keyframe, spot)
        a, b = (self.point.get(rank) for rank in (keyframe.src, keyframe.dst))
        if keyframe.src == keyframe.dst or a is None or b is None:
            return
        a, b = self._ends(keyframe, spot, a, b)
        style = "wrong" if keyframe.lost else "answer" if keyframe.kind == "book" else ""
        head = {"wrong": "bad", "answer": "gray"}.get(style, "own")
        token = self._token(keyframe, lane)
        if end is None:
            replaced = self._replaced(keyframe)
            shapes, middle = arrow(a, b, "lost", "bad"), ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
            self.scene.add(0, 0, *shapes, begin=begin, end=replaced, layer=FLIGHT)
            self.scene.add(*middle, *token, begin=begin, end=replaced, layer=TOKEN)
            return
        shapes = arrow(a, b, style or "flight", head, lane=lane)
        self.scene.add(0, 0, *shapes, begin=begin, end=end, layer=FLIGHT)
        self.scene.add(*a, *token, begin=begin, end=end, to=b, layer=TOKEN)
        self.scene.hold_frame(i, 0, 0, *arrow(a, b, style or "past", head, lane=lane), layer=FLIGHT)

    def _replaced(self, keyframe: Keyframe) -> float | None:
        """Return when the sender of a keyframe was replaced after it died, else None."""
        times = (
            replaced
            for node, _, replaced, _ in self.run.endings
            if node == keyframe.src and replaced
        )
        return next((replaced for replaced in times if replaced > keyframe.begin), None)

    def _token(self, keyframe: Keyframe, lane: int) -> tuple[Shape, ...]:
        """Return the token of a message: a gradient with its version, weights, or a request."""
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

    def _merge(self, i: int, keyframe: Keyframe, spot: Spot) -> None:
        """Move the gradients of an update from their slots into the value."""
        (px, py), w, begin, end = spot.pill, _slot_width(spot), keyframe.begin, keyframe.end
        for n, worker in enumerate(list(keyframe.subject.late)[: self.quorum]):
            box, to = rect(w, 17, "merging", r=4, lane=self._lane(worker)), (px - w / 2, py - 8.5)
            x, y = spot.x + n * spot.slot, spot.y + 26
            self.scene.add(x, y, box, begin=begin, end=end, to=to, layer=TOKEN)
        pill = _pill(keyframe.subject.version, "full", "reversed")
        self.scene.hold_frame(i, px, py, *pill, layer=TOKEN)

    def _ends(
        self, keyframe: Keyframe, spot: Spot | None, a: Point, b: Point
    ) -> tuple[Point, Point]:
        """Return the end points of a message; one of them may be at a key."""
        kind = keyframe.kind
        if spot and kind == "push":
            x = spot.x + self._slot_of(keyframe.subject) * spot.slot + _slot_width(spot) / 2
            b = x, spot.y + 43
        elif spot and kind == "pull":
            b = spot.wait, spot.y + 34.5
        elif spot and kind == "init":
            b = spot.pill[0], spot.pill[1] + 10
        elif spot and kind == "weights":
            a = spot.pill
        return a, b

    # -- bars and side panel ------------------------------------------------------------------

    def _updates(self, drawn: list[Keyframe]) -> Iterator[list[Any]]:
        """Yield the updates as rows of the list."""
        for i, keyframe in enumerate(drawn):
            if keyframe.kind == "update" and keyframe.end is not None:
                row, late = self.run.rows[keyframe.subject.place], keyframe.subject.late
                part = " {}/{}".format(*row.part) if row.part else ""
                shown = list(late.items())[:NAMED]
                workers = [[self._lane(w), str(w), f"{n} late" if n else ""] for w, n in shown]
                others = max(0, len(late) - NAMED)
                yield [i, row.key, row.key, part, f"v{keyframe.subject.version}", workers, others]

    def _waiting(self) -> None:
        """Draw a bar per worker over the whole run: full while waiting, pale while computing."""
        run, workers = self.run, self.workers[:LANES]
        span = max(run.end - run.start, 1e-12)
        for i, w in enumerate(workers):
            activities = list(self._activities(w))
            waited = sum(end - begin for kind, begin, end in activities if kind == "waits")
            styles = {"waits": "own", "works": "pale"}
            bars = _stripes(activities, run.start, span)
            self.scene.add(
                0,
                self.bars + PITCH * i,
                text(run.names[w], "small", x=LEFT - 8, y=8, anchor="end"),
                rect(8, BAR, "own", x=RIGHT + 8, y=2, lane=self._lane(w)),  # colour of its waits
                text(f"waits {100 * waited / span:.0f} %", "small", x=RIGHT + 20, y=8),
                title(f"{run.names[w]}: full while it waits for others, pale while it computes"),
                *(path(d, styles[kind], lane=self._lane(w)) for kind, d in bars.items()),
            )
        if workers:
            cursor = rect(1.4, PITCH * len(workers) + 1, "full", x=-0.7)
            a, b = (LEFT, self.bars - 2), (RIGHT, self.bars - 2)
            self.scene.add(*a, cursor, end=run.end, to=b, steady=True, layer=TOKEN)
            self.scene.add(*b, cursor, begin=run.end, layer=TOKEN)

    def _activities(self, worker: int) -> Iterator[tuple[str, float, float]]:
        """Yield the intervals in which a worker waits or computes, clipped to the picture."""
        for begin, end, status in self.run.status[worker]:
            a, b = max(begin, self.run.start), self.run.end if end is None else end
            if status.kind in ("waits", "works") and a < b:
                yield status.kind, a, b

    def _counters(self) -> None:
        """Draw the numbers of pushes, pulls and updates so far."""
        kinds = {"pushes": "push", "pulls": "weights", "updates": "update"}
        for i, (noun, kind) in enumerate(kinds.items()):
            completed = self.run.done(kind)
            sums = list(accumulate((b.nbytes for b in completed), initial=0))
            for begin, end, n in steps(b.end or 0.0 for b in completed):
                shapes = [text(f"{n:,}", "figure"), text(human_bytes(sums[n]), "small", y=29)]
                visible = shapes[: 1 if kind == "update" else 2]
                self.side.add(70 * i, 18, *visible, begin=begin, end=end)
            self.side.add(70 * i, 33, text(noun, "small"))

    def _staleness(self) -> None:
        """Draw a histogram of the staleness so far, with the bins of the whole run."""
        gradients, side, floor = self.run.history.gradients, self.side, 84 + HIGH
        taken = sorted((g.taken, min(g.late, LATEST)) for g in gradients if g.late is not None)
        bins = histogram(late for _, late in taken)
        pitch, most = min(40.0, ROOM / len(bins)), max(1, *bins)
        for begin, end, n in steps([end for end, _ in taken[:1]]):
            label = "gradients, by staleness" if n else "no gradient applied yet"
            side.add(0, 66, text(label, "small"), begin=begin, end=end)
        side.add(0, floor, path(f"M0 0H{pitch * len(bins):.1f}", "axis"))
        for y, label in (
            (30, "updates between a worker's pull"),
            (43, "and the use of its gradient"),
        ):
            side.add(0, floor + y, text(label, "small"))
        for i in range(len(bins)):
            side.add((i + 0.5) * pitch, floor + 14, text(_bin_label(i), "tick", anchor="middle"))
            for begin, end, n in steps([time for time, late in taken if late == i]):
                if n:
                    height = max(2.0, HIGH * n / most)
                    hint = f"{count(n, 'gradient')} of staleness {_bin_label(i)}"
                    bar = rect(pitch - 2, height, "bad" if i else "gray", x=1, y=-height, r=1)
                    number = text(f"{n:,}", "count", x=pitch / 2, y=-height - 4, anchor="middle")
                    side.add(i * pitch, floor, title(hint), bar, number, begin=begin, end=end)


def histogram(late: Iterable[int]) -> list[int]:
    """Count gradients by staleness, from 0; the last of ten bins includes all larger ones.

    >>> histogram([0, 0, 1]), histogram([700])[-1]
    ([2, 1, 0], 1)
    """
    counts = Counter(min(value, LATEST) for value in late)
    return [counts[n] for n in range(max([2, *counts]) + 1)]  # the axis has at least three values


def _bin_label(staleness: int) -> str:
    return f"{staleness}+" if staleness == LATEST else str(staleness)


def _slot_width(spot: Spot) -> float:
    """Return the width of a slot, without the gap after it."""
    return round(max(0.7 * spot.slot, spot.slot - 4), 1)


def _shortened_name(row: Row, w: float) -> tuple[str, float]:
    """Return the name of a key, shortened to fit, and the x coordinate after it."""
    name = cut(row.key, w - 50, 13)
    return name, 7.9 * len(name) + 8


def _values(row: Row, w: float, version: int, values: str) -> Iterator[Shape]:
    """Yield the values of a key as a tooltip, and before its version if they fit."""
    yield rect(w + 10, 47, "hover", x=-5, y=-2)
    yield title(f"{row.key} v{version} = {values}")
    _, x_size = _shortened_name(row, w)
    if x_size + text_width(row.size, 11.5) + 6.7 * len(values) < w - 54:
        yield text(values, "worth", x=w - 44, y=17, anchor="end")


@cached_drawing
def _box(
    w: float, h: float, words: str, lane: int, *, x: float = 0, y: float = 0
) -> tuple[Shape, ...]:
    """Return a gradient, with its label if it fits."""
    box = rect(w, h, "own", x=x, y=y, r=min(4, w / 2), lane=lane)
    if w < 5 + 6 * len(words):
        return (box,)
    return box, text(words, "label", x=x + w / 2, y=y + h / 2 + 4, anchor="middle", lane=lane)


@cached_drawing
def _pill(version: int | None, style: str, text_style: str) -> tuple[Shape, ...]:
    """Return a version number, centered."""
    label = f"v{version}"
    w = max(34, 8 * len(label) + 14)
    return (
        rect(w, 20, style, x=-w / 2, y=-10, r=10),
        text(label, text_style, y=4.5, anchor="middle"),
    )


@cached_drawing
def _arc(a: float, b: float, y: float, r: float) -> tuple[Shape, ...]:
    """Return a curve from a waiting worker to another."""
    side = math.copysign(0.72 * r, b - a)
    x1, x2, low = a + side, b - side, y - 0.82 * r
    high = low - min(max(abs(b - a) * 0.22, 22), 74)
    dx = (x2 - x1) * 0.22
    bend = f"{x1 + dx:.1f} {high:.1f} {x2 - dx:.1f} {high:.1f}"
    _, head = arrow((x2 - dx, high), (x2, low), "arc", "full")
    return path(f"M{x1:.1f} {low:.1f}C{bend} {x2:.1f} {low:.1f}", "arc"), head


def _stripes(
    activities: Sequence[tuple[str, float, float]], start: float, span: float
) -> dict[str, str]:
    """Return paths of waiting and computing, at most one interval per pixel."""
    paths: dict[str, str] = defaultdict(str)
    reached = 0.0
    for kind, begin, end in activities:
        a, b = (LEFT + (t - start) / span * (RIGHT - LEFT) for t in (begin, end))
        if b >= reached + 1 and b - a >= 0.5:
            a, reached = max(a, reached), b
            paths[kind] += f"M{a:.1f} 2h{b - a:.1f}v{BAR}h{a - b:.1f}z"
    return paths


MAX_ROWS = 24  # keys in the table


def to_table(run: Serving) -> str:
    """Return the final state of a run as text: keys with versions, waits, and counters."""
    lines = [f"{run.title}: {', '.join(facts(run))}".rstrip(": ")]
    if not run.keyframes:
        return f"{lines[0]}\n  {NOTHING}"
    history = run.history
    in_inbox = Counter(g.place for g in history.gradients if g.taken > run.end)
    for place, row in list(run.rows.items())[:MAX_ROWS]:
        versions = history.versions[place]
        version = f"v{versions[-1][1]}" if versions else "no value"
        inbox = f", {count(in_inbox[place], 'gradient')} in the inbox" if in_inbox[place] else ""
        size = (row.size or "0 B").replace(" · ", ", ")
        lines.append(f"  {run.names[row.server]}: {row.key} {version} ({size}){inbox}")
    if len(run.rows) > MAX_ROWS:
        lines.append(f"  … and {len(run.rows) - MAX_ROWS:,} more keys")
    last = {node: stretches[-1][2] for node, stretches in run.status.items()}
    lines += [f"  {run.names[n]} {s.text}" for n, s in last.items() if s.kind == "waits"]
    pushes, pulls, updates = (run.done(kind) for kind in ("push", "weights", "update"))
    sizes = [human_bytes(sum(b.nbytes for b in keyframes)) for keyframes in (pushes, pulls)]
    totals = (
        f"  {len(pushes):,} push{'es' * (len(pushes) != 1)} ({sizes[0]}), "
        f"{count(len(pulls), 'pull')} ({sizes[1]}), {count(len(updates), 'update')}"
    )
    bins = histogram(g.late for g in history.gradients if g.late is not None)
    late = ", ".join(f"{_bin_label(i)}: {n:,}" for i, n in enumerate(bins) if n)
    lines.append(totals + (f"; gradients of staleness {late}" if late else ""))
    notice_lines = flagged({"notices": notices(run), "notes": notes(run)})
    return "\n".join([*lines, *(f"  {line}" for line in notice_lines)])
