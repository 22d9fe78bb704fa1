"""Events folded into operations, all at once: an array per fact instead of an object per operation.

The rules are those of :func:`distkit.trace.operations.spans`. :class:`Pairs` has what belongs
together: the ends of messages, the members of collectives.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit.events import COLLECTIVES, COMPUTATION, P2P, REQUESTS, Op, State
from distkit.trace.columns import Floats, Ints, Look, Table

__all__ = ["Bools", "Floats", "Ints", "Look", "Operations", "nth"]

Bools = NDArray[np.bool_]


class Operations:
    """The operations of a trace, sorted by rank and number.

    ``rank``, ``seq``, ``start`` and ``end`` [s] (NaN: not ended), ``blocked`` (since when its rank
    waited in it for long [s], NaN: it did not), ``nbytes``, ``look`` (an index of ``looks``),
    ``match`` (-1, or an index of ``matches``) and ``row`` have one element per operation, ``begin``
    and ``last`` the numbers of its first and last event.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        rank, seq, time = table.rank, table.seq, table.time
        order = np.lexsort((seq, rank))
        fresh = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(seq[order], prepend=-1) != 0)
        heads = np.flatnonzero(fresh)
        self.begin = order[heads]
        self.last = order[np.append(heads[1:], len(order))[: len(heads)] - 1]
        self.rank, self.seq = rank[self.begin], seq[self.begin]
        started = table.each(look.state is State.STARTED for look in table.looks).astype(bool)
        self.begun = _first(started[order], heads, order)
        self.start = time[self.begun]
        blocked = table.each(look.state is State.BLOCKED for look in table.looks).astype(bool)
        self.blocked = np.full(len(heads), np.nan)
        operation = np.cumsum(fresh) - 1
        self.blocked[operation[blocked[order]]] = time[order][blocked[order]]
        nbytes = table.each(look.nbytes for look in table.looks)[order]
        self.nbytes: Ints = np.maximum.reduceat(nbytes, heads) if len(heads) else nbytes
        self._describe()
        self._match()
        states = [look.state for look in self.looks]
        self.scheduled = self.each(s is State.SCHEDULED for s in states).astype(bool)
        self.ended = self.each(s in (State.COMPLETED, State.FAILED) for s in states).astype(bool)
        self.end = np.where(self.ended, time[self.last], np.nan)
        self.span = (float(time.min()), float(time.max())) if len(time) else None

    def __len__(self) -> int:
        return len(self.rank)

    def _describe(self) -> None:
        """How an operation looks, from its first event and its last."""
        looks, (first, last) = self._table.looks, self._table.look[[self.begin, self.last]]
        sizes, size = np.unique(self.nbytes, return_inverse=True)
        key = (first * len(looks) + last) * len(sizes) + size
        _, one, code = np.unique(key, return_index=True, return_inverse=True)
        alike = zip(first[one].tolist(), last[one].tolist(), self.nbytes[one].tolist(), strict=True)
        found: dict[Look, int] = {}
        names = [
            found.setdefault(_join(looks[a], looks[b], size), len(found)) for a, b, size in alike
        ]
        self.look, self.looks = _ints(names)[code], [*found]

    def _match(self) -> None:
        told = {i: match for i, match in self._table.match.items() if match}
        numbers: dict[str, int] = {}
        number = np.full(len(self._table), -1)
        number[[*told]] = [numbers.setdefault(match, len(numbers)) for match in told.values()]
        first, last = number[[self.begin, self.last]]
        self.match, self.matches = np.where(first < 0, last, first), [*numbers]

    def each(self, fact: Iterable[Any]) -> NDArray[Any]:
        """A fact of each look as a fact of each operation."""
        return np.array([*fact] or [0])[self.look] if len(self) else np.zeros(0, np.int64)

    def among(self, ops: Iterable[Op]) -> Bools:
        """True if each operation is one of these."""
        some = frozenset(ops)
        return self.each(look.op in some for look in self.looks).astype(bool)

    @cached_property
    def mark(self) -> Bools:
        """True if an operation is no communication."""
        return self.among(COMPUTATION)

    @cached_property
    def row(self) -> Ints:
        """The row of its lane: the topmost that is free when an operation begins."""
        found = np.zeros(len(self), np.int64)
        until = np.where(self.ended, self.last, len(self._table))
        by_lane = np.lexsort((self.begin, self.rank * 2 + self.mark))
        lane = (self.rank * 2 + self.mark)[by_lane]
        for part in np.split(by_lane, np.flatnonzero(np.diff(lane)) + 1):
            if len(part):
                found[part] = _rows(self.begin[part], until[part])
        return found


def _rows(begin: Ints, until: Ints) -> Ints:
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


def _join(first: Look, last: Look, nbytes: int) -> Look:
    """How an operation looks with these events."""
    return Look(
        first.op,
        last.state,
        first.peer if last.peer is None else last.peer,
        first.group,
        nbytes,
        first.shape or last.shape,
        first.dtype or last.dtype,
        first.tag if last.tag is None else last.tag,
        first.where,
        last.attributes or first.attributes,
    )


def _first(mask: Bools, heads: Ints, order: Ints) -> Ints:
    """The first event of each operation for which the mask holds, else its first event."""
    if not len(heads):
        return heads
    places = np.where(mask, np.arange(len(mask)), len(mask))
    found = np.minimum.reduceat(places, heads)
    return order[np.where(found < len(mask), found, heads)]


def nth(key: Ints) -> Ints:
    """How many equal elements come before each.

    >>> nth(np.array([5, 7, 5, 5])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(key, kind="stable")
    heads = np.flatnonzero(np.diff(key[order], prepend=key[order][:1] - 1))
    lengths = np.diff(np.append(heads, len(key)))
    found = np.empty(len(key), np.int64)
    found[order] = np.arange(len(key)) - np.repeat(heads, lengths)
    return found


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


class Pairs:
    """Arrows and ties.

    ``tie`` has one element per operation: -1, or the number of its collective. An arrow is
    an element of ``send`` and ``recv`` (operations, -1: none), ``sent`` and ``received`` [s]
    (NaN: never), ``nbytes`` and ``about`` (the operation that names it); replies come last.
    """

    def __init__(self, ops: Operations) -> None:
        self.ops, self._names = ops, list[str]()
        self.tie = self._ties()
        ends = [self._messages(), self._requests()]
        self.send, self.recv = (np.concatenate([e[i] for e in ends]) for i in (0, 1))
        self.p2p = np.arange(len(self.send)) < len(ends[0][0])
        self._arrows()

    def _ties(self) -> Ints:
        ops = self.ops
        mine = np.flatnonzero(ops.among(COLLECTIVES))
        groups: dict[str, int] = {}
        group = ops.each([groups.setdefault(k.group, len(groups)) for k in ops.looks])[mine]
        named = ops.match[mine] >= 0
        counted = nth(np.where(named, -1 - np.arange(len(mine)), ops.rank[mine] * 2**20 + group))
        key = np.where(named, -1 - ops.match[mine], group * (len(ops) + 1) + counted)
        self.ties, numbers = np.unique(key, return_inverse=True)
        self._groups = list(groups)
        found = np.full(len(ops), -1)
        found[mine] = numbers
        return found

    def _messages(self) -> tuple[Ints, Ints]:
        """Senders and receivers of point-to-point messages: first in, first out."""
        ops = self.ops
        peer = ops.each([-1 if k.peer is None else k.peer for k in ops.looks])
        mine = np.flatnonzero(ops.among(P2P) & (ops.match < 0) & (peer >= 0))
        queues: dict[tuple[str, int | None], int] = {}
        queue = ops.each([queues.setdefault((k.group, k.tag), len(queues)) for k in ops.looks])
        sends = ops.among([Op.SEND])[mine]
        ends = np.stack([ops.rank[mine], peer[mine]])
        src, dst = np.where(sends, ends, ends[::-1])
        most = int(ends.max(initial=0)) + 1
        _, key = np.unique((queue[mine] * most + src) * most + dst, return_inverse=True)
        pair = key * (len(mine) + 1) + nth(key * 2 + sends)
        both = np.unique(pair)
        send, recv = np.full(len(both), -1), np.full(len(both), -1)
        send[np.searchsorted(both, pair[sends])] = mine[sends]
        recv[np.searchsorted(both, pair[~sends])] = mine[~sends]
        some = (
            ~ops.scheduled[send] & (send >= 0) | ~ops.scheduled[recv] & (recv >= 0)
            if len(ops)
            else np.zeros(0, bool)
        )
        self.nth = (both % (len(mine) + 1))[some]
        return send[some], recv[some]

    def _requests(self) -> tuple[Ints, Ints]:
        """Senders and receivers of requests, and of the replies that came back."""
        ops = self.ops
        numbered = (ops.match >= 0) & ~ops.among(COMPUTATION | COLLECTIVES)
        members = [
            np.flatnonzero(numbered & ops.among(some)) for some in (REQUESTS, [Op.RECV], [Op.SEND])
        ]
        ask, got, back = (np.full(len(ops.matches), -1) for _ in range(3))
        for place, found in zip((ask, got, back), members, strict=True):
            place[ops.match[found]] = found
        addressed = ops.each([k.peer is not None for k in ops.looks]).astype(bool)
        began = np.zeros(len(ops.matches), bool)
        began[ops.match[numbered & ~ops.scheduled]] = True
        asked = (ask >= 0) & began & (addressed[ask] if len(ops) else False)
        replied = asked & (back >= 0)
        return (
            np.concatenate([ask[asked], back[replied]]),
            np.concatenate([got[asked], ask[replied]]),
        )

    def _arrows(self) -> None:
        ops, send, recv = self.ops, self.send, self.recv
        if not len(send):
            self.sent = self.received = np.zeros(0)
            self.nbytes = self.about = np.zeros(0, np.int64)
            return
        request = ops.among(REQUESTS)
        self.sent = np.where((send >= 0) & ~ops.scheduled[send], ops.start[send], np.nan)
        failed = ops.each([k.state is State.FAILED for k in ops.looks]).astype(bool)
        lost = (recv < 0) | (self.p2p & failed[recv])
        self.received = np.where(lost, np.nan, ops.end[recv])
        asks = (send >= 0) & request[send]
        self.about = np.where((recv >= 0) & request[recv], recv, np.where(send >= 0, send, recv))
        heavy = np.where(asks & (recv >= 0), recv, np.where(send >= 0, send, recv))
        self.nbytes = ops.nbytes[heavy]

    def tie_name(self, tie: int) -> str:
        """The id of a collective."""
        key, most = int(self.ties[tie]), len(self.ops) + 1
        if key < 0:
            return self.ops.matches[-1 - key]
        return f"{self._groups[key // most]}#{key % most}"

    def ends_of(self, arrow: int) -> tuple[int, int]:
        """Source and destination of an arrow; a missing end is where the other one says."""
        ops, send, recv = self.ops, int(self.send[arrow]), int(self.recv[arrow])
        peer = ops.looks[ops.look[send if send >= 0 else recv]].peer
        src, dst = (int(ops.rank[i]) if i >= 0 else peer for i in (send, recv))
        assert src is not None and dst is not None
        return src, dst

    def sums(self) -> list[tuple[int, int, int, int]]:
        """Source, destination, number and bytes of what was sent from each rank to each."""
        ops, peer = (
            self.ops,
            self.ops.each([-1 if k.peer is None else k.peer for k in self.ops.looks]),
        )
        gone = ~np.isnan(self.sent)
        send, recv = self.send[gone], self.recv[gone]
        src, dst = ops.rank[send], np.where(recv >= 0, ops.rank[recv], peer[send])
        room = int(max(src.max(initial=0), dst.max(initial=0))) + 1
        both, which = np.unique(src * room + dst, return_inverse=True)
        sizes = np.bincount(which, weights=self.nbytes[gone], minlength=len(both))
        parts = (both // room, both % room, np.bincount(which, minlength=len(both)), sizes)
        return list(zip(*(part.astype(int).tolist() for part in parts), strict=True))

    def name(self, arrow: int) -> str:
        """The id of an arrow, numbered in its queue."""
        ops, about = self.ops, int(self.about[arrow])
        if not self.p2p[arrow]:
            match = ops.matches[ops.match[about]]
            return f"{match}/{int(about == self.recv[arrow])}"
        (src, dst), look = self.ends_of(arrow), ops.looks[ops.look[about]]
        return f"{look.group}:{src}>{dst}:{look.tag}#{self.nth[arrow]}/0"
