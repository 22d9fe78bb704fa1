"""The collectives to write: how each is called, what it should come to, and hints."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, arange, cat, stack, zeros

from distkit.algorithms.catalogue import ALL_REDUCES, COLLECTIVES, Algorithm
from distkit.exercises.judge import Call, OnRanks, Right
from distkit.exercises.task import Task


def numbers(rank: int, length: int) -> Tensor:
    """What a rank begins with: whole numbers, so that sums are exact in any order."""
    return arange(length, dtype=zeros(0).dtype) % 7 + 10.0 * (rank + 1)


def total(rank: int, n: int, length: int) -> Tensor:
    """The sum over all ranks."""
    return stack([numbers(r, length) for r in range(n)]).sum(0)


def in_place(mine: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """``mine(x)``."""
    x = numbers(rank, length)
    mine(x)
    return x


def from_root(mine: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """``mine(x, src)``, with the last rank as the root."""
    x = numbers(rank, length)
    mine(x, n - 1)
    return x


def gathering(mine: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """``mine(outputs, x)``."""
    outputs = [zeros(length) for _ in range(n)]
    mine(outputs, numbers(rank, length))
    return cat(outputs)


def scattering(mine: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """``mine(output, inputs)``; rank r gets the sum of everybody's inputs[r]."""
    output = zeros(length)
    mine(output, [numbers(rank, length) + part for part in range(n)])
    return output


def _task(
    best: Algorithm,
    signature: str,
    goal: str,
    call: Call,
    right: Right,
    *hints: str,
    parts: bool = False,
) -> Task:
    name, _, parameters = signature.rstrip(")").partition("(")
    told = (
        f"Use send and recv, or isend and irecv. {best.title}: {best.summary}.\nOn 4 ranks it "
        f"takes {best.rounds(4)} rounds, and a rank sends at most {best.messages(4)} messages."
    )
    trial = OnRanks(best, call, right, parameters.split(", ")[0], parts)
    return Task(name, signature, goal, told, best.page, hints, trial)


def _all_reduce(name: str, *hints: str) -> Task:
    return _task(
        ALL_REDUCES[name],
        f"{name}_all_reduce(x)",
        "sum the tensor x over all ranks, in place and on every rank",
        in_place,
        total,
        *hints,
    )


#: The exercises.
TASKS: list[Task] = [
    _task(
        COLLECTIVES["broadcast"],
        "broadcast(x, src)",
        "give every rank the tensor x of rank src",
        from_root,
        lambda rank, n, length: numbers(n - 1, length),
        "Whoever has the tensor can pass it on: their number can double in every round.",
        "Count ranks from the root: place = (rank - src) % n. Place 0 has the tensor.",
        "In the round with distance d = …, 4, 2, 1 every place that is a multiple of 2d "
        "sends to place + d, where there is one.",
    ),
    _all_reduce(
        "ring",
        "Cut x into n chunks with x.tensor_split(n): they are views, writing one writes x.",
        "First n-1 rounds in which rank r sends chunk r-s to its right neighbour and adds what "
        "comes from the left to chunk r-s-1: then rank r has the whole sum of chunk r+1.",
        "Then n-1 rounds in which the complete chunks go round once more. Begin each send with "
        "dist.isend, or everybody waits for everybody.",
    ),
    _all_reduce(
        "recursive_doubling",
        "Your partner in the round with distance d = 1, 2, 4, … is rank ^ d.",
        "Partners exchange everything they have and add: after lg n rounds everybody has all.",
        "When n is no power of two, first fold: the ranks beyond the largest power of two give "
        "theirs to a partner, sit out, and get the result in the end.",
    ),
    _all_reduce(
        "tree",
        "Up: in the round with distance d = 1, 2, 4, … the ranks r with r % 2d == d send to r - d, "
        "which adds.",
        "Down: the same way back, the larger distances first.",
    ),
    _all_reduce(
        "halving_doubling",
        "As recursive doubling, but exchange only the half that your partner will be "
        "responsible for: your part halves in every round.",
        "Then the same way back, exchanging what is complete: the part doubles in every round.",
        "Remember [lo, hi) of your part in each round, to come back the same way.",
    ),
    _task(
        COLLECTIVES["all_gather"],
        "all_gather(outputs, x)",
        "put the x of every rank r into outputs[r]",
        gathering,
        lambda rank, n, length: cat([numbers(r, length) for r in range(n)]),
        "Put your own x into outputs[rank] first.",
        "In round s pass on to the right what came in the round before: that of rank r-s.",
        parts=True,
    ),
    _task(
        COLLECTIVES["reduce_scatter"],
        "reduce_scatter(output, inputs)",
        "put the sum over all ranks of inputs[r] into the output of rank r",
        scattering,
        lambda rank, n, length: total(rank, n, length) + n * rank,
        "It is the first half of the ring all-reduce.",
        "The sum of part p travels once round the ring and ends at rank p: so it begins at "
        "rank p + 1.",
        "Do not write into inputs; a copy of the part that travels is enough.",
        parts=True,
    ),
]
