"""The concept checks of the lessons 09 to 11: model parallelism, strategies, staleness."""

from __future__ import annotations

from itertools import pairwise

from distkit.algorithms.catalogue import PIPELINES
from distkit.events import Op, Span
from distkit.trace.trace import Trace
from distkit_course.content.quizzes.scripted import (
    MS,
    Line,
    calls,
    collective,
    line,
    mark,
    script,
    slowest,
    told,
    updates,
    work,
)
from distkit_course.quizzes import Ask, Concept
from distkit_simulation.network import Link, Network
from distkit_simulation.serving import parameter_server
from distkit_simulation.simulator import Stragglers
from distkit_simulation.training import pipeline

# -- 09 --------------------------------------------------------------------------------------

MICROBATCHES, STAGES = 4, 2


def two_pipelines() -> Trace:
    """Two pipelines of two stages; the replicas of a stage reduce their gradients at the end."""
    link = Network(Link(alpha=0.5 * MS, beta=0))
    one = pipeline(STAGES, MICROBATCHES, 4 * MS, 8 * MS, 2048, link)
    lines: list[Line] = []
    for first in (0, STAGES):
        lines += [_again(span, first) for span in one.spans]
    for stage in range(STAGES):
        end = max(s.end or 0 for s in one.spans if s.rank == stage) / MS
        lines += [_reduced(rank, stage, end) for rank in (stage, stage + STAGES)]
    trace = script(2 * STAGES, "one step", *lines)
    groups = {_group(stage): [stage, stage + STAGES] for stage in range(STAGES)}
    return told(trace, groups=groups)


def _again(span: Span, first: int) -> Line:
    """The same on the ranks from ``first`` on."""
    begin, end = span.start / MS, (span.end or span.start) / MS
    if span.op is Op.MARK:
        return mark(span.rank + first, begin, end, span.label)
    message = {"nbytes": span.nbytes, "shape": span.shape, "dtype": span.dtype, "tag": span.tag}
    return line(span.op, span.rank + first, begin, end, peer=(span.peer or 0) + first, **message)


def _group(stage: int) -> str:
    return f"stage {stage}"


def _reduced(rank: int, stage: int, begin: float) -> Line:
    return collective(Op.ALL_REDUCE, rank, begin, begin + 4, 8192, group=_group(stage))


def kept(trace: Trace) -> int:
    """The most micro-batches whose activations rank 0 keeps at the same time."""
    alive, most = 0, 0
    for span in calls(trace, Op.MARK, 0):
        alive += 1 if span.label.startswith("F") else -1
        most = max(most, alive)
    return most


def schedule(trace: Trace) -> str:
    """The schedule whose order rank 0 follows."""
    mine = [s.label for s in calls(trace, Op.MARK, 0)]
    for name, title in SCHEDULES.items():
        order = PIPELINES[name].orders(STAGES, MICROBATCHES)[0]
        if mine == [f"{action.kind}{action.microbatch}" for action in order]:
            return title
    return "none of them"


SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble": "zero bubble"}


def replicas(trace: Trace) -> str:
    """The ranks that reduce their gradients with rank 0."""
    (ranks,) = [{s.rank for s in calls} for calls in trace.collectives if calls[0].rank == 0]
    return f"ranks {' and '.join(map(str, sorted(ranks)))}"


def layout(trace: Trace) -> str:
    """How many replicas there are of how many stages."""
    stages = {frozenset({m.src, m.dst}) for m in trace.messages}
    rows = len(trace.ranks) // len(stages)
    return f"dp = {len(stages)}, pp = {rows}"


def longest_for(trace: Trace) -> str:
    """What rank 0 waits for in its longest call."""
    spans = [s for s in trace.spans if s.rank == 0 and s.op in WAITS]
    return WAITS[max(spans, key=lambda s: s.seconds or 0.0).op]


WAITS = {
    Op.RECV: "a gradient from rank 1",
    Op.ALL_REDUCE: "the all-reduce",
    Op.SEND: "its activations to be sent",
}

MODEL_PARALLELISM = Concept(
    "09_model_parallelism",
    "One training step of four ranks. F0 is the forward pass of micro-batch 0, B0 its backward "
    "pass; the bars at the end are all-reduces of gradients.",
    two_pipelines,
    (
        Ask(
            "Which layout is it?",
            ("dp = 1, pp = 4", "dp = 4, pp = 1", "dp = 2, pp = 2"),
            layout,
            "The arrows connect ranks 0 and 1, and ranks 2 and 3: two pipelines of two stages.",
        ),
        Ask(
            "Which ranks hold the same layers?",
            ("ranks 0 and 1", "ranks 0 and 2", "ranks 0 and 3"),
            replicas,
            "They reduce their gradients with each other: their all-reduces begin together.",
        ),
        Ask(
            "Which schedule is it?",
            tuple(SCHEDULES.values()),
            schedule,
            "Rank 0 begins with two forward passes, then it alternates backward and forward. "
            "In GPipe all the forward passes come first; zero bubble has I and W in place of B.",
        ),
        Ask(
            "For how many micro-batches does rank 0 keep activations at the same time, at most?",
            (1, 2, 3, 4),
            kept,
            "Count in its lane from the left: one more for each F, one less for each B.",
        ),
        Ask(
            "What does rank 0 wait for the longest?",
            tuple(WAITS.values()),
            longest_for,
            "The longest `recv` in its lane: F0 and B0 of rank 1 come before the first gradient.",
        ),
    ),
)


# -- 10 --------------------------------------------------------------------------------------

STEPS, BAD, ORDINALS = 3, 1, ("the first", "the second", "the third")


def central_steps() -> Trace:
    """Steps of three replicas with the values on rank 0; in one of them rank 1 raises."""
    lines: list[Line] = []
    at = 0.0
    for step in range(STEPS):
        for rank in range(3):
            ready = at + 6 + rank
            lines += [mark(rank, at, ready, "gradients")]
            lines += [_whole(Op.ALL_GATHER, rank, ready, at + 15, 24)]
        at += 15
        if step != BAD:
            lines += [_whole(Op.REDUCE, rank, at, at + 8, 8192, peer=0) for rank in range(3)]
            lines += [mark(0, at + 8, at + 15, "update")]
            begins = [at + 15, at + 8, at + 8]
            lines += [
                _whole(Op.BROADCAST, rank, begin, at + 22, 8192, peer=0)
                for rank, begin in enumerate(begins)
            ]
            at += 22
    return script(3, "three steps", *lines)


def _whole(op: Op, rank: int, begin: float, end: float, nbytes: int, **more: int) -> Line:
    return collective(op, rank, begin, end, nbytes, "float64", **more)


def strategy(trace: Trace) -> str:
    """The strategy that makes such calls."""
    made = {span.op for span in trace.spans}
    return next(name for op, name in BY_CALL.items() if op in made)


BY_CALL = {
    Op.REDUCE_SCATTER: "FullyShardedStrategy",
    Op.ALL_REDUCE: "MirroredStrategy",
    Op.REDUCE: "CentralStorageStrategy",
    Op.PUSH: "ParameterServerStrategy",
}


def meanwhile(trace: Trace) -> str:
    """What rank 1 does while rank 0 makes its first update."""
    at = work(trace, "update")[0].start
    mine = [s for s in trace.spans if s.rank == 1 and s.start <= at < (s.end or at)]
    return MEANWHILE.get(mine[0].op, "something else")


MEANWHILE = {
    Op.MARK: "they compute gradients",
    Op.REDUCE: "they wait in `reduce`",
    Op.BROADCAST: "they wait in `broadcast`",
    Op.ALL_GATHER: "they wait in `all_gather`",
}


def failed_step(trace: Trace) -> str:
    """The step in which no gradients travel after the all-gather."""
    mine = [s.op for s in trace.spans if s.rank == 1 and s.op is not Op.BROADCAST]
    began = [n for n, op in enumerate(mine) if op is Op.MARK]
    parts = [mine[a:b] for a, b in pairwise([*began, len(mine)])]
    return next(ORDINALS[n] for n, part in enumerate(parts) if Op.REDUCE not in part)


STRATEGIES = Concept(
    "10_strategies",
    "Three steps of three replicas, under one of the strategies of the lesson. In one step the "
    "function that a replica runs raises an error.",
    central_steps,
    (
        Ask(
            "Which strategy is it?",
            tuple(BY_CALL.values()),
            strategy,
            "A `reduce` collects the gradients on one rank, and a `broadcast` sends the new values "
            "to all.",
        ),
        Ask(
            "Which rank runs the optimizer step?",
            ("rank 0", "rank 1", "rank 2", "all three"),
            lambda trace: f"rank {work(trace, 'update')[0].rank}",
            "Only its lane has the mark `update`.",
        ),
        Ask(
            "What do the other ranks do meanwhile?",
            tuple(MEANWHILE.values()),
            meanwhile,
            "Their `broadcast` begins as soon as the `reduce` is over: they wait for the values.",
        ),
        Ask(
            "How often do the weights change?",
            (1, 2, 3, 4),
            lambda trace: len(work(trace, "update")),
            "Count the updates: one step has none.",
        ),
        Ask(
            "In which step does a replica raise the error?",
            ORDINALS,
            failed_step,
            "After its small `all_gather` nothing travels: there the replicas hear of the error, "
            "and none of them makes this step.",
        ),
    ),
)

# -- 11 --------------------------------------------------------------------------------------

WORKERS = 3
SLOW, AHEAD = 1, 2
NAMES = tuple(f"worker {w}" for w in range(WORKERS))


def ahead_of_the_slowest() -> Trace:
    """Three workers, one of which is slow; the others must not be far ahead."""
    played = parameter_server(
        WORKERS,
        [4096],
        1,
        Link(alpha=0.5 * MS, beta=0),
        8 * MS,
        steps=5,
        staleness=AHEAD,
        stragglers=Stragglers(slow={SLOW: 2.5}),
    )
    return told(played.trace, name="five gradients each")


def pushed(trace: Trace, worker: int, at: float) -> int:
    """The gradients that a worker has pushed by a moment."""
    return sum((s.end or at) <= at for s in calls(trace, Op.PUSH, worker))


def lead(trace: Trace) -> int:
    """The most gradients that a worker is ahead of the slowest one when it begins a step."""
    steps = [(s.rank, s.start) for s in work(trace, "step")]
    counts = [(worker, [pushed(trace, w, at) for w in range(WORKERS)]) for worker, at in steps]
    return max(count[worker] - min(count) for worker, count in counts)


def held_back(trace: Trace) -> str:
    """The step before which worker 0 waits longest."""
    mine = calls(trace, Op.MARK, 0)
    gaps = [after.start - (before.end or 0.0) for before, after in pairwise(mine)]
    return f"step {gaps.index(max(gaps)) + 1}"


def left_over(trace: Trace) -> int:
    """The gradients that the slowest worker pushes after the others' last."""
    late = slowest(trace)
    others = [s.end or 0.0 for w in range(WORKERS) if w != late for s in calls(trace, Op.PUSH, w)]
    return len(calls(trace, Op.PUSH, late)) - pushed(trace, late, max(others))


STALENESS = Concept(
    "11_staleness_and_stragglers",
    "Three workers and a server, with a bound on staleness. Each worker makes five steps: it "
    "pulls the weights, computes (`step 0`, `step 1`, …) and pushes its gradient.",
    ahead_of_the_slowest,
    (
        Ask(
            "Which worker is the straggler?",
            NAMES,
            lambda trace: NAMES[slowest(trace)],
            "Its steps are more than twice as long as the others'.",
        ),
        Ask(
            "Before which of its steps does worker 0 have to wait?",
            ("step 1", "step 2", "step 3", "step 4"),
            held_back,
            "Look for the long pull in its lane: the server does not answer it at once.",
        ),
        Ask(
            "Which bound on staleness do these workers train with?",
            ("0", "2", "4", "no bound"),
            lambda trace: str(lead(trace)),
            "When worker 0 begins step 3, it has pushed three gradients and the straggler one: "
            "it is 2 ahead. Step 4 has to wait until the straggler has pushed its second one.",
        ),
        Ask(
            "How many updates late is the straggler's second gradient?",
            (0, 2, 4, 6),
            lambda trace: updates(trace, slowest(trace))[1].attributes["late"][0],
            "Count the others' pushes between its second pull and its second push.",
        ),
        Ask(
            "How many gradients does the straggler push after the others have finished?",
            (1, 2, 3, 4),
            left_over,
            "A bound does not make a slow worker faster: it still has to compute its last steps.",
        ),
    ),
)

CONCEPTS = (MODEL_PARALLELISM, STRATEGIES, STALENESS)
