"""Draws a parameter server: servers with keys and inboxes, workers, and messages.

history.py reads the events, and projection.py turns them into captioned keyframes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from distkit._format import count, human_bytes
from distkit.events import Op
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.marks import (
    Scene,
    Shape,
    arrow,
    cached_drawing,
    circle,
    line,
    path,
    picture,
    rect,
    steps,
    text,
    title,
)
from distkit.views.scene.renderer import cut
from distkit.views.scene.svg import text_width
from distkit.views.servers.history import MAX_WORKERS, Request, ServerKey, Status, Version
from distkit.views.servers.projection import (
    MAX_SERVERS,
    Keyframe,
    Row,
    ServerProjection,
    facts,
    opening,
    poster,
    project,
    rule_sentence,
    verdicts,
)

Point = tuple[float, float]
#: The shapes of a legend entry, their width [px], and their meaning.
LegendEntry = tuple[list[Shape], float, str]

#: Layers, lowest first. Keys and versions cover the arrows of messages.
LINK, CARD, NOW, FLIGHT, ROW, ARC, WORKER, TOKEN = range(8)
#: Widths of the scene, and of the area to the left of a scheduler if there is one [px].
WIDTH, FIELD_WIDTH = 720, 580
#: At most MAX_KEYS keys per server, MAX_NAMED workers per update and MAX_BARS wait bars are drawn.
MAX_KEYS, MAX_NAMED, MAX_BARS = 6, 8, 8
#: Sizes [px]. GAP is between servers, MARGIN is around them, and WORKER_DISTANCE is below them.
HEADING_HEIGHT, KEY_HEIGHT, GAP, MARGIN, WORKER_DISTANCE = 34, 48, 20, 4, 96
#: Sizes [px]. LEFT and RIGHT are the edges of the wait bars.
LEFT, RIGHT, BAR_PITCH, BAR_HEIGHT, SIDE_WIDTH = 78, WIDTH - 82, 15, 11, 200
#: LAST_BIN also counts gradients with a higher staleness. MIN_BAR is the minimum height of a bar
#: [px].
LAST_BIN, HISTOGRAM_WIDTH, HISTOGRAM_HEIGHT, MIN_BAR = 9, 200.0, 44, 3
#: Entries of the legend. Those for waiting pulls and stale gradients are shown only if needed.
LEGEND: list[LegendEntry] = [
    (
        [rect(30, 16, "own", y=2, r=4), text("∇v1", "label", x=15, y=14, anchor="middle")],
        30,
        "gradient from version 1",
    ),
    (
        [
            rect(32, 17, "pill", x=1, y=1.5, r=8.5),
            text("v1", "version", x=17, y=14.5, anchor="middle"),
        ],
        34,
        "weights, version 1",
    ),
    ([circle(6, "ring", x=8, y=10)], 16, "pull"),
    ([rect(11, 11, "own", x=2, y=4.5, r=2)], 16, "other message"),
]
HELD: LegendEntry = ([circle(6, "held", x=8, y=10)], 16, "waiting pull")
STALE: LegendEntry = ([text("stale by 2:", "late", y=14)], 76, "2 updates since its pull")


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The geometry of a key: its box, its inbox slots and its waiting pulls.

    ``slot_pitch`` and ``slot_width`` describe the inbox slots, and ``pulls_x`` is the x position of
    the first waiting pull.
    """

    x: float
    y: float
    w: float
    slot_pitch: float
    slot_width: float
    pulls_x: float

    @property
    def pill(self) -> Point:
        """The center of the version's pill."""
        return self.x + self.w - 19, self.y + 13


def draw(trace: EventLog, *, live: bool = False) -> Json:
    """Return the picture of a run for the SVG and browser renderers.

    Args:
        trace: the run.
        live: whether the run is in progress.
    """
    return _Renderer(project(trace, live)).picture()


class _Renderer:
    def __init__(self, run: ServerProjection) -> None:
        self.run, history = run, run.history
        self.lanes = {rank: lane for lane, rank in enumerate(run.trace.ranks)}
        self.servers = history.ranks_of("server")[:MAX_SERVERS]
        workers, scheduler = history.ranks_of("worker"), history.ranks_of("scheduler")
        self.workers, self.quorum = workers[:MAX_WORKERS], history.quorum
        #: The owners of the slots of each inbox; none if workers share slots.
        self.owners = workers if self.quorum == len(workers) > 1 else []
        self.field = FIELD_WIDTH if scheduler else WIDTH
        self.point: dict[int, Point] = {}  # end points of messages, by rank
        self.layouts: dict[ServerKey, KeyLayout] = {}  # layout of each drawn key
        clock = run.start, run.trace.start
        self.scene, self.side = Scene(WIDTH, 0, *clock), Scene(SIDE_WIDTH, 178, *clock)
        bottom = self._draw_servers()
        self.radius = 22.0 if len(workers) <= 6 else 17.0
        self.pitch = min(240.0, self.field / max(1, len(self.workers)))
        left = (self.field - self.pitch * (len(self.workers) - 1)) / 2
        self.center = {
            w: (left + i * self.pitch, bottom + WORKER_DISTANCE) for i, w in enumerate(self.workers)
        }
        self.point |= {w: (x, y - self.radius) for w, (x, y) in self.center.items()}
        self.scheduler = (WIDTH - 66, bottom + WORKER_DISTANCE / 2 - 14)
        self.point |= dict.fromkeys(scheduler, (WIDTH - 128, self.scheduler[1]))
        self.bars = (bottom + WORKER_DISTANCE + self.radius if workers else 70.0) + 46
        self.scene.height = self.bars + BAR_PITCH * min(len(self.workers), MAX_BARS) + 2

    def picture(self) -> Json:
        run, history = self.run, self.run.history
        for worker in self.workers:
            self._draw_statuses(worker)
        if history.ranks_of("scheduler"):
            self._draw_scheduler()
        for server_key, layout in self.layouts.items():
            self._draw_row(run.rows[server_key], layout)
            self._draw_versions(run.rows[server_key], history.versions[server_key], layout)
        self._draw_inboxes()
        for i, keyframe in enumerate(run.keyframes):
            self._draw_keyframe(i, keyframe)
        self._draw_waiting()
        self._draw_counters()
        self._draw_staleness()
        return picture(
            self.scene,
            title=clean(run.trace.info.name) or "Servers",
            end=run.end,
            view="servers",
            facts=facts(run),
            notices=run.notices,
            notes=run.notes,
            description=rule_sentence(history),
            live=run.live,
            empty=""
            if run.keyframes or history.ranks_of("server")
            else "waiting for the first message to a server"
            if run.live
            else "this trace has no requests to a parameter server",
            verdicts=[] if run.notices else verdicts(history),
            legend=[
                *LEGEND,
                *[HELD] * any(r.blocked for r in history.requests),
                *[STALE] * any(any(u.staleness.values()) for u in history.updates),
            ],
            start=self.scene.relative_time(run.start),
            before="before the first operation"
            if run.start == run.trace.start
            else "the last node registers",
            opening=self.scene.relative_time(opening(run)),
            poster=self.scene.relative_time(poster(run)),
            keyframes=[self._caption(keyframe) for keyframe in run.keyframes],
            list={"name": "updates", "all": "all keys", "rows": list(self._updates())},
            scale=[LEFT / WIDTH, RIGHT / WIDTH],
            max_height=370,
            side=self.side.plain(),
        )

    def _caption(self, keyframe: Keyframe) -> Json:
        request = keyframe.subject if isinstance(keyframe.subject, Request) else None
        return {
            "begin": self.scene.relative_time(keyframe.begin),
            "end": None if keyframe.end is None else self.scene.relative_time(keyframe.end),
            "caption": keyframe.caption,
            "details": keyframe.details,
            "where": clean(request.span.where.rpartition("/")[2]) if request else "",
        }

    def _lane(self, rank: int) -> int:
        return self.lanes.get(rank, 7)

    # -- fixed marks ------------------------------------------------------------------------

    def _draw_servers(self) -> float:
        """Draw the cards of servers, all of equal height; return their bottom edge."""
        keys: dict[int, list[ServerKey]] = defaultdict(list)
        for server_key in self.run.rows:
            keys[server_key[0]].append(server_key)
        n, most = max(1, len(self.servers)), max((len(keys[s]) for s in self.servers), default=0)
        w = min(340.0, (self.field - 2 * MARGIN - GAP * (n - 1)) / n)
        height = (
            HEADING_HEIGHT
            + KEY_HEIGHT * max(1, min(most, MAX_KEYS))
            + (22 if most > MAX_KEYS else 6)
        )
        slot = min(38.0, max(w - 138, 0.4 * w) / self.quorum)
        for i, server in enumerate(self.servers):
            x = (self.field - n * w - GAP * (n - 1)) / 2 + i * (w + GAP)
            more = len(keys[server]) - MAX_KEYS
            self.scene.add(
                x,
                MARGIN,
                rect(w, height, "card", r=10),
                rect(11, 11, "own", x=12, y=13, r=3, lane=self._lane(server)),
                text(self.run.names[server], "name", x=30, y=23),
                text(
                    f"and {count(more, 'more key')}" if more > 0 else "",
                    "words",
                    x=12,
                    y=height - 8,
                ),
                text("" if keys[server] else "no keys", "words", x=12, y=HEADING_HEIGHT + 17),
                layer=CARD,
            )
            self.point[server] = x + w / 2, MARGIN + height
            for nth, server_key in enumerate(keys[server][:MAX_KEYS]):
                y, pulls_x = MARGIN + HEADING_HEIGHT + KEY_HEIGHT * nth, x + 23 + self.quorum * slot
                slot_width = round(max(0.7 * slot, slot - 4), 1)
                self.layouts[server_key] = KeyLayout(x + 12, y, w - 24, slot, slot_width, pulls_x)
        return MARGIN + height if self.servers else 80.0 - WORKER_DISTANCE

    def _draw_scheduler(self) -> None:
        registered = self.run.history.registered
        total = len(self.run.history.ranks_of("worker", "server"))
        self.scene.add(
            *self.scheduler,
            rect(124, 54, "card", x=-62, y=-27, r=27),
            text("scheduler", "name", y=-2, anchor="middle"),
            layer=CARD,
        )
        for begin, end, n in steps(sorted(registered.values())):
            label = f"all {total} registered" if n >= total else f"{n} of {total} registered"
            shape = text(label, "words", y=16, anchor="middle")
            self.scene.add(*self.scheduler, shape, begin=begin, end=end, layer=CARD)

    def _draw_row(self, row: Row, layout: KeyLayout) -> None:
        """Draw the name, size and empty inbox of a key."""
        name, x_size = _shortened_name(row, layout.w)
        shapes = [
            rect(layout.w + 10, 47, "hover", x=-5, y=-2),
            title(f"{row.key} {row.size}".rstrip()),
            text(name, "key", y=17),
        ]
        if x_size + text_width(row.size, 11.5) < layout.w - 42:
            shapes.append(text(row.size, "size", x=x_size, y=17))
        for n in range(self.quorum):
            x, w = n * layout.slot_pitch, layout.slot_width
            shapes.append(rect(w, 17, "slot", x=x, y=26, r=min(4, w / 2)))
            if self.owners and w > 14:  # the rank of the worker, in an empty slot
                shapes.append(
                    text(str(self.owners[n]), "small", x=x + w / 2, y=38.5, anchor="middle")
                )
        self.scene.add(layout.x, layout.y, *shapes, layer=ROW)

    # -- states ----------------------------------------------------------------------------

    def _slot(self, layout: KeyLayout, worker: int, nth: int) -> Point:
        """Return the position of the nth gradient in an inbox.

        It is the worker's own slot or, if workers share slots, the next free slot.
        """
        nth = self.owners.index(worker) if worker in self.owners else nth
        return layout.x + min(nth, self.quorum - 1) * layout.slot_pitch, layout.y + 26

    def _pull_position(self, layout: KeyLayout, worker: int) -> Point:
        """Return the position of a waiting pull."""
        if worker not in self.workers:
            return layout.pulls_x, layout.y + 34.5
        gap = min(15.0, (layout.x + layout.w - layout.pulls_x - 60) / len(self.workers))
        return layout.pulls_x + gap * self.workers.index(worker), layout.y + 34.5

    def _draw_inboxes(self) -> None:
        """Draw the gradients in inboxes, and waiting pulls."""
        for r in self.run.history.requests:
            layout = self.layouts.get(r.server_key)
            if layout is None or r.arrived is None or r.node not in self.workers:
                continue
            if r.blocked:
                self.scene.add(
                    *self._pull_position(layout, r.node),
                    circle(6, "held", lane=self._lane(r.node)),
                    begin=r.arrived,
                    end=r.answered,
                    layer=ROW,
                )
            elif r.span.op is Op.PUSH and not (r.refused or r.dropped):
                x, y = self._slot(layout, r.node, r.nth)
                box = _box(layout.slot_width + 1, 18, f"∇v{r.version}", self._lane(r.node))
                # the box covers the edge of the empty slot
                self.scene.add(x - 0.5, y - 0.5, *box, begin=r.arrived, end=r.applied, layer=ROW)

    def _draw_versions(self, row: Row, versions: list[Version], layout: KeyLayout) -> None:
        """Draw the versions of a key, with short values, and each update's maximum staleness."""
        self.scene.add(
            *layout.pill,
            text("no value yet", "small", x=19, y=4, anchor="end"),
            end=versions[0][0] if versions else None,
            layer=ROW,
        )
        ends = [*(begin for begin, *_ in versions[1:]), None]
        for (begin, version, staleness, values), end in zip(versions, ends, strict=False):
            most = max(staleness.values(), default=0)
            shapes = [
                *(_values(row, layout.w, version, values) if values else ()),
                *_pill(version, "pill", "version", x=layout.w - 19, y=13),
                text(f"stale by {most}" if most else "", "late", x=layout.w, y=39, anchor="end"),
            ]
            self.scene.add(layout.x, layout.y, *shapes, begin=begin, end=end, layer=ROW)

    def _draw_statuses(self, worker: int) -> None:
        """Draw the activity of a worker, and arcs to the workers it waits for."""
        x, y = self.center[worker]
        for begin, end, status in self.run.status[worker]:
            self.scene.add(x, y, *self._worker(worker, status), begin=begin, end=end, layer=WORKER)
            for other in self.center.keys() & status.awaited:
                arc = _arc(x, self.center[other][0], y, self.radius)
                self.scene.add(0, 0, *arc, begin=begin, end=end, layer=ARC)

    def _worker(self, rank: int, status: Status) -> Iterator[Shape]:
        """Yield a worker: hollow and dashed while it waits, pale once it has ended or stopped."""
        r, name, waits = self.radius, self.run.names[rank], status.kind == "waits"
        style = {"waits": "waiting", "ended": "pale", "stopped": "pale"}.get(status.kind, "own")
        number, lane = "number" if style == "own" else "hollow", self._lane(rank)
        yield title(f"{name} {status.text}".strip(), aloud=waits)
        yield circle(r, style, lane=lane)
        yield text(str(rank), number, y=r * 0.34, anchor="middle", lane=lane, size=r * 0.95)
        if status.text == "died":
            near, far = 0.4 * r, 1.1 * r  # the cross is next to the number
            yield path(f"M{near} {-far}L{far} {-near}M{far} {-far}L{near} {-near}", "cross")
        if self.pitch >= 66:
            size = 0 if r > 20 else 11.0
            yield text(cut(name, self.pitch, 12), "name", y=r + 17, anchor="middle", size=size)
            activity, style = status.text, "strong" if waits else "words"
            if text_width(activity, size or 13) > self.pitch:
                activity = cut(activity.replace("worker ", ""), self.pitch, 11)
            yield text(activity, style, y=r + 33, anchor="middle", size=size)

    # -- messages in flight ------------------------------------------------------------------

    def _draw_keyframe(self, i: int, keyframe: Keyframe) -> None:
        """Draw a message in flight, and the frame held at its end."""
        begin, end, lane = keyframe.begin, keyframe.end, self._lane(keyframe.src)
        layout = self.layouts.get(getattr(keyframe.subject, "server_key", (-1, "")))
        if layout and end is not None:
            self.scene.hold_frame(
                i, layout.x, layout.y, rect(layout.w + 10, 47, "now", x=-5, y=-2, r=7), layer=NOW
            )
            if keyframe.kind == "update":
                self._merge(i, keyframe, layout)
        a, b = self._ends(keyframe, layout)
        if keyframe.src == keyframe.dst or a is None or b is None:
            return
        bad = keyframe.lost or end is None
        if bad:
            shapes = arrow(a, b, "lost" if end is None else "wrong", "bad", lane=lane)
            self.scene.add(0, 0, *shapes, begin=begin, end=end, layer=FLIGHT)
        else:  # the path, which ends below the server's card
            self.scene.add(0, 0, line(a, b, "link"), begin=begin, end=end, layer=LINK)
        self.scene.add(*a, *self._token(keyframe, lane), begin=begin, end=end, to=b, layer=TOKEN)
        if end is not None:
            past = arrow(a, b, *(("wrong", "bad") if bad else ("past", "own")), lane=lane)
            self.scene.hold_frame(i, 0, 0, *past, layer=FLIGHT)

    def _ends(
        self, keyframe: Keyframe, layout: KeyLayout | None
    ) -> tuple[Point | None, Point | None]:
        """Return the ends of a message: nodes or, for a drawn key, a node and a point in its row.

        A push ends at its slot of the inbox, and a pull next to the inbox. Weights start, and
        initial values end, at the version.
        """
        a, b = (self.point.get(rank) for rank in (keyframe.src, keyframe.dst))
        if layout is None:
            return a, b
        if keyframe.kind == "weights":
            return layout.pill, b
        request = keyframe.subject
        if keyframe.kind == "pull":
            return a, self._pull_position(layout, request.node)
        if keyframe.kind == "push":
            x, y = self._slot(layout, request.node, request.nth)
            return a, (x + layout.slot_width / 2, y + 8.5)
        return a, layout.pill

    def _token(self, keyframe: Keyframe, lane: int) -> tuple[Shape, ...]:
        """Return the token of a message: a gradient with its version, weights, a pull or other."""
        version = keyframe.subject.version
        if keyframe.kind == "push":
            label = f"∇v{version}"
            w = 8 * len(label) + 10
            return _box(w, 18, label, lane, x=-w / 2, y=-9)
        if keyframe.kind in ("weights", "init"):
            return _pill(version, "pill", "version")
        if keyframe.kind == "pull":
            return (circle(6, "ring", lane=lane),)
        return (rect(11, 11, "own", x=-5.5, y=-5.5, r=2, lane=lane),)

    def _merge(self, i: int, keyframe: Keyframe, layout: KeyLayout) -> None:
        """Move the gradients of an update from their slots into the value."""
        update, w, (x, y) = keyframe.subject, layout.slot_width, layout.pill
        for n, (worker, stale_by) in enumerate([*update.staleness.items()][: self.quorum]):
            label = f"∇v{update.version - 1 - stale_by}"
            self.scene.add(
                *self._slot(layout, worker, n),
                *_box(w, 17, label, self._lane(worker), style="merging"),
                begin=update.begin,
                end=update.end,
                to=(x - w / 2, y - 8.5),
                layer=TOKEN,
            )
        self.scene.hold_frame(i, x, y, *_pill(update.version, "full", "reversed"), layer=TOKEN)

    # -- bars and side panel ------------------------------------------------------------------

    def _updates(self) -> Iterator[list[object]]:
        """Yield the updates as rows of the list."""
        for i, keyframe in enumerate(self.run.keyframes):
            if keyframe.kind == "update" and keyframe.end is not None:
                update, row = keyframe.subject, self.run.rows[keyframe.subject.server_key]
                shown = list(update.staleness.items())[:MAX_NAMED]
                workers = [[self._lane(w), str(w), f"stale by {n}" if n else ""] for w, n in shown]
                part, others = (
                    f" {row.part}" if row.part else "",
                    len(update.staleness) - len(shown),
                )
                yield [i, row.key, row.key, part, f"v{update.version}", workers, others]

    def _draw_waiting(self) -> None:
        """Draw a bar per worker over the whole run: solid while waiting, faint while computing."""
        run, workers = self.run, self.workers[:MAX_BARS]
        span = max(run.end - run.start, 1e-12)
        for i, w in enumerate(workers):
            bars: dict[str, str] = defaultdict(str)
            waited = 0.0
            for begin, end, status in run.status[w]:
                first, last = max(begin, run.start), min(run.end if end is None else end, run.end)
                x, wide = (t / span * (RIGHT - LEFT) for t in (first - run.start, last - first))
                waited += max(0.0, wide) * (status.kind == "waits")
                if wide >= 0.5:
                    bars[status.kind] += f"M{LEFT + x:.1f} 2h{wide:.1f}v{BAR_HEIGHT}h{-wide:.1f}z"
            self.scene.add(
                0,
                self.bars + BAR_PITCH * i,
                text(run.names[w], "small", x=LEFT - 8, y=11, anchor="end"),
                # the color of the worker's bar
                rect(8, BAR_HEIGHT, "own", x=RIGHT + 8, y=2, lane=self._lane(w)),
                text(f"waits {100 * waited / (RIGHT - LEFT):.0f}%", "small", x=RIGHT + 20, y=11),
                title(f"{run.names[w]}: waits for others (solid), computes (faint)"),
                path(bars["waits"], "own", lane=self._lane(w)),
                path(bars["works"], "works", lane=self._lane(w)),
            )
        if workers:
            cursor = rect(1.4, BAR_PITCH * len(workers) + 1, "full", x=-0.7)
            a, b = (LEFT, self.bars - 2), (RIGHT, self.bars - 2)
            self.scene.add(*a, cursor, begin=run.start, end=run.end, to=b, steady=True, layer=TOKEN)
            self.scene.add(*b, cursor, begin=run.end, layer=TOKEN)

    def _draw_counters(self) -> None:
        """Draw the current numbers of pushes, pulls and updates."""
        requests, updates = self.run.history.requests, self.run.history.updates
        counted = {
            "pushed": [(r.arrived, r.span.nbytes) for r in requests if r.span.op is Op.PUSH],
            "pulled": [(r.reply_received, r.span.nbytes) for r in requests if r.span.op is Op.PULL],
            "updates": [(u.end, 0) for u in updates],
        }
        for i, (noun, items) in enumerate(counted.items()):
            done = sorted((time, nbytes) for time, nbytes in items if time is not None)
            sums = list(accumulate((nbytes for _, nbytes in done), initial=0))
            for begin, end, n in steps(time for time, _ in done):
                size = text(human_bytes(sums[n]) if noun != "updates" else "", "small", y=29)
                self.side.add(70 * i, 18, text(f"{n:,}", "figure"), size, begin=begin, end=end)
            self.side.add(70 * i, 33, text(noun, "small"))

    def _draw_staleness(self) -> None:
        """Draw a histogram of the staleness: pale for the whole run, solid up to each time."""
        applied = sorted(
            (u.begin, n) for u in self.run.history.updates for n in u.staleness.values()
        )
        final, side, floor = histogram(n for _, n in applied), self.side, 84 + HISTOGRAM_HEIGHT
        pitch, most = min(40.0, HISTOGRAM_WIDTH / len(final)), max(1, *final)
        heights = [max(MIN_BAR * bool(n), HISTOGRAM_HEIGHT * n / most) for n in final]
        side.add(0, 66, text("gradients by staleness · pale: later", "small"))
        side.add(0, floor, path(f"M0 0H{pitch * len(final):.1f}", "axis"))
        side.add(0, floor + 30, text("updates between a worker's pull", "small"))
        side.add(0, floor + 43, text("and the use of its gradient", "small"))
        for i, (n, height) in enumerate(zip(final, heights, strict=True)):
            side.add(
                i * pitch,
                floor,
                rect(pitch - 2, height, "odd" if i else "faint", x=1, y=-height, r=1),
                text(f"{n:,}" if n else "", "count", x=pitch / 2, y=-height - 4, anchor="middle"),
                text(
                    f"{i}+" if i == LAST_BIN else str(i), "tick", x=pitch / 2, y=14, anchor="middle"
                ),
            )
        totals = accumulate((Counter({min(n, LAST_BIN): 1}) for _, n in applied), initial=Counter())
        for (begin, end, _), counts in zip(steps(t for t, _ in applied), totals, strict=True):
            for i, n in counts.items():
                height = heights[i] * n / final[i]
                bar = rect(pitch - 2, height, "bad" if i else "gray", x=1, y=-height, r=1)
                side.add(i * pitch, floor, bar, begin=begin, end=end)


def histogram(staleness: Iterable[int]) -> list[int]:
    """Count gradients by staleness, from 0; the last of ten bins includes all larger values.

    >>> histogram([0, 0, 1]), histogram([700])[-1]
    ([2, 1, 0], 1)
    """
    counts = Counter(min(value, LAST_BIN) for value in staleness)
    return [counts[n] for n in range(max([2, *counts]) + 1)]  # the axis has at least three values


def _shortened_name(row: Row, w: float) -> tuple[str, float]:
    """Return the name of a key, shortened to fit, and the x coordinate after it."""
    name = cut(row.key, w - 50, 13)
    return name, 7.9 * len(name) + 8


def _values(row: Row, w: float, version: int, values: str) -> Iterator[Shape]:
    """Yield the values of a key as a tooltip and, if they fit, as text before its version."""
    yield rect(w + 10, 47, "hover", x=-5, y=-2)
    yield title(f"{row.key} v{version} = {values}")
    _, x_size = _shortened_name(row, w)
    if x_size + text_width(row.size, 11.5) + 6.7 * len(values) < w - 54:
        yield text(values, "worth", x=w - 44, y=17, anchor="end")


@cached_drawing
def _box(
    w: float, h: float, label: str, lane: int, *, x: float = 0, y: float = 0, style: str = "own"
) -> tuple[Shape, ...]:
    """Return the box of a gradient, with its label if it fits."""
    box = rect(w, h, style, x=x, y=y, r=min(4, w / 2), lane=lane)
    if w < 5 + 6 * len(label):
        return (box,)
    return box, text(label, "label", x=x + w / 2, y=y + h / 2 + 4, anchor="middle", lane=lane)


@cached_drawing
def _pill(
    version: int, style: str, text_style: str, *, x: float = 0, y: float = 0
) -> tuple[Shape, ...]:
    """Return a pill with a version number, centered at x, y."""
    label = f"v{version}"
    w = max(34, 8 * len(label) + 14)
    return (
        rect(w, 20, style, x=x - w / 2, y=y - 10, r=10),
        text(label, text_style, x=x, y=y + 4.5, anchor="middle"),
    )


@cached_drawing
def _arc(a: float, b: float, y: float, r: float) -> tuple[Shape, ...]:
    """Return a curve from a waiting worker to another worker."""
    side = math.copysign(0.72 * r, b - a)
    x1, x2, low = a + side, b - side, y - 0.82 * r
    high = low - min(max(abs(b - a) * 0.22, 22), 74)
    dx = (x2 - x1) * 0.22
    bend = f"{x1 + dx:.1f} {high:.1f} {x2 - dx:.1f} {high:.1f}"
    _, head = arrow((x2 - dx, high), (x2, low), "arc", "full")
    return path(f"M{x1:.1f} {low:.1f}C{bend} {x2:.1f} {low:.1f}", "arc"), head
