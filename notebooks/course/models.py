"""Exercises on formulas, schedules and pipelines: functions that send no messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

from distkit.algorithms.rounds import Round, count_contributions
from distkit_course.judges import Calls, call_answer, same
from distkit_course.task import Answer, Criterion, NotAttempted, Task, WrongAnswer
from distkit_simulation.network import Link


def explain_mistakes(*mistakes: tuple[Answer, str], otherwise: str = "") -> Callable[..., str]:
    """Return a function that explains a result if a known wrong formula yields it."""

    def why(returned: Any, expected: Any, *case: Any) -> str:
        found = (text for formula, text in mistakes if same(returned, formula(*case)))
        return next(found, otherwise)

    return why


# -- 02: the ring ------------------------------------------------------------------------------


def chunk_sent(rank: int, step: int, n: int) -> int:
    """In both halves, each rank passes on the chunk that it received in the previous round."""
    return (rank - step) % n


def _why_chunk(returned: Any, expected: int, rank: int, step: int, n: int) -> str:
    if step >= n - 1 and returned == (rank - step % (n - 1)) % n:
        return "after n-1 rounds a rank has the complete sum of chunk rank+1, and sends that first"
    if returned == (rank + step) % n:
        return "each round sends the chunk received from the left in the previous round"
    return "number the chunks modulo n" if same(returned, rank - step) else ""


# -- 06: cost models ---------------------------------------------------------------------------


def broadcast_seconds(n: int, nbytes: float, link: Link) -> float:
    """Each round takes as long as a message, and doubles the number of ranks with the tensor."""
    return math.ceil(math.log2(n)) * (link.alpha + nbytes * link.beta)


def _why_broadcast(returned: Any, expected: float, n: int, nbytes: float, link: Link) -> str:
    message = link.alpha + nbytes * link.beta
    if same(returned, (n - 1) * message):
        return "this sends one message at a time; in a tree, all ranks that have the tensor send"
    if same(returned, math.log2(n) * message):
        return "the number of rounds is a whole number: round up"
    return (
        "each round sends the whole tensor"
        if isinstance(returned, float) and returned < expected
        else ""
    )


def crossover(n: int, alpha: float, beta: float) -> float:
    """The size at which 2(n-1)(α + βK/n) = 2⌈log₂ n⌉(α + βK)."""
    ring, tree = n - 1, math.ceil(math.log2(n))
    return alpha * (ring - tree) / (beta * (tree - ring / n))


_why_crossover = explain_mistakes(
    (
        lambda n, a, b: a * (n - 1 - _lg(n)) / (b * _lg(n)),
        "the ring also sends bytes: (n-1)/n of the tensor, twice",
    ),
    (
        lambda n, a, b: a * (n - 1 - _lg(n)) / (b * (_lg(n) - n + 1)),
        "each message of the ring contains only one chunk: K/n",
    ),
    otherwise="set the two formulas equal and solve for K",
)


# -- 17: a schedule ----------------------------------------------------------------------------


def scatter_reduce(n: int) -> Iterator[Round]:
    """Rank r receives chunk r from all other ranks, adds it, and sends the sum to all of them."""
    src, dst = np.nonzero(~np.eye(n, dtype=bool))
    yield Round(src, dst, chunk=dst, reduce=True)
    yield Round(src, dst, chunk=src, reduce=False)


def _rounds(answer: Answer, n: int) -> list[list[Any]]:
    """Return the fields of the rounds that an answer yields."""
    return [[*map(np.ndarray.tolist, map(np.asarray, astuple(r)))] for r in answer(n) or ()]


def judge_schedule(answer: Answer) -> Iterator[Criterion]:
    """Check the contributions to each chunk of each rank at the end."""
    sizes = range(2, 7)
    outputs = call_answer(answer, [(n,) for n in sizes], lambda n: f"n={n}", _rounds)
    for n, fields in zip(sizes, outputs, strict=True):
        rounds = [Round(*map(np.array, arrays)) for arrays in fields]
        if any((r.src == r.dst).any() for r in rounds):
            raise WrongAnswer(f"n={n}: a rank sends to itself")
        if len(rounds) < 2:  # the first round is given
            raise NotAttempted
        try:
            counts = count_contributions(rounds, n)
        except ValueError as error:
            raise WrongAnswer(f"n={n}: {error}") from None
        for rank, chunk, contributor in np.argwhere(counts > 1):
            raise WrongAnswer(
                f"n={n}: chunk {chunk} of rank {rank} contains rank {contributor}'s contribution "
                f"{counts[rank, chunk, contributor]} times: add it once"
            )
        sent = count_contributions(rounds[:1], n)[rounds[1].src, rounds[1].chunk]
        for at in np.flatnonzero((sent < 1).any(axis=1) & (counts < 1).any()):
            raise WrongAnswer(
                f"n={n}: in the second round, rank {rounds[1].src[at]} sends chunk "
                f"{rounds[1].chunk[at]}, which is not complete on that rank"
            )
        for rank, chunk, contributor in np.argwhere(counts < 1):
            raise WrongAnswer(
                f"n={n}: chunk {chunk} of rank {rank} lacks the contribution of rank {contributor}"
            )
    yield Criterion("values", "an all-reduce on 2 to 6 ranks")
    if len(rounds) > 2:
        raise WrongAnswer(f"{len(rounds)} rounds; two suffice")
    yield Criterion("rounds", "two rounds")


def only_from_rank_0(n: int) -> Iterator[Round]:
    """In the second round, only rank 0 sends its sum."""
    first, second = scatter_reduce(n)
    yield first
    mask = second.src == 0
    yield Round(second.src[mask], second.dst[mask], second.chunk[mask], reduce=False)


def adds_again(n: int) -> Iterator[Round]:
    """Adds in the second round, too."""
    first, second = scatter_reduce(n)
    yield first
    yield Round(second.src, second.dst, second.chunk, reduce=True)


def sends_to_itself(n: int) -> Iterator[Round]:
    """Each rank sends its sum to all ranks, including itself."""
    yield next(scatter_reduce(n))
    src, dst = np.divmod(np.arange(n * n), n)
    yield Round(src, dst, chunk=src, reduce=False)


def sends_theirs(n: int) -> Iterator[Round]:
    """Sends the receiver's chunk instead of its own."""
    first, second = scatter_reduce(n)
    yield first
    yield Round(second.src, second.dst, second.dst, reduce=False)


# -- 07: speedup ------------------------------------------------------------------------------


def smallest_ranks(compute: float, sync: float) -> int:
    """R > 1 + Tsync/Tcomp: the next larger integer."""
    return math.floor(1 + sync / compute) + 1


def _why_ranks(returned: Any, expected: int, compute: float, sync: float) -> str:
    if returned == expected - 1:
        return "this number of ranks is at best as fast as one rank: R > 1 + Tsync/Tcomp"
    return "R > 1 + Tsync/Tcomp: return the smallest whole number above that"


def learning_rate(step: int, base: float, ranks: int, warmup: int) -> float:
    """The rate grows from base to R·base in equal steps, and then stays constant."""
    return base * (1 + (ranks - 1) * min(1.0, step / warmup))


def _why_rate(
    returned: Any, expected: float, step: int, base: float, ranks: int, warmup: int
) -> str:
    if same(returned, base * ranks):
        return "this is the full rate without a warm-up: the rate begins at base"
    if same(returned, base * ranks * min(1.0, step / warmup)):
        return "the rate begins at base, not at 0"
    if same(returned, base * (1 + (ranks - 1) * step / warmup)):
        return "after the warm-up, the rate stays at R times base"
    return "the batch is R times as large, and so is the final rate" if step >= warmup else ""


# -- 08: pipelines -----------------------------------------------------------------------------


def order_1f1b(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """Forward passes until the pipeline is full, then one of each, then the remaining backward
    passes.

    Harlap et al., 2018; Narayanan et al., 2021.
    """
    warmup_passes = min(ranks - 1 - rank, microbatches)
    order = [("F", i) for i in range(warmup_passes)]
    for i in range(microbatches - warmup_passes):
        order += [("F", warmup_passes + i), ("B", i)]
    return order + [("B", i) for i in range(microbatches - warmup_passes, microbatches)]


def _why_order(returned: Any, expected: list[Any], rank: int, ranks: int, microbatches: int) -> str:
    if not isinstance(returned, list):
        return "return a list of pairs"
    if sorted(map(str, returned)) != sorted(map(str, expected)):
        return "each micro-batch has one forward and one backward pass"
    if returned == [(kind, i) for kind in "FB" for i in range(microbatches)]:
        return "this is GPipe: it keeps all activations. Run backward passes as early as possible"
    return "rank r runs ranks-1-r forward passes before forward and backward passes alternate"


def bytes_per_rank(parameters: int, ranks: int, stage: int) -> float:
    """Stage 1 divides Adam's states, stage 2 adds gradients, and stage 3 adds parameters."""
    sharded = 8 * (stage >= 1) + 2 * (stage >= 2) + 2 * (stage >= 3)
    return parameters * (12 - sharded + sharded / ranks)


_why_bytes = explain_mistakes(
    (lambda p, n, stage: 12 * p, "that is DDP, which keeps everything on every rank"),
    otherwise="stage 1 divides Adam's states among the ranks, stage 2 adds gradients, and stage 3 "
    "adds parameters",
)


def bubble(ranks: int, microbatches: int) -> float:
    """p - 1 of the m + p - 1 steps of each rank are idle."""
    return (ranks - 1) / (microbatches + ranks - 1)


_why_bubble = explain_mistakes(
    (lambda p, m: (p - 1) / m, "that is idle time over busy time: divide by the total time"),
    otherwise="the last rank begins p-1 steps late, and is busy for m steps",
)


def whole_loss(losses: list[float], rows: list[int]) -> float:
    """Weights each micro-batch by its number of rows."""
    return sum(a * n for a, n in zip(losses, rows, strict=True)) / sum(rows)


_why_loss = explain_mistakes(
    (
        lambda losses, rows: sum(losses) / len(losses),
        "this is the mean of means: a small micro-batch counts as much as a large one",
    ),
    (
        lambda losses, rows: whole_loss(losses, rows) * sum(rows),
        "this is a sum over all rows: divide by the number of rows",
    ),
    (lambda losses, rows: sum(losses), "this is the sum of the means"),
)


# -- 19: GPU ranks -----------------------------------------------------------------------------


class SimulatedGpu:
    """A GPU with a simulated clock, which first works for ``queued`` seconds on earlier tasks."""

    def __init__(self, queued: float, seconds: float) -> None:
        self._now, self._idle_at, self._task_seconds = 0.0, queued, seconds
        self._program: float | None = None  # the program's time, during a task

    def submit(self, task: Answer) -> SimpleNamespace:
        """Execute a task immediately, with the clock at the time when the GPU reaches the task."""
        self._program, self._now = self._now, self._idle_at
        value, self._idle_at, self._now = task(), self._now, self._program
        self._program = None
        return SimpleNamespace(result=partial(self._wait, self._idle_at, value))

    def _wait(self, done: float, value: Any) -> Any:
        self._now = max(self._now, done)
        return value

    def clock(self) -> float:
        """Return the time."""
        return self._now

    def task(self) -> None:
        """Work for the length of the task.

        Raises:
            WrongAnswer: the program called the task instead of submitting it.
        """
        if self._program is None:
            raise WrongAnswer("the program executes the task itself: submit it to the GPU")
        self._now += self._task_seconds


def gpu_seconds(gpu: Any, clock: Any, task: Any) -> float:
    """Two more tasks in the queue record the time, as CUDA events do."""
    begin, _, end = gpu.submit(clock), gpu.submit(task), gpu.submit(clock)
    return float(end.result() - begin.result())


def _on_simulated_gpu(answer: Answer) -> Iterator[Criterion]:
    def call(queued: float, seconds: float) -> Any:
        gpu = SimulatedGpu(queued, seconds)
        return answer(gpu, gpu.clock, gpu.task)

    yield from Calls(
        lambda queued, seconds: seconds,
        [(2.0, 3.0), (0.0, 1.0), (5.0, 0.5)],
        explain_mistakes(
            (
                lambda queued, seconds: 0.0,
                "the call returns immediately: submit clock, too",
            ),
            (
                lambda queued, seconds: queued + seconds,
                "this includes the time of the earlier tasks in the queue",
            ),
        ),
    )(call)


# -- 20: a layout --------------------------------------------------------------------------------


def bytes_per_gpu(parameters: int, dp: int, pp: int, tp: int) -> float:
    """Each GPU has 1/(pp·tp) of the parameters; only the optimizer's 12 bytes are divided by dp."""
    return parameters / (pp * tp) * (6 + 12 / dp)


_why_layout = explain_mistakes(
    (lambda n, dp, pp, tp: n / (pp * tp) * 18, "ZeRO-1 divides the optimizer's 12 bytes by dp"),
    (
        lambda n, dp, pp, tp: n / (pp * tp * dp) * 18,
        "ZeRO-1 divides only the optimizer's state by dp: each copy has all weights and gradients",
    ),
    (lambda n, dp, pp, tp: n / pp * (6 + 12 / dp), "the tp ranks of a stage share each layer"),
)


# -- 21: compilation -----------------------------------------------------------------------------


def steps_to_pay_off(first: float, eager: float, compiled: float) -> float:
    """The smallest n with first + (n - 1) · compiled ≤ n · eager."""
    return math.ceil((first - compiled) / (eager - compiled)) if compiled < eager else math.inf


_why_steps = explain_mistakes(
    (
        lambda first, eager, compiled: (first - compiled) // (eager - compiled or 1) + 1,
        "n compiled steps may take exactly as long as n eager steps",
    ),
    (
        lambda first, eager, compiled: math.ceil(first / abs(eager - compiled or 1)),
        "the first compiled step is also a step: n - 1 steps follow it",
    ),
    (
        lambda first, eager, compiled: math.ceil((first - eager) / abs(eager - compiled or 1)),
        "count the first step as well: the eager program needs n steps",
    ),
    (
        lambda first, eager, compiled: math.ceil((first - compiled) / (eager - compiled or 1)),
        "if the compiled step is not faster, compilation never pays off: math.inf",
    ),
)


# -- 22: a coordinator ---------------------------------------------------------------------------


def functions_per_worker(seconds: list[float], functions: int) -> list[int]:
    """Worker w can start at each multiple of seconds[w]; the functions get the earliest starts."""
    starts = sorted((k * s, w) for w, s in enumerate(seconds) for k in range(functions))
    return [sum(owner == w for _, owner in starts[:functions]) for w in range(len(seconds))]


_why_functions = explain_mistakes(
    (
        lambda seconds, functions: [functions // len(seconds)] * len(seconds),
        "those are equal shares: a fast worker becomes idle more often",
    ),
    (
        lambda seconds, functions: [
            round(functions / s / sum(1 / other for other in seconds)) for s in seconds
        ],
        "those are the shares of a long run: simulate which worker is idle next",
    ),
)


# -- the exercises -----------------------------------------------------------------------------

_LINKS = (Link(1.0, 0.001), Link(5e-6, 8e-11))


def _calls(solution: Answer, why: Any, cases: Any, note: str = "") -> Calls:
    return Calls(solution, [*cases], why, note)


TASKS: list[Task] = [
    Task(
        "chunk_sent",
        "chunk_sent(rank, step, n)",
        "return the chunk that a rank sends in a round of the ring all-reduce",
        "Rounds are counted from 0 to 2(n-1)-1. In round 0, rank r sends chunk r to its right "
        "neighbor.",
        chunk_sent,
        (
            "A rank sends the chunk that it received in the previous round. Which rank sent it?",
            "In round step, this rank sends the chunk that its left neighbor, rank - 1, sent in "
            "round step - 1. That is chunk rank - step, modulo n. After n-1 rounds, it is chunk "
            "rank + 1, which is complete.",
        ),
        _calls(
            chunk_sent,
            _why_chunk,
            [(r, s, n) for n in (4, 2, 3, 5) for s in range(2 * n - 2) for r in range(n)],
        ),
        (
            (
                lambda rank, step, n: (rank - step % (n - 1)) % n,
                "has the complete sum of chunk rank+1",
            ),
            (lambda rank, step, n: (rank + step) % n, "each round sends the chunk received"),
            (lambda rank, step, n: rank - step, "number the chunks modulo n"),
        ),
    ),
    Task(
        "broadcast_seconds",
        "broadcast_seconds(n, nbytes, link)",
        "return the time of a broadcast with a binomial tree [s]",
        "Each round doubles the number of ranks that have the tensor. link.alpha is the latency of "
        "a message [s],\nand link.beta its time per byte [s]. n can be any number of ranks.",
        broadcast_seconds,
        (
            "How many rounds do 2, 3, 4 and 5 ranks take?",
            "There are ⌈log₂ n⌉ rounds, math.ceil(math.log2(n)). Each message contains the whole "
            "tensor.",
        ),
        _calls(
            broadcast_seconds,
            _why_broadcast,
            [(n, 4000.0, link) for link in _LINKS for n in (4, 2, 3, 5, 8, 39, 1)],
        ),
        (
            (
                lambda n, nbytes, link: (n - 1) * (link.alpha + nbytes * link.beta),
                "in a tree, all ranks that have the tensor send",
            ),
            (
                lambda n, nbytes, link: math.log2(n) * (link.alpha + nbytes * link.beta),
                "the number of rounds is a whole number: round up",
            ),
            (
                lambda n, nbytes, link: math.ceil(math.log2(n)) * (link.alpha),
                "each round sends the whole tensor",
            ),
        ),
    ),
    Task(
        "crossover",
        "crossover(n, alpha, beta)",
        "return the size [bytes] above which a ring is faster than a tree",
        "Ignore the time for adding. For K bytes on n ranks, a ring takes 2(n-1)(α + βK/n), and "
        "a tree\ntakes 2⌈log₂ n⌉(α + βK).",
        crossover,
        (
            "Set the two formulas equal. Which terms contain K?",
            "α((n-1) - ⌈log₂ n⌉) = βK(⌈log₂ n⌉ - (n-1)/n).",
        ),
        _calls(
            crossover, _why_crossover, [(n, a.alpha, a.beta) for a in _LINKS for n in (8, 16, 6)]
        ),
        (
            (lambda n, a, b: a * (n - 1 - _lg(n)) / (b * _lg(n)), "the ring also sends bytes"),
            (
                lambda n, a, b: a * (n - 1 - _lg(n)) / (b * (_lg(n) - n + 1)),
                "each message of the ring contains only one chunk",
            ),
            (lambda n, a, b: a / b, "set the two formulas equal and solve for K"),
        ),
    ),
    Task(
        "scatter_reduce",
        "scatter_reduce(n)",
        "yield the two rounds of an all-reduce in which every rank sends to every other rank",
        "In the first round, each rank sends chunk c to rank c, for every c, and rank c adds it.\n"
        "In the second, each rank sends its complete chunk to all others.\n"
        "Round(src, dst, chunk, reduce) takes arrays.",
        scatter_reduce,
        (
            "The second round has the same senders and receivers as the first.",
            "In the first round, chunk is dst. Which chunk does rank src send in the second?",
            "In the second round, receivers do not add: reduce=False.",
        ),
        judge_schedule,
        (
            (only_from_rank_0, "n=2: chunk 1 of rank 0 lacks the contribution of rank 1"),
            (adds_again, " 2 times: add it once"),
            (sends_to_itself, "n=2: a rank sends to itself"),
            (
                sends_theirs,
                "in the second round, rank 0 sends chunk 1, which is not complete on that rank",
            ),
        ),
        worth=2,
    ),
    Task(
        "smallest_ranks",
        "smallest_ranks(compute, sync)",
        "return the smallest number of ranks that train faster than one rank",
        "A step computes for compute seconds and then synchronizes for sync seconds, for any "
        "number\nof ranks. Each rank has a different batch.",
        smallest_ranks,
        (
            "R ranks process R batches in compute + sync seconds. How long does one rank take?",
            "R > 1 + Tsync/Tcomp. Note that R must be larger, not just equal.",
        ),
        _calls(smallest_ranks, _why_ranks, [(1.0, 2.5), (1.0, 2.0), (2.0, 1.0), (0.5, 0.0)]),
        (
            (lambda c, s: math.ceil(1 + s / c), "sync=2.0 it returns 3; expected 4"),
            (lambda c, s: math.floor(1 + s / c), "is at best as fast as one rank"),
            (lambda c, s: 2, "the smallest whole number above"),
        ),
    ),
    Task(
        "learning_rate",
        "learning_rate(step, base, ranks, warmup)",
        "return the learning rate of a step according to the linear scaling rule with warm-up",
        "With R ranks, the full rate is R times base. The rate starts at base in step 0, grows in "
        "equal steps,\nand reaches the full rate in step `warmup`.",
        learning_rate,
        (
            "The completed fraction of the warm-up is step / warmup, but at most 1.",
            "The rate is base + (ranks * base - base) times that fraction.",
        ),
        _calls(
            learning_rate,
            _why_rate,
            [(step, 0.1, ranks, 10) for ranks in (4, 8) for step in (5, 0, 10, 15)]
            + [(3, 0.02, 4, 6)],
        ),
        (
            (lambda step, base, ranks, warmup: base * ranks, "without a warm-up"),
            (
                lambda step, base, ranks, warmup: base * ranks * min(1.0, step / warmup),
                "the rate begins at base, not at 0",
            ),
            (
                lambda step, base, ranks, warmup: base * (1 + (ranks - 1) * step / warmup),
                "after the warm-up, the rate stays at R times base",
            ),
            (
                lambda step, base, ranks, warmup: learning_rate(step, base, ranks, 10),
                "with step=3, base=0.02",
            ),
        ),
    ),
    Task(
        "order_1f1b",
        "order_1f1b(rank, ranks, microbatches)",
        'return the schedule of a rank in 1F1B: a list of ("F", i) and ("B", i)',
        "There can be any number of micro-batches, even fewer than ranks.",
        order_1f1b,
        (
            "The last rank alternates from the beginning: F0, B0, F1, B1 …",
            "A rank first runs ranks-1-rank forward passes, so that the backward passes can begin.",
            "At the end, it runs the remaining backward passes.",
        ),
        _calls(
            order_1f1b,
            _why_order,
            [(r, p, m) for p, m in ((2, 2), (4, 9), (1, 3), (4, 2)) for r in range(p)],
        ),
        (
            (
                lambda rank, ranks, m: [(kind, i) for kind in "FB" for i in range(m)],
                "this is GPipe: it keeps all activations",
            ),
            (
                lambda rank, ranks, m: [(kind, i) for i in range(m) for kind in "FB"],
                "runs ranks-1-r forward passes before",
            ),
            (
                lambda rank, ranks, m: order_1f1b(rank, ranks, m)[:-1],
                "each micro-batch has one forward and one backward pass",
            ),
        ),
    ),
    Task(
        "bytes_per_rank",
        "bytes_per_rank(parameters, ranks, stage)",
        "return the number of bytes that each rank stores under ZeRO stage 0, 1, 2 or 3",
        "A parameter takes 2 bytes, its gradient 2 bytes, and Adam's two states 8 bytes in total.",
        bytes_per_rank,
        (
            "How many bytes do a parameter, its gradient and states take if nothing is divided?",
            "Stage 1 divides 8 of the 12 bytes by the number of ranks, stage 2 divides 10, and "
            "stage 3 divides all 12.",
        ),
        _calls(bytes_per_rank, _why_bytes, product((1_000_000, 64), (4, 8), (0, 1, 2, 3))),
        (
            (lambda p, n, stage: 12 * p, "that is DDP, which keeps everything on every rank"),
            (lambda p, n, stage: 12 * p / n, "stage 1 divides Adam's states"),
            (lambda p, n, stage: p * (12 - 4 * stage), "stage 2 adds gradients, and stage 3 adds"),
        ),
    ),
    Task(
        "bubble",
        "bubble(ranks, microbatches)",
        "return the fraction of the time that a rank of a pipeline is idle",
        "Each micro-batch takes one forward and one backward step on each of p ranks. "
        "Messages take no time.",
        bubble,
        (
            "Draw the pipeline for p = 2 and m = 2. Which steps of rank 1 are empty?",
            "A rank is busy for m of m + p - 1 steps.",
        ),
        _calls(bubble, _why_bubble, product((4, 2, 8, 1), (8, 1, 3))),
        (
            (lambda p, m: (p - 1) / m, "that is idle time over busy time"),
            (lambda p, m: p / (m + p), "the last rank begins p-1 steps late"),
            (lambda p, m: m / (m + p - 1), "the last rank begins p-1 steps late"),
        ),
    ),
    Task(
        "whole_loss",
        "whole_loss(losses, rows)",
        "return the mean loss of a batch that was split into micro-batches",
        "losses[i] is the mean loss of micro-batch i, which has rows[i] rows.",
        whole_loss,
        (
            "16 rows make 3 micro-batches of 6, 5 and 5 rows. Should all have the same weight?",
            "losses[i] * rows[i] is a sum over rows, and you can add sums.",
        ),
        _calls(whole_loss, _why_loss, [([1.0, 2.0, 3.0], [6, 5, 5]), ([4.0], [3])]),
        (
            (lambda losses, rows: sum(losses) / len(losses), "this is the mean of means"),
            (
                lambda losses, rows: sum(a * n for a, n in zip(losses, rows, strict=True)),
                "divide by the number of rows",
            ),
            (lambda losses, rows: sum(losses), "this is the sum of the means"),
            (
                lambda losses, rows: [whole_loss(losses, rows), losses.clear()][0],
                "the arguments must not change",
            ),
        ),
    ),
    Task(
        "gpu_seconds",
        "gpu_seconds(gpu, clock, task)",
        "return for how many seconds the GPU works on a task",
        "gpu.submit(f) appends f to the GPU's queue, which may already contain other tasks, and "
        "returns an object whose result() waits for f() and returns its value. clock() returns "
        "the time. The check simulates the GPU: queued and seconds are the durations of the "
        "earlier tasks and of this task.",
        gpu_seconds,
        (
            "Which part of the program knows when the GPU begins the task?",
            "clock can be a task, too: submit it before and after the task.",
        ),
        _on_simulated_gpu,
        (
            (
                lambda gpu, clock, task: -clock() + (gpu.submit(task), clock())[1],
                "the call returns immediately: submit clock, too",
            ),
            (
                lambda gpu, clock, task: -clock() + (gpu.submit(task).result(), clock())[1],
                "this includes the time of the earlier tasks in the queue",
            ),
            (
                lambda gpu, clock, task: -clock() + (task(), clock())[1],
                "the program executes the task itself: submit it to the GPU",
            ),
        ),
    ),
    Task(
        "bytes_per_gpu",
        "bytes_per_gpu(parameters, dp, pp, tp)",
        "return how many bytes of weights, gradients and optimizer state a GPU stores with ZeRO-1",
        "For each parameter there are 2 bytes for the weight, 4 for the gradient, and 12 for the "
        "optimizer.\nZeRO-1 divides only the optimizer's state among the dp copies. Ignore the "
        "embeddings.",
        bytes_per_gpu,
        (
            "Which fraction of the parameters does a GPU have? It does not depend on dp.",
            "6 bytes for each of these parameters, and 12 / dp bytes for the optimizer.",
        ),
        _calls(
            bytes_per_gpu, _why_layout, [(10**9, 4, 2, 8), (400 * 10**9, 180, 7, 8), (64, 1, 1, 1)]
        ),
        (
            (lambda n, dp, pp, tp: n / (pp * tp) * 18, "ZeRO-1 divides the optimizer's 12 bytes"),
            (lambda n, dp, pp, tp: n / (pp * tp * dp) * 18, "each copy has all weights"),
            (lambda n, dp, pp, tp: n / pp * (6 + 12 / dp), "the tp ranks of a stage share"),
        ),
    ),
    Task(
        "steps_to_pay_off",
        "steps_to_pay_off(first, eager, compiled)",
        "return the smallest n for which n compiled steps take no longer than n eager steps",
        "The first compiled step takes first seconds, and each later one takes compiled seconds.\n"
        "Each eager step takes eager seconds, which is less than first. Return math.inf if "
        "compilation never pays off.",
        steps_to_pay_off,
        (
            "How long do n steps take, with and without compilation?",
            "n is the smallest whole number with first + (n - 1) · compiled ≤ n · eager.",
        ),
        _calls(
            steps_to_pay_off, _why_steps, [(101.0, 10.0, 5.0), (30.0, 0.25, 0.125), (9.0, 2.0, 3.0)]
        ),
        (
            (lambda f, e, c: math.ceil(f / (e - c)), "n - 1 steps follow it"),
            (lambda f, e, c: math.ceil((f - e) / (e - c)), "the eager program needs n steps"),
            (lambda f, e, c: math.ceil((f - c) / (e - c)), "never pays off: math.inf"),
            (lambda f, e, c: (f - c) / (e - c), "it returns 19.2; expected 20"),
        ),
    ),
    Task(
        "functions_per_worker",
        "functions_per_worker(seconds, functions)",
        "return how many functions each worker runs, as a list",
        "Worker w takes seconds[w] for each function. An idle worker immediately gets the next "
        "function.\nIf several are idle, the one with the lowest number gets it.",
        functions_per_worker,
        (
            "When is each worker idle again? The next function goes to the one that is idle first.",
            "Keep a list of these times. In a loop over the functions, find its smallest element, "
            "and add seconds[w] to it.",
        ),
        _calls(
            functions_per_worker,
            _why_functions,
            [
                ([0.25, 1.0], 10),
                ([0.25, 1.0], 7),
                ([0.5, 0.5, 0.75], 8),
                ([3.0, 1.0, 2.0], 4),
                ([2.0], 3),
            ],
        ),
        (
            (lambda seconds, n: [n // len(seconds)] * len(seconds), "those are equal shares"),
            (
                lambda seconds, n: [round(n / s / sum(1 / t for t in seconds)) for s in seconds],
                "those are the shares of a long run",
            ),
            (
                lambda seconds, n: functions_per_worker(seconds, n)[::-1],
                "it returns [2, 8]; expected [8, 2]",
            ),
        ),
    ),
]


def _lg(n: int) -> int:
    return math.ceil(math.log2(n))
