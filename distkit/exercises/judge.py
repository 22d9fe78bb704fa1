"""The judge: runs an answer on real ranks, and compares result and messages with the best."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from torch import equal, tensor

from distkit.algorithms.rounds import traffic
from distkit.cluster.local import run_ranks
from distkit.errors import RankError, RunError
from distkit.events import COLLECTIVES, Op, State, Trace
from distkit.exercises.tasks import Call, Task
from distkit.exercises.verdict import Point, Verdict

Answer = Callable[..., object]

#: Worlds and lengths that an answer has to be right on: odd ones, fewer elements than ranks.
WORLDS, LENGTHS = (1, 2, 3, 4, 5), (1, 8, 13)

#: Where messages, bytes and rounds are counted: ranks, and elements of four bytes.
N, LENGTH = 4, 1024


def judge(task: Task, mine: Answer) -> Verdict:
    """Run an answer and say how good it is.

    Args:
        task: the exercise.
        mine: the answer; every rank calls it as ``task.signature`` says.

    Raises:
        TypeError: ``mine`` is no function.
    """
    if not callable(mine):
        raise TypeError(
            f"dk.check.{task.name} judges a function, not {type(mine).__name__}. "
            f"Write def {task.signature} and pass it without calling it."
        )
    try:
        for n in WORLDS:
            run = run_ranks(trial, n, task.call, mine, LENGTHS)
            wrong = _wrong(task, n, run.results)
            if wrong and n > 1 and not _touched(task, n, run.results, run.trace):
                return _not_attempted(task)
            if wrong and n > 1:
                return Verdict(task.name, "not right yet", (Point(False, wrong),), _help(task))
        trace = run_ranks(trial, N, task.call, mine, (LENGTH,)).trace
    except RunError as error:
        if isinstance(error, RankError) and "NotImplementedError" in str(error):
            return _not_attempted(task)
        return Verdict(task.name, "not right yet", (Point(False, str(error)),), _help(task))
    points = (Point(True, f"right on {WORLDS[0]} to {WORLDS[-1]} ranks"), *_compared(task, trace))
    solved = all(p.good for p in points)
    return Verdict(task.name, "solved" if solved else "right, but not the best", points,
                   "" if solved else _help(task))  # fmt: skip


def trial(call: Call, mine: Answer, lengths: tuple[int, ...]) -> list[list[float]]:
    """On each rank: what it holds after the call, for each length."""
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    return [call(mine, rank, n, length).tolist() for length in lengths]


def _wrong(task: Task, n: int, results: list[list[list[float]]]) -> str:
    """The first difference from what a rank should hold, in words; "" if there is none."""
    for rank, held in enumerate(results):
        for length, got in zip(LENGTHS, held, strict=True):
            right = task.right(rank, n, length)
            if not equal(tensor(got), right):
                return (f"on {n} ranks, with {length} elements, rank {rank} ends with\n{_few(got)}"
                        f"\nwhere {_few(right.tolist())} would be right")  # fmt: skip
    return ""


def _few(numbers: list[float]) -> str:
    return f"[{', '.join(f'{x:g}' for x in numbers[:8])}{', …' if len(numbers) > 8 else ''}]"


def _touched(task: Task, n: int, results: list[list[list[float]]], trace: Trace) -> bool:
    """Whether the answer does anything at all."""

    def nothing(*_: object) -> None:
        pass

    before = [[task.call(nothing, rank, n, length).tolist() for length in LENGTHS]
              for rank in range(n)]  # fmt: skip
    return results != before or bool(trace.messages)


def _not_attempted(task: Task) -> Verdict:
    return Verdict(task.name, "not attempted", (), f"{task}\nStuck? dk.hint.{task.name}()")


def _help(task: Task) -> str:
    return f"dk.hint.{task.name}() helps; dk.solution.{task.name}() shows the library's page."


# -- against the best ------------------------------------------------------------------


def _compared(task: Task, trace: Trace) -> Iterator[Point]:
    """Messages, bytes and rounds beside the algorithm's."""
    theirs = {s.op for s in trace.spans if s.op in COLLECTIVES}
    for op in sorted(map(str, theirs)):
        yield Point(False, f"it calls dist.{op}: write it with send and recv, isend and irecv")
    best = task.algorithm
    messages, sent = traffic(best.schedule(N), N, 4 * LENGTH * (N if task.parts else 1),
                             best.chunks(N), itemsize=4)  # fmt: skip
    counts, volume = Counter[int](), Counter[int]()
    for m in trace.messages:
        counts[m.src] += 1
        volume[m.src] += m.nbytes
    yield _point("messages sent by the busiest rank", max(counts.values(), default=0),
                 int(messages.max()), best.title)  # fmt: skip
    yield _point("bytes sent by the busiest rank", max(volume.values(), default=0),
                 int(sent.max()), best.title)  # fmt: skip
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
