"""Events folded into operations, all at once: an array per fact instead of an object per operation.

The rules are those of :func:`distkit.matching.spans`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distkit.events import COMPUTATION, Event, Op, State

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_STATES = {state: i for i, state in enumerate(State)}
_STARTED, _SCHEDULED = _STATES[State.STARTED], _STATES[State.SCHEDULED]
_ENDS = [_STATES[State.COMPLETED], _STATES[State.FAILED]]


class Look(NamedTuple):
    """What many operations have in common."""

    op: Op
    state: State
    peer: int | None
    group: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    tag: int | None
    where: str
    label: str


class Operations:
    """The operations of a trace, sorted by rank and number.

    ``rank``, ``seq``, ``start`` and ``end`` [s] (NaN: not ended), ``nbytes``, ``look`` (an index
    of ``looks``), ``match`` (-1, or an index of ``matches``) and ``row`` have one element per
    operation, ``begin`` and ``last`` the numbers of its first and last event.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        rank = _ints([e.rank for e in events])
        seq = _ints([e.seq for e in events])
        state = _ints(list(map(_STATES.__getitem__, [e.state for e in events])))
        time = np.array([e.time for e in events], float)
        order = np.lexsort((seq, rank))
        fresh = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(seq[order], prepend=-1) != 0)
        heads = np.flatnonzero(fresh)
        self.begin = order[heads]
        self.last = order[np.append(heads[1:], len(order))[: len(heads)] - 1]
        self.rank, self.seq = rank[self.begin], seq[self.begin]
        self.begun = _first(state[order] == _STARTED, heads, order)
        self.start = time[self.begun]
        self.scheduled = state[self.last] == _SCHEDULED
        self.ended: Bools = np.isin(state[self.last], _ENDS)
        self.end = np.where(self.ended, time[self.last], np.nan)
        nbytes = _ints([e.nbytes for e in events])[order]
        self.nbytes: Ints = np.maximum.reduceat(nbytes, heads) if len(heads) else nbytes
        self.span = (float(time.min()), float(time.max())) if len(time) else None
        self._describe()

    def __len__(self) -> int:
        return len(self.rank)

    def _describe(self) -> None:
        firsts = [self._events[i] for i in self.begin.tolist()]
        lasts = [self._events[i] for i in self.last.tolist()]
        codes: dict[tuple[Any, ...], int] = {}
        keys = (
            (e.op, f.state, e.peer if f.peer is None else f.peer, e.group, nbytes,
             e.shape or f.shape, e.dtype or f.dtype, e.tag if f.tag is None else f.tag,
             e.where, e.label)
            for e, f, nbytes in zip(firsts, lasts, self.nbytes.tolist(), strict=True)
        )  # fmt: skip
        self.look = _ints([codes.setdefault(key, len(codes)) for key in keys])
        self.looks = [Look(*key) for key in codes]
        matches = [e.match or f.match for e, f in zip(firsts, lasts, strict=True)]
        numbers: dict[str | None, int] = {None: -1}
        self.match = _ints([numbers.setdefault(m, len(numbers) - 1) for m in matches])
        self.matches = [m for m in numbers if m is not None]

    def each(self, fact: Iterable[Any]) -> NDArray[Any]:
        """A fact of each look as a fact of each operation."""
        return np.array([*fact] or [0])[self.look] if len(self) else np.zeros(0, np.int64)

    def among(self, ops: Iterable[Op]) -> Bools:
        """Whether each operation is one of these."""
        some = frozenset(ops)
        return self.each(look.op in some for look in self.looks).astype(bool)

    @cached_property
    def mark(self) -> Bools:
        """Whether an operation is no communication."""
        return self.among(COMPUTATION)

    @cached_property
    def row(self) -> Ints:
        """The row of its lane: the topmost that is free when an operation begins."""
        found = np.zeros(len(self), np.int64)
        until = np.where(self.ended, self.last, len(self._events))
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
    for i, first, last in zip(crowded.tolist(), begin[crowded].tolist(), until[crowded].tolist(),
                              strict=True):  # fmt: skip
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        heapq.heappush(busy, (last, row))
        rows[i] = row
    return rows


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
