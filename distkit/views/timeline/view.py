"""The space-time diagram of a run, as a widget: live while the run goes on, a picture afterwards.

The projection is in columns.py, the browser's painter in js/, the static one in static.py.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.scene.text import table
from distkit.views.timeline.bars import packed
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.static import MAX_BARS, to_svg
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import View

#: At most so many operations are drawn while a run goes on; a whole trace has no such limit.
MAX_LIVE = 20_000


class Timeline(View):
    """Draws who was where, when, and what they sent: a lane per rank, time from left to right.

    Arrows are messages, bars are operations, a band ties the members of a collective
    together, grey bars under them are marked computation. While the run goes on, new
    operations appear as they happen; an operation that never ends stays open.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        bare: whether to leave out what is said in words and sums around the picture.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Event, Op, State
    >>> t = EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> Timeline(t)
    Timeline: 2 ranks, 1 message (4 B), 100 ms
      time  what  who              tensor  size  took    line
      0 µs  send  rank 0 → rank 1          4 B   100 ms
      ! still in send: rank 0
    """

    _esm = esm("timeline")
    _css = css("timeline")

    def _look(self, trace: EventLog, live: bool) -> None:
        self._columns = Columns(trace, MAX_LIVE if live else None, live=live)

    def _picture(self) -> Json:
        return packed(self._columns)

    def _drawn(self) -> Json:
        """The operations of the static picture, as objects."""
        return self._less(self._columns.picture(3 * MAX_BARS))

    def _svg(self) -> str:
        return to_svg(self._drawn())

    def __repr__(self) -> str:
        return table(self._drawn())
