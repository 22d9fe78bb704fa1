"""Builds operations from events and matches them, in columns (one array per field).

No side effects.

The channels of :mod:`distkit.trace.calls` define which operations match. Spans, matches and
messages are rows of these columns, created on demand; views of whole traces read the columns.
The events of one rank must be in time order. The order of the ranks does not affect the result.
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
from distkit.trace.columns import Bools, Category, Floats, Ints, Table

#: Summaries of an operation's tensor before and after it.
Values = tuple[Summary | None, Summary | None]


class Operations:
    """The operations of a trace, sorted by rank and number.

    These arrays have one element per operation:

    ===================  =======================================================
    ``rank``, ``seq``    the rank, and the number of the operation on the rank
    ``start``, ``end``   [s]; ``end`` is NaN until the operation ends
    ``blocked``          start of a long wait in the operation [s], or NaN
    ``nbytes``           number of bytes
    ``category``         index into ``categories``
    ``match``            number of the match, or -1
    ``begin``, ``last``  indices of the first and last event
    ===================  =======================================================

    Matches with numbers below ``named`` have an id from the transport.

    Args:
        table: the events.

    >>> from distkit.events import Event
    >>> recv = Event(1, 0, Op.RECV, State.STARTED, 0.5, peer=0)
    >>> ops = Operations(Table.from_events([Event(0, 3, Op.SEND, State.STARTED, 0, 1), recv]))
    >>> ops.seq.tolist(), ops.match.tolist(), ops.match_id(0)
    ([3, 0], [0, 0], 'world:0>1:None#0')
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        rank, seq, time = table.rank, table.seq, table.time
        order = np.lexsort((seq, rank))
        is_first = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(seq[order], prepend=-1) != 0)
        heads = np.flatnonzero(is_first)
        self.begin: Ints = order[heads]
        self.last = order[np.append(heads[1:], len(order))[: len(heads)] - 1]
        self.rank, self.seq = rank[self.begin], seq[self.begin]
        operation = np.cumsum(is_first) - 1
        started, blocked = (
            np.flatnonzero(
                table.expand(category.state is state for category in table.categories)[order]
            )
            for state in (State.STARTED, State.BLOCKED)
        )
        self._start_events = self.begin.copy()
        self.blocked: Floats = np.full(len(heads), np.nan)
        self._start_events[operation[started[::-1]]] = order[started[::-1]]  # keeps the first
        self.blocked[operation[blocked]] = time[order[blocked]]
        self.start: Floats = time[self._start_events]
        nbytes = table.expand(category.nbytes for category in table.categories)[order]
        self.nbytes: Ints = np.maximum.reduceat(nbytes, heads) if len(heads) else nbytes
        self._combine_categories()
        self._match()
        states = [category.state for category in self.categories]
        self.scheduled = self.expand(s is State.SCHEDULED for s in states).astype(bool)
        self.ended = self.expand(s in (State.COMPLETED, State.FAILED) for s in states).astype(bool)
        self.end = np.where(self.ended, time[self.last], np.nan)
        self.span = (float(time.min()), float(time.max())) if len(time) else None

    def __len__(self) -> int:
        return len(self.rank)

    def _combine_categories(self) -> None:
        """Combine the categories of each operation's first and last event."""
        categories, (first, last) = (
            self._table.categories,
            self._table.category[[self.begin, self.last]],
        )
        sizes, size = np.unique(self.nbytes, return_inverse=True)
        key = (first * len(categories) + last) * len(sizes) + size
        _, index, code = np.unique(key, return_index=True, return_inverse=True)
        rows = zip(*(a[index].tolist() for a in (first, last, self.nbytes)), strict=True)
        indices: dict[Category, int] = {}
        numbers = [
            indices.setdefault(_join(categories[a], categories[b], size), len(indices))
            for a, b, size in rows
        ]
        self.category, self.categories = np.array(numbers, np.int64)[code], [*indices]

    def _match(self) -> None:
        """Number the matches: first those with an id, then those inferred from call order."""
        ids: dict[str, int] = {}
        number = np.full(len(self._table), -1)
        named = np.flatnonzero(self._table.match.astype(bool))
        number[named] = [ids.setdefault(m, len(ids)) for m in self._table.match[named].tolist()]
        first, last = number[[self.begin, self.last]]
        self.match = np.where(first < 0, last, first)
        self.named, self._ids = len(ids), [*ids]
        is_ordered = self.expand(
            k.op in COLLECTIVES or (k.op in P2P and k.peer is not None) for k in self.categories
        )
        unmatched = np.flatnonzero((self.match < 0) & is_ordered.astype(bool))
        channel, side = self._channels_of(unmatched)
        position = occurrence(channel * (int(side.max(initial=0)) + 1) + side)
        keys, number = np.unique(channel * (len(self) + 1) + position, return_inverse=True)
        self.match[unmatched] = self.named + number
        self._channel, self.position = np.divmod(
            np.append(np.zeros(self.named, np.int64), keys), len(self) + 1
        )
        self.match_count = len(self._channel)

    def _channels_of(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return each operation's channel number and its side of the channel."""
        kinds, kind = np.unique(
            self.rank[indices] * len(self.categories) + self.category[indices], return_inverse=True
        )
        pairs = (divmod(k, len(self.categories)) for k in kinds.tolist())
        channels = [channel_of(rank, self.categories[category]) for rank, category in pairs]
        numbers: dict[Channel, int] = {}
        rows = [(numbers.setdefault(channel, len(numbers)), side) for channel, side in channels]
        self._channels = [*numbers]
        channel, side = np.array(rows, np.int64).reshape(-1, 2)[kind].T
        return channel, side

    def match_id(self, match: int) -> str:
        """Return the id of a match, given its number."""
        if match < self.named:
            return self._ids[match]
        return f"{self._channels[self._channel[match]]}#{self.position[match]}"

    def expand(self, values: Iterable[Any]) -> NDArray[Any]:
        """Expand one value per category to one value per operation."""
        return np.array([*values] or [0])[self.category] if len(self) else np.zeros(0, np.int64)

    def is_any_of(self, ops: Iterable[Op]) -> Bools:
        """Return, for each operation, whether it is one of ``ops``."""
        kinds = frozenset(ops)
        return self.expand(category.op in kinds for category in self.categories).astype(bool)

    @cached_property
    def mark(self) -> Bools:
        """Whether each operation is a computation."""
        return self.is_any_of(COMPUTATION)

    @cached_property
    def order(self) -> Ints:
        """The indices of the operations, sorted by start time."""
        order: Ints = np.lexsort((self.seq, self.rank, self.start))
        return order

    def values(self, indices: Ints) -> list[Values]:
        """Return summaries of the operations' tensors, before and after each operation."""
        summary = [*self._table.summary.tolist(), None]  # index -1: no event
        # before a receive, its buffer is undefined
        begin = np.where(self.is_any_of([Op.RECV]), -1, np.stack([self._start_events, self.begin]))
        last = np.where(self.ended, self.last, -1)
        numbers = [*begin[:, indices].tolist(), last[indices].tolist()]
        return [(summary[s] or summary[b], summary[e]) for s, b, e in zip(*numbers, strict=True)]

    @cached_property
    def rows(self) -> list[Span]:
        """The operations as spans."""
        columns = (self.rank, self.seq, self.category, self.start, _optional(self.end), self.match)
        ids = [*self._ids, *[None] * (self.match_count - self.named + 1)]  # index -1: no match
        rows = zip(*(c.tolist() for c in columns), self.values(np.arange(len(self))), strict=True)
        fields: list[tuple[Any, Any]] = [
            (category[:2], category[2:]) for category in self.categories
        ]
        return [
            Span(
                *(rank, seq, *fields[category][0], start, *fields[category][1], ids[match], end, *v)
            )
            for rank, seq, category, start, end, match, v in rows
        ]


class Pairs:
    """Columns of the messages between operations, and of the operations of each collective.

    ``collective`` has one element per operation: the number of its collective, which is below
    ``collective_count``, or -1. These arrays have one element per message:

    ======================  ====================================================
    ``send``, ``recv``      indices of the operations, or -1
    ``sent``, ``received``  times [s], or NaN
    ``src``, ``dst``        ranks
    ``nbytes``              number of bytes
    ``described_by``        index of the operation with the message's attributes
    ``is_started``          False while the message's ranks are paused before it
    ``is_partial``          True for a completed request whose arrival is not in
                            the trace, for example because the trace begins later
    ``is_reply``            True for a reply
    ``p2p``                 False for requests and replies, which are last
    ======================  ====================================================

    Args:
        ops: the operations to pair.
    """

    def __init__(self, ops: Operations) -> None:
        self.ops = ops
        self.collective: Ints = np.full(len(ops), -1)
        members = np.flatnonzero(ops.is_any_of(COLLECTIVES))
        numbers, self.collective[members] = np.unique(ops.match[members], return_inverse=True)
        self.collective_count = len(numbers)
        is_begun = np.zeros(ops.match_count, bool)
        is_begun[ops.match[(ops.match >= 0) & ~ops.scheduled]] = True
        send, recv, request = map(self._first, ([Op.SEND], [Op.RECV], REQUESTS))
        p2p = ops.named + np.flatnonzero(((send >= 0) | (recv >= 0))[ops.named :])
        peer = ops.expand(-1 if k.peer is None else k.peer for k in ops.categories)
        requests = np.flatnonzero(is_begun & (request >= 0))
        requests = requests[peer[request[requests]] >= 0]
        replies = requests[send[requests] >= 0]
        self._requests = request[requests], recv[requests], send[requests]
        self.send = np.concatenate([send[p2p], request[requests], send[replies]])
        self.recv = np.concatenate([recv[p2p], recv[requests], request[replies]])
        self.match = np.concatenate([p2p, requests, replies])
        self.p2p, self.is_started = self.match >= ops.named, is_begun[self.match]
        self.src = np.where(self.send >= 0, ops.rank[self.send], peer[self.recv])
        self.dst = np.where(self.recv >= 0, ops.rank[self.recv], peer[self.send])
        self._measure()

    def _first(self, ops: Iterable[Op]) -> Ints:
        """Return, for each match, the index of the first of these operations, or -1."""
        indices = np.flatnonzero(self.ops.is_any_of(ops) & (self.ops.match >= 0))
        indices = indices[np.argsort(self.ops.start[indices], kind="stable")[::-1]]
        first = np.full(self.ops.match_count, -1)
        first[self.ops.match[indices]] = indices
        return first

    def _measure(self) -> None:
        ops, send, recv = self.ops, self.send, self.recv
        request = ops.is_any_of(REQUESTS)
        self.sent = np.where((send >= 0) & ~ops.scheduled[send], ops.start[send], np.nan)
        is_failed = ops.expand(k.state is State.FAILED for k in ops.categories).astype(bool)
        is_lost = (recv < 0) | (self.p2p & is_failed[recv])
        self.received = np.where(is_lost, np.nan, ops.end[recv])
        is_request = (send >= 0) & request[send]
        self.is_partial = is_request & (recv < 0) & (ops.ended & ~is_failed)[send]
        self.described_by = np.where(
            (recv >= 0) & request[recv], recv, np.where(send >= 0, send, recv)
        )
        self.is_reply = ~self.p2p & (self.described_by == recv)
        payload = np.where(is_request & (recv >= 0), recv, np.where(send >= 0, send, recv))
        self.nbytes = ops.nbytes[payload]

    def sums(self) -> list[tuple[int, int, int, int]]:
        """Return ``(source, destination, messages, bytes)`` for each pair of ranks."""
        is_sent = ~np.isnan(self.sent)
        src, dst = self.src[is_sent], self.dst[is_sent]
        base = int(max(src.max(initial=0), dst.max(initial=0))) + 1
        pairs, pair = np.unique(src * base + dst, return_inverse=True)
        sizes = np.bincount(pair, weights=self.nbytes[is_sent], minlength=len(pairs))
        columns = (pairs // base, pairs % base, np.bincount(pair, minlength=len(pairs)), sizes)
        return list(zip(*(column.astype(int).tolist() for column in columns), strict=True))

    # -- as objects ---------------------------------------------------------------

    def matches(self) -> dict[tuple[int, int], str]:
        """Return the match id of each operation, by ``(rank, seq)``."""
        ops = self.ops
        is_matched = ops.match >= 0
        ids = [*map(ops.match_id, range(ops.match_count))]
        numbers = zip(
            *(column[is_matched].tolist() for column in (ops.rank, ops.seq, ops.match)), strict=True
        )
        return {(rank, seq): ids[match] for rank, seq, match in numbers}

    def messages(self) -> list[Message]:
        """Return the messages, sorted by send time; messages that were never sent come last."""
        ops, missing = self.ops, len(self.ops)
        position = np.full(missing + 1, missing)  # the last element represents a missing end
        position[ops.order] = np.arange(missing)
        first = np.minimum(position[self.send], position[self.recv])
        order = np.lexsort((first, ~self.p2p, np.nan_to_num(self.sent, nan=np.inf)))
        columns = (self.src, self.dst, self.nbytes, _optional(self.sent), _optional(self.received))
        rows = zip(
            *(c[order].tolist() for c in (*columns, self.p2p, self.send, self.recv)),
            ops.category[self.described_by[order]].tolist(),
            strict=True,
        )
        keys: list[Any] = [*zip(ops.rank.tolist(), ops.seq.tolist(), strict=True), None]
        return [
            Message(
                src,
                dst,
                Op.SEND if p2p else ops.categories[category].op,
                nbytes,
                sent,
                received,
                ops.categories[category].tag,
                ops.categories[category].attributes,
                ops.categories[category].group,
                keys[send],
                keys[recv],
            )
            for src, dst, nbytes, sent, received, p2p, send, recv, category in rows
        ]

    def requests(self) -> list[tuple[Span, Span | None, Span | None]]:
        """Return each request with its arrival and reply, if known, sorted by start time."""
        rows: list[Any] = [*self.ops.rows, None]
        columns = [[rows[i] for i in ends.tolist()] for ends in self._requests]
        return sorted(
            zip(*columns, strict=True), key=lambda ends: (ends[0].start, ends[0].rank, ends[0].seq)
        )


def _join(first: Category, last: Category, nbytes: int) -> Category:
    """Return the category of an operation with these first and last events."""
    return Category(
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


def occurrence(key: Ints) -> Ints:
    """Return the number of equal elements before each element.

    >>> occurrence(np.array([5, 7, 5, 5])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(key, kind="stable")
    heads = np.flatnonzero(np.diff(key[order], prepend=key[order][:1] - 1))
    lengths = np.diff(np.append(heads, len(key)))
    positions = np.empty(len(key), np.int64)
    positions[order] = np.arange(len(key)) - np.repeat(heads, lengths)
    return positions


def _optional(times: Floats) -> NDArray[Any]:
    """Return times as objects, with None for NaN."""
    objects = times.astype(object)
    objects[np.isnan(times)] = None
    return objects
