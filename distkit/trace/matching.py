"""Operations from events, and what belongs together, in columns: an array per fact. Pure.

Every rule of the two is here, and nowhere else. Spans, matches and messages are rows of these
columns, made on demand; views of whole traces read the columns. Events may come in batches, each
rank's in the order of time and the ranks in any order: the columns depend on neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit.events import (
    COLLECTIVES,
    COMPUTATION,
    P2P,
    REQUESTS,
    Message,
    Op,
    Span,
    State,
    Summary,
)
from distkit.trace.calls import Channel, channel_of
from distkit.trace.columns import Bools, Floats, Ints, Look, Table

#: The values of an operation's tensor before and after it.
Values = tuple[Summary | None, Summary | None]


class Operations:
    """The operations of a trace, sorted by rank and number.

    ``rank``, ``seq``, ``start`` and ``end`` [s] (NaN: not ended), ``blocked`` (since when its rank
    waited in it for long [s], NaN: it did not), ``nbytes``, ``look`` (an index of ``looks``) and
    ``match`` (-1, or the number of what it belongs to) have one element per operation, ``begin``
    and ``last`` the numbers of its first and last event. Matches below ``named`` have the id that
    the transport gave them.

    Args:
        table: the events.

    >>> from distkit.events import Event
    >>> recv = Event(1, 0, Op.RECV, State.STARTED, 0.5, peer=0)
    >>> ops = Operations(Table.of([recv], Table.of([Event(0, 3, Op.SEND, State.STARTED, 0, 1)])))
    >>> ops.seq.tolist(), ops.match.tolist(), ops.match_id(0)
    ([3, 0], [0, 0], 'world:0>1:None#0')
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        rank, seq, time = table.rank, table.seq, table.time
        order = np.lexsort((seq, rank))
        fresh = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(seq[order], prepend=-1) != 0)
        heads = np.flatnonzero(fresh)
        self.begin: Ints = order[heads]
        self.last = order[np.append(heads[1:], len(order))[: len(heads)] - 1]
        self.rank, self.seq = rank[self.begin], seq[self.begin]
        operation = np.cumsum(fresh) - 1
        started, blocked = (
            np.flatnonzero(table.each(look.state is state for look in table.looks)[order])
            for state in (State.STARTED, State.BLOCKED)
        )
        self._begun = self.begin.copy()
        self.blocked: Floats = np.full(len(heads), np.nan)
        self._begun[operation[started[::-1]]] = order[started[::-1]]  # the first of several counts
        self.blocked[operation[blocked]] = time[order[blocked]]
        self.start: Floats = time[self._begun]
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
        self.look, self.looks = np.array(names, np.int64)[code], [*found]

    def _match(self) -> None:
        """Number the matches: those that have an id, then those that are counted."""
        ids: dict[str, int] = {}
        number = np.full(len(self._table), -1)
        told = {i: match for i, match in self._table.match.items() if match}
        number[[*told]] = [ids.setdefault(match, len(ids)) for match in told.values()]
        first, last = number[[self.begin, self.last]]
        self.match = np.where(first < 0, last, first)
        self.named, self._ids = len(ids), [*ids]
        counted = self.each(
            k.op in COLLECTIVES or (k.op in P2P and k.peer is not None) for k in self.looks
        )
        mine = np.flatnonzero((self.match < 0) & counted.astype(bool))
        channel, side = self._sides(mine)
        before = nth(channel * (int(side.max(initial=0)) + 1) + side)
        keys, number = np.unique(channel * (len(self) + 1) + before, return_inverse=True)
        self.match[mine] = self.named + number
        self._channel, self.place = np.divmod(
            np.append(np.zeros(self.named, np.int64), keys), len(self) + 1
        )
        self.match_count = len(self._channel)

    def _sides(self, mine: Ints) -> tuple[Ints, Ints]:
        """The channels of some operations, by their numbers, and their sides there."""
        kinds, kind = np.unique(
            self.rank[mine] * len(self.looks) + self.look[mine], return_inverse=True
        )
        pairs = (divmod(k, len(self.looks)) for k in kinds.tolist())
        found = [channel_of(rank, self.looks[look]) for rank, look in pairs]
        numbers: dict[Channel, int] = {}
        both = [(numbers.setdefault(channel, len(numbers)), side) for channel, side in found]
        self._channels = [*numbers]
        channel, side = np.array(both, np.int64).reshape(-1, 2)[kind].T
        return channel, side

    def match_id(self, match: int) -> str:
        """The id of a match, by its number."""
        if match < self.named:
            return self._ids[match]
        return f"{self._channels[self._channel[match]]}#{self.place[match]}"

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
    def order(self) -> Ints:
        """The operations in the order of their starts."""
        found: Ints = np.lexsort((self.seq, self.rank, self.start))
        return found

    def values(self, some: Ints) -> list[Values]:
        """The values of the tensors of some operations."""
        summary = self._table.summary.get
        # the buffer of a receive may hold anything before
        begin = np.where(self.among([Op.RECV]), -1, np.stack([self._begun, self.begin]))
        last = np.where(self.ended, self.last, -1)
        numbers = [*begin[:, some].tolist(), last[some].tolist()]
        return [(summary(s) or summary(b), summary(e)) for s, b, e in zip(*numbers, strict=True)]

    @cached_property
    def rows(self) -> list[Span]:
        """Each operation as an object."""
        columns = (self.rank, self.seq, self.look, self.start, _optional(self.end), self.match)
        ids = [*self._ids, *[None] * (self.match_count - self.named + 1)]  # -1: the last
        rows = zip(*(c.tolist() for c in columns), self.values(np.arange(len(self))), strict=True)
        parts: list[tuple[Any, Any]] = [(look[:2], look[2:]) for look in self.looks]
        return [
            Span(*(rank, seq, *parts[look][0], start, end, *parts[look][1], ids[match], *values))
            for rank, seq, look, start, end, match, values in rows
        ]


class Pairs:
    """The messages between operations, and which of these make up a collective.

    ``tie`` has one element per operation: -1, or the number of its collective, of which there are
    ``ties``. A message is an element of ``send`` and ``recv`` (operations, -1: none), ``sent`` and
    ``received`` [s] (NaN: never), ``src`` and ``dst`` (ranks), ``nbytes``, ``about`` (the operation
    that names it), ``begun`` (False: its ranks are paused before it) and ``p2p`` (False: it is a
    request or a reply, which come last).

    Args:
        ops: what is to be paired.
    """

    def __init__(self, ops: Operations) -> None:
        self.ops = ops
        self.tie: Ints = np.full(len(ops), -1)
        members = np.flatnonzero(ops.among(COLLECTIVES))
        ties, self.tie[members] = np.unique(ops.match[members], return_inverse=True)
        self.ties = len(ties)
        begun = np.zeros(ops.match_count, bool)
        begun[ops.match[(ops.match >= 0) & ~ops.scheduled]] = True
        send, recv, ask = map(self._first, ([Op.SEND], [Op.RECV], REQUESTS))
        counted = np.arange(ops.match_count) >= ops.named
        plain = np.flatnonzero(counted & ((send >= 0) | (recv >= 0)))
        peer = ops.each(-1 if k.peer is None else k.peer for k in ops.looks)
        asked = np.flatnonzero(begun & (ask >= 0))
        asked = asked[peer[ask[asked]] >= 0]
        replied = asked[send[asked] >= 0]
        self._requests = ask[asked], recv[asked], send[asked]
        self.send = np.concatenate([send[plain], ask[asked], send[replied]])
        self.recv = np.concatenate([recv[plain], recv[asked], ask[replied]])
        self.match = np.concatenate([plain, asked, replied])
        self.p2p, self.begun = self.match >= ops.named, begun[self.match]
        self.place = ops.place[self.match]
        self.src = np.where(self.send >= 0, ops.rank[self.send], peer[self.recv])
        self.dst = np.where(self.recv >= 0, ops.rank[self.recv], peer[self.send])
        self._measure()

    def _first(self, some: Iterable[Op]) -> Ints:
        """The first of these operations in each match: what came twice counts once."""
        mine = np.flatnonzero(self.ops.among(some) & (self.ops.match >= 0))
        mine = mine[np.argsort(self.ops.start[mine], kind="stable")[::-1]]
        found = np.full(self.ops.match_count, -1)
        found[self.ops.match[mine]] = mine
        return found

    def _measure(self) -> None:
        ops, send, recv = self.ops, self.send, self.recv
        request = ops.among(REQUESTS)
        self.sent = np.where((send >= 0) & ~ops.scheduled[send], ops.start[send], np.nan)
        failed = ops.each(k.state is State.FAILED for k in ops.looks).astype(bool)
        lost = (recv < 0) | (self.p2p & failed[recv])
        self.received = np.where(lost, np.nan, ops.end[recv])
        asks = (send >= 0) & request[send]
        self.about = np.where((recv >= 0) & request[recv], recv, np.where(send >= 0, send, recv))
        self.back = ~self.p2p & (self.about == recv)
        heavy = np.where(asks & (recv >= 0), recv, np.where(send >= 0, send, recv))
        self.nbytes = ops.nbytes[heavy]

    def sums(self) -> list[tuple[int, int, int, int]]:
        """Source, destination, number and bytes of what was sent from each rank to each."""
        gone = ~np.isnan(self.sent)
        src, dst = self.src[gone], self.dst[gone]
        room = int(max(src.max(initial=0), dst.max(initial=0))) + 1
        both, which = np.unique(src * room + dst, return_inverse=True)
        sizes = np.bincount(which, weights=self.nbytes[gone], minlength=len(both))
        parts = (both // room, both % room, np.bincount(which, minlength=len(both)), sizes)
        return list(zip(*(part.astype(int).tolist() for part in parts), strict=True))

    # -- as objects ---------------------------------------------------------------

    def spans(self) -> list[Span]:
        """The operations in the order of their starts."""
        return [self.ops.rows[i] for i in self.ops.order.tolist()]

    def matches(self) -> dict[tuple[int, int], str]:
        """The id of what each operation belongs to, by its rank and number."""
        ops = self.ops
        some = ops.match >= 0
        ids = [*map(ops.match_id, range(ops.match_count))]
        numbers = zip(*(c[some].tolist() for c in (ops.rank, ops.seq, ops.match)), strict=True)
        return {(rank, seq): ids[match] for rank, seq, match in numbers}

    def messages(self) -> list[Message]:
        """The messages in the order of sending; those never sent come last."""
        ops, none = self.ops, len(self.ops)
        place = np.full(none + 1, none)  # the last is for an end that is not there
        place[ops.order] = np.arange(none)
        first = np.minimum(place[self.send], place[self.recv])
        order = np.lexsort((first, ~self.p2p, np.nan_to_num(self.sent, nan=np.inf)))
        columns = (self.src, self.dst, self.nbytes, _optional(self.sent), _optional(self.received))
        rows = zip(
            *(c[order].tolist() for c in (*columns, self.p2p, self.send, self.recv)),
            ops.look[self.about[order]].tolist(),
            strict=True,
        )
        keys: list[Any] = [*zip(ops.rank.tolist(), ops.seq.tolist(), strict=True), None]
        return [
            Message(
                src,
                dst,
                Op.SEND if p2p else ops.looks[look].op,
                nbytes,
                sent,
                received,
                ops.looks[look].tag,
                ops.looks[look].attributes,
                ops.looks[look].group,
                keys[send],
                keys[recv],
            )
            for src, dst, nbytes, sent, received, p2p, send, recv, look in rows
        ]

    def requests(self) -> list[tuple[Span, Span | None, Span | None]]:
        """Each request with its arrival and the reply, as far as they are known, in order."""
        rows: list[Any] = [*self.ops.rows, None]
        found = [[rows[i] for i in ends.tolist()] for ends in self._requests]
        return sorted(
            zip(*found, strict=True), key=lambda ends: (ends[0].start, ends[0].rank, ends[0].seq)
        )


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


def _optional(times: Floats) -> NDArray[Any]:
    """Times as objects, with None in the place of NaN."""
    found = times.astype(object)
    found[np.isnan(times)] = None
    return found
