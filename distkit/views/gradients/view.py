"""Gradients of a training loop: per layer and rank, before and after the all-reduce, step by step.

The projection is in projection.py, the browser's painter in js/, the static one in static.py.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.gradients.projection import project
from distkit.views.gradients.static import to_svg, to_table
from distkit.views.scene.frame import Json
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import WholeView


class Gradients(WholeView):
    """Shows what training does: gradients, replicas, loss and speed, of a watched loop.

    Per layer and rank: norm, histogram, heat map, the cosine between ranks, and the result of
    the all-reduce; the gradient of one process beside it if it was recorded; how far
    the replicas have drifted apart; loss, learning rate, samples per second, live.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one, of a program whose loop is
            inside :func:`~distkit.watch_gradients`.

    Raises:
        TypeError: ``source`` has no trace.

    >>> Gradients(EventLog())
    Gradients: nothing was watched
      ! put the loop into: with dk.watch_gradients(model) as watch, and call watch.step()
    """

    _esm = esm("gradients")
    _css = css("gradients")

    def _project(self, trace: EventLog) -> Json:
        return project(trace, live=self._live)

    def _changes(self, before: Json, now: Json) -> Json:
        """Only the steps that are new or changed travel."""
        known = {step["n"]: step for step in before["steps"]}
        changed = [step for step in now["steps"] if known.get(step["n"]) != step]
        return {**now, "steps": changed, "kept": [s["n"] for s in now["steps"]]}

    def _svg(self) -> str:
        return to_svg(self._data)

    def __repr__(self) -> str:
        return to_table(self._data)
