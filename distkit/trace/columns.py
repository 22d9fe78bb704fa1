"""The events of a trace in columns, one array per field, for traces of a million events.

Fields that many events share, their *category*, are stored once. :class:`Table` is also a sequence
of events, which are created on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from distkit.events import LINES, STACK, Attributes, Event, Op, State, Summary
from distkit.trace.info import Count, Integer, Rank

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
T = TypeVar("T")


class Category(NamedTuple):
    """Fields shared by many events; see :class:`~distkit.events.Event`."""

    op: Op
    state: State
    peer: Rank | None
    group: str
    nbytes: Count
    shape: tuple[Count, ...]
    dtype: str
    tag: Integer | None
    where: str
    attributes: Attributes


_shared_fields = attrgetter(*Category._fields)


class Table(Sequence[Event]):
    """The events of a trace, in time order.

    Args:
        rank, seq: rank and sequence number of each event.
        category: each event's index into ``categories``.
        time: time of each event [s].
        categories: the distinct combinations of the shared fields.
        match: ``{event index: match}`` of the events with a match.
        summary: ``{event index: summary}`` of the events with values.

    >>> t = Table.from_events([Event(0, 0, Op.SEND, State.STARTED, 0.5, peer=1)])
    >>> t.time.tolist(), t[0].peer
    ([0.5], 1)
    """

    def __init__(
        self,
        rank: Ints,
        seq: Ints,
        category: Ints,
        time: Floats,
        categories: Sequence[Category],
        match: dict[int, str],
        summary: dict[int, Summary],
    ) -> None:
        self.rank, self.seq, self.category, self.time = rank, seq, category, time
        self.categories, self.match, self.summary = categories, match, summary

    @classmethod
    def from_events(cls, events: Sequence[Event]) -> Table:
        """Return a table of events."""
        codes: dict[tuple[Any, ...], int] = {}
        category = [codes.setdefault(key, len(codes)) for key in map(_shared_fields, events)]
        return cls(
            np.array([e.rank for e in events], np.int64),
            np.array([e.seq for e in events], np.int64),
            np.array(category, np.int64),
            np.array([e.time for e in events], np.float64),
            [Category(*key) for key in codes],
            {i: e.match for i, e in enumerate(events) if e.match is not None},
            {i: e.summary for i, e in enumerate(events) if e.summary is not None},
        )

    @classmethod
    def concatenate(cls, tables: Iterable[Table]) -> Table:
        """Return one table with the events of all tables, in the order of the tables."""
        parts = [cls.from_events(()), *tables]
        codes: dict[Category, int] = {}
        category = [t.each(codes.setdefault(c, len(codes)) for c in t.categories) for t in parts]
        starts = [*accumulate(map(len, parts[:-1]), initial=0)]
        return cls(
            np.concatenate([part.rank for part in parts]),
            np.concatenate([part.seq for part in parts]),
            np.concatenate(category),
            np.concatenate([part.time for part in parts]),
            [*codes],
            _shift_indices([part.match for part in parts], starts),
            _shift_indices([part.summary for part in parts], starts),
        )

    def sorted(self) -> Table:
        """Return the events in time order."""
        return self.take(np.lexsort((self.seq, self.rank, self.time)))

    def each(self, values: Iterable[Any]) -> NDArray[Any]:
        """Expand one value per category to one value per event."""
        return np.array([*values] or [0])[self.category]

    def take(self, indices: Ints) -> Table:
        """Return a table of the events with these indices, in this order."""
        position = np.full(len(self), -1)
        position[indices] = np.arange(len(indices))
        return Table(
            self.rank[indices],
            self.seq[indices],
            self.category[indices],
            self.time[indices],
            self.categories,
            _move_indices(self.match, position),
            _move_indices(self.summary, position),
        )

    @cached_property
    def _events(self) -> tuple[Event, ...]:
        columns = (
            self.rank.tolist(),
            self.seq.tolist(),
            self.category.tolist(),
            self.time.tolist(),
        )
        parts: list[tuple[Any, Any]] = [
            (category[:2], category[2:]) for category in self.categories
        ]
        match, summary = self.match.get, self.summary.get
        return tuple(
            Event(
                *(rank, seq, *parts[category][0], time, *parts[category][1], match(i), summary(i))
            )
            for i, (rank, seq, category, time) in enumerate(zip(*columns, strict=True))
        )

    def lines(self) -> Iterator[str]:
        """Yield the source lines of all events."""
        for category in self.categories:
            facts = category.attributes
            yield from (category.where, *map(facts.get, LINES), *facts.get(STACK, ()))

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._events == tuple(other)

    def __repr__(self) -> str:
        return repr(self._events)


def _shift_indices(parts: list[dict[int, T]], starts: list[int]) -> dict[int, T]:
    """Return the values of all parts, whose indices begin at ``starts``."""
    shifted = zip(parts, starts, strict=True)
    return {start + i: value for values, start in shifted for i, value in values.items()}


def _move_indices(values: dict[int, T], position: Ints) -> dict[int, T]:
    """Return values by new position, in order; values whose position is -1 are omitted."""
    moved = zip(position[[*values]].tolist(), values.values(), strict=True)
    return {i: value for i, value in sorted(moved, key=itemgetter(0)) if i >= 0}
