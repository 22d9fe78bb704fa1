"""Exercises on training: the mean loss, average gradients and clipped gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from distkit._format import joined
from distkit_course.content.mistakes import in_turn
from distkit_course.judges import (
    FasterThan,
    Program,
    at_most,
    measured,
    read_only,
    run_answer,
    same,
)
from distkit_course.task import Answer, Criterion, NotAttempted, Task, WrongAnswer

# -- solutions ------------------------------------------------------------------------------


def mean_loss(losses: Tensor) -> Tensor:
    """The mean over all ranks' examples: add sums and counts, and divide once."""
    sums = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def average_gradients(gradients: list[Tensor]) -> None:
    """Sends all gradients in one tensor, as DDP does with the gradients of a bucket."""
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([len(g) for g in gradients]), strict=True):
        gradient.copy_(mean)


def clip_gradients(gradients: Tensor, max_norm: float) -> None:
    """Clips by the norm of the mean, which is equal on every rank."""
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()
    gradients *= min(1.0, max_norm / gradients.norm().item())


# -- the judge -------------------------------------------------------------------------------

#: Number of examples on each rank, by trial. The first trial distinguishes common mistakes.
SIZES = ((1, 2, 6), (3, 0, 2, 1), (4,))


def losses_of(rank: int, sizes: tuple[int, ...]) -> Tensor:
    """Return the losses of a rank's examples: whole numbers, larger on higher ranks."""
    return torch.arange(sizes[rank], dtype=torch.float64) + 10.0 * (rank + 1)


def result_on_rank(answer: Answer, sizes: tuple[int, ...]) -> float | str:
    """Return the number that the answer returns on this rank, or its result's type name."""
    got = read_only(answer)(losses_of(dist.get_rank(), sizes))
    number = got.item() if isinstance(got, Tensor) and got.numel() == 1 else got
    return float(number) if isinstance(number, int | float) else type(got).__name__


def trial(answer: Answer) -> Iterator[Criterion]:
    """Try an answer on ranks with different numbers of examples."""
    traces = []
    for sizes in SIZES:
        run = run_answer(result_on_rank, answer, len(sizes), answer, sizes)
        if {*run.results} == {"NoneType"} and not run.trace.spans:
            raise NotAttempted
        if wrong := _explain_difference(sizes, run.results):
            raise WrongAnswer(f"ranks with {_format_sizes(sizes)} examples: {wrong}", run.trace)
        traces.append(run.trace)
    yield Criterion(
        "values", f"correct on ranks with {', then '.join(map(_format_sizes, SIZES))} examples"
    )
    counts = measured(traces[0])
    yield at_most(
        "calls",
        counts["calls"] + counts["messages"],
        1,
        "a single all-reduce of the sum and the count is enough",
        traces[0],
    )


def _explain_difference(sizes: tuple[int, ...], results: list[float | str]) -> str:
    """Describe the mistake in the returned numbers; "" for none."""
    rows = [losses_of(rank, sizes) for rank in range(len(sizes))]
    expected = torch.cat(rows).mean().item()
    for rank, got in enumerate(results):
        if isinstance(got, str):
            return f"rank {rank} returns a value of type {got}: return the mean, a number"
    if all(_same(got, expected) for got in results):
        return ""
    if any(map(_is_nan, results)):
        return (
            "it returns NaN: the mean over no examples is NaN, and so is every sum that includes it"
        )
    values = ", ".join(f"{got:.4g}" for got in results)
    descriptions = (name for name, wrong in _mistakes(rows) if all(map(_same, results, wrong)))
    return f"{next(descriptions, f'they return {values}')}; expected {expected:.4g} on every rank"


def _mistakes(rows: list[Tensor]) -> Iterator[tuple[str, list[float]]]:
    """Yield descriptions of common mistakes, each with the numbers that the ranks then return."""
    n, total, means = len(rows), torch.cat(rows).sum().item(), [r.mean().item() for r in rows]
    yield (
        f"{sum(means) / n:.4g} is the mean of the ranks' means, in which a rank with few examples "
        "counts as much as one with many",
        [sum(means) / n] * n,
    )
    yield f"{sum(means):.4g} is the sum of the ranks' means", [sum(means)] * n
    yield f"{total / n:.4g} is the sum divided by the number of ranks", [total / n] * n
    yield f"{total:.4g} is the sum: divide it", [total] * n
    yield (
        "each rank divides the sum by its own number of examples",
        [total / len(r) if len(r) else math.nan for r in rows],
    )
    yield "each rank returns the mean of its own examples", means


def _same(got: float | str, expected: float) -> bool:
    return isinstance(got, float) and math.isclose(got, expected, rel_tol=1e-5)


def _is_nan(got: float | str) -> bool:
    return isinstance(got, float) and math.isnan(got)


def _format_sizes(sizes: tuple[int, ...]) -> str:
    """Format the numbers of examples: "3, 0 and 2"."""
    return joined([*map(str, sizes)])


# -- common mistakes ---------------------------------------------------------------------


def mean_of_means(losses: Tensor) -> Tensor:
    """Averages the ranks' means."""
    dist.all_reduce(mean := losses.mean())
    return mean / dist.get_world_size()


def by_ranks(losses: Tensor) -> float:
    """Divides by the number of ranks."""
    dist.all_reduce(total := losses.sum())
    return total.item() / dist.get_world_size()


def by_own_number(losses: Tensor) -> Tensor:
    """Divides by its own number of examples."""
    dist.all_reduce(total := losses.sum())
    return total / len(losses)


def weights_the_means(losses: Tensor) -> Tensor:
    """Weights the means, but the mean over no examples is NaN."""
    both = torch.stack([losses.mean() * len(losses), torch.tensor(len(losses))])
    dist.all_reduce(both)
    return both[0] / both[1]


def in_two_calls(losses: Tensor) -> Tensor:
    """Is correct, but has twice the latency."""
    dist.all_reduce(total := losses.sum())
    dist.all_reduce(number := torch.tensor(len(losses)))
    return total / number


def one_by_one(gradients: list[Tensor]) -> None:
    """Calls a collective for each tensor."""
    for g in gradients:
        dist.all_reduce(g)
        g /= dist.get_world_size()


def clips_first(gradients: Tensor, max_norm: float) -> None:
    """Clips each rank's gradients by their own norm."""
    gradients *= min(1.0, max_norm / gradients.norm().item())
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()


def clips_the_sum(gradients: Tensor, max_norm: float) -> None:
    """Clips the sum instead of the mean."""
    dist.all_reduce(gradients)
    gradients *= min(1.0, max_norm / gradients.norm().item())
    gradients /= dist.get_world_size()


def always_scales(gradients: Tensor, max_norm: float) -> None:
    """Also scales short gradients up."""
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()
    gradients *= max_norm / gradients.norm()


#: The maximum norm of gradients.
MAX_NORM = 1.5


def _many_gradients(rank: int, tensors: int = 40, length: int = 50) -> list[Tensor]:
    return [(rank + 1) * (torch.arange(length) + i % 5.0) for i in range(tensors)]


def _run_average(answer: Answer, rank: int, n: int) -> list[list[float]]:
    """Return the first and the last element of each of the last five gradients."""
    gradients = _many_gradients(rank)
    answer(gradients)
    return [[g[0].item(), g[-1].item()] for g in gradients[-5:]]


def _run_clip(answer: Answer, rank: int, n: int) -> list[list[float]]:
    long, short = _gradients_of(rank), 0.1 * _gradients_of(rank)
    answer(long, MAX_NORM)
    answer(short, MAX_NORM)
    return [long.tolist(), short.tolist()]


def _gradients_of(rank: int) -> Tensor:
    return torch.tensor([3.0, 4.0]) if rank else torch.tensor([1.0, 0.0])


def _explain_clip(results: list[list[list[float]]], expected: list[list[list[float]]]) -> str:
    """Describe which order of clipping, summing and dividing explains this result."""
    n, (long, short) = len(results), results[0]
    if not same(short, expected[0][1]):
        return f"gradients whose norm is at most max_norm, {MAX_NORM}, must not change"
    norm = torch.tensor(long).norm().item()
    if same(norm, MAX_NORM / n):
        return "it clips the sum, and divides afterwards: divide first"
    if same(norm, 1.0) or norm > MAX_NORM:
        return f"the norm is {norm:.2f}, and max_norm is {MAX_NORM}"
    return "it clips each rank separately: average first"


def _expected_clip(rank: int, n: int) -> list[list[float]]:
    mean = sum((_gradients_of(r) for r in range(n)), torch.zeros(2)) / n
    return [(g * min(1.0, MAX_NORM / g.norm().item())).tolist() for g in (mean, 0.1 * mean)]


#: The exercises.
TASKS: list[Task] = [
    Task(
        "mean_loss",
        "mean_loss(losses)",
        "return the mean over the examples of all ranks, on every rank",
        "losses has an element for each example of this rank. Some ranks have more examples than "
        "others, and\nsome have none. Use dist.all_reduce. One call is enough.",
        mean_loss,
        (
            "What is the mean of [1] and [2, 2, 2], and what is the mean of their means?",
            "Every rank knows the sum and the number of its losses. You can sum both over ranks.",
            "Put the sum and the count into one tensor of two elements, all-reduce it, and divide "
            "the first by the second.",
        ),
        trial,
        (
            (mean_of_means, "1, 2 and 6 examples: 21 is the mean of the ranks' means"),
            (by_ranks, "82 is the sum divided by the number of ranks; expected 27.33"),
            (by_own_number, "each rank divides the sum by its own number of examples"),
            (weights_the_means, "3, 0, 2 and 1 examples: it returns NaN: the mean over no"),
            (in_two_calls, "2 collective operations per rank; a single all-reduce of the sum"),
            (lambda losses: mean_loss(losses.sub_(1)), "the arguments must not change"),
        ),
        worth=2,
    ),
    Task(
        "average_gradients",
        "average_gradients(gradients)",
        "average each tensor of the list over all ranks, in place",
        "There are 40 one-dimensional tensors of 50 elements each. Be at least twice as fast as "
        "one\nall-reduce for each tensor.",
        average_gradients,
        (
            "Latency dominates small all-reduces. How many calls do you need?",
            "torch.cat joins tensors into one, and split separates them again.",
            "split returns views of the sum. Use copy_ to copy them into the gradients.",
        ),
        Program(
            _run_average,
            lambda rank, n: [[(n + 1) / 2 * i, (n + 1) / 2 * (i + 49)] for i in range(5)],
            (2, 3),
            {"calls": (lambda n: 1, "put all gradients into one tensor")},
            then=FasterThan(
                lambda answer, rank, n: answer(_many_gradients(rank)),
                one_by_one,
                ratio=2.0,
                why="Each small all-reduce adds its latency: put all gradients into one tensor",
            ),
            into="gradients",
        ),
        (
            (one_by_one, "40 collective operations per rank; 1 suffices"),
            (
                in_turn(average_gradients, lambda gs: [g.mul_(dist.get_world_size()) for g in gs]),
                "rank 0 has [[0.0, 147.0], [3.0, 150.0], [6.0, 153.0]",
            ),
            (
                lambda gradients: average_gradients([g.clone() for g in gradients]),
                "nothing is written into gradients: use += or copy_",
            ),
            (
                in_turn(average_gradients, lambda gs: [g.fill_(g[0].item()) for g in gs]),
                "rank 0 has [[0.0, 0.0], [1.5, 1.5], [3.0, 3.0]",
            ),
        ),
        worth=3,
    ),
    Task(
        "clip_gradients",
        "clip_gradients(gradients, max_norm)",
        "average gradients over all ranks, in place, and limit their norm to max_norm",
        "gradients is one tensor. Do what one process does with the whole batch: leave a mean "
        "whose norm is\nat most max_norm unchanged, and scale a larger one down to that norm.",
        clip_gradients,
        (
            "Does one process clip the gradient of a part of the batch, or the mean?",
            "All-reduce and divide first. Then every rank knows the same norm.",
        ),
        Program(
            _run_clip,
            _expected_clip,
            (2, 3),
            {
                "calls": (
                    lambda n: 2,
                    "one for each call, because every rank computes the norm itself",
                )
            },
            _explain_clip,
            into="gradients",
        ),
        (
            (
                lambda gradients, max_norm: clip_gradients(gradients.clone(), max_norm),
                "nothing is written into gradients: use += or copy_",
            ),
            (clips_first, "it clips each rank separately: average first"),
            (clips_the_sum, "it clips the sum, and divides afterwards: divide first"),
            (always_scales, "gradients whose norm is at most max_norm, 1.5, must not change"),
            (
                lambda gradients, max_norm: clip_gradients(gradients, 1.0),
                "the norm is 1.00, and max_norm is 1.5",
            ),
        ),
        worth=2,
    ),
]
