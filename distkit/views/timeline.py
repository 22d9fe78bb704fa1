"""The space-time diagram of a run, as a widget: live while the run goes on, a picture afterwards.

The projection is in projection.py, the browser's painter in js/, the static one in static.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from distkit.events import Event, Trace
from distkit.views.assets import css, esm
from distkit.views.live import Live, Throttle
from distkit.views.projection import Json, Projection
from distkit.views.static import to_svg
from distkit.views.text import table
from distkit.views.theme import theme


def _snapshot(_: object, timeline: Timeline) -> Json:
    return timeline._snapshot()


class Timeline(anywidget.AnyWidget):
    """Draws who was where, when, and what they sent: a lane per rank, time from left to right.

    Arrows are messages, bars are operations, a band ties the members of a collective
    together, grey bars under them are marked computation. While the run goes on, new
    operations appear as they happen; an operation that never ends stays open.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.

    Raises:
        TypeError: ``source`` has no trace.

    >>> from distkit.events import Op, State
    >>> t = Trace([Event(0, 0, Op.SEND, State.STARTED, 0.0, peer=1, nbytes=4),
    ...            Event(1, 0, Op.RECV, State.COMPLETED, 0.1, peer=0, nbytes=4)])
    >>> Timeline(t)
    Timeline: 2 ranks, 1 message (4 B), 100 ms
      time  what  who              tensor  size  took    line
      0 µs  send  rank 0 → rank 1          4 B   100 ms
      ! still in send: rank 0
    """

    _esm = esm()
    _css = css()
    _unsubscribe: Callable[[], None] | None = None
    #: Made when the browser asks, so that a page opened late gets everything so far.
    picture = traitlets.Any().tag(sync=True, to_json=_snapshot)

    def __init__(self, source: Trace | Live) -> None:
        trace, live = _trace_of(source)
        self._lock = threading.RLock()
        self._projection = Projection(trace.meta, live=live is not None)
        self._patches = 0
        self._projection.feed(trace.events)
        super().__init__()
        if live is not None:
            self._follow(live)

    # -- live ---------------------------------------------------------------------

    def _follow(self, run: Live) -> None:
        throttle = Throttle(self._feed)
        ended = threading.Event()

        def receive(events: list[Event]) -> None:
            if events:
                throttle.add(events)
            elif run.finished and not ended.is_set():
                ended.set()
                throttle.flush()
                self._finish(run)

        self._unsubscribe = run.subscribe(receive)
        throttle.add(list(run.trace.events))  # what came before the subscription
        if run.finished:
            receive([])

    def _feed(self, events: list[Event]) -> None:
        with self._lock:
            self._publish(self._projection.feed(events))

    def _finish(self, run: Live) -> None:
        """The run is over: what is open now stays open."""
        trace = run.trace
        with self._lock:
            self._projection.meta, self._projection.live = dict(trace.meta), False
            self._publish(self._projection.feed(trace.events))

    def _publish(self, patch: Json) -> None:
        """Put a patch on the model under a number of its own, so that no reader misses one."""
        state = {f"patch{self._patches}": patch}
        self._patches += 1
        self._send({"method": "update", "state": state, "buffer_paths": []})

    def _snapshot(self) -> Json:
        with self._lock:
            return {**self._projection.snapshot(), "theme": theme(), "next": self._patches}

    def close(self) -> None:
        """Stop following the run, and take the widget off the page."""
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()
        super().close()

    # -- elsewhere ------------------------------------------------------------------

    def __repr__(self) -> str:
        return table(self._snapshot())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and for places without widgets a picture and a table."""
        widget = super()._repr_mimebundle_(**kwargs)
        if widget is None:
            return None
        data, metadata = widget if isinstance(widget, tuple) else (widget, {})
        picture = self._snapshot()
        return {**data, "image/svg+xml": to_svg(picture), "text/plain": table(picture)}, metadata

    def save(self, path: str | Path) -> Path:
        """Write the static picture as an SVG file.

        Args:
            path: ends in ``.svg``.

        Raises:
            ValueError: it ends in anything else.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(
                f"{path}: a timeline is saved as SVG. Use a name that ends in .svg, or "
                "trace.to_html(path) for a page to replay."
            )
        path.write_text(to_svg(self._snapshot()), encoding="utf-8")
        return path


def _trace_of(source: Trace | Live) -> tuple[Trace, Live | None]:
    """The trace so far, and the run if it is still going on."""
    if isinstance(source, Trace):
        return source, None
    trace = getattr(source, "trace", None)
    if not isinstance(trace, Trace):
        raise TypeError(
            f"Timeline draws a distkit.Trace, or a run that has one, not {type(source).__name__}. "
            "Use Timeline(run.trace), or Timeline(Trace.load(path))."
        )
    live = isinstance(source, Live) and not source.finished
    return trace, source if live else None
