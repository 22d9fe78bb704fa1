"""A parameter server at work: keys on servers, pushes and pulls under way, who waits for whom.

What happened is read in server_story.py and server_waits.py, the projection is in
server_projection.py, the browser's painter in js/, the static one in server_static.py.
"""

from __future__ import annotations

from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json
from distkit.views.servers.projection import project
from distkit.views.servers.static import to_svg, to_table
from distkit.views.widget.assets import css, esm
from distkit.views.widget.view import WholeView

#: These parts of the picture mostly grow; of them only what is new travels.
GROWING = ("beats", "gradients", "held", "updates", "known", "status", "present")


class Servers(WholeView):
    """Shows a run with a parameter server in trace time, message by message.

    Each server has its keys with their versions, and an inbox per key in which gradients wait for
    an update. A gradient carries the version that it was computed from; an update tells whose
    gradients went in, and how late they were. Workers that wait point at those they wait for.
    Space plays, arrows step from message to message, page up and down from update to update.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Event, Op, State
    >>> roles = {r: {"name": n, "role": n} for r, n in enumerate(("worker", "server"))}
    >>> facts = dict(attributes={"key": "w", "version": 1, "workers": (0,), "late": (0,)})
    >>> asked = dict(peer=1, attributes={"key": "w"}, match="kv:0:0:0", nbytes=8, dtype="float32")
    >>> Servers(EventLog([Event(0, 0, Op.PUSH, State.STARTED, 0.0, **asked),
    ...                Event(1, 0, Op.RECV, State.COMPLETED, 0.1, **asked | {"peer": 0}),
    ...                Event(1, 1, Op.MARK, State.STARTED, 0.1, **facts),
    ...                Event(1, 1, Op.MARK, State.COMPLETED, 0.2, **facts)],
    ...               {"ranks": roles}))
    Servers: 1 worker, 1 server
      server: w v1 (8 B)
      1 push (8 B), 0 pulls (0 B), 1 update; gradients of staleness 0: 1
    """

    _esm = esm("servers")
    _css = css("servers")

    def _project(self, trace: EventLog) -> Json:
        return project(trace, live=self._live)

    def _changes(self, before: Json, now: Json) -> Json:
        """Of the parts that grow: how much of them is as it was, and what comes after that."""
        grown = {name: _grown(before[name], now[name]) for name in GROWING}
        return {**now, **grown}

    def _svg(self) -> str:
        return to_svg(self._data)

    def __repr__(self) -> str:
        return to_table(self._data)


def _grown(before: list[object], now: list[object]) -> Json:
    pairs = zip(before, now, strict=False)
    keep = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(now)))
    return {"keep": keep, "more": now[keep:]}
