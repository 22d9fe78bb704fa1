"""The events of a run as they arrive from its ranks, and the trace that they make so far."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec import structs

from distkit import companions
from distkit.cluster.notebook import place, sources
from distkit.events import WORLD, Event, Op, State
from distkit.recording.plain import decode_rows, encode_rows
from distkit.recording.recorder import to_event
from distkit.trace.hosts import hosts_of
from distkit.trace.info import APART, RankEnd, Replacement, RunInfo
from distkit.trace.trace import Trace

if TYPE_CHECKING:
    from distkit.cluster.process_host import Offset

#: A trace keeps at most this many events; it says how many more there were.
LIMIT = 2_000_000


class LiveTrace:
    """Rows are kept packed until somebody looks: on a busy machine unpacking slows the ranks.

    Args:
        info: what is known of the run, to which others add.
    """

    def __init__(self, info: RunInfo) -> None:
        self.info, self._noting = structs.replace(info, groups={}), threading.RLock()
        #: Puts the ranks' times into the reader's; a stepped run's leaves the pauses out.
        self.clock: Callable[[float], float] = float
        #: The clock of the machine that a rank is on; None if it is this machine's.
        self.offset: Callable[[int], Offset | None] = lambda rank: None
        self._clocks: Any = None  # those of other machines, once one has told events
        self.arrived = self.dropped = 0  # events
        self.rows: Counter[int] = Counter()  # that arrived from each rank's present process
        self._first: Counter[int] = Counter()  # where the operations of that process begin
        self._events: list[Event] = []
        #: Arrived, not yet looked at.
        self._packed: list[tuple[int, int, bytes, Offset | None]] = []
        self._unpacking = threading.RLock()  # a subscriber may look at the trace
        self._subscribers: list[Callable[[list[Event]], None]] = []

    def add(self, rank: int, count: int, packed: bytes, *, here: bool = False) -> None:
        """Add events of a rank; ``here``: their times are by this machine's clock."""
        with self._noting:  # several ranks' messages come at once
            if self.arrived + count > LIMIT:
                self.dropped += count
                return
            self.arrived += count
        self.rows[rank] += count
        offset = None if here else self.offset(rank)
        self._packed.append((rank, self._first[rank], packed, offset))
        if self._subscribers:
            self._unpack()

    def note(self, field: str, key: Any, fact: Any) -> None:
        """Add a fact about a rank or a group; traces that were made before do not change."""
        with self._noting:
            self.update(**{field: {**getattr(self.info, field), key: fact}})

    def forget(self, field: str, key: Any) -> bool:
        """Remove a fact that :meth:`note` added; True if there was one."""
        with self._noting:
            known = dict(getattr(self.info, field))
            found = known.pop(key, None)
            self.update(**{field: known})
        return found is not None

    def update(self, **facts: Any) -> None:
        """Replace facts about the run."""
        with self._noting:
            self.info = structs.replace(self.info, **facts)

    def begin_anew(self, rank: int) -> None:
        """Take what arrives from now on as another process's, in this rank's place."""
        self._first[rank] += APART
        self.rows[rank] = 0

    def fail_pending(self, rank: int, at: float) -> None:
        """The operations that a rank's process was in fail: the process has ended."""
        self._unpack()
        first = self._first[rank]
        its = Trace(e for e in self._events if e.rank == rank and e.seq >= first)
        pending = [s for s in its.spans if s.end is None]
        rows = [
            (
                s.seq - first,
                s.op,
                State.FAILED,
                at,
                (
                    s.peer,
                    s.group,
                    s.nbytes,
                    s.shape,
                    s.dtype,
                    s.tag,
                    s.where,
                    dict(s.attributes),
                    s.match,
                ),
                None,
            )
            for s in pending
        ]
        self.add(rank, len(rows), encode_rows(rows), here=True)

    def mark_replacement(self, rank: int, how: str, began: float, ended: float) -> None:
        """Show when a rank's place was vacant, and why."""
        fields = (None, WORLD, 0, (), "", None, "", (("label", f"replaced: {how}"),), None)
        rows = [
            (-1, Op.MARK, state, at, fields, None)
            for state, at in ((State.STARTED, began), (State.COMPLETED, ended))
        ]
        self.add(rank, len(rows), encode_rows(rows), here=True)

    def so_far(self, ends: dict[int, RankEnd], replaced: list[Replacement]) -> Trace:
        """The trace of what has arrived.

        Args:
            ends: of the ranks that have ended.
            replaced: the processes that were replaced.
        """
        self._unpack()
        events, until = list(self._events), self.info.until
        info = structs.replace(
            self.info,
            until=self.clock(time.monotonic()) if until is None else until,
            clocks=self._clocks.compared(hosts_of(self.info)) if self._clocks else {},
            ends=ends,
            replaced=replaced,
            sources=sources(events, [end.where for end in ends.values()]),
        )
        return Trace(events, info)

    def latest(self, ranks: Iterable[int]) -> dict[int, int]:
        """The number of the latest operation of each of these ranks."""
        self._unpack()
        wanted = set(ranks)
        return {e.rank: e.seq for e in self._events if e.rank in wanted}

    # -- subscribers ------------------------------------------------------------

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Hand over all events so far now, others as they arrive; returns how to end that."""
        with self._unpacking:
            self._unpack_all()
            if self._events:
                callback(list(self._events))
            self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def end(self) -> None:
        """Tell the subscribers that nothing more will come."""
        for callback in list(self._subscribers):
            callback([])

    def _unpack(self) -> None:
        """Turn what has arrived into events, and hand them to the subscribers: each one once."""
        with self._unpacking:
            if new := self._unpack_all():
                for callback in list(self._subscribers):
                    callback(new)

    def _unpack_all(self) -> list[Event]:
        packed = list(self._packed)
        new = []
        for rank, first, bundle, offset in packed:
            rows = decode_rows(bundle)
            clock = self._reader(rank, offset, rows) if offset and rows else self.clock
            new += [
                to_event(rank, row if not first else (row[0] + first, *row[1:]), place, clock)
                for row in rows
            ]
        del self._packed[: len(packed)]  # only now: an interrupt may have come before
        self._events.extend(new)
        return new

    def _reader(self, rank: int, offset: Offset, rows: list[Any]) -> Callable[[float], float]:
        """What puts the times of these rows into the reader's."""
        if self._clocks is None:
            self._clocks = companions.load("distkit_hosts.live_clocks").LiveClocks()
        to_here = self._clocks.reader(rank, offset, rows[0][3], rows[-1][3])
        return lambda there: self.clock(to_here(there))
