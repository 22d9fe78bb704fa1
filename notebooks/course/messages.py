"""Exercises on messages: relay, swap, overlap, and loops of unequal length."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import distkit as dk
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit_course.content.mistakes import in_turn
from distkit_course.judges import Program, read_only
from distkit_course.task import WASTEFUL, Answer, Criterion, Task

#: Duration of the work in ``overlap`` [s].
WORK_SECONDS = 0.06


# -- solutions ---------------------------------------------------------------------------------


def relay(x: Tensor) -> None:
    """Every rank adds 1 to the previous rank's number; rank 0 starts with its own 0."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        dist.recv(x, rank - 1)
    x += 1
    if rank < last:
        dist.send(x, rank + 1)


def swap(x: Tensor, y: Tensor) -> None:
    """One rank sends first, and the other receives first."""
    other = 1 - dist.get_rank()
    if dist.get_rank() == 0:
        dist.send(x, other)
        dist.recv(y, other)
    else:
        dist.recv(y, other)
        dist.send(x, other)


def overlap(x: Tensor, work: Answer) -> None:
    """The message is in flight while rank 0 works."""
    if dist.get_rank() == 0:
        sending = dist.isend(x, 1)
        work()
        sending.wait()  # type: ignore[union-attr]
    else:
        work()
        dist.recv(x, 0)


def total_of_all(batches: list[Tensor]) -> Tensor:
    """All ranks run as many rounds as the longest list has batches.

    For sums alone, a single all-reduce of each rank's sum is enough. But in training, the
    gradients of each batch must be reduced before the next batch.
    """
    rounds = torch.tensor(len(batches))
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    total = torch.zeros(1)
    for i in range(int(rounds)):
        mine = batches[i].clone() if i < len(batches) else torch.zeros(1)
        dist.all_reduce(mine)
        total += mine
    return total


# -- common mistakes -----------------------------------------------------------------------


def sends_to_last_rank(x: Tensor) -> None:
    """Every rank sends to the last one, instead of to the next."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x += 1
    if rank < last:
        dist.send(x, last)
        return
    received = torch.zeros_like(x)
    for r in range(last):
        dist.recv(received, r)
        x += received


def receives_around_ring(x: Tensor) -> None:
    """Every rank first waits to receive, as if on a ring, so no rank ever sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.recv(x, (rank - 1) % n)
    x += 1
    dist.send(x, (rank + 1) % n)


def both_receive(x: Tensor, y: Tensor) -> None:
    """Both ranks receive first, as in the lesson."""
    other = 1 - dist.get_rank()
    dist.recv(y, other)
    dist.send(x, other)


def one_way(x: Tensor, y: Tensor) -> None:
    """Rank 0 receives nothing."""
    if dist.get_rank() == 0:
        dist.send(x, 1)
        y.copy_(x)
    else:
        dist.recv(y, 0)


def by_gathering(x: Tensor, y: Tensor) -> None:
    """Uses a collective where a send and a receive would do."""
    both = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(both, x)
    y.copy_(both[1 - dist.get_rank()])


def sends_first(x: Tensor, work: Answer) -> None:
    """Rank 0 waits in send before it works."""
    if dist.get_rank() == 0:
        dist.send(x, 1)
        work()
    else:
        work()
        dist.recv(x, 0)


def never_waits(x: Tensor, work: Answer) -> None:
    """Rank 0 never waits for its request."""
    sending = None if dist.get_rank() else dist.isend(x, 1)
    work()
    if sending is None:
        dist.recv(x, 0)
    dist.barrier()  # keeps rank 0 alive until the message has arrived


def waits_at_once(x: Tensor, work: Answer) -> None:
    """Rank 0 waits for its request before it works."""
    if dist.get_rank() == 0:
        dist.isend(x, 1).wait()  # type: ignore[union-attr]
        work()
    else:
        work()
        dist.recv(x, 0)


def omits_work(x: Tensor, work: Answer) -> None:
    """Is fast because it omits the work."""
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)


def own_batches(batches: list[Tensor]) -> Tensor:
    """Ranks with more batches wait forever."""
    total = torch.zeros(1)
    for batch in batches:
        dist.all_reduce(mine := batch.clone())
        total += mine
    return total


def fewest_batches(batches: list[Tensor]) -> Tensor:
    """Drops batches that other ranks do not have."""
    dist.all_reduce(least := torch.tensor(len(batches)), dist.ReduceOp.MIN)
    total = torch.zeros(1)
    for batch in batches[: int(least)]:
        dist.all_reduce(mine := batch.clone())
        total += mine
    return total


def limits_to_last_rank(batches: list[Tensor]) -> Tensor:
    """Drops each rank's batches beyond the last rank's number of batches."""
    dist.broadcast(rounds := torch.tensor(len(batches)), dist.get_world_size() - 1)
    return total_of_all(batches[: int(rounds)])


# -- calling an answer ---------------------------------------------------------------------


def _run_relay(answer: Answer, rank: int, n: int) -> float:
    x = torch.zeros(1)
    answer(x)
    return x.item()


def _run_swap(answer: Answer, rank: int, n: int) -> list[float]:
    x, y = torch.full((8,), rank + 1.0), torch.zeros(8)
    read_only(lambda x: answer(x, y))(x)
    return y.tolist()


def _run_overlap(answer: Answer, rank: int, n: int) -> list[Any]:
    x, calls = torch.full((4,), 3.0 - 3.0 * rank), list[None]()

    def work() -> None:
        with dk.mark("work"):
            time.sleep(WORK_SECONDS)
        calls.append(None)

    answer(x, work)
    return [len(calls), x.tolist()]


def _judge_overlap(answer: Answer, trace: Trace) -> Iterator[Criterion]:
    """Check that rank 0's message is in flight while rank 0 works."""
    send, work = (
        next((s for s in trace.spans if s.rank == 0 and s.op is op), None)
        for op in (Op.SEND, Op.MARK)
    )
    if send and work and send.start < work.start and (send.end or 0) > work.start:
        yield Criterion("order", "rank 0 works between isend and wait")
    else:
        yield Criterion(
            "order",
            "Rank 0 has to work while rank 1 does: between isend and wait",
            WASTEFUL,
            trace,
        )


#: Number of batches on each rank.
BATCHES = (2, 4, 0)


def _run_total(answer: Answer, rank: int, n: int) -> float | None:
    total = read_only(answer)([torch.full((1,), float(i + 1)) for i in range(BATCHES[rank])])
    return None if total is None else float(total)


def _explain_relay(results: list[float], expected: list[float]) -> str:
    if any(result != 1 for result in results):
        return ""
    return "every rank adds 1 to its own 0: receive from the previous rank first"


def _explain_total(results: list[float], expected: list[float]) -> str:
    """Describe which batches were summed."""
    if results == [m * (m + 1) / 2 for m in BATCHES[: len(results)]]:
        return "this is the sum of the rank's own batches"
    return "batches of some ranks are missing: run as many rounds as the longest list has batches"


#: The exercises.
TASKS: list[Task] = [
    Task(
        "relay",
        "relay(x)",
        "receive x from the previous rank, add 1, and send it to the next rank",
        "x is 0 on every rank. Rank 0 does not receive, and the last rank does not send. At the "
        "end,\nx itself must be r + 1 on rank r.",
        relay,
        (
            "Call dist.recv(x, rank - 1) on every rank but 0, and dist.send(x, rank + 1) on every "
            "rank but the last.",
            "The order matters: first receive, then add, then send.",
        ),
        Program(
            _run_relay,
            lambda rank, n: rank + 1.0,
            (3, 2, 4),
            {"messages": (lambda n: 1, "to the next rank")},
            _explain_relay,
            into="x",
        ),
        (
            (lambda x: relay(x.clone()), "nothing is written into x: use += or copy_"),
            (lambda x: x.add_(1), "every rank adds 1 to its own 0: receive from the previous rank"),
            (sends_to_last_rank, "on 3 ranks, rank 1 has 1.0; expected 2.0"),
            (receives_around_ring, "deadlock in receives_around_ring: "),
            (
                lambda x: x.add_(dist.get_rank() + 1),
                "the ranks send nothing, but need the other ranks' values",
            ),
        ),
        worth=2,
    ),
    Task(
        "swap",
        "swap(x, y)",
        "on two ranks, put the other rank's x into y",
        "Use send and recv, or isend. One message in each direction is enough.",
        swap,
        (
            "If both ranks receive first, neither sends.",
            "One rank can send first while the other receives first. Or start both sends with "
            "dist.isend, and call wait() after the recv.",
        ),
        Program(
            _run_swap,
            lambda rank, n: [2.0 - rank] * 8,
            (2,),
            {
                "messages": (lambda n: 1, "x to the other rank"),
                "calls": (lambda n: 0, "write it with send and recv"),
            },
            lambda results, expected: "each rank gets the other one's x",
            into="y",
        ),
        (
            (lambda x, y: swap(x, y.clone()), "nothing is written into y: use += or copy_"),
            (both_receive, "deadlock in both_receive: "),
            (one_way, "each rank gets the other one's x"),
            (by_gathering, "1 collective operation per rank; 0 suffice: write it with send"),
            (
                in_turn(swap, swap),
                "2 messages sent by the busiest rank; 1 suffices: x to the other rank",
            ),
            (in_turn(swap, lambda x, y: x.copy_(y)), "the arguments must not change"),
        ),
        worth=3,
    ),
    Task(
        "overlap",
        "overlap(x, work)",
        "send x from rank 0 to rank 1, and call work() once on both",
        "Rank 1 needs x only after its work, so it receives late. In the meantime, rank 0"
        "\nshould work instead of waiting for rank 1.",
        overlap,
        (
            "dist.isend immediately returns a handle.",
            "Start the send, then work, and then call wait() on the handle.",
        ),
        Program(
            _run_overlap,
            lambda rank, n: [1, [3.0] * 4],
            (2,),
            {"messages": (lambda n: 1, "")},
            lambda results, expected: "both call work() once, and rank 1 ends with x",
            _judge_overlap,
        ),
        (
            (omits_work, "both call work() once, and rank 1 ends with x"),
            (lambda x, work: work(), "both call work() once, and rank 1 ends with x"),
            (sends_first, "Rank 0 has to work while rank 1 does: between isend and wait"),
            (waits_at_once, "Rank 0 has to work while rank 1 does: between isend and wait"),
            (
                in_turn(lambda x, work: work(), lambda x, work: sends_first(x, int)),
                "Rank 0 has to work while rank 1 does: between isend and wait",
            ),
            (never_waits, "rank 0 never waited for isend(dst=1)"),
        ),
        worth=3,
    ),
    Task(
        "total_of_all",
        "total_of_all(batches)",
        "all-reduce the batches, and return the sum of all ranks' batches",
        "The ranks' lists have different lengths, and may be empty. Each batch is a tensor of one "
        "element.\nDo not modify the batches. All ranks return the same total.",
        total_of_all,
        (
            "A rank that has finished its loop calls no all-reduce. Which ranks then wait for it?",
            "First all-reduce the number of batches, with dist.ReduceOp.MAX.",
            "A rank that has no batch left contributes zeros.",
        ),
        Program(
            _run_total,
            lambda rank, n: 13.0,
            (3, 2),
            {"calls": (lambda n: 1 + max(BATCHES), "one for the count, one for each batch")},
            _explain_total,
        ),
        (
            (own_batches, "on 3 ranks:\n"),
            (fewest_batches, "run as many rounds as the longest list"),
            (
                lambda batches: sum(batches, torch.zeros(1)),
                "this is the sum of the rank's own batches",
            ),
            (
                lambda batches: [total_of_all(batches), *(b.zero_() for b in batches)][0],
                "the arguments must not change",
            ),
            (limits_to_last_rank, "run as many rounds as the longest list"),
        ),
        worth=2,
    ),
]
