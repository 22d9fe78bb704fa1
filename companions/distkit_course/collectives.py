"""Judge collectives on real ranks by their results, messages, bytes and rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, cat, equal, tensor

from distkit import events
from distkit._format import count
from distkit.algorithms.catalog import Algorithm
from distkit.algorithms.rounds import traffic
from distkit.trace.trace import Trace
from distkit_course.judges import at_most, measured, read_only, run_answer
from distkit_course.task import Answer, Criterion, NotAttempted, WrongAnswer

#: Calls a function on one of ``n`` ranks, and returns the values of this rank after the call.
Call = Callable[[Callable[..., object], int, int, int], Tensor]

#: The expected values of a rank: ``f(rank, n, length)``.
Expected = Callable[[int, int, int], Tensor]

#: The values of a rank after a call, and the values of the returned tensor, if any.
Outcome = tuple[list[float], list[float] | None]

#: World sizes and lengths to test, including odd numbers and fewer elements than ranks. A
#: single rank is tested last, because mistakes are easier to see with more ranks.
WORLDS, LENGTHS = (2, 3, 4, 5, 1), (1, 8, 13)

#: World size and length (elements of four bytes) for counting messages, bytes and rounds.
N, LENGTH = 4, 1024


@dataclass(frozen=True)
class CollectiveTrial:
    """Tests a collective on real ranks and compares its cost with that of the best algorithm.

    Args:
        algorithm: the reference for messages, bytes and rounds.
        call: a function that calls the answer.
        expected: the expected values of a rank.
        into: the parameter that must contain these values.
        parts: whether the tensor is one of n equal parts of the algorithm's tensor.
    """

    algorithm: Algorithm
    call: Call
    expected: Expected
    into: str
    parts: bool = False

    def __call__(self, answer: Answer) -> Iterator[Criterion]:
        """Run an answer on all ranks and yield the criteria."""
        for n in WORLDS:
            run = run_answer(trial, answer, n, self.call, answer, LENGTHS)
            if called := sorted({str(s.op) for s in run.trace.spans if s.op in events.COLLECTIVES}):
                calls = ", ".join(f"dist.{op}" for op in called)
                raise WrongAnswer(f"it calls {calls}. Use send and recv, or isend and irecv")
            if wrong := self._wrong(n, run.results):
                attempted = n == 1 or self._is_attempted(n, run.results, run.trace)
                raise WrongAnswer(wrong, run.trace) if attempted else NotAttempted
        yield Criterion("values", f"correct on {min(WORLDS)} to {max(WORLDS)} ranks")
        yield from self._costs(run_answer(trial, answer, N, self.call, answer, (LENGTH,)).trace)

    def _wrong(self, n: int, results: list[list[Outcome]]) -> str:
        """Describe the first difference from the expected values; return "" if there is none."""
        for rank, outcomes in enumerate(results):
            for length, (got, returned) in zip(LENGTHS, outcomes, strict=True):
                expected = self.expected(rank, n, length)
                if equal(tensor(got), expected):
                    continue
                if returned is not None and equal(tensor(returned), expected):
                    return (
                        f"it returns the correct result, but the result must be in "
                        f"{self.into}: write it into {self.into}, in place"
                    )
                return (
                    f"on {count(n, 'rank')}, with {count(length, 'element')}, "
                    f"rank {rank} ends with\n{_abbreviate(got)}\n"
                    f"expected {_abbreviate(expected.tolist())}"
                )
        return ""

    def _is_attempted(self, n: int, results: list[list[Outcome]], trace: Trace) -> bool:
        """Return whether the answer changes a value or sends a message."""
        initial = [
            [self.call(lambda *_: None, rank, n, length).tolist() for length in LENGTHS]
            for rank in range(n)
        ]
        final = [[got for got, _ in outcomes] for outcomes in results]
        return final != initial or bool(trace.messages)

    def _costs(self, trace: Trace) -> Iterator[Criterion]:
        """Compare messages, bytes and rounds with those of the algorithm."""
        best, sent = self.algorithm, measured(trace)
        size = 4 * LENGTH * (N if self.parts else 1)
        required = traffic(best.schedule(N), N, size, best.chunks(N), itemsize=4)
        optimum = (*(int(column.max()) for column in required), best.rounds(N))
        for name, limit in zip(("messages", "bytes", "rounds"), optimum, strict=True):
            yield at_most(name, sent[name], limit, f"{best.title} needs {limit:,}", trace)


def trial(call: Call, answer: Answer, lengths: tuple[int, ...]) -> list[Outcome]:
    """Return a rank's values after the call and the returned values, for each length."""
    rank, n, returned = dist.get_rank(), dist.get_world_size(), list[object]()

    def record(into: object, *others: object) -> None:
        returned.append(read_only(lambda *others: answer(into, *others))(*others))

    return [(call(record, rank, n, length).tolist(), _numbers(returned[-1])) for length in lengths]


def _numbers(returned: object) -> list[float] | None:
    """Return the numbers of a tensor or a list of tensors; None for anything else."""
    parts = returned if isinstance(returned, list | tuple) else [returned]
    tensors = [part.detach().reshape(-1) for part in parts if isinstance(part, Tensor)]
    return cat(tensors).tolist() if tensors and len(tensors) == len(parts) else None


# -- messages --------------------------------------------------------------------------


def _abbreviate(numbers: list[float]) -> str:
    return f"[{', '.join(f'{x:g}' for x in numbers[:8])}{', …' if len(numbers) > 8 else ''}]"
