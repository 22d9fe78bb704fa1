"""The panel of an experiment in a notebook: controls, and in tabs beside them what they gave."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from distkit.cluster import limits
from distkit.errors import RunInterrupted, RunStopped
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views import Gradients, Servers, Stage, Timeline
from distkit.views.scene.units import human_seconds
from distkit_experiments import chart, results
from distkit_experiments.controls import Control, stand_at
from distkit_experiments.results import Activity, Record, State, words

#: Parts of the bar.
WHOLE = 1000

#: The stage follows every message of a run; of longer ones it would make too much.
STAGED = 20_000

#: Where the runs will be: their room is kept, so that no control moves when the first one ends.
NONE = "<p>No run yet: Run makes one with these values.</p>"
ONE = "<p>Run again with another value: a plot compares runs.</p>"
GONE = "this experiment no longer exists: run its cell again"


@cache
def css() -> str:
    """The style sheet of bar and panel."""
    return Path(__file__).with_name("panel.css").read_text(encoding="utf-8")


class Bar:
    """Moves with an experiment; without known end it only says that something moves.

    Args:
        stop: what the Stop button calls.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.progress = ipywidgets.IntProgress(max=WHOLE, layout={"width": "auto"})
        self.words = _html("dkx-words")
        self.stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End the run on every rank", disabled=True
        )
        self.stop.on_click(lambda _: stop())
        self.progress.add_class("dkx-bar")
        self.stop.add_class("dkx-stop")
        sheet = ipywidgets.HTML(f"<style>{css()}</style>", layout={"display": "none"})
        self.widget = ipywidgets.HBox([sheet, self.stop, self.progress, self.words])
        self.widget.add_class("dkx-row")

    def refresh(self, now: Activity | None) -> None:
        """Show what the experiment does now."""
        self.stop.disabled = now is None or now.stopping or now.over
        if now is None:
            self._unknown(False)
            self.progress.value, self.words.value = 0, ""
            return
        share = None if not now.total or now.done is None or now.over else now.done / now.total
        self._unknown(share is None)
        self.progress.value = WHOLE if share is None else round(WHOLE * share)
        seconds = round(time.monotonic() - now.since, 1)
        since = f" <i>{escape(human_seconds(seconds))}</i>" if seconds else ""
        self.words.value = f"<span aria-live=polite>{escape(words(now))}</span>{since}"

    def _unknown(self, unknown: bool) -> None:
        """True if nobody knows when it will end."""
        (self.progress.add_class if unknown else self.progress.remove_class)("dkx-unknown")

    def close(self) -> None:
        """Take it off the page."""
        for part in (*self.widget.children, self.widget):
            part.close()


@contextmanager
def terminal_bar(watchers: list[Callable[[Any], None]]) -> Iterator[None]:
    """The same in a terminal, if standard error is one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bars:
        task = bars.add_task("", total=None)

        def refresh(state: State) -> None:
            now = state.activity
            if now is not None:
                done = (now.done or 0) / now.total if now.total else 0.5
                share = (now.number - 1 + done) / now.of
                bars.update(task, description=words(now), total=1, completed=share)

        watchers.append(refresh)
        try:
            yield
        finally:
            watchers.remove(refresh)


class Press(anywidget.AnyWidget):
    """The Run button: it runs with what the page shows of the controls.

    Args:
        controls: widgets, of which the page may show more than they have told so far.
        run: what to call then.
    """

    _esm = Path(__file__).with_name("press.js")
    disabled = traitlets.Bool(False).tag(sync=True)
    controls: Any = traitlets.List().tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, controls: Sequence[Any], run: Callable[[], None]) -> None:
        keys = [next((k for k in ("index", "value") if k in c.keys), None) for c in controls]
        self._told = [c for c, key in zip(controls, keys, strict=True) if key]
        self.click = run
        super().__init__(controls=[(c, k) for c, k in zip(controls, keys, strict=True) if k])
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

    _esm = Path(__file__).with_name("rows.js")
    value = traitlets.Unicode().tag(sync=True)
    shown = traitlets.Int().tag(sync=True)

    def __init__(self, choose: Callable[[int], None]) -> None:
        super().__init__()
        self.add_class("dkx-table")
        self.on_msg(lambda _, content, __: choose(int(content["run"])))


class Panel:
    """The widgets of one experiment. They live on when it is forgotten, so they hold it weakly.

    Args:
        state: what they show at first.
        controls: by parameter.
        run: what the Run button calls.
        stop: what the Stop button calls.
        picture: draws in place of the plot, again when a control moves; None to plot the results.
    """

    def __init__(
        self,
        state: State,
        controls: Mapping[str, Control],
        run: Callable[[], None],
        stop: Callable[[], None],
        picture: Callable[[], Any] | None = None,
    ) -> None:
        self._lock, self._seen, self._pictured = threading.RLock(), -1, 0
        self._records: list[Record] = []
        self._controls = controls
        self._bar = Bar(self._weakly(stop))
        self._run = Press([c.widget for c in controls.values()], self._weakly(run))
        self._bar.widget.children = (self._run, *self._bar.widget.children)
        title = _html("dkx-title", f"<strong>{escape(state.name)}</strong>")
        self._message, self._printed = _html("dkx-message"), _html("dkx-printed")
        self._table = Rows(self.choose)
        self._own = picture is not None
        self._chart = Chart(None if picture is None else self._weakly(picture))
        for control in controls.values() if picture else ():
            control.widget.observe(lambda _: self._chart.draw(), "value")
        parts = [self._table, self._chart.widget]
        runs = ipywidgets.HBox(parts[::-1] if self._own else parts)
        runs.add_class("dkx-runs")
        self._tabs = Tabs(runs)
        side = ipywidgets.VBox(
            [title, _controls(controls), self._bar.widget, self._message, self._printed]
        )
        side.add_class("dkx-side")
        self.widget = ipywidgets.HBox([side, self._tabs.widget])
        self.widget.add_class("distkit-experiment")
        self.refresh(state)

    def refresh(self, state: State) -> None:
        """Show where the experiment is now. From any thread."""
        with self._lock:
            now, records = state.activity, state.records
            self._bar.refresh(now)
            self._message.value = message(state)
            self._printed.value = _lines(list(state.printed))
            if len(records) != self._seen:
                self._records = list(records)
                self._table.value = results.to_html(records) or ("" if self._own else NONE)
                self._chart.show(records)
            if now is None and records and len(records) != self._pictured:
                self._pictured = len(records)
                self._show(len(records))
            self._seen = len(records)
            self._run.disabled = now is not None  # last: who may run again sees the latest run

    def choose(self, run: int) -> None:
        """Show a run of the table, and have the controls stand at its values."""
        with self._lock:
            if self._run.disabled or not 0 < run <= len(self._records):
                return
            self._show(run)
            stand_at(self._controls, self._records[run - 1].parameters)

    def _show(self, run: int) -> None:
        self._table.shown = run
        self._tabs.show(self._records[run - 1].run.trace, run)

    def close(self) -> None:
        """Take it off the page; what the reader made of it, such as a widget given, stays."""
        self._tabs.close()
        self._bar.close()
        self.widget.close()

    def _weakly(self, method: Callable[[], Any]) -> Callable[[], Any]:
        """A method of the experiment, as long as there is one."""
        known = weakref.WeakMethod(method)

        def call() -> Any:
            found = known()
            if found is None:
                self._message.value = f"<div class=dkx-note>{GONE}</div>"
                return None
            return found()

        return call


class Chart:
    """The plot, and what it shows: any result against any parameter or other result.

    Args:
        picture: draws a figure in its place.
    """

    #: What is chosen before anybody chooses: the foremost result, against what was varied.
    FOREMOST, VARIED = "", "what was varied"

    def __init__(self, picture: Callable[[], Any] | None = None) -> None:
        self._picture = picture
        self._result = ipywidgets.Dropdown(description="plot", options=[(results.SECONDS, "")])
        self._against = ipywidgets.Dropdown(
            description="against", options=[(self.VARIED, self.VARIED)]
        )
        self._choice = ipywidgets.HBox([self._result, self._against])
        self._choice.add_class("dkx-choice")
        self._choice.layout.display = "none"
        self._drawn, self._note = _html("dkx-drawn"), _html("dkx-caption")
        self.widget = ipywidgets.VBox([self._choice, self._drawn, self._note])
        self.widget.add_class("dkx-chart")
        self._records: list[Record] = []
        self._first = results.SECONDS
        self._offering = False
        for each in (self._result, self._against):
            each.style.description_width = "initial"
            each.observe(lambda _: self.draw(), "value")

    def show(self, records: list[Record]) -> None:
        """Draw these runs; what the reader has chosen stays chosen."""
        self._records = records = list(records)
        well = [r for r in records if not r.outcome]
        self._offering = True
        self._first = first = results.foremost(well)
        others = [name for name in results.plottable(well) if name != first]
        _offer(self._result, [(first, self.FOREMOST), *((name, name) for name in others)])
        against = [self.VARIED, *chart.varied(well), *results.plottable(well)]
        _offer(self._against, [(name, name) for name in dict.fromkeys(against)])
        alone = len(records) == 1 and self._picture is None
        self._note.value = ONE if alone else escape(results.of_ranks(well, limits.cpus()))
        self._offering = False
        self.draw()

    def draw(self) -> None:
        """Draw again what is chosen, or the picture."""
        if self._offering:
            return
        if self._picture is not None:
            self._drawn.value = _pictured(self._picture)
            return
        result, against = self._result.value, self._against.value
        drawn = chart.chart(
            self._records,
            [result or self._first],
            "" if against == self.VARIED else against,
        )
        self._choice.layout.display = None if drawn else "none"
        self._drawn.value = drawn and f"<style>{_linked(len(self._records))}</style>{drawn}"


def _linked(runs: int) -> str:
    """Style: who points at a row sees its dots, who points at a dot its row."""
    rows = [f'[data-run="{n}"]' for n in range(1, runs + 1)]
    return "".join(
        f".dkx-runs:has(tr{row}:hover) .dkx-spot{row} use"
        "{opacity:.35 !important;fill-opacity:1 !important}"
        f".dkx-runs:has(.dkx-spot{row}:hover) tr{row} td{{background:var(--dkx-line)}}"
        for row in rows
    )


def _pictured(picture: Callable[[], Any]) -> str:
    """The reader's picture in the colours of the page, or why there is none."""
    try:
        figure = picture()
        return "" if figure is None else chart.drawn(figure, chart.THEMED)
    except Exception as error:  # of the reader's function: told where the picture would be
        kind = escape(type(error).__name__)
        return f"<div class=dkx-trouble role=alert><b>{kind}</b> {escape(str(error))}</div>"


def _offer(dropdown: Any, options: list[tuple[str, str]]) -> None:
    """Other options, of which what was chosen stays chosen if it is among them."""
    chosen = dropdown.value
    if list(dropdown.options) != options:
        dropdown.options = options
        values = [value for _, value in options]
        dropdown.value = chosen if chosen in values else values[0]


class Tabs:
    """All runs, and pictures of one: each is made when it is first looked at."""

    def __init__(self, runs: Any) -> None:
        self._runs = runs
        self.widget = ipywidgets.Tab([runs], titles=[RUNS])
        self.widget.add_class("dkx-tabs")
        self.widget.observe(lambda _: self._make(), "selected_index")
        self._names = [RUNS]
        self._views: dict[str, Any] = {}
        self._trace = Trace()

    def show(self, trace: Trace, run: int) -> None:
        """Show another run, in the tab that was open if it has it."""
        opened = self._names[self.widget.selected_index or 0]
        old, self._views, self._trace = self._views, {}, trace
        names = [RUNS, *(fitting(trace) if trace else [])]
        self._names = []  # while the tabs change nothing is made
        pictures = [ipywidgets.VBox() for _ in names[1:]]
        for picture in pictures:
            picture.add_class("dkx-picture")
        self.widget.children = [self._runs, *pictures]
        self.widget.titles = [RUNS, *(f"{name} of run {run}" for name in names[1:])]
        self.widget.selected_index = names.index(opened) if opened in names else 0
        self._names = names
        self._make()
        for view in old.values():
            view.close()

    def _make(self) -> None:
        index = self.widget.selected_index
        if not index or not self._names or self._names[index] in self._views:
            return
        view = VIEWS[self._names[index]](self._trace)
        self._views[self._names[index]] = view
        self.widget.children[index].children = [view]

    def close(self) -> None:
        """Take them off the page."""
        for view in self._views.values():
            view.close()
        self.widget.close()


RUNS = "Runs"
VIEWS = {"Timeline": Timeline, "Servers": Servers, "Stage": Stage, "Gradients": Gradients}


def fitting(trace: Trace) -> list[str]:
    """The pictures that have something to show of a run."""
    marks = [e for e in trace if e.op is Op.MARK]
    staged = len(marks) < len(trace) <= STAGED
    watched = any(e.attributes.get("watched") == "gradient" for e in marks)
    served = any(node.get("role") == "server" for node in trace.meta.get("ranks", {}).values())
    return ["Timeline", *["Servers" if served else "Stage"] * staged, *["Gradients"] * watched]


def message(state: State) -> str:
    """The error of the latest run, or what is odd about it, in words."""
    error = state.trouble
    if isinstance(error, (RunInterrupted, RunStopped)):
        return f"<div class=dkx-note role=status>{escape(str(error))}</div>"
    if error is None:
        last = [] if state.activity else state.records[-1:]
        return "".join(f"<div class=dkx-note>{escape(w)}</div>" for r in last for w in r.remarks)
    head, _, traceback = str(error).partition("\n\nTraceback")
    more = f"<pre tabindex=0>Traceback{escape(traceback)}</pre>" if traceback else ""
    kind = escape(type(error).__name__)
    return f"<div class=dkx-trouble role=alert><b>{kind}</b> {escape(head)}{more}</div>"


def _controls(controls: Mapping[str, Control]) -> Any:
    widgets = []
    for name, control in controls.items():
        if control.ours:
            control.widget.description = f"{name} {control.unit}".strip()
            control.widget.style.description_width = "initial"
            control.widget.layout.width = "auto"
            if hasattr(control.widget, "readout"):
                control.widget.tooltip = "drag, use the arrow keys, or type the number"
        widgets.append(control.widget)
    box = ipywidgets.GridBox(widgets)
    box.add_class("dkx-controls")
    return box


def _html(name: str, value: str = "") -> Any:
    widget = ipywidgets.HTML(value)
    widget.add_class(name)
    return widget


def _lines(printed: list[str]) -> str:
    if not printed:
        return ""
    text = escape("\n".join(printed))
    return f'<pre tabindex=0 role=log aria-label="what the ranks printed">{text}</pre>'
