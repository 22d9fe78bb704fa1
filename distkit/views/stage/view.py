"""The stage: the ranks of a run as a ring, a tree, a grid …, and its messages on their way.

projection.py makes plain data of a run, contributions.py follows who contributed to what,
clocks.py has the keyframes by rounds and by time, scene.py the marks.
"""

from __future__ import annotations

from distkit._format import count, human_seconds
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, flagged
from distkit.views.stage.projection import project, sentence
from distkit.views.stage.scene import NOTHING, draw
from distkit.views.widget.live import Live
from distkit.views.widget.view import SceneView

#: The largest number of keyframes in the text.
MAX_ROWS = 24


class Stage(SceneView):
    """Animates a run: the messages between ranks, and the contributions in each tensor.

    The messages determine the layout of the ranks. Each rank has its tensor as a strip of numbered
    chunks. A chunk has one layer per rank: it has that rank's colour when the chunk contains its
    contribution, so a complete chunk has all colours; "values" shows numbers instead. A
    collective of torch is a hub in the middle. Space plays, arrows go from round to round,
    or from message to message.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        layout: "circle", "ring", "star", "tree", "hypercube", "grid", "hosts" or "roles" (servers
            in a row of their own); None: chosen by the messages, "circle" if they fit no other.
        clock: "rounds": all messages of a round move together, as in a textbook; "time": as
            measured. The reader can switch.

    Raises:
        TypeError: ``source`` has no trace.
        ValueError: there is no such layout or clock.

    >>> from distkit.events import Event, Op, State
    >>> t = EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> Stage(t)
    Stage: 2 ranks · ring, 1 round
       100 ms  rank 0 → rank 1, 4 B
    Each strip is a rank's tensor; ...
    """

    def __init__(
        self, source: EventLog | Live, *, layout: str | None = None, clock: str = "rounds"
    ) -> None:
        self._layout, self._clock = layout, clock
        super().__init__(source)

    def _project(self, trace: EventLog) -> Json:
        self._run = project(trace, self._layout, live=self._live, clock=self._clock)
        return draw(self._run)

    def __repr__(self) -> str:
        return table(self._run)


def table(picture: Json, limit: int = MAX_ROWS) -> str:
    """The keyframes, one per line."""
    keyframes, start = picture["keyframes"], picture["start"]
    name = picture["title"] or "Stage"
    if not keyframes:
        return f"{name}: {NOTHING}"
    names = {node["rank"]: node["name"] for node in picture["nodes"]}
    rounds = 1 + max(keyframe["round"] for keyframe in keyframes)
    lines = [f"{name}: {' · '.join(picture['facts'])}, {count(rounds, 'round')}"]
    for keyframe in keyframes[:limit]:
        when = "never" if keyframe["end"] is None else human_seconds(keyframe["end"] - start)
        lines.append(f"  {when:>7}  {sentence(keyframe, names)}")
    if len(keyframes) > limit:
        lines.append(f"  … and {len(keyframes) - limit:,} more")
    lines += [f"  {line}" for line in flagged(picture)]
    return "\n".join([*lines, picture["said"]] if picture["said"] else lines)
