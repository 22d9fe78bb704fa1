"""What the runs of an experiment add up to: a record for each, a table and a plot of all. Pure.

The charts are matplotlib's. In a page their colours are CSS variables, so that they follow its
theme while they are shown; in a static picture they are those of paper.
"""

from __future__ import annotations

import io
import re
import threading
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
from distkit.views.compare.projection import figures as measures
from distkit.views.scene import figures, svg
from distkit.views.scene.theme import GRAY, INK, RANKS_LIGHT
from distkit.views.timeline.columns import Columns
from distkit.views.widget.snapshot import as_picture
from distkit_experiments.controls import is_number, said, shown

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Columns of the table of runs.
SECONDS, OUTCOME = "seconds", "outcome"

#: A chart [inches], the height of two lines of its legend, and pixels per inch as SVG counts them.
WIDTH, HEIGHT, LINE, DPI = 4.6, 3.0, 0.24, 72
#: The size of its letters [points].
LETTERS = 11.5
#: Longer words are cut at this many letters.
LONGEST = 20
#: A picture shows this many results at first: the seconds, and what the function returned.
RESULTS = 2
#: This many series have a colour and a name each; the latest runs say what is varied.
NAMED, RECENT = 7, 6
#: Of the lines of several series.
DASHES = ("-", "--", ":", "-.")

#: The colours of a page around a chart: see panel.css.
THEMED = {
    INK: "var(--dkx-fg)",
    GRAY: "var(--dkx-muted)",
    "#ffffff": "var(--dkx-bg)",
    **{c.lower(): f"color-mix(in srgb, {c} 80%, var(--dkx-fg))" for c in RANKS_LIGHT if c != GRAY},
}
#: matplotlib's settings belong to the process, and widgets call from other threads.
_drawing = threading.Lock()


@dataclass(frozen=True)
class Activity:
    """What an experiment does now."""

    words: str
    since: float | None = None  # when the run began
    share: float | None = None  # of its steps that are made, None if that is unknown
    can_stop: bool = False


def words(done: int | None, total: int | None, operations: int) -> str:
    """How far a run has come.

    >>> words(3, 20, 7), words(3, None, 7), words(None, None, 7)
    ('step 3 of 20', 'step 3', '7 operations')
    """
    if done is None:
        return count(operations, "operation")
    return f"step {done:,}" + (f" of {total:,}" if total else "")


@dataclass(frozen=True)
class Record:
    """One run: what it was given, and what came of it.

    ``bytes`` are those of all messages, and of each collective's largest tensor once. ``values``
    are the numbers that rank 0 returned; ``outcome`` is "" if the run ended well.
    """

    parameters: Mapping[str, Any]
    run: Run
    measured: Mapping[str, float]
    values: Mapping[str, float] = field(default_factory=dict)
    outcome: str = ""
    remarks: tuple[str, ...] = ()  # mistakes that hung nobody

    @property
    def row(self) -> dict[str, Any]:
        """Everything, by column."""
        return {**self.parameters, **self.measured, **self.values, OUTCOME: self.outcome or "ok"}


def record(parameters: Mapping[str, Any], run: Run, steps: int | None = None) -> Record:
    """The record of a run that is over, and has made this many steps if that is known."""
    columns = Columns(run.trace)
    picture, waited = columns.frame, measures(columns)
    measured = {
        SECONDS: run.seconds,
        **({"steps made": steps, "seconds a step": run.seconds / steps} if steps else {}),
        "waiting": waited["waiting"] * waited["seconds"],
        "messages": picture["messages"],
        "collectives": picture["collectives"],
        "bytes": picture["message_bytes"] + picture["collective_bytes"],
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
    found = run.findings if len(run.trace) <= MAX_DIAGNOSED_EVENTS else []
    remarks = (str(f) for f in found if f.code != rules.straggler.code)
    return Record(parameters, run, measured, values, remarks=tuple(remarks))


def numbers(value: Any) -> dict[str, float]:
    """The numbers that a function returned, tensors of one number too, by name.

    >>> numbers(0.5), numbers({"loss": 0.25, "weights": [1, 2]}), numbers("done")
    ({'result': 0.5}, {'loss': 0.25}, {})
    """
    found = value if isinstance(value, Mapping) else {"result": value}
    one = {n: v.item() if getattr(v, "shape", None) == () else v for n, v in found.items()}
    return {str(name): v for name, v in one.items() if is_number(v)}


def plottable(records: Sequence[Record]) -> list[str]:
    """The results that a plot can show: first the seconds and what was returned."""
    returned = [name for r in records for name in r.values]
    measured = [name for r in records for name, value in r.measured.items() if value]
    return [*dict.fromkeys([SECONDS, *returned, *measured])]


def headline(name: str, records: Sequence[Record]) -> str:
    """An experiment in one line."""
    failed = sum(bool(r.outcome) for r in records)
    told = count(len(records), "run") if records else "no run yet"
    return f"Experiment with {name}: {told}" + (f", {failed} not to the end" if failed else "")


def frame(records: Sequence[Record]) -> pandas.DataFrame:
    """A row for each run."""
    import pandas as pd

    return pd.DataFrame([r.row for r in records])


def table(records: Sequence[Record], limit: int) -> pandas.DataFrame:
    """The runs in words, the latest first: all of one run, and of several what is not the same."""
    given = dict.fromkeys(name for r in records for name in r.parameters)
    failed = [OUTCOME] * any(r.outcome for r in records)
    cells = {
        name: [shown(name, r.row[name]) if name in r.row else "" for r in records]
        for name in [*given, *plottable(records), *failed]
    }
    told = {n: words for n, words in cells.items() if len(records) == 1 or len({*words}) > 1}
    made = frame(()).reindex(range(1, len(records) + 1)).assign(**told)
    return made[::-1][:limit]


def to_text(name: str, records: Sequence[Record], limit: int = 20) -> str:
    """A table to read in a terminal."""
    head = headline(name, records)
    return f"{head}\n{table(records, limit).to_string()}" if records else head


def to_html(records: Sequence[Record], limit: int = 200) -> str:
    """The same for a page."""
    return str(table(records, limit).to_html(border=0)) if records else ""


def still(
    name: str, records: Sequence[Record], drawing: str = "", limit: int = 12
) -> tuple[str, str]:
    """Table and plot as HTML, and the table as text: what stays where there are no widgets."""
    head, text = headline(name, records), to_text(name, records, limit)
    plot = as_picture(drawing, text)["text/html"] if drawing else ""
    return f"<b>{escape(head)}</b>{to_html(records, limit)}{plot}", text


# -- the plot ---------------------------------------------------------------------


def varied(records: Sequence[Record]) -> list[str]:
    """The parameters in which runs differ, the one for the axis first.

    Numbers come before words, then what took most values in the latest runs.
    """
    latest = [r.parameters for r in records[-RECENT:]]

    def rank(name: str) -> tuple[bool, int]:
        numbers = all(is_number(r.parameters[name]) for r in records if name in r.parameters)
        return not numbers, -len({said(p.get(name)) for p in latest})

    names = dict.fromkeys(name for r in records for name in r.parameters)
    differ = [n for n in names if len({said(r.parameters.get(n)) for r in records}) > 1]
    return sorted(differ, key=rank)


def plot(records: Sequence[Record], results: Sequence[str] = (), against: str = "") -> Figure:
    """Results of runs that ended well against a parameter or a result: one chart a result.

    Runs that differ in other parameters, too, are series of their own: a dot per run, a line
    through the means.

    Args:
        records: the runs.
        results: names of columns; the seconds and what was returned when empty.
        against: a parameter that was varied, or another result; what was varied when "".

    Raises:
        ValueError: there is no such result or parameter, or nothing was varied.
    """
    well = [r for r in records if not r.outcome]
    names, known = varied(well), plottable(well)
    if not names:
        raise ValueError("no plot yet: run at least twice, with different values of a parameter.")
    against, results = against or names[0], list(results) or known[:RESULTS]
    for name, choice in [(against, [*names, *known]), *((r, known) for r in results)]:
        if name not in choice:
            raise ValueError(f"{name!r} cannot be plotted: there is {', '.join(choice)}.")
    along = against if against in names else names[0]
    series: dict[str, list[Record]] = defaultdict(list)
    for r in well:
        others = (f"{n}={_short(shown(n, r.parameters.get(n)))}" for n in names if n != along)
        series[", ".join(others)].append(r)
    lines = min(len(series), NAMED) * (len(series) > 1)
    figure = figures.new(WIDTH * len(results), HEIGHT + LINE * lines, dpi=DPI)
    for axes, result in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results, strict=True
    ):
        _draw(axes, series, result, against)
        _dress(axes, result, against)
    if lines:
        labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(*labels, loc="outside lower left", frameon=False, labelcolor=INK)
    return figure


def _draw(axes: Axes, series: Mapping[str, Sequence[Record]], result: str, against: str) -> None:
    """Each series as a line through its means, and a dot for each of its runs."""
    both = {
        name: [(r.row[against], r.row[result]) for r in some if {result, against} <= r.row.keys()]
        for name, some in series.items()
    }
    place = _axis(axes, [x for pairs in both.values() for x, _ in pairs], against)
    for n, (name, pairs) in enumerate(both.items()):
        by: dict[float, list[float]] = defaultdict(list)
        for x, y in pairs:
            by[place(x)].append(y)
        color, dash = RANKS_LIGHT[min(n, NAMED)], DASHES[n % len(DASHES)]
        # equal results lie on each other: dashes and smaller dots let the first one be seen
        axes.plot(sorted(by), [mean(by[x]) for x in sorted(by)], dash, color=color)
        axes.plot(
            [place(x) for x, _ in pairs],
            [y for _, y in pairs],
            "o",
            color=color,
            markersize=max(6, 9 - 1.5 * n),
            markeredgecolor="#ffffff",
            label=name if n < NAMED else None,
            clip_on=False,
        )


def _axis(axes: Axes, values: Sequence[Any], against: str) -> Callable[[Any], float]:
    """Prepare the x axis for these values; returns where each one stands."""
    if not all(map(is_number, values)):
        words = [*dict.fromkeys(map(said, values))]
        axes.set_xticks(range(len(words)), map(_short, words))
        return lambda value: words.index(said(value))
    if values and 0 < min(values) <= max(values) / 8:
        axes.set_xscale("log", base=10 if any(isinstance(x, float) for x in values) else 2)
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda x, _: shown(against, int(x) if x == int(x) else x))
    return float


def _short(name: str) -> str:
    """A name that leaves room for the axes."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _dress(axes: Axes, result: str, against: str) -> None:
    """Titles, units, and few lines."""
    if result == SECONDS:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda y, _: shown(result, float(y)) if y else "0")
    axes.set_title(result, loc="left", color=INK, fontsize=LETTERS + 1, fontweight="bold")
    axes.set_xlabel(against, color=INK, fontsize=LETTERS, fontweight="bold")
    axes.tick_params(colors=GRAY, length=0, labelsize=LETTERS)
    axes.grid(axis="y", color=GRAY, alpha=0.2)
    axes.patch.set_visible(False)
    axes.spines[:].set_visible(False)


def drawn(figure: Figure, colors: Mapping[str, str] | None = None) -> str:
    """A figure as an SVG element without paper of its own; its words are the page's.

    Args:
        figure: what :func:`plot` made.
        colors: the colours that replace some of its own; None for paper.
    """
    import matplotlib

    file = io.StringIO()
    figure.patch.set_visible(False)
    fonts = [family.strip("'") for family in svg.FONT.split(", ")]
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": "distkit", "font.sans-serif": fonts}
    with _drawing, matplotlib.rc_context(options):
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = file.getvalue()
    # a pixel a point
    text = re.sub(r'="([\d.]+)pt"', r'="\1"', text[text.index("<svg") :], count=2)
    for color, other in (colors or {}).items():
        text = text.replace(color, other)
    return text


def to_svg(records: Sequence[Record], colors: Mapping[str, str] | None = None) -> str:
    """The plot of these runs, "" if nothing was varied yet."""
    if not varied([r for r in records if not r.outcome]):
        return ""
    return drawn(plot(records), colors)
