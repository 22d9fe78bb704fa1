"""A function on ranks, the controls of its parameters, and the runs that were made with them."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableSequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distkit.cluster import limits
from distkit.cluster.cluster import Cluster
from distkit.cluster.notebook import OfCells, cell, in_notebook
from distkit.cluster.pickling import pack
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.forkserver import server
from distkit.cluster.runs.conductor import ENDS_WITHIN
from distkit.cluster.runs.run import Run, poll
from distkit.errors import ClusterError, DistkitError, RunInterrupted, StoppedError
from distkit.recording import trouble
from distkit.recording.progress import Meter
from distkit.views.widget.snapshot import HtmlSnapshot
from distkit_experiments import chart, results
from distkit_experiments.controls import OWN, RANKS, STRAGGLER, Settings, said
from distkit_experiments.panel import Bar, Panel, terminal_bar
from distkit_experiments.results import Activity, State

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


#: How often somebody who waits for ranks looks whether to go on waiting [s].
PERIOD = 0.1


#: So long a run may take whose measurements are dropped, since its ranks are new [s].
COLD = 10.0


class Clusters:
    """Ranks in any number: a given cluster for its own, else one of ours that is kept warm.

    Only the latest of ours lives on: another one takes a fraction of a second.

    Args:
        given: the reader's cluster; it is never stopped here.
    """

    def __init__(self, given: Cluster | None) -> None:
        self.given = given
        self.ours: Cluster | None = None
        self._lock = threading.Lock()
        self._closed = False

    def get(self, ranks: int, given_up: Callable[[], bool]) -> Cluster | None:
        """A cluster that is ready; None if ``given_up()`` came first.

        Raises:
            StartError: this machine cannot give so many.
            StoppedError: the reader's cluster was stopped, or the experiment closed.
        """
        cluster = self._choose(ranks)
        while not given_up():
            try:
                return cluster.wait(PERIOD)
            except TimeoutError:
                continue
        return None

    def plan(self, ranks: int) -> Plan:
        """The plan of the cluster for so many ranks, whether or not there is memory for it now."""
        if self.given is not None and self.given.plan.ranks == ranks:
            return self.given.plan
        return self._plan(ranks, sys.maxsize)

    def _choose(self, ranks: int) -> Cluster:
        if self.given is not None and self.given.plan.ranks == ranks:
            return self.given
        with self._lock:
            if self._closed:
                raise StoppedError("the experiment was closed. Make a new one: run its cell again.")
            ours = self.ours
            if ours is not None and ours.plan.ranks == ranks and ours._room.stage != "failed":
                return ours
            if ours is not None:
                ours.stop()
            self.ours = None  # should there be no other
            self.ours = Background(self._plan(ranks, limits.memory()))
            return self.ours

    def _plan(self, ranks: int, memory: int) -> Plan:
        """A plan like the given cluster's, except for the number of ranks."""
        like = None if self.given is None else self.given.plan
        device = "cpu" if like is not None and {*like.devices} == {"cpu"} else "auto"
        return make_plan(
            ranks,
            0 if like is None else like.servers,
            device,
            "auto",
            cpus=limits.cpus(),
            memory=memory,
            gpus=server().gpus(device),
        )

    def close(self) -> None:
        """End our cluster."""
        with self._lock:
            self._closed = True
            if self.ours is not None:
                self.ours.stop()


class Background(Cluster):
    """A cluster that shows no card, belongs to no cell and is not what ``%%ranks`` runs on."""

    def __init__(self, plan: Plan) -> None:
        self._open(plan)

    def _announce(self) -> None:
        """Tell nobody."""


def submit(
    cluster: Cluster, fn: Callable[..., Any], setting: dict[str, Any], network: Collection[str] = ()
) -> Run:
    """Start a run on ranks that are ready; ``network`` are the settings that slow links down.

    Raises:
        ClusterError: the cluster is busy.
    """
    own = {*OWN, *network}
    arguments = {name: value for name, value in setting.items() if name not in own}
    slow = {name: setting[name] for name in network if name in setting}
    lost = setting.get(STRAGGLER, 0)
    delay = {setting[RANKS] - 1: lost} if lost else {}
    with _slowed(delay, **slow) if delay or slow else nullcontext():
        return cluster._submit(fn, (), arguments)


def follow(
    run: Run, meter: Meter, tell: Callable[[], None], printed: MutableSequence[str] | None = None
) -> None:
    """Wait until a run is over, and tell again and again how far it has come.

    Args:
        run: what to wait for; it is ended when this is left by an exception.
        meter: is fed with its events.
        tell: called again and again.
        printed: where lines go that ranks print; None: they are printed here.

    Raises:
        RankError, DeadlockError, …: as :meth:`distkit.Run.wait`.
    """
    forget = run.subscribe(meter.feed)
    try:
        while not _has_ended(run, printed):
            tell()
    finally:
        forget()
        if not run.finished:
            run.interrupt()
            poll(run, ENDS_WITHIN)


def _has_ended(run: Run, printed: MutableSequence[str] | None) -> bool:
    """Wait a moment; whether it has ended."""
    if printed is None:
        with suppress(TimeoutError):
            run.wait(PERIOD)
            return True
        return False
    printed.extend(f"[rank {rank}] {line}" for rank, _, line in poll(run, PERIOD))
    if run.error is not None:
        raise run.error
    return run.finished


@contextmanager
def _slowed(
    delay: dict[int, float], latency: float | None = None, bandwidth: float | None = None
) -> Iterator[None]:
    """Slow ranks and links in every run that starts here, besides the trouble there is."""
    made = trouble.current() or trouble.Trouble()
    with trouble.trouble(
        delay={**made.delay, **delay},
        latency=made.latency if latency is None else latency,
        bandwidth=made.bandwidth if bandwidth is None else bandwidth,
        drop_rank=made.drop,
        kill=made.kill,
    ):
        yield


#: A kernel that ends has no thread of its own any more that sends to the page: two of ours that
#: did would mix their messages up.
_telling, _over = threading.RLock(), threading.Event()


_of_cells = OfCells(lambda experiment: experiment.close())


@atexit.register
def _hush() -> None:
    with _telling:
        _over.set()


class Experiment(State):
    """Sliders and buttons that start real runs, as ``ipywidgets.interact`` calls a function.

    In a notebook it displays as a panel: a control per parameter, Run and Stop, a bar that moves
    with the run's progress, a table of all runs, a plot of what it returned, else the seconds,
    against what was varied, and the pictures of the latest run. The notebook stays usable
    meanwhile.

    A control is a range ``(8, 128)``, choices ``["ring", "gloo"]``, True or False, or a widget of
    ipywidgets; it begins at the function's default. Some names mean more:

    - ``ranks=(2, 8)``: number of ranks. The given cluster is used for its own number; for another
      number a cluster is started, and kept until the number changes or :meth:`close`.
    - ``straggler=(0, 0.5)``: seconds by which each communication of the last rank is delayed; up to
      one, they are shown in milliseconds.
    - ``latency=(1e-5, 0.01)`` and ``bandwidth=(1e6, 1e9)``: of :func:`~distkit.trouble`, in seconds
      and in bytes per second, if the function has no such parameter.
    - ``size=(64, 2**20)`` or ``nbytes``: bytes, in powers of two, shown with units.
    - ``lr=(0.01, 1.0)`` or ``learning_rate``: on a logarithmic scale.

    On ranks that are new to it the function runs twice, at most 10 s the first time, and the second
    run counts: what it imports first, and fills caches with, would be measured otherwise.

    A function that iterates over ``dk.progress(range(steps))``, or a loop in
    :func:`~distkit.watch_gradients`, moves the bar.

    Args:
        fn: runs on every rank, with the values of the controls as keyword arguments.
        cluster: where it runs; the experiment never stops it. Without one, 4 ranks are started.
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
        ranks = None if cluster is None else cluster.plan.ranks
        super().__init__(getattr(fn, "__name__", type(fn).__name__))
        self.fn, self._picture = fn, picture
        self.settings = Settings(fn, controls, ranks)
        travels = {n: c.choices or c.value for n, c in self.settings.controls.items()}
        pack(fn, (), travels)
        _of_cells.add(cell(), self)
        self._clusters = Clusters(cluster)
        self._alone, self._stopping = threading.Lock(), threading.Event()
        self._run: Run | None = None
        self._panel: Panel | None = None
        self._still = HtmlSnapshot(self._draw, picture=self._svg)
        self._watchers: list[Callable[[Experiment], None]] = []
        self._warm: weakref.WeakSet[Cluster] = weakref.WeakSet()  # have run it already
        self._end = weakref.finalize(self, Clusters.close, self._clusters)

    # -- running ----------------------------------------------------------------

    def run(self, **parameters: Any) -> Run:
        """Run once, and wait for it: with the controls as they stand, but for what is given.

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
                self._perform(setting, number, len(settings))
                for number, setting in enumerate(settings, 1)
            ]

    def stop(self) -> None:
        """End what runs, on every rank at once; the experiment stays usable."""
        if self._alone.locked():
            self._stopping.set()
            run = self._run
            if run is not None:
                run.interrupt()

    def start(self) -> None:
        """Run with the controls as they stand, in the background: what the Run button does."""
        try:
            setting = self.settings.complete()
            self._take()
        except (DistkitError, ValueError) as error:
            self.trouble = error
            self._tell()
            return
        threading.Thread(target=self._work, args=(setting,), daemon=True).start()

    def close(self) -> None:
        """End what runs and the cluster that was started for it, and take the panel off the page.

        Table and plot of the runs stay there as a picture. A cluster that was given stays as it is.
        """
        self.stop()
        self._end()
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
        return [(dict(r.parameters), r.run) for r in self.records if isinstance(r.run, Run)]

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per run: parameters, seconds, waiting, messages, bytes, what rank 0 returned."""
        import pandas as pd

        return pd.DataFrame([r.row for r in self.records])

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
        return chart.plot(self.records, names, against)

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
        kinds = {"text/html": html, "image/svg+xml": self._svg(), "text/plain": text}
        return {**data, **kinds}, metadata

    def _draw(self) -> tuple[str, str]:
        return chart.still(self.name, self.records, figure=self._kept_figure())

    def _svg(self) -> str:
        return chart.picture(self.name, self.records, self._kept_figure())

    def _kept_figure(self) -> Figure | None:
        with suppress(Exception):  # the panel tells of it
            return self._figure()
        return None

    def _figure(self) -> Figure | None:
        """The reader's picture, if there is one."""
        if self._picture is None:
            return None
        import pandas as pd

        well = pd.DataFrame([r.row for r in self.records if not r.outcome])
        return self._picture(well, self.settings.complete())

    @property
    def panel(self) -> Panel:
        """The notebook's picture of it."""
        if self._panel is None:
            picture = None if self._picture is None else self._figure
            self._panel = Panel(self, self.settings.controls, self.start, self.stop, picture)
            self._watchers.append(self._panel.refresh)
        return self._panel

    # -- one run ----------------------------------------------------------------

    def _perform(
        self, setting: dict[str, Any], number: int = 1, of: int = 1, aloud: bool = True
    ) -> Run:
        """Make one run, from starting its ranks to its record; on new ranks after a first one."""
        standing = self.settings.complete()
        others = [n for n, v in setting.items() if said(standing.get(n, v)) != said(v)]
        given = ", ".join(f"{n}={results.shown(n, setting[n])}" for n in others)
        self.activity = now = Activity(setting[RANKS], number, of, time.monotonic(), given=given)
        with self.settings.moved({n: setting[n] for n in others}):
            self._tell()
            cluster = self._clusters.get(setting[RANKS], self._stopping.is_set)
            if cluster is None:
                raise RunInterrupted(f"{self.name} was stopped before its ranks were ready.")
            if cluster not in self._warm:
                self._once(cluster, setting, replace(now, cold=True), aloud)
                self._warm.add(cluster)
            return self._once(cluster, setting, now, aloud)

    def _once(
        self, cluster: Cluster, setting: dict[str, Any], activity: Activity, aloud: bool
    ) -> Run:
        """A run and, unless its ranks are cold and all went well, its record."""
        run = submit(cluster, self.fn, setting, self.settings.network)
        self._run, meter = run, Meter()
        activity = replace(activity, since=time.monotonic(), running=True)
        heard: MutableSequence[str] = deque(maxlen=results.LINES) if activity.cold else self.printed
        if self._stopping.is_set():  # pressed in this very moment
            run.interrupt()

        def tell() -> None:
            self.activity = replace(
                activity,
                done=meter.done,
                stopping=self._stopping.is_set(),
                total=meter.total,
                operations=meter.operations,
            )
            self._tell()
            if activity.cold and time.monotonic() > activity.since + COLD:
                run.interrupt()

        counts = not activity.cold
        try:
            follow(run, meter, tell, None if aloud and counts else heard)
        except BaseException as error:
            if activity.cold and isinstance(error, RunInterrupted) and not self._stopping.is_set():
                return run  # by ourselves, after a while
            self.trouble = error  # told at once: to read a long trace takes a while
            if activity.cold:
                counts = True
                print(*heard, sep="\n") if aloud else self.printed.extend(heard)
            raise
        finally:
            self._run, self.activity = None, replace(activity, over=True)
            self._tell()
            if counts:
                self.records.append(results.record(setting, run, meter.done))
        return run

    def _work(self, setting: dict[str, Any]) -> None:
        """The Run button's thread: what goes wrong is told in the panel."""
        with suppress(Exception), self._as_taken():
            self._perform(setting, aloud=False)

    # -- one at a time ------------------------------------------------------------

    def _take(self) -> None:
        if not self._alone.acquire(blocking=False):
            raise ClusterError(
                f"the experiment is running {self.name}. Wait for it, or end it "
                "(experiment.stop())."
            )
        self._stopping.clear()
        self.trouble = None
        self.printed.clear()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._take()
        with self._as_taken():
            yield

    @contextmanager
    def _as_taken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.trouble = error
            raise
        finally:
            self.activity = None
            self._alone.release()
            self._tell()
            self._keep()

    # -- telling ------------------------------------------------------------------

    def _tell(self) -> None:
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
        """Show how far it has come in the cell, or terminal, that waits for it.

        Args:
            keep: show its results there afterwards, even if all went well.
        """
        if not in_notebook():
            with terminal_bar(self._watchers):
                yield
            return
        from IPython.display import display

        bar, first = Bar(self.stop), len(self.records)

        def refresh(experiment: Experiment) -> None:
            bar.refresh(experiment.activity)

        handle = display(bar.widget, display_id=True)
        self._watchers.append(refresh)
        try:
            yield
        except BaseException:
            keep = True
            raise
        finally:
            self._watchers.remove(refresh)
            html, text = chart.still(self.name, self.records[first:]) if keep else ("", "")
            handle.update({"text/html": html, "text/plain": text}, raw=True)
            bar.close()
