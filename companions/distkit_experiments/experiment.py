"""A function on ranks, the controls of its parameters, and the runs that were made with them."""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from distkit._format import count
from distkit.cluster import machine
from distkit.cluster.cluster import Cluster
from distkit.cluster.notebook import CellRegistry, cell, in_notebook
from distkit.cluster.pickling import pack
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.forkserver import server
from distkit.cluster.runs.conductor import INTERRUPT_TIMEOUT
from distkit.cluster.runs.run import Run, ended_by_interrupt, poll
from distkit.errors import (
    ClusterError,
    DeadlockError,
    NotPicklableError,
    RankDied,
    RankError,
    StoppedError,
)
from distkit.gone import GONE
from distkit.recording import trouble
from distkit.recording.progress import Meter
from distkit.views.widget.snapshot import HtmlSnapshot
from distkit_experiments import results
from distkit_experiments.controls import (
    EMPTY,
    OWN,
    RANKS,
    STRAGGLER,
    Settings,
    listed,
    parameters,
    said,
    shown,
)
from distkit_experiments.panel import Bar, Panel
from distkit_experiments.results import OUTCOME, Activity, Record, words

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


#: How often an experiment that waits for ranks looks how far they are [s].
PERIOD = 0.1

#: Of what ranks print, the latest lines are kept.
LINES = 200


class Background(Cluster):
    """A cluster that shows no card, belongs to no cell and is not what ``%%ranks`` runs on."""

    def __init__(self, plan: Plan) -> None:
        self._open(plan)

    def _announce(self) -> None:
        """Show no card."""


def plan_like(given: Cluster | None, ranks: int) -> Plan:
    """A plan like the given cluster's, except for the number of ranks.

    Raises:
        StartError: this machine cannot give so many ranks.
    """
    like = None if given is None else given.plan
    device = "cpu" if like is not None and {*like.devices} == {"cpu"} else "auto"
    return make_plan(
        ranks,
        0 if like is None else like.servers,
        device,
        "auto",
        cpus=machine.cpus(),
        memory=machine.memory(),
        gpus=server().gpus(device),
    )


def submit(
    cluster: Cluster, fn: Callable[..., Any], setting: dict[str, Any], network: Collection[str] = ()
) -> Run:
    """Start a run on ranks that are ready; ``network`` are the settings that slow links down.

    They come on top of the trouble that there is.

    Raises:
        ClusterError: the cluster is busy.
    """
    own = {*OWN, *network}
    arguments = {name: value for name, value in setting.items() if name not in own}
    slow = {name: setting[name] for name in network if name in setting}
    late = {setting[RANKS] - 1: setting[STRAGGLER]} if setting.get(STRAGGLER) else {}
    if not (slow or late):
        return cluster._submit(fn, (), arguments)
    made = trouble.current() or trouble.Trouble()
    links = {"latency": made.latency, "bandwidth": made.bandwidth, **slow}
    delay = {**made.delay, **late}
    with trouble.trouble(delay=delay, drop_rank=made.drop, kill=made.kill, **links):
        return cluster._submit(fn, (), arguments)


def has_ended(run: Run, printed: deque[str] | None) -> bool:
    """Wait a moment; whether it has ended.

    Args:
        run: the run.
        printed: where lines go that ranks print; None: they are printed here.

    Raises:
        RankError, DeadlockError, …: as :meth:`distkit.cluster.Run.wait`.
    """
    if printed is None:
        with suppress(TimeoutError):
            run.wait(PERIOD)
            return True
        return False
    with ended_by_interrupt(run):
        printed.extend(f"[rank {rank}] {line}" for rank, _, line in poll(run, PERIOD))
    if run.error is not None:
        raise run.error
    return run.finished


#: A kernel that ends has no thread of its own any more that sends to the page: two of ours that
#: did would mix their messages up.
_telling, _over = threading.RLock(), threading.Event()

_of_cells = CellRegistry(lambda experiment: experiment.close())


@atexit.register
def _hush() -> None:
    with _telling:
        _over.set()


class Experiment:
    """Sliders and buttons that start real runs, as ``ipywidgets.interact`` calls a function.

    In a notebook it displays as a panel: a control per parameter, Run and Stop, a bar that moves
    with the run's progress, a table of all runs, a plot of the seconds and of what it returned
    against what was varied, and the pictures of the latest run. The notebook stays usable
    meanwhile.

    A control is a range ``(8, 128)``, choices ``["ring", "gloo"]``, True or False, or a widget of
    ipywidgets; it begins at the function's default. Some names mean more:

    - ``ranks=(2, 8)``: number of ranks. The given cluster is used for its own number; with another
      number each run gets its own cluster.
    - ``straggler=(0, 0.5)``: seconds by which each communication of the last rank is delayed; up to
      one, they are shown in milliseconds.
    - ``latency=(1e-5, 0.01)`` and ``bandwidth=(1e6, 1e9)``: of :func:`~distkit.trouble`, in seconds
      and in bytes per second, if the function has no such parameter.
    - ``size=(64, 2**20)`` or ``nbytes``: bytes, in powers of two, shown with units.
    - ``lr=(0.01, 1.0)`` or ``learning_rate``: on a logarithmic scale.

    A function that iterates over ``dk.progress(range(steps))``, or a loop in
    :func:`~distkit.watch_gradients`, moves the bar.

    Args:
        fn: runs on every rank, with the values of the controls as keyword arguments.
        cluster: where it runs; the experiment never stops it. Without one, it runs on 4 ranks.
        picture: ``picture(runs, setting)`` draws a figure of matplotlib in place of the plot, when
            a control has moved and when a run has ended: ``runs`` is :meth:`to_dataframe` without
            the runs that went wrong, ``setting`` has the values of the controls.
        controls: one per parameter.

    Raises:
        TypeError: the function has no such parameter, or one with neither default nor control.
        ValueError: a control is invalid, or its default is outside its range.
        NotPicklableError: the function cannot be pickled.

    Example:
        >>> def train(batch=32, lr=0.2): ...
        >>> with Experiment(train, batch=(8, 128), lr=(0.01, 1.0), ranks=(2, 8)) as experiment:
        ...     experiment
        Experiment with train: no run yet
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
                f"the second argument is a dk.Cluster, not {cluster!r}; controls have names: "
                "dk.Experiment(train, cluster, batch=(8, 128))."
            )
        if picture is not None and not callable(picture):
            raise TypeError(
                f"picture={picture!r}: give a function that draws the runs. A parameter of that "
                "name cannot be a control: give it another name."
            )
        self.fn, self.name = fn, getattr(fn, "__name__", type(fn).__name__)
        self.settings = Settings(fn, controls, None if cluster is None else cluster.plan.ranks)
        pack(fn, (), {n: c.choices or c.value for n, c in self.settings.controls.items()})
        self.records: list[Record] = []
        self.activity: Activity | None = None  # what it does now
        self.trouble: BaseException | None = None  # why the latest run went wrong
        self.printed = deque[str](maxlen=LINES)
        _of_cells.add(cell(), self)
        self._picture, self._still = picture, HtmlSnapshot(self._draw)
        self._alone, self._stopping = threading.Lock(), threading.Event()
        self._panel: Panel | None = None
        self._watchers: list[Callable[[Experiment], None]] = []
        self._given, self._closed = cluster, False

    # -- running ----------------------------------------------------------------

    def run(self, **parameters: Any) -> Run:
        """Run once, and wait for it: with the values of the controls, except for those given.

        Raises:
            TypeError, ValueError: there is no such parameter, or a value is outside its control.
            ClusterError: the cluster, or this experiment, is busy.
            RankError, DeadlockError, …: as :meth:`distkit.Cluster.run`.
        """
        setting = self.settings.complete(**parameters)
        with self._busy(), self._shown():
            return self._perform(setting)

    def sweep(self, **values: Any) -> list[Run]:
        """Run every combination of the values given, one after the other.

        The stop button, Ctrl-C and :meth:`stop` end it; the runs made so far remain.

        Args:
            values: a list per parameter, or one value.

        Raises:
            TypeError, ValueError, ClusterError, RankError, …: as :meth:`run`; nothing runs if
                one of the values makes no sense.

        Example:
            >>> experiment.sweep(batch=[8, 16, 32], ranks=[2, 4])        # doctest: +SKIP
        """
        settings = self.settings.product(**values)
        with self._busy(), self._shown():
            return [
                self._perform(setting, f"run {n} of {len(settings)}")
                for n, setting in enumerate(settings, 1)
            ]

    def stop(self) -> None:
        """End what runs, on every rank at once; the experiment stays usable."""
        if self._alone.locked():
            self._stopping.set()

    def start(self) -> None:
        """Run with the controls as they stand, in the background: what the Run button does."""
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        """End what runs, and take the panel off the page.

        Table and plot of the runs stay there as a picture. A cluster that was given stays as it is.
        """
        self.stop()
        self._closed = True
        self._keep()
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.close()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what remains -----------------------------------------------------------

    @property
    def runs(self) -> list[tuple[dict[str, Any], Run]]:
        """The parameters of each run, and the run."""
        return [(dict(r.parameters), r.run) for r in self.records]

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per run: parameters, what was measured, and what rank 0 returned.

        Measured are the seconds from the start on all ranks to the end; how long a rank, or a
        worker of servers, waited for others on average; the messages and collectives of all ranks;
        the bytes of all messages, and of each collective's largest tensor once; and of a function
        with ``dk.progress`` the steps that each rank made.
        """
        return results.frame(self.records)

    def plot(self, *names: str, against: str = "") -> Figure:
        """Results against a parameter, as a figure of matplotlib with one chart a result.

        Args:
            names: columns of :meth:`to_dataframe`; the seconds and what was returned if none.
            against: a parameter or another result; the parameter that was varied if none.

        Raises:
            ValueError: there is no such column, or nothing was varied yet.

        Example:
            >>> experiment.plot("loss", against="batch")        # doctest: +SKIP
        """
        return results.plot(self.records, names, against)

    def __repr__(self) -> str:
        return results.to_text(self.name, self.records)

    def _ipython_display_(self) -> None:
        """The panel, and what stays in the notebook."""
        self._still.show(*self._repr_mimebundle_())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The panel, and for places without widgets the table and the plot."""
        widget = self.panel.widget._repr_mimebundle_(**kwargs)
        data, metadata = widget if isinstance(widget, tuple) else (widget or {}, {})
        html, text = self._draw()
        return {**data, "text/html": html, "text/plain": text}, metadata

    def _draw(self) -> tuple[str, str]:
        with suppress(Exception):  # of the reader's picture: the panel shows it
            return results.still(self.name, self.records, self.drawn())
        return results.still(self.name, self.records)

    def drawn(self, colors: Mapping[str, str] | None = None) -> str:
        """The plot of the runs, or the reader's picture, as SVG; "" where there is none yet.

        Args:
            colors: the colours that replace some of its own, as of a page; None for paper.
        """
        if self._picture is None:
            return results.to_svg(self.records, colors)
        well = [r for r in self.records if not r.outcome]
        figure = self._picture(results.frame(well), self.settings.complete())
        return "" if figure is None else results.drawn(figure, colors)

    @property
    def panel(self) -> Panel:
        """The notebook's picture of it."""
        if self._panel is None:
            self._panel = Panel(self, own=self._picture is not None)
            self._watchers.append(self._panel.refresh)
        return self._panel

    # -- one run ----------------------------------------------------------------

    def _perform(self, setting: dict[str, Any], which: str = "", aloud: bool = True) -> Run:
        """Make one run, from starting its ranks to its record."""
        standing = self.settings.complete()
        varied = [n for n, v in setting.items() if said(standing.get(n, v)) != said(v)]
        given = ", ".join(f"{n}={shown(n, setting[n])}" for n in varied)
        about = f"{which} ({given}) · " if which and given else f"{which} · " if which else ""
        self._tell(Activity(f"{about}starting {count(setting[RANKS], 'rank')}"))
        with self._ranks(setting[RANKS]) as cluster:
            run, meter = submit(cluster, self.fn, setting, self.settings.network), Meter()
            try:
                self._follow(run, meter, about, None if aloud else self.printed)
            except BaseException as error:
                self.trouble = error  # told at once: to read a long trace takes a while
                raise
            finally:
                self._tell(Activity(f"{about}reading the trace"))
                self.records.append(results.record(setting, run, meter.done))
        return run

    @contextmanager
    def _ranks(self, ranks: int) -> Iterator[Cluster]:
        """A cluster that is ready: the reader's, or for another number of ranks one of ours.

        Raises:
            StartError: this machine cannot give so many ranks.
            StoppedError: the reader's cluster was stopped, or the experiment closed.
        """
        if self._closed:
            raise StoppedError("the experiment was closed. Make a new one: run its cell again.")
        with ExitStack() as ours:
            cluster = self._given
            if cluster is None or cluster.plan.ranks != ranks:
                cluster = ours.enter_context(Background(plan_like(cluster, ranks)))
            cluster.wait()
            server().complete()  # what programs import late is no part of what is measured
            server().wait_until_idle()
            yield cluster

    def _follow(
        self,
        run: Run,
        meter: Meter,
        about: str,
        printed: deque[str] | None,
    ) -> None:
        """Wait until a run is over, and tell how far it has come."""
        since = time.monotonic()
        forget = run.subscribe(meter.feed)
        try:
            while not has_ended(run, printed):
                stopping = self._stopping.is_set()
                if stopping:
                    run.interrupt()
                told = "stopping" if stopping else words(meter.done, meter.total, meter.operations)
                share = meter.done / meter.total if meter.done and meter.total else None
                self._tell(Activity(about + told, since, share, can_stop=not stopping))
        finally:
            forget()
            if not run.finished:
                run.interrupt()
                poll(run, INTERRUPT_TIMEOUT)

    def _attempt(self, settings: list[dict[str, Any]]) -> list[Record]:
        """The records of runs, failed ones too."""
        with self._busy(), self._shown(keep=False):
            for n, setting in enumerate(settings, 1):
                with suppress(RankError, RankDied, DeadlockError, NotPicklableError):
                    self._perform(setting, f"run {n} of {len(settings)}")
        return self.records

    def _work(self) -> None:
        """The Run button's thread: what goes wrong is told in the panel."""
        try:
            with self._busy():
                self._perform(self.settings.complete(), aloud=False)
        except Exception as error:
            self.trouble = error
            self._tell(self.activity)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Be the only one that runs something."""
        if not self._alone.acquire(blocking=False):
            raise ClusterError(
                f"the experiment is running {self.name}. Wait for it, or end it "
                "(experiment.stop())."
            )
        self._stopping.clear()
        self.trouble = None
        self.printed.clear()
        try:
            yield
        except BaseException as error:
            self.trouble = error
            raise
        finally:
            self._alone.release()
            self._tell(None)
            self._keep()

    # -- telling ------------------------------------------------------------------

    def _tell(self, activity: Activity | None) -> None:
        self.activity = activity
        with _telling:
            for watcher in list(self._watchers) if not _over.is_set() else ():
                watcher(self)

    def _keep(self) -> None:
        """Bring the picture that stays in the notebook up to date."""
        with _telling:
            if not _over.is_set():
                self._still.renew()

    @contextmanager
    def _shown(self, keep: bool = True) -> Iterator[None]:
        """Show how far it has come in the cell that waits for it.

        Args:
            keep: show its results there afterwards.
        """
        if not in_notebook():
            yield
            return
        from IPython.display import display

        bar, first = Bar(self.stop), len(self.records)
        handle = display(bar.widget, display_id=True)
        self._watchers.append(bar.refresh)
        try:
            yield
        finally:
            self._watchers.remove(bar.refresh)
            made = self.records[first:] if keep else []
            html, text = results.still(self.name, made, results.to_svg(made)) if made else ("", "")
            handle.update({"text/html": html, "text/plain": text}, raw=True)
            bar.widget.close()


def sweep(
    fn: Callable[..., Any], cluster: Cluster | None = None, /, **values: Any
) -> pandas.DataFrame:
    """Run every combination of the values given, one after the other, on real ranks.

    ``ranks``, ``straggler``, ``latency`` and ``bandwidth`` mean what they mean for an
    :class:`~distkit.Experiment`; all other values are arguments of the function. Ctrl-C and the
    Stop button end a sweep.

    Args:
        fn: runs on every rank; the numbers that rank 0 returns become columns.
        cluster: where it runs when the number of ranks is its own; others are started.
        values: a list per parameter, or one value.

    Returns:
        One row per combination: parameters, seconds, waiting, messages, bytes, values of rank 0,
        and the ``trace``. A run that failed has its error as ``outcome``.

    Raises:
        TypeError, ValueError: as :meth:`Experiment.sweep`, before anything runs.
        RunError: every run failed; this is the first one's error.
        RunInterrupted: the Stop button was pressed.

    Example:
        >>> def train(batch=32, steps=10): ...
        >>> frame = sweep(train, ranks=[1, 2, 4], batch=[8, 32])              # doctest: +SKIP
        >>> frame.pivot(index="batch", columns="ranks", values="seconds")     # doctest: +SKIP
        >>> frame.trace[5].diagnose()                                         # doctest: +SKIP
    """
    import pandas as pd

    known = parameters(fn)
    if "folder" in values and not {"folder", "**"} & {*known}:
        raise TypeError(GONE["dk.sweep(folder=…)"])
    lists = {name: listed(name, given) for name, given in values.items()}
    needed = {n: lists[n] for n, default in known.items() if default is EMPTY and n in lists}
    with Experiment(fn, cluster, picture=None, **needed) as experiment:
        records = experiment._attempt(experiment.settings.product(**lists))
    _tell_failures(records)
    return pd.DataFrame([{**r.row, "trace": r.run.trace} for r in records])


def _tell_failures(records: list[Record]) -> None:
    failed = [r for r in records if r.outcome]
    if not failed:
        return
    first, error = failed[0], failed[0].run.error
    if len(failed) == len(records) and error is not None:
        raise error
    given = ", ".join(f"{n}={shown(n, v)}" for n, v in first.parameters.items())
    warnings.warn(
        f"{len(failed)} of {count(len(records), 'run')} failed, see the column {OUTCOME!r}. "
        f"The first of them, {given}: {error}",
        stacklevel=3,
    )
