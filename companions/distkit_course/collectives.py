"""The judge of collectives: they run on real ranks, and their messages are counted.

The schedule of the best algorithm is the measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, cat, equal, tensor

from distkit import events
from distkit._format import count
from distkit.algorithms.catalogue import Algorithm
from distkit.algorithms.rounds import traffic
from distkit.trace.trace import Trace
from distkit_course.judges import at_most, measured, run_answer
from distkit_course.task import Answer, Criterion, Mistake, NotAttempted

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

    def __call__(self, mine: Answer) -> Iterator[Criterion]:
        """Run an answer; every rank calls it."""
        for n in WORLDS:
            run = run_answer(trial, mine, n, self.call, mine, LENGTHS)
            if theirs := sorted({str(s.op) for s in run.trace.spans if s.op in events.COLLECTIVES}):
                calls = ", ".join(f"dist.{op}" for op in theirs)
                raise Mistake(f"it calls {calls}: write it with send and recv, isend and irecv")
            if wrong := self._wrong(n, run.results):
                attempted = n == 1 or self._touched(n, run.results, run.trace)
                raise Mistake(wrong, run.trace) if attempted else NotAttempted
        yield Criterion("values", f"right on {min(WORLDS)} to {max(WORLDS)} ranks")
        yield from self._compared(run_answer(trial, mine, N, self.call, mine, (LENGTH,)).trace)

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
                    f"on {count(n, 'rank')}, with {count(length, 'element')}, "
                    f"rank {rank} ends with\n{_few(got)}\n"
                    f"where {_few(right.tolist())} would be right"
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

    def _compared(self, trace: Trace) -> Iterator[Criterion]:
        """Messages, bytes and rounds beside the algorithm's."""
        best, sent = self.algorithm, measured(trace)
        size = 4 * LENGTH * (N if self.parts else 1)
        needed = traffic(best.schedule(N), N, size, best.chunks(N), itemsize=4)
        optimum = (*(int(of.max()) for of in needed), best.rounds(N))
        for name, most in zip(("messages", "bytes", "rounds"), optimum, strict=True):
            yield at_most(name, sent[name], most, f"{best.title} needs {most:,}", trace)


def trial(call: Call, mine: Answer, lengths: tuple[int, ...]) -> list[Outcome]:
    """On each rank: what it holds after the call, and what the call returned, for each length."""
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


def _few(numbers: list[float]) -> str:
    return f"[{', '.join(f'{x:g}' for x in numbers[:8])}{', …' if len(numbers) > 8 else ''}]"
