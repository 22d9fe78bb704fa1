"""Collects the events of a run, which form its trace, and the output of its ranks."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from distkit import imports
from distkit.cluster.notebook import in_notebook, line_label, sources
from distkit.events import Event, Op, State
from distkit.recording.encoding import decode_rows
from distkit.recording.recorder import to_table
from distkit.trace.info import SEQ_STRIDE, RankEnd, Replacement, RunInfo, hosts_of

if TYPE_CHECKING:
    from distkit.trace.columns import Table
    from distkit.trace.trace import Trace

#: Maximum number of events of a trace; later events are only counted.
MAX_EVENTS = 2_000_000

#: A line of output: rank, "stdout" or "stderr", text.
OutputLine = tuple[int, str, str]

#: Maximum number of characters per rank for ``run.output``.
MAX_OUTPUT = 10_000_000

#: Maximum number of a rank's lines that a notebook shows; too much output makes it unusable.
MAX_LINES = 1_000


class LiveTrace:
    """The event buffer of a run.

    Rows stay packed until they are read, because unpacking would slow down ranks on a busy machine.

    Args:
        info: initial metadata of the run.
    """

    def __init__(self, info: RunInfo) -> None:
        self.info, self._info_lock = structs.replace(info, groups={}), threading.RLock()
        #: Converts ranks' times to the trace's times, which exclude the pauses of a stepped run.
        self.clock: Callable[[float], float] = float
        #: Returns the clock offset of a rank's machine, or None for the local machine.
        self.offset: Callable[[int], Any] = lambda rank: None
        #: When the ranks of a hanging or interrupted run are released [s]. Calls that fail later
        #: remain open, because only the release ended them.
        self.released_at = math.inf
        self._live_clocks: Any = None  # other machines' clocks, once they send events
        self.event_count = self.dropped = 0  # numbers of kept and dropped events
        self.rows: Counter[int] = Counter()  # number of rows of each rank's current process
        self._first_seq: Counter[int] = Counter()  # offset of that process's sequence numbers
        self._tables: list[Table] = []  # the unpacked events
        self._ended = False
        #: Rows not yet unpacked.
        self._packed_rows: list[tuple[int, int, bytes, Any]] = []
        self._unpack_lock = threading.RLock()  # reentrant: a subscriber may read the trace
        self._subscribers: list[Callable[[Sequence[Event]], None]] = []

    def add(self, rank: int, count: int, packed: bytes) -> None:
        """Add events from a rank."""
        with self._info_lock:  # ranks' messages arrive in several threads
            if self.event_count + count > MAX_EVENTS:
                self.dropped += count
                return
            self.event_count += count
        self.rows[rank] += count
        self._packed_rows.append((rank, self._first_seq[rank], packed, self.offset(rank)))
        if self._subscribers:
            self._unpack()

    def add_metadata(self, field: str, key: Any, value: Any) -> None:
        """Add metadata of a rank or a group; earlier traces do not change."""
        with self._info_lock:
            self.update(**{field: {**getattr(self.info, field), key: value}})

    def update(self, **fields: Any) -> None:
        """Replace fields of the run's metadata."""
        with self._info_lock:
            self.info = structs.replace(self.info, **fields)

    def begin_process(self, rank: int) -> None:
        """Attribute later events of a rank to a new process."""
        self._first_seq[rank] += SEQ_STRIDE
        self.rows[rank] = 0

    def fail_pending(self, rank: int, end: float) -> None:
        """Mark the pending operations of a rank as failed after its process has exited."""
        latest = {
            e.seq: e for e in self._table() if e.rank == rank and e.seq >= self._first_seq[rank]
        }
        self._append_events(
            [
                replace(e, state=State.FAILED, time=self.clock(end), summary=None)
                for e in latest.values()
                if e.state not in (State.COMPLETED, State.FAILED)
            ]
        )

    def mark_replacement(self, rank: int, start: float, end: float) -> None:
        """Record the interval of a rank's replacement as a failed operation."""
        seq, label = self._first_seq[rank] - 1, {"label": "replaced"}
        self._append_events(
            [
                Event(rank, seq, Op.MARK, state, self.clock(t), attributes=label)
                for state, t in ((State.STARTED, start), (State.FAILED, end))
            ]
        )

    def snapshot(self, ends: dict[int, RankEnd], replacements: list[Replacement]) -> Trace:
        """Return the trace of the events so far.

        Args:
            ends: how ranks have ended.
            replacements: the replaced processes.
        """
        from distkit.trace.trace import Trace  # lazy: not every run's trace is read

        table, until = self._table().sorted(), self.info.until
        info = structs.replace(
            self.info,
            until=self.clock(time.monotonic()) if until is None else until,
            clocks=self._live_clocks.offsets(hosts_of(self.info)) if self._live_clocks else {},
            ends=ends,
            replaced=replacements,
            sources=sources([*table.lines(), *(end.where for end in ends.values())]),
        )
        return Trace.from_table(table, info)

    # -- subscribers ------------------------------------------------------------

    def subscribe(self, callback: Callable[[Sequence[Event]], None]) -> Callable[[], None]:
        """Call ``callback`` with all events so far, each new batch, and finally an empty list."""
        with self._unpack_lock:
            if table := self._table():
                callback(table)
            self._subscribers.append(callback)
        if self._ended:
            callback([])
        return lambda: self._subscribers.remove(callback)

    def end(self) -> None:
        """Notify the subscribers of the end."""
        self._ended = True
        for callback in list(self._subscribers):
            callback([])

    def _table(self) -> Table:
        """Return all events so far, in order of arrival."""
        from distkit.trace.columns import Table  # lazy: importing numpy delays a cluster's start

        with self._unpack_lock:
            self._unpack()
            self._tables = [Table.concatenate(self._tables)]
            return self._tables[0]

    def _unpack(self) -> None:
        """Unpack rows into events and pass each event to the subscribers once."""
        with self._unpack_lock:
            packed = list(self._packed_rows)
            tables = [self._events_of(*batch) for batch in packed]
            del self._packed_rows[: len(packed)]  # last, because an interrupt may occur earlier
            for table in tables:
                self._append(table)

    def _events_of(self, rank: int, first: int, packed: bytes, offset: Any) -> Table:
        """Unpack rows and add ``first`` to their sequence numbers."""
        rows, to_local_time = decode_rows(packed), float
        if offset and rows:
            clocks = imports.load("distkit_hosts.clocks")
            self._live_clocks = self._live_clocks or clocks.LiveClocks()
            to_local_time = self._live_clocks.converter(rank, offset, rows[0][3], rows[-1][3])
        rows = [
            row
            for row in rows
            if row[2] is not State.FAILED or to_local_time(row[3]) < self.released_at
        ]
        return to_table(
            rank, rows, line_label, lambda t: self.clock(to_local_time(t)), first_seq=first
        )

    def _append(self, events: Table) -> None:
        """Add events and pass them to the subscribers."""
        with self._unpack_lock:
            self._tables.append(events)
            for callback in list(self._subscribers) if events else ():
                callback(events)

    def _append_events(self, events: list[Event]) -> None:
        from distkit.trace.columns import Table  # lazy: importing numpy delays a cluster's start

        self.event_count += len(events)
        self._append(Table.from_events(events))


# -- output ----------------------------------------------------------------------------------------


class OutputBuffer:
    """Collects chunks of output and prints labeled lines in the thread that waits for the run."""

    def __init__(self, noun: str = "rank") -> None:
        self._noun, self._lines = noun, list[OutputLine]()
        self._partial: dict[tuple[int, str], str] = {}
        self._output: dict[int, list[str]] = defaultdict(list)
        self._length: Counter[int] = Counter()  # length of each rank's output
        self._line_counts: Counter[int] = Counter()  # number of each rank's lines
        self._max_lines = MAX_LINES if in_notebook() else float("inf")
        self._changed = threading.Condition()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add a chunk of a rank's output."""
        with self._changed:
            space = MAX_OUTPUT - self._length[rank]
            if space > 0:
                self._output[rank].append(text[:space])
            self._length[rank] += len(text)
            *lines, partial = (self._partial.pop((rank, stream), "") + text).split("\n")
            if partial:
                self._partial[rank, stream] = partial
            self._lines += [(rank, stream, _final(line)) for line in lines]
            self._changed.notify_all()

    def output_of(self, rank: int) -> str:
        """Return a rank's output, up to ``MAX_OUTPUT`` characters."""
        with self._changed:
            text, excess = "".join(self._output[rank]), self._length[rank] - MAX_OUTPUT
        return f"{text}\n… {excess:,} characters were discarded …\n" if excess > 0 else text

    def end(self) -> None:
        """Complete the lines at the end of the run."""
        with self._changed:
            self._lines += [(*key, _final(line)) for key, line in sorted(self._partial.items())]
            self._changed.notify_all()

    def pop_lines(self) -> list[OutputLine]:
        """Remove and return the complete lines."""
        with self._changed:
            lines, self._lines = self._lines, []
        return lines

    def print_now(self) -> None:
        """Print the complete lines; a notebook shows the first ``MAX_LINES`` of each rank."""
        shown = []
        for rank, stream, line in self.pop_lines():
            self._line_counts[rank] += 1
            if self._line_counts[rank] <= self._max_lines:
                shown.append((rank, stream, line))
            elif self._line_counts[rank] == self._max_lines + 1:
                shown.append((rank, stream, f"… more lines are in run.output[{rank}] …"))
        for stream, group in itertools.groupby(shown, lambda item: item[1]):
            text = "".join(f"[{self._noun} {rank}] {line}\n" for rank, _, line in group)
            print(text, end="", file=getattr(sys, stream), flush=True)

    def print_until(self, is_finished: Callable[[], bool], timeout: float | None) -> bool:
        """Print lines until ``is_finished()``; return False after ``timeout`` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while self._lines or not is_finished():
            wait = min(0.1, deadline - time.monotonic())
            if wait <= 0:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._lines or is_finished(), wait)
            self.print_now()
        return True


def _final(line: str) -> str:
    """Return the text after the last carriage return, such as the last state of a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]
