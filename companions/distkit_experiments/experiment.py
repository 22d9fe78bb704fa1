"""Experiments that run a function on ranks with parameters set by controls."""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from distkit._format import count
from distkit.cluster import machine
from distkit.cluster.cluster import Cluster
from distkit.cluster.notebook import CellRegistry, in_notebook, running_cell_id
from distkit.cluster.pickling import pack
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.fork_client import server
from distkit.cluster.runs.conductor import INTERRUPT_TIMEOUT
from distkit.cluster.runs.run import Run, interruptible, poll
from distkit.errors import (
    ClusterError,
    DeadlockError,
    NotPicklableError,
    RankDied,
    RankError,
    StoppedError,
)
from distkit.recording import faults
from distkit.views.widget.snapshot import HtmlSnapshot
from distkit_experiments import results
from distkit_experiments.controls import (
    EMPTY,
    RANKS,
    RESERVED,
    STRAGGLER,
    Settings,
    as_list,
    format_plain,
    format_value,
    parameters,
)
from distkit_experiments.panel import Bar, Panel
from distkit_experiments.progress import Meter
from distkit_experiments.results import OUTCOME, Activity, Record, progress_text

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


#: Polling interval of an experiment's run [s].
POLL_SECONDS = 0.1

#: Maximum number of printed lines that are kept.
MAX_LINES = 200


class BackgroundCluster(Cluster):
    """A cluster that has no status card and belongs to no cell; ``%%ranks`` does not use it."""

    def __init__(self, plan: Plan) -> None:
        self._open(plan, show_card=False)


def plan_like(cluster: Cluster | None, ranks: int) -> Plan:
    """Return a plan like a cluster's, with a different number of ranks.

    Raises:
        StartError: this machine cannot start ``ranks`` ranks.
    """
    plan = None if cluster is None else cluster.plan
    device = "cpu" if plan is not None and {*plan.devices} == {"cpu"} else "auto"
    return make_plan(
        ranks,
        0 if plan is None else plan.servers,
        device,
        "auto",
        cpus=machine.cpus(),
        memory=machine.memory(),
        gpus=server().gpus(device),
    )


def submit(
    cluster: Cluster, fn: Callable[..., Any], setting: dict[str, Any], network: Collection[str] = ()
) -> Run:
    """Start a run on ready ranks.

    ``network`` contains the names of the settings that slow down all messages. These settings and
    ``straggler`` override the active faults.

    Raises:
        ClusterError: the cluster is busy.
    """
    reserved = {*RESERVED, *network}
    arguments = {name: value for name, value in setting.items() if name not in reserved}
    slow = {name: setting[name] for name in network if name in setting}
    delays = {setting[RANKS] - 1: setting[STRAGGLER]} if setting.get(STRAGGLER) else {}
    if not (slow or delays):
        return cluster._submit(fn, (), arguments)
    active = faults.current()
    with faults.inject_faults(
        delay={**active.delay, **delays},
        kill=active.kill,
        **{"latency": active.latency, "bandwidth": active.bandwidth, **slow},
    ):
        return cluster._submit(fn, (), arguments)


def has_ended(run: Run, printed: deque[str] | None) -> bool:
    """Wait up to POLL_SECONDS; return whether the run has ended.

    Args:
        run: the run.
        printed: receives the lines that ranks print; None to print them.

    Raises:
        RankError, DeadlockError, …: as in :meth:`distkit.cluster.Run.wait`.
    """
    if printed is None:
        with suppress(TimeoutError):
            run.wait(POLL_SECONDS)
            return True
        return False
    with interruptible(run):
        printed.extend(f"[rank {rank}] {line}" for rank, _, line in poll(run, POLL_SECONDS))
    if run.error is not None:
        raise run.error
    return run.finished


#: The event is set when the kernel exits. By then, the kernel's IO thread has ended, so messages
#: from two threads would be interleaved.
_update_lock, _exiting = threading.RLock(), threading.Event()

_cell_experiments = CellRegistry(lambda experiment: experiment.close())


@atexit.register
def _stop_updates() -> None:
    with _update_lock:
        _exiting.set()


class Experiment:
    """Sliders and buttons that start real runs, like ``ipywidgets.interact`` for a function.

    A notebook displays an experiment as a panel with a control per parameter, the buttons Run and
    Stop, a progress bar, a table of all runs, a plot of the run time and the first returned value
    against the varied parameter, and the views of the latest run. The notebook stays usable during
    runs.

    A control is a range ``(8, 128)``, choices ``["ring", "gloo"]``, True or False, or an ipywidgets
    widget; its initial value is the function's default. Some names are special:

    - ``ranks=(2, 8)``: number of ranks. Runs with the cluster's number of ranks use that cluster;
      each other run starts its own.
    - ``straggler=(0, 0.5)``: delay of each communication call on the last rank [s], shown in
      milliseconds if the range ends at one second or less.
    - ``latency=(1e-5, 0.01)`` and ``bandwidth=(1e6, 1e9)``: as in :func:`~distkit.inject_faults`,
      in seconds and bytes per second, if the function has no parameter of this name.
    - ``size=(64, 2**20)`` or ``nbytes``: bytes, in powers of two, shown with units.
    - ``lr=(0.01, 1.0)`` or ``learning_rate``: a number on a logarithmic scale.

    Steps that are marked with ``dk.mark("step")`` or recorded by :func:`~distkit.watch_gradients`
    are counted next to the progress bar.

    Args:
        fn: the function, called on every rank with the controls' values as keyword arguments.
        cluster: the cluster, which the experiment never stops; None to start a new cluster for each
            run, with 4 ranks unless ``ranks`` is set.
        picture: a function ``picture(runs, setting)`` that returns a matplotlib figure, which
            replaces the plot. It is called whenever a control changes or a run ends. ``runs`` is
            :meth:`to_dataframe` without failed runs, with the numbers of the runs as its index;
            ``setting`` contains the controls' values.
        controls: controls by parameter.

    Raises:
        TypeError: a control is for an unknown parameter, or a parameter has neither a default nor a
            control.
        ValueError: a control is invalid, or its default is outside its range.
        NotPicklableError: the function cannot be pickled.

    Example:
        >>> def train(batch=32, lr=0.2): ...
        >>> with Experiment(train, batch=(8, 128), lr=(0.01, 1.0), ranks=(2, 8)) as experiment:
        ...     experiment
        Experiment with train: no runs yet
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        cluster: Cluster | None = None,
        /,
        *,
        picture: Callable[[pandas.DataFrame, dict[str, Any]], Figure] | None = None,
        **controls: Any,
    ) -> None:
        if cluster is not None and not isinstance(cluster, Cluster):
            raise TypeError(
                f"the second argument must be a dk.Cluster, not {cluster!r}. Pass controls by "
                "name: dk.Experiment(train, cluster, batch=(8, 128))."
            )
        if picture is not None and not callable(picture):
            raise TypeError(
                f"picture must be a function that plots the runs, not {picture!r}. If your "
                "function has a parameter named picture, rename that parameter."
            )
        self.fn, self.name = fn, getattr(fn, "__name__", type(fn).__name__)
        self.settings = Settings(fn, controls, None if cluster is None else cluster.plan.ranks)
        pack(fn, (), {n: c.choices or c.value for n, c in self.settings.controls.items()})
        self.records: list[Record] = []
        self.activity: Activity | None = None  # None if idle
        self.error: BaseException | None = None  # raised by the latest run
        self.printed = deque[str](maxlen=MAX_LINES)
        _cell_experiments.add(running_cell_id(), self)
        self._picture, self._snapshot = picture, HtmlSnapshot(self._draw)
        self._run_lock, self._stopping = threading.Lock(), threading.Event()
        self._panel: Panel | None = None
        self._watchers: list[Callable[[Experiment], None]] = []
        self._cluster, self._closed = cluster, False

    # -- running ----------------------------------------------------------------

    def run(self, **parameters: Any) -> Run:
        """Run once with the controls' values, updated with ``parameters``, and wait for the end.

        Raises:
            TypeError, ValueError: a parameter is unknown, or a value is out of range.
            ClusterError: the cluster, or this experiment, is busy.
            RankError, DeadlockError, …: as in :meth:`distkit.Cluster.run`.
        """
        setting = self.settings.complete(**parameters)
        with self._exclusive(), self._progress_in_cell():
            return self._run_once(setting)

    def sweep(self, **values: Any) -> list[Run]:
        """Run every combination of the given values, one after another.

        The Stop button, Ctrl-C and :meth:`stop` end the sweep; finished runs are kept.

        Args:
            values: a list or a single value for each parameter.

        Raises:
            TypeError, ValueError, ClusterError, RankError, …: as in :meth:`run`; nothing runs if
                a value is invalid.

        Example:
            >>> experiment.sweep(batch=[8, 16, 32], ranks=[2, 4])        # doctest: +SKIP
        """
        settings = self.settings.product(**values)
        with self._exclusive(), self._progress_in_cell():
            return [
                self._run_once(setting, f"run {n} of {len(settings)}")
                for n, setting in enumerate(settings, 1)
            ]

    def stop(self) -> None:
        """Interrupt the run on all ranks; the experiment stays usable."""
        if self._run_lock.locked():
            self._stopping.set()

    def start(self) -> None:
        """Run with the current controls in the background, like the Run button."""
        threading.Thread(target=self._run_in_background, daemon=True).start()

    def close(self) -> None:
        """Interrupt the run and remove the panel from the page.

        A static table and plot of the runs remain. A cluster that was passed is not stopped.
        """
        self.stop()
        self._closed = True
        self._update_snapshot()
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- results ---------------------------------------------------------------

    @property
    def runs(self) -> list[tuple[dict[str, Any], Run]]:
        """Pairs of a run's parameters and the run."""
        return [(dict(r.parameters), r.run) for r in self.records]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per run: parameters, measurements, and the numbers that rank 0 returned.

        Measurements are the seconds from the start on all ranks to the end; the mean time that a
        rank (or, with parameter servers, a worker) waited for others; the numbers of messages and
        collectives on all ranks; the bytes of all messages plus, for each collective, the bytes of
        its largest call; and, if steps are marked, their number and duration.
        """
        return results.frame(self.records)

    def plot(self, *names: str, against: str = "") -> Figure:
        """Plot results against a parameter, as a matplotlib figure with one chart per result.

        Args:
            names: columns of :meth:`to_dataframe`; by default, the run time and the first returned
                value (or, if there is none, the first measurement).
            against: a parameter or another result; by default, the first varied parameter.

        Raises:
            ValueError: a column is unknown, or no parameter was varied.

        Example:
            >>> experiment.plot("loss", against="batch")        # doctest: +SKIP
        """
        return results.plot(self.records, names, against)

    def __repr__(self) -> str:
        return results.to_text(self.name, self.records)

    def _ipython_display_(self) -> None:
        """Display the panel and its static snapshot."""
        self._snapshot.show(*self._repr_mimebundle_())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the panel, and a table and a plot for front ends without widgets."""
        widget = self.panel.widget._repr_mimebundle_(**kwargs)
        data, metadata = widget if isinstance(widget, tuple) else (widget or {}, {})
        html, text = self._draw()
        return {**data, "text/html": html, "text/plain": text}, metadata

    def _draw(self) -> tuple[str, str]:
        with suppress(Exception):  # the panel shows errors of the user's plot function
            return results.static_html(
                self.name, self.records, self.chart_svg(), closed=self._closed
            )
        return results.static_html(self.name, self.records, closed=self._closed)

    def chart_svg(self) -> str:
        """Return the plot of the runs or the user's picture as SVG; "" if there is none yet."""
        if self._picture is None:
            return results.to_svg(self.records)
        numbered = {n: r for n, r in enumerate(self.records, 1) if not r.outcome}
        figure = self._picture(
            results.frame([*numbered.values()]).set_axis([*numbered]), self.settings.complete()
        )
        return "" if figure is None else results.figure_svg(figure)

    @property
    def panel(self) -> Panel:
        """The panel in the notebook, created on first use."""
        if self._panel is None:
            self._panel = Panel(self, has_picture=self._picture is not None)
            self._watchers.append(self._panel.refresh)
        return self._panel

    # -- one run ----------------------------------------------------------------

    def _run_once(self, setting: dict[str, Any], label: str = "", echo: bool = True) -> Run:
        """Run once, from starting the ranks to recording the result."""
        current = self.settings.complete()
        changed = [
            n for n, v in setting.items() if format_plain(current.get(n, v)) != format_plain(v)
        ]
        values = ", ".join(f"{n}={format_value(n, setting[n])}" for n in changed)
        prefix = f"{label} ({values}) · " if label and values else f"{label} · " if label else ""
        self._notify(Activity(f"{prefix}starting {count(setting[RANKS], 'rank')}"))
        with self._ready_cluster(setting[RANKS]) as cluster:
            run, meter = submit(cluster, self.fn, setting, self.settings.network), Meter()
            try:
                self._follow(run, meter, prefix, None if echo else self.printed)
            except BaseException as error:
                self.error = error  # before reading the trace, which can take a long time
                raise
            finally:
                self._notify(Activity(f"{prefix}reading the trace"))
                self.records.append(results.record(setting, run, meter.done))
        return run

    @contextmanager
    def _ready_cluster(self, ranks: int) -> Iterator[Cluster]:
        """Provide a ready cluster: the given one if it has ``ranks`` ranks, or else a new one.

        Raises:
            StartError: this machine cannot start ``ranks`` ranks.
            StoppedError: the given cluster was stopped, or the experiment was closed.
        """
        if self._closed:
            raise StoppedError("the experiment was closed. Run its cell again to create a new one.")
        with ExitStack() as stack:
            cluster = self._cluster
            if cluster is None or cluster.plan.ranks != ranks:
                cluster = stack.enter_context(BackgroundCluster(plan_like(cluster, ranks)))
            cluster.wait()
            server().preload("torch._dynamo")  # importing it during a run would count as run time
            server().wait_until_idle()
            yield cluster

    def _follow(
        self,
        run: Run,
        meter: Meter,
        prefix: str,
        printed: deque[str] | None,
    ) -> None:
        """Wait for the end of a run and report its progress."""
        start = time.monotonic()
        unsubscribe = run.subscribe(meter.feed)
        try:
            while not has_ended(run, printed):
                stopping = self._stopping.is_set()
                if stopping:
                    run.interrupt()
                status = "stopping" if stopping else progress_text(meter.done, meter.operations)
                self._notify(Activity(prefix + status, start, can_stop=not stopping))
        finally:
            unsubscribe()
            if not run.finished:
                run.interrupt()
                poll(run, INTERRUPT_TIMEOUT)

    def _run_all(self, settings: list[dict[str, Any]]) -> list[Record]:
        """Run all settings; return the records of all runs, including failed ones."""
        with self._exclusive(), self._progress_in_cell(keep=False):
            for n, setting in enumerate(settings, 1):
                with suppress(RankError, RankDied, DeadlockError, NotPicklableError):
                    self._run_once(setting, f"run {n} of {len(settings)}")
        return self.records

    def _run_in_background(self) -> None:
        """Run once in the Run button's thread; the panel shows errors."""
        try:
            with self._exclusive():
                self._run_once(self.settings.complete(), echo=False)
        except Exception as error:
            self.error = error
            self._notify(self.activity)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Ensure that only one run is active."""
        if not self._run_lock.acquire(blocking=False):
            raise ClusterError(
                f"the experiment is running {self.name}. Wait for it, or stop it with "
                "experiment.stop()."
            )
        self._stopping.clear()
        self.error = None
        self.printed.clear()
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._run_lock.release()
            self._notify(None)
            self._update_snapshot()

    # -- updates -----------------------------------------------------------------

    def _notify(self, activity: Activity | None) -> None:
        self.activity = activity
        with _update_lock:
            for watcher in list(self._watchers) if not _exiting.is_set() else ():
                watcher(self)

    def _update_snapshot(self) -> None:
        """Update the static snapshot in the notebook."""
        with _update_lock:
            if not _exiting.is_set():
                self._snapshot.refresh()

    @contextmanager
    def _progress_in_cell(self, keep: bool = True) -> Iterator[None]:
        """Show progress in the cell that is waiting for the runs.

        Args:
            keep: whether to show the results in the cell afterwards.
        """
        if not in_notebook():
            yield
            return
        from IPython.display import display

        bar, previous = Bar(self.stop), len(self.records)
        handle = display(bar.widget, display_id=True)
        self._watchers.append(bar.refresh)
        try:
            yield
        finally:
            self._watchers.remove(bar.refresh)
            new = self.records[previous:] if keep else []
            html, text = (
                results.static_html(self.name, new, results.to_svg(new)) if new else ("", "")
            )
            handle.update({"text/html": html, "text/plain": text}, raw=True)
            bar.widget.close()


def sweep(
    fn: Callable[..., Any], cluster: Cluster | None = None, /, **values: Any
) -> pandas.DataFrame:
    """Run every combination of the given values, one after another, on real ranks.

    ``ranks``, ``straggler``, ``latency`` and ``bandwidth`` have the same meaning as for an
    :class:`~distkit.Experiment`; all other values are arguments of the function. Ctrl-C and the
    Stop button end a sweep.

    Args:
        fn: the function, called on every rank; numbers that rank 0 returns become columns.
        cluster: the cluster for runs with its number of ranks; other runs start their own clusters.
        values: a list or a single value for each parameter.

    Returns:
        One row per combination: parameters, seconds, waiting, messages, collectives, bytes, the
        numbers that rank 0 returned, and the ``trace``. The ``outcome`` of a failed run is the
        class name of its error.

    Raises:
        TypeError, ValueError: as in :meth:`Experiment.sweep`, before anything runs.
        RunError: every run failed; this is the error of the first one.
        RunInterrupted: the Stop button was pressed.

    Example:
        >>> def train(batch=32, steps=10): ...
        >>> frame = sweep(train, ranks=[1, 2, 4], batch=[8, 32])              # doctest: +SKIP
        >>> frame.pivot(index="batch", columns="ranks", values="seconds")     # doctest: +SKIP
        >>> frame.trace[5].diagnose()                                         # doctest: +SKIP
    """
    import pandas as pd

    known = parameters(fn)
    lists = {name: as_list(name, value) for name, value in values.items()}
    required = {n: lists[n] for n, default in known.items() if default is EMPTY and n in lists}
    with Experiment(fn, cluster, picture=None, **required) as experiment:
        records = experiment._run_all(experiment.settings.product(**lists))
    _report_failures(records)
    return pd.DataFrame([{**r.row, "trace": r.run.trace} for r in records])


def _report_failures(records: list[Record]) -> None:
    failed = [r for r in records if r.outcome]
    if not failed:
        return
    first, error = failed[0], failed[0].run.error
    if len(failed) == len(records) and error is not None:
        raise error
    setting = ", ".join(f"{n}={format_value(n, v)}" for n, v in first.parameters.items())
    warnings.warn(
        f"{len(failed)} of {count(len(records), 'run')} failed; see the column {OUTCOME!r}. "
        f"The first failure, with {setting}: {error}",
        stacklevel=3,
    )
