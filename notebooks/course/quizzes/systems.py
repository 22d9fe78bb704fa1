"""The concept checks of the lessons 12 to 15: whole systems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from distkit.events import Op, Span
from distkit.trace.hosts import agreement, hosts_of
from distkit.trace.trace import Trace
from distkit.views import Servers
from distkit.views.scene.units import human_bytes, human_seconds, joined
from distkit_course.content.quizzes.scripted import (
    MIB,
    MS,
    Line,
    calls,
    collective,
    line,
    mark,
    script,
    told,
    updates,
    waited,
)
from distkit_course.quizzes import Ask, Concept
from distkit_simulation.network import Link, Network
from distkit_simulation.simulator import Stragglers, simulate

# -- 12 --------------------------------------------------------------------------------------

SERVER, GONE = 3, 2
#: The milliseconds that each worker needs for a gradient: the one that dies is the quickest.
COMPUTES = (9, 12, 5)


def counted_to_the_end() -> Trace:
    """Five rounds of three workers; one dies in the third, when its gradient has arrived."""
    lines = [*_asked(Op.INIT, 0, 0, 1, 1, 2)]
    at = 2.0
    for turn in range(5):
        there = [w for w in range(3) if w != GONE or turn < 3]
        pushed = {w: at + COMPUTES[w] for w in there}
        full = max(pushed.values()) + 3
        for place, w in enumerate(there):
            begin = pushed[w]
            lines += [mark(w, at + 1, begin, "gradient")]
            lines += _asked(Op.PUSH, w, begin, begin + 1, begin + 1.2, begin + 2)
            if (w, turn) != (GONE, 2):
                left = full + 1.2 + 0.1 * place
                lines += _asked(Op.PULL, w, begin + 2.2, begin + 3, left, left + 0.8)
        lines.append(_update(full, turn + 1, there))
        at = full + 3
    trace = script(4, "five rounds", *sorted(lines, key=lambda one: one[2]))
    ranks = {str(r): {"name": f"worker {r}", "role": "worker"} for r in range(3)}
    ranks[str(SERVER)] = {"name": "server 0", "role": "server"}
    ends = {str(GONE): {"how": "died", "text": "it was killed", "where": ""}}
    return told(trace, ranks=ranks, ends=ends)


def _asked(
    op: Op, worker: int, begin: float, came: float, left: float, end: float
) -> Iterator[Line]:
    """A worker's request: at the worker, and at the server when it comes and is answered."""
    about: dict[str, Any] = {"attributes": {"key": "w"}, "match": f"kv:1:{worker}:{begin * 10:.0f}"}
    tensor = {"nbytes": 256, "shape": (64,), "dtype": "float32"}
    yield line(op, worker, begin, end, peer=SERVER, **about, **tensor)
    asks, answers = ({}, tensor) if op is Op.PULL else (tensor, {})
    yield line(Op.RECV, SERVER, came - 0.01, came, peer=worker, **about, **asks)
    yield line(Op.SEND, SERVER, left, left + 0.01, peer=worker, **about, **answers)


def _update(at: float, version: int, workers: list[int]) -> Line:
    late = tuple(0 for _ in workers)
    facts = {"key": "w", "version": version, "workers": tuple(workers), "late": late}
    return line(Op.MARK, SERVER, at, at + 1, attributes=facts)


def dead(trace: Trace) -> int:
    """The node that has died."""
    return next(int(rank) for rank, end in trace.meta["ends"].items() if end["how"] == "died")


def last_of_the_dead(trace: Trace) -> str:
    """What became of the last gradient that a worker pushed before it died."""
    pushes = len(calls(trace, Op.PUSH, dead(trace)))
    used = updates(trace, dead(trace))
    last = used[-1].attributes["version"]
    return f"it is in the update to v{last}" if len(used) == pushes else "it is lost"


def on_crash(trace: Trace) -> str:
    """The option that a run with a dead worker shows."""
    after = updates(trace)[-1].attributes["workers"]
    if len(updates(trace)) == len(calls(trace, Op.PUSH, dead(trace))):
        return "stop"
    return "replace" if dead(trace) in after else "continue"


CRASHES = Concept(
    "12_surviving_crashes",
    "Three workers count in `dist_sync`, as in the lesson. Each gradient is a tensor of "
    "ones, and the server adds it to `w`, which begins at 0. One worker dies. Go through the run "
    "with →.",
    counted_to_the_end,
    (
        Ask(
            "How many gradients does the worker push before it dies?",
            (2, 3, 4, 5),
            lambda trace: len(calls(trace, Op.PUSH, dead(trace))),
            "The bars of worker 2 end after its third push, at the cross.",
        ),
        Ask(
            "What happens to the last gradient that it pushed?",
            ("it is lost", "it is in the update to v2", "it is in the update to v3"),
            last_of_the_dead,
            "It lies in the inbox when its worker dies, and the next update takes all three.",
        ),
        Ask(
            "How many gradients does the last update use?",
            (2, 3, 1),
            lambda trace: len(updates(trace)[-1].attributes["workers"]),
            "On the right, each update has a dot for every worker whose gradient it took.",
        ),
        Ask(
            "Which `on_crash` does this run use?",
            ("stop", "continue", "replace"),
            on_crash,
            "The others go on, and nobody takes the place of the dead worker.",
        ),
        Ask(
            "What is the value of `w` at the end?",
            (5, 10, 13, 15),
            lambda trace: sum(len(u.attributes["workers"]) for u in updates(trace)),
            "Three updates with three gradients, then two with two.",
        ),
    ),
    Servers,
)


# -- 13 --------------------------------------------------------------------------------------

HOSTS = ("delta", "epsilon", "zeta")


def three_hosts() -> Trace:
    """A hierarchical all-reduce on three hosts, one of which has a slow line."""
    inside = Link.of(latency=1e-4, bandwidth=1e9)
    between = Link.of(latency=1e-3, bandwidth=5e7)
    network = Network.hosts(3, 2, inside=inside, between=between)
    slow = Stragglers(slow={2: 2.5})
    trace = simulate("hierarchical", 6, 3 * MIB, network, stragglers=slow)
    ranks = {str(r): {"name": f"rank {r}", "host": HOSTS[r // 2]} for r in range(6)}
    clocks = {host: {"ahead": 7.0 * n, "error": 1e-4} for n, host in enumerate(HOSTS)}
    return told(trace, name="all-reduce of 3 MiB", ranks=ranks, clocks=clocks)


def outside(trace: Trace) -> list[Span]:
    """The sends from one host to another."""
    hosts = hosts_of(trace.meta)
    sends = [s for s in trace.spans if s.op is Op.SEND and s.peer is not None]
    return [s for s in sends if hosts[s.rank] != hosts[s.peer or 0]]


def at_home(trace: Trace) -> str:
    """The ranks that send nothing to another host."""
    return listed({*trace.ranks} - {s.rank for s in outside(trace)})


def listed(ranks: set[int]) -> str:
    """Ranks in words."""
    return f"ranks {joined([str(r) for r in sorted(ranks)])}" if ranks else "none"


def slow_line(trace: Trace) -> str:
    """The host that even the quickest message is slow to or from."""
    hosts, quickest = hosts_of(trace.meta), dict.fromkeys(HOSTS, math.inf)
    for s in outside(trace):
        for end in (hosts[s.rank], hosts[s.peer or 0]):
            quickest[end] = min(quickest[end], s.seconds or 0.0)
    return max(quickest, key=lambda name: quickest[name])


HOSTS_APART = Concept(
    "13_many_machines",
    "Six ranks on three machines make one all-reduce. One of the machines has a slow line. The "
    "clocks of epsilon and zeta are 7 s and 14 s ahead of delta's, which the picture subtracts; "
    "each clock is known to ±100 µs.",
    three_hosts,
    (
        Ask(
            "Which ranks send nothing to another machine?",
            ("none", "ranks 0, 2 and 4", "ranks 1, 3 and 5"),
            at_home,
            "Their arrows end at the other lane of their machine: this is the hierarchical one.",
        ),
        Ask(
            "How many messages go from one machine to another?",
            (4, 6, 12, 18),
            lambda trace: len(outside(trace)),
            "Four rounds of three: a ring of machines.",
        ),
        Ask(
            "How many bytes does the machine delta send to the others?",
            ("1 MiB", "3 MiB", "4 MiB", "12 MiB"),
            lambda trace: human_bytes(sum(s.nbytes for s in outside(trace) if s.rank < 2)),
            "Rank 0 sends four times, a third of the tensor each time: 2 · (3 − 1)/3 of it.",
        ),
        Ask(
            "Which machine has the slow line?",
            HOSTS,
            slow_line,
            "From rank 4 to rank 0 messages are quick, so zeta and delta are not slow.",
        ),
        Ask(
            "By how much can a time on delta be off, compared with one on zeta?",
            ("200 µs", "1 ms", "7 s", "14 s"),
            lambda trace: human_seconds(agreement(trace.meta) or 0.0),
            "100 µs for each of the two clocks. That they are 14 s apart is known, and subtracted.",
        ),
    ),
)


# -- 14 --------------------------------------------------------------------------------------

#: The MiB that each of two ranks has in use on its GPU, by step.
USED = ((40, 90, 60), (40, 160, 60))


def two_gpus(used: Sequence[Sequence[int]] = USED, device_seconds: float = 9 * MS) -> Trace:
    """Steps of two ranks with a GPU each: a call returns long before the GPU is done.

    Args:
        used: the MiB that each rank has in use, by step.
        device_seconds: what the GPU needs for an all-reduce [s].
    """
    lines: list[Line] = []
    for rank, steps in enumerate(used):
        for step, mib in enumerate(steps):
            at = 20.0 * step
            on = {"device": f"cuda:{rank}", "stream": 7, "memory": mib * MIB}
            facts = {**on, "device_seconds": device_seconds}
            lines += [
                mark(rank, at, at + 5, "backward"),
                collective(Op.ALL_REDUCE, rank, at + 5, at + 5.5, 64 * MIB, attributes=facts),
                mark(rank, at + 5.5, at + 8.5, "read the next batch"),
                mark(rank, at + 8.5, at + 14.5, "x[0].item()"),  # when the GPU is done, it copies
                mark(rank, at + 14.5, at + 18, "update"),
            ]
    trace = script(2, "two GPUs", *lines)
    ranks = {str(r): {"name": f"rank {r}", "device": f"cuda:{r}"} for r in range(2)}
    return told(trace, ranks=ranks)


def reduces(trace: Trace) -> list[Span]:
    """The all-reduces of rank 0."""
    return calls(trace, Op.ALL_REDUCE, 0)


def on_gpu(trace: Trace) -> float:
    """The seconds that the GPU needs for the first all-reduce of rank 0."""
    return float(reduces(trace)[0].attributes["device_seconds"])


def backend(trace: Trace) -> str:
    """The best backend that the ranks' devices allow."""
    found = [about["device"] for about in trace.meta["ranks"].values()]
    return "NCCL" if len({*found}) == len(found) else "gloo, through host memory"


def waits_in(trace: Trace) -> str:
    """The mark in which rank 0 is when its GPU is done."""
    over = reduces(trace)[0].start + on_gpu(trace)
    return str(next(s.label for s in calls(trace, Op.MARK, 0) if over <= (s.end or 0.0)))


def fullest(trace: Trace) -> str:
    """The rank that has most memory in use."""
    spans = [s for s in trace.spans if "memory" in s.attributes]
    return f"rank {max(spans, key=lambda s: s.attributes['memory']).rank}"


GPUS = Concept(
    "14_gpu_ranks",
    "Two ranks reduce a tensor in each of three steps, and then do something else. This trace is "
    "made up: no GPU is needed to read it. Point at a bar to see what the GPU did.",
    two_gpus,
    (
        Ask(
            "What is the best backend for these two ranks?",
            ("gloo, through host memory", "NCCL", "neither can connect them"),
            backend,
            "The devices stand below the names: cuda:0 and cuda:1, a GPU for each.",
        ),
        Ask(
            "How long does the call of rank 0's first all-reduce take to return?",
            ("500 µs", "5 ms", "9 ms", "14 ms"),
            lambda trace: human_seconds(reduces(trace)[0].seconds or 0.0),
            "Its bar in the upper row is short: the call puts a task into the stream and returns.",
        ),
        Ask(
            "How long does the GPU need for that all-reduce?",
            ("500 µs", "5 ms", "9 ms", "14 ms"),
            lambda trace: human_seconds(on_gpu(trace)),
            "Point at the bar: it tells how long the GPU took, measured by events in the stream.",
        ),
        Ask(
            "What is rank 0 doing when the GPU finishes that all-reduce?",
            ("backward", "read the next batch", "x[0].item()", "update"),
            waits_in,
            "The GPU begins at 5 ms and needs 9 ms. Until then the rank waits for the value.",
        ),
        Ask(
            "Which rank uses the most GPU memory?",
            ("rank 0", "both use the same", "rank 1"),
            fullest,
            "The steps behind the lanes are the memory; in the second step those of rank 1 are "
            "higher.",
        ),
    ),
)


# -- 15 --------------------------------------------------------------------------------------

LATE, STOPS, STEPS = 3, 1, 3
START, GRADIENT, LOSS = "train.py:9", "train.py:21", "train.py:24"


def a_script() -> Trace:
    """A script that others wrote: one rank is slow, and another stops a step too soon."""
    lines = [_called(Op.BROADCAST, rank, 0, 3, START, 1 << 20) for rank in range(4)]
    for step in range(STEPS + 1):
        for rank in range(4):
            at = 3 + 20.0 * step
            begin = at + (14 if rank == LATE else 8)
            if step == STEPS and rank == STOPS:
                continue
            end = math.inf if step == STEPS else at + 17
            lines += [
                mark(rank, at, begin, "compute"),
                _called(Op.ALL_REDUCE, rank, begin, end, GRADIENT, 1 << 20),
            ]
            if step < STEPS:
                lines.append(_called(Op.ALL_REDUCE, rank, at + 18, at + 19, LOSS, 4))
    trace = script(4, "a script", *lines)
    over = {"how": "returned", "text": "", "where": ""}
    return told(trace, ends={str(STOPS): over})


def _called(op: Op, rank: int, begin: float, end: float, where: str, nbytes: int) -> Line:
    peer = 0 if op is Op.BROADCAST else None
    return collective(op, rank, begin, end, nbytes, where=where, peer=peer)


def by_line(trace: Trace) -> Counter[str]:
    """The bytes of each line, on all ranks."""
    moved: Counter[str] = Counter()
    for s in trace.spans:
        if s.op is not Op.MARK:
            moved[s.where] += s.nbytes
    return moved


def last_to_come(trace: Trace) -> str:
    """The rank that waits least, of those that are still there."""
    here = {s.rank for s in trace.spans if s.end is None}
    return f"rank {min(here, key=lambda rank: waited(trace, rank))}"


OWN = Concept(
    "15_bring_your_own",
    "A training script on four ranks, recorded as it is. Point at a bar to see its line and its "
    "bytes.",
    a_script,
    (
        Ask(
            "Which line moves the most bytes?",
            (START, GRADIENT, LOSS),
            lambda trace: max(by_line(trace), key=lambda where: by_line(trace)[where]),
            "The broadcast is as large, but happens once; the gradients are reduced in each step.",
        ),
        Ask(
            "Which line costs only latency?",
            (START, GRADIENT, LOSS),
            lambda trace: min(by_line(trace), key=lambda where: by_line(trace)[where]),
            "It reduces 4 bytes, perhaps a loss. Every tenth step would do.",
        ),
        Ask(
            "Which rank do the others wait for in every step?",
            ("rank 0", "rank 1", "rank 2", "rank 3"),
            last_to_come,
            "It computes for longest, and its bars in the all-reduce are short.",
        ),
        Ask(
            "Which rank leaves the loop before the others?",
            ("rank 0", "rank 1", "rank 2", "rank 3"),
            lambda trace: f"rank {min(trace.ranks, key=lambda r: len(calls(trace, Op.MARK, r)))}",
            "Its lane ends after three steps; the others are in a fourth one.",
        ),
        Ask(
            "At which line do the others wait for it forever?",
            (START, GRADIENT, LOSS),
            lambda trace: next(s.where for s in trace.spans if s.end is None),
            "Their last bars have no end, and tell the line of the all-reduce of the gradients.",
        ),
    ),
)


CONCEPTS: tuple[Concept, ...] = (CRASHES, HOSTS_APART, GPUS, OWN)
