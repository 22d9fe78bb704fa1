"""The stage: the ranks of a run as a ring, a tree, a grid …, and its messages on their way.

The projection is in stage_projection.py, the browser's painter in js/, the static one in
storyboard.py; contributions.py follows who contributed to what.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.scene.units import count, human_seconds
from distkit.views.stage.packing import folded
from distkit.views.stage.projection import project, sentence
from distkit.views.stage.static import to_svg
from distkit.views.timeline.projection import Json
from distkit.views.widget.assets import css, esm
from distkit.views.widget.live import Live
from distkit.views.widget.view import WholeView

#: So many beats are written out.
MAX_ROWS = 24


class Stage(WholeView):
    """Plays a run: who sends what to whom, and whose contributions each tensor then holds.

    The ranks stand as their own messages suggest; under each is its tensor as a strip of chunks.
    In a chunk every rank has a layer of its own: it is coloured when that rank's contribution
    is in it, so a full chunk has all colours. A collective of torch's own is a hub in the
    middle. Space plays, arrows step from message to message.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        layout: "ring", "star", "tree", "hypercube", "grid", "hosts" or "roles" (servers in a
            row of their own); None: what fits who talks to whom.

        clock: "time": as measured; "rounds": all messages of a round fly together, as in a
            book. The reader can switch.

    Raises:
        TypeError: ``source`` has no trace.
        ValueError: there is no such layout or clock.

    >>> from distkit.events import Event, Op, State
    >>> t = EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> Stage(t)
    Stage: 2 ranks · ring, 1 round
       100 ms  rank 0 → rank 1, 4 B
    Each strip is a rank's tensor, ...
    """

    _esm = esm("stage")
    _css = css("stage")

    def __init__(
        self, source: EventLog | Live, *, layout: str | None = None, clock: str = "time"
    ) -> None:
        self._layout, self._clock = layout, clock
        super().__init__(source)

    def _project(self, trace: EventLog) -> Json:
        return project(trace, self._layout, live=self._live, clock=self._clock)

    def _changes(self, before: Json, now: Json) -> Json:
        return folded(now)

    def _picture(self) -> Json:
        return folded(self._data)

    def _svg(self) -> str:
        return to_svg(self._data)

    def __repr__(self) -> str:
        return table(self._data)


def table(picture: Json, limit: int = MAX_ROWS) -> str:
    """The beats, one per line."""
    beats, start = picture["beats"], picture["start"]
    name = picture["title"] or "Stage"
    if not beats:
        return f"{name}: nothing was said"
    names = {node["rank"]: node["name"] for node in picture["nodes"]}
    rounds = 1 + max(beat["round"] for beat in beats)
    lines = [f"{name}: {' · '.join(picture['facts'])}, {count(rounds, 'round')}"]
    for beat in beats[:limit]:
        when = "never" if beat["end"] is None else human_seconds(beat["end"] - start)
        lines.append(f"  {when:>7}  {sentence(beat, names)}")
    if len(beats) > limit:
        lines.append(f"  … and {len(beats) - limit:,} more")
    lines += [f"  ! {notice}" for notice in picture["notices"]]
    return "\n".join([*lines, picture["said"]] if picture["said"] else lines)
