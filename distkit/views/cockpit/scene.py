"""The cockpit: a program, the position of each rank in it, and buttons that step the ranks.

Here a moment is drawn as marks, for the static picture, and as a table. In the browser, program
and cards adapt to the page's width; see js/cockpit.js.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import traitlets

from distkit._format import aligned
from distkit.errors import DistkitError
from distkit.trace.info import RunInfo
from distkit.views.cockpit.projection import project
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import Scene, Shape, circle, rect, text
from distkit.views.scene.painter import body, cut, wrapped
from distkit.views.scene.svg import text_width
from distkit.views.scene.values import bounds, describe, heat
from distkit.views.timeline.static import WIDTH, paint
from distkit.views.timeline.view import Timeline
from distkit.views.widget.assets import css, esm
from distkit.views.widget.live import Live, Notifier, Steppable, Worker
from distkit.views.widget.view import Look

#: Maximum numbers of source lines and of rank cards.
MAX_LINES, MAX_CARDS = 20, 8
LINE, CARD, STRIP, LEFT, SPLIT = 18, 96, 14, 24, 560
COLUMNS = ("rank", "state", "call", "line", "waits for")
#: Minimum time between two updates [s].
PERIOD = 0.016
#: Styles of circle and number of a rank's marker, where they differ from the default.
PINS = {
    "blocked": ("held", "count"),
    "failed": ("wrong", "late"),
    "died": ("wrong", "late"),
    "released": ("ring", "count"),
}


def to_svg(steps: Json, picture: Json) -> str:
    """Return the moment shown as an SVG document.

    Args:
        steps: the result of :func:`~distkit.views.cockpit.projection.project`.
        picture: a snapshot of the timeline's projection.
    """
    return _Moment(steps, picture).document()


def to_table(steps: Json, picture: Json) -> str:
    """Return the moment shown as a table for terminals."""
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}
    rows = [COLUMNS]
    ranks = steps["moment"]["ranks"]
    for r in ranks:
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
    why = [
        f"{row[0]}: {r['reason']}"
        for row, r in zip(rows[1:], ranks, strict=True)
        if r.get("reason") and not r.get("waits")
    ]
    return "\n".join(
        [
            f"{steps['name']}: {step(steps)}",
            *(f"  {line}".rstrip() for line in [*aligned(rows), *why]),
            *(
                f"  ! {remark['message']} {remark['remedy']}".rstrip()
                for remark in steps["remarks"]
            ),
        ]
    )


def step(steps: Json) -> str:
    """Return the moment's position as text."""
    position, last = steps["position"], steps["last"]
    told = f"step {position} of {last}" if last else "before the first step"
    told += " · You stopped it here." * bool(steps["stopped"] and position == last)
    return told + (", looking back" if position < last else "")


class _Moment:
    """Marks of one moment, from the top down."""

    def __init__(self, steps: Json, picture: Json) -> None:
        self.steps, self.picture, self.ranks = steps, picture, steps["moment"]["ranks"]
        self.bars = {bar["id"]: bar for bar in picture["bars"]}
        self.lanes = {lane["rank"]: lane for lane in picture["lanes"]}
        self.order = {rank: i for i, rank in enumerate(self.lanes)}
        self.scene = Scene(WIDTH, 0.0)

    def document(self) -> str:
        steps, scene = self.steps, self.scene
        doing = Counter(r["doing"] for r in self.ranks)
        counts = " · ".join(f"{n} {word}" for word, n in doing.items())
        scene.add(WIDTH - LEFT, 32, text(counts, "words", anchor="end"))
        parts, y = [svg.heading(LEFT, 32, steps["name"], step(steps))], 52.0
        for remark in steps["remarks"]:
            drawn, tall = self._remark(y, remark)
            parts.append(drawn)
            y += tall + 12
        y += max(self._source(y), self._cards(y)) + 8
        until = steps["moment"]["time"] if "looking" in step(steps) else None
        timeline, height = paint({**self.picture, "title": ""}, until)
        below = f'<g transform="translate(0 {y:.0f})">{timeline}</g>'
        parts += [body(scene.plain(), 0.0), below]
        return svg.document(WIDTH, y + height, f"{steps['name']}, {step(steps)}", "".join(parts))

    def _remark(self, y: float, remark: Json) -> tuple[str, float]:
        """Return a remark with the wait-for graph as SVG, and the height."""
        graph = (remark.get("graph") or {}).get("scene")
        left = WIDTH - LEFT - (graph["width"] if graph else 0)
        lines = wrapped(f"{remark['message']} {remark['remedy']}", left - LEFT - 30)
        tall = max(17 * len(lines) + 8, graph["height"] if graph else 0)
        words = [text(line, "said", x=14, y=17 + 17 * i) for i, line in enumerate(lines)]
        self.scene.add(LEFT, y, rect(4, tall, "bad", r=2), *words)
        place = f'transform="translate({left:.1f} {y:.1f})"'
        return (f"<g {place}>{body(graph, 0.0)}</g>" if graph else ""), tall

    def _pin(self, r: Json, x: float, y: float) -> tuple[Shape, Shape]:
        """Return a rank's number: hollow unless it runs or is paused, dashed while blocked."""
        style, ink = PINS.get(r["doing"], ("own", "label"))
        lane = self.order.get(r["rank"], 0)
        number = text(str(r["rank"]), ink, x=x, y=y + 4, anchor="middle", lane=lane, size=11)
        return circle(8, style, x=x, y=y, lane=lane), number

    # -- the source ------------------------------------------------------------------

    def _source(self, y: float) -> float:
        """Return the lines around the markers of the file with most markers, and their height."""
        at: dict[str, dict[int, list[Json]]] = defaultdict(lambda: defaultdict(list))
        for r in self.ranks:
            label, _, line = r.get("where", "").rpartition(":")
            if line.isdigit():
                at[label][int(line)].append(r)
        sources = self.steps["sources"]
        if not sources:
            return 0.0
        label = max(sources, key=lambda file: sum(map(len, at[file].values())))
        window = _window(sources[label], list(at[label]) or self._first_communication(label))
        card = rect(SPLIT - LEFT - 20, LINE * len(window) + 36, "card", r=8)
        self.scene.add(LEFT, y, card, text(label, "strong", x=14, y=19))
        for i, (number, words) in enumerate(window):
            shapes = self._line(number, words, at[label].get(number, []))
            self.scene.add(LEFT + 1, y + 28 + LINE * i, *shapes)
        return LINE * len(window) + 44.0

    def _first_communication(self, label: str) -> list[int]:
        """Return the first communicating line of a file, shown if there are no markers."""
        places = (bar.get("where", "").rpartition(":") for bar in self.picture["bars"])
        return sorted(int(n) for file, _, n in places if file == label and n.isdigit())[:1]

    def _line(self, number: int, words: str, here: list[Json]) -> Iterator[Shape]:
        if here:
            yield rect(SPLIT - LEFT - 22, LINE, "now")
        crowd = len(here) > 3
        first = sorted(here, key=lambda r: r["doing"] == "paused")  # paused ranks on top
        for i, r in enumerate(first[: 2 if crowd else 3]):
            yield from self._pin(r, 14 + 20 * i, 9)
        yield text(f"+{len(here) - 2}" if crowd else "", "small", x=48, y=13)
        yield text(str(number), "small", x=95, y=13, anchor="end")
        yield text(cut(words, 405, 11).replace(" ", "\xa0"), "worth", x=107, y=13)

    # -- the cards -------------------------------------------------------------------

    def _cards(self, y: float) -> float:
        """Draw a card for each of the first ranks; return the total height."""
        columns = 1 if len(self.ranks) <= 4 else 2
        width = (WIDTH - LEFT - SPLIT - 8 * (columns - 1)) / columns
        for i, r in enumerate(self.ranks[:MAX_CARDS]):
            place = SPLIT + i % columns * (width + 8), y + (CARD + 8) * (i // columns)
            self.scene.add(*place, *self._card(r, width))
            self._values(*place, r, width)
        tall = math.ceil(min(len(self.ranks), MAX_CARDS) / columns) * (CARD + 8.0)
        if (more := len(self.ranks) - MAX_CARDS) <= 0:
            return tall
        self.scene.add(SPLIT, y + tall + 12, text(f"… and {more} more ranks", "words"))
        return tall + 24

    def _card(self, r: Json, width: float) -> Iterator[Shape]:
        lane, called = self.lanes.get(r["rank"], {}), r.get("call", "")
        name, host = lane.get("name", f"rank {r['rank']}"), lane.get("host")
        yield rect(width, CARD, "card", r=8)
        yield from self._pin(r, 20, 17)
        yield text(name, "strong", x=38, y=21)
        yield text(f"on {host}" if host else "", "words", x=46 + text_width(name, 13.5), y=21)
        yield text(r["doing"], "words", x=width - 12, y=21, anchor="end")
        yield text(called, "worth", x=12, y=41)
        left = 24 + 7 * len(called) if called else 12
        letters = int((width - 8 - left) / 6.4) or 1
        reason = textwrap.shorten(r.get("reason", ""), letters, placeholder="…")
        yield text(reason, "alert", x=left, y=41)

    def _values(self, x: float, y: float, r: Json, width: float) -> None:
        """Draw the tensors of a card: zero is paper, positive orange, negative blue."""
        before = self.bars.get(r.get("now"), {}).get("values") or [None]
        after = self.bars.get(r.get("last"), {}).get("values") or [None]
        for when, s in ("before", before[0]), ("done", after[-1]):
            if s and s["values"]:
                room = width - (164 if width > 240 else 68)
                most = max((abs(v) for v in s["values"] if not isinstance(v, str)), default=0.0)
                cells = tuple(s["values"]), len(s["values"]), most, room, STRIP
                self.scene.add(x + 56, y + 52, *heat(*cells, frozenset(), describe(s))[0])
                words = bounds(s) if width > 240 else ""
                said = text(words, "small", x=width - 12, y=11, anchor="end")
                self.scene.add(x, y + 52, text(when, "small", x=12, y=11), said)
                y += 20


def _window(source: str, marked: list[int]) -> list[tuple[int, str]]:
    """Return the numbered lines to show around the marked lines, as many as fit."""
    lines = list(enumerate(source.expandtabs(4).splitlines(), 1))
    middle = (min(marked) + max(marked)) // 2 if marked else 0
    if marked and max(marked) - min(marked) >= MAX_LINES:
        middle = marked[0]
    first = max(0, min(middle - MAX_LINES // 2, len(lines) - MAX_LINES))
    return lines[first : first + MAX_LINES]


#: Methods of a run that the browser may call, and their message fields.
BUTTONS = {
    "next": ("rank",),
    "seek": ("position",),
    "play": ("speed",),
    "back": (),
    "pause": (),
    "finish": (),
}


class Cockpit(Timeline):
    """Steps through a distributed program: its source with a marker per rank, and buttons.

    Each rank has a card with the ranks it waits for and the values of its tensors; below is the
    timeline so far. Closing the cockpit does not affect the run.

    Args:
        source: a run that advances step by step, such as ``cluster.step(fn)``.
    """

    _esm = esm("cockpit")
    _css = css("cockpit")
    #: Remarks and commands of the moment shown, and the files of the program.
    steps = traitlets.Any().tag(sync=True)
    sources = traitlets.Any().tag(sync=True)

    def __init__(self, source: Steppable) -> None:
        self._source, self._trouble = source, ""
        self._moves, self._looks = Worker(), Worker()  # navigation works while ranks run
        self._notifier = Notifier(self._refresh, PERIOD)
        steps = project(source)
        self.sources, self.steps = steps.pop("sources"), steps
        super().__init__(source)
        self.on_msg(self._handle_message)
        notify = self._notifier.notify
        ends = [thread.close for thread in (self._moves, self._looks, self._notifier)]
        watched = source.watch(notify), source.subscribe(lambda _: notify())
        self._unsubscribes = (*watched, *ends)

    # -- to the browser -----------------------------------------------------------

    def _follow(self, run: Live, info: RunInfo, look: Look) -> None:
        self._following = 1  # _refresh processes every change

    def _refresh(self) -> None:
        """Send the current trace and state to the browser."""
        before, finished = self.steps, self._source.finished
        with self._lock:
            steps = project(self._source, self._trouble)
            self._look(self._source.trace, not finished)  # has all events that the steps reference
            self._publish()
            self.sources, self.steps = steps.pop("sources"), steps
            self._following = int(not finished)
        if finished and self.steps != before:
            self._still.renew()

    # -- from the browser ---------------------------------------------------------

    def _handle_message(self, _: Any, content: Json, __: Any) -> None:
        """Run a command in a thread: the kernel's main thread must not wait for ranks."""
        self.send({"heard": content.get("id")})
        if content.get("do") == "hello":  # the browser checks the connection
            return
        lane = self._looks if content.get("do") in ("back", "seek", "pause") else self._moves
        lane.do(partial(self._execute, content))

    def _execute(self, command: Json) -> None:
        try:
            self._do(command)
            self._trouble = ""
        except DistkitError as error:
            said = str(error)
            self._trouble = "" if said == self._source.error else said  # the error is shown anyway
        except Exception as error:  # a bug in distkit: report it
            self._trouble = f"{type(error).__name__}: {error}"
        self._notifier.notify()
        self.send({"did": command.get("id")})

    def _do(self, command: Json) -> None:
        button = command.get("do")
        if button not in BUTTONS:
            raise ValueError(f"the cockpit has no button {button!r}")
        getattr(self._source, button)(*map(command.get, BUTTONS[button]))

    # -- output ---------------------------------------------------------------------

    def __repr__(self) -> str:
        return to_table(self.steps, self._drawn())

    def _svg(self) -> str:
        return to_svg({**self.steps, "sources": self.sources}, self._drawn())
