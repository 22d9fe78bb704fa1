"""The results of an experiment: a record per run, and a table and a plot of all runs.

No side effects. matplotlib draws the charts, in colors that suit light and dark pages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import mean
from typing import TYPE_CHECKING, Any

from distkit._format import count
from distkit.cluster.runs.conductor import MAX_DIAGNOSED_EVENTS
from distkit.cluster.runs.run import Run
from distkit.diagnosis import rules
from distkit.errors import RunInterrupted
from distkit.views.compare import compute_metrics
from distkit.views.scene import figures
from distkit.views.scene.theme import RANKS_LIGHT
from distkit.views.timeline.columns import Columns
from distkit.views.widget.snapshot import as_picture
from distkit_experiments.controls import format_plain, format_value, is_number

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Columns of the table of runs.
SECONDS, OUTCOME = "seconds", "outcome"

#: WIDTH and HEIGHT are the size of a chart, and LINE is the height of a legend line [inches].
#: DPI is the number of pixels per inch.
WIDTH, HEIGHT, LINE, DPI = 4.6, 3.0, 0.24, 72
#: Font size [points].
FONT_SIZE = 11.5
#: Maximum length of labels [characters].
MAX_LABEL = 20
#: Default number of charts: the run time, and the first returned value.
DEFAULT_CHARTS = 2
#: At most MAX_NAMED series have distinct colors and names. The latest RECENT_RUNS runs determine
#: the parameter of the x axis.
MAX_NAMED, RECENT_RUNS = 7, 6
#: Line styles of series.
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Activity:
    """The current activity of an experiment."""

    text: str
    since: float | None = None  # start time of the run
    can_stop: bool = False


def progress_text(done: int | None, operations: int) -> str:
    """Describe the progress of a run.

    >>> progress_text(3, 7), progress_text(None, 7)
    ('step 3', '7 operations')
    """
    return count(operations, "operation") if done is None else f"step {done:,}"


@dataclass(frozen=True)
class Record:
    """The parameters and results of one run.

    In ``measured``, ``bytes`` is the size of all messages plus, for each collective, the size of
    its largest call. ``values`` are the numbers that rank 0 returned; ``outcome`` is "" if the run
    succeeded.
    """

    parameters: Mapping[str, Any]
    run: Run
    measured: Mapping[str, float]
    values: Mapping[str, float] = field(default_factory=dict)
    outcome: str = ""
    remarks: tuple[str, ...] = ()  # findings that did not cause a hang

    @property
    def row(self) -> dict[str, Any]:
        """All values, by column."""
        return {**self.parameters, **self.measured, **self.values, OUTCOME: self.outcome or "ok"}


def record(parameters: Mapping[str, Any], run: Run, steps: int | None = None) -> Record:
    """Return the record of a finished run; ``steps`` is the number of completed steps, if known."""
    columns = Columns(run.trace)
    summary, measurements = columns.frame, compute_metrics(columns)
    measured = {
        SECONDS: run.seconds,
        **({"completed steps": steps, "seconds per step": run.seconds / steps} if steps else {}),
        "waiting": measurements["waiting"] * measurements["seconds"],
        "messages": summary["messages"],
        "collectives": summary["collectives"],
        "bytes": summary["message_bytes"] + summary["collective_bytes"],
    }
    if run.error is not None:
        outcome = "stopped" if isinstance(run.error, RunInterrupted) else type(run.error).__name__
        return Record(parameters, run, measured, outcome=outcome)
    reserved = {*parameters, *measured, OUTCOME}
    values = {
        name if name not in reserved else f"{name} returned": value
        for name, value in numbers(run.results[0]).items()
    }
    findings = run.findings if len(run.trace) <= MAX_DIAGNOSED_EVENTS else []
    remarks = (str(f) for f in findings if f.code != rules.straggler.code)
    return Record(parameters, run, measured, values, remarks=tuple(remarks))


def numbers(value: Any) -> dict[str, float]:
    """Return the numbers in a result by name, including scalar tensors.

    >>> numbers(0.5), numbers({"loss": 0.25, "weights": [1, 2]}), numbers("done")
    ({'result': 0.5}, {'loss': 0.25}, {})
    """
    named = value if isinstance(value, Mapping) else {"result": value}
    scalars = {n: v.item() if getattr(v, "shape", None) == () else v for n, v in named.items()}
    return {str(name): v for name, v in scalars.items() if is_number(v)}


def plottable(records: Sequence[Record]) -> list[str]:
    """Return the results that can be plotted: run time and returned values first."""
    returned = [name for r in records for name in r.values]
    measured = [name for r in records for name, value in r.measured.items() if value]
    return [*dict.fromkeys([SECONDS, *returned, *measured])]


def headline(name: str, records: Sequence[Record]) -> str:
    """Summarize an experiment in one line."""
    failed = sum(bool(r.outcome) for r in records)
    runs = count(len(records), "run") if records else "no runs yet"
    return f"Experiment with {name}: {runs}" + (f", {failed} failed or stopped" if failed else "")


def frame(records: Sequence[Record]) -> pandas.DataFrame:
    """Return a DataFrame with a row for each run."""
    import pandas as pd

    return pd.DataFrame([r.row for r in records])


def table(records: Sequence[Record], limit: int) -> tuple[pandas.DataFrame, str]:
    """Return the formatted runs, latest first, and the values that all runs have in common.

    The values in common of several runs are not in the table.
    """
    names = dict.fromkeys(name for r in records for name in r.parameters)
    failed = [OUTCOME] * any(r.outcome for r in records)
    cells = {
        name: [format_value(name, r.row[name]) if name in r.row else "" for r in records]
        for name in [*names, *plottable(records), *failed]
    }
    columns = {n: column for n, column in cells.items() if len(records) == 1 or len({*column}) > 1}
    rows = frame(()).reindex(range(1, len(records) + 1)).assign(**columns)
    common = " · ".join(f"{n} {column[0]}" for n, column in cells.items() if n not in columns)
    return rows[::-1][:limit], f"all runs: {common}" if common else ""


def to_text(name: str, records: Sequence[Record], limit: int = 20) -> str:
    """Return the table for a terminal."""
    if not records:
        return headline(name, records)
    rows, common = table(records, limit)
    return "\n".join(filter(None, [headline(name, records), rows.to_string(), common]))


def to_html(records: Sequence[Record], limit: int = 200) -> str:
    """Return the table as HTML."""
    if not records:
        return ""
    rows, common = table(records, limit)
    return f"{rows.to_html(border=0)}{f'<p>{escape(common)}</p>' * bool(common)}"


def static_html(
    name: str, records: Sequence[Record], drawing: str = "", limit: int = 12, closed: bool = False
) -> tuple[str, str]:
    """Return the table and plot as HTML, and the table as text, for pages without widgets."""
    head, text = headline(name, records), to_text(name, records, limit)
    plot = f"<div>{as_picture(drawing, text)['text/html']}</div>" if drawing else ""
    return (
        '<div style="border: 1px solid #8886; border-radius: 12px; padding: 8px 16px">'
        f"<b>{escape(head)}</b>{' · closed; run the cell again to show the controls' * closed}"
        f"{to_html(records, limit)}{plot}</div>"
    ), text


# -- the plot ---------------------------------------------------------------------


def varied(records: Sequence[Record]) -> list[str]:
    """Return the parameters that differ between runs, starting with the one for the x axis.

    Numeric parameters come before the others. Within each kind, parameters with more values in the
    latest runs come first.
    """
    latest = [r.parameters for r in records[-RECENT_RUNS:]]

    def sort_key(name: str) -> tuple[bool, int]:
        numeric = all(is_number(r.parameters[name]) for r in records if name in r.parameters)
        return not numeric, -len({format_plain(p.get(name)) for p in latest})

    names = dict.fromkeys(name for r in records for name in r.parameters)
    differ = [n for n in names if len({format_plain(r.parameters.get(n)) for r in records}) > 1]
    return sorted(differ, key=sort_key)


@figures.style()
def plot(records: Sequence[Record], results: Sequence[str] = (), against: str = "") -> Figure:
    """Plot results of successful runs against a parameter or a result, one chart per result.

    Runs that also differ in other parameters form separate series, with a dot per run and a line
    through the means.

    Args:
        records: the runs.
        results: names of columns; if empty, the run time and the first returned value
            (or, if there is none, the first measurement).
        against: a varied parameter or another result; if "", the first varied parameter.

    Raises:
        ValueError: a result or parameter is unknown, or no parameter was varied.
    """
    successful = [r for r in records if not r.outcome]
    names, known = varied(successful), plottable(successful)
    if not names:
        raise ValueError(
            "nothing to plot yet: run the experiment at least twice, with different values of a "
            "parameter."
        )
    against, results = against or names[0], list(results) or known[:DEFAULT_CHARTS]
    for name, choice in [(against, [*names, *known]), *((r, known) for r in results)]:
        if name not in choice:
            raise ValueError(f"{name!r} cannot be plotted. Available: {', '.join(choice)}.")
    axis = against if against in names else names[0]
    series: dict[str, list[Record]] = defaultdict(list)
    for r in successful:
        labels = (
            f"{n}={_shorten(format_value(n, r.parameters.get(n)))}" for n in names if n != axis
        )
        series[", ".join(labels)].append(r)
    lines = min(len(series), MAX_NAMED) * (len(series) > 1)
    figure = figures.new(WIDTH * len(results), HEIGHT + LINE * lines, dpi=DPI)
    for axes, result in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results, strict=True
    ):
        _draw(axes, series, result, against)
        _style(axes, result, against)
    if lines:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left")
    return figure


def _draw(axes: Axes, series: Mapping[str, Sequence[Record]], result: str, against: str) -> None:
    """Draw each series as a line through its means, with a dot for each run."""
    points = {
        name: [
            (r.row[against], r.row[result]) for r in records if {result, against} <= r.row.keys()
        ]
        for name, records in series.items()
    }
    position = _axis(axes, [x for pairs in points.values() for x, _ in pairs], against)
    for n, (name, pairs) in enumerate(points.items()):
        values: dict[float, list[float]] = defaultdict(list)
        for x, y in pairs:
            values[position(x)].append(y)
        color, dash = RANKS_LIGHT[min(n, MAX_NAMED)], DASHES[n % len(DASHES)]
        # dashes and smaller dots keep overlapping results visible
        axes.plot(sorted(values), [mean(values[x]) for x in sorted(values)], dash, color=color)
        axes.plot(
            [position(x) for x, _ in pairs],
            [y for _, y in pairs],
            "o",
            color=color,
            markersize=max(6, 9 - 1.5 * n),
            markeredgecolor="#ffffff",
            label=name if n < MAX_NAMED else None,
            clip_on=False,
        )


def _axis(axes: Axes, values: Sequence[Any], against: str) -> Callable[[Any], float]:
    """Set up the x axis for these values; return a function that maps a value to its position."""
    if not all(map(is_number, values)):
        labels = [*dict.fromkeys(map(format_plain, values))]
        axes.set_xticks(range(len(labels)), map(_shorten, labels))
        return lambda value: labels.index(format_plain(value))
    if values and 0 < min(values) <= max(values) / 8:
        axes.set_xscale("log", base=10 if any(isinstance(x, float) for x in values) else 2)
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda x, _: format_value(against, int(x) if x == int(x) else x))
    return float


def _shorten(name: str) -> str:
    """Shorten a name to at most MAX_LABEL characters."""
    return name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…"


def _style(axes: Axes, result: str, against: str) -> None:
    """Set the title, units and style of a chart."""
    if result == SECONDS:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda y, _: format_value(result, float(y)) if y else "0")
    axes.set_title(result, fontsize=FONT_SIZE + 1, fontweight="bold")
    axes.set_xlabel(against, fontsize=FONT_SIZE, fontweight="bold")
    axes.tick_params(length=0, labelsize=FONT_SIZE)
    axes.grid(axis="y")
    axes.spines[:].set_visible(False)


def figure_svg(figure: Figure) -> str:
    """Return a figure, for example from :func:`plot`, as SVG text at one pixel per point."""
    return re.sub(r'="([\d.]+)pt"', r'="\1"', figures.to_svg(figure), count=2)


def to_svg(records: Sequence[Record]) -> str:
    """Return the plot of these runs as SVG; "" if no parameter has been varied yet."""
    if not varied([r for r in records if not r.outcome]):
        return ""
    return figure_svg(plot(records))
