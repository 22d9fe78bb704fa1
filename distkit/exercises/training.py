"""Training's exercise: the mean over the examples of all ranks, of which each has another number.

It is judged on real ranks. What it returns tells which of the usual mistakes it makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from distkit.events import COLLECTIVES, P2P
from distkit.exercises import pages
from distkit.exercises.collectives import tried
from distkit.exercises.task import Answer, Mistake, NotAttempted, Point, Task
from distkit.views.scene.units import count

#: How many examples the ranks of each trial have; the first one tells the usual mistakes apart.
SIZES = ((1, 2, 6), (3, 0, 2, 1), (4,))


def losses(rank: int, sizes: tuple[int, ...]) -> Tensor:
    """The losses of a rank's examples: whole numbers, larger on later ranks."""
    return torch.arange(sizes[rank], dtype=torch.float64) + 10.0 * (rank + 1)


def returned(mine: Answer, sizes: tuple[int, ...]) -> float | str:
    """On each rank: the number that an answer returns, or the type of what is none."""
    got = mine(losses(dist.get_rank(), sizes))
    number = got.item() if isinstance(got, Tensor) and got.numel() == 1 else got
    return float(number) if isinstance(number, int | float) else type(got).__name__


def trial(mine: Answer) -> Iterator[Point]:
    """Try an answer on ranks with different numbers of examples."""
    for sizes in SIZES:
        run = tried(returned, mine, len(sizes), mine, sizes)
        calls = [s for s in run.trace.spans if s.rank == 0 and s.op in COLLECTIVES | P2P]
        if {*run.results} == {"NoneType"} and not calls:
            raise NotAttempted
        if wrong := _wrong(sizes, run.results):
            raise Mistake(f"ranks with {_listed(sizes)} examples: {wrong}")
        if sizes is SIZES[0]:
            sent = len(calls)
    yield Point(True, f"right on ranks with {', then '.join(map(_listed, SIZES))} examples")
    more = "" if sent == 1 else "; one all-reduce of the sum and the number together suffices"
    yield Point(sent == 1, f"{count(sent, 'communication')} of a rank{more}")


def _wrong(sizes: tuple[int, ...], results: list[float | str]) -> str:
    """What is wrong with what the ranks returned, in words; "" for nothing."""
    rows = [losses(rank, sizes) for rank in range(len(sizes))]
    right = torch.cat(rows).mean().item()
    for rank, got in enumerate(results):
        if isinstance(got, str):
            return f"rank {rank} returns a value of type {got}: return the mean, a number"
    if all(_same(got, right) for got in results):
        return ""
    if any(map(_is_nan, results)):
        return "it returns NaN: the mean over no examples is NaN, and so is each sum that has it"
    said = ", ".join(f"{got:.4g}" for got in results)
    known = (name for name, wrong in _mistakes(rows) if all(map(_same, results, wrong)))
    return f"{next(known, f'they return {said}')}; {right:.4g} would be right on every rank"


def _mistakes(rows: list[Tensor]) -> Iterator[tuple[str, list[float]]]:
    """Usual mistakes in words, and what each rank then returns."""
    n, total, means = len(rows), torch.cat(rows).sum().item(), [r.mean().item() for r in rows]
    yield (
        f"{sum(means) / n:.4g} is the mean of the ranks' means, in which a rank with few examples "
        "counts as much as one with many",
        [sum(means) / n] * n,
    )
    yield f"{sum(means):.4g} is the sum of the ranks' means", [sum(means)] * n
    yield f"{total / n:.4g} is the sum divided by the number of ranks", [total / n] * n
    yield f"{total:.4g} is the sum: divide it", [total] * n
    own = [total / len(r) if len(r) else math.nan for r in rows]
    yield "each rank divides the sum by its own number of examples", own
    yield "each rank returns the mean of its own examples", means


def _same(got: float | str, right: float) -> bool:
    return isinstance(got, float) and math.isclose(got, right, rel_tol=1e-5)


def _is_nan(got: float | str) -> bool:
    return isinstance(got, float) and math.isnan(got)


def _listed(sizes: tuple[int, ...]) -> str:
    """The numbers of examples: "3, 0 and 2"."""
    *some, last = map(str, sizes)
    return f"{', '.join(some)} and {last}" if some else last


#: The exercises.
TASKS: list[Task] = [
    Task(
        "mean_loss",
        "mean_loss(losses)",
        "return the mean over the examples of all ranks, on every rank",
        "losses has an element for each example of this rank: some ranks have more than others, "
        "some\nhave none. Use dist.all_reduce. One call is enough.",
        pages.mean_loss,
        (
            "What is the mean of [1] and [2, 2, 2], and what the mean of their means?",
            "Every rank knows its sum and its number of examples. Sums can be added.",
            "Put the sum and the number into one tensor of two elements, all-reduce it, and divide "
            "the first by the second.",
        ),
        trial,
    )
]
