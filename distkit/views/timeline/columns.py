"""The space-time diagram of a whole trace, in columns: a million events in about a second.

An operation is a number here, and what is known of it an element of some arrays. Operations are
numbered lane by lane and row by row in the order of their starts, so that the painter finds by
bisection those in sight. What many operations have in common, their look, is told once. While a
run goes on its columns are made anew with each batch of events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit._format import human_bytes, human_seconds
from distkit.events import COLLECTIVES, COMPUTATION, REQUESTS, STORES, WORLD, Op, Summary
from distkit.trace.calls import call, op_name, wait_of
from distkit.trace.columns import Bools, Floats, Ints, Look
from distkit.trace.hosts import Traffic, several, traffic
from distkit.trace.log import EventLog
from distkit.trace.matching import Operations, Values
from distkit.trace.training import is_note
from distkit.views.scene.frame import MAX_LANES, Json, clean, frame
from distkit.views.scene.summaries import plain
from distkit.views.timeline.causes import Causes, causes, unknown

#: A picture opens with the last rank's first call if so much of the time is over then, and so
#: much of the operations is still to come.
LATE, REST = 0.5, 0.75

#: Only the first so many operations carry their values along.
MAX_VALUES = 2_000

#: Steps of a rank's line of memory, at most.
STEPS = 200

#: Shorter waits are told of nobody [s].
LEAST = 1e-6


class Columns:
    """The picture of a whole trace.

    Args:
        trace: of any length.
        most: draw only so many operations, those that were heard of first; a notice says so.
        live: whether its run goes on, so that an open operation is no news yet. The events may
            then be in the order in which they arrived, each rank's in that of time.

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
        """Bars and arrows as objects: all, or about the ``most`` first ones, and their partners."""
        pairs, chosen = self.pairs, self._drawn.copy()
        if most is not None:
            drawn = np.flatnonzero(chosen)
            chosen[drawn[np.argsort(self.ops.start[drawn], kind="stable")[most:]]] = False
        arrows = self._touching(chosen)
        ends = np.concatenate([pairs.send[arrows], pairs.recv[arrows]])
        chosen |= np.isin(pairs.tie, pairs.tie[chosen & (pairs.tie >= 0)])
        chosen[ends[ends >= 0]] = True
        picture = self._told(chosen & self._drawn, arrows)
        if most is not None:
            picture["entries"] = int(pairs.begun.sum()) + pairs.ties
            picture["coverage"] = coverage(self.frame, self.communication)
            picture["waited"] = coverage(self.frame, self.waiting)
        return picture

    def _told(self, chosen: Bools, arrows: Ints) -> Json:
        values = self.values()
        return {
            "bars": [self._bar(i, values.get(i, ())) for i in np.flatnonzero(chosen).tolist()],
            "arrows": [self._arrow(i) for i in arrows.tolist()],
            **self.frame,
        }

    def caused(self) -> dict[str, NDArray[Any]]:
        """Who waits, and the critical path, of what is drawn; operations by their numbers.

        ``waits`` are those that wait, ``since`` how long after their start they begin to, and
        ``waited`` for how long [s]; ``path`` and ``via`` as in :class:`~.causes.Causes`.
        """
        found, drawn = self.causes, self._drawn
        waits = np.flatnonzero(drawn & ~found.over & (found.waited > LEAST))
        path, via = (np.array(some, np.int64) for some in (found.path, found.via))
        return {
            "waits": waits,
            "since": (found.since[waits] - self.ops.start[waits]).round(7),
            "waited": found.waited[waits].round(7),
            "path": path[drawn[path]],
            "via": via[drawn[via]],
        }

    def _touching(self, chosen: Bools) -> Ints:
        """The arrows that begin or end at one of these operations."""
        known, pairs = np.append(chosen, False), self.pairs  # -1 is the last, and never chosen
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
            **look_of(ops.looks[ops.look[i]]),
            tie=ops.match_id(int(ops.match[i])) if tie >= 0 else None,
            values=[plain(s) if s else None for s in values],
        )

    def _arrow(self, i: int) -> Json:
        pairs = self.pairs
        look = self.ops.looks[self.ops.look[pairs.about[i]]]
        send, recv = (self._name(int(end[i])) for end in (pairs.send, pairs.recv))
        return compact(
            id=f"{self.ops.match_id(int(pairs.match[i]))}/{int(pairs.back[i])}",
            src=int(pairs.src[i]),
            dst=int(pairs.dst[i]),
            nbytes=int(pairs.nbytes[i]),
            op=str(Op.SEND if pairs.p2p[i] else look.op),
            tag=look.tag,
            label=clean(look.label),
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
    def looks(self) -> list[Json]:
        """What each look is called and how it is drawn."""
        return [look_of(look) for look in self.ops.looks]

    def values(self, most: int = MAX_VALUES) -> dict[int, Values]:
        """The tensors' values before and after the first operations."""
        first = np.argsort(self.ops.begin)[:most]
        return dict(zip(first.tolist(), self.ops.values(first), strict=True))

    # -- in columns ---------------------------------------------------------------

    def tracks(self) -> tuple[Ints, list[list[int]]]:
        """The operations lane by lane and row by row, and each ``[rank, mark, row, count]``."""
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
        """The arrows of which an end is drawn, in the order of their beginnings."""
        arrows, pairs = self._touching(self._drawn), self.pairs
        begins = np.where(np.isnan(pairs.sent), pairs.received, pairs.sent)[arrows]
        found: Ints = arrows[np.argsort(begins, kind="stable")]
        return found

    # -- around -------------------------------------------------------------------

    @cached_property
    def frame(self) -> Json:
        """All but bars and arrows: lanes, the sums under the picture, notices."""
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
        stuck = [] if self._live else np.flatnonzero(~ops.ended).tolist()
        around = frame(
            self.info,
            sums,
            int(self._drawn.sum()),
            self._lane,
            np.unique(ops.rank).tolist(),
            {
                *np.unique(ops.rank).tolist(),
                *(p for look in ops.looks if (p := look.peer) is not None),
            },
            [(int(ops.rank[i]), ops.looks[ops.look[i]]) for i in stuck],
            self._live,
            self.traffic,
        )
        return {
            **around,
            "compared": around["compared"] + self._most_memory(),
            "start": rounded(ops.span[0] if ops.span else None),
            "end": rounded(self._until),
            "opening": self._opening,
        }

    @property
    def _opening(self) -> float | None:
        """From when on the picture is worth a look at first [s], None: from its start.

        Where ranks make their first calls at such different times that all else would be too small
        to be seen, that is when the last of them makes it.
        """
        ops = self.ops
        if self._live or not len(ops):
            return None
        _, first = np.unique(ops.rank, return_index=True)
        begun = float(np.maximum.reduce(np.minimum.reduceat(ops.start, first)))
        late = (begun - ops.start.min()) / max(self._until - ops.start.min(), 1e-9)
        rest = float((ops.start >= begun).mean())
        return rounded(begun) if late > LATE and rest > REST else None

    @property
    def _until(self) -> float:
        """Where the picture ends: operations still open last until the trace was taken."""
        if not self.ops.span:
            return -math.inf
        deaths = filter(None, map(self._died, self.info.ends))
        last = max([self.ops.span[1], *deaths])
        return last if self.ops.ended.all() else max(last, self.info.until or 0.0)

    def mine(self, rank: int) -> slice:
        """The operations of a rank."""
        return slice(*np.searchsorted(self.ops.rank, [rank, rank + 1]))

    def _died(self, rank: int) -> float | None:
        """When a rank died [s]; None: it did not, or nobody knows when."""
        return self.info.ends[rank].time if self.info.died(rank) else None

    def communication(self, rank: int) -> tuple[Floats, Floats]:
        """When a rank's communication began and ended, or the picture did."""
        ops, mine, waited = self.ops, self.mine(rank), self.causes.waited
        talk = ~ops.mark[mine] & ~(~ops.ended[mine] & ops.scheduled[mine])
        ends = np.where(ops.ended[mine], ops.end[mine], self._died(rank) or self._until)
        starts = ops.start[mine] + np.where(self.causes.over[mine], waited[mine], 0)
        return starts[talk], ends[talk]

    def waiting(self, rank: int) -> tuple[Floats, Floats]:
        """When a rank began to wait, and when it no longer had to."""
        found, mine = self.causes, self.mine(rank)
        some = (found.waited[mine] > 0) & ~found.over[mine]
        since = found.since[mine][some]
        return since, since + found.waited[mine][some]

    @cached_property
    def causes(self) -> Causes:
        """Who waited for whom, and the critical path; nobody and none while the run goes on."""
        if self._live:
            return unknown(len(self.ops))
        return causes(self.ops, self.pairs, self._until)

    @cached_property
    def sent(self) -> tuple[Ints, Ints]:
        """Messages and bytes that each rank sent, by its number."""
        pairs, room = self.pairs, int(self.ops.rank.max(initial=-1)) + 1
        gone = ~np.isnan(pairs.sent)
        src = pairs.src[gone]
        return (
            np.bincount(src, minlength=room).astype(np.int64),
            np.bincount(src, weights=pairs.nbytes[gone], minlength=room).astype(np.int64),
        )

    @property
    def traffic(self) -> Traffic:
        """What hosts have sent each other, where there are several."""
        hosts = several(self.info)
        return traffic(hosts, self.pairs.sums()) if hosts else {}

    @cached_property
    def memory(self) -> dict[int, list[tuple[float, int]]]:
        """When a rank had how many bytes in use on its GPU, where that was recorded."""
        table = self._table
        used = table.each(look.attributes.get("memory", -1) for look in table.looks)
        found = {}
        for rank in np.unique(table.rank[used >= 0]).tolist():
            mine = np.flatnonzero((used >= 0) & (table.rank == rank))
            mine = mine[np.diff(used[mine], prepend=-1) != 0]
            parts = np.array_split(mine, STEPS) if len(mine) > STEPS else mine[:, None]
            peaks = [part[used[part].argmax()] for part in parts]
            found[rank] = [(float(table.time[i]), int(used[i])) for i in peaks]
        return found

    def _shares(self, rank: int) -> list[list[float | None]]:
        """The same as shares of what the rank with most had in use."""
        most = max((used for line in self.memory.values() for _, used in line), default=0) or 1
        return [[rounded(at), round(used / most, 4)] for at, used in self.memory.get(rank, [])]

    def _most_memory(self) -> list[list[str]]:
        most = {rank: max(used for _, used in line) for rank, line in self.memory.items()}
        each = "\n".join(f"rank {rank}: {human_bytes(used)}" for rank, used in most.items())
        words = "of GPU memory in use by a rank, at most"
        return [[human_bytes(max(most.values())), words, each]] if most else []

    def _lane(self, rank: int) -> Json:
        """What a rank's operations add up to: rows of bars, parts of the time, what it sent."""
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
            **compact(died=rounded(died), memory=self._shares(rank)),
        }


def project(trace: EventLog) -> Json:
    """The picture of a whole trace."""
    return Columns(trace).picture()


def _without_notes(trace: EventLog) -> EventLog:
    """The trace without the notes of ``watch_gradients``."""
    table = trace.table
    notes = table.each(is_note(look) for look in table.looks).astype(bool)
    return EventLog.of(table.part(~notes), trace.info) if notes.any() else trace


def length(starts: Floats, ends: Floats) -> float:
    """The length of the union of intervals.

    >>> length(np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 6.0]))
    4.0
    """
    if not len(starts):
        return 0.0
    order = np.argsort(starts)
    reach = np.maximum.accumulate(ends[order])
    begins = np.maximum(starts[order], np.append(-np.inf, reach[:-1]))
    return float(np.maximum(reach - begins, 0).sum())


#: Into so many parts a run is cut; fewer where there are many lanes.
PARTS, ALL_PARTS = 240, 4_000


def parts(lanes: int) -> int:
    """Into how many parts a run on so many lanes is cut."""
    return min(PARTS, max(40, ALL_PARTS // max(1, lanes)))


def covered(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """How much of each part some intervals cover, 0 to 1.

    Args:
        starts: of the intervals.
        ends: of the intervals.
        edges: of the parts, one after the other.

    >>> covered(np.array([0.0, 1.0]), np.array([1.5, 3.0]), np.array([0.0, 2.0, 4.0])).tolist()
    [1.0, 0.5]
    """
    begun, ended = (
        _before(np.sort(times - edges[0]), edges - edges[0]) for times in (starts, ends)
    )
    share: Floats = np.diff(begun - ended) / np.diff(edges)
    return np.clip(share, 0, 1)


def _before(times: Floats, edges: Floats) -> Floats:
    """The sum, over the times before each edge, of how long ago they were."""
    n = np.searchsorted(times, edges)
    found: Floats = n * edges - np.append(0, np.cumsum(times))[n]
    return found


def coverage(frame: Json, times: Callable[[int], tuple[Floats, Floats]]) -> dict[int, Floats]:
    """The coverage of each lane of a picture; of none, where no time passes.

    Args:
        frame: has the lanes, and when the picture starts and ends.
        times: when a rank's communications began, and when they ended.
    """
    lanes = [lane["rank"] for lane in frame["lanes"]]
    if not frame["end"] or frame["end"] <= frame["start"]:
        return {}
    edges = np.linspace(frame["start"], frame["end"], parts(len(lanes)) + 1)
    return {rank: covered(*times(rank), edges) for rank in lanes}


TOUCHED = "buffer used before wait()"


@lru_cache(10_000)
def look_of(it: Look) -> Json:
    """What many operations have in common, as plain data; not to be changed."""
    label = TOUCHED if it.op is Op.TOUCH else it.label
    if it.op in STORES:  # its arguments, as the program writes them
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
    """Where on a GPU an operation was, how long the GPU took for it, and the memory in use then."""
    told = [str(facts["device"])] if "device" in facts else []
    told += [f"stream {facts['stream']}"] if "stream" in facts else []
    told += [f"{human_seconds(facts['device_seconds'])} there"] if "device_seconds" in facts else []
    told += [f"{human_bytes(facts['memory'])} in use"] if "memory" in facts else []
    return " · ".join(told)


def kind_of(op: Op) -> str:
    """How an operation is drawn."""
    if op in COLLECTIVES:
        return "collective"
    if op in COMPUTATION:
        return "mark"
    if op in STORES:
        return "store"
    return "request" if op in REQUESTS else str(op)


def rounded(seconds: float | None) -> float | None:
    """Seconds to a tenth of a microsecond; None where there is no time."""
    return None if seconds is None or not math.isfinite(seconds) else round(float(seconds), 7)


def compact(**fields: Any) -> Json:
    """An object without what says nothing; None stays where it says "not yet"."""
    kept = ("end", "sent", "received")
    return {k: v for k, v in fields.items() if k in kept or v not in (None, "", [])}


def rows(ops: Operations, events: int) -> Ints:
    """The row of each operation in its lane: the topmost that is free when it begins.

    Args:
        ops: the operations.
        events: the number of events that they are made of.
    """
    found = np.zeros(len(ops), np.int64)
    until = np.where(ops.ended, ops.last, events)
    by_lane = np.lexsort((ops.begin, ops.rank * 2 + ops.mark))
    lane = (ops.rank * 2 + ops.mark)[by_lane]
    for part in np.split(by_lane, np.flatnonzero(np.diff(lane)) + 1):
        if len(part):
            found[part] = _of_lane(ops.begin[part], until[part])
    return found


def _of_lane(begin: Ints, until: Ints) -> Ints:
    """Rows for the bars of one lane, in the order in which they begin."""
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
