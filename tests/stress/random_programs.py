"""Random programs that are correct by construction: any report is a false alarm.

A program is a list of rounds, in the same order on all ranks. In each round, a rank starts its part
of the operations, some of which block, and waits at the end of the round for those that do not.
Ranks are not synchronized between rounds; a rank in the earliest round can always continue.
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

#: The global ranks of a group; () for the world.
Members = tuple[int, ...]

RANKS = 3
PAIRS: tuple[Members, ...] = ((0, 1), (0, 2), (1, 2))
#: Compute times before a round [s]; the longest one makes waits of the other ranks visible.
PAUSES = (0.0, 0.0, 0.0, 0.0, 0.001, 0.02)
TAGS, SIZES = (0, 0, 1, 7), (1, 3, 1000)


@dataclass(frozen=True)
class Message:
    """A message between two ranks; a side that waits later uses ``dist.isend`` or ``irecv``."""

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
    """A collective that all members of a group call."""

    name: str
    root: int
    size: int
    group: Members
    later: bool


@dataclass(frozen=True)
class Round:
    """The compute time of each rank, and the steps after it."""

    pauses: tuple[float, ...]
    steps: tuple[Message | Collective, ...]


Program = list[Round]


# -- generation -------------------------------------------------------------------------


def program(rng: Random, rounds: int = 8) -> Program:
    """Return a random correct program for :data:`RANKS` ranks.

    >>> len(program(Random(1), rounds=5))
    5
    """
    kinds = (_messages, _from_anyone, _collectives, _collectives)
    return [
        Round(
            tuple(rng.choice(PAUSES) for _ in range(RANKS)),
            tuple(rng.choice(kinds)(rng, number)),
        )
        for number in range(rounds)
    ]


def _messages(rng: Random, number: int) -> Iterator[Message]:
    """Generate messages in the same order on all ranks: the n-th send matches the n-th receive."""
    for value in range(rng.randint(1, 4)):
        src, dst = rng.sample(range(RANKS), 2)
        group = rng.choice([(), (min(src, dst), max(src, dst))])
        size, later = rng.choice(SIZES), [rng.choice([True, False]) for _ in range(2)]
        yield Message(src, dst, rng.choice(TAGS), size, value, group, *later)


def _from_anyone(rng: Random, number: int) -> Iterator[Message]:
    """Generate messages that one rank receives from any source, under a unique tag."""
    dst, size = rng.randrange(RANKS), rng.choice(SIZES)
    receives_later = rng.choice([True, False])
    sources = [r for r in range(RANKS) if r != dst] * rng.choice([1, 2])
    for src in sources:
        later = rng.choice([True, False]), receives_later
        yield Message(src, dst, 100 + number, size, number, (), *later, anyone=True)


def _collectives(rng: Random, number: int) -> Iterator[Collective]:
    for _ in range(rng.randint(1, 3)):
        group = rng.choice([(), (), *PAIRS])
        root = rng.choice(group or range(RANKS))
        later = rng.choice([True, False])
        yield Collective(rng.choice(list(CALLS)), root, rng.choice(SIZES), group, later)


# -- execution on the ranks ---------------------------------------------------------------

#: Completes a step at the end of its round.
Finish = Callable[[], object]


def play(rounds: Program) -> None:
    """Execute this rank's part of every round, and check the received values."""
    used = {step.group for round in rounds for step in round.steps} - {()}
    groups: dict[Members, Any] = {pair: dist.new_group(pair) for pair in sorted(used)}
    me = dist.get_rank()
    for round in rounds:
        time.sleep(round.pauses[me])
        for finish in [_begin(step, me, groups.get(step.group)) for step in round.steps]:
            finish()


def _begin(step: Message | Collective, me: int, group: Any) -> Finish:
    if isinstance(step, Collective):
        return _call_collective(step, me, group)
    if me == step.src:
        return _send(step, group)
    return _receive(step, group) if me == step.dst else _no_op


def _send(message: Message, group: Any) -> Finish:
    x = torch.full((message.size,), float(message.value))
    send = dist.isend if message.sends_later else dist.send
    work = send(x, message.dst, group, message.tag)
    x.sum()  # reading a buffer that is being sent is allowed
    return _no_op if work is None else work.wait


def _receive(message: Message, group: Any) -> Finish:
    memory, src = torch.empty(3, message.size), None if message.anyone else message.src
    receive, x = dist.irecv if message.receives_later else dist.recv, memory[1]
    work = receive(x, src, group, message.tag)
    memory[::2].zero_()  # writing to neighboring memory is allowed

    def finish() -> None:
        if isinstance(work, dist.Work):
            work.wait()
        if not bool((x == message.value).all()):
            raise ValueError(f"{message} arrived as {x[:3]}")

    return finish


def _call_collective(call: Collective, me: int, group: Any) -> Finish:
    """Call a collective, on the members of its group only."""
    if call.group and me not in call.group:
        return _no_op
    n = len(call.group) or RANKS
    work = CALLS[call.name](call, n, me, {"group": group, "async_op": call.later})
    return work.wait if call.later else _no_op


def _no_op() -> None:
    pass


def _ones(call: Collective, n: int = 1) -> torch.Tensor:
    return torch.ones(call.size * n)


def _list(call: Collective, n: int) -> list[torch.Tensor]:
    return [_ones(call) for _ in range(n)]


#: Calls by name; each takes the collective, its group's size, this rank, and keyword arguments.
CALLS: dict[str, Callable[[Collective, int, int, dict[str, Any]], Any]] = {
    "all_reduce": lambda call, n, me, kw: dist.all_reduce(_ones(call), **kw),
    "maximum": lambda call, n, me, kw: dist.all_reduce(_ones(call), dist.ReduceOp.MAX, **kw),
    "broadcast": lambda call, n, me, kw: dist.broadcast(_ones(call), call.root, **kw),
    "reduce": lambda call, n, me, kw: dist.reduce(_ones(call), call.root, **kw),
    "gather": lambda call, n, me, kw: dist.gather(
        _ones(call), _list(call, n) if me == call.root else None, call.root, **kw
    ),
    "scatter": lambda call, n, me, kw: dist.scatter(
        _ones(call), _list(call, n) if me == call.root else None, call.root, **kw
    ),
    "all_gather": lambda call, n, me, kw: dist.all_gather(_list(call, n), _ones(call), **kw),
    "reduce_scatter": lambda call, n, me, kw: dist.reduce_scatter(
        _ones(call), _list(call, n), **kw
    ),
    "all_to_all": lambda call, n, me, kw: dist.all_to_all_single(
        _ones(call, n), _ones(call, n), **kw
    ),
    "barrier": lambda call, n, me, kw: dist.barrier(**kw),
}


# -- run and diagnosis --------------------------------------------------------------------


def false_alarm(rounds: Program, play: Callable[[Program], None] = play) -> str:
    """Run a program on new ranks, and return the reports, or "".

    Prefixes of its trace are also diagnosed, as if the run had hung there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CommunicationWarning)
            trace = dk.run_ranks(play, RANKS, rounds).trace
    except (DeadlockError, CommunicationWarning) as report:
        return str(report)
    found = [f for f in trace.diagnose() if f.kind != "straggler"]
    for cut in range(1, 10):
        found += [f for f in _prefix(trace, cut / 10).diagnose() if f.hang]
    return "\n".join(map(str, found))


def _prefix(trace: Trace, fraction: float) -> Trace:
    """Return the trace up to a fraction of its duration."""
    until = trace.start + fraction * trace.seconds
    early = [e for e in trace if e.time <= until]
    return Trace(early, traces.info(trace.info, ends={}, until=until))
