"""The cockpit shows a program, each rank's position in it, and buttons that step the ranks.

:func:`project` returns a stepped run as plain data: the moment shown, the sources, and the run's
state. The browser receives one moment at a time, which refers to tensors by the ids of their
timeline bars. js/cockpit.js draws the widget; this module draws the static picture and the table.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import traitlets

from distkit._format import aligned, count
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.rank_state import RankState, RankStatus
from distkit.diagnosis.rules import PAGES, Finding
from distkit.errors import DistkitError
from distkit.events import COMPUTATION, Event, Op, State
from distkit.trace.calls import wait_of
from distkit.views.scene import svg
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.renderer import cut, wrapped
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT
from distkit.views.scene.waits import wait_for_graph
from distkit.views.timeline.columns import compact, packed
from distkit.views.timeline.static import WIDTH, render
from distkit.views.timeline.view import Timeline
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import Live, Notifier

#: Source files are cut to MAX_SOURCE characters, and at most MAX_REMARKS remarks are shown.
MAX_SOURCE, MAX_REMARKS = 200_000, 3

#: Kinds of findings that repeat the run's error.
FAILURES = ("raised", "died", "unused_parameter")

#: Headings at which the details of an error message start.
_TRACEBACK = re.compile(r"\n+(?=Traceback on rank |Its last output:)")
_MORE = re.compile(r"\n+(?=Other ranks that raised:|The others were stopped:)")


class Moment(Protocol):
    """The state of a stepped run before its first step, or after a step."""

    @property
    def events(self) -> int:
        """Number of the trace's events up to this moment."""

    @property
    def time(self) -> float:
        """Time of the last of these events [s]."""

    @property
    def choice(self) -> Sequence[int]:
        """The ranks that were resumed to reach this moment.

        There may be none, as for the first moment and after ``finish()``.
        """

    @property
    def rank_states(self) -> Sequence[RankState]:
        """The state of each rank."""


class Steppable(Live, Protocol):
    """A run that advances step by step, such as the result of ``cluster.step(fn)``.

    It also has the methods ``next(rank)``, ``back()``, ``seek(position)``, ``play(speed)``,
    ``pause()`` and ``finish()``, which the cockpit calls by name. They may be called from any
    thread and raise :class:`~distkit.errors.DistkitError` if they are not applicable. All except
    ``pause``, ``back`` and ``seek`` may block.
    """

    @property
    def name(self) -> str:
        """The program's name."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part."""

    @property
    def moments(self) -> Sequence[Moment]:
        """The moments so far; the first one is before the first step."""

    @property
    def position(self) -> int:
        """Index of the moment shown; the last moment is the present."""

    @property
    def playing(self) -> bool:
        """True while the run steps automatically."""

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings, most important first."""

    @property
    def error(self) -> str:
        """The run's error message; "" if it did not fail."""

    def watch(self, callback: Callable[[], None], /) -> Callable[[], None]:
        """Call ``callback``, from any thread, whenever one of these properties changes.

        Returns:
            A function that cancels the subscription.
        """


def project(run: Steppable, command_error: str = "") -> Json:
    """Return the moment shown, the state of the run, and its sources.

    Args:
        run: the run.
        command_error: why the last command failed, if it did.
    """
    moments = list(run.moments)
    trace = run.trace  # read last, so that it contains the events of all moments
    last = len(moments) - 1
    position = min(run.position, last)
    moment = moments[position]
    events = trace.events[: moment.events]
    ends = {rank: end.where for rank, end in trace.info.ends.items() if end.where}
    completed = dict[int, str]()
    for begin, end in pairwise([0, *(m.events for m in moments[: position + 1])]):
        completed |= _completed(events[begin:end])
    callers = {(e.rank, e.seq): e.attributes["caller"] for e in events if "caller" in e.attributes}
    # without a hang, the error would only report the stop
    stopped = trace.info.interrupted and not any(f.hang for f in run.findings)
    at_end, error = position == last, "" if stopped else run.error
    return {
        "name": clean(run.name),
        "ranks": list(run.ranks),
        "position": position,
        "last": last,
        "moment": {
            "time": round(moment.time, 7),
            "choice": list(moment.choice),
            "ranks": [_rank(s, completed, callers, events, ends) for s in moment.rank_states],
        },
        "rank_states": [
            {"rank": s.rank, "status": str(s.status), "words": clean(str(s))}
            for s in moments[last].rank_states
        ],
        "playing": run.playing,
        "finished": run.finished,
        "stopped": stopped,
        "remarks": _current_remarks(run, error) if at_end else [],
        "pages": PAGES,
        "error": command_error,
        "sources": {clean(k): clean(text[:MAX_SOURCE]) for k, text in trace.info.sources.items()},
    }


def _rank(
    s: RankState,
    completed: Mapping[int, str],
    callers: Mapping[tuple[int, int], str],
    events: Sequence[Event],
    ends: Mapping[int, str],
) -> Json:
    """Return a rank's state; inside one of distkit's algorithms, its line is the caller's."""
    where, e = _line(s, events, ends), s.event
    caller = "" if e is None else callers.get((e.rank, e.seq), "")
    return compact(
        rank=s.rank,
        status=str(s.status),
        words=clean(str(s)),
        call=clean("" if e is None else wait_of(e) or s.call()),
        scheduled=(e is not None and e.state is State.SCHEDULED) or None,  # paused before the call
        where=clean(caller or where),
        inner=clean(where) if caller else None,
        reason=clean(s.reason),
        waits=list(s.waits_for),
        now=None if e is None else f"{e.rank}.{e.seq}",
        last=completed.get(s.rank),
    )


def _current_remarks(run: Steppable, error: str) -> list[Json]:
    """Return the remarks for the latest moment."""
    result = remarks(error, run.findings)
    if any(r["hang"] for r in result):
        result[0]["graph"] = wait_for_graph(Evidence(run.trace).graph.rank_states)
    return result


def remarks(error: str, findings: Sequence[Finding]) -> list[Json]:
    """Return the run's error and the findings of the diagnosis, without repetitions.

    If a rank failed, the findings that repeat its error add their lines, and the first of them adds
    its remedy unless the error already has one. Any other error that a finding repeats is omitted.
    """
    failures = [f for f in findings if f.kind in FAILURES]
    repeated = [f for f in findings if f.kind in FAILURES or f.message in error]
    if not error or (repeated and not failures):
        return [_finding(f) for f in findings[:MAX_REMARKS]]
    others = [f for f in findings if f not in repeated]
    return [_failure(error, repeated), *map(_finding, others[: MAX_REMARKS - 1])]


def _failure(error: str, findings: Sequence[Finding]) -> Json:
    """Return a run's error as a remark, with the traceback in a separate field."""
    text, *traceback = _TRACEBACK.split(error, maxsplit=1)
    message, *more = _MORE.split(text.strip(), maxsplit=1)
    # the error of a dead rank already has a remedy
    remedy = findings[0].remedy if findings and findings[0].kind != "died" else ""
    return {
        "message": clean(message),
        "more": clean("".join(more)),
        "traceback": clean("".join(traceback).strip("\n")),
        "hang": True,
        "remedy": "" if remedy.lower() in error.lower() else clean(remedy),
        "lines": {str(rank): clean(where) for f in findings for rank, where in f.lines.items()},
    }


def _finding(f: Finding) -> Json:
    return {
        "message": clean(f.message),
        "remedy": clean(f"{f.remedy} [{f.code}]"),
        "hang": f.hang,
        "lines": {str(rank): clean(where) for rank, where in f.lines.items()},
    }


def _completed(events: Iterable[Event]) -> Iterable[tuple[int, str]]:
    """Return the rank and id of each completed operation with a tensor, sends first.

    The last operation of each rank is shown, so received tensors take precedence over sent ones.
    """
    completed = sorted(
        (e for e in events if e.state is State.COMPLETED and e.op not in COMPUTATION and e.dtype),
        key=lambda e: e.op is not Op.SEND,
    )
    return ((e.rank, f"{e.rank}.{e.seq}") for e in completed)


def _line(s: RankState, events: Sequence[Event], ends: Mapping[int, str]) -> str:
    """Return a rank's line; after it failed, died or was stopped, this is its last known line."""
    if s.status is RankStatus.FAILED and s.rank in ends:
        return ends[s.rank]
    if s.event is not None and wait_of(s.event):
        return str(s.event.attributes["waits_at"])
    if s.where or s.status not in (RankStatus.FAILED, RankStatus.STOPPED, RankStatus.DIED):
        return s.where
    return next((e.where for e in reversed(events) if e.rank == s.rank and e.where), "")


# -- the picture and the widget --------------------------------------------------------------------

#: The static picture shows at most MAX_RANKS ranks. EDGES are the left edges of its columns [px].
MAX_RANKS, EDGES = 16, (24, 130, 220, 430, 600)
COLUMNS = ("rank", "state", "call", "line", "waits for")
#: Minimum time between two updates [s].
PERIOD = 0.016


def to_svg(steps: Json, picture: Json) -> str:
    """Return the moment shown as an SVG document with remarks, a line per rank, and the timeline.

    Args:
        steps: the result of :func:`project`.
        picture: the timeline's picture.
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
        lines.append([(f"… and {count(hidden, 'more rank')}", GRAY)])
    for line in lines:
        parts += [svg.text(x, y, *words) for x, words in zip(EDGES, line, strict=False)]
        y += 20
    timeline, height = render({**picture, "title": ""})
    parts.append(svg.translated(0, y, timeline))
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
    """Return a row per rank, with a cell for each of ``COLUMNS`` and the reason for the state."""
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

#: Methods of a run that the browser may call, and the message fields with their arguments.
BUTTONS = {
    "next": ("rank",),
    "seek": ("position",),
    "play": ("speed",),
    "back": (),
    "pause": (),
    "finish": (),
}


class CommandThread:
    """A thread that calls queued functions in order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue ``call``."""
        self._calls.put(call)

    def close(self) -> None:
        """Stop the thread after all queued calls."""
        self._calls.put(None)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            call()


class Cockpit(Timeline):
    """Shows the source of a distributed program with a marker per rank, and steps through it.

    Each rank has a card with the ranks it waits for and the values of its tensors. The timeline
    below the cards is dimmed after the moment shown. Closing the cockpit does not affect the run.

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
        self._step_thread, self._seek_thread = CommandThread(), CommandThread()
        self._notifier = Notifier(self._refresh, PERIOD, GATHER_STEP)
        steps = project(source)
        self.sources, self.steps = steps.pop("sources"), steps
        super().__init__(source)
        self.on_msg(self._handle_message)
        self._unsubscribes = (
            source.watch(self._notifier.notify),
            self._step_thread.close,
            self._seek_thread.close,
            self._notifier.close,
        )

    # -- to the browser -----------------------------------------------------------

    def _picture(self) -> Json:
        # start at the workers' first call, because servers register long before it
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
            # this trace contains all events that the steps refer to
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
        thread = (
            self._seek_thread
            if content.get("do") in ("back", "seek", "pause")
            else self._step_thread
        )
        thread.submit(partial(self._execute, content))

    def _execute(self, command: Json) -> None:
        try:
            arguments = map(command.get, BUTTONS[command["do"]])
            getattr(self._source, command["do"])(*arguments)
            self._error = ""
        except DistkitError as error:
            # the run's error is already shown
            self._error = "" if str(error) == self._source.error else str(error)
        except Exception as error:  # a bug in distkit: report it
            self._error = f"{type(error).__name__}: {error}"
        self._notifier.notify(now=True)
        self.send({"done": command.get("id")})

    # -- output ---------------------------------------------------------------------

    def __repr__(self) -> str:
        return to_table(self.steps, self._drawn())

    def _svg(self) -> str:
        return to_svg(self.steps, self._drawn())
