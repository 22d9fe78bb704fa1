"""Random programs that are correct by construction: any report is a false alarm.

A program is a list of rounds, in the same order for all ranks. Each rank executes its part of every
round, blocks in some calls and waits for the others at its end: the rank in the earliest round can
always continue. Rounds are not synchronized: ranks may run ahead.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import traces

import distkit as dk
from distkit.errors import CommunicationWarning, DeadlockError
from distkit.trace.trace import Trace

#: A group: its global ranks, () for the world.
Members = tuple[int, ...]

RANKS = 3
PAIRS: tuple[Members, ...] = ((0, 1), (0, 2), (1, 2))
#: Compute times before a round [s]; the longest is noticed as a wait of the other ranks.
PAUSES = (0.0, 0.0, 0.0, 0.0, 0.001, 0.02)
TAGS, SIZES = (0, 0, 1, 7), (1, 3, 1000)


@dataclass(frozen=True)
class Message:
    """A message between two ranks; ends that wait later use ``dist.isend`` or ``irecv``."""

    src: int
    dst: int
    tag: int
    size: int
    value: int
    group: Members
    sends_later: bool
    receives_later: bool
    anyone: bool = False  # received from any source


@dataclass(frozen=True)
class Collective:
    """A collective call by all members of a group."""

    name: str
    root: int
    size: int
    group: Members
    later: bool


@dataclass(frozen=True)
class Round:
    """Steps, and how long each rank computes before them."""

    pauses: tuple[float, ...]
    steps: tuple[Message | Collective, ...]


Program = list[Round]


# -- generation -------------------------------------------------------------------------


def program(chance: Random, rounds: int = 8) -> Program:
    """A correct program for :data:`RANKS` ranks.

    >>> len(program(Random(1), rounds=5))
    5
    """
    kinds = (_messages, _from_anyone, _collectives, _collectives)
    return [
        Round(
            tuple(chance.choice(PAUSES) for _ in range(RANKS)),
            tuple(chance.choice(kinds)(chance, number)),
        )
        for number in range(rounds)
    ]


def _messages(chance: Random, number: int) -> Iterator[Message]:
    """Messages in the same order on all ranks: the n-th send matches the n-th receive."""
    for value in range(chance.randint(1, 4)):
        src, dst = chance.sample(range(RANKS), 2)
        group = chance.choice([(), (min(src, dst), max(src, dst))])
        size, later = chance.choice(SIZES), [chance.choice([True, False]) for _ in range(2)]
        yield Message(src, dst, chance.choice(TAGS), size, value, group, *later)


def _from_anyone(chance: Random, number: int) -> Iterator[Message]:
    """Messages to one rank from any source, under a unique tag."""
    dst, size = chance.randrange(RANKS), chance.choice(SIZES)
    receives_later = chance.choice([True, False])
    others = [r for r in range(RANKS) if r != dst] * chance.choice([1, 2])
    for src in others:
        later = chance.choice([True, False]), receives_later
        yield Message(src, dst, 100 + number, size, number, (), *later, anyone=True)


def _collectives(chance: Random, number: int) -> Iterator[Collective]:
    for _ in range(chance.randint(1, 3)):
        group = chance.choice([(), (), *PAIRS])
        root = chance.choice(group or range(RANKS))
        later = chance.choice([True, False])
        yield Collective(chance.choice(list(CALLS)), root, chance.choice(SIZES), group, later)


# -- execution on the ranks ---------------------------------------------------------------

#: Completes a step at the end of its round.
Finish = Callable[[], object]


def play(rounds: Program) -> None:
    """On each rank: execute its part of every round, and check received values."""
    used = {step.group for round in rounds for step in round.steps} - {()}
    groups: dict[Members, Any] = {pair: dist.new_group(pair) for pair in sorted(used)}
    me = dist.get_rank()
    for round in rounds:
        time.sleep(round.pauses[me])
        for finish in [_begin(step, me, groups.get(step.group)) for step in round.steps]:
            finish()


def _begin(step: Message | Collective, me: int, group: Any) -> Finish:
    if isinstance(step, Collective):
        return _take_part(step, me, group)
    if me == step.src:
        return _send(step, group)
    return _receive(step, group) if me == step.dst else _nothing


def _send(message: Message, group: Any) -> Finish:
    x = torch.full((message.size,), float(message.value))
    send = dist.isend if message.sends_later else dist.send
    work = send(x, message.dst, group, message.tag)
    x.sum()  # a buffer in flight may be read
    return _nothing if work is None else work.wait


def _receive(message: Message, group: Any) -> Finish:
    memory, src = torch.empty(3, message.size), None if message.anyone else message.src
    receive, x = dist.irecv if message.receives_later else dist.recv, memory[1]
    work = receive(x, src, group, message.tag)
    memory[::2].zero_()  # neighbouring memory may be written

    def finish() -> None:
        if isinstance(work, dist.Work):
            work.wait()
        if not bool((x == message.value).all()):
            raise ValueError(f"{message} arrived as {x[:3]}")

    return finish


def _take_part(it: Collective, me: int, group: Any) -> Finish:
    """Call a collective on its members."""
    if it.group and me not in it.group:
        return _nothing
    n = len(it.group) or RANKS
    work = CALLS[it.name](it, n, me, {"group": group, "async_op": it.later})
    return work.wait if it.later else _nothing


def _nothing() -> None:
    pass


def _ones(it: Collective, n: int = 1) -> torch.Tensor:
    return torch.ones(it.size * n)


def _list(it: Collective, n: int) -> list[torch.Tensor]:
    return [_ones(it) for _ in range(n)]


#: Functions of the collective, the group's size, this rank, and the common arguments.
CALLS: dict[str, Callable[[Collective, int, int, dict[str, Any]], Any]] = {
    "all_reduce": lambda it, n, me, how: dist.all_reduce(_ones(it), **how),
    "maximum": lambda it, n, me, how: dist.all_reduce(_ones(it), dist.ReduceOp.MAX, **how),
    "broadcast": lambda it, n, me, how: dist.broadcast(_ones(it), it.root, **how),
    "reduce": lambda it, n, me, how: dist.reduce(_ones(it), it.root, **how),
    "gather": lambda it, n, me, how: dist.gather(
        _ones(it), _list(it, n) if me == it.root else None, it.root, **how
    ),
    "scatter": lambda it, n, me, how: dist.scatter(
        _ones(it), _list(it, n) if me == it.root else None, it.root, **how
    ),
    "all_gather": lambda it, n, me, how: dist.all_gather(_list(it, n), _ones(it), **how),
    "reduce_scatter": lambda it, n, me, how: dist.reduce_scatter(_ones(it), _list(it, n), **how),
    "all_to_all": lambda it, n, me, how: dist.all_to_all_single(_ones(it, n), _ones(it, n), **how),
    "barrier": lambda it, n, me, how: dist.barrier(**how),
}


# -- run and diagnosis --------------------------------------------------------------------


def false_alarm(rounds: Program, play: Callable[[Program], None] = play) -> str:
    """Run a program on fresh ranks and return what is reported, or "".

    Beginnings of its trace are diagnosed, too, as if the run had hung there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CommunicationWarning)
            trace = dk.run_ranks(play, RANKS, rounds).trace
    except (DeadlockError, CommunicationWarning) as report:
        return str(report)
    found = [f for f in trace.diagnose() if f.kind != "straggler"]
    for cut in range(1, 10):
        found += [f for f in _beginning(trace, cut / 10).diagnose() if f.hang]
    return "\n".join(map(str, found))


def _beginning(trace: Trace, part: float) -> Trace:
    """The trace up to this part of its duration."""
    until = trace.start + part * trace.seconds
    early = [e for e in trace if e.time <= until]
    return Trace(early, traces.info(trace.info, ends={}, until=until))
