"""The parameter server's exercises: the push handler, whom a pull waits for, which bound.

The handler is judged in pushes.py, a staleness bound and the rule behind it here: beside the real
rule and the real server. A worker's seconds are counted, not waited for: the messages come in the
order of their times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from distkit.consistency import Asynchronous
from distkit.exercises import pages, pushes
from distkit.exercises.task import Answer, Mistake, NotAttempted, Point, Task, attempt
from distkit.kvstore.protocol.messages import Init, Pull, Push, SetOptimizer
from distkit.kvstore.protocol.server import KVServer

#: Seconds of a step and of a pause that a bound is tried with.
PAIRS = ((0.01, 0.045), (0.01, 0.0), (0.02, 0.1), (0.1, 0.03), (0.003, 0.1), (0.5, 8.2))
#: Workers, gradients of each, and the gradient after which worker 0 pauses.
WORKERS, STEPS, PAUSES_AT = 3, 60, 5
#: What comes at the same moment is taken in this order.
PUSH, PULL = 0, 1
#: In what an answer may be.
COLLECTIONS = (set, frozenset, list, tuple)


# -- whom a pull waits for -------------------------------------------------------------


def states() -> Iterator[tuple[int, dict[int, int], int]]:
    """Every worker, clocks and bound that are tried, the plain ones first."""
    for n in (2, 3):
        for bound, clocks in product((2, 0, 1, 3), product(range(6), repeat=n)):
            for worker in range(n):
                yield worker, dict(enumerate(clocks)), bound


def judge_waits(mine: Answer) -> Iterator[Point]:
    """Compare the rule with the library's, in every small state."""
    count = 0
    for worker, clocks, bound in states():
        right = Asynchronous(bound).awaits(clocks[worker], 0, (), clocks.keys(), clocks)
        said = attempt(mine, _state(worker, clocks, bound), worker, dict(clocks), bound)
        if said is None and not count:
            raise NotAttempted
        if not isinstance(said, COLLECTIONS) or set(said) != right:
            raise Mistake(_differs(said, right, worker, clocks, bound))
        count += 1
    yield Point(True, f"as the real rule in {count:,} states")


def _state(worker: int, clocks: Mapping[int, int], bound: int) -> str:
    return f"worker={worker}, clocks={dict(clocks)}, bound={bound}"


def _differs(said: Any, right: set[int], worker: int, clocks: Mapping[int, int], bound: int) -> str:
    """The reason why an answer is wrong."""
    text = f"{_state(worker, clocks, bound)}: it returns {said!r} where {right} is right"
    if not isinstance(said, COLLECTIONS):
        return f"{text}. Return a set of workers"
    other = sorted(right ^ set(said), key=str)[0]
    if other not in clocks:
        return f"{text}. There is no worker {other!r}"
    behind = clocks[worker] - clocks[other]
    if behind < 0:
        return f"{text}. Worker {other} is ahead: a pull waits only for workers behind it"
    how = "more than" if behind > bound else "exactly" if behind == bound else "less than"
    allowed = "" if behind > bound else ": that is allowed"
    return f"{text}. Worker {other} is {behind} behind, {how} {bound}{allowed}"


# -- which bound -----------------------------------------------------------------------


def judge_bound(mine: Answer) -> Iterator[Point]:
    """Train on the real server with the bound, and with the next smaller one."""
    for step, pause in PAIRS:
        case = f"steps of {1e3 * step:g} ms, a pause of {1e3 * pause:g} ms"
        bound = attempt(mine, case, step, pause)
        if bound is None and (step, pause) == PAIRS[0]:
            raise NotAttempted
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise Mistake(
                f"{case}: it returns {bound!r}: a bound is a whole number of "
                "gradients, 0 or more. math.ceil makes one"
            )
        waited, ahead = trained(bound, step, pause)
        if waited:
            raise Mistake(
                f"{case}: with your bound of {bound} the others wait "
                f"{1e3 * waited:.3g} ms. It has to be larger"
            )
        if bound > ahead:
            raise Mistake(
                f"{case}: with your bound of {bound} nobody waits, but nobody is "
                f"ever more than {ahead} ahead: {ahead} would do. A larger bound "
                "allows staler gradients"
            )
        yield Point(True, f"{case}: {bound}")


def trained(bound: int, step: float, pause: float) -> tuple[float, int]:
    """Let workers train on a server with this bound; worker 0 pauses once.

    Returns:
        The longest time [s] that a worker waited for its pulls, and by how many gradients it was
        ahead of the slowest one when it had its answer.
    """
    server = KVServer(Asynchronous(bound), range(WORKERS))
    server.handle(SetOptimizer(0, 0, 0, "sgd", {"learning_rate": 0.1}))
    server.handle(Init(0, 0, 1, "w", (1,), "float32", torch.zeros(1)))
    usual, longer = Fraction(str(step)), Fraction(str(pause))  # no rounding: ties are ties
    clocks, since, waited, ahead = [0] * WORKERS, dict[int, Fraction](), Fraction(0), 0
    heap = [(usual, PUSH, w) for w in range(WORKERS)]  # when a worker has its gradient
    number = 1
    while heap:
        now, what, w = heapq.heappop(heap)
        number += 1
        if what == PUSH:
            clocks[w] += 1
            answers = server.handle(Push(0, w, number, "w", (1,), 0, torch.ones(1)))
            heapq.heappush(heap, (now, PULL, w))
        else:
            since[w] = now
            answers = server.handle(Pull(0, w, number, "w"))
        for done in (a.node for a in answers if getattr(a, "value", None) is not None):
            waited = max(waited, now - since.pop(done))
            ahead = max(ahead, clocks[done] - min(clocks))
            if clocks[done] < STEPS:
                pauses = done == 0 and clocks[0] == PAUSES_AT
                heapq.heappush(heap, (now + usual + pauses * longer, PUSH, done))
    return float(waited), ahead


#: The exercises.
TASKS: list[Task] = [
    Task(
        "push_handler",
        "push_handler(server, worker, number, gradient)",
        "handle a push, and return the list of workers whose waiting pulls are answered now",
        "server.sync: True under dist_sync, False under dist_async. server.workers: how many.\n"
        "server.update(total): one step with a sum.\n"
        "server.waiting: a list of the workers whose pulls wait. It fills as they pull; you take\n"
        "off those whom you answer.\n"
        "server.inbox, a dict, and server.seen, a set: empty at first, and yours.\n"
        "A push may come again: its (worker, number) tells.",
        pages.push_handler,
        (
            "len(server.inbox) tells how many workers have pushed in this round. Under dist_sync, "
            "return [] until it is server.workers; under dist_async one is enough.",
            "A round is complete: server.update(sum(server.inbox.values())), empty the inbox for "
            "the next round, and answer everybody in server.waiting.",
            "A worker that is answered no longer waits. So when a round is complete, and only "
            "then, keep "
            "the list, put an empty one in its place, and return the one you kept: "
            "answered, server.waiting = server.waiting, [].",
            "Exactly once: if (worker, number) is in server.seen, it has been counted. Never empty "
            "server.seen: the echo of a push may come rounds later.",
        ),
        pushes.judge,
    ),
    Task(
        "waits_for",
        "waits_for(worker, clocks, bound)",
        "return the set of workers that a pull of this worker waits for",
        "clocks[w] counts the gradients that worker w has pushed so far. No worker may be more "
        "than bound gradients ahead of another.",
        pages.waits_for,
        (
            "A worker's clock counts its gradients. Compare clocks[worker] with every other clock.",
            "It waits for those who are more than bound gradients behind it: exactly bound is "
            "still allowed.",
        ),
        judge_waits,
    ),
    Task(
        "staleness_bound",
        "staleness_bound(step, pause)",
        "return the smallest bound with which nobody waits while one worker pauses once",
        "Every worker needs step seconds for a gradient; one of them stands still for pause "
        "seconds, once.",
        pages.staleness_bound,
        (
            "How many gradients do the others push while one of them pauses?",
            "A bound is a whole number of gradients, and part of a step counts: math.ceil.",
        ),
        judge_bound,
    ),
]
