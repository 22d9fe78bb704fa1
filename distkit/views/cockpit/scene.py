"""Defines the cockpit widget, its static picture and its table.

The cockpit shows a program, the position of each rank in it, and buttons that step the ranks.
js/cockpit.js draws it in the browser.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import traitlets

from distkit._format import aligned
from distkit.errors import DistkitError
from distkit.views.cockpit.projection import project
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.renderer import cut, wrapped
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT
from distkit.views.timeline.columns import packed
from distkit.views.timeline.static import WIDTH, render
from distkit.views.timeline.view import Timeline
from distkit.views.widget.assets import css, esm
from distkit.views.widget.live import Live, Notifier, Steppable, Worker

#: Maximum number of ranks in the static picture, and the left edges of its columns [px].
MAX_RANKS, EDGES = 16, (24, 130, 220, 430, 600)
COLUMNS = ("rank", "state", "call", "line", "waits for")
#: Minimum time between two updates [s].
PERIOD = 0.016


def to_svg(steps: Json, picture: Json) -> str:
    """Return the moment shown as an SVG document with remarks, a line per rank, and the timeline.

    Args:
        steps: the result of :func:`~distkit.views.cockpit.projection.project`.
        picture: a snapshot of the timeline's projection.
    """
    parts, y = [svg.heading(24, 32, steps["name"], position_text(steps))], 58.0
    lines = [
        [(line, WARNING_LIGHT)]
        for remark in _remarks(steps)
        for line in wrapped(remark, WIDTH - 48)
    ]
    lines.append([(column, GRAY) for column in COLUMNS])
    for *row, _, reason in _rows(steps, picture)[:MAX_RANKS]:
        reason = cut(reason, WIDTH - EDGES[-1] - 24, 11)
        lines.append([*((words, INK) for words in row), (reason, GRAY)])
    if (hidden := len(steps["moment"]["ranks"]) - MAX_RANKS) > 0:
        lines.append([(f"… and {hidden} more ranks", GRAY)])
    for line in lines:
        parts += [svg.text(x, y, *words) for x, words in zip(EDGES, line, strict=False)]
        y += 20
    timeline, height = render({**picture, "title": ""})
    parts.append(f'<g transform="translate(0 {y:.0f})">{timeline}</g>')
    return svg.document(
        WIDTH, y + height, f"{steps['name']}, {position_text(steps)}", "".join(parts)
    )


def to_table(steps: Json, picture: Json) -> str:
    """Return the moment shown as a table for terminals."""
    rows = _rows(steps, picture)
    lines = [
        *aligned([COLUMNS, *(row[:-1] for row in rows)]),
        *(f"{rank}: {reason}" for rank, *_, awaited, reason in rows if reason and not awaited),
        *_remarks(steps),
    ]
    return "\n".join(
        [f"{steps['name']}: {position_text(steps)}", *(f"  {line}".rstrip() for line in lines)]
    )


def _remarks(steps: Json) -> list[str]:
    return [f"! {remark['message']} {remark['remedy']}".rstrip() for remark in steps["remarks"]]


def _rows(steps: Json, picture: Json) -> list[tuple[str, ...]]:
    """Return the state of each rank by column, and the reason."""
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}

    def named(rank: int) -> str:
        return str(names.get(rank, f"rank {rank}"))

    return [
        (
            named(r["rank"]),
            r["status"],
            r.get("call", ""),
            r.get("where", ""),
            ", ".join(map(named, r.get("waits", ()))),
            r.get("reason", ""),
        )
        for r in steps["moment"]["ranks"]
    ]


def position_text(steps: Json) -> str:
    """Return the moment's position as text."""
    position, last = steps["position"], steps["last"]
    text = f"step {position} of {last}" if last else "before the first step"
    return text + (
        ", looking back" if position < last else " · You stopped it here." * steps["stopped"]
    )


#: Time to wait for the end of a step before its events are shown [s]; most steps are shorter.
GATHER_STEP = 0.15

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

    Each rank has a card with the ranks it waits for and the values of its tensors. Below the cards
    is the timeline up to the moment shown. Closing the cockpit does not affect the run.

    Args:
        source: a run that advances step by step, such as ``cluster.step(fn)``.
    """

    _esm = esm("cockpit")
    _css = css("cockpit")
    #: The moment shown with its remarks, and the source files of the program.
    steps = traitlets.Any().tag(sync=True)
    sources = traitlets.Any().tag(sync=True)

    def __init__(self, source: Steppable) -> None:
        self._source, self._error = source, ""
        # two threads, so that navigation does not wait for running ranks
        self._step_worker, self._seek_worker = Worker(), Worker()
        self._notifier = Notifier(self._refresh, PERIOD, GATHER_STEP)
        steps = project(source)
        self.sources, self.steps = steps.pop("sources"), steps
        super().__init__(source)
        self.on_msg(self._handle_message)
        notify = self._notifier.notify
        stops = [thread.close for thread in (self._step_worker, self._seek_worker, self._notifier)]
        self._unsubscribes = (source.watch(notify), *stops)

    # -- to the browser -----------------------------------------------------------

    def _picture(self) -> Json:
        # from the first call of a worker on: servers register long before
        picture, ops = packed(self._columns), self._columns.ops
        starts = ops.start[ops.rank < self._columns.info.world_size]
        return picture | ({"start": float(starts.min())} if 0 < len(starts) < len(ops) else {})

    def _follow(self, run: Live) -> None:
        self._following = True  # _refresh processes every change

    def _refresh(self) -> None:
        """Send the current trace and state to the browser."""
        previous, finished = self.steps, self._source.finished
        with self._lock:
            steps = project(self._source, self._error)
            # this trace has all events that the steps reference
            self._process(self._source.trace, not finished)
            self._publish()
            self.sources, self.steps = steps.pop("sources"), steps
            self._following = not finished
        if finished and self.steps != previous:
            self._static.refresh()

    # -- from the browser ---------------------------------------------------------

    def _handle_message(self, _: Any, content: Json, __: Any) -> None:
        """Run a command in a thread: the kernel's main thread must not wait for ranks."""
        self.send({"received": content.get("id")})
        if content.get("do") == "hello":  # the browser checks the connection
            return
        worker = (
            self._seek_worker
            if content.get("do") in ("back", "seek", "pause")
            else self._step_worker
        )
        worker.submit(partial(self._execute, content))

    def _execute(self, command: Json) -> None:
        try:
            self._do(command)
            self._error = ""
        except DistkitError as error:
            message = str(error)
            # the run's error is already shown
            self._error = "" if message == self._source.error else message
        except Exception as error:  # a bug in distkit: report it
            self._error = f"{type(error).__name__}: {error}"
        self._notifier.notify(now=True)
        self.send({"done": command.get("id")})

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
