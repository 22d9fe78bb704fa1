"""The space-time diagram of a whole trace in columns: a million events in about one second.

An operation is an index into arrays. Operations are sorted by lane, row and start, so that the
painter finds the visible ones by bisection. Properties shared by many operations, their category,
are stored once. During a run the columns are recomputed with each batch of events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit._format import human_bytes, human_seconds
from distkit.events import COLLECTIVES, COMPUTATION, REQUESTS, STORES, WORLD, Op, Summary
from distkit.trace.calls import call, op_name, wait_of
from distkit.trace.columns import Bools, Category, Floats, Ints
from distkit.trace.hosts import Traffic, several, traffic
from distkit.trace.log import EventLog
from distkit.trace.matching import Operations, Values
from distkit.trace.training import is_note
from distkit.views.scene.frame import (
    MAX_LANES,
    Json,
    clean,
    compared,
    facts,
    lane,
    left_out,
    unfinished,
    verb_for_open,
)
from distkit.views.scene.summaries import plain
from distkit.views.timeline.causes import Causes, causes, unknown

#: Maximum number of operations with values.
MAX_VALUES = 2_000

#: Shorter waits are not reported [s].
MIN_WAIT = 1e-6


class Columns:
    """The picture of a whole trace.

    Args:
        trace: a trace of any length.
        most: maximum number of operations drawn, by arrival; a notice reports this.
        live: whether its run is in progress, so that open operations are not reported. The events
            may then be in the order of arrival, with each rank's events in time order.

    >>> from distkit.events import Event, State
    >>> c = Columns(EventLog([Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1, nbytes=8)]))
    >>> [bar["op"] for bar in c.picture()["bars"]]
    ['send']
    """

    def __init__(self, trace: EventLog, most: int | None = None, *, live: bool = False) -> None:
        shown = _without_notes(trace)
        self.info, self._live, self._table = trace.info, live, shown.table
        self.pairs, self.ops = shown.pairs, shown.pairs.ops
        self._drawn: Bools = self.ops.rank < MAX_LANES
        if most is not None and self._drawn.sum() > most:
            some = np.flatnonzero(self._drawn)
            self._drawn[some[np.argsort(self.ops.begin[some])[most:]]] = False

    # -- as plain objects ---------------------------------------------------------

    def picture(self, most: int | None = None) -> Json:
        """Return bars and arrows as objects: all, or about ``most`` with their partners."""
        pairs, chosen = self.pairs, self._drawn.copy()
        if most is not None:
            drawn = np.flatnonzero(chosen)
            chosen[drawn[np.argsort(self.ops.start[drawn], kind="stable")[most:]]] = False
        arrows = self._touching(chosen)
        ends = np.concatenate([pairs.send[arrows], pairs.recv[arrows]])
        chosen |= np.isin(pairs.tie, pairs.tie[chosen & (pairs.tie >= 0)])
        chosen[ends[ends >= 0]] = True
        picture = self._as_objects(chosen & self._drawn, arrows)
        if most is not None:
            picture["entries"] = int(pairs.begun.sum()) + pairs.ties
        return picture

    def _as_objects(self, chosen: Bools, arrows: Ints) -> Json:
        values = self.values()
        return {
            "bars": [self._bar(i, values.get(i, ())) for i in np.flatnonzero(chosen).tolist()],
            "arrows": [self._arrow(i) for i in arrows.tolist()],
            **self.frame,
        }

    def caused(self) -> dict[str, NDArray[Any]]:
        """Return waits and critical path of the drawn operations, by index.

        ``waits`` are the waiting operations, ``since`` the time from their start to the wait, and
        ``waited`` its duration [s]; ``path`` and ``via`` as in :class:`~.causes.Causes`.
        """
        found, drawn = self.causes, self._drawn
        waits = np.flatnonzero(drawn & ~found.over & (found.waited > MIN_WAIT))
        path, via = (np.array(some, np.int64) for some in (found.path, found.via))
        return {
            "waits": waits,
            "since": (found.since[waits] - self.ops.start[waits]).round(7),
            "waited": found.waited[waits].round(7),
            "path": path[drawn[path]],
            "via": via[drawn[via]],
        }

    def _touching(self, chosen: Bools) -> Ints:
        """Return the arrows that begin or end at one of these operations."""
        known, pairs = (
            np.append(chosen, False),
            self.pairs,
        )  # index -1 is the last element, never chosen
        found: Ints = np.flatnonzero(pairs.begun & (known[pairs.send] | known[pairs.recv]))
        return found

    def _bar(self, i: int, values: Sequence[Summary | None]) -> Json:
        ops, tie = self.ops, int(self.pairs.tie[i])
        return compact(
            id=self._name(i),
            rank=int(ops.rank[i]),
            row=int(self.row[i]),
            start=rounded(ops.start[i]),
            end=rounded(ops.end[i]),
            **category_of(ops.categories[ops.category[i]]),
            tie=ops.match_id(int(ops.match[i])) if tie >= 0 else None,
            values=[plain(s) if s else None for s in values],
        )

    def _arrow(self, i: int) -> Json:
        pairs = self.pairs
        category = self.ops.categories[self.ops.category[pairs.about[i]]]
        send, recv = (self._name(int(end[i])) for end in (pairs.send, pairs.recv))
        return compact(
            id=f"{self.ops.match_id(int(pairs.match[i]))}/{int(pairs.back[i])}",
            src=int(pairs.src[i]),
            dst=int(pairs.dst[i]),
            nbytes=int(pairs.nbytes[i]),
            op=str(Op.SEND if pairs.p2p[i] else category.op),
            tag=category.tag,
            label=clean(category.label),
            sent=rounded(pairs.sent[i]),
            received=rounded(pairs.received[i]),
            send=send,
            recv=recv,
        )

    def _name(self, i: int) -> str | None:
        return f"{self.ops.rank[i]}.{self.ops.seq[i]}" if i >= 0 else None

    @cached_property
    def row(self) -> Ints:
        """The row of each operation in its lane."""
        return rows(self.ops, len(self._table))

    @cached_property
    def categories(self) -> list[Json]:
        """Name and drawing style of each category."""
        return [category_of(category) for category in self.ops.categories]

    def values(self, most: int = MAX_VALUES) -> dict[int, Values]:
        """Return the tensors' values before and after the first operations."""
        first = np.argsort(self.ops.begin)[:most]
        return dict(zip(first.tolist(), self.ops.values(first), strict=True))

    # -- in columns ---------------------------------------------------------------

    def tracks(self) -> tuple[Ints, list[list[int]]]:
        """Return the operations sorted by lane and row, and each ``[rank, mark, row, count]``."""
        ops = self.ops
        drawn = np.flatnonzero(self._drawn)
        keys = np.stack([ops.rank[drawn], ops.mark[drawn].astype(np.int64), self.row[drawn]])
        order = np.lexsort((ops.start[drawn], *keys[::-1]))
        heads = np.flatnonzero((np.diff(keys[:, order], axis=1, prepend=-1) != 0).any(axis=0))
        counts = np.diff(np.append(heads, len(order)))
        tracks = [
            [*key, n]
            for key, n in zip(keys[:, order[heads]].T.tolist(), counts.tolist(), strict=True)
        ]
        return drawn[order], tracks

    def drawn_arrows(self) -> Ints:
        """Return the arrows with a drawn end, sorted by start."""
        arrows, pairs = self._touching(self._drawn), self.pairs
        begins = np.where(np.isnan(pairs.sent), pairs.received, pairs.sent)[arrows]
        found: Ints = arrows[np.argsort(begins, kind="stable")]
        return found

    # -- frame --------------------------------------------------------------------

    @cached_property
    def frame(self) -> Json:
        """Everything but bars and arrows: lanes, totals and notices."""
        ops, pairs = self.ops, self.pairs
        sent = ~np.isnan(pairs.sent)
        said = np.flatnonzero((pairs.tie >= 0) & ~ops.scheduled)
        sizes = np.full(pairs.ties, -1)
        members = np.bincount(pairs.tie[said], minlength=pairs.ties) > 0
        everybody = np.flatnonzero(pairs.tie >= 0)
        np.maximum.at(sizes, pairs.tie[everybody], ops.nbytes[everybody])
        sums = {
            "operations": len(ops),
            "messages": int(sent.sum()),
            "message_bytes": int(pairs.nbytes[sent].sum()),
            "collectives": int(members.sum()),
            "collective_bytes": int(sizes[members].sum()),
        }
        stuck = np.flatnonzero(~ops.ended).tolist()
        opened = [(int(ops.rank[i]), ops.categories[ops.category[i]]) for i in stuck]
        info, seen = self.info, np.unique(ops.rank).tolist()
        ranks = sorted({*range(info.world_size), *info.ranks, *seen})
        notices = left_out(info, len(ops), int(self._drawn.sum()), ranks)
        if not self._live:
            notices = [*unfinished(opened, info), *notices]
        return {
            "title": clean(info.name),
            "facts": facts(info, len(ranks)),
            "lanes": [{**lane(info, r), **self._totals(r)} for r in ranks if r < MAX_LANES],
            "groups": {g: list(r) for g, r in info.groups.items()},
            "live": self._live,
            **sums,
            "compared": compared(info, self.traffic),
            "open": verb_for_open(info),
            "notices": notices,
            "notes": [],
            "start": rounded(ops.span[0] if ops.span else None),
            "end": rounded(self._until),
        }

    @property
    def _until(self) -> float:
        """End of the picture; open operations extend until the trace was taken."""
        if not self.ops.span:
            return -math.inf
        deaths = filter(None, map(self._died, self.info.ends))
        last = max([self.ops.span[1], *deaths])
        return last if self.ops.ended.all() else max(last, self.info.until or 0.0)

    def mine(self, rank: int) -> slice:
        """Return the operations of a rank."""
        return slice(*np.searchsorted(self.ops.rank, [rank, rank + 1]))

    def _died(self, rank: int) -> float | None:
        """Return when a rank died [s]; None if it did not, or the time is unknown."""
        return self.info.ends[rank].time if self.info.died(rank) else None

    def communication(self, rank: int) -> tuple[Floats, Floats]:
        """Return start and end of a rank's communication, limited by the picture."""
        ops, mine, waited = self.ops, self.mine(rank), self.causes.waited
        talk = ~ops.mark[mine] & ~(~ops.ended[mine] & ops.scheduled[mine])
        ends = np.where(ops.ended[mine], ops.end[mine], self._died(rank) or self._until)
        starts = ops.start[mine] + np.where(self.causes.over[mine], waited[mine], 0)
        return starts[talk], ends[talk]

    def waiting(self, rank: int) -> tuple[Floats, Floats]:
        """Return start and end of a rank's waits."""
        found, mine = self.causes, self.mine(rank)
        some = (found.waited[mine] > 0) & ~found.over[mine]
        since = found.since[mine][some]
        return since, since + found.waited[mine][some]

    @cached_property
    def causes(self) -> Causes:
        """Waits and the critical path; empty during a run."""
        if self._live:
            return unknown(len(self.ops))
        return causes(self.ops, self.pairs, self._until)

    @cached_property
    def sent(self) -> tuple[Ints, Ints]:
        """Messages and bytes sent, by rank."""
        pairs, room = self.pairs, int(self.ops.rank.max(initial=-1)) + 1
        was_sent = ~np.isnan(pairs.sent)
        src = pairs.src[was_sent]
        return (
            np.bincount(src, minlength=room).astype(np.int64),
            np.bincount(src, weights=pairs.nbytes[was_sent], minlength=room).astype(np.int64),
        )

    @property
    def traffic(self) -> Traffic:
        """Traffic between hosts, if there are several."""
        hosts = several(self.info)
        return traffic(hosts, self.pairs.sums()) if hosts else {}

    def _totals(self, rank: int) -> Json:
        """Return the totals of a rank: rows of bars, fractions of time, traffic sent."""
        mine, died = self.mine(rank), self._died(rank)
        mark, row = self.ops.mark[mine], self.row[mine]
        seconds = self._until - self.ops.span[0] if self.ops.span else 0.0
        busy, waiting = (length(*some(rank)) for some in (self.communication, self.waiting))
        messages, nbytes = (int(n[rank]) if rank < len(n) else 0 for n in self.sent)
        return {
            "rows": int(row[~mark].max(initial=-1)) + 1,
            "marks": int(row[mark].max(initial=-1)) + 1,
            "busy": round(busy / seconds, 4) if seconds > 0 else 0.0,
            "waiting": round(min(waiting, busy) / seconds, 4) if seconds > 0 else 0.0,
            "messages": messages,
            "bytes": nbytes,
            **compact(died=rounded(died)),
        }


def project(trace: EventLog) -> Json:
    """Return the picture of a whole trace."""
    return Columns(trace).picture()


def _without_notes(trace: EventLog) -> EventLog:
    """Return the trace without the notes of ``watch_gradients``."""
    table = trace.table
    notes = table.each(is_note(category) for category in table.categories).astype(bool)
    return EventLog.of(table.part(~notes), trace.info) if notes.any() else trace


def length(starts: Floats, ends: Floats) -> float:
    """Return the length of the union of intervals.

    >>> length(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0]))
    4.0
    """
    if not len(starts):
        return 0.0
    order = np.argsort(starts)
    reach = np.maximum.accumulate(ends[order])
    begins = np.maximum(starts[order], np.append(-np.inf, reach[:-1]))
    return float(np.maximum(reach - begins, 0).sum())


TOUCHED = "buffer used before wait()"


@lru_cache(10_000)
def category_of(it: Category) -> Json:
    """Return the shared properties of operations as plain data; callers must not modify it."""
    label = TOUCHED if it.op is Op.TOUCH else it.label
    if it.op in STORES:  # its arguments as in the program
        label = call(it).removesuffix(")").partition("(")[2]
    return compact(
        kind=kind_of(it.op),
        op=clean(wait_of(it) or op_name(it)),
        state=str(it.state),
        peer=it.peer,
        group=None if it.group == WORLD else it.group,
        nbytes=it.nbytes,
        shape=list(it.shape),
        dtype=it.dtype,
        tag=it.tag,
        where=clean(it.where.rpartition("/")[2]),
        label=clean(label),
        gpu=clean(_gpu(it.attributes)),
    )


def _gpu(facts: Mapping[str, Any]) -> str:
    """Return device, stream, GPU time and memory of an operation as text."""
    facts_text = [str(facts["device"])] if "device" in facts else []
    facts_text += [f"stream {facts['stream']}"] if "stream" in facts else []
    facts_text += (
        [f"{human_seconds(facts['device_seconds'])} there"] if "device_seconds" in facts else []
    )
    facts_text += [f"{human_bytes(facts['memory'])} in use"] if "memory" in facts else []
    return " · ".join(facts_text)


def kind_of(op: Op) -> str:
    """Return how an operation is drawn."""
    if op in COLLECTIVES:
        return "collective"
    if op in COMPUTATION:
        return "mark"
    if op in STORES:
        return "store"
    return "request" if op in REQUESTS else str(op)


def rounded(seconds: float | None) -> float | None:
    """Round seconds to 0.1 µs; return None if there is no time."""
    return None if seconds is None or not math.isfinite(seconds) else round(float(seconds), 7)


def compact(**fields: Any) -> Json:
    """Drop empty fields; None is kept where it means "not yet"."""
    nullable = ("end", "sent", "received")
    return {k: v for k, v in fields.items() if k in nullable or v not in (None, "", [])}


def rows(ops: Operations, events: int) -> Ints:
    """Return the row of each operation in its lane: the topmost that is free when it begins.

    Args:
        ops: the operations.
        events: the number of their events.
    """
    found = np.zeros(len(ops), np.int64)
    until = np.where(ops.ended, ops.last, events)
    by_lane = np.lexsort((ops.begin, ops.rank * 2 + ops.mark))
    lane = (ops.rank * 2 + ops.mark)[by_lane]
    for part in np.split(by_lane, np.flatnonzero(np.diff(lane)) + 1):
        if len(part):
            found[part] = _assign_rows(ops.begin[part], until[part])
    return found


def _assign_rows(begin: Ints, until: Ints) -> Ints:
    """Return the rows of one lane's bars, sorted by start."""
    rows = np.zeros(len(begin), np.int64)
    over = np.maximum.accumulate(until)
    alone = begin[1:] > over[:-1]  # all before it have ended
    crowded = np.flatnonzero(~(np.append(True, alone) & np.append(alone, True)))
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for i, first, last in zip(
        crowded.tolist(), begin[crowded].tolist(), until[crowded].tolist(), strict=True
    ):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        heapq.heappush(busy, (last, row))
        rows[i] = row
    return rows
