"""The panel of an experiment in a notebook, with controls and with results in tabs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
import traitlets

from distkit._format import human_seconds
from distkit.errors import RunInterrupted, RunStopped
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views.scenes import Gradients, Servers, Stage
from distkit.views.timeline.view import Timeline
from distkit.views.widget.assets import esm_of
from distkit_experiments.results import Activity, to_html

if TYPE_CHECKING:
    from distkit_experiments.experiment import Experiment

#: Maximum number of events for Stage and Servers, which show every message of a run.
MAX_STAGE_EVENTS = 20_000

NO_RUNS = "<p>No runs yet. Press Run to start one with these values.</p>"

RUNS = "Runs"
VIEWS = {"Timeline": Timeline, "Servers": Servers, "Stage": Stage, "Gradients": Gradients}


class Bar:
    """A progress bar, indeterminate during a run.

    Args:
        stop: the callback of the Stop button.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.progress = _with_class(ipywidgets.FloatProgress(max=1.0), "dkx-bar")
        self.progress.layout.width = "auto"
        self.status = _html("dkx-words")
        self.stop = ipywidgets.Button(description="Stop", icon="stop", disabled=True)
        self.stop.tooltip = "End the run on every rank"
        _with_class(self.stop, "dkx-stop").on_click(lambda _: stop())
        css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
        sheet = ipywidgets.HTML(f"<style>{css}</style>", layout={"display": "none"})
        self.widget = _with_class(
            ipywidgets.HBox([sheet, self.stop, self.progress, self.status]), "dkx-row"
        )

    def refresh(self, experiment: Experiment) -> None:
        """Show the current activity."""
        activity = experiment.activity or Activity("")
        self.stop.disabled = not activity.can_stop
        bar, active = self.progress, experiment.activity is not None
        (bar.add_class if active else bar.remove_class)("dkx-unknown")
        bar.value = float(active)
        status = f"<span aria-live=polite>{escape(activity.text)}</span>" if activity.text else ""
        if activity.since is not None:
            status += (
                f" <i>{escape(human_seconds(round(time.monotonic() - activity.since, 1)))}</i>"
            )
        self.status.value = status


class RunButton(anywidget.AnyWidget):
    """The Run button, which first reads the values of the controls from the page.

    Args:
        controls: the widgets of the controls; values on the page may not be synchronized yet.
        run: called on each click.
    """

    _esm = esm_of(Path(__file__).with_name("press.js"))
    disabled = traitlets.Bool(False).tag(sync=True)
    controls: Any = traitlets.List().tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, controls: Sequence[Any], run: Callable[[], None]) -> None:
        keys_of = {c: [k for k in ("index", "value") if k in c.keys] for c in controls}
        # widgets with choices have an index, which is preferred to the value
        self._synced = {c: keys[0] for c, keys in keys_of.items() if keys}
        self.click = run
        super().__init__(controls=[*self._synced.items()])
        self.on_msg(self._handle_click)

    def _handle_click(self, _: Any, content: Mapping[str, Any], __: Any) -> None:
        for control, state in zip(self._synced, content["shown"], strict=True):
            control.set_state(state)
        self.click()


class RunTable(anywidget.AnyWidget):
    """The table of runs.

    Args:
        choose: called with the run's number on each click.
    """

    _esm = esm_of(Path(__file__).with_name("rows.js"))
    value = traitlets.Unicode(NO_RUNS).tag(sync=True)
    shown = traitlets.Int().tag(sync=True)

    def __init__(self, choose: Callable[[int], None]) -> None:
        super().__init__(_dom_classes=["dkx-table"])  # anywidget ignores later changes
        self.on_msg(lambda _, content, __: choose(int(content["run"])))


class Panel:
    """The widgets of one experiment.

    Args:
        experiment: the experiment.
        has_picture: whether the user's picture replaces the plot; it is redrawn when a control
            changes.
    """

    def __init__(self, experiment: Experiment, has_picture: bool) -> None:
        self._lock, self._shown_runs = threading.RLock(), 0
        self._traces: list[Trace] = []
        self._bar = Bar(experiment.stop)
        controls = [c.widget for c in experiment.settings.controls.values()]
        self._run = RunButton(controls, experiment.start)
        self._bar.widget.children = (self._run, *self._bar.widget.children)
        self._message, self._printed = _html("dkx-message"), _html("dkx-printed")
        self._table, self._chart = RunTable(self.choose), _html("dkx-chart")
        for widget in controls if has_picture else ():
            widget.observe(lambda _: self.draw(experiment), "value")
        results = [self._chart, self._table] if has_picture else [self._table, self._chart]
        self._tabs = Tabs(_with_class(ipywidgets.HBox(results), "dkx-runs"))
        column = [
            _html("dkx-title", f"<strong>{escape(experiment.name)}</strong>"),
            _with_class(ipywidgets.GridBox(controls), "dkx-controls"),
            self._bar.widget,
            self._message,
            self._printed,
        ]
        side = _with_class(ipywidgets.VBox(column), "dkx-side")
        self.widget = _with_class(ipywidgets.HBox([side, self._tabs.widget]), "distkit-experiment")
        self.refresh(experiment)
        self.draw(experiment)

    def refresh(self, experiment: Experiment) -> None:
        """Update the panel, from any thread."""
        with self._lock:
            activity, records = experiment.activity, list(experiment.records)
            self._bar.refresh(experiment)
            self._message.value = message(experiment)
            self._printed.value = _output_html(list(experiment.printed))
            if len(records) != len(self._traces):
                self._traces = [r.run.trace for r in records]
                self._table.value = to_html(records)
                self.draw(experiment)
            if activity is None and len(records) != self._shown_runs:
                self._shown_runs = len(records)
                self._show(len(records))
            self._run.disabled = activity is not None  # enable only after showing the run

    def draw(self, experiment: Experiment) -> None:
        """Draw the plot or the user's picture, or show the error that it raises."""
        try:
            self._chart.value = experiment.chart_svg()
        except Exception as error:  # raised by the user's function
            self._chart.value = _error_html(type(error).__name__, str(error))

    def choose(self, run: int) -> None:
        """Show a run from the table."""
        with self._lock:
            if not self._run.disabled and 0 < run <= len(self._traces):
                self._show(run)

    def _show(self, run: int) -> None:
        self._table.shown = run
        self._tabs.show(self._traces[run - 1], run)

    def close(self) -> None:
        """Remove the panel from the page, but keep the user's widgets."""
        _close([*self._tabs.widget.children[1:], self.widget])


class Tabs:
    """Tabs with the table of runs and the views of one run; a view is created when first opened."""

    def __init__(self, runs: Any) -> None:
        self._runs, self._trace, self._names = runs, Trace(), list[str]()
        self.widget = ipywidgets.Tab([runs], titles=[RUNS])
        self.widget.add_class("dkx-tabs")
        self.widget.observe(lambda _: self._create_view(), "selected_index")

    def show(self, trace: Trace, run: int) -> None:
        """Show another run; the tab at the same position stays selected, if there is one."""
        old, selected = self.widget.children[1:], self.widget.selected_index or 0
        self._trace, self._names = trace, available_views(trace)
        boxes = [_with_class(ipywidgets.VBox(), "dkx-picture") for _ in self._names]
        self.widget.children = [self._runs, *boxes]
        self.widget.titles = [RUNS, *(f"{name} of run {run}" for name in self._names)]
        self.widget.selected_index = selected if selected <= len(boxes) else 0
        self._create_view()
        _close(old)

    def _create_view(self) -> None:
        index = self.widget.selected_index
        if index and not self.widget.children[index].children:
            self.widget.children[index].children = [VIEWS[self._names[index - 1]](self._trace)]


def _close(widgets: Iterable[Any]) -> None:
    """Close widgets, including the children of boxes."""
    for widget in widgets:
        _close(getattr(widget, "children", ()) if isinstance(widget, ipywidgets.VBox) else ())
        widget.close()


def available_views(trace: Trace) -> list[str]:
    """Return the names of the views that apply to a run."""
    marks = [e for e in trace if e.op is Op.MARK]
    has_stage = bool(trace.messages) and len(trace) <= MAX_STAGE_EVENTS
    has_gradients = any(e.attributes.get("watched") == "gradient" for e in marks)
    stage = "Servers" if any(r.role == "server" for r in trace.info.ranks.values()) else "Stage"
    return ["Timeline", *[stage] * has_stage, *["Gradients"] * has_gradients]


def message(experiment: Experiment) -> str:
    """Return the error of the latest run, or its remarks, as HTML."""
    error = experiment.error
    if error is not None and not isinstance(error, (RunInterrupted, RunStopped)):
        return _error_html(type(error).__name__, str(error))
    last = [] if experiment.activity else experiment.records[-1:]
    notes = [str(error)] if error else [remark for r in last for remark in r.remarks]
    return "".join(f"<div class=dkx-note role=status>{escape(note)}</div>" for note in notes)


def _error_html(kind: str, text: str) -> str:
    head, _, traceback = text.partition("\n\nTraceback")
    details = f"<pre tabindex=0>Traceback{escape(traceback)}</pre>" if traceback else ""
    return f"<div class=dkx-error role=alert><b>{escape(kind)}</b> {escape(head)}{details}</div>"


def _with_class(widget: Any, name: str) -> Any:
    """Add a CSS class to a widget and return the widget."""
    widget.add_class(name)
    return widget


def _html(name: str, value: str = "") -> Any:
    return _with_class(ipywidgets.HTML(value), name)


def _output_html(printed: list[str]) -> str:
    if not printed:
        return ""
    text = escape("\n".join(printed))
    return f'<pre tabindex=0 role=log aria-label="output from the ranks">{text}</pre>'
