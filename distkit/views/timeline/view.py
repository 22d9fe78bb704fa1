"""Defines the timeline widget.

columns.py contains the projection, js/ the browser renderer, and static.py the static renderer.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, notice_lines
from distkit.views.timeline.columns import MAX_WITH_VALUES, Columns, packed
from distkit.views.timeline.static import MAX_BARS, to_svg, totals
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import View

#: Maximum number of operations that are drawn during a run, and of operations that are drawn with
#: the values of their tensors after it. During a run of more than MAX_WITH_VALUES operations, no
#: values are sent.
MAX_LIVE, MAX_COMPLETE_WITH_VALUES = 20_000, 2_000


class Timeline(View):
    """Draws the calls of each rank over time: one lane per rank, time from left to right.

    Bars are operations, arrows are messages, and bands connect the members of a collective. Thin
    bars at the bottom of a lane are marked computation. During the run, new operations appear as
    they happen. An operation that never ends stays open.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        bare: whether to leave out notices and totals.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Event, Op, State
    >>> t = EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> Timeline(t)
    Timeline: 2 ranks, 1 message (4 B), 100 ms from first to last event
      ! still in send: rank 0
    """

    _esm = esm("timeline")
    _css = css("timeline")

    def _process(self, trace: EventLog, live: bool) -> None:
        self._columns = Columns(trace, MAX_LIVE if live else None, live=live)

    def _picture(self) -> Json:
        is_long = self._following and len(self._columns.ops) > MAX_WITH_VALUES
        return packed(self._columns, 0 if is_long else MAX_COMPLETE_WITH_VALUES)

    def _drawn(self) -> Json:
        """Return the data of the static picture, with operations and messages as objects."""
        return self._apply_bare(self._columns.picture(3 * MAX_BARS))

    def _svg(self) -> str:
        return to_svg(self._drawn())

    def __repr__(self) -> str:
        return describe(self._drawn())


def describe(picture: Json) -> str:
    """Return the title, totals and notices of a timeline as text."""
    if picture.get("bare"):
        return f"{picture['title']}: {', '.join(picture['facts'])}"
    facts = ", ".join([*picture["facts"], *totals(picture)])
    facts += " from first to last event" * (picture["start"] is not None)
    return "\n  ".join(
        [
            f"{picture['title'] or 'Timeline'}: {facts or 'nothing was recorded'}",
            *(f"{value} {label}" for value, label, _ in picture["host_totals"]),
            *notice_lines(picture),
        ]
    )
