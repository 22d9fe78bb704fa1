"""The operations of a trace as bars: one by one while its run goes on, then in columns."""

from __future__ import annotations

from collections.abc import Iterable

from distkit.events import Event, State
from distkit.trace.columns import Table
from distkit.trace.log import EventLog
from distkit.trace.training import is_note
from distkit.views.scene.frame import Json
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.packing import lettered, packed

#: Up to so many operations are told one by one, more of them in columns.
FEW = 1_000

#: At most so many operations are drawn while a run goes on; a whole trace has no such limit.
MAX_BARS = 20_000


class Bars:
    """Bars and arrows of one trace, which may still grow.

    Args:
        trace: so far.
        live: whether its run goes on.
        thin: tell fewer values.

    >>> from distkit.events import Op
    >>> bars = Bars(EventLog([], {}), live=True)
    >>> len(bars.take([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4)])["bars"])
    1
    """

    def __init__(self, trace: EventLog, live: bool, *, thin: bool = False) -> None:
        self._thin, self._live = thin, live
        self._known: set[tuple[int, int, State]] = set()
        self._table = Table.of(())
        self.columns = Columns(EventLog((), trace.meta) if live else trace, live=live)
        if live:
            self.take(trace.events)

    def take(self, events: Iterable[Event]) -> Json:
        """Take in events, each rank's in time order; what they change in the picture."""
        if not self._live:  # all of it is known
            return {"bars": [], "arrows": [], **self.columns.frame}
        told = {(e.rank, e.seq, e.state): e for e in events if not is_note(e)}
        fresh = [e for key, e in told.items() if key not in self._known]
        before, meta = self.columns, self.columns.meta
        if fresh:
            self._known |= told.keys()
            self._table = Table.of(fresh, self._table)
            self.columns = Columns(EventLog.of(self._table, meta), MAX_BARS, live=True)
        return self.columns.changes(before)

    def end(self, trace: EventLog) -> Json:
        """The run is over: take in its whole trace; what that changes, and what caused what."""
        patch, whole = self.take(trace.events), self.columns.whole
        self._live, self.columns = False, Columns(trace)
        if whole:
            return {**patch, **self.columns.frame, "causes": self.columns.explained()}
        return lettered(packed(self.columns, thin=self._thin))  # more than was drawn: all anew

    def picture(self) -> Json:
        """All of them, as the painter of the timeline takes them."""
        few = self._live or len(self.columns.ops) <= FEW
        return self.columns.picture() if few else packed(self.columns, thin=self._thin)
