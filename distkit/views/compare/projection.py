"""Compares several traces as plain data: the figures of each, and their ratios.

A :class:`Side` is one trace of a comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from distkit._format import aligned, count, human_bytes, human_seconds, joined
from distkit.trace.info import cross_host_traffic
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, notice_lines
from distkit.views.timeline.columns import Columns

#: Figures that are unknown if all messages of a run are inside its backend.
MESSAGE_FIGURES = ("messages", "message_bytes", "between_bytes", "most_sent", "rounds")

#: Key, name, unit and description of each figure. Units: s, B, n (a number), % (a fraction).
ROWS = [
    ("seconds", "total time", "s", "from the first event to the last"),
    ("messages", "messages", "n", "point-to-point messages and requests that were sent"),
    ("message_bytes", "bytes in messages", "B", "total of all messages"),
    ("between_bytes", "bytes between hosts", "B", "of messages from one host to another"),
    (
        "collectives",
        "collectives",
        "n",
        "the backend's collectives; the messages inside them are not recorded",
    ),
    ("collective_bytes", "bytes in collectives", "B", "the tensor of each collective, once"),
    (
        "most_sent",
        "most bytes sent by a rank",
        "B",
        "in messages, by the rank that sent the most; with servers, by a worker",
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
        "share of the time that ranks spend in sends, receives, collectives and requests, "
        "including waiting for others; mean of the ranks, with servers of the workers",
    ),
    (
        "waiting",
        "waiting",
        "%",
        "share of the time that ranks spend only waiting for others, without the barrier at the "
        "end; mean of the ranks, with servers of the workers",
    ),
]


class Side:
    """One trace of a comparison, with its figures.

    Args:
        name: name of the trace.
        trace: the trace.
    """

    def __init__(self, name: str, trace: EventLog) -> None:
        self.name, self.trace, columns = clean(name), trace, Columns(trace)
        self.start = float(trace.table.time.min()) if len(trace) else 0.0
        self.frame, self.figures = columns.frame, figures(columns)

    @property
    def heading(self) -> str:
        """The name, ranks, backend and duration."""
        facts = [self.name, *self.frame["facts"], *["simulated"] * self.trace.info.simulated]
        if seconds := self.figures["seconds"]:
            facts.append(human_seconds(seconds))
        return " · ".join(dict.fromkeys(facts))

    @property
    def has_hidden_messages(self) -> bool:
        """Whether all messages are inside the backend, thus not recorded."""
        return not self.figures["messages"] and bool(self.figures["collectives"])


def summary(sides: Sequence[Side]) -> Json:
    """Return the comparison of several traces with the first."""
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
            None if key in MESSAGE_FIGURES and side.has_hidden_messages else side.figures[key]
            for side in sides
        ]
        repeated = key == "busy" and len({*values}) == 1  # such as 100 % in simulated runs
        if key in ("seconds", "messages") or (
            sum(v not in (0, None) for v in values) > (key == "collective_bytes") and not repeated
        ):
            yield {"key": key, "label": label, "unit": unit, "hint": hint, "values": values}


def _notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield the notices that are not warnings."""
    hidden = [side.name for side in sides if side.has_hidden_messages]
    if hidden and any(side.figures["messages"] for side in sides):
        yield f"{joined(hidden)}: messages inside the backend's collectives are not recorded."


def _warnings(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        if not len(side.trace):
            yield f"{side.name}: nothing was recorded"
        yield from (f"{side.name}: {notice}" for notice in side.frame["notices"])
    sizes = {side.name: len(side.frame["lanes"]) for side in sides if len(side.trace)}
    if len(set(sizes.values())) > 1:
        parts = (f"{name} {count(n, 'rank')}" for name, n in sizes.items())
        yield f"the world sizes differ: {'; '.join(parts)}"


def to_table(picture: Json) -> str:
    """Return a table for terminals, with a line per figure and a column per trace."""
    base, *others = picture["runs"]
    lines = [["", base, *(cell for name in others for cell in (name, ""))]]
    for row in picture["rows"]:
        first, *rest = row["values"]
        cells = [row["label"], figure(first, row["unit"])]
        for value in rest:
            cells += [figure(value, row["unit"]), ratio(value, first)]
        lines.append(cells)
    return "\n  ".join([f"Compare: {picture['title']}", *aligned(lines), *notice_lines(picture)])


def figures(columns: Columns) -> Json:
    """Return the figures of a run: seconds, bytes, counts, and fractions of time from 0 to 1.

    With a parameter server, ``busy`` and ``waiting`` are means over the workers, because idle
    servers lose no time, and ``rounds`` is None. :mod:`distkit.views.timeline.waits` defines
    waiting; the final barrier does not count.
    """
    frame = columns.frame
    ranks = [{key: lane[key] for key in _RANK_FIELDS} for lane in frame["lanes"]]
    workers = [r for r in ranks if r["role"] == "worker"]
    counted = workers or ranks
    return {
        "seconds": (frame["end"] or 0.0) - (frame["start"] or 0.0),
        **{key: frame[key] for key in _RUN_FIELDS},
        "between_bytes": cross_host_traffic(columns.traffic)[1],
        "most_sent": max((r["bytes"] for r in counted), default=0),
        "rounds": None if workers else rounds(columns),
        "busy": _mean([r["busy"] for r in counted]),
        "waiting": _mean([r["waiting"] for r in counted]),
        "ranks": ranks,
    }


_RANK_FIELDS = ("rank", "name", "role", "busy", "waiting", "messages", "bytes")
_RUN_FIELDS = ("messages", "message_bytes", "collectives", "collective_bytes")


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


def figure(value: float | None, unit: str) -> str:
    """Format a value with its unit.

    >>> figure(0.25, "s"), figure(4096, "B"), figure(0.251, "%"), figure(None, "n")
    ('250 ms', '4 KiB', '25 %', '–')
    """
    if value is None:
        return "–"
    match unit:
        case "s":
            return human_seconds(value)
        case "B":
            return human_bytes(value)
        case "%":
            return f"{100 * value:.0f} %"
        case _:
            return f"{value:,}"


# -- rounds --------------------------------------------------------------------------


def rounds(columns: Columns) -> int:
    """Return the number of consecutive exchanges.

    In a round, a rank sends and receives at most one message, and sends only data from earlier
    rounds. A collective is one round. A ring all-reduce of n ranks has 2(n-1) rounds.
    """
    known: dict[int, int] = defaultdict(int)  # the last round with a result known to each rank
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


def _exchanges(columns: Columns) -> list[tuple[int, int, int]]:
    """Return starts (1) and ends (0) in time order, each with its rank and item.

    Messages have the items 0, 1, …, collectives -1, -2, …
    """
    ops, pairs = columns.ops, columns.pairs
    sent = np.flatnonzero((pairs.send >= 0) & ~np.isnan(pairs.sent))
    received = sent[(pairs.recv[sent] >= 0) & ~np.isnan(pairs.received[sent])]
    entered = np.flatnonzero((pairs.collective >= 0) & ~ops.scheduled)
    left = entered[ops.ended[entered]]
    time = np.concatenate(
        [pairs.sent[sent], ops.start[entered], pairs.received[received], ops.end[left]]
    )
    begins = np.arange(len(time)) < len(sent) + len(entered)
    rank = ops.rank[np.concatenate([pairs.send[sent], entered, pairs.recv[received], left])]
    item = np.concatenate(
        [sent, -1 - pairs.collective[entered], received, -1 - pairs.collective[left]]
    )
    order = np.lexsort((begins, time))
    facts = (begins.astype(np.int64), rank, item)
    return list(zip(*(fact[order].tolist() for fact in facts), strict=True))
