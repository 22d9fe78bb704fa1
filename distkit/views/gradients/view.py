"""Gradients of a training loop: per layer and rank, before and after the all-reduce, step by step.

projection.py compares the ranks, scene.py makes the marks.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.gradients.projection import project
from distkit.views.gradients.scene import draw
from distkit.views.scene.frame import Json
from distkit.views.widget.view import SceneView


class Gradients(SceneView):
    """Shows what training does: gradients, replicas, loss and speed, of a watched loop.

    Per layer and rank: norm, histogram, heat map, the cosine between ranks, and the result of
    the all-reduce; the gradient of one process beside it if it was recorded; how far
    the replicas have drifted apart; loss, learning rate, samples per second, live.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one, of a program whose loop is
            inside :func:`~distkit.watch_gradients`.

    Raises:
        TypeError: ``source`` has no trace.

    >>> Gradients(EventLog())  # doctest: +ELLIPSIS
    Gradients
      nothing was watched: put the loop into with dk.watch_gradients(model) as watch, ...
    """

    def _project(self, trace: EventLog) -> Json:
        return draw(project(trace, live=self._live))
