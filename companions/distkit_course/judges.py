"""Tests of answers. The answers run on separate ranks.

:class:`Calls` checks the values that a function returns. :class:`Program` checks the results of a
program on several ranks, and its messages, bytes, rounds or collective calls. :class:`FasterThan`
compares the times of an answer and a naive program.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from distkit import events
from distkit._format import count
from distkit.cluster import machine
from distkit.cluster.notebook import line_label
from distkit.cluster.processes.fork_client import server
from distkit.cluster.runs.run import Run, run_ranks
from distkit.errors import (
    CommunicationWarning,
    DeadlockError,
    MismatchError,
    RankError,
    RunError,
    RunInterrupted,
    StartError,
)
from distkit.trace.trace import Trace
from distkit.views.compare import rounds
from distkit.views.timeline.columns import Columns
from distkit_course import values
from distkit_course.confinement import CPU, SECONDS, confine
from distkit_course.task import (
    BLOCKED,
    PASS,
    WASTEFUL,
    Answer,
    Criterion,
    NotAttempted,
    WrongAnswer,
    name_of,
    raised,
)

#: A frame of a rank's traceback.
_FRAME = re.compile(r' *File "(.+)", line \d+, in .+\n(?: {4}.+\n)?')
#: The end of an error's first line, which refers to the whole traceback.
_POINTER = re.compile(r"\. See its traceback\. \[DK\d+\]")

#: Warm-up runs of each program, and pairs of measured runs.
WARM_UPS, PAIRS = 2, 5


# -- on ranks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerRun:
    """The results of a program, by rank, and its trace."""

    results: list[Any]
    trace: Trace


def run_answer(
    program: Callable[..., object], answer: Answer, n: int, *arguments: object
) -> AnswerRun:
    """Run a program that calls an answer on n ranks; errors show the answer's name.

    The answer runs only on the ranks, which send plain values.

    Raises:
        NotAttempted: the answer is a stub.
        WrongAnswer: the run failed or caused a communication warning, or its results cannot be
            decoded.
    """
    wrapper = partial(_run_confined, program, *arguments)
    wrapper.__name__ = name_of(answer)  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CommunicationWarning)
            run = _run(wrapper, n)
        for text in [str(w.message) for w in caught if w.category is CommunicationWarning]:
            if "its limits" not in text:
                raise WrongAnswer(f"on {count(n, 'rank')}: {text}", run.trace)
        return AnswerRun([values.unpack(result) for result in run.results], run.trace)
    except RunError as error:
        if isinstance(error, RankError) and "NotImplementedError" in str(error):
            raise NotAttempted from None
        trace = error.run.trace if isinstance(error.run, Run) else None
        raise WrongAnswer(f"on {count(n, 'rank')}:\n{_describe(error, answer)}", trace) from error
    except values.DECODE_ERRORS as error:
        raise WrongAnswer(
            f"on {count(n, 'rank')}: its results cannot be decoded: {error}"
        ) from error


def _run(program: Callable[..., object], n: int, retry: bool = True) -> Run:
    try:
        server().preload("distkit_course.exercises")  # saves an import in each rank
        return run_ranks(program, n, timeout=SECONDS, raw=True)
    except StartError:
        if not retry:
            raise
        return _run(program, n, False)  # an earlier answer may have killed the fork server


def _run_confined(program: Callable[..., object], *arguments: object) -> bytes:
    confine()
    return values.pack(program(*arguments))


def _describe(error: RunError, answer: Answer) -> str:
    """Describe an error, with only the learner's lines of its traceback, if any."""
    if isinstance(error, DeadlockError):
        prefix = "" if isinstance(error, MismatchError) else "deadlock in "
        return f"{prefix}{name_of(answer)}: " + "\n".join(map(str, error.findings))
    if isinstance(error, RunInterrupted):
        return f"{name_of(answer)} did not finish within {SECONDS} s"
    if "SIGXCPU" in str(error):
        return f"{name_of(answer)} computes for more than {CPU} s. Check for an infinite loop."
    if not isinstance(error, RankError) or not error.traceback:
        return str(error)
    if error.exception.startswith("WrongAnswer: "):  # raised by the judge's program
        return error.exception.removeprefix("WrongAnswer: ")
    files = [f for where in ("*.py", "content/*.py") for f in Path(__file__).parent.glob(where)]
    course_files = {line_label(f"{file}:1").rpartition(":")[0] for file in files}
    frames = "".join(
        frame[0]
        for frame in _FRAME.finditer(error.traceback)
        if "-packages/" not in frame[1] and frame[1] not in course_files
    )
    return _POINTER.sub("", str(error).replace(error.traceback, frames))


def call_answer(
    answer: Answer,
    cases: Iterable[tuple[Any, ...]],
    describe: Callable[..., str],
    call: Callable[..., Any] = lambda answer, *case: read_only(answer)(*case),
) -> Iterator[Any]:
    """Call an answer with each case on a rank and yield the returned values.

    Args:
        answer: the answer.
        cases: the arguments of each call.
        describe: a function that describes a case, given its arguments.
        call: a function that calls the answer.

    Raises:
        NotAttempted: the answer is a stub.
        WrongAnswer: the answer raises an exception.
    """
    cases = [*cases]
    (outcomes,) = run_answer(_call_each, answer, 1, call, answer, cases).results
    for case, (kind, content) in zip(cases, outcomes, strict=True):
        if kind == "stub":
            raise NotAttempted
        if kind == "raised":
            raise WrongAnswer(f"{describe(*case)}: {content}")
        yield values.unpack(content)


def read_only(answer: Answer) -> Answer:
    """Return an answer that raises an error if it modifies an argument."""

    def call(*arguments: Any) -> Any:
        packed, result = values.pack(arguments), answer(*arguments)
        if values.pack(arguments) != packed:
            raise WrongAnswer(
                "the arguments must not change: work on a copy, made with clone() or sorted()"
            )
        return result

    return call


def _call_each(
    call: Callable[..., Any], answer: Answer, cases: list[tuple[Any, ...]]
) -> list[tuple[str, Any]]:
    """Return the values up to an exception, packed before the answer can change them."""
    outcomes = list[tuple[str, Any]]()
    for case in cases:
        try:
            outcomes.append(("value", values.pack(call(answer, *deepcopy(case)))))
        except NotImplementedError:
            return [*outcomes, ("stub", None)]
        except Exception as error:
            return [*outcomes, ("raised", raised(error, answer))]
    return outcomes


# -- values ------------------------------------------------------------------------------

#: Explains a wrong answer: ``f(returned, expected, *arguments)``; "" if the cause is unknown.
Why = Callable[..., str]


@dataclass(frozen=True)
class Calls:
    """Calls a function and compares its results with the solution's.

    Args:
        solution: the correct function.
        cases: the arguments of each call, simple ones first.
        why: a function that explains common mistakes.
        note: text to append to the message about correct results.
    """

    solution: Answer
    cases: Iterable[tuple[Any, ...]]
    why: Why = lambda returned, expected, *case: ""
    note: str = ""

    def __call__(self, answer: Answer) -> Iterator[Criterion]:
        """Compare the results, up to the first difference."""
        cases = [*self.cases]
        for case, returned in zip(
            cases, call_answer(answer, cases, self._describe_case), strict=True
        ):
            expected = self.solution(*deepcopy(case))
            if returned is None and case is cases[0]:
                raise NotAttempted
            if not same(returned, expected):
                why = self.why(returned, expected, *case)
                raise WrongAnswer(
                    f"{self._describe_case(*case)} it returns {returned!r}; expected {expected!r}"
                    + (f": {why}" if why else "")
                )
        yield Criterion("values", f"correct in {count(len(cases), 'case')}{self.note}")

    def _describe_case(self, *case: Any) -> str:
        return "with " + ", ".join(
            map("{}={!r}".format, inspect.signature(self.solution).parameters, case)
        )


def same(returned: Any, expected: Any) -> bool:
    """Return whether two values are equal; numbers may differ by rounding."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(returned, list | tuple)
            and len(returned) == len(expected)
            and all(map(same, returned, expected))
        )
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        return (
            isinstance(returned, float | int)
            and not isinstance(returned, bool)
            and math.isclose(returned, expected, rel_tol=1e-5, abs_tol=1e-12)
        )
    return type(returned) is type(expected) and bool(returned == expected)


# -- messages ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Runs a program on several ranks and compares each rank's result.

    Args:
        call: a function that calls the answer on rank ``rank`` of ``n`` and returns plain data.
        expected: the expected value of a rank.
        worlds: world sizes to test; messages are counted in the first.
        limits: for "messages", "bytes", "rounds" or "calls" (see :func:`measured`), a function of
            the number of ranks that returns the maximum, and a reason or "".
        why: a function ``f(results, expected)`` that explains common mistakes.
        then: a function that yields further criteria for an answer that meets all of these, given
            the trace of the first run.
        into: the parameter that must contain the result, if the answer works in place.
    """

    call: Callable[[Answer, int, int], Any]
    expected: Callable[[int, int], Any]
    worlds: Sequence[int] = (2, 3, 4)
    limits: dict[str, tuple[Callable[[int], int], str]] = field(default_factory=dict)
    why: Callable[[list[Any], list[Any]], str] = lambda results, expected: ""
    then: Callable[[Answer, Trace], Iterator[Criterion]] = lambda answer, trace: iter(())
    into: str = ""

    def __call__(self, answer: Answer) -> Iterator[Criterion]:
        """Compare the results for each world size, then the messages for the first."""
        traces = [self._run_and_compare(answer, n) for n in self.worlds]
        yield Criterion("values", f"correct on {', '.join(map(str, sorted(self.worlds)))} ranks")
        sent = measured(traces[0])
        criteria = [
            at_most(
                name,
                sent[name],
                limit := limit_of(self.worlds[0]),
                f"{limit:,} {'suffices' if limit == 1 else 'suffice'}{why and f': {why}'}",
                traces[0],
            )
            for name, (limit_of, why) in self.limits.items()
        ]
        yield from criteria
        if all(c.status == PASS for c in criteria):
            yield from self.then(answer, traces[0])

    def _run_and_compare(self, answer: Answer, n: int) -> Trace:
        run = run_answer(_call_on_rank, answer, n, self.call, answer)
        all_expected = [self.expected(rank, n) for rank in range(n)]
        initial = [self.call(lambda *_: None, rank, n) for rank in range(n)]
        if same(run.results, initial) and not run.trace.spans:
            raise NotAttempted
        for rank, (result, expected) in enumerate(zip(run.results, all_expected, strict=True)):
            if not same(result, expected):
                why = (
                    f"nothing is written into {self.into}: use += or copy_, which work in place"
                    if self.into and same(result, initial[rank])
                    else self.why(run.results, all_expected)
                )
                raise WrongAnswer(
                    f"on {count(n, 'rank')}, rank {rank} has {result!r}; expected {expected!r}"
                    + (f": {why}" if why else ""),
                    run.trace,
                )
        if not any(measured(run.trace).values()):
            raise WrongAnswer("the ranks send nothing, but need the other ranks' values", run.trace)
        return run.trace


def _call_on_rank(call: Callable[[Answer, int, int], Any], answer: Answer) -> Any:
    return call(answer, dist.get_rank(), dist.get_world_size())


#: Singular noun and suffix of each counted quantity.
_COUNTED = {
    "messages": ("message", " sent by the busiest rank"),
    "bytes": ("byte", " sent by the busiest rank"),
    "rounds": ("round", ""),
    "calls": ("collective operation", " per rank"),
}


def measured(trace: Trace) -> dict[str, int]:
    """Return the number of rounds, and the maximum per rank of messages, bytes and collectives."""
    columns = Columns(trace)
    messages, nbytes = (int(sent.max(initial=0)) for sent in columns.sent)
    calls = [s.rank for s in trace.spans if s.op in events.COLLECTIVES]
    max_calls = max(map(calls.count, set(calls)), default=0)
    return {"messages": messages, "bytes": nbytes, "rounds": rounds(columns), "calls": max_calls}


def at_most(name: str, got: int, limit: int, reason: str, trace: Trace) -> Criterion:
    """Return a criterion that passes up to ``limit``, and is "wasteful" above it."""
    unit, suffix = _COUNTED[name]
    text = count(got, unit) + suffix
    if got <= limit:
        return Criterion(name, text)
    return Criterion(name, f"{text}; {reason}", WASTEFUL, trace)


# -- time ------------------------------------------------------------------------------------

#: System load per core above which a slow answer is not judged.
BUSY = 1.5


@dataclass(frozen=True)
class FasterThan:
    """Compares the times of an answer and a naive program, in pairs of runs.

    Args:
        call: a function that calls a program on rank ``rank`` of ``n``.
        naive: the naive program.
        ratio: the required speedup over the naive program.
        why: the usual cause of a slow answer.
        n: the number of ranks.
    """

    call: Callable[[Answer, int, int], Any]
    naive: Answer
    ratio: float
    why: str
    n: int = 2

    def __call__(self, answer: Answer, trace: Trace) -> Iterator[Criterion]:
        """Run both programs alternately."""
        run = run_answer(_time_programs, answer, self.n, self.call, answer, self.naive)
        by_pair = zip(*run.results, strict=True)
        slowest = [tuple(map(max, zip(*ranks, strict=True))) for ranks in by_pair]
        yield time_criterion(
            slowest, self.ratio, os.getloadavg()[0] / machine.cpus() > BUSY, self.why
        )


def time_criterion(
    pairs: Sequence[tuple[float, float]], ratio: float, busy: bool, why: str = ""
) -> Criterion:
    """Return the criterion for the answer's time.

    Args:
        pairs: the times of the answer and of the naive program on the slowest rank [s].
        ratio: the required speedup.
        busy: whether the machine is too busy to judge a slow answer.
        why: the usual cause of a slow answer.

    >>> time_criterion([(1.0, 2.0), (1.1, 2.1), (9.0, 2.0)], 1.5, busy=False).status
    'pass'
    >>> time_criterion([(1.0, 1.0)] * 3, 1.5, busy=True).status
    'blocked'
    """
    ratios = [naive / answer for answer, naive in pairs]
    text = f"{median(ratios):.1f} times as fast as the naive program; {ratio:g} required"
    if median(ratios) >= ratio:
        return Criterion("time", text)
    if busy:
        return Criterion("time", f"{text}: the machine is too busy to measure this", BLOCKED)
    return Criterion("time", f"{text}. {why}", WASTEFUL)


def _time_programs(call: Callable[[Answer, int, int], Any], *programs: Answer) -> list[list[float]]:
    """Return this rank's time for each program [s]; the programs alternate."""
    rank, n, seconds = dist.get_rank(), dist.get_world_size(), []
    for _ in range(WARM_UPS + PAIRS):
        seconds.append([0.0 for _ in programs])
        for i, program in enumerate(programs):
            dist.barrier()
            start = time.perf_counter()
            call(program, rank, n)
            seconds[-1][i] = time.perf_counter() - start
    return seconds[WARM_UPS:]
