"""The space-time diagram as plain data: lanes, bars and arrows, and no pixel yet.

:class:`Projection` is fed events, all at once or as they arrive, and ends in the same
picture either way. Each feeding returns what changed, so that a live view sends that and
nothing else. Both painters, the browser's and the static one, draw this data.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from distkit.events import COLLECTIVES, REQUESTS, WORLD, Event, Op, Span, State, Summary, Trace
from distkit.views.lanes import Busy, Rows
from distkit.views.matching import Key, Matching
from distkit.views.units import count

#: At most so many operations, and so many lanes, are drawn; a notice names the rest.
MAX_BARS, MAX_LANES = 20_000, 256
#: Only the first so many operations carry their values along.
MAX_VALUES = 2_000

_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

#: A JSON object: numbers, strings, booleans, lists, objects and None, and finite numbers only.
Json = dict[str, Any]


def project(trace: Trace) -> Json:
    """The picture of a whole trace."""
    projection = Projection(trace.meta)
    projection.feed(trace.events)
    return projection.snapshot()


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
        self._tensors: dict[str, int] = {}
        self._busy: dict[int, Busy] = defaultdict(Busy)
        self._open: dict[Key, Span] = {}
        self._start, self._end = math.inf, -math.inf

    # -- feeding ----------------------------------------------------------------

    def feed(self, events: Iterable[Event]) -> Json:
        """Take in events, each rank's in time order; return what changed in the picture."""
        touched = {key: None for e in events if (key := self._admit(e)) is not None}
        matches: dict[str, None] = {}
        for key in touched:
            span = self._trace([key]).spans[0]
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
        return self._picture(touched, arrows)

    def snapshot(self) -> Json:
        """The whole picture."""
        return self._picture(self._bars, self._arrows)

    def _picture(self, bars: Iterable[Key], arrows: dict[str, Json]) -> Json:
        return {
            "bars": [self._bars[key] for key in bars if _name(key) in self._drawn],
            "arrows": [a for a in arrows.values()
                       if a.get("send") in self._drawn or a.get("recv") in self._drawn],
            **self.frame(),
        }  # fmt: skip

    def _admit(self, event: Event) -> Key | None:
        """Keep an event; its operation's key, or None if the event was known already."""
        key = event.rank, event.seq
        parts = self._parts[key]
        if event.state in parts:
            return None
        rows = self._rows[event.rank, event.op is Op.MARK]
        if not parts:
            self._row[key] = rows.take()
            if len(self._drawn) < MAX_BARS and event.rank < MAX_LANES:
                self._drawn[_name(key)] = key
        parts[event.state] = event
        if event.state in (State.COMPLETED, State.FAILED):
            rows.free(self._row[key])
        self._start, self._end = min(self._start, event.time), max(self._end, event.time)
        return key

    def _trace(self, keys: Iterable[Key]) -> Trace:
        return Trace(e for key in keys for e in self._parts[key].values())

    def _account(self, key: Key, span: Span) -> None:
        """Keep the books of open operations and of time spent in communication."""
        if span.end is None:
            self._open[key] = span
            return
        self._open.pop(key, None)
        if span.op is not Op.MARK:
            self._busy[span.rank].add(span.start, span.end)

    def _tie(self, match: str, members: list[Key]) -> list[Key]:
        """Tie the members of a collective together; return those that were not."""
        bars = [self._bars[key] for key in members]
        self._tensors[match] = max(bar.get("nbytes", 0) for bar in bars)
        loose = [key for key in members if self._bars[key].get("tie") != match]
        for key in loose:
            self._bars[key] = {**self._bars[key], "tie": match}
        return loose

    def _join(self, match: str, members: list[Key]) -> dict[str, Json]:
        """The arrows of one match: a message, or a request and its reply."""
        found = self._trace(members).messages
        return {f"{match}/{n}": _compact(
            id=f"{match}/{n}", src=m.src, dst=m.dst, op=str(m.op), nbytes=m.nbytes,
            sent=_time(m.sent), received=_time(m.received), tag=m.tag, label=_clean(m.label),
            send=m.send and _name(m.send), recv=m.recv and _name(m.recv),
        ) for n, m in enumerate(found)}  # fmt: skip

    def _bar(self, key: Key, span: Span) -> Json:
        old = self._bars.get(key)
        values = len(self._bars) < MAX_VALUES if old is None else "values" in old
        return _compact(
            id=_name(key), rank=span.rank, row=self._row[key], kind=_kind(span.op),
            op=str(span.op), state=str(span.state), start=_time(span.start), end=_time(span.end),
            peer=span.peer, group=None if span.group == WORLD else span.group,
            nbytes=span.nbytes, shape=list(span.shape), dtype=span.dtype, tag=span.tag,
            where=_clean(span.where.rpartition("/")[2]), label=_clean(span.label),
            tie=(old or {}).get("tie"),
            values=[_values(span.before), _values(span.after)] if values else None,
        )  # fmt: skip

    # -- around the picture -------------------------------------------------------

    def frame(self) -> Json:
        """All but bars and arrows: lanes, the sums under the picture, notices."""
        lanes = [self._lane(r) for r in self._ranks() if r < MAX_LANES]
        return {
            "title": _clean(str(self.meta.get("name", ""))),
            "facts": _facts(self.meta, len(self._ranks())),
            "lanes": lanes,
            "groups": {str(g): list(r) for g, r in self.meta.get("groups", {}).items()},
            "start": _time(self._start), "end": _time(self._until()), "live": self.live,
            "operations": len(self._bars),
            "messages": len(self._arrows),
            "message_bytes": sum(a.get("nbytes", 0) for a in self._arrows.values()),
            "collectives": len(self._tensors),
            "collective_bytes": sum(self._tensors.values()),
            "notices": self._notices(),
        }  # fmt: skip

    def _until(self) -> float:
        """Where the picture ends: operations still open last until the trace was taken."""
        return max(self._end, float(self.meta.get("until", 0))) if self._open else self._end

    def _ranks(self) -> list[int]:
        named = (int(r) for r in self.meta.get("ranks", {}))
        return sorted({*range(int(self.meta.get("world_size", 0))), *named,
                       *(rank for rank, _ in self._rows)})  # fmt: skip

    def _lane(self, rank: int) -> Json:
        ranks = self.meta.get("ranks", {})
        about = ranks.get(str(rank), ranks.get(rank, {}))
        name = _clean(str(about.get("name") or f"rank {rank}"))
        detail = [f"rank {rank}"] if name != f"rank {rank}" else []
        detail += [str(about["device"])] if about.get("device") not in (None, "", "cpu") else []
        seconds = self._until() - self._start
        waiting = [s.start for s in self._open.values() if s.rank == rank and s.op is not Op.MARK]
        busy = self._busy[rank].with_open(waiting, self._until()) if seconds > 0 else 0.0
        return {
            "rank": rank, "name": name, "role": str(about.get("role") or ""),
            "detail": " · ".join(detail),
            "rows": self._count(rank, False), "marks": self._count(rank, True),
            "busy": round(busy / seconds, 4) if seconds > 0 else 0.0,
        }  # fmt: skip

    def _count(self, rank: int, marks: bool) -> int:
        rows = self._rows.get((rank, marks))
        return rows.count if rows else 0

    def _notices(self) -> list[str]:
        """What the reader must know before trusting the picture."""
        dropped = int(sum(self.meta.get("dropped", {}).values()))
        hidden = len(self._bars) - len(self._drawn)
        more = len(self._ranks()) - MAX_LANES
        found = [] if self.live else _unfinished(self._open.values(), self._lane)
        if dropped:
            found.append(f"{count(dropped, 'event')} dropped: the recorder's buffer was full, "
                         "so operations may be missing here")  # fmt: skip
        if hidden:
            found.append(f"the first {len(self._drawn):,} of {len(self._bars):,} operations are "
                         "drawn; the sums count them all")  # fmt: skip
        if more > 0:
            found.append(f"the first {MAX_LANES} of {more + MAX_LANES:,} ranks are drawn")
        return found


def _unfinished(spans: Iterable[Span], lane: Any) -> list[str]:
    """One line per operation that never ended, by name of what it waits in."""
    stuck: dict[str, list[str]] = defaultdict(list)
    for s in sorted(spans, key=lambda s: s.rank):
        if s.op is not Op.MARK:
            stuck[str(s.op)].append(lane(s.rank)["name"])
    return [f"still in {op}: {', '.join(dict.fromkeys(names))}" for op, names in stuck.items()]


def _facts(meta: dict[str, Any], ranks: int) -> list[str]:
    facts = [count(ranks, "rank")] if ranks else []
    return facts + [str(meta[key]) for key in ("backend", "device") if meta.get(key)]


def _kind(op: Op) -> str:
    """How an operation is drawn."""
    if op in COLLECTIVES:
        return "collective"
    return "request" if op in REQUESTS else str(op)


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


def _time(seconds: float | None) -> float | None:
    """Seconds to a tenth of a microsecond; None where there is no time."""
    return None if seconds is None or not math.isfinite(seconds) else round(seconds, 7)


def _clean(text: str) -> str:
    """Without characters that neither XML nor UTF-8 can hold."""
    return _ODD.sub("\ufffd", text)


def _compact(**fields: Any) -> Json:
    """Without what says nothing; None stays where it says "not yet"."""
    kept = ("end", "sent", "received")
    return {k: v for k, v in fields.items() if k in kept or v not in (None, "", [])}


def _values(s: Summary | None) -> Json | None:
    if s is None:
        return None
    return {"values": [_number(v) for v in s.values], "norm": _number(s.norm),
            "min": _number(s.min), "max": _number(s.max), "size": s.size,
            "sampled": s.sampled}  # fmt: skip


def _number(x: float) -> float | str:
    """Four significant digits; NaN and infinity as words, for which JSON has no number."""
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)
