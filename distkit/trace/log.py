"""The events of a run in time order, and the operations and messages derived from them.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from distkit.events import COLLECTIVES, Event, Message, Span
from distkit.trace.info import RunInfo, hosts_of, traffic

if TYPE_CHECKING:
    import pandas

    from distkit.trace.columns import Table
    from distkit.trace.matching import Pairs

Log = TypeVar("Log", bound="EventLog")
T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by key, in order of first occurrence.

    >>> grouped([3, 1, 4, 1, 5], lambda n: n % 2)
    {1: [3, 1, 1, 5], 0: [4]}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class EventLog(Sequence[Event]):
    """An immutable sequence of events, with the operations and messages derived from them.

    :class:`~distkit.Trace` adds diagnosis, files and views. It documents the arguments.
    """

    events: Sequence[Event] = ()
    info: RunInfo = field(default_factory=RunInfo)

    def __init__(self, events: Iterable[Event] = (), info: RunInfo = RunInfo()) -> None:  # noqa: B008
        sorted_events = tuple(sorted(events, key=lambda e: (e.time, e.rank, e.seq)))
        object.__setattr__(self, "events", sorted_events)
        object.__setattr__(self, "info", info)

    @classmethod
    def from_table(cls: type[Log], table: Table, info: RunInfo) -> Log:
        """Return a trace that creates its events on first access.

        Args:
            table: the events in columns, in time order.
            info: metadata of the run.
        """
        trace = cls((), info)
        trace.__dict__.update(events=table, table=table)
        return trace

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, index: Any) -> Any:
        return self.events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return (
            f"<{type(self).__name__}: {len(self)} events on {len(self.ranks)} ranks, "
            f"{len(self.messages)} messages, {self.seconds:.3g} s{dropped}>"
        )

    def __hash__(self) -> int:
        return id(self)

    # -- queries ------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """The number of events that the bounded buffers dropped."""
        return sum(self.info.dropped.values())

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks in ``info`` and the ranks that have events, sorted."""
        return sorted({*range(self.info.world_size), *self.info.ranks, *self.table.rank.tolist()})

    @property
    def start(self) -> float:
        """Time of the first event [s]."""
        return float(self.table.time[0]) if self.events else 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the last."""
        return float(self.table.time[-1]) - self.start if self.events else 0.0

    @cached_property
    def table(self) -> Table:
        """The events in columns: one array per field."""
        from distkit.trace.columns import Table  # lazy: importing numpy delays a cluster's start

        return Table.from_events(self.events)

    @cached_property
    def by_rank(self) -> dict[int, list[Event]]:
        """The events of each rank, in time order."""
        return {r: [] for r in self.ranks} | grouped(self.events, lambda e: e.rank)

    @cached_property
    def pairs(self) -> Pairs:
        """The operations, messages and collectives in columns."""
        from distkit.trace.matching import Operations, Pairs

        return Pairs(Operations(self.table))

    @cached_property
    def spans(self) -> list[Span]:
        """The operations, sorted by start time."""
        rows, order = self.pairs.ops.rows, self.pairs.ops.order
        return [rows[i] for i in order.tolist()]

    @cached_property
    def matches(self) -> dict[tuple[int, int], str]:
        """The match id of each operation, by ``(rank, seq)``.

        The two ends of a message share an id, as do the calls of one collective.
        Point-to-point calls match first in, first out, per sender, receiver, group and tag;
        the n-th collective of a rank on a group matches the n-th of every other member.
        """
        return self.pairs.matches()

    @cached_property
    def messages(self) -> list[Message]:
        """The messages between ranks, including requests and replies, sorted by send time."""
        return self.pairs.messages()

    @cached_property
    def collectives(self) -> list[list[Span]]:
        """The collectives, each as the list of the participating ranks' calls."""
        return self.grouped_by_match(s for s in self.spans if s.op in COLLECTIVES)

    def grouped_by_match(self, spans: Iterable[Span]) -> list[list[Span]]:
        """Group operations by their match; each unmatched operation forms its own group."""
        groups = grouped(spans, lambda s: self.matches.get((s.rank, s.seq), (s.rank, s.seq)))
        return list(groups.values())

    @cached_property
    def host_traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """``{(from, to): (messages, bytes)}`` for the messages between hosts and within each host.

        Collectives are not included, because the backend's transfers are not recorded.
        """
        return traffic(hosts_of(self.info), self.pairs.sums())

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per event: its fields, label, match id and hosts.

        Requires pandas. ``time`` is relative to the first event. See :class:`Event` for the fields;
        ``summary`` is not included.
        """
        import pandas as pd

        columns = [
            "rank",
            "seq",
            "op",
            "state",
            "time",
            "peer",
            "group",
            "nbytes",
            "shape",
            "dtype",
            "tag",
            "where",
            "label",
            "match",
            "attributes",
            "host",
            "peer_host",
        ]
        host_of = hosts_of(self.info)
        rows = [
            (
                e.rank,
                e.seq,
                str(e.op),
                str(e.state),
                e.time - self.start,
                e.peer,
                e.group,
                e.nbytes,
                e.shape,
                e.dtype,
                e.tag,
                e.where,
                e.label,
                e.match or self.matches.get((e.rank, e.seq)),
                dict(e.attributes),
                host_of.get(e.rank),
                None if e.peer is None else host_of.get(e.peer),
            )
            for e in self.events
        ]
        return pd.DataFrame(rows, columns=columns).astype({"peer": "Int64", "tag": "Int64"})
