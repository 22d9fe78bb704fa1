"""The panel of an experiment in a notebook: controls, and in tabs beside them what they gave."""

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
from distkit.views import Gradients, Servers, Stage, Timeline
from distkit.views.widget.assets import esm_of
from distkit_experiments.results import THEMED, Activity, to_html

if TYPE_CHECKING:
    from distkit_experiments.experiment import Experiment

#: The stage follows every message of a run; of longer ones it would make too much.
STAGED = 20_000

NONE = "<p>No run yet: Run makes one with these values.</p>"

RUNS = "Runs"
VIEWS = {"Timeline": Timeline, "Servers": Servers, "Stage": Stage, "Gradients": Gradients}


class Bar:
    """Moves with an experiment; without known end it only says that something moves.

    Args:
        stop: what the Stop button calls.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.progress = _marked(ipywidgets.FloatProgress(max=1.0), "dkx-bar")
        self.progress.layout.width = "auto"
        self.words = _html("dkx-words")
        self.stop = ipywidgets.Button(description="Stop", icon="stop", disabled=True)
        self.stop.tooltip = "End the run on every rank"
        _marked(self.stop, "dkx-stop").on_click(lambda _: stop())
        css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
        sheet = ipywidgets.HTML(f"<style>{css}</style>", layout={"display": "none"})
        row = ipywidgets.HBox([sheet, self.stop, self.progress, self.words])
        self.widget = _marked(row, "dkx-row")

    def refresh(self, experiment: Experiment) -> None:
        """Show what the experiment does now."""
        now = experiment.activity or Activity("", share=0.0)
        self.stop.disabled = not now.can_stop
        bar = self.progress
        (bar.add_class if now.share is None else bar.remove_class)("dkx-unknown")
        bar.value = 1.0 if now.share is None else now.share
        told = f"<span aria-live=polite>{escape(now.words)}</span>" if now.words else ""
        if now.since is not None:
            told += f" <i>{escape(human_seconds(round(time.monotonic() - now.since, 1)))}</i>"
        self.words.value = told


class Press(anywidget.AnyWidget):
    """The Run button: it runs with what the page shows of the controls.

    Args:
        controls: widgets, of which the page may show more than they have told so far.
        run: what to call then.
    """

    _esm = esm_of(Path(__file__).with_name("press.js"))
    disabled = traitlets.Bool(False).tag(sync=True)
    controls: Any = traitlets.List().tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, controls: Sequence[Any], run: Callable[[], None]) -> None:
        told = {c: [k for k in ("index", "value") if k in c.keys] for c in controls}
        self._told = {c: keys[0] for c, keys in told.items() if keys}  # of a choice, its index
        self.click = run
        super().__init__(controls=[*self._told.items()])
        self.on_msg(self._pressed)

    def _pressed(self, _: Any, content: Mapping[str, Any], __: Any) -> None:
        for control, state in zip(self._told, content["shown"], strict=True):
            control.set_state(state)
        self.click()


class Rows(anywidget.AnyWidget):
    """The table of runs.

    Args:
        choose: what to call with the number of a run whose row was clicked.
    """

    _esm = esm_of(Path(__file__).with_name("rows.js"))
    value = traitlets.Unicode(NONE).tag(sync=True)
    shown = traitlets.Int().tag(sync=True)

    def __init__(self, choose: Callable[[int], None]) -> None:
        super().__init__(_dom_classes=["dkx-table"])  # anywidget takes in no later one
        self.on_msg(lambda _, content, __: choose(int(content["run"])))


class Panel:
    """The widgets of one experiment.

    Args:
        experiment: what they show.
        own: it has a picture of the reader's, which is drawn again when a control moves.
    """

    def __init__(self, experiment: Experiment, own: bool) -> None:
        self._lock, self._seen = threading.RLock(), 0
        self._traces: list[Trace] = []
        self._bar = Bar(experiment.stop)
        shown = [c.widget for c in experiment.settings.controls.values()]
        self._run = Press(shown, experiment.start)
        self._bar.widget.children = (self._run, *self._bar.widget.children)
        title = _html("dkx-title", f"<strong>{escape(experiment.name)}</strong>")
        self._message, self._printed = _html("dkx-message"), _html("dkx-printed")
        self._table, self._chart = Rows(self.choose), _html("dkx-chart")
        for widget in shown if own else ():
            widget.observe(lambda _: self.draw(experiment), "value")
        parts = [self._chart, self._table] if own else [self._table, self._chart]
        self._tabs = Tabs(_marked(ipywidgets.HBox(parts), "dkx-runs"))
        grid = _marked(ipywidgets.GridBox(shown), "dkx-controls")
        column = [title, grid, self._bar.widget, self._message, self._printed]
        side = _marked(ipywidgets.VBox(column), "dkx-side")
        self.widget = _marked(ipywidgets.HBox([side, self._tabs.widget]), "distkit-experiment")
        self.refresh(experiment)
        self.draw(experiment)

    def refresh(self, experiment: Experiment) -> None:
        """Show where the experiment is now. From any thread."""
        with self._lock:
            now, records = experiment.activity, list(experiment.records)
            self._bar.refresh(experiment)
            self._message.value = message(experiment)
            self._printed.value = _lines(list(experiment.printed))
            if len(records) != len(self._traces):
                self._traces = [r.run.trace for r in records]
                self._table.value = to_html(records)
                self.draw(experiment)
            if now is None and len(records) != self._seen:
                self._seen = len(records)
                self._show(len(records))
            self._run.disabled = now is not None  # last: who may run again sees the latest run

    def draw(self, experiment: Experiment) -> None:
        """Draw the plot, or the reader's picture, or why there is none, in the page's colours."""
        try:
            self._chart.value = experiment.drawn(THEMED)
        except Exception as error:  # of the reader's function
            self._chart.value = _trouble(type(error).__name__, str(error))

    def choose(self, run: int) -> None:
        """Show a run of the table."""
        with self._lock:
            if not self._run.disabled and 0 < run <= len(self._traces):
                self._show(run)

    def _show(self, run: int) -> None:
        self._table.shown = run
        self._tabs.show(self._traces[run - 1], run)

    def close(self) -> None:
        """Take it off the page; the reader's own widgets stay."""
        _close([*self._tabs.widget.children[1:], self.widget])


class Tabs:
    """All runs, and pictures of one: each is made when it is first looked at."""

    def __init__(self, runs: Any) -> None:
        self._runs, self._trace, self._names = runs, Trace(), list[str]()
        self.widget = ipywidgets.Tab([runs], titles=[RUNS])
        self.widget.add_class("dkx-tabs")
        self.widget.observe(lambda _: self._make(), "selected_index")

    def show(self, trace: Trace, run: int) -> None:
        """Show another run, in the tab that was open if it has as many."""
        old, opened = self.widget.children[1:], self.widget.selected_index or 0
        self._trace, self._names = trace, fitting(trace)
        places = [_marked(ipywidgets.VBox(), "dkx-picture") for _ in self._names]
        self.widget.children = [self._runs, *places]
        self.widget.titles = [RUNS, *(f"{name} of run {run}" for name in self._names)]
        self.widget.selected_index = opened if opened <= len(places) else 0
        self._make()
        _close(old)

    def _make(self) -> None:
        index = self.widget.selected_index
        if index and not self.widget.children[index].children:
            picture = VIEWS[self._names[index - 1]]
            self.widget.children[index].children = [picture(self._trace)]


def _close(widgets: Iterable[Any]) -> None:
    """Close widgets, and what boxes among them hold."""
    for widget in widgets:
        _close(getattr(widget, "children", ()) if isinstance(widget, ipywidgets.VBox) else ())
        widget.close()


def fitting(trace: Trace) -> list[str]:
    """The pictures that have something to show of a run."""
    marks = [e for e in trace if e.op is Op.MARK]
    staged = len(marks) < len(trace) <= STAGED
    watched = any(e.attributes.get("watched") == "gradient" for e in marks)
    served = any(node.role == "server" for node in trace.info.ranks.values())
    return ["Timeline", *["Servers" if served else "Stage"] * staged, *["Gradients"] * watched]


def message(experiment: Experiment) -> str:
    """The error of the latest run, or what is odd about it, in words."""
    error = experiment.trouble
    if error is not None and not isinstance(error, (RunInterrupted, RunStopped)):
        return _trouble(type(error).__name__, str(error))
    last = [] if experiment.activity else experiment.records[-1:]
    notes = [str(error)] if error else [remark for r in last for remark in r.remarks]
    return "".join(f"<div class=dkx-note role=status>{escape(note)}</div>" for note in notes)


def _trouble(kind: str, text: str) -> str:
    head, _, traceback = text.partition("\n\nTraceback")
    more = f"<pre tabindex=0>Traceback{escape(traceback)}</pre>" if traceback else ""
    return f"<div class=dkx-trouble role=alert><b>{escape(kind)}</b> {escape(head)}{more}</div>"


def _marked(widget: Any, name: str) -> Any:
    """A widget with a class of the style sheet."""
    widget.add_class(name)
    return widget


def _html(name: str, value: str = "") -> Any:
    return _marked(ipywidgets.HTML(value), name)


def _lines(printed: list[str]) -> str:
    if not printed:
        return ""
    text = escape("\n".join(printed))
    return f'<pre tabindex=0 role=log aria-label="what the ranks printed">{text}</pre>'
