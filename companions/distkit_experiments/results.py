"""State and results of an experiment: a record for each run, and a table of all. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from typing import Any

from distkit.cluster.runs.run import LOOKED_AT, Run
from distkit.diagnosis.findings import Kind
from distkit.errors import RunInterrupted
from distkit.trace.trace import Trace
from distkit.views.compare.figures import figures
from distkit.views.scene.units import aligned, count, human_bytes, human_seconds
from distkit.views.timeline.columns import Columns
from distkit_experiments.controls import BYTES, RANKS, RATE, TIMES, said, worded

#: What is measured of every run.
SECONDS, MESSAGES, COLLECTIVES, SIZE = "seconds", "messages", "collectives", "bytes"
#: Of those whose function goes through ``dk.progress``: how many steps, and how long each took.
STEPS, PER_STEP = "steps made", "seconds a step"
#: For so long a rank, or a worker of servers, waited for others, on average: as in Compare.
WAITING = "waiting"
MEASURED = SECONDS, STEPS, PER_STEP, WAITING, MESSAGES, COLLECTIVES, SIZE
COUNTED = STEPS, MESSAGES, COLLECTIVES, SIZE
OUTCOME = "outcome"
#: What the columns mean; others are parameters, or were returned by rank 0.
MEANINGS = {
    "#": "number of the run",
    SECONDS: "from the start of the run on all ranks to its end",
    STEPS: "of dk.progress or dk.watch_gradients, on each rank",
    PER_STEP: "seconds of the run by its steps",
    WAITING: "for others: mean of the ranks, or of the workers where there are servers",
    MESSAGES: "between two ranks, and requests to servers: sum of all ranks",
    COLLECTIVES: "of the backend, each counted once for all ranks",
    SIZE: "in messages, sum of all ranks; of each collective its largest tensor once",
    OUTCOME: "how the run ended",
}

#: Of what ranks print, the latest so many lines are kept.
LINES = 200


@dataclass(frozen=True)
class Activity:
    """The state of an experiment: the n-th of its runs, since when, how far it has come."""

    ranks: int
    number: int = 1
    of: int = 1
    since: float = 0.0
    running: bool = False  # else its ranks are being started
    stopping: bool = False
    over: bool = False  # its trace is being read
    done: int | None = None
    total: int | None = None
    operations: int = 0
    given: str = ""  # the values of one of many runs, in words
    cold: bool = False  # it is made for what its ranks import and keep, and not measured


def words(activity: Activity) -> str:
    """The state of an experiment in one line, without seconds.

    >>> words(Activity(4, running=True, done=3, total=20))
    'step 3 of 20'
    >>> words(Activity(4, running=True, cold=True, operations=7))
    'warming new ranks up, not measured · 7 operations'
    """
    given = f" ({activity.given})" if activity.given else ""
    which = f"run {activity.number} of {activity.of}{given} · " if activity.of > 1 else ""
    which += "warming new ranks up, not measured · " if activity.cold else ""
    if activity.over:
        return f"{which}reading the trace"
    if activity.stopping:
        return f"{which}stopping"
    if not activity.running:
        return f"{which}starting {count(activity.ranks, 'rank')}"
    if activity.done is not None:
        end = f" of {activity.total:,}" if activity.total else ""
        return f"{which}step {activity.done:,}{end}"
    return f"{which}{count(activity.operations, 'operation')}"


@dataclass(frozen=True)
class SavedRun:
    """A run that was made earlier: its trace is left of it."""

    trace: Trace
    error: None = None


@dataclass(frozen=True)
class Record:
    """One run: what it was given, and what came of it.

    ``bytes`` are those of all messages, and of each collective's largest tensor once. ``values``
    are the numbers that rank 0 returned; ``outcome`` is "" if the run ended well.
    """

    parameters: Mapping[str, Any]
    run: Run | SavedRun
    measured: Mapping[str, float]
    values: Mapping[str, float] = field(default_factory=dict)
    outcome: str = ""
    remarks: tuple[str, ...] = ()  # mistakes that hung nobody

    @property
    def row(self) -> dict[str, Any]:
        """Everything, by column."""
        return {**self.parameters, **self.measured, **self.values, OUTCOME: self.outcome or "ok"}


@dataclass(eq=False)
class State:
    """The part of an experiment that a panel shows."""

    name: str
    records: list[Record] = field(default_factory=list)
    activity: Activity | None = None  # what it does now, None for nothing
    trouble: BaseException | None = None  # why the latest run went wrong
    printed: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))


def record(parameters: Mapping[str, Any], run: Run, steps: int | None = None) -> Record:
    """The record of a run that is over, and has made so many steps if that is known."""
    columns = Columns(run.trace)
    picture, waited = columns.frame, figures(columns)
    each = {STEPS: steps, PER_STEP: run.seconds / steps} if steps else {}
    measured = {
        SECONDS: run.seconds,
        **each,
        WAITING: waited["waiting"] * waited["seconds"],
        MESSAGES: picture["messages"],
        COLLECTIVES: picture["collectives"],
        SIZE: picture["message_bytes"] + picture["collective_bytes"],
    }
    if run.error is not None:
        stopped = isinstance(run.error, RunInterrupted)
        outcome = "stopped" if stopped else type(run.error).__name__
        return Record(parameters, run, measured, outcome=outcome)
    taken = {*parameters, *measured, OUTCOME}
    values = {
        name if name not in taken else f"{name} returned": value
        for name, value in numbers(run.results[0]).items()
    }
    found = run.findings if len(run.trace) <= LOOKED_AT else []
    remarks = (str(f) for f in found if f.kind is not Kind.STRAGGLER)
    return Record(parameters, run, measured, values, remarks=tuple(remarks))


def numbers(value: Any) -> dict[str, float]:
    """The numbers that a function returned, by name.

    >>> numbers(0.5), numbers({"loss": 0.25, "weights": [1, 2]}), numbers("done")
    ({'result': 0.5}, {'loss': 0.25}, {})
    """
    found = value if isinstance(value, Mapping) else {"result": value}
    return {str(name): x for name, v in found.items() if (x := _number(v)) is not None}


def _number(value: Any) -> float | None:
    """A number, or a tensor that is one."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, Real) and not isinstance(value, bool) else None  # type: ignore[return-value]


def constant(records: Sequence[Record]) -> dict[str, Any]:
    """The parameters, and what was counted, that are the same in all runs.

    Of one run only what was counted: it is read beside what it was given.
    """
    if not records:
        return {}
    given = records[0].parameters if len(records) > 1 else ()
    rows = [r.row for r in records]
    return {
        name: rows[0][name]
        for name in [*given, *(n for n in COUNTED if rows[0].get(n))]
        if len({said(row.get(name)) for row in rows}) == 1
    }


def columns(records: Sequence[Record]) -> list[str]:
    """The columns that tell something: what differs, what was returned, what was measured."""
    same = constant(records)
    names = dict.fromkeys(n for r in records for n in r.parameters if n not in same)
    failed = [OUTCOME] if any(r.outcome for r in records) else []
    return [*names, *(n for n in plottable(records) if n not in same), *failed]


def plottable(records: Sequence[Record]) -> list[str]:
    """The results that a plot can show: first the seconds and what was returned."""
    returned = dict.fromkeys(name for r in records for name in r.values)
    measured = (name for name in MEASURED if any(r.measured.get(name) for r in records))
    return list(dict.fromkeys([SECONDS, *returned, *measured]))


def foremost(records: Sequence[Record]) -> str:
    """What a plot shows first: the first number that was returned, else the seconds."""
    return next((name for r in records for name in r.values), SECONDS)


def of_ranks(records: Sequence[Record], cpus: int) -> str:
    """Words about runs on different numbers of ranks: what was not the same in them; "" if none.

    >>> of_ranks([], 2)
    ''
    """
    steps: dict[int, float] = {
        r.parameters[RANKS]: r.measured.get(STEPS, 0)
        for r in records
        if RANKS in r.parameters and not r.outcome
    }
    if len(steps) < 2:
        return ""
    few, many = min(steps), max(steps)
    said = []
    if steps[many] < steps[few]:
        said.append(
            f"With {many} ranks each made {steps[many]:,} steps, with {count(few, 'rank')} "
            f"{steps[few]:,}: "
            "fewer updates of the weights. Compare losses after as many steps."
        )
    elif steps[few] and steps[many] == steps[few]:
        said.append(
            f"Each rank made {count(int(steps[few]), 'step')}, however many ranks there were: "
            f"if its batch was the same, {many} ranks did {many / few:.3g} times the work of {few}."
        )
    if many > cpus:
        said.append(
            f"This machine has {count(cpus, 'processor')}: more ranks than that take turns."
        )
    return " ".join(said)


def table(records: Sequence[Record], limit: int) -> list[list[str]]:
    """The names of those columns, and the runs in words, the latest first."""
    names = columns(records)
    numbered = list(enumerate((r.row for r in records), 1))[::-1][:limit]
    return [
        ["#", *names],
        *(
            [str(n), *(shown(name, row[name]) if name in row else "" for name in names)]
            for n, row in numbered
        ),
    ]


def shown(name: str, value: Any) -> str:
    """A value of a column, with its unit.

    >>> shown("seconds", 0.25), shown("size", 4096), shown("loss", 0.123456), shown("ranks", 4)
    ('250 ms', '4 KiB', '0.1235', '4')
    """
    if name in (*TIMES, RATE):
        return worded(name, value)
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and name in (SECONDS, PER_STEP, WAITING):
        return human_seconds(float(value)) if value else "0 s"
    if number and name in (SIZE, *BYTES):
        return human_bytes(float(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):  # the zeros of a small one are wide
        return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.4g}"
    return said(value)


def common(records: Sequence[Record]) -> str:
    """What all runs share, in words."""
    return ", ".join(f"{name}={shown(name, value)}" for name, value in constant(records).items())


def headline(name: str, records: Sequence[Record]) -> str:
    """An experiment in one line."""
    well = [r.measured[SECONDS] for r in records if not r.outcome]
    if not records:
        return f"Experiment with {name}: no run yet"
    bad = f", {len(records) - len(well)} not to the end" if len(well) < len(records) else ""
    fast = f", {human_seconds(min(well))} to {human_seconds(max(well))}" if len(well) > 1 else ""
    return f"Experiment with {name}: {count(len(records), 'run')}{bad}{fast}"


def to_text(name: str, records: Sequence[Record], limit: int = 20) -> str:
    """A table to read in a terminal, the latest run first."""
    if not records:
        return headline(name, records)
    more = [f"  … and {len(records) - limit} more"] if len(records) > limit else []
    same = f" ({common(records)})" if constant(records) else ""
    lines = [f"  {line}" for line in aligned(table(records, limit))]
    return "\n".join([headline(name, records) + same, *lines, *more])


def to_html(records: Sequence[Record], limit: int = 200) -> str:
    """The same for a page."""
    if not records:
        return ""
    names, *rows = table(records, limit)
    given = {name for r in records for name in r.parameters}
    other = {name: "set for the run" if name in given else "returned by rank 0" for name in names}
    head = "".join(
        f'<th scope="col" title="{MEANINGS.get(name, other[name])}">{escape(name)}</th>'
        for name in names
    )
    body = "".join(
        f"<tr data-run={row[0]}{' class=dkx-bad' if r.outcome else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for r, row in zip(reversed(records), rows, strict=False)
    )
    several = f"{len(records)} runs, the latest first" if len(records) > 1 else "1 run"
    told = " · ".join(filter(None, [several, common(records)]))
    more = f"<p>… and {len(records) - limit} earlier</p>" if len(records) > limit else ""
    return (
        f'<table aria-label="Runs, the latest first"><caption>{escape(told)}</caption>'
        f"<tr>{head}</tr>{body}</table>{more}"
    )
