"""Every combination of some parameters on real ranks, as a data frame of results and traces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from distkit.cluster.cluster import Cluster
from distkit.errors import RunError, RunInterrupted
from distkit.views.scene.units import count
from distkit_experiments import chart, results
from distkit_experiments.controls import EMPTY, RANKS, listed, parameters
from distkit_experiments.experiment import Experiment
from distkit_experiments.folder import Folder
from distkit_experiments.results import MEASURED, OUTCOME, Record, SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The column of the traces.
TRACE = "trace"
#: A notebook shows so many rows of a sweep.
ROWS = 100


def sweep(
    fn: Callable[..., Any],
    cluster: Cluster | None = None,
    /,
    *,
    folder: str | Path | None = None,
    **values: Any,
) -> Sweep:
    """Run every combination of the values given, one after the other, on real ranks.

    ``ranks``, ``straggler``, ``latency`` and ``bandwidth`` mean what they mean for an
    :class:`~distkit.Experiment`; all other values are arguments of the function. Ctrl-C and the
    Stop button end a sweep. With a ``folder``, every finished run is kept there, and the same
    call goes on where it stopped; a run is made again if the function, the trouble, the cluster,
    the machine, or the version of torch or distkit has changed since.

    Args:
        fn: runs on every rank; the numbers that rank 0 returns become columns.
        cluster: where it runs when the number of ranks is its own; others are started.
        folder: where finished runs and their traces are kept; nowhere when None.
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
        >>> frame = sweep(train, ranks=[1, 2, 4], batch=[8, 32])        # doctest: +SKIP
        >>> frame.chart("seconds", against="ranks")                     # doctest: +SKIP
        >>> frame.trace[5].diagnose()                                   # doctest: +SKIP
    """
    lists = {name: listed(name, given) for name, given in values.items()}
    bare = [name for name, default in parameters(fn).items() if default is EMPTY]
    needed = {n: lists[n] for n in bare if n in lists}
    with Experiment(fn, cluster, picture=None, **needed) as experiment:
        settings = experiment.settings.product(**lists)
        kept = None if folder is None else Folder(Path(folder), fn, experiment._clusters.plan)
        if kept is not None:
            kept.tell_outdated(settings)
        records = _perform(experiment, settings, kept)
    _tell_failures(records)
    return Sweep.of(experiment.name, records)


def _perform(
    experiment: Experiment, settings: list[dict[str, Any]], kept: Folder | None
) -> list[Record]:
    """The records of all settings; those with as many ranks run one after the other."""
    found: dict[int, Record] = {}
    with experiment._busy(), experiment._shown(keep=False):
        for n in sorted(range(len(settings)), key=lambda n: int(settings[n][RANKS])):
            record = None if kept is None else kept.find(settings[n])
            if record is None:
                record = _attempt(experiment, settings[n], len(found) + 1, len(settings))
                if kept is not None and not record.outcome:
                    kept.add(record)
            else:
                experiment.records.append(record)
            found[n] = record
    return [found[n] for n in sorted(found)]


def _attempt(experiment: Experiment, setting: dict[str, Any], number: int, of: int) -> Record:
    """The record of a run, well ended or not."""
    try:
        experiment._perform(setting, number, of)
    except RunInterrupted:
        raise
    except RunError:
        pass
    return experiment.records[-1]


def _tell_failures(records: list[Record]) -> None:
    failed = [r for r in records if r.outcome]
    if not failed:
        return
    error = failed[0].run.error
    if len(failed) == len(records) and error is not None:
        raise error
    given = ", ".join(f"{n}={results.shown(n, v)}" for n, v in failed[0].parameters.items())
    warnings.warn(
        f"{len(failed)} of {count(len(records), 'run')} failed, see the column {OUTCOME!r}. "
        f"The first of them, {given}: {error}",
        stacklevel=3,
    )


class Sweep(pd.DataFrame):  # type: ignore[misc]  # pandas has no type hints
    """The results of a sweep: a data frame that knows its parameters, draws itself, has traces.

    What is selected from it (``frame[frame.ranks == 4]``) is one again.
    """

    _metadata = ("function", "varied")

    @classmethod
    def of(cls, function: str, records: list[Record]) -> Sweep:
        """A row per record."""
        made = cls([{**r.row, TRACE: r.run.trace} for r in records])
        made.function, made.varied = function, [*records[0].parameters]
        return made

    @property
    def _constructor(self) -> type[Sweep]:
        return Sweep

    def chart(self, *names: str, against: str = "") -> Figure:
        """Results against a parameter, as :meth:`distkit.Experiment.plot` draws them.

        Args:
            names: columns; the seconds and what was returned if none.
            against: a parameter or another result; the parameter that was varied if none.

        Raises:
            ValueError: there is no such column, or nothing was varied.
        """
        return chart.plot(self._records, names, against)

    @property
    def _records(self) -> list[Record]:
        return [_record_of(row, self.varied) for row in self.to_dict("records")]

    @property
    def _is_whole(self) -> bool:
        """True if it has the columns of a sweep, and is not something computed from one."""
        varied: Any = getattr(self, "varied", None)  # pandas hands on None for what is combined
        return {*(varied or [None]), OUTCOME, TRACE} <= {*self.columns}

    def __repr__(self) -> str:
        return str(pd.DataFrame(self.drop(columns=TRACE, errors="ignore")))

    def _repr_html_(self) -> str:
        """The table and the chart."""
        if self._is_whole and len(self):
            return chart.still(self.function, self._records, ROWS)[0]
        return str(pd.DataFrame(self)._repr_html_())


def _record_of(row: dict[str, Any], varied: Iterable[str]) -> Record:
    """A row as a record again; pandas has filled the gaps of other rows with NaN."""
    told = {name: value for name, value in row.items() if value == value or name in varied}
    outcome, trace = told.pop(OUTCOME), told.pop(TRACE)
    given = {name: told.pop(name) for name in varied}
    measured = {name: told.pop(name) for name in MEASURED if name in told}
    return Record(given, SavedRun(trace), measured, told, outcome * (outcome != "ok"))
