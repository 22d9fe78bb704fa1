"""Judges a collective: runs it on real ranks, and compares result and messages with the best."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor, cat, equal, tensor

from distkit.algorithms.rounds import traffic
from distkit.cluster.notebook import place
from distkit.cluster.runs.run_ranks import run_ranks
from distkit.errors import DeadlockError, RankError, RunError
from distkit.events import COLLECTIVES, Op, State
from distkit.exercises.collectives import Call, Collective
from distkit.exercises.task import Answer, name_of
from distkit.exercises.verdict import Point, Verdict
from distkit.trace.trace import Trace

#: What a rank holds after a call, and the tensor that the call returned, if it did.
Outcome = tuple[list[float], list[float] | None]

#: Worlds and lengths that an answer has to be right on: odd ones, fewer elements than ranks. One
#: rank comes last: what is wrong there has a plainer sign among several.
WORLDS, LENGTHS = (2, 3, 4, 5, 1), (1, 8, 13)

#: Where messages, bytes and rounds are counted: ranks, and elements of four bytes.
N, LENGTH = 4, 1024

#: One frame of a rank's traceback.
_FRAME = re.compile(r' *File "(.+)", line \d+, in .+\n(?: {4}.+\n)?')


def judge(task: Collective, mine: Answer) -> Verdict:
    """Run an answer and say how good it is.

    Args:
        task: the exercise.
        mine: the answer; every rank calls it as ``task.signature`` says.
    """
    for n in WORLDS:
        try:
            run = run_ranks(_named(mine), n, task.call, mine, LENGTHS)
        except RunError as error:
            if isinstance(error, RankError) and "NotImplementedError" in str(error):
                return task.not_attempted()
            return task.not_yet(f"on {_ranks(n)}:\n{_said(error, mine)}")
        theirs = sorted({str(s.op) for s in run.trace.spans if s.op in COLLECTIVES})
        if theirs:
            calls = ", ".join(f"dist.{op}" for op in theirs)
            return task.not_yet(f"it calls {calls}: write it with send and recv, isend and irecv")
        if wrong := _wrong(task, n, run.results):
            attempted = n == 1 or _touched(task, n, run.results, run.trace)
            return task.not_yet(wrong) if attempted else task.not_attempted()
    trace = run_ranks(_named(mine), N, task.call, mine, (LENGTH,)).trace
    points = (
        Point(True, f"right on {min(WORLDS)} to {max(WORLDS)} ranks"),
        *_compared(task, trace),
    )
    solved = all(p.good for p in points)
    return Verdict(
        task.name,
        "solved" if solved else "right, but not the best",
        points,
        "" if solved else task.help,
    )


def _named(mine: Answer) -> Callable[..., list[Outcome]]:
    """The trial under the answer's name, which errors then say."""
    run = partial(trial)
    run.__name__ = name_of(mine)  # type: ignore[attr-defined]
    return run


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
    """What went wrong, with the learner's lines only."""
    if isinstance(error, DeadlockError):
        return f"{name_of(mine)} cannot go on: " + "\n".join(map(str, error.findings))
    if not isinstance(error, RankError) or not error.traceback:
        return str(error)
    ours = str(Path(place(f"{__file__}:1").rpartition(":")[0]).parent)
    frames = "".join(
        frame[0]
        for frame in _FRAME.finditer(error.traceback)
        if "-packages/" not in frame[1] and str(Path(frame[1]).parent) != ours
    )
    return str(error).replace(error.traceback, frames)


def _wrong(task: Collective, n: int, results: list[list[Outcome]]) -> str:
    """The first difference from what a rank should hold, in words; "" if there is none."""
    for rank, outcomes in enumerate(results):
        for length, (got, returned) in zip(LENGTHS, outcomes, strict=True):
            right = task.right(rank, n, length)
            if equal(tensor(got), right):
                continue
            if returned is not None and equal(tensor(returned), right):
                into = task.parameters[0]
                return (
                    f"it returns the {task.result}, but {into} has to hold it: "
                    f"write into {into}, in place"
                )
            return (
                f"on {_ranks(n)}, with {_count(length, 'element')}, rank {rank} ends with\n"
                f"{_few(got)}\nwhere {_few(right.tolist())} would be right"
            )
    return ""


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" + "s" * (n != 1)


def _ranks(n: int) -> str:
    return _count(n, "rank")


def _few(numbers: list[float]) -> str:
    return f"[{', '.join(f'{x:g}' for x in numbers[:8])}{', …' if len(numbers) > 8 else ''}]"


def _touched(task: Collective, n: int, results: list[list[Outcome]], trace: Trace) -> bool:
    """Whether the answer does anything at all."""

    def nothing(*_: object) -> None:
        pass

    before = [
        [task.call(nothing, rank, n, length).tolist() for length in LENGTHS] for rank in range(n)
    ]
    held = [[got for got, _ in outcomes] for outcomes in results]
    return held != before or bool(trace.messages)


# -- against the best ------------------------------------------------------------------


def _compared(task: Collective, trace: Trace) -> Iterator[Point]:
    """Messages, bytes and rounds beside the algorithm's."""
    best = task.algorithm
    messages, sent = traffic(
        best.schedule(N), N, 4 * LENGTH * (N if task.parts else 1), best.chunks(N), itemsize=4
    )
    counts, volume = Counter[int](), Counter[int]()
    for m in trace.messages:
        counts[m.src] += 1
        volume[m.src] += m.nbytes
    yield _point(
        "messages sent by the busiest rank",
        max(counts.values(), default=0),
        int(messages.max()),
        best.title,
    )
    yield _point(
        "bytes sent by the busiest rank",
        max(volume.values(), default=0),
        int(sent.max()),
        best.title,
    )
    yield _point("rounds", rounds(trace), best.rounds(N), best.title)


def _point(what: str, got: int, optimum: int, title: str) -> Point:
    good = got <= optimum
    return Point(good, f"{got:,} {what}" + ("" if good else f"; {title} needs {optimum:,}"))


def rounds(trace: Trace) -> int:
    """How many rounds a run's messages take, if a rank sends one and receives one per round.

    A message leaves when its sender has received what it received before, and has sent what it
    sent before; it arrives one round later, or after what arrives at the same rank before.
    """
    knows: dict[int, int] = defaultdict(int)  # the round by which a rank has what it received
    out, into = defaultdict[int, int](int), defaultdict[int, int](int)
    left: dict[str, int] = {}
    for e in trace:
        match = trace.matches.get((e.rank, e.seq), "")
        if e.op is Op.SEND and e.state is State.STARTED:
            left[match] = max(knows[e.rank], out[e.rank])
            out[e.rank] = left[match] + 1
        elif e.op is Op.RECV and e.state is State.COMPLETED and match in left:
            into[e.rank] = max(left[match], into[e.rank]) + 1
            knows[e.rank] = max(knows[e.rank], into[e.rank])
    return max(into.values(), default=0)
