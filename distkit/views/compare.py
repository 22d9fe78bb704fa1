"""Compares several traces on one time axis, with the metrics of each trace and their ratios.

A :class:`Side` is one trace of a comparison. The metrics are drawn next to or below the timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any

import numpy as np

from distkit._format import aligned, count, human_bytes, human_seconds, joined
from distkit.events import WORLD, Event
from distkit.trace.info import RunInfo, cross_host_traffic
from distkit.trace.log import EventLog
from distkit.views.scene import svg
from distkit.views.scene.frame import MAX_LANES as MAX_PAGE_LANES
from distkit.views.scene.frame import Json, clean, dotted, notice_lines
from distkit.views.scene.marks import Scene, rect, text, title
from distkit.views.scene.renderer import body, cut
from distkit.views.scene.svg import text_width
from distkit.views.scene.theme import MARKS
from distkit.views.timeline.columns import Columns, packed
from distkit.views.timeline.static import MAX_BARS, MAX_LANES, WIDTH, render
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import Live, View, trace_of

#: Metrics that are unknown if all messages of a run are inside its backend.
MESSAGE_METRICS = ("messages", "message_bytes", "between_bytes", "most_sent", "rounds")

#: Key, name, unit and description of each metric. Units: s, B, n (a count), % (a fraction).
ROWS = [
    ("seconds", "total time", "s", "from the first event to the last"),
    ("messages", "messages", "n", "point-to-point messages, requests and replies that were sent"),
    ("message_bytes", "bytes in messages", "B", "total of all messages"),
    ("between_bytes", "bytes between hosts", "B", "total of all messages from one host to another"),
    (
        "collectives",
        "collectives",
        "n",
        "the backend's collectives; the messages inside them are not recorded",
    ),
    (
        "collective_bytes",
        "bytes in collectives",
        "B",
        "total of all collectives, each with the bytes of its largest call",
    ),
    (
        "most_sent",
        "most bytes sent by a rank",
        "B",
        "in messages, by the rank that sent the most "
        "(with parameter servers, by the worker that did)",
    ),
    (
        "rounds",
        "rounds",
        "n",
        "consecutive exchanges, if each rank sends and receives "
        "one message at a time; a collective counts as one",
    ),
    (
        "busy",
        "in communication",
        "%",
        "share of the time that ranks spend in communication, including waiting for others, but "
        "excluding the wait in the barrier at the end; "
        "mean over the ranks or, with parameter servers, over the workers",
    ),
    (
        "waiting",
        "waiting",
        "%",
        "share of the time that ranks spend only waiting for others, excluding the barrier at the "
        "end; mean over the ranks or, with parameter servers, over the workers",
    ),
]


class Side:
    """One trace of a comparison, with its metrics.

    Args:
        name: name of the trace.
        trace: the trace.
    """

    def __init__(self, name: str, trace: EventLog) -> None:
        self.name, self.trace, columns = clean(name), trace, Columns(trace)
        self.frame, self.metrics = columns.frame, compute_metrics(columns)

    @property
    def heading(self) -> str:
        """The name, ranks, backend and duration."""
        seconds = self.metrics["seconds"]
        parts = [
            self.name,
            *self.frame["facts"],
            "simulated" * self.trace.info.simulated,
            human_seconds(seconds) if seconds else "",
        ]
        return dotted(dict.fromkeys(parts))

    @property
    def has_hidden_messages(self) -> bool:
        """Whether all messages are inside the backend and therefore not recorded."""
        return not self.metrics["messages"] and bool(self.metrics["collectives"])


def summary(sides: Sequence[Side]) -> Json:
    """Compare several traces with the first one."""
    return {
        "title": joined([side.name for side in sides]),
        "runs": [side.name for side in sides],
        "rows": [*_rows(sides)],
        "notices": [*_warnings(sides)],
        "notes": [*_notes(sides)],
    }


def _rows(sides: Sequence[Side]) -> Iterator[Json]:
    for key, label, unit, hint in ROWS:
        values = [
            None if key in MESSAGE_METRICS and side.has_hidden_messages else side.metrics[key]
            for side in sides
        ]
        repeated = key == "busy" and len({*values}) == 1  # such as 100% in simulated runs
        if key in ("seconds", "messages") or (
            sum(v not in (0, None) for v in values) > (key == "collective_bytes") and not repeated
        ):
            yield {"key": key, "label": label, "unit": unit, "hint": hint, "values": values}


def _notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield the notices that are not warnings."""
    hidden = [side.name for side in sides if side.has_hidden_messages]
    if hidden and any(side.metrics["messages"] for side in sides):
        yield f"{joined(hidden)}: messages inside the backend's collectives are not recorded."


def _warnings(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        if not len(side.trace):
            yield f"{side.name}: nothing was recorded"
        yield from (f"{side.name}: {notice}" for notice in side.frame["notices"])
    sizes = {side.name: len(side.frame["lanes"]) for side in sides if len(side.trace)}
    if len(set(sizes.values())) > 1:
        parts = (f"{name} has {count(n, 'rank')}" for name, n in sizes.items())
        yield f"the numbers of ranks differ: {'; '.join(parts)}"


def to_table(picture: Json) -> str:
    """Return a table for terminals, with a line per metric and a column per trace."""
    base, *others = picture["runs"]
    lines = [["", base, *(cell for name in others for cell in (name, ""))]]
    for row in picture["rows"]:
        first, *rest = row["values"]
        cells = [row["label"], format_metric(first, row["unit"])]
        for value in rest:
            cells += [format_metric(value, row["unit"]), ratio(value, first)]
        lines.append(cells)
    return "\n  ".join([f"Compare: {picture['title']}", *aligned(lines), *notice_lines(picture)])


def compute_metrics(columns: Columns) -> Json:
    """Return the metrics of a run: seconds, bytes, counts, and fractions of time from 0 to 1.

    With a parameter server, ``rounds`` is None. ``busy``, ``waiting`` and ``most_sent`` then cover
    only the workers, because a server that is waiting does not slow down the run.
    :mod:`distkit.views.timeline.columns` defines waiting; the final barrier does not count.
    """
    frame = columns.frame
    workers = [lane for lane in frame["lanes"] if lane["role"] == "worker"]
    counted = workers or frame["lanes"]
    return {
        "seconds": (frame["end"] or 0.0) - (frame["start"] or 0.0),
        "messages": frame["messages"],
        "message_bytes": frame["message_bytes"],
        "collectives": frame["collectives"],
        "collective_bytes": frame["collective_bytes"],
        "between_bytes": cross_host_traffic(columns.traffic)[1],
        "most_sent": max((r["bytes"] for r in counted), default=0),
        "rounds": None if workers else rounds(columns),
        "busy": _mean([r["busy"] for r in counted]),
        "waiting": _mean([r["waiting"] for r in counted]),
    }


def _mean(parts: list[float]) -> float:
    return round(sum(parts) / len(parts), 4) if parts else 0.0


def ratio(value: float | None, base: float | None) -> str:
    """Return a value as a multiple of the baseline.

    >>> ratio(3, 2), ratio(2, 2), ratio(0, 2), ratio(2, 0), ratio(2, 2**20), ratio(2048, 1)
    ('1.5×', '=', '0×', '', '<0.001×', '2,048×')
    """
    if value is None or not base:
        return ""
    if value == base:
        return "="
    times = value / base
    if 0 < abs(times) < 0.001:
        return "<0.001×"
    return f"{times:,.0f}×" if abs(times) >= 100 else f"{times:.2g}×"


def format_metric(value: float | None, unit: str) -> str:
    """Format a value with its unit.

    >>> format_metric(0.25, "s"), format_metric(4096, "B"), format_metric(0.251, "%")
    ('250 ms', '4 KiB', '25%')
    """
    return "–" if value is None else _UNITS[unit](value)


_UNITS: dict[str, Callable[[float], str]] = {
    "s": human_seconds,
    "B": human_bytes,
    "%": lambda part: f"{100 * part:.0f}%",
    "n": "{:,}".format,
}


# -- rounds --------------------------------------------------------------------------


def rounds(columns: Columns) -> int:
    """Return the number of consecutive exchanges.

    In a round, a rank sends at most one message, which contains only data from earlier rounds, and
    receives at most one message. A collective is one round. A ring all-reduce of n ranks has 2(n-1)
    rounds.
    """
    known: dict[int, int] = defaultdict(int)  # the latest round of which each rank has the result
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    depth: dict[int, int] = defaultdict(int)
    for begins, rank, item in _exchanges(columns):
        if begins:
            depth[item] = sent[rank] = max(depth[item], 1 + max(known[rank], sent[rank]))
            continue
        if item >= 0:  # messages are received one at a time
            depth[item] = received[rank] = max(depth[item], 1 + received[rank])
        known[rank] = max(known[rank], depth[item])
    return max(depth.values(), default=0)


def _exchanges(columns: Columns) -> list[tuple[bool, int, int]]:
    """Return the starts and ends of operations in time order: whether it starts, rank, and item.

    Messages are the items 0, 1, …, and collectives are the items -1, -2, …
    """
    ops, pairs = columns.ops, columns.pairs
    sent = np.flatnonzero((pairs.send >= 0) & ~np.isnan(pairs.sent))
    received = sent[(pairs.recv[sent] >= 0) & ~np.isnan(pairs.received[sent])]
    entries = np.flatnonzero((pairs.collective >= 0) & ~ops.scheduled)
    exits = entries[ops.ended[entries]]
    time = np.concatenate(
        [pairs.sent[sent], ops.start[entries], pairs.received[received], ops.end[exits]]
    )
    begins = np.arange(len(time)) < len(sent) + len(entries)
    rank = ops.rank[np.concatenate([pairs.send[sent], entries, pairs.recv[received], exits])]
    item = np.concatenate(
        [sent, -1 - pairs.collective[entries], received, -1 - pairs.collective[exits]]
    )
    order = np.lexsort((begins, time))
    return list(zip(*(field[order].tolist() for field in (begins, rank, item)), strict=True))


# -- the picture and the widget --------------------------------------------------------------------

#: Maximum number of traces; the lanes of more traces would be indistinguishable.
MAX_TRACES = 8
#: Limits on the operations and lanes in the static picture. If a picture is too large, the next
#: limits are tried.
SIZES = ((MAX_BARS, MAX_LANES), (MAX_BARS // 2, MAX_LANES), (MAX_BARS // 4, MAX_LANES // 3))


class Compare(View):
    """Shows two or more traces on one time axis, and their differences.

    A table compares the total time, messages, bytes, rounds, communication and waiting of each
    trace with those of the first. A rank is *waiting* while it does nothing but wait for others.
    The barrier at the end of a run, in which finished ranks wait, does not count.

    Hover over an operation to see the matching operation in the other traces and the difference in
    time. The n-th operation of a rank with a given name matches the n-th such operation of the same
    rank in another trace; marked computation must also have the same label.

    Args:
        traces: a mapping from names to traces or runs, or several traces or runs, which are
            named after their programs.

    Raises:
        TypeError: An argument has no trace, or is a list.
        ValueError: There are fewer than two or more than eight traces, or a run has not ended.

    >>> from distkit.events import Event, Op, State
    >>> def run(seconds):
    ...     return EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...                   Event(1, 0, Op.RECV, State.STARTED, 0.0, peer=0, nbytes=4),
    ...                   Event(1, 0, Op.RECV, State.COMPLETED, seconds, peer=0, nbytes=4),
    ...                   Event(0, 0, Op.SEND, State.COMPLETED, seconds, peer=1, nbytes=4)])
    >>> Compare({"near": run(0.1), "far": run(0.2)})
    Compare: near and far
                                 near     far
      total time                 100 ms   200 ms  2×
      messages                   1        1       =
      bytes in messages          4 B      4 B     =
      most bytes sent by a rank  4 B      4 B     =
      rounds                     1        1       =
    """

    _esm = esm("compare")
    _css = css("compare")

    def __init__(self, *traces: EventLog | Live | Mapping[str, EventLog | Live]) -> None:
        self._sides = [
            Side(name, _finished_trace(source)) for name, source in _named_traces(traces).items()
        ]
        self._columns, self._lanes = merged(self._sides), lanes(self._sides)
        self._summary = summary(self._sides)
        self._open()

    def _frame(self, max_lanes: int) -> Json:
        """Return all fields of the picture except bars and arrows, for at most ``max_lanes``."""
        data, runs = self._summary, len(self._sides)
        run_lanes = max_lanes // runs
        drawn = [lane for lane in self._lanes if lane["color"] < run_lanes]
        notes = [f"only the first {run_lanes} ranks of each run are shown"]
        return {
            **{key: data[key] for key in ("title", "notices", "runs")},
            "notes": [*data["notes"], *notes * (len(drawn) < len(self._lanes))],
            "facts": [],  # shown in each run's heading
            "lanes": drawn,
            "end": max(side.metrics["seconds"] for side in self._sides),
            "figures": table(
                data, TABLE_WIDTH if runs > MAX_SIDE_RUNS else NAME_WIDTH + COLUMN_WIDTH * runs
            ).plain(),
            "styles": MARKS,
            "table": to_table(data),
        }

    def _picture(self) -> Json:
        return packed(self._columns) | self._frame(MAX_PAGE_LANES)

    def _svg(self) -> str:
        picture = self._columns.picture(3 * MAX_BARS)
        return svg.fitting(self._document(picture, *size) for size in SIZES)

    def _document(self, picture: Json, limit: int, max_lanes: int) -> str:
        """Return an SVG document with the timeline of all runs and the metrics below it.

        Args:
            picture: the timeline's picture.
            limit: maximum number of operations drawn individually.
            max_lanes: maximum number of lanes.
        """
        name = self._summary["title"]
        frame = {**self._frame(max_lanes), "title": cut(name, 600, 16), "bare": True}
        timeline, y = render(picture | frame, limit)
        scene = table(self._summary, TABLE_WIDTH).plain()
        table_svg = svg.translated(24, y + 10, body(scene, 0.0, tooltips=False))
        return svg.document(WIDTH, y + scene["height"] + 20, name, timeline + table_svg)

    def __repr__(self) -> str:
        return to_table(self._summary)


def _named_traces(
    traces: tuple[EventLog | Live | Mapping[str, EventLog | Live], ...],
) -> dict[str, EventLog | Live]:
    """Return the traces by name; generate missing names."""
    if len(traces) == 1 and isinstance(traces[0], (list, tuple)):
        raise TypeError(
            f"Compare got a {type(traces[0]).__name__}. Use Compare(run_a, run_b) or "
            'Compare({"ring": run_a, "tree": run_b}).'
        )
    if len(traces) == 1 and isinstance(traces[0], Mapping):
        named = {str(name): source for name, source in traces[0].items()}
    else:
        named = _name_by_program(traces)
    if not 2 <= len(named) <= MAX_TRACES:
        raise ValueError(
            f"Compare needs 2 to {MAX_TRACES} traces, not {len(named)}. "
            'Use Compare({"ring": run, "tree": other}), or Timeline(run) for a single trace.'
        )
    return named


def _name_by_program(traces: tuple[Any, ...]) -> dict[str, EventLog | Live]:
    """Return traces named after their programs; duplicate names are numbered."""
    names = [trace_of(source, "Compare")[0].info.name or "trace" for source in traces]
    return {
        f"{name} {names[:n].count(name)}" if names.count(name) > 1 else name: source
        for n, (name, source) in enumerate(zip(names, traces, strict=True), 1)
    }


def _finished_trace(source: EventLog | Live) -> EventLog:
    """Return the trace of a run that has ended."""
    trace, running = trace_of(source, "Compare")
    if running is not None:
        raise ValueError(
            f"Compare needs runs that have ended, but {trace.info.name or 'one'} is still running. "
            "Wait for it with run.wait()."
        )
    return trace


def merged(sides: Sequence[Side]) -> Columns:
    """Return all runs as one timeline, in which rank r of run n of N has the number N * r + n."""
    events = [
        _relabeled(e, side, n, len(sides)) for n, side in enumerate(sides) for e in side.trace
    ]
    info = RunInfo(
        interrupted=any(side.trace.info.interrupted for side in sides),
        until=max(side.metrics["seconds"] for side in sides),
    )
    return Columns(EventLog(events, info))


def _relabeled(e: Event, side: Side, n: int, sides: int) -> Event:
    """Return an event of run n with its ranks, group and time in the merged timeline."""
    return replace(
        e,
        rank=e.rank * sides + n,
        time=e.time - side.trace.start,
        peer=None if e.peer is None else e.peer * sides + n,
        group=side.name if e.group == WORLD else f"{side.name} {e.group}",
        match=None if e.match is None else f"{n}/{e.match}",
    )


def lanes(sides: Sequence[Side]) -> list[Json]:
    """Return the lanes of all runs, run by run, with each run's heading as its lanes' host."""
    result = []
    for n, side in enumerate(sides):
        for lane in side.frame["lanes"]:
            details = (lane["detail"], lane.get("host", ""))
            fields = {
                "rank": lane["rank"] * len(sides) + n,
                "run": n,
                "color": lane["rank"],
                "host": side.heading,
                "detail": " · ".join(detail for detail in details if detail not in side.heading),
                "end": side.metrics["seconds"],
            }
            died = {"died": lane["died"] - side.trace.start} if "died" in lane else {}
            result.append(lane | fields | died)
    return result


#: If there are more runs, their metrics are drawn below the lanes instead of next to them.
MAX_SIDE_RUNS = 3
#: Sizes of the columns and the table [px].
COLUMN_WIDTH, TABLE_WIDTH, NAME_WIDTH, ROW_HEIGHT, HEADING_HEIGHT = 112, 912, 156, 29, 26


def table(data: Json, width: float) -> Scene:
    """Return a scene with a row per metric and a column per run, compared with the first run.

    Args:
        data: the result of :func:`summary`.
        width: total width [px].
    """
    runs, rows = data["runs"], data["rows"]
    pitch = (width - NAME_WIDTH) / len(runs)
    bar_width = pitch - 12
    scene = Scene(width, HEADING_HEIGHT + ROW_HEIGHT * len(rows))
    for n, run in enumerate(runs):
        fits = text_width(run, 13.5) < pitch - 22
        lines = [run] if fits else wrap(run.replace("_", " "), 14)[:2]
        names = [
            text(cut(line, pitch - 22, 10.5), "strong", x=16, y=y, size=0 if fits else 10.5)
            for line, y in zip(lines, (12,) if fits else (7, 19), strict=False)
        ]
        scene.add(NAME_WIDTH + n * pitch, 0, rect(10, 10, "trace", y=3, lane=n), *names, title(run))
    for i, row in enumerate(rows):
        y, values, unit = HEADING_HEIGHT + ROW_HEIGHT * i, row["values"], row["unit"]
        sizes = [v or 0.0 for v in values]
        maximum = 1.0 if unit == "%" else max(sizes) or 1.0
        scene.add(0, y, text(row["label"], "tick", y=14), title(row["hint"]))
        for n, size in enumerate(sizes):
            label = text(
                format_metric(values[n], unit), "strong", y=14, size=0 if bar_width > 90 else 11
            )
            scene.add(
                NAME_WIDTH + n * pitch,
                y,
                label,
                rect(bar_width, 4, "now", y=19),
                rect(size / maximum * bar_width, 4, "trace", y=19, lane=n),
            )
        for n, value in enumerate(values[1:], 1):
            scene.add(
                NAME_WIDTH + n * pitch,
                y,
                text(ratio(value, values[0]), "tick", x=bar_width, y=14, anchor="end"),
            )
    return scene
