"""Defines the base classes of all views of a trace.

A view has a pure projection, from a trace to plain data, and two renderers, one live and one
static. All scenes share the same renderers. During a run, a thread sends updates at a limited rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import anywidget
import traitlets

from distkit.events import Event
from distkit.trace.log import EventLog
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.renderer import to_svg, to_table
from distkit.views.widget.assets import css, esm, with_theme
from distkit.views.widget.snapshot import NotebookSnapshot

#: PERIOD is the minimum time between updates of a live view [s]. GATHER is the time to wait for
#: events from all ranks [s].
PERIOD, GATHER = 0.06, 0.012
#: Minimum pause between updates, as a multiple of the last update's CPU time; ranks need the CPU.
PAUSE = 4


@runtime_checkable
class Live(Protocol):
    """A run that may still be in progress, such as :class:`distkit.cluster.Run`."""

    @property
    def trace(self) -> EventLog:
        """The events recorded so far."""

    @property
    def finished(self) -> bool:
        """True if the trace is complete."""

    def subscribe(self, callback: Callable[[Sequence[Event]], None], /) -> Callable[[], None]:
        """Call ``callback`` with all events so far, with each new batch, and finally with none.

        The callback may be called from any thread.

        Returns:
            A function that cancels the subscription.
        """


class Notifier:
    """A thread that calls ``act`` soon after a notification, once per burst of notifications.

    The pause grows with the CPU time of a call, so large pictures are updated less often.

    Args:
        act: called in the notifier's thread.
        period: minimum time between two calls [s].
        gather: time to wait for more notifications [s].
    """

    def __init__(self, act: Callable[[], None], period: float, gather: float = GATHER) -> None:
        self._act, self._period, self._gather = act, period, gather
        self._due, self._now, self._closed = threading.Event(), threading.Event(), False
        threading.Thread(target=self._work, daemon=True).start()

    def notify(self, *, now: bool = False) -> None:
        """Request a call to ``act``, without a pause if ``now``. Thread-safe; never blocks."""
        if now:
            self._now.set()
        self._due.set()

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self.notify(now=True)

    def _work(self) -> None:
        pause = 0.0
        while True:
            self._now.wait(pause)
            self._due.wait()
            self._now.wait(self._gather)
            if self._closed:
                return
            self._due.clear()
            self._now.clear()
            start = time.thread_time()
            self._act()
            pause = max(self._period, PAUSE * (time.thread_time() - start))


class View(anywidget.AnyWidget):
    """A picture of a trace; subclasses define its content.

    Args:
        source: a :class:`~distkit.Trace`, or a run that has one.
        bare: whether to leave out notices, explanations, verdicts and totals.

    Raises:
        TypeError: ``source`` has no trace.
    """

    #: Minimum time between two updates during a run [s].
    period = PERIOD
    _unsubscribes: tuple[Callable[[], None], ...] = ()
    _following = False  # True during the run
    _updates = 0  # number of updates sent to the browser
    _bare = False
    #: Computed when it is sent, and always complete, so that pages opened later receive everything.
    picture = traitlets.Any().tag(sync=True, to_json=lambda _, view: view._snapshot())

    def __init__(self, source: EventLog | Live, *, bare: bool = False) -> None:
        trace, live = trace_of(source, type(self).__name__)
        self._bare = bare
        self._process(trace, live is not None)
        self._open()
        if live is not None:
            self._follow(live)

    def _open(self) -> None:
        """Initialize the widget, after the data to draw has been set."""
        self._lock = threading.RLock()
        self._static = NotebookSnapshot(self._draw, lambda: self._following)
        super().__init__()

    def _draw(self) -> tuple[str, str]:
        """Return the static picture and the table, protected from concurrent updates."""
        with self._lock:
            return self._svg(), repr(self)

    # -- defined by subclasses ------------------------------------------------------

    def _process(self, trace: EventLog, live: bool) -> None:
        """Process the current trace, which is incomplete if ``live``."""
        raise NotImplementedError

    def _picture(self) -> Json:
        """Return the whole picture as plain data."""
        raise NotImplementedError

    def _svg(self) -> str:
        """Return the static picture."""
        raise NotImplementedError

    # -- live -----------------------------------------------------------------------

    def _follow(self, run: Live) -> None:
        """Process the events of a run as they arrive, and its trace after it has ended."""
        self._following = True
        notifier = Notifier(partial(self._update, run, live=True), self.period)

        def receive(events: Sequence[Event]) -> None:
            if events:
                notifier.notify()
            elif run.finished:
                notifier.close()
                self._update(run, live=False)

        self._unsubscribes = run.subscribe(receive), notifier.close
        if run.finished:
            receive([])

    def _update(self, run: Live, *, live: bool) -> None:
        with self._lock:
            if not self._following:  # another thread has processed the end of the run
                return
            self._following = live
            self._process(run.trace, live)
            self._publish()
        if not live:
            self._static.refresh()

    def _publish(self) -> None:
        """Send the picture to the browser."""
        self._updates += 1
        self.send_state("picture")

    def _snapshot(self) -> Json:
        with self._lock:
            return {**with_theme(self._apply_bare(self._picture())), "updates": self._updates}

    def _apply_bare(self, picture: Json) -> Json:
        """Return the picture, without notices, explanations and verdicts if the view is bare."""
        bare = {"notices": [], "notes": [], "verdicts": [], "description": "", "bare": True}
        return picture | bare if self._bare else picture

    def close(self) -> None:
        """Unsubscribe from the run and remove the widget from the page."""
        unsubscribes, self._unsubscribes = self._unsubscribes, ()
        for unsubscribe in unsubscribes:
            unsubscribe()
        super().close()

    def fold(self, title: str = "") -> None:
        """Fold the displayed view into one line that expands to the view.

        ``title`` replaces the title of the view in this line.
        """
        own_title, _, details = repr(self).partition("\n")[0].partition(": ")
        self._static.fold(f"{type(self).__name__} of {title or own_title}: {details}")

    def remove(self) -> None:
        """Remove the displayed view from the notebook."""
        self._static.remove()
        self.close()

    # -- output -----------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """Display the widget, and the picture that the notebook keeps."""
        data, metadata = self._repr_mimebundle_() or ({}, {})
        self._static.show(data, metadata)

    def save(self, path: str | Path, *, dark: bool = False) -> Path:
        """Write the static picture as SVG, for slides and papers.

        Args:
            path: file name with the suffix ``.svg``.
            dark: whether to draw on a dark background.

        Raises:
            ValueError: The path has a different suffix.
        """
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise ValueError(
                f"{path}: pictures are saved as SVG. Use a name that ends in .svg, or "
                "trace.to_html(path) for a replay page."
            )
        picture = self._svg()
        path.write_text(svg.dark(picture) if dark else picture, encoding="utf-8")
        return path


class SceneView(View):
    """A view whose picture is recomputed from the whole trace, at most twice a second."""

    _esm = esm("scene")
    _css = css("scene")
    period = 0.5
    #: Returns the result of ``scene.marks.picture``, given a trace and whether the run is ``live``.
    _project: ClassVar[staticmethod[..., Json]]
    _data: Json

    def _process(self, trace: EventLog, live: bool) -> None:
        self._data = self._project(trace, live=live)

    def _picture(self) -> Json:
        return self._data

    def _svg(self) -> str:
        return to_svg(self._apply_bare(self._data))

    def __repr__(self) -> str:
        return to_table(self._apply_bare(self._data))


def trace_of(source: EventLog | Live, view: str) -> tuple[EventLog, Live | None]:
    """Return the current trace, and the run if it is still in progress."""
    if isinstance(source, EventLog):
        return source, None
    # read before the trace, so that the end of the run is not missed
    is_live = isinstance(source, Live) and not source.finished
    trace = getattr(source, "trace", None)
    if not isinstance(trace, EventLog):
        raise TypeError(
            f"{view} needs a distkit.Trace or a run, not {type(source).__name__}. "
            f"Use {view}(run.trace), or {view}(Trace.load(path))."
        )
    return trace, source if is_live else None
