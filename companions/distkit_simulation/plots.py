"""Plots predicted and measured all-reduce times, with a lower bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkit._format import human_bytes, human_seconds
from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.views.scene import figures
from distkit.views.scene.figures import advance
from distkit.views.scene.theme import GRAY, rank_color
from distkit_simulation import cost
from distkit_simulation.network import Network
from distkit_simulation.simulator import finish_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Number of sizes for which predictions are drawn.
POINTS = 33
#: Line styles of the first four lines, the next four, and so on: each four have distinct colors.
DASHES = ("-", "--", "-.")


@figures.style()
def compare(
    n: int,
    network: Network,
    *,
    algorithms: Sequence[str] | None = None,
    measured: Mapping[str, Mapping[int, float]] | None = None,
    smallest: int = 1 << 8,
    largest: int = 1 << 24,
) -> Figure:
    """Plot time against size for each algorithm, with the lower bound, on logarithmic axes.

    In a notebook, a progress bar is shown.

    Args:
        n: the number of ranks.
        network: the network for simulated predictions.
        algorithms: names of algorithms; by default, those in ``measured``, or else all.
        measured: measured seconds by algorithm and bytes, drawn as dots.
        smallest: the first size [bytes].
        largest: the last size [bytes].

    Returns:
        A matplotlib figure. A bar at the top shows the fastest algorithm for each range of sizes.
    """
    names = list(algorithms or measured or ALL_REDUCES)
    sizes = np.unique(np.geomspace(smallest, largest, POINTS).astype(int) // 4 * 4)
    times = {
        name: [finish_times(name, n, int(k), network).max() for k in sizes]
        for name in advance(names)
    }
    figure = figures.new(8, 4.5)
    axes = figure.subplots()
    for i, name in enumerate(names):
        color = rank_color(i)
        axes.loglog(
            sizes,
            times[name],
            color=color,
            label=name.replace("_", " "),
            linestyle=DASHES[i // 4 % len(DASHES)],
        )
        points = (measured or {}).get(name, {})
        axes.loglog(list(points), list(points.values()), "o", color=color, markeredgecolor="white")
    fastest = getattr(network, "inside", network.link)  # fastest link between two ranks
    axes.loglog(sizes, cost.lower_bound(n, sizes, fastest), ":", color=GRAY, label="lower bound")
    _mark_crossovers(axes, sizes, times)
    _name_axes(axes, n, bool(measured))
    return figure


def _mark_crossovers(axes: Axes, sizes: Any, times: Mapping[str, Sequence[float]]) -> None:
    """Name the fastest algorithm above the frame, and mark the sizes at which it changes."""
    names, best = list(times), np.argmin(np.array(list(times.values())), axis=0)
    starts, last = [0, *(np.flatnonzero(np.diff(best)) + 1)], len(sizes) - 1
    for start, end in zip(starts, [*starts[1:], last], strict=True):
        interval, color = (sizes[start], sizes[end]), rank_color(int(best[start]))
        axes.axvspan(*interval, ymin=1.01, ymax=1.03, color=color, lw=0, clip_on=False)
        if end - start > last / 4:  # wide enough for the name
            middle, name = np.sqrt(np.prod(interval, dtype=float)), names[best[start]]
            axes.text(
                middle,
                1.04,
                name.replace("_", " "),
                fontsize=9,
                color=color,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
            )
        if start:
            axes.axvline(sizes[start], color=GRAY, linewidth=0.6, alpha=0.6)


def _name_axes(axes: Axes, n: int, has_points: bool) -> None:
    from matplotlib.ticker import LogLocator

    caption = "lines: predicted, dots: measured" if has_points else "predicted"
    axes.set(xlabel="tensor size", ylabel="all-reduce time")
    axes.set_title(
        f"{n} ranks; {caption}; bar at the top: fastest algorithm", fontsize=10, pad=32, loc="left"
    )
    axes.set_xscale("log", base=4)
    axes.xaxis.set_major_formatter(lambda x, _: human_bytes(x))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda y, _: human_seconds(y))
    axes.yaxis.set_minor_formatter("")
    axes.legend(fontsize=9, handlelength=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid()
