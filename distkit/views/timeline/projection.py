"""The space-time diagram as plain data: lanes, bars and arrows, and no pixel yet.

:class:`Projection` is fed events as they arrive; each feeding returns what changed, so that a
live view sends that and nothing else. A whole trace becomes the same picture at once, by
columns.py. Both painters, the browser's and the static one, draw this data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    REQUESTS,
    STORES,
    WORLD,
    Event,
    Op,
    Span,
    State,
    Summary,
)
from distkit.trace.calls import call, op_name
from distkit.trace.columns import Look, look_at
from distkit.trace.log import EventLog
from distkit.trace.operations import span_of
from distkit.views.gradients.steps import is_note
from distkit.views.scene.frame import MAX_LANES, Json, Lane, Sums, clean, frame
from distkit.views.timeline.lanes import Busy, Rows
from distkit.views.timeline.matching import Key, Matching

__all__ = ["Json", "Projection", "clean", "compact", "project"]

#: At most so many operations are drawn while a run goes on; a whole trace has no such limit.
MAX_BARS = 20_000
#: Only the first so many operations carry their values along.
MAX_VALUES = 2_000

TOUCHED = "buffer used before wait()"


def project(trace: EventLog) -> Json:
    """The picture of a whole trace."""
    from distkit.views.timeline.columns import Columns

    return Columns(trace).picture()


class Projection:
    """Builds the picture of a run from its events, in as many pieces as they come.

    Args:
        meta: the trace's ``meta``; may be replaced while the run goes on.
        live: whether the run goes on, so that an open operation is no news yet.

    >>> p = Projection()
    >>> changed = p.feed([Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1, nbytes=8)])
    >>> [bar["op"] for bar in changed["bars"]]
    ['send']
    """

    def __init__(self, meta: dict[str, Any] | None = None, *, live: bool = False) -> None:
        self.meta, self.live = dict(meta or {}), live
        self._parts: dict[Key, dict[State, Event]] = defaultdict(dict)
        self._matching = Matching()
        self._rows: dict[tuple[int, bool], Rows] = defaultdict(Rows)
        self._row: dict[Key, int] = {}
        self._bars: dict[Key, Json] = {}
        self._drawn: dict[str, Key] = {}
        self._arrows: dict[str, Json] = {}
        self._sent: dict[int, Tally] = defaultdict(Tally)  # messages, by who sent them
        self._tensors = Tally()
        self._busy: dict[int, Busy] = defaultdict(Busy)
        self._open: dict[Key, Span] = {}
        self._start, self._end = math.inf, -math.inf

    # -- feeding ----------------------------------------------------------------

    def feed(self, events: Iterable[Event]) -> Json:
        """Take in events, each rank's in time order; return what changed in the picture."""
        touched = {key: None for e in events if (key := self._admit(e)) is not None}
        matches: dict[str, None] = {}
        for key in touched:
            span = span_of(sorted(self._parts[key].values(), key=_time))
            self._account(key, span)
            self._bars[key] = self._bar(key, span)
            matches.update(dict.fromkeys(self._matching.place(span)))
        arrows: dict[str, Json] = {}
        for match in matches:
            members = self._matching.members(match)
            if self._bars[members[0]]["kind"] == "collective":
                touched.update(dict.fromkeys(self._tie(match, members)))
            else:
                arrows.update(self._join(match, members))
        self._arrows.update(arrows)
        for name, arrow in arrows.items():
            if arrow["sent"] is not None:
                self._sent[arrow["src"]].put(name, arrow.get("nbytes", 0))
        return self._picture(touched, arrows)

    def snapshot(self) -> Json:
        """The whole picture."""
        return self._picture(self._bars, self._arrows)

    @property
    def whole(self) -> bool:
        """True if all that was fed is drawn."""
        return len(self._drawn) == len(self._bars)

    def _picture(self, bars: Iterable[Key], arrows: dict[str, Json]) -> Json:
        return {
            "bars": [self._bars[key] for key in bars if _name(key) in self._drawn],
            "arrows": [
                a
                for a in arrows.values()
                if a.get("send") in self._drawn or a.get("recv") in self._drawn
            ],
            **self.frame(),
        }

    def _admit(self, event: Event) -> Key | None:
        """Keep an event; its operation's key, or None if it is not drawn or was known already."""
        if is_note(event):
            return None
        key = event.rank, event.seq
        parts = self._parts[key]
        if event.state in parts:
            return None
        rows = self._rows[event.rank, event.op in COMPUTATION]
        if not parts:
            self._row[key] = rows.take()
            if len(self._drawn) < MAX_BARS and event.rank < MAX_LANES:
                self._drawn[_name(key)] = key
        parts[event.state] = event
        if event.state in (State.COMPLETED, State.FAILED):
            rows.free(self._row[key])
        self._start, self._end = min(self._start, event.time), max(self._end, event.time)
        return key

    def _trace(self, keys: Iterable[Key]) -> EventLog:
        return EventLog(e for key in keys for e in self._parts[key].values())

    def _account(self, key: Key, span: Span) -> None:
        """Keep the books of open operations and of time spent in communication."""
        if span.end is None:
            self._open[key] = span
            return
        self._open.pop(key, None)
        if span.op not in COMPUTATION:
            self._busy[span.rank].add(span.start, span.end)

    def _tie(self, match: str, members: list[Key]) -> list[Key]:
        """Tie the members of a collective together; return those that were not."""
        bars = [self._bars[key] for key in members]
        if any(bar["state"] != State.SCHEDULED for bar in bars):
            self._tensors.put(match, max(bar.get("nbytes", 0) for bar in bars))
        loose = [key for key in members if self._bars[key].get("tie") != match]
        for key in loose:
            self._bars[key] = {**self._bars[key], "tie": match}
        return loose

    def _join(self, match: str, members: list[Key]) -> dict[str, Json]:
        """The arrows of one match: a message, or a request and its reply."""
        started = [key for key in members if self._bars[key]["state"] != State.SCHEDULED]
        found = self._trace(members).messages if started else []
        return {
            f"{match}/{n}": compact(
                id=f"{match}/{n}",
                src=m.src,
                dst=m.dst,
                op=str(m.op),
                nbytes=m.nbytes,
                sent=rounded(m.sent) if m.send in started else None,
                received=rounded(m.received),
                tag=m.tag,
                label=clean(m.label),
                send=m.send and _name(m.send),
                recv=m.recv and _name(m.recv),
            )
            for n, m in enumerate(found)
        }

    def _bar(self, key: Key, span: Span) -> Json:
        old = self._bars.get(key)
        values = len(self._bars) < MAX_VALUES if old is None else "values" in old
        return {
            "id": _name(key),
            "rank": span.rank,
            "row": self._row[key],
            "start": rounded(span.start),
            "end": rounded(span.end),
            **look_of(look_at(span)),
            **({"tie": old["tie"]} if old and "tie" in old else {}),
            **({"values": [plain_values(span.before), plain_values(span.after)]} if values else {}),
        }

    # -- around the picture -------------------------------------------------------

    def frame(self) -> Json:
        """All but bars and arrows: lanes, the sums under the picture, notices."""
        sent, tensors = list(self._sent.values()), self._tensors
        sums = Sums(
            len(self._bars),
            len(self._drawn),
            sum(len(tally.sizes) for tally in sent),
            sum(tally.total for tally in sent),
            len(tensors.sizes),
            tensors.total,
        )
        times = rounded(self._start), rounded(self._until())
        opened = ((s.rank, s) for s in self._open.values())
        seen = {rank for rank, _ in self._rows}
        return frame(self.meta, sums, self._lane, seen, times, opened, self.live)

    def _until(self) -> float:
        """Where the picture ends: operations still open last until the trace was taken."""
        return max(self._end, float(self.meta.get("until", 0))) if self._open else self._end

    def _lane(self, rank: int) -> Lane:
        waiting = [
            s.start
            for s in self._open.values()
            if s.rank == rank and s.op not in COMPUTATION and s.state is not State.SCHEDULED
        ]
        busy = self._busy[rank].with_open(waiting, self._until())
        sent = self._sent.get(rank, Tally())
        rows = self._count(rank, False), self._count(rank, True)
        return Lane(*rows, busy, messages=len(sent.sizes), nbytes=sent.total)

    def _count(self, rank: int, marks: bool) -> int:
        rows = self._rows.get((rank, marks))
        return rows.count if rows else 0


class Tally:
    """Sizes by name, and their sum."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.total = 0

    def put(self, name: str, size: int) -> None:
        """This one has that size now."""
        self.total += size - self.sizes.get(name, 0)
        self.sizes[name] = size


@lru_cache(10_000)
def look_of(it: Look) -> Json:
    """What many operations have in common, as plain data; not to be changed."""
    label = TOUCHED if it.op is Op.TOUCH else it.label
    if it.op in STORES:  # its arguments, as the program writes them
        label = call(it).removesuffix(")").partition("(")[2]
    return compact(
        kind=kind_of(it.op),
        op=clean(op_name(it)),
        state=str(it.state),
        peer=it.peer,
        group=None if it.group == WORLD else it.group,
        nbytes=it.nbytes,
        shape=list(it.shape),
        dtype=it.dtype,
        tag=it.tag,
        where=clean(it.where.rpartition("/")[2]),
        label=clean(label),
    )


def kind_of(op: Op) -> str:
    """How an operation is drawn."""
    if op in COLLECTIVES:
        return "collective"
    if op in COMPUTATION:
        return "mark"
    if op in STORES:
        return "store"
    return "request" if op in REQUESTS else str(op)


def _time(event: Event) -> float:
    return event.time


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


def rounded(seconds: float | None) -> float | None:
    """Seconds to a tenth of a microsecond; None where there is no time."""
    return None if seconds is None or not math.isfinite(seconds) else round(float(seconds), 7)


def compact(**fields: Any) -> Json:
    """An object without what says nothing; None stays where it says "not yet"."""
    kept = ("end", "sent", "received")
    return {k: v for k, v in fields.items() if k in kept or v not in (None, "", [])}


def plain_values(s: Summary | None) -> Json | None:
    if s is None:
        return None
    return {
        "values": [_number(v) for v in s.values],
        "norm": _number(s.norm),
        "min": _number(s.min),
        "max": _number(s.max),
        "size": s.size,
        "sampled": s.sampled,
    }


def _number(x: float) -> float | str:
    """Four significant digits; NaN and infinity as words, for which JSON has no number."""
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)
