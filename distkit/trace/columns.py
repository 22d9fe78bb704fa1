"""The events of a trace in columns, one array per field, for traces of a million events.

Fields that many events share, their *category*, are stored once. :class:`Table` is also a sequence
of events, which are created on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distkit.events import Attributes, Event, Op, State, Summary, label_of
from distkit.trace.info import Count, Integer, Rank

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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

    @property
    def label(self) -> str:
        """The attributes as display text."""
        return label_of(self)


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

    >>> t = Table.of([Event(0, 0, Op.SEND, State.STARTED, 0.5, peer=1)])
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
    def of(cls, events: Sequence[Event], before: Table | None = None) -> Table:
        """Return a table of events in time order, appended to another table."""
        none = np.zeros(0, np.int64)
        old = before or cls(none, none, none, np.zeros(0), [], {}, {})
        codes: dict[tuple[Any, ...], int] = {
            category: n for n, category in enumerate(old.categories)
        }
        category = [codes.setdefault(key, len(codes)) for key in map(_shared_fields, events)]
        first = len(old)
        return cls(
            np.append(old.rank, np.array([e.rank for e in events], np.int64)),
            np.append(old.seq, np.array([e.seq for e in events], np.int64)),
            np.append(old.category, np.array(category, np.int64)),
            np.append(old.time, np.array([e.time for e in events], np.float64)),
            [*old.categories, *(Category(*key) for key in list(codes)[len(old.categories) :])],
            old.match | {i: e.match for i, e in enumerate(events, first) if e.match is not None},
            old.summary
            | {i: e.summary for i, e in enumerate(events, first) if e.summary is not None},
        )

    def each(self, values: Iterable[Any]) -> NDArray[Any]:
        """Expand one value per category to one value per event."""
        return np.array([*values] or [0])[self.category]

    def part(self, mask: NDArray[np.bool_]) -> Table:
        """Return a table of the events that a mask selects."""
        position = np.cumsum(mask) - 1
        return Table(
            self.rank[mask],
            self.seq[mask],
            self.category[mask],
            self.time[mask],
            self.categories,
            {int(position[i]): match for i, match in self.match.items() if mask[i]},
            {int(position[i]): summary for i, summary in self.summary.items() if mask[i]},
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
