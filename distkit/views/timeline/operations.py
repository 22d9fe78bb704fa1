"""Events folded into operations, all at once: an array per fact instead of an object per operation.

The rules are those of :func:`distkit.trace.operations.spans`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit.events import COMPUTATION, Op, State
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
