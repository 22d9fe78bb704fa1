"""The operations of a trace as bars: one by one while its run goes on, then in columns."""

from __future__ import annotations

from collections.abc import Sequence

from distkit.events import Event
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.packing import lettered, packed
from distkit.views.timeline.projection import Projection

#: Up to so many operations are told one by one, more of them in columns.
FEW = 1_000


class Bars:
    """Bars and arrows of one trace, which may still grow.

    Args:
        trace: so far.
        live: whether its run goes on.
        thin: tell fewer values.

    >>> from distkit.events import Op, State
    >>> bars = Bars(EventLog([], {}), live=True)
    >>> len(bars.take([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4)])["bars"])
    1
    """

    def __init__(self, trace: EventLog, live: bool, *, thin: bool = False) -> None:
        self._thin = thin
        self._projection = Projection(trace.meta, live=live)
        #: Of the whole trace, once that was looked at.
        self.columns = None if live else Columns(trace)
        if live:
            self._projection.feed(trace.events)

    def take(self, events: Sequence[Event]) -> Json:
        """Take in events of the run; what they change in the picture."""
        if self.columns is not None:  # all of it is known
            return {"bars": [], "arrows": [], **self.columns.frame}
        return self._projection.feed(events)

    def end(self, trace: EventLog) -> Json:
        """The run is over: take in its whole trace; what that changes, and what caused what."""
        projection = self._projection
        patch = projection.feed(trace.events)
        self.columns = Columns(trace)
        if projection.whole:
            return {**patch, **self.columns.frame, "causes": self.columns.explained()}
        return lettered(packed(self.columns, thin=self._thin))  # more than was drawn: all anew

    def picture(self) -> Json:
        """All of them, as the painter of the timeline takes them."""
        if self.columns is None:
            return self._projection.snapshot()
        few = len(self.columns.ops) <= FEW
        return self.columns.picture() if few else packed(self.columns, thin=self._thin)

    def first(self, most: int) -> Json:
        """About the first ``most`` of them, for static pictures."""
        return self.picture() if self.columns is None else self.columns.picture(most)
