"""Converts a trace to the column arrays of a timeline.

Operations are stored as columns, so converting a million events takes about one second. They are
sorted by lane, row and start, so that the renderer finds the visible ones by binary search.
Operations with the same properties share a category, which is stored once. During a run, the
columns are recomputed with each update.

A rank *waits* in an operation until the last rank that the operation needs has arrived. The wait
begins at the rank's last activity (the start of a call or the end of marked computation) or, if
that is later, at the recorded start of the wait. After a *final* barrier, its members only pull or
enter more barriers. The time until its last member arrives counts neither as waiting nor as
communication, because the other members have finished their work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit._format import human_bytes, human_seconds
from distkit.events import COLLECTIVES, COMPUTATION, REQUESTS, STORES, WORLD, Op, label_of
from distkit.trace.calls import call, op_name, wait_of
from distkit.trace.columns import Bools, Category, Floats, Ints
from distkit.trace.info import Traffic, hosts_if_several, traffic
from distkit.trace.log import EventLog
from distkit.trace.matching import Operations, Pairs
from distkit.trace.training import is_training_mark
from distkit.views.scene.frame import (
    MAX_LANES,
    Json,
    clean,
    dotted,
    facts,
    host_totals,
    lane,
    omission_notices,
    unfinished,
    unfinished_verb,
)

#: Maximum number of operations that are drawn with the values of their tensors, by default.
MAX_WITH_VALUES = 400

#: Minimum duration of a reported wait [s].
MIN_WAIT = 1e-6


@dataclass(frozen=True)
class Waits:
    """The waits of a run, with one element per operation.

    ``since`` is the start of the wait and ``waited`` its duration [s]. ``is_final`` marks the
    final barriers.
    """

    since: Floats
    waited: Floats
    is_final: Bools


class Columns:
    """The timeline of a whole trace, in columns.

    Args:
        trace: a trace of any length.
        max_operations: maximum number of operations to draw, in order of arrival; a notice states
            how many are drawn.
        live: whether the run is in progress; unfinished operations are then not reported.

    >>> from distkit.events import Event, State
    >>> c = Columns(EventLog([Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1, nbytes=8)]))
    >>> [bar["op"] for bar in c.picture()["bars"]]
    ['send']
    """

    def __init__(
        self, trace: EventLog, max_operations: int | None = None, *, live: bool = False
    ) -> None:
        shown = _without_training_marks(trace)
        self.info, self._live, self._table = trace.info, live, shown.table
        self.pairs, self.ops = shown.pairs, shown.pairs.ops
        self.drawn: Bools = self.ops.rank < MAX_LANES
        if max_operations is not None and self.drawn.sum() > max_operations:
            drawn = np.flatnonzero(self.drawn)
            self.drawn[drawn[np.argsort(self.ops.begin[drawn])[max_operations:]]] = False

    # -- as plain objects ---------------------------------------------------------

    def picture(self, max_bars: int | None = None) -> Json:
        """Return the picture as plain objects, with at most ``max_bars`` bars and their arrows."""
        chosen = self.drawn.copy()
        if max_bars is not None:
            drawn = np.flatnonzero(chosen)
            chosen[drawn[np.argsort(self.ops.start[drawn], kind="stable")[max_bars:]]] = False
        return {
            "bars": [self._bar(i) for i in np.flatnonzero(chosen).tolist()],
            "arrows": [self._arrow(i) for i in self.arrows_of(chosen).tolist()],
            **self.frame,
        }

    def arrows_of(self, chosen: Bools) -> Ints:
        """Return the arrows that begin or end at any of the chosen operations."""
        is_chosen, pairs = np.append(chosen, False), self.pairs  # index -1 is the appended element
        arrows: Ints = np.flatnonzero(
            pairs.is_started & ~pairs.is_partial & (is_chosen[pairs.send] | is_chosen[pairs.recv])
        )
        return arrows

    def _bar(self, i: int) -> Json:
        ops, collective = self.ops, int(self.pairs.collective[i])
        return compact(
            id=self._name(i),
            rank=int(ops.rank[i]),
            row=int(self.row[i]),
            start=rounded(ops.start[i]),
            end=rounded(ops.end[i]),
            **category_of(ops.categories[ops.category[i]]),
            collective=ops.match_id(int(ops.match[i])) if collective >= 0 else None,
        )

    def _arrow(self, i: int) -> Json:
        pairs = self.pairs
        category = self.ops.categories[self.ops.category[pairs.described_by[i]]]
        send, recv = (self._name(int(end[i])) for end in (pairs.send, pairs.recv))
        return compact(
            id=f"{self.ops.match_id(int(pairs.match[i]))}/{int(pairs.is_reply[i])}",
            src=int(pairs.src[i]),
            dst=int(pairs.dst[i]),
            nbytes=int(pairs.nbytes[i]),
            op=str(Op.SEND if pairs.p2p[i] else category.op),
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

    # -- in columns ---------------------------------------------------------------

    def tracks(self) -> tuple[Ints, list[list[int]]]:
        """Return the drawn operations by lane and row, and ``[rank, mark, row, count]`` per row."""
        ops = self.ops
        drawn = np.flatnonzero(self.drawn)
        keys = np.stack([ops.rank[drawn], ops.mark[drawn].astype(np.int64), self.row[drawn]])
        order = np.lexsort((ops.start[drawn], *keys[::-1]))
        heads = np.flatnonzero((np.diff(keys[:, order], axis=1, prepend=-1) != 0).any(axis=0))
        counts = np.diff(np.append(heads, len(order)))
        tracks = [
            [*key, n]
            for key, n in zip(keys[:, order[heads]].T.tolist(), counts.tolist(), strict=True)
        ]
        return drawn[order], tracks

    # -- frame --------------------------------------------------------------------

    @cached_property
    def frame(self) -> Json:
        """The picture without bars and arrows: lanes, totals and notices."""
        ops, pairs = self.ops, self.pairs
        entered = (pairs.collective >= 0) & ~ops.scheduled
        sizes = np.full(pairs.collective_count, -1)  # -1: no member has entered it
        np.maximum.at(sizes, pairs.collective[entered], ops.nbytes[entered])
        messages, message_bytes = (int(n.sum()) for n in self.sent)
        unended = np.flatnonzero(~ops.ended).tolist()
        opened = [(int(ops.rank[i]), ops.categories[ops.category[i]]) for i in unended]
        info, recorded = self.info, np.unique(ops.rank).tolist()
        ranks = sorted({*range(info.world_size), *info.ranks, *recorded})
        notices = omission_notices(info, len(ops), int(self.drawn.sum()), ranks)
        if not self._live:
            notices = [*unfinished(opened, info), *notices]
        return {
            "title": clean(info.name),
            "facts": facts(info, len(ranks)),
            "lanes": [{**lane(info, r), **self._totals(r)} for r in ranks if r < MAX_LANES],
            "groups": {g: list(r) for g, r in info.groups.items()},
            "live": self._live,
            "operations": len(ops),
            "messages": messages,
            "message_bytes": message_bytes,
            "collectives": int((sizes >= 0).sum()),
            "collective_bytes": int(sizes[sizes >= 0].sum()),
            "host_totals": host_totals(info, self.traffic),
            "open": unfinished_verb(info),
            "notices": notices,
            "notes": [],
            # rounded down; in a stepped run, ranks may reach their first call long before it starts
            "start": rounded(ops.start.min(initial=math.inf) - 5e-8),
            "end": rounded(self._until),
        }

    @property
    def _until(self) -> float:
        """End of the picture; open operations extend to the end of the recording."""
        if not self.ops.span:
            return -math.inf
        deaths = filter(None, map(self._died, self.info.ends))
        last = max([self.ops.span[1], *deaths])
        return last if self.ops.ended.all() else max(last, self.info.until or 0.0)

    def of_rank(self, rank: int) -> slice:
        """Return the slice of a rank's operations."""
        return slice(*np.searchsorted(self.ops.rank, [rank, rank + 1]))

    def _died(self, rank: int) -> float | None:
        """Return the time at which a rank died [s]; None if it did not, or if the time is unknown.

        A server whose backup took over has no entry in ``info.ends``; a worker that was replaced
        has one.
        """
        return next(
            (r.time for r in self.info.replaced if r.node == rank and rank not in self.info.ends),
            self.info.ends[rank].time if self.info.died(rank) else None,
        )

    def communication(self, rank: int) -> tuple[Floats, Floats]:
        """Return the start and end times of a rank's communication.

        Open calls end when the rank dies or the picture ends. An asynchronous call during which the
        rank begins marked computation counts only from the end of the last such computation.
        """
        ops, part, waited = self.ops, self.of_rank(rank), self.waits.waited
        communicates = ~ops.mark[part] & ~(~ops.ended[part] & ops.scheduled[part])
        ends = np.where(ops.ended[part], ops.end[part], self._died(rank) or self._until)
        starts = ops.start[part] + np.where(self.waits.is_final[part], waited[part], 0)
        mark_starts, mark_ends = (
            np.append(-np.inf, times[ops.mark[part]]) for times in (starts, ends)
        )
        last = np.searchsorted(mark_starts, ends) - 1  # marks begin in order
        starts = np.where(mark_starts[last] > starts, np.minimum(mark_ends[last], ends), starts)
        return starts[communicates], ends[communicates]

    def waiting(self, rank: int) -> tuple[Floats, Floats]:
        """Return the start and end times of a rank's waits."""
        result, part = self.waits, self.of_rank(rank)
        waiting = (result.waited[part] > 0) & ~result.is_final[part]
        since = result.since[part][waiting]
        return since, since + result.waited[part][waiting]

    @cached_property
    def waits(self) -> Waits:
        """The waits, which are computed only after the run has ended."""
        if self._live:
            none = np.zeros(len(self.ops))
            return Waits(since=none, waited=none, is_final=none > 0)
        return compute_waits(self.ops, self.pairs, self._until)

    @cached_property
    def sent(self) -> tuple[Ints, Ints]:
        """Messages and bytes sent, by rank."""
        pairs, ranks = self.pairs, int(self.ops.rank.max(initial=-1)) + 1
        was_sent = ~np.isnan(pairs.sent)
        src = pairs.src[was_sent]
        return (
            np.bincount(src, minlength=ranks).astype(np.int64),
            np.bincount(src, weights=pairs.nbytes[was_sent], minlength=ranks).astype(np.int64),
        )

    @property
    def traffic(self) -> Traffic:
        """Traffic by source and destination host; empty for a single host."""
        hosts = hosts_if_several(self.info)
        return traffic(hosts, self.pairs.sums()) if hosts else {}

    def _totals(self, rank: int) -> Json:
        """Return a rank's number of rows, busy and waiting fractions, and sent traffic."""
        part, died = self.of_rank(rank), self._died(rank)
        mark, row = self.ops.mark[part], self.row[part]
        seconds = self._until - self.ops.start.min(initial=math.inf)
        busy, waiting = (
            length(*intervals(rank)) for intervals in (self.communication, self.waiting)
        )
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


def _without_training_marks(trace: EventLog) -> EventLog:
    """Return the trace without the marks of ``watch_gradients``."""
    table = trace.table
    marks = table.expand(is_training_mark(category) for category in table.categories).astype(bool)
    return (
        EventLog.from_table(table.take(np.flatnonzero(~marks)), trace.info)
        if marks.any()
        else trace
    )


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


@lru_cache(10_000)
def category_of(category: Category) -> Json:
    """Return the shared properties of operations as plain data; do not modify the result."""
    label = "buffer used before wait()" if category.op is Op.TOUCH else label_of(category)
    if category.op in STORES:  # the label of a store operation is its list of arguments
        label = call(category).removesuffix(")").partition("(")[2]
    return compact(
        kind=kind_of(category.op),
        op=clean(wait_of(category) or op_name(category)),
        state=str(category.state),
        peer=category.peer,
        group=None if category.group == WORLD else category.group,
        nbytes=category.nbytes,
        shape=list(category.shape),
        dtype=category.dtype,
        tag=category.tag,
        where=clean(category.where.rpartition("/")[2]),
        label=clean(label),
        gpu=_gpu(category.attributes),
    )


def _gpu(attributes: Mapping[str, Any]) -> str:
    """Return the device, stream, GPU time and memory of an operation as text."""
    return dotted(
        (
            str(attributes.get("device", "")),
            f"stream {attributes['stream']}" if "stream" in attributes else "",
            f"{human_seconds(attributes['device_seconds'])} on the device"
            if "device_seconds" in attributes
            else "",
            f"{human_bytes(attributes['memory'])} in use" if "memory" in attributes else "",
        )
    )


def kind_of(op: Op) -> str:
    """Return the kind of bar that represents an operation."""
    return next((kind for kind, ops in _KINDS.items() if op in ops), str(op))


_KINDS = {
    "collective": COLLECTIVES,
    "mark": COMPUTATION,
    "store": STORES,
    "request": REQUESTS,
}


def rounded(seconds: float | None) -> float | None:
    """Round seconds to 0.1 µs; return None if the time is missing or not finite."""
    return None if seconds is None or not math.isfinite(seconds) else round(float(seconds), 7)


def compact(**fields: Any) -> Json:
    """Drop empty fields, except for ``end``, ``sent`` and ``received``, which may be None."""
    return {
        k: v
        for k, v in fields.items()
        if k in ("end", "sent", "received") or v not in (None, "", [])
    }


def rows(ops: Operations, events: int) -> Ints:
    """Return the row of each operation in its lane: the first row that is free when it begins.

    Args:
        ops: the operations.
        events: the total number of events.
    """
    lane = (ops.rank * 2 + ops.mark) * (events + 1)  # offset of each lane
    order = np.argsort(lane + ops.begin)
    begin = (lane + ops.begin)[order]
    end = (lane + np.where(ops.ended, ops.last, events))[order]
    isolated = begin[1:] > np.maximum.accumulate(end)[:-1]  # all earlier operations have ended
    crowded = np.flatnonzero(~(np.append(True, isolated) & np.append(isolated, True)))
    result, ends = np.zeros(len(ops), np.int64), list[int]()  # the current end of each row
    columns = (order[crowded], begin[crowded], end[crowded])
    for i, first, last in zip(*(column.tolist() for column in columns), strict=True):
        row = next((row for row, row_end in enumerate(ends) if row_end < first), len(ends))
        ends[row : row + 1] = [last]
        result[i] = row
    return result


# -- waits ----------------------------------------------------------------------------


def compute_waits(ops: Operations, pairs: Pairs, end: float) -> Waits:
    """Return the waits of a complete trace that ends at ``end`` [s]."""
    final = np.where(ops.ended, ops.end, end)
    since = np.fmax(_last_active(ops, final), ops.blocked)
    waited = np.maximum(0, np.minimum(_arrival(ops, pairs), final) - since)
    waited[ops.scheduled] = 0
    return Waits(since, waited, _final_barriers(ops, pairs))


def _lanes(rank: Ints) -> list[tuple[int, slice]]:
    """Return each rank and its slice of arrays that are sorted by rank."""
    ranks = np.unique(rank)
    ends = (np.searchsorted(rank, ranks, side).tolist() for side in ("left", "right"))
    return [(r, slice(a, b)) for r, a, b in zip(ranks.tolist(), *ends, strict=True)]


def _last_active(ops: Operations, final: Floats) -> Floats:
    """Return each operation's start or, if later, its rank's last activity during the operation."""
    marked = ops.mark & ops.ended
    rank = np.concatenate([ops.rank, ops.rank[marked]])
    time = np.concatenate([ops.start, ops.end[marked]])
    # whether the rank is computing from then on
    computes = np.append(ops.mark, np.zeros(int(marked.sum()), bool))
    order = np.lexsort((time, rank))
    rank, time, computes = rank[order], time[order], computes[order]
    last_active, active = ops.start.copy(), dict(_lanes(rank))
    for r, part in _lanes(ops.rank):
        lane, start, end = active[r], ops.start[part], final[part]
        last = lane.start + np.maximum(np.searchsorted(time[lane], end) - 1, 0)
        meanwhile = time[last] > start
        last_active[part] = np.where(meanwhile, np.where(computes[last], end, time[last]), start)
    return np.where(ops.mark, ops.start, last_active)


def _arrival(ops: Operations, pairs: Pairs) -> Floats:
    """Return the time at which the last rank that each operation needs arrives.

    The result is infinity for a receive whose message was never sent, and -infinity for a send
    without a receive or an operation that needs no other rank.
    """
    arrival = np.full(len(ops), -np.inf)
    joint = pairs.collective >= 0
    last = np.full(pairs.collective_count, -np.inf)
    np.maximum.at(last, pairs.collective[joint], ops.start[joint])
    # a pull waits for its reply, a registration for all nodes
    sends, receives = ops.is_any_of([Op.SEND]), ops.is_any_of([Op.RECV, Op.PULL, Op.REGISTER])
    received = (pairs.recv >= 0) & receives[pairs.recv]
    arrival[pairs.recv[received]] = np.where(
        np.isnan(pairs.sent[received]), np.inf, pairs.sent[received]
    )
    rendezvous = (pairs.send >= 0) & (pairs.recv >= 0) & sends[pairs.send]
    arrival[pairs.send[rendezvous]] = ops.start[pairs.recv[rendezvous]]
    arrival[joint] = last[pairs.collective[joint]]
    return arrival


def _final_barriers(ops: Operations, pairs: Pairs) -> Bools:
    """Mark the barriers after which members only pull or enter more barriers."""
    barrier = ops.is_any_of([Op.BARRIER]) & (pairs.collective >= 0)
    work = ~ops.is_any_of([Op.BARRIER, Op.PULL])
    last = np.full(int(ops.rank.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(last, ops.rank[work], ops.start[work])
    late = ops.start > last[ops.rank]
    ended = np.ones(pairs.collective_count + 1, bool)
    # index -1 is for operations without a collective
    ended[pairs.collective[~(barrier & late)]] = False
    return barrier & ended[pairs.collective]


# -- for the browser ------------------------------------------------------------------


def packed(columns: Columns, max_with_values: int = MAX_WITH_VALUES) -> Json:
    """Return the frame with bars and arrows as ``columns``, which js/columns.js decodes.

    ``columns`` contains the categories and tracks and, as ``bytes``, the concatenated little-endian
    arrays; ``parts`` lists the arrays as ``[name, type, length]``. The first ``max_with_values``
    operations include the values of their tensors.
    """
    ops, pairs = columns.ops, columns.pairs
    order, tracks = columns.tracks()
    index_of = np.full(len(ops) + 1, -1)  # -1, for "none", stays -1
    index_of[order] = np.arange(len(order))
    arrows = columns.arrows_of(columns.drawn)
    begins = np.where(np.isnan(pairs.sent), pairs.received, pairs.sent)[arrows]
    arrows = arrows[np.argsort(begins, kind="stable")]
    parts: dict[str, tuple[str, NDArray[Any]]] = {
        "start": ("f8", ops.start[order]),
        "end": ("f8", ops.end[order]),
        "sent": ("f8", pairs.sent[arrows]),
        "received": ("f8", pairs.received[arrows]),
        "seq": ("i4", ops.seq[order]),
        "category": ("i4", ops.category[order]),
        "collective": ("i4", pairs.collective[order]),
        "send": ("i4", index_of[pairs.send[arrows]]),
        "recv": ("i4", index_of[pairs.recv[arrows]]),
    }
    valued, numbers = _values(columns, index_of, max_with_values)
    parts |= {"valued": ("i4", valued), "numbers": ("f4", numbers)}
    waits = columns.waits
    waiting = np.flatnonzero(columns.drawn & ~waits.is_final & (waits.waited > MIN_WAIT))
    parts |= {
        "waits": ("i4", index_of[waiting]),
        "since": ("f4", (waits.since[waiting] - ops.start[waiting]).round(7)),
        "waited": ("f4", waits.waited[waiting].round(7)),
    }
    return {
        **columns.frame,
        "columns": {
            "categories": [category_of(category) for category in ops.categories],
            "tracks": tracks,
            "parts": [[name, kind, len(array)] for name, (kind, array) in parts.items()],
            "bytes": b"".join(array.astype(f"<{kind}").tobytes() for kind, array in parts.values()),
        },
    }


def _values(
    columns: Columns, index_of: NDArray[np.int64], limit: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return five integers per tensor, and the values of all tensors.

    The integers are the index of the bar, 0 for a tensor before the operation or 1 for one after
    it, the tensor's size, 1 if it was sampled, and the number of values. The values of each tensor
    follow its norm, minimum and maximum.
    """
    heads: list[tuple[int, ...]] = []
    bodies: list[tuple[float, ...]] = []
    first = np.argsort(columns.ops.begin)[:limit]
    for i, pair in zip(index_of[first].tolist(), columns.ops.values(first), strict=True):
        for when, summary in enumerate(pair):
            if summary is not None and i >= 0:
                heads.append(
                    (i, when, min(summary.size, 2**31 - 1), summary.sampled, len(summary.values))
                )
                bodies.append((summary.norm, summary.min, summary.max, *summary.values))
    with np.errstate(over="ignore"):
        numbers = np.array([*chain.from_iterable(bodies)], np.float64).astype("<f4")
    return np.array([*chain.from_iterable(heads)], "<i4"), _round(numbers)


def _round(numbers: NDArray[Any]) -> NDArray[Any]:
    """Round to about four significant digits, so that the numbers compress well."""
    bits = numbers.view("<u4")
    finite = np.isfinite(numbers)
    return np.where(finite, (bits + np.uint32(0x200)) & np.uint32(0xFFFFFC00), bits).view("<f4")
