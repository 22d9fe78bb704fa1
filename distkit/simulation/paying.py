"""When does data-parallel training pay? A step's parts measured on ranks, and what they predict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distkit.algorithms.sgd import sync_sgd_step
from distkit.simulation import cost
from distkit.views.scene.theme import GRAY, rank_color

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]


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
    """Measure the parts of a training step, on a rank while all other ranks do the same.

    - ``compute``: :func:`~distkit.sync_sgd_step` without communication. All ranks compute at
      once: where they share processors, it grows with the number of ranks.
    - ``sync``: the step's all-reduces alone, of the same tensors.
    - ``step``: the whole step.

    Each is timed in blocks, from a barrier until the last rank is done, in turn with the others,
    so that a machine that becomes slower meanwhile does so for all three.

    Args:
        model: is trained by it.
        batch: this rank's inputs and targets.
        loss_fn: mean loss of outputs and targets.
        lr: learning rate.
        all_reduce: sums a tensor over all ranks in place.
        steps: of a block.
        blocks: of each kind; the median counts.
        threads: of each rank, however many ranks there are, so that the same replicas are compared.

    Returns:
        Seconds per step by part; ``sync`` is 0 on one rank.

    Raises:
        ValueError: ``steps`` or ``blocks`` is less than 1.

    Example:
        >>> def parts(batch=32):
        ...     images, labels = dk.shard(*dk.demos.digits())
        ...     part = images[:batch], labels[:batch]
        ...     return measure_step(dk.demos.model(), part, F.cross_entropy)
        >>> dk.sweep(parts, ranks=[1, 2, 4], batch=[16, 64, 256])        # doctest: +SKIP
    """
    if steps < 1 or blocks < 1:
        raise ValueError(f"steps={steps}, blocks={blocks}: measure at least 1 step in 1 block.")
    sent: list[Tensor] = []

    def step(how: Callable[[Tensor], Any]) -> None:
        sync_sgd_step(model, batch, loss_fn, lr, all_reduce=how)

    def sync() -> None:
        for tensor in sent:
            all_reduce(tensor)

    step(lambda tensor: sent.append(torch.zeros_like(tensor)))
    alone = dist.get_world_size() == 1
    kinds = {"compute": lambda: step(lambda tensor: None)}
    if not alone:
        kinds |= {"sync": sync, "step": lambda: step(all_reduce)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = _in_turn(kinds, steps, blocks)
    finally:
        torch.set_num_threads(before)
    return found if not alone else {**found, "sync": 0.0, "step": found["compute"]}


def _in_turn(kinds: Mapping[str, Callable[[], Any]], steps: int, blocks: int) -> dict[str, float]:
    """The median seconds of each kind of step; a first block of each warms up."""
    times = [{kind: _block(act, steps) for kind, act in kinds.items()} for _ in range(blocks + 1)]
    return {kind: median(block[kind] for block in times[1:]) for kind in kinds}


def _block(action: Callable[[], Any], steps: int) -> float:
    """Seconds per action, until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        action()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def speedups(measured: Any) -> list[Row]:
    """Predicted and measured speed-up of each setting over one rank.

    predicted = R·Tcomp(1)/(Tcomp(R) + Tsync(R)), measured = R·T(1)/T(R), T the time of a step:
    how many times the samples per second of one rank with the same batch per rank.

    Args:
        measured: the data frame of a sweep over :func:`measure_step`, or rows with ``ranks``,
            ``batch``, ``compute``, ``sync`` and ``step``.

    Returns:
        The rows, with ``predicted``, ``measured``, and ``pays``: more ranks than this pay.

    Raises:
        ValueError: there is no row of one rank for a batch.

    >>> rows = speedups([dict(ranks=1, batch=8, compute=1.0, sync=0.0, step=1.0),
    ...                  dict(ranks=4, batch=8, compute=1.5, sync=0.5, step=2.5)])
    >>> rows[1]["predicted"], rows[1]["measured"]
    (2.0, 1.6)
    """
    rows = _rows(measured)
    alone = {row["batch"]: row for row in rows if row["ranks"] == 1}
    missing = {row["batch"] for row in rows} - {*alone}
    if missing:
        raise ValueError(
            f"no row of one rank with batch={min(missing)}: speed-up is over one rank. "
            "Sweep with ranks=[1, …]."
        )
    return [_compared(row, alone[row["batch"]]) for row in rows]


def _compared(row: Row, one: Row) -> Row:
    compute, slower = one["compute"], row["compute"] + row["sync"] - one["compute"]
    return {
        **row,
        "predicted": cost.speedup(row["ranks"], compute, max(slower, 0.0)),
        "measured": row["ranks"] * one["step"] / row["step"],
        "pays": cost.break_even(compute, max(slower, 0.0)),
    }


def _rows(measured: Any) -> list[Row]:
    names = ("ranks", "batch", "compute", "sync", "step")
    rows = measured.to_dict("records") if hasattr(measured, "to_dict") else [*measured]
    return [{name: row[name] for name in names} for row in rows]


def error(rows: Iterable[Mapping[str, Any]]) -> float:
    """The median relative error of the predicted speed-ups, those of one rank not counted.

    >>> error([dict(ranks=2, predicted=1.9, measured=2.0), dict(ranks=1, predicted=1, measured=1)])
    0.05
    """
    several = [row for row in rows if row["ranks"] > 1]
    errors = [float(abs(row["predicted"] / row["measured"] - 1)) for row in several]
    return round(median(errors), 9)


def plot_speedups(measured: Any) -> Figure:
    """Speed-up against ranks, a colour per batch: lines predicted, dots measured.

    Args:
        measured: as of :func:`speedups`.
    """
    from matplotlib.figure import Figure

    rows = speedups(measured)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for i, batch in enumerate(sorted({row["batch"] for row in rows})):
        mine = sorted((r for r in rows if r["batch"] == batch), key=lambda r: int(r["ranks"]))
        ranks, color = [r["ranks"] for r in mine], rank_color(i)
        axes.plot(ranks, [r["predicted"] for r in mine], color=color, label=f"batch {batch}")
        axes.plot(ranks, [r["measured"] for r in mine], "o", color=color, markeredgecolor="white")
    _dress(axes, sorted({row["ranks"] for row in rows}))
    return figure


def _dress(axes: Any, ranks: Sequence[int]) -> None:
    axes.plot(ranks, ranks, ":", color=GRAY, label="ideal")
    axes.axhline(1, color=GRAY, lw=0.8)
    axes.set(xlabel="ranks", ylabel="speed-up", xticks=ranks, ylim=(0, None))
    axes.set_title("lines: predicted, dots: measured", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
