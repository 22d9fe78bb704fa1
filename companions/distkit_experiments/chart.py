"""Any result of an experiment against any parameter or result, and the table beside it. Pure.

The charts are matplotlib's. In a page their colours are CSS variables, so that they follow its
theme while they are shown; in a static picture they are those of paper.
"""

from __future__ import annotations

import io
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from html import escape
from numbers import Real
from statistics import mean
from typing import TYPE_CHECKING, Any

from distkit.views.scene import figures, svg
from distkit.views.scene.geometry import text_width
from distkit.views.scene.theme import GRAY, INK, RANKS_LIGHT
from distkit.views.widget.snapshot import as_picture
from distkit_experiments.controls import said
from distkit_experiments.results import (
    SECONDS,
    Record,
    headline,
    plottable,
    shown,
    to_html,
    to_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A chart [inches], that of a panel, which has one only, and pixels per inch as SVG counts them.
WIDTH, WIDE, HEIGHT, DPI = 4.6, 7.2, 3.0, 72
#: The size of its letters [points]: they are read from the last row, too.
LETTERS = 11.5
#: A line of the legend [inches], and what stands around its words [pixels].
LINE, HANDLE = 0.24, 70
#: A picture shows so many results at first: the seconds, and what the function returned.
RESULTS = 2
#: So many series have a colour and a name each.
NAMED = 7
#: What was varied shows in so many of the latest runs.
RECENT = 6

#: A static table has at most so many rows.
MAX_ROWS = 12

#: The colours of a page around a chart: see panel.css.
THEMED = {
    INK: "var(--dkx-fg)",
    GRAY: "var(--dkx-muted)",
    "#ffffff": "var(--dkx-bg)",
    **{c.lower(): f"color-mix(in srgb, {c} 80%, var(--dkx-fg))" for c in RANKS_LIGHT if c != GRAY},
}
#: matplotlib's settings belong to the process, and widgets call from other threads.
_drawing = threading.Lock()


def varied(records: Sequence[Record]) -> list[str]:
    """The parameters in which runs differ, the one for the axis first.

    Numbers come before words, then what took most values in the latest runs, then what was
    changed last.
    """
    names = [name for name, values in _values(records).items() if len(values) > 1]
    words = {n for n in names if not all(map(is_number, _values(records)[n].values()))}
    recent, last = _values(records[-RECENT:]), _values(records[-2:])
    return sorted(names, key=lambda n: (n in words, -len(recent[n]), -len(last[n])))


def _values(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The values of each parameter, by what they are called."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for r in records:
        for name, value in r.parameters.items():
            found[name][said(value)] = value
    return found


def is_number(value: Any) -> bool:
    """True if it has a place on an axis."""
    return isinstance(value, Real) and not isinstance(value, bool)


def plot(
    records: Sequence[Record],
    results: Sequence[str] = (),
    against: str = "",
    width: float = WIDTH,
) -> Figure:
    """Results of runs that ended well against a parameter or a result: one chart a result.

    Runs that differ in other parameters, too, are series of their own: a dot per run, a line
    through the means.

    Args:
        records: the runs.
        results: names of columns; the seconds and what was returned when empty.
        against: a parameter that was varied, or another result; what was varied when "".
        width: of each chart [inches].

    Raises:
        ValueError: there is no such result or parameter, or nothing was varied.
    """
    well = [r for r in records if not r.outcome]
    names, known = varied(well), plottable(well)
    if not names:
        raise ValueError("no plot yet: run at least twice, with different values of a knob.")
    against, results = against or names[0], list(results) or known[:RESULTS]
    for name, choice in [(against, [*names, *known]), *((r, known) for r in results)]:
        if name not in choice:
            raise ValueError(f"{name!r} cannot be plotted: there is {', '.join(choice)}.")
    along = against if against in names else names[0]
    series = _series(well, [n for n in names if n != along])
    words = {id(r): _in_words(n, r) for n, r in enumerate(records, 1) if not r.outcome}
    figure = figures.new(width * len(results), HEIGHT, dpi=DPI)
    for axes, result in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results, strict=True
    ):
        _draw(axes, series, result, against, words)
        _dress(axes, result, against)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        widest = max(text_width(label, LETTERS) for label in labels) + HANDLE
        columns = min(len(labels), 2 if 2 * widest < DPI * width * len(results) else 1)
        figure.set_figheight(HEIGHT + LINE * max(0, math.ceil(len(labels) / columns) - 2))
        figure.legend(
            lines,
            labels,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=LETTERS,
            labelcolor=INK,
        )
    return figure


def _series(records: Sequence[Record], others: Sequence[str]) -> dict[str, list[Record]]:
    """By what else they were given: the records that differ in none of ``others``."""
    found: dict[str, list[Record]] = {}
    for r in records:
        key = ", ".join(f"{n}={shown(n, r.parameters.get(n))}" for n in others)
        found.setdefault(key, []).append(r)
    return found


#: Of the lines of several series.
DASHES = ("-", "--", ":", "-.")


def _draw(
    axes: Axes,
    series: Mapping[str, Sequence[Record]],
    result: str,
    against: str,
    words: Mapping[int, str],
) -> None:
    """Lines and dots; on each dot an invisible spot, whose id tells of its run."""
    rows = [r.row for some in series.values() for r in some]
    place = _axis(axes, [row[against] for row in rows if {result, against} <= row.keys()], against)
    for n, (name, records) in enumerate(series.items()):
        by: dict[float, list[float]] = defaultdict(list)
        for row in (r.row for r in records if {result, against} <= r.row.keys()):
            by[place(row[against])].append(row[result])
        color = RANKS_LIGHT[n] if n < NAMED else GRAY
        label = _cut(name, DPI * WIDTH - HANDLE) if n < NAMED and len(series) > 1 else None
        means, dots = [mean(by[x]) for x in sorted(by)], [(x, y) for x in by for y in by[x]]
        # equal results lie on each other: dashes and smaller dots let the first one be seen
        axes.plot(sorted(by), means, DASHES[n % 4], color=color, clip_on=False)
        axes.plot(
            [x for x, _ in dots],
            [y for _, y in dots],
            "o",
            markersize=max(6, 9 - 1.5 * n),
            color=color,
            label=label,
            markeredgecolor="#ffffff",
            clip_on=False,
        )
        for r in (r for r in records if {result, against} <= r.row.keys()):
            spot = [place(r.row[against])], [r.row[result]]
            gid = words[id(r)]
            axes.plot(*spot, "o", markersize=15, color=color, alpha=0, clip_on=False, gid=gid)


def _in_words(number: int, record: Record) -> str:
    """What a run was given and what it gave."""
    gave = {SECONDS: record.measured[SECONDS], **record.values}
    given, found = (
        ", ".join(f"{name}={shown(name, value)}" for name, value in some.items())
        for some in (record.parameters, gave)
    )
    return f"run {number}: {given} → {found}"


def _axis(axes: Axes, values: Sequence[Any], against: str) -> Callable[[Any], float]:
    """Prepare the x axis for these values; returns where each one stands."""
    if not all(map(is_number, values)):
        words = list(dict.fromkeys(map(said, values)))
        axes.set_xticks(range(len(words)), [_cut(w, 90) for w in words])
        axes.set_xlim(-0.5, len(words) - 0.5)
        return lambda value: words.index(said(value))
    ordered = sorted(set(values))
    log = 0 < ordered[0] <= ordered[-1] / 8
    if log:
        axes.set_xscale("log")
        axes.minorticks_off()
    at = math.log if log else float
    room, ticks = (at(ordered[-1]) - at(ordered[0])) / 9, ordered[:1]
    for value in ordered[1:]:
        if at(value) - at(ticks[-1]) > room:  # its label does not touch the one before
            ticks.append(value)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(lambda x, _: shown(against, int(x) if x == int(x) else x))
    return float


def _dress(axes: Axes, result: str, against: str) -> None:
    """Titles, units, and no more lines than are needed."""
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
        colors: by which others some of its colours are replaced; None for paper, on which
            nothing can be hovered over.
    """
    import matplotlib

    file = io.StringIO()
    for spot in (line for axes in figure.axes for line in axes.lines if line.get_gid()):
        spot.set_visible(colors is not None)
    figure.patch.set_visible(False)
    fonts = [family.strip("'") for family in svg.FONT.split(", ")]
    about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with (
        _drawing,
        matplotlib.rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "distkit", "font.sans-serif": fonts}
        ),
    ):
        figure.savefig(file, format="svg", metadata=about)
    text = file.getvalue()
    # a pixel a point
    text = re.sub(r'="([\d.]+)pt"', r'="\1"', text[text.index("<svg") :], count=2)
    for color, other in (colors or {}).items():
        text = text.replace(color, other)
    return re.sub(
        r'<g id="(run (\d+): [^"]*)">', r'<g class="dkx-spot" data-run="\2"><title>\1</title>', text
    )


def chart(records: Sequence[Record], results: Sequence[str] = (), against: str = "") -> str:
    """The chart for a page, in its colours; "" where there is nothing to see yet."""
    if not varied([r for r in records if not r.outcome]):
        return ""
    return drawn(plot(records, results, against, WIDE), THEMED)


def still(
    name: str, records: Sequence[Record], rows: int = MAX_ROWS, figure: Figure | None = None
) -> tuple[str, str]:
    """Table and chart as HTML, and the table as text: what stays where there are no widgets."""
    figure = figure or _plotted(records)
    text = to_text(name, records)
    image = as_picture(drawn(figure), text)["text/html"] if figure else ""
    return f"<b>{escape(headline(name, records))}</b>{to_html(records, rows)}{image}", text


def _plotted(records: Sequence[Record]) -> Figure | None:
    """The plot, if there is something to see yet."""
    return plot(records) if varied([r for r in records if not r.outcome]) else None


def picture(name: str, records: Sequence[Record], figure: Figure | None = None) -> str:
    """The same as an SVG document: a line of text for each run, and the chart below."""
    head, *lines = to_text(name, records, MAX_ROWS).splitlines()
    code = f'font-family="{svg.CODE}" font-size="11.5" xml:space="preserve"'
    parts = [svg.heading(24, 32, head, "")]
    parts += [svg.text(24, 56 + 18 * n, line, INK, code) for n, line in enumerate(lines)]
    width, bottom = 960.0, 62.0 + 18 * len(lines)
    if figure := figure or _plotted(records):
        parts.append(drawn(figure).replace("<svg", f'<svg x="24" y="{bottom:.0f}"', 1))
        across, down = 72 * figure.get_size_inches()
        width, bottom = max(width, across + 48), bottom + down + 16
    return svg.document(width, bottom, head, "".join(parts))


def _cut(words: str, room: float) -> str:
    """A line, cut to the width."""
    if text_width(words, 12) <= room:
        return words
    return f"{words[: int(room / 7)]}…"
