"""The collectives to write. They are judged on real ranks, beside the messages of the best."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, arange, cat, equal, stack, tensor, zeros

from distkit import events
from distkit.algorithms.catalogue import ALL_REDUCES, COLLECTIVES, Algorithm
from distkit.algorithms.rounds import traffic
from distkit.cluster.notebook import place
from distkit.cluster.runs.run import Run
from distkit.cluster.runs.run_ranks import run_ranks
from distkit.errors import DeadlockError, RankError, RunError
from distkit.exercises.task import Answer, Mistake, NotAttempted, Point, Task, name_of
from distkit.trace.trace import Trace
from distkit.views.compare.figures import rounds
from distkit.views.scene.units import count
from distkit.views.timeline.columns import Columns

#: Calls a function on one of ``n`` ranks, and returns what this rank holds after it.
Call = Callable[[Callable[..., object], int, int, int], Tensor]

#: What a rank should hold: ``f(rank, n, length)``.
Right = Callable[[int, int, int], Tensor]

#: What a rank holds after a call, and the tensor that the call returned, if it did.
Outcome = tuple[list[float], list[float] | None]

#: Worlds and lengths that an answer has to be right on: odd ones, fewer elements than ranks. One
#: rank comes last: what is wrong there has a plainer sign among several.
WORLDS, LENGTHS = (2, 3, 4, 5, 1), (1, 8, 13)

#: Where messages, bytes and rounds are counted: ranks, and elements of four bytes.
N, LENGTH = 4, 1024

#: One frame of a rank's traceback.
_FRAME = re.compile(r' *File "(.+)", line \d+, in .+\n(?: {4}.+\n)?')


@dataclass(frozen=True)
class OnRanks:
    """Tries a collective on real ranks: is it right, and how far from the best?

    Args:
        algorithm: the one to beat: its schedule is the measure.
        call: how the function is called.
        right: what a rank should hold then.
        into: the parameter that has to hold it.
        parts: whether the tensor is one of n parts of what the algorithm counts as a whole.
    """

    algorithm: Algorithm
    call: Call
    right: Right
    into: str
    parts: bool = False

    def __call__(self, mine: Answer) -> Iterator[Point]:
        """Run an answer; every rank calls it."""
        for n in WORLDS:
            run = tried(trial, mine, n, self.call, mine, LENGTHS)
            if theirs := sorted({str(s.op) for s in run.trace.spans if s.op in events.COLLECTIVES}):
                calls = ", ".join(f"dist.{op}" for op in theirs)
                raise Mistake(f"it calls {calls}: write it with send and recv, isend and irecv")
            if wrong := self._wrong(n, run.results):
                attempted = n == 1 or self._touched(n, run.results, run.trace)
                raise Mistake(wrong) if attempted else NotAttempted
        yield Point(True, f"right on {min(WORLDS)} to {max(WORLDS)} ranks")
        yield from self._compared(tried(trial, mine, N, self.call, mine, (LENGTH,)).trace)

    def _wrong(self, n: int, results: list[list[Outcome]]) -> str:
        """The first difference from what a rank should hold, in words; "" if there is none."""
        for rank, outcomes in enumerate(results):
            for length, (got, returned) in zip(LENGTHS, outcomes, strict=True):
                right = self.right(rank, n, length)
                if equal(tensor(got), right):
                    continue
                if returned is not None and equal(tensor(returned), right):
                    return (
                        f"it returns the right result, but {self.into} has to hold it: "
                        f"write into {self.into}, in place"
                    )
                return (
                    f"on {_ranks(n)}, with {count(length, 'element')}, rank {rank} ends with\n"
                    f"{_few(got)}\nwhere {_few(right.tolist())} would be right"
                )
        return ""

    def _touched(self, n: int, results: list[list[Outcome]], trace: Trace) -> bool:
        """True if the answer does anything at all."""

        def nothing(*_: object) -> None:
            pass

        before = [
            [self.call(nothing, rank, n, length).tolist() for length in LENGTHS]
            for rank in range(n)
        ]
        held = [[got for got, _ in outcomes] for outcomes in results]
        return held != before or bool(trace.messages)

    def _compared(self, trace: Trace) -> Iterator[Point]:
        """Messages, bytes and rounds beside the algorithm's."""
        best, columns = self.algorithm, Columns(trace)
        size = 4 * LENGTH * (N if self.parts else 1)
        optimum = traffic(best.schedule(N), N, size, best.chunks(N), itemsize=4)
        for what, mine, theirs in zip(("messages", "bytes"), columns.sent, optimum, strict=True):
            most = int(mine.max(initial=0))
            yield _point(f"{what} sent by the busiest rank", most, int(theirs.max()), best.title)
        yield _point("rounds", rounds(columns), best.rounds(N), best.title)


def _point(what: str, got: int, optimum: int, title: str) -> Point:
    good = got <= optimum
    return Point(good, f"{got:,} {what}" + ("" if good else f"; {title} needs {optimum:,}"))


def tried(program: Callable[..., object], mine: Answer, n: int, *arguments: object) -> Run:
    """Run a program that tries an answer on n ranks, under the answer's name, which errors say.

    Raises:
        NotAttempted: it is a stub.
        Mistake: the run failed.
    """
    named = partial(program, *arguments)
    named.__name__ = name_of(mine)  # type: ignore[attr-defined]
    try:
        return run_ranks(named, n)
    except RunError as error:
        if isinstance(error, RankError) and "NotImplementedError" in str(error):
            raise NotAttempted from None
        raise Mistake(f"on {_ranks(n)}:\n{_said(error, mine)}") from error


def trial(call: Call, mine: Answer, lengths: tuple[int, ...]) -> list[Outcome]:
    """On each rank: what it holds after the call, and what the call returned, for each length."""
    import torch.distributed as dist

    rank, n, returned = dist.get_rank(), dist.get_world_size(), list[object]()

    def noted(*args: object) -> None:
        returned.append(mine(*args))

    return [(call(noted, rank, n, length).tolist(), _numbers(returned[-1])) for length in lengths]


def _numbers(returned: object) -> list[float] | None:
    """The numbers of a tensor, or of a list of tensors; None for anything else."""
    parts = returned if isinstance(returned, list | tuple) else [returned]
    tensors = [part.detach().reshape(-1) for part in parts if isinstance(part, Tensor)]
    return cat(tensors).tolist() if tensors and len(tensors) == len(parts) else None


# -- in words --------------------------------------------------------------------------


def _said(error: RunError, mine: Answer) -> str:
    """The error, with the learner's lines only."""
    if isinstance(error, DeadlockError):
        return f"deadlock in {name_of(mine)}: " + "\n".join(map(str, error.findings))
    if not isinstance(error, RankError) or not error.traceback:
        return str(error)
    ours = str(Path(place(f"{__file__}:1").rpartition(":")[0]).parent)
    frames = "".join(
        frame[0]
        for frame in _FRAME.finditer(error.traceback)
        if "-packages/" not in frame[1] and str(Path(frame[1]).parent) != ours
    )
    return str(error).replace(error.traceback, frames)


def _ranks(n: int) -> str:
    return count(n, "rank")


def _few(numbers: list[float]) -> str:
    return f"[{', '.join(f'{x:g}' for x in numbers[:8])}{', …' if len(numbers) > 8 else ''}]"


# -- the exercises ---------------------------------------------------------------------


def numbers(rank: int, length: int) -> Tensor:
    """The initial values of a rank: whole numbers, so that sums are exact in any order."""
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
        "Every rank that has the tensor can pass it on, so their number can double in every round.",
        "Count ranks from the root: place = (rank - src) % n. Place 0 has the tensor.",
        "In the round with distance d = …, 4, 2, 1 every place that is a multiple of 2d "
        "sends to place + d, where there is one.",
    ),
    _all_reduce(
        "ring",
        "Cut x into n chunks with x.tensor_split(n): they are views: writing to one writes to x.",
        "First n-1 rounds in which rank r sends chunk r-s to its right neighbour and adds what "
        "comes from the left to chunk r-s-1: then rank r has the whole sum of chunk r+1.",
        "Then n-1 rounds in which the complete chunks go round once more. Begin each send with "
        "dist.isend, or all ranks wait for each other.",
    ),
    _all_reduce(
        "recursive_doubling",
        "Your partner in the round with distance d = 1, 2, 4, … is rank ^ d.",
        "Partners exchange everything they have and add: after lg n rounds every rank has the sum.",
        "When n is not a power of two, first fold: the ranks beyond the largest power of two send "
        "theirs to a partner, wait, and get the result at the end.",
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
