"""Tensors before and after each operation, rank beside rank.

projection.py compares the ranks, scene.py makes the marks.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.tensors.projection import project
from distkit.views.tensors.scene import draw
from distkit.views.widget.view import SceneView


class Tensors(SceneView):
    """Shows the values of each message and collective, before and after, on every rank.

    A slider goes from operation to operation. Each rank has a heat map, a histogram and the
    numbers; a line says whether the ranks hold the same, who differs, and by how much. Of a
    tensor with more than 64 elements it shows 64, at equal strides.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Event, Op, State, Summary
    >>> ones = Summary((1.0, 1.0), 2**0.5, 1.0, 1.0, 2)
    >>> said = dict(nbytes=8, shape=(2,), dtype="float32")
    >>> Tensors(EventLog([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, summary=ones, **said),
    ...                Event(1, 0, Op.RECV, State.STARTED, 0.0, peer=0, **said),
    ...                Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, summary=ones, **said)]))
    Tensors: 2 ranks
      rank 0 → rank 1  float32 [2] · at 0 µs
        = rank 1 received what rank 0 sent
        values: colours: ±1; rank 0 1 to 1, norm 1.41; rank 1 1 to 1, norm 1.41
    """

    def _project(self, trace: EventLog) -> Json:
        return draw(project(trace, live=self._live))
