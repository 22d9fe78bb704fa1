"""Exercises on collectives; an answer's messages are compared with the best algorithm's."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, arange, cat, empty_like, stack, zeros

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.catalog import Algorithm
from distkit.algorithms.collectives import COLLECTIVES
from distkit_course.collectives import Call, CollectiveTrial, Expected
from distkit_course.content.mistakes import in_turn
from distkit_course.task import Answer, Task

# -- calling an answer -----------------------------------------------------------------


def initial_values(rank: int, length: int) -> Tensor:
    """Return the initial values of a rank: integers, so that sums are exact in any order."""
    return arange(length, dtype=zeros(0).dtype) % 7 + 10.0 * (rank + 1)


def total(rank: int, n: int, length: int) -> Tensor:
    """Return the sum over all ranks."""
    return stack([initial_values(r, length) for r in range(n)]).sum(0)


def call_in_place(answer: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """Call ``answer(x)``, and return x."""
    x = initial_values(rank, length)
    answer(x)
    return x


def call_with_root(answer: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """Call ``answer(x, src)``, and return x."""
    x = initial_values(rank, length)
    answer(x, root(n, length))
    return x


def root(n: int, length: int) -> int:
    """Return the root of a broadcast, which depends on the length of the tensor."""
    return (n - length) % n


def call_gather(answer: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """Call ``answer(outputs, x)``, and return the outputs."""
    outputs = [zeros(length) for _ in range(n)]
    answer(outputs, initial_values(rank, length))
    return cat(outputs)


def call_scatter(answer: Callable[..., object], rank: int, n: int, length: int) -> Tensor:
    """Call ``answer(output, inputs)``, and return the output."""
    output = zeros(length) - 1
    answer(output, [initial_values(rank, length) + part for part in range(n)])
    return output


# -- common mistakes ---------------------------------------------------------------------


def to_all_ranks(x: Tensor) -> None:
    """Every rank sends everything to all others."""
    rank, n, mine = dist.get_rank(), dist.get_world_size(), x.clone()
    others = [r for r in range(n) if r != rank]
    sending = [dist.isend(mine, r) for r in others]
    for r in others:
        received = empty_like(x)
        dist.recv(received, r)
        x += received
    for work in sending:
        work.wait()  # type: ignore[union-attr]


def through_rank_0(x: Tensor) -> None:
    """Rank 0 adds the tensors and sends the sum to all others: correct, but a bottleneck."""
    others = range(1, dist.get_world_size())
    if dist.get_rank():
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    for r in others:
        received = empty_like(x)
        dist.recv(received, r)
        x += received
    for r in others:
        dist.send(x, r)


def receives_first(x: Tensor) -> None:
    """Every rank first waits to receive, so no rank ever sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = empty_like(x)
    dist.recv(received, (rank - 1) % n)
    dist.send(x, (rank + 1) % n)
    x += received


def star(x: Tensor, src: int) -> None:
    """The root sends all messages."""
    if dist.get_rank() != src:
        dist.recv(x, src)
        return
    for r in range(dist.get_world_size()):
        if r != src:
            dist.send(x, r)


def chain(x: Tensor, src: int) -> None:
    """Each rank passes the tensor on to the next."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(x, (rank - 1) % n)
    if (rank + 1) % n != src:
        dist.send(x, (rank + 1) % n)


def gathers_through_rank_0(outputs: list[Tensor], x: Tensor) -> None:
    """Rank 0 receives all parts and sends all of them to every other rank."""
    outputs[dist.get_rank()].copy_(x)
    others = range(1, dist.get_world_size())
    if dist.get_rank():
        dist.send(x, 0)
        for output in outputs:
            dist.recv(output, 0)
        return
    for r in others:
        dist.recv(outputs[r], r)
    for r in others:
        for output in outputs:
            dist.send(output, r)


#: The solutions of two exercises.
_all_gather, _reduce_scatter = (COLLECTIVES[n].reference for n in ("all_gather", "reduce_scatter"))


# -- the exercises -------------------------------------------------------------------------


def _task(
    best: Algorithm,
    signature: str,
    goal: str,
    call: Call,
    expected: Expected,
    *hints: str,
    wrong: tuple[tuple[Answer, str], ...],
    parts: bool = False,
) -> Task:
    name, _, parameters = signature.rstrip(")").partition("(")
    details = (
        f"Use send and recv, or isend and irecv. {best.title}: {best.summary}.\nOn 4 ranks, it "
        f"takes {best.rounds(4)} rounds, and a rank sends at most {best.messages(4)} messages."
    )
    trial = CollectiveTrial(best, call, expected, parameters.split(", ")[0], parts)
    return Task(name, signature, goal, details, best.reference, hints, trial, wrong, worth=4)


def _all_reduce(name: str, *hints: str) -> Task:
    sent = f"12,288 bytes sent by the busiest rank; {ALL_REDUCES[name].title} needs"
    return _task(
        ALL_REDUCES[name],
        f"{name}_all_reduce(x)",
        "sum the tensor x over all ranks, in place and on every rank",
        call_in_place,
        total,
        *hints,
        wrong=(
            (to_all_ranks, sent),
            (through_rank_0, sent),
            (dist.all_reduce, "it calls dist.all_reduce. Use send and recv"),
            (
                lambda x: in_turn(to_all_ranks, lambda total: total)(x.clone()),
                "it returns the correct result, but the result must be in x: write it into x",
            ),
            (receives_first, "deadlock in receives_first: "),
            (in_turn(to_all_ranks, lambda x: x.div_(dist.get_world_size())), "expected [30]"),
        ),
    )


#: The exercises.
TASKS: list[Task] = [
    _task(
        COLLECTIVES["broadcast"],
        "broadcast(x, src)",
        "give every rank the tensor x of rank src",
        call_with_root,
        lambda rank, n, length: initial_values(root(n, length), length),
        "Every rank that has the tensor can send it on, so the number of ranks that have it can "
        "double in every round.",
        "Number the ranks from the root: relative = (rank - src) % n. The root is relative rank 0.",
        "In the round with distance d = …, 4, 2, 1, every relative rank that is a multiple "
        "of 2d sends to relative rank + d, if there is one.",
        wrong=(
            (star, "3 messages sent by the busiest rank; Broadcast needs 2"),
            (chain, "3 rounds; Broadcast needs 2"),
            (dist.broadcast, "it calls dist.broadcast. Use send and recv"),
            (lambda x, src: star(x, 0), "expected [20]"),
            (lambda x, src: star(x, dist.get_world_size() - 1), "on 2 ranks, with 8 elements"),
        ),
    ),
    _all_reduce(
        "ring",
        "Split x into n chunks with x.tensor_split(n). They are views: writing to one writes to x.",
        "First run n-1 rounds: in round s, rank r sends chunk r-s to its right neighbor, and adds "
        "the received chunk to chunk r-s-1. Then rank r has the complete sum of chunk r+1.",
        "Then run n-1 rounds in which the complete chunks travel around once more. Start each send "
        "with dist.isend, because otherwise all ranks wait for each other.",
    ),
    _all_reduce(
        "recursive_doubling",
        "Your partner in the round with distance d = 1, 2, 4, … is rank ^ d.",
        "Partners exchange their whole tensors and add them. After lg n rounds, every rank has the "
        "sum.",
        "If n is not a power of two, fold first: the ranks beyond the largest power of two each "
        "send their tensor to a partner, wait, and receive the result at the end.",
    ),
    _all_reduce(
        "tree",
        "On the way up, in the round with distance d = 1, 2, 4, …, the ranks r with r % 2d == d "
        "send to rank r - d, which adds the received tensor.",
        "On the way down, do the same in reverse, with the larger distances first.",
    ),
    _all_reduce(
        "halving_doubling",
        "Exchange as in recursive doubling, but send only the half for which your partner will be "
        "responsible. Your part becomes half as large in every round.",
        "Then exchange the complete parts in reverse order. The part doubles in every round.",
        "Store the bounds [lo, hi) of your part in each round, because you need them in reverse.",
    ),
    _task(
        COLLECTIVES["all_gather"],
        "all_gather(outputs, x)",
        "put the x of every rank r into outputs[r]",
        call_gather,
        lambda rank, n, length: cat([initial_values(r, length) for r in range(n)]),
        "Put your own x into outputs[rank] first.",
        "In round s, send to the right what you received in the previous round, the x of rank r-s.",
        wrong=(
            (
                lambda outputs, x: (_all_gather(outputs, x), x.copy_(outputs[dist.get_rank() - 1])),
                "the arguments must not change",
            ),
            (
                lambda outputs, x: (new := [empty_like(x) for _ in outputs], _all_gather(new, x))[
                    0
                ],
                "it returns the correct result, but the result must be in outputs",
            ),
            (dist.all_gather, "it calls dist.all_gather. Use send and recv"),
            (
                lambda outputs, x: (_all_gather(outputs, x), outputs[dist.get_rank()].zero_()),
                "expected [10, 20]",
            ),
            (gathers_through_rank_0, "bytes sent by the busiest rank; All-gather needs"),
        ),
        parts=True,
    ),
    _task(
        COLLECTIVES["reduce_scatter"],
        "reduce_scatter(output, inputs)",
        "put the sum over all ranks of inputs[r] into the output of rank r",
        call_scatter,
        lambda rank, n, length: total(rank, n, length) + n * rank,
        "It is the first half of the ring all-reduce.",
        "The sum of part p travels around the ring once and ends at rank p, so it starts at "
        "rank p + 1.",
        "Do not write into inputs. Copy the part that you send.",
        wrong=(
            (
                lambda output, inputs: (_reduce_scatter(output, inputs), inputs[0].add_(output)),
                "the arguments must not change",
            ),
            (
                lambda output, inputs: in_turn(
                    to_all_ranks,
                    lambda tensor: output.copy_(tensor.tensor_split(len(inputs))[dist.get_rank()]),
                )(cat(inputs)),
                "bytes sent by the busiest rank; Reduce-scatter needs",
            ),
            (dist.reduce_scatter, "it calls dist.reduce_scatter. Use send and recv"),
            (lambda output, inputs: output.copy_(inputs[dist.get_rank()]), "expected [30]"),
            (
                lambda output, inputs: in_turn(
                    to_all_ranks, lambda tensor: output.copy_(tensor[: len(output)])
                )(cat(inputs)),
                "on 2 ranks, with 1 element, rank 1 ends with",
            ),
        ),
        parts=True,
    ),
]
