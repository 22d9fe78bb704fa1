"""The events of a trace in columns, one array per field, for traces with millions of events.

Most fields have the same values in many events. Each combination of these values is a *category*,
which is stored once. :class:`Table` is also a sequence of events, created on first access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distkit.events import LINES, STACK, Attributes, Event, Op, State
from distkit.trace.info import Count, Integer, Rank

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Objects = NDArray[np.object_]


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
    """A sequence of events, stored in columns.

    Args:
        rank, seq: rank and sequence number of each event.
        category: each event's index into ``categories``.
        time: time of each event [s].
        categories: the distinct combinations of the shared fields.
        match: match id of each event, or None.
        summary: summary of each event's values, or None.

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
        match: Objects,
        summary: Objects,
    ) -> None:
        self.rank, self.seq, self.category, self.time = rank, seq, category, time
        self.categories, self.match, self.summary = categories, match, summary

    @classmethod
    def from_events(cls, events: Sequence[Event]) -> Table:
        """Return a table with these events."""
        codes: dict[tuple[Any, ...], int] = {}
        category = [codes.setdefault(key, len(codes)) for key in map(_shared_fields, events)]
        return cls(
            np.array([e.rank for e in events], np.int64),
            np.array([e.seq for e in events], np.int64),
            np.array(category, np.int64),
            np.array([e.time for e in events], np.float64),
            [Category(*key) for key in codes],
            np.array([e.match for e in events], object),
            np.array([e.summary for e in events], object),
        )

    @classmethod
    def concatenate(cls, tables: Iterable[Table]) -> Table:
        """Return one table with the events of all tables, in the order of the tables."""
        all_tables = [cls.from_events(()), *tables]
        codes: dict[Category, int] = {}
        category = [
            t.expand(codes.setdefault(c, len(codes)) for c in t.categories) for t in all_tables
        ]
        return cls(
            np.concatenate([t.rank for t in all_tables]),
            np.concatenate([t.seq for t in all_tables]),
            np.concatenate(category),
            np.concatenate([t.time for t in all_tables]),
            [*codes],
            np.concatenate([t.match for t in all_tables]),
            np.concatenate([t.summary for t in all_tables]),
        )

    def sorted(self) -> Table:
        """Return the events in time order."""
        return self.take(np.lexsort((self.seq, self.rank, self.time)))

    def expand(self, values: Iterable[Any]) -> NDArray[Any]:
        """Expand one value per category to one value per event."""
        return np.array([*values] or [0])[self.category]

    def take(self, indices: Ints) -> Table:
        """Return a table with the events at these indices, in this order."""
        return Table(
            self.rank[indices],
            self.seq[indices],
            self.category[indices],
            self.time[indices],
            self.categories,
            self.match[indices],
            self.summary[indices],
        )

    @cached_property
    def _events(self) -> tuple[Event, ...]:
        columns = (
            self.rank.tolist(),
            self.seq.tolist(),
            self.category.tolist(),
            self.time.tolist(),
            self.match.tolist(),
            self.summary.tolist(),
        )
        fields: list[tuple[Any, Any]] = [
            (category[:2], category[2:]) for category in self.categories
        ]
        return tuple(
            Event(*(rank, seq, *fields[category][0], time, *fields[category][1], match, summary))
            for rank, seq, category, time, match, summary in zip(*columns, strict=True)
        )

    def lines(self) -> Iterator[str]:
        """Yield the source lines of all events, possibly repeated or empty."""
        for category in self.categories:
            attributes = category.attributes
            yield from (category.where, *map(attributes.get, LINES), *attributes.get(STACK, ()))

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
