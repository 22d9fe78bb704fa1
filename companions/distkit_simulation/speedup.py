"""Measure the speedup of data-parallel training, and predict it from the parts of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit._format import count, human_seconds
from distkit.algorithms.sgd import sync_sgd_step
from distkit.recording.recorder import mark
from distkit.views.scene import figures
from distkit.views.scene.theme import GRAY, rank_color
from distkit_simulation import cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

#: The measured parts of a step.
PARTS = "compute", "sync", "step"


def measure_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    lr: float = 0.01,
    all_reduce: Callable[[Tensor], Any] = dist.all_reduce,
    steps: int = 10,
    blocks: int = 5,
    threads: int = 1,
) -> dict[str, float]:
    """Measure the parts of a training step, on every rank.

    - ``compute``: :func:`~distkit.algorithms.sync_sgd_step` without communication. Ranks compute
      concurrently: if they share cores, this part grows with the number of ranks.
    - ``sync``: only the step's all-reduces, with tensors of the same sizes.
    - ``step``: the whole step.

    Each part is timed in blocks, from a barrier until the slowest rank finishes. Blocks of all
    three parts alternate, so that changes in the machine's load affect all of them.

    Args:
        model: the model; it is trained in place.
        batch: this rank's inputs and targets.
        loss_fn: a function that returns the mean loss of outputs and targets.
        lr: the learning rate.
        all_reduce: a function that sums a tensor over all ranks in place.
        steps: the number of steps in a block.
        blocks: the number of blocks of each part. The fastest one counts, because other programs
            can only make a block slower.
        threads: the number of threads of each rank.

    Returns:
        The time per step of each part [s]; ``sync`` is 0 if there is only one rank.

    Raises:
        ValueError: ``steps`` or ``blocks`` is less than 1.

    Example:
        >>> def parts(batch=32):
        ...     images, labels = dk.data.shard(*dk.data.digits())
        ...     examples = images[:batch], labels[:batch]
        ...     return measure_step(dk.demos.model(), examples, F.cross_entropy)
        >>> dk.sweep(parts, ranks=[1, 2, 4], batch=[16, 64, 256])        # doctest: +SKIP
    """
    if steps < 1 or blocks < 1:
        raise ValueError(f"steps and blocks must be at least 1; got {steps} and {blocks}.")
    reduced: list[Tensor] = []

    def step(all_reduce: Callable[[Tensor], Any]) -> None:
        sync_sgd_step(model, batch, loss_fn, lr, all_reduce=all_reduce)

    def sync() -> None:
        for tensor in reduced:
            all_reduce(tensor)

    step(lambda tensor: reduced.append(torch.zeros_like(tensor)))
    single_rank = dist.get_world_size() == 1
    compute = {"compute": lambda: step(lambda tensor: None)}
    actions = compute if single_rank else compute | {"sync": sync, "step": lambda: step(all_reduce)}
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = _measure_parts(actions, steps, blocks)
    finally:
        torch.set_num_threads(previous_threads)
    return seconds if not single_rank else {**seconds, "sync": 0.0, "step": seconds["compute"]}


def _measure_parts(
    actions: Mapping[str, Callable[[], Any]], steps: int, blocks: int
) -> dict[str, float]:
    """Return the time per step of each part in its fastest block [s].

    The blocks of the parts alternate; the first block of each part is a warm-up.
    """
    times = [
        {part: _block(part, f, steps) for part, f in actions.items()} for _ in range(blocks + 1)
    ]
    return {part: min(block[part] for block in times[1:]) for part in actions}


def _block(part: str, action: Callable[[], Any], steps: int) -> float:
    """Return the time per action on the slowest rank [s]; the block is marked in the trace."""
    dist.barrier()
    begin = time.perf_counter()
    with mark(f"block: {part}"):
        for _ in range(steps):
            action()
    seconds = torch.tensor((time.perf_counter() - begin) / steps, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def speedups(measured: Any) -> list[Row]:
    """Return the predicted and measured speedup of each configuration over one rank.

    A speedup is the throughput in samples per second, relative to one rank with the same batch per
    rank. With the step time T(R) of R ranks, the predicted speedup is
    R·Tcomp(1)/(Tcomp(R) + Tsync(R)), but at most R, and the measured speedup is R·T(1)/T(R).

    Args:
        measured: the DataFrame that a sweep over :func:`measure_step` returns, or a list of dicts
            with the keys ``ranks``, ``batch``, ``compute``, ``sync`` and ``step``.

    Returns:
        The measurements with ``predicted``, ``measured`` and ``break_even``, the number of ranks
        above which training is faster than on one rank.

    Raises:
        ValueError: a batch size has no row with ``ranks=1``.

    >>> rows = speedups([dict(ranks=1, batch=8, compute=1.0, sync=0.0, step=1.0),
    ...                  dict(ranks=4, batch=8, compute=1.5, sync=0.5, step=2.5)])
    >>> rows[1]["predicted"], rows[1]["measured"]
    (2.0, 1.6)
    """
    rows = _rows(measured)
    baseline = {row["batch"]: row for row in rows if row["ranks"] == 1}
    missing = {row["batch"] for row in rows} - {*baseline}
    if missing:
        raise ValueError(
            f"batch={min(missing)} has no row with ranks=1, but the speedup is relative to one "
            "rank. Include one rank in the sweep: ranks=[1, …]."
        )
    return [_add_speedups(row, baseline[row["batch"]]) for row in rows]


def predict(
    measured: Any,
    *,
    ranks: int,
    batch: int,
    nbytes: float = 0,
    latency: float = 0.0,
    bandwidth: float = math.inf,
) -> Row:
    """Predict the speedup of a configuration from measurements, optionally on a slower network.

    Tcomp and Tsync are interpolated linearly between measured batch sizes and numbers of ranks. The
    slower network adds latency + nbytes/bandwidth to Tsync.

    Args:
        measured: measurements on the actual network, as for :func:`speedups`.
        ranks: R, the number of ranks.
        batch: the samples per rank and step.
        nbytes: the bytes all-reduced per step, counted as one message.
        latency: the latency of the slower network [s].
        bandwidth: the bandwidth of the slower network [bytes/s].

    Returns:
        ``ranks``, ``batch``, ``compute``, ``sync``, ``predicted`` and ``break_even``, as in
        :func:`speedups`.

    Raises:
        ValueError: a batch size has no row with ``ranks=1``, or the configuration is outside the
            measured range.

    >>> rows = [dict(ranks=r, batch=b, compute=b / 8, sync=float(r > 1), step=1.0)
    ...         for r in (1, 2) for b in (8, 24)]
    >>> predict(rows, ranks=2, batch=16, nbytes=1000, latency=0.5, bandwidth=2000)["predicted"]
    1.0
    """
    rows = speedups(measured)
    setting = {"ranks": ranks, "batch": batch}
    for name, value in setting.items():
        tested = [row[name] for row in rows]
        if not min(tested) <= value <= max(tested):
            raise ValueError(
                f"{name}={value} is outside the measured range, {min(tested)} to {max(tested)}. "
                "Extend the sweep."
            )
    parts = _interpolate(rows, ranks, batch)
    if ranks > 1:
        parts["sync"] += latency + nbytes / bandwidth
    prediction = _add_speedups({**setting, **parts}, _interpolate(rows, 1, batch))
    return {
        name: prediction[name] for name in (*setting, "compute", "sync", "predicted", "break_even")
    }


def _interpolate(rows: Sequence[Row], ranks: int, batch: int) -> dict[str, float]:
    """Interpolate the parts of a step between measured configurations."""
    measured = sorted({row["ranks"] for row in rows})

    def part_seconds(n: int, part: str) -> float:
        points = sorted((row["batch"], row[part]) for row in rows if row["ranks"] == n)
        return float(np.interp(batch, [b for b, _ in points], [y for _, y in points]))

    return {
        p: float(np.interp(ranks, measured, [part_seconds(n, p) for n in measured])) for p in PARTS
    }


def _add_speedups(row: Row, baseline: Row) -> Row:
    compute, sync = baseline["compute"], row["compute"] + row["sync"] - baseline["compute"]
    return {
        **row,
        "predicted": cost.speedup(row["ranks"], compute, max(sync, 0.0)),
        "measured": row["ranks"] * baseline["step"] / row["step"],
        "break_even": cost.break_even(compute, max(sync, 0.0)),
    }


def _rows(measured: Any) -> list[Row]:
    rows = measured.to_dict("records") if hasattr(measured, "to_dict") else measured
    return [{name: row[name] for name in ("ranks", "batch", *PARTS)} for row in rows]


@figures.style()
def plot_speedups(measured: Any) -> Figure:
    """Plot predicted speedups as lines and measured ones as dots, with one color per batch size.

    Args:
        measured: as for :func:`speedups`.
    """
    rows = speedups(measured)
    figure = figures.new(6.5, 3)
    axes = figure.subplots()
    for i, batch in enumerate(sorted({row["batch"] for row in rows})):
        selected = sorted((r for r in rows if r["batch"] == batch), key=lambda r: int(r["ranks"]))
        ranks, color = [r["ranks"] for r in selected], rank_color(i)
        axes.plot(ranks, [r["predicted"] for r in selected], color=color, label=f"batch {batch}")
        axes.plot(
            [n + 0.05 * (i - 1) for n in ranks],  # so that no dot hides another
            [r["measured"] for r in selected],
            "o",
            color=color,
            markeredgecolor="white",
        )
    _style(axes, sorted({row["ranks"] for row in rows}), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@figures.style()
def plot_prediction(
    measured: Any,
    runs: Any = (),
    *,
    ranks: int,
    batch: int,
    nbytes: float = 0,
    latency: float = 0.0,
    bandwidth: float = math.inf,
) -> Figure:
    """Plot the predicted and measured speedups against the number of ranks.

    If this plot is the picture of an experiment, it follows the sliders, and each run adds a dot.

    Args:
        measured: the measurements to predict from, as for :func:`predict`.
        runs: further measurements, with ``latency`` and ``bandwidth``. Runs with the same batch
            and network are drawn as filled dots, others as hollow dots. A DataFrame's index
            numbers the dots.
        ranks: R, the number of ranks to mark.
        batch: the samples per rank and step.
        nbytes: the bytes all-reduced per step, counted as one message.
        latency: the latency of the network [s].
        bandwidth: the bandwidth of the network [bytes/s].

    Raises:
        ValueError: as for :func:`predict`.

    Example:
        >>> def picture(runs, setting):
        ...     return plot_prediction(frame, runs, nbytes=40_000, **setting)
        >>> dk.Experiment(parts, picture=picture, ranks=(1, 4), batch=(16, 1024))  # doctest: +SKIP
    """
    network = {"nbytes": nbytes, "latency": latency, "bandwidth": bandwidth}
    prediction = predict(measured, ranks=ranks, batch=batch, **network)
    rank_counts = range(1, max(row["ranks"] for row in _rows(measured)) + 1)
    line = [predict(measured, ranks=n, batch=batch, **network) for n in rank_counts]
    figure = figures.new(7, 3.6, dpi=72)
    axes, color = figure.subplots(), rank_color(0)
    axes.plot(rank_counts, [row["predicted"] for row in line], color=color, label="predicted")
    axes.plot([ranks], [prediction["predicted"]], "D", color=color, clip_on=False)
    numbers, runs = (
        (runs.index, runs.to_dict("records"))
        if hasattr(runs, "to_dict")
        else (range(1, len(runs) + 1), runs)
    )
    same = [all(run.get(k, v) == v for k, v in {"batch": batch, **network}.items()) for run in runs]
    baseline = [_interpolate(_rows(measured), 1, run["batch"])["step"] for run in runs]
    dots = [
        (r["ranks"], r["ranks"] * seconds / r["step"])
        for r, seconds in zip(runs, baseline, strict=True)
    ]
    for label, same_setting, edge, face in (
        ("measured with other settings", False, GRAY, "none"),
        ("measured", True, rank_color(1), rank_color(1)),
    ):
        if points := [
            dot for dot, matches in zip(dots, same, strict=True) if matches is same_setting
        ]:
            axes.plot(*zip(*points, strict=True), "o", c=edge, mfc=face, label=label, clip_on=False)
    latest = [y for (n, y), matches in zip(dots, same, strict=True) if matches and n == ranks]
    for number, dot in zip(numbers, dots, strict=True):
        axes.annotate(str(number), dot, (7, -3), textcoords="offset points", fontsize=9)
    _style(axes, rank_counts, _summary(prediction, latest))
    return figure


def _summary(prediction: Row, measured: Sequence[float]) -> str:
    """Describe the predicted and measured speedup, and the parts of the predicted step."""
    actual = f", measured {measured[-1]:.2f}" if measured else ""
    compute, sync = (human_seconds(prediction[part]) for part in ("compute", "sync"))
    return (
        f"{count(prediction['ranks'], 'rank')}: predicted speedup {prediction['predicted']:.2f}"
        f"{actual}\npredicted step: {compute} compute + {sync} sync"
    )


def _style(
    axes: Any,
    ranks: Sequence[int],
    title: str = "lines: predicted, dots: measured",
    **legend: Any,
) -> None:
    highest = max(1.0, axes.dataLim.y1)  # keeps the data readable, but may cut off the ideal line
    axes.plot(ranks, ranks, ":", color=GRAY, label="ideal")
    axes.axhline(1, color=GRAY, lw=0.8)
    axes.set(xticks=ranks, ylim=(0, 1.2 * highest), xlabel="ranks", ylabel="speedup")
    axes.set_title(title, fontsize=11)
    axes.legend(fontsize=10, **legend)
    axes.grid()
    axes.spines[:].set_visible(False)
