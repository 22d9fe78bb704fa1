"""Exercises on the parameter server.

A push handler receives messages in random orders and is compared with the library's server.
Gradient i is 1 at index i and 0 elsewhere. The server's value is the sum of the gradients, so it
shows how often each of them was applied. The staleness bound is tried in simulated time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from distkit._format import human_seconds, joined
from distkit.consistency import Asynchronous, Synchronous
from distkit.kvstore.protocol.messages import Init, Pull, Push, SetOptimizer
from distkit.kvstore.protocol.server import KVServer
from distkit_course import values
from distkit_course.judges import Calls, call_answer, same
from distkit_course.task import Answer, Criterion, NotAttempted, Task, WrongAnswer, raised

# -- solutions ------------------------------------------------------------------------------


@dataclass
class Server:
    """The state of a server with one key, for ``dk.check.push_handler``.

    ``sync``: True for ``dist_sync``, False for ``dist_async``. ``workers``: the number of workers.
    ``waiting``: the workers with an unanswered pull; the handler removes those that it answers.
    ``inbox``: the gradients of an incomplete round, by worker. ``seen``: the (worker, number) of
    accepted pushes.
    """

    sync: bool
    workers: int
    value: Tensor
    updates: int = 0
    waiting: list[int] = field(default_factory=list)
    inbox: dict[int, Tensor] = field(default_factory=dict)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def update(self, gradient: Tensor | int) -> None:
        """Take an optimizer step with a learning rate of −1, which adds the gradient."""
        self.value = self.value + gradient
        self.updates += 1


def push_handler(server: Server, worker: int, number: int, gradient: Tensor) -> list[int]:
    """Handle a push, and return the workers whose waiting pulls are answered now."""
    if (worker, number) in server.seen:  # its reply was lost, so it was repeated
        return []
    server.seen.add((worker, number))

    server.inbox[worker] = gradient
    if server.sync and len(server.inbox) < server.workers:
        return []  # a gradient of this round is missing

    server.update(sum(server.inbox.values()))
    server.inbox.clear()  # the next round begins

    answered, server.waiting = server.waiting, []  # no pull is answered twice
    return answered


def waits_for(worker: int, clocks: Mapping[int, int], bound: int) -> set[int]:
    """The workers that a pull waits for: those more than ``bound`` gradients behind."""
    return {other for other, clock in clocks.items() if clock < clocks[worker] - bound}


def staleness_bound(step: float, pause: float) -> int:
    """Return how many gradients another worker computes during a pause, rounded up."""
    return math.ceil(pause / step)


def round_ends(arrivals: Sequence[float], backup: int) -> float:
    """Return the time at which the last gradient that the round needs arrives."""
    return sorted(arrivals)[len(arrivals) - backup - 1]


def counted_once(pushes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Drop pushes that were applied before, or whose reply the worker already has."""
    seen, settled, applied = dict[int, set[int]](), dict[int, int](), []
    for worker, number, below in pushes:
        if number >= settled.get(worker, 0) and number not in seen.get(worker, ()):
            applied.append((worker, number, below))
        settled[worker] = floor = max(settled.get(worker, 0), below)
        seen[worker] = {n for n in (*seen.get(worker, ()), number) if n >= floor}
    return applied


def two_bit(
    gradient: Sequence[float], rest: Sequence[float], threshold: float
) -> tuple[list[float], list[float]]:
    """Add the rest to the gradient; send -threshold, 0 or +threshold for each sum."""
    totals = [g + r for g, r in zip(gradient, rest, strict=True)]
    sent = [threshold * ((t >= threshold) - (t <= -threshold)) for t in totals]
    return sent, [t - s for t, s in zip(totals, sent, strict=True)]


# -- the judge -------------------------------------------------------------------------------

#: Number of rounds in each scenario, and number of random scenarios of each kind.
ROUNDS, SCENARIOS = 3, 60
#: Number of messages shown from the end of a failed scenario.
SHOWN = 7

#: The kinds of scenarios, the simplest first: description, whether the server is synchronous, and
#: the probability that the next message repeats an earlier push.
KINDS = (
    ("dist_sync: one update with the sum of each round, and then replies to the pulls", True, 0.0),
    ("dist_async: an update with each gradient, immediately", False, 0.0),
    ("exactly once in dist_async, with repeated pushes", False, 0.4),
    ("exactly once in dist_sync, with pushes repeated in the same or a later round", True, 0.4),
)


@dataclass(frozen=True)
class HandledMessage:
    """A message that the real server has handled, and its effect.

    Args:
        pull: true for a pull, false for a push.
        number: the number of this worker's push, from 0.
        repeated: whether it is a repeated push.
        value: the server's value afterwards.
        updates: the number of updates up to this message.
        answered: the workers whose pulls the server then answered.
        missing: the workers that have not pushed yet in this round.
    """

    pull: bool
    worker: int
    number: int
    repeated: bool
    value: Tensor
    updates: int
    answered: frozenset[int]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        if self.pull:
            return f"worker {self.worker} pulls{'' if self.answered else ', and waits'}"
        return f"push {self.number} of worker {self.worker}{' arrives again' * self.repeated}"


class ReferenceServer:
    """The library's server with one key."""

    def __init__(self, sync: bool, workers: int) -> None:
        self.rule = Synchronous() if sync else Asynchronous()
        self.server = KVServer(self.rule, range(workers))
        self.server.handle(SetOptimizer(0, 0, "sgd", {"learning_rate": -1.0}))
        size = (workers * ROUNDS,)
        self.server.handle(Init(0, 1, "w", size, "float32", torch.zeros(size)))
        self.sync, self.workers, self._requests = sync, workers, 0

    def send(self, pull: bool, worker: int, number: int, repeated: bool) -> HandledMessage:
        """Send a message to the server, and record its effect."""
        self._requests += 1
        entry = self.server.entries["w"]
        if pull:
            answers = self.server.handle(Pull(worker, 1000 + self._requests, "w"))
        else:
            x = push_of(self.workers, worker, number)
            answers = self.server.handle(
                Push(worker, number, "w", tuple(x.shape), entry.version, x)
            )
        pulls = frozenset(a.node for a in answers if getattr(a, "value", None) is not None)
        missing = tuple(w for w in range(self.workers) if self.sync and w not in entry.arrived)
        return HandledMessage(
            pull, worker, number, repeated, entry.value, entry.version, pulls, missing
        )


def push_of(workers: int, worker: int, number: int) -> Tensor:
    """Return a worker's push: 1 at its own index."""
    x = torch.zeros(workers * ROUNDS)
    x[worker * ROUNDS + number] = 1
    return x


def scenario(sync: bool, repeated: float, workers: int, rng: Random) -> Iterator[HandledMessage]:
    """Yield pushes and pulls in random order. Each worker pushes, pulls and waits for the reply.

    Args:
        sync: whether the server is synchronous.
        repeated: probability that the next message repeats an earlier push.
        workers: the number of workers.
        rng: the source of the random order.
    """
    server = ReferenceServer(sync, workers)
    number, pushed, waiting_workers = [0] * workers, [False] * workers, set[int]()
    history: list[tuple[int, int]] = []
    while True:
        ready = [w for w in range(workers) if w not in waiting_workers and number[w] < ROUNDS]
        if history and rng.random() < repeated:
            yield server.send(False, *rng.choice(history), repeated=True)
            continue
        if not ready:
            return
        w = rng.choice(ready)
        message = server.send(pushed[w], w, number[w], repeated=False)
        if message.pull:
            waiting_workers.add(w)
        else:
            history.append((w, number[w]))
            pushed[w] = True
        for answered_worker in message.answered:
            waiting_workers.discard(answered_worker)
            pushed[answered_worker] = False
            number[answered_worker] += 1
        yield message


@dataclass(frozen=True)
class HandlerResult:
    """A push and a handler's result.

    Args:
        sync: whether the server is synchronous.
        workers: the number of workers.
        returned: the value that the handler returned.
        before: ``waiting`` before the push.
        value: the server's value after the push.
        updates: the server's number of updates after the push.
        waiting: the server's ``waiting`` after the push.
        has_state: whether the inbox or the set of seen pushes has entries.
    """

    sync: bool
    workers: int
    returned: Any
    before: list[int]
    value: Any
    updates: Any
    waiting: Any
    has_state: bool

    @property
    def idle(self) -> bool:
        """Whether the handler has done nothing."""
        return not (self.returned is not None or self.updates or self.has_state)


def judge(answer: Answer) -> Iterator[Criterion]:
    """Run scenarios of every kind, until one fails."""
    rng = Random(0)
    scenarios = [
        (sync, 2 + n % 3, [*scenario(sync, repeated, 2 + n % 3, rng)])
        for _, sync, repeated in KINDS
        for n in range(SCENARIOS)
    ]
    cases = [
        (sync, workers, [(s.pull, s.worker, s.number, not s.answered) for s in messages])
        for sync, workers, messages in scenarios
    ]
    outputs = call_answer(answer, cases, str, run_handler)
    for at, ((sync, workers, messages), pushes) in enumerate(zip(scenarios, outputs, strict=True)):
        results = [p if isinstance(p, str) else HandlerResult(sync, workers, *p) for p in pushes]
        if not at and all(isinstance(push, HandlerResult) and push.idle for push in results):
            raise NotAttempted
        if wrong := mistake(sync, workers, messages, results):
            raise WrongAnswer(wrong)
        if at % SCENARIOS == SCENARIOS - 1:
            yield Criterion("values", KINDS[at // SCENARIOS][0])
    yield Criterion("values", f"behaves like the real server in {len(scenarios)} random orders")


def run_handler(
    answer: Answer, sync: bool, workers: int, messages: list[tuple[bool, int, int, bool]]
) -> list[Any]:
    """Return the state after each push, up to an exception, whose text comes last.

    Args:
        answer: the handler.
        sync: whether the server is synchronous.
        workers: the number of workers.
        messages: for each message, whether it is a pull, its worker, its number, and whether a
            pull waits for its reply.
    """
    server, outputs = Server(sync, workers, torch.zeros(workers * ROUNDS)), list[Any]()
    try:
        for pull, worker, number, waits in messages:
            if pull:
                server.waiting += [worker] * waits
                continue
            before = list(server.waiting)
            returned = answer(server, worker, number, push_of(workers, worker, number))
            has_state = bool(server.inbox or server.seen)
            state = (returned, before, server.value, server.updates, server.waiting, has_state)
            outputs.append(values.unpack(values.pack(state)))  # the handler may change them later
    except NotImplementedError as error:
        if not outputs:
            raise
        outputs.append(raised(error, answer))
    except Exception as error:
        outputs.append(raised(error, answer))
    return outputs


def mistake(
    sync: bool, workers: int, messages: list[HandledMessage], pushes: list[HandlerResult | str]
) -> str:
    """Describe the first mistake of a handler in a scenario; "" if there is none."""
    remaining = iter(pushes)
    for at, message in enumerate(messages):
        if not message.pull:
            push = next(remaining)
            wrong = push if isinstance(push, str) else _explain_difference(push, messages[: at + 1])
            if wrong:
                return _describe(sync, workers, messages[: at + 1], wrong)
    return ""


# -- messages --------------------------------------------------------------------------


def _describe(sync: bool, workers: int, messages: list[HandledMessage], wrong: str) -> str:
    """Describe a mistake and the messages before it."""
    mode = "dist_sync" if sync else "dist_async"
    more = ", the last messages" if len(messages) > SHOWN else ""
    return "\n".join(
        [
            f"{mode} with {workers} workers{more}:",
            *(f"  {message}" for message in messages[-SHOWN:]),
            wrong,
        ]
    )


def _explain_difference(push: HandlerResult, messages: list[HandledMessage]) -> str:
    """Describe the difference from the real server after the last push; "" if none."""
    message, returned, waiting = messages[-1], push.returned, push.before
    if wrong := _check_value(push, messages):
        return wrong
    if not isinstance(returned, COLLECTIONS) or not all(
        isinstance(worker, int) for worker in returned
    ):
        return (
            f"it returns {returned!r}: return the list of workers whose pulls are answered now, "
            "[] if there are none"
        )
    if unexpected := sorted(set(returned) - set(waiting), key=str):
        return (
            f"it answers worker {unexpected[0]}, which has no waiting pull: "
            f"server.waiting is {waiting}"
        )
    if early := sorted(set(returned) - message.answered):
        return (
            f"it answers the pull of worker {early[0]}, but the round is not complete: "
            f"{_missing(message)}. In dist_sync a pull returns the weights after the whole "
            "round"
        )
    if late := sorted(message.answered - set(returned)):
        return (
            f"the round is complete, but the pull of worker {late[0]} is still waiting: it would "
            f"wait forever. {_explain_unanswered(push)}"
        )
    return _check_waiting(push, message)


def _explain_unanswered(push: HandlerResult) -> str:
    if push.waiting:
        return "Return all workers in server.waiting"
    return (
        "server.waiting was empty when it was returned. Save the list before you empty it: "
        "answered, server.waiting = server.waiting, []"
    )


def _check_waiting(push: HandlerResult, message: HandledMessage) -> str:
    """Describe the mistake in the waiting pulls; "" if there is none."""
    expected, waiting = [w for w in push.before if w not in message.answered], push.waiting
    if not isinstance(waiting, list):
        return f"server.waiting is {waiting!r}: it must stay a list of workers"
    if twice := [w for w in waiting if w in message.answered]:
        return (
            f"the pull of worker {twice[0]} is answered, but it is still in server.waiting: "
            "it would be answered again in the next round. Remove the workers that you answer: "
            "answered, server.waiting = server.waiting, []"
        )
    if lost := [w for w in expected if w not in waiting]:
        return (
            f"worker {lost[0]} is no longer in server.waiting, but its pull has no answer: it "
            "would wait forever. Empty the list only when you answer"
        )
    return ""


def _check_value(push: HandlerResult, messages: list[HandledMessage]) -> str:
    """Describe the mistake in the value; "" if there is none."""
    got, expected = push.value, messages[-1].value
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return f"server.value is {got!r}: change it only with server.update(total)"
    if different := (got != expected).nonzero().flatten().tolist():
        worker, number = divmod(different[0], ROUNDS)
        return _explain_count(push.sync, messages, worker, number, got[different[0]].item())
    if push.updates == messages[-1].updates:
        return ""
    if push.updates == 0:
        return "the value is correct, but was changed without server.update(total)"
    return f"{push.updates} updates; expected {messages[-1].updates}: " + (
        "a round is one update, with the sum" if push.sync else "each gradient is one update"
    )


def _explain_count(
    sync: bool, messages: list[HandledMessage], worker: int, number: int, times: float
) -> str:
    """Describe how many times a gradient was applied, if that is wrong."""
    which = f"push {number} of worker {worker}"
    if not times.is_integer():
        return (
            f"{which} was applied {times:.2f} times: it averages. A server sums; the learning rate "
            "is divided by the number of workers"
        )
    if times > 1:
        repeated = any(s.repeated and (s.worker, s.number) == (worker, number) for s in messages)
        return f"{which} has been applied {times:.0f} times: " + (
            "a repeated push counts once, even if it arrives rounds later"
            if repeated
            else "it was still in the inbox from the round before"
        )
    if times == 1 and sync:
        return (
            f"{which} has been applied, but the round is not complete: {_missing(messages[-1])}. "
            "In dist_sync it waits in the inbox"
        )
    if times == 0 and sync:
        return f"the round is complete, but the value does not contain {which}"
    if times == 0:
        return f"the value does not contain {which}: dist_async applies each gradient immediately"
    return f"{which} was applied {times:.0f} times"


def _missing(message: HandledMessage) -> str:
    workers = joined([f"worker {w}" for w in message.missing])
    return f"{workers} {'has' if len(message.missing) == 1 else 'have'} not pushed yet"


#: Durations of a step and of a pause [s] for which a bound is tried.
PAIRS = ((0.01, 0.045), (0.01, 0.0), (0.125, 0.625), (0.1, 0.03), (0.003, 0.1), (0.5, 8.2))
#: Number of workers, number of gradients that each worker computes, and number of gradients that
#: worker 0 computes before its pause.
WORKERS, STEPS, PAUSES_AT = 3, 60, 5
#: The order of messages that arrive at the same time.
PUSH, PULL = 0, 1
#: Accepted types of a set of workers.
COLLECTIONS = (set, frozenset, list, tuple)


# -- workers a pull waits for ----------------------------------------------------------


def states() -> Iterator[tuple[int, dict[int, int], int]]:
    """Yield every combination of worker, clocks and bound to try, the simplest first."""
    for n in (2, 3):
        for bound, clocks in product((2, 0, 1, 3), product(range(6), repeat=n)):
            for worker in range(n):
                yield worker, dict(enumerate(clocks)), bound


def judge_waits(answer: Answer) -> Iterator[Criterion]:
    """Compare an answer with the library's rule in every small state."""
    every = [*states()]
    outputs = call_answer(answer, every, _state)
    for at, ((worker, clocks, bound), returned) in enumerate(zip(every, outputs, strict=True)):
        expected = Asynchronous(bound).awaits(clocks[worker], 0, (), clocks.keys(), clocks)
        if returned is None and not at:
            raise NotAttempted
        if not isinstance(returned, COLLECTIONS) or set(returned) != expected:
            raise WrongAnswer(_differs(returned, expected, worker, clocks, bound))
    yield Criterion("values", f"agrees with the real rule in {len(every):,} states")


def _state(worker: int, clocks: Mapping[int, int], bound: int) -> str:
    return f"worker={worker}, clocks={dict(clocks)}, bound={bound}"


def _differs(
    returned: Any, expected: set[int], worker: int, clocks: Mapping[int, int], bound: int
) -> str:
    """Return the reason why an answer is wrong."""
    text = f"{_state(worker, clocks, bound)}: it returns {returned!r}; expected {expected}"
    if not isinstance(returned, COLLECTIONS):
        return f"{text}. Return a set of workers"
    other = sorted(expected ^ set(returned), key=str)[0]
    if other not in clocks:
        return f"{text}. There is no worker {other!r}"
    behind = clocks[worker] - clocks[other]
    if behind < 0:
        return f"{text}. Worker {other} is ahead: a pull waits only for workers behind it"
    comparison = "more than" if behind > bound else "exactly" if behind == bound else "less than"
    allowed = "" if behind > bound else ": that is allowed"
    return f"{text}. Worker {other} is {behind} behind, {comparison} {bound}{allowed}"


# -- which bound -----------------------------------------------------------------------


def judge_bound(answer: Answer) -> Iterator[Criterion]:
    """Check on the real server that the bound is large enough, but not larger than necessary."""
    for (step, pause), bound in zip(PAIRS, call_answer(answer, PAIRS, _pause), strict=True):
        case = _pause(step, pause)
        if bound is None and (step, pause) == PAIRS[0]:
            raise NotAttempted
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise WrongAnswer(
                f"{case}: it returns {bound!r}: a bound is a whole number of "
                "gradients, 0 or more: use math.ceil"
            )
        waited, ahead = simulate_training(bound, step, pause)
        if waited:
            raise WrongAnswer(
                f"{case}: with your bound of {bound} the others wait "
                f"{human_seconds(waited)}. Use a larger bound"
            )
        if bound > ahead:
            raise WrongAnswer(
                f"{case}: with your bound of {bound} no worker waits, but no worker is "
                f"ever more than {ahead} ahead: {ahead} suffices. A larger bound "
                "allows staler gradients"
            )
        yield Criterion("values", f"{case}: {bound}")


def _pause(step: float, pause: float) -> str:
    return f"steps of {human_seconds(step)}, a pause of {human_seconds(pause)}"


def simulate_training(bound: int, step: float, pause: float) -> tuple[float, int]:
    """Simulate workers that train on a server with this bound; worker 0 pauses once.

    Returns:
        The longest time that a pull waited [s], and the largest number of gradients by which a
        worker was ahead of the slowest one when its pull returned.
    """
    server = KVServer(Asynchronous(bound), range(WORKERS))
    server.handle(SetOptimizer(0, 0, "sgd", {"learning_rate": 0.1}))
    server.handle(Init(0, 1, "w", (1,), "float32", torch.zeros(1)))
    step_time, pause_time = Fraction(str(step)), Fraction(str(pause))  # exact: ties stay ties
    clocks, pull_times, waited, ahead = [0] * WORKERS, dict[int, Fraction](), Fraction(0), 0
    heap = [(step_time, PUSH, w) for w in range(WORKERS)]  # time, event and worker
    number = 1
    while heap:
        now, what, w = heapq.heappop(heap)
        number += 1
        if what == PUSH:
            clocks[w] += 1
            answers = server.handle(Push(w, number, "w", (1,), 0, torch.ones(1)))
            heapq.heappush(heap, (now, PULL, w))
        else:
            pull_times[w] = now
            answers = server.handle(Pull(w, number, "w"))
        for answered_worker in (a.node for a in answers if getattr(a, "value", None) is not None):
            waited = max(waited, now - pull_times.pop(answered_worker))
            ahead = max(ahead, clocks[answered_worker] - min(clocks))
            if clocks[answered_worker] < STEPS:
                pauses = answered_worker == 0 and clocks[0] == PAUSES_AT
                heapq.heappush(heap, (now + step_time + pauses * pause_time, PUSH, answered_worker))
    return float(waited), ahead


# -- common mistakes ---------------------------------------------------------------------


def averages(server: Server, worker: int, number: int, gradient: Tensor) -> list[int]:
    """Divide the gradient by the number of workers."""
    if server.sync:
        gradient = gradient / server.workers
    return push_handler(server, worker, number, gradient)


def updates_immediately(server: Server, worker: int, number: int, gradient: Tensor) -> list[int]:
    """Update with each gradient, before the round is complete."""
    server.update(gradient)
    answered, server.waiting = server.waiting, []
    return answered


def keeps_pulls_waiting(server: Server, worker: int, number: int, gradient: Tensor) -> list[int]:
    """Update without answering the waiting pulls."""
    waiting = list(server.waiting)
    push_handler(server, worker, number, gradient)
    server.waiting = waiting
    return []


def keeps_the_inbox(server: Server, worker: int, number: int, gradient: Tensor) -> list[int]:
    """Keep the gradients of this round for the next one."""
    kept = {**server.inbox, worker: gradient}
    answered = push_handler(server, worker, number, gradient)
    server.inbox.update(kept)
    return answered


def _why_round(returned: Any, expected: float, arrivals: list[float], backup: int) -> str:
    is_arrival = returned in arrivals
    if is_arrival and returned > expected:
        return "it waits for all, including the backup workers" if backup else ""
    if is_arrival and not backup and returned == min(arrivals):
        return "it counts from the first: without backup workers, the last completes the round"
    return "it drops one too many" if is_arrival else ""


#: Pushes of two workers: repeated pushes, equal numbers, copies of earlier pushes, pushes in any
#: order, late pushes, and a repeated push with another settled number.
_PUSHES = [
    ([(0, 1, 0), (0, 1, 0)],),
    ([(0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 1, 0)],),
    ([(0, 7, 5), (0, 9, 9), (0, 8, 5), (1, 7, 5), (0, 9, 9), (0, 10, 9)],),
    ([(0, 1, 0), (0, 3, 0), (0, 2, 0), (0, 1, 0)],),
    ([(0, 9, 9), (0, 8, 5), (0, 7, 5)],),
    ([(0, 9, 5), (0, 9, 8), (0, 7, 5)],),
]


def _why_counted(returned: Any, right: list[Any], pushes: list[tuple[int, int, int]]) -> str:
    if not isinstance(returned, list) or not all(isinstance(p, tuple) for p in returned):
        return "return a list of pushes"
    applied = [p[:2] for p in returned]
    if lost := [p for p in right if p not in returned]:
        if any(number == lost[0][1] for _, number in applied):
            return f"{lost[0]} belongs to another worker: each worker numbers its own pushes"
        return f"{lost[0]} has not been applied: remember all numbers, not only the last one"
    if repeated := [p for p in returned if applied.count(p[:2]) > 1]:
        return f"{repeated[-1]} is repeated: it counts once"
    late = [p for p in returned if p not in right]
    return (
        f"{late[0]} is below its worker's highest settled value: it was applied earlier"
        if late
        else ""
    )


def _why_two_bit(
    returned: Any, right: Any, gradient: list[float], rest: list[float], threshold: float
) -> str:
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        return "return two lists: the values sent, and the new rest"
    if same(returned[0], two_bit(gradient, [0.0] * len(rest), threshold)[0]) and any(rest):
        return "add the rest of the earlier gradients before comparing with the threshold"
    return "the new rest is what was not sent" if same(returned[0], right[0]) else ""


def only_increasing(pushes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Remember only the last number of each worker."""
    return [
        p
        for i, p in enumerate(pushes)
        if p[1] > max((q[1] for q in pushes[:i] if q[0] == p[0]), default=-1)
    ]


#: The exercises.
TASKS: list[Task] = [
    Task(
        "push_handler",
        "push_handler(server, worker, number, gradient)",
        "handle a push, and return the list of workers whose waiting pulls are answered now",
        "server.sync is True in dist_sync and False in dist_async.\n"
        "server.workers is the number of workers.\n"
        "server.update(total) makes one update with a sum of gradients.\n"
        "server.waiting lists the workers whose pulls are waiting. Remove those that you answer.\n"
        "server.inbox (a dict) and server.seen (a set) are empty at first. Use them as you like.\n"
        "The same push may arrive twice. (worker, number) identifies it.",
        push_handler,
        (
            "len(server.inbox) is the number of workers that have pushed in this round. In "
            "dist_sync, return [] until it equals server.workers. In dist_async, one is enough.",
            "When a round is complete, call server.update(sum(server.inbox.values())), empty the "
            "inbox for the next round, and answer every worker in server.waiting.",
            "A worker that is answered no longer waits. When a round is complete, and only then, "
            "replace the list with an empty one, and return the old one: "
            "answered, server.waiting = server.waiting, [].",
            "If (worker, number) is in server.seen, the push has already been counted, so ignore "
            "it. Never empty server.seen, because a push may be sent again rounds later.",
        ),
        judge,
        (
            (
                lambda server, *push: (server.seen.clear(), push_handler(server, *push))[1],
                "applied 2 times: a repeated push counts once",
            ),
            (averages, "was applied 0.50 times: it averages. A server sums"),
            (updates_immediately, "but the round is not complete: worker"),
            (keeps_pulls_waiting, "wait forever. Return all workers in server.waiting"),
            (keeps_the_inbox, "it was still in the inbox from the round before"),
        ),
        worth=5,
    ),
    Task(
        "waits_for",
        "waits_for(worker, clocks, bound)",
        "return the set of workers that a pull of this worker waits for",
        "clocks[w] counts the gradients that worker w has pushed so far. No worker may be more "
        "than bound gradients ahead of another.",
        waits_for,
        (
            "A worker's clock counts its gradients. Compare clocks[worker] with every other clock.",
            "It waits for workers that are more than bound gradients behind it. Exactly bound is "
            "still allowed.",
        ),
        judge_waits,
        (
            (
                lambda w, clocks, bound: {
                    o for o in clocks if o != w and clocks[o] <= clocks[w] - bound
                },
                "is 2 behind, exactly 2: that is allowed",
            ),
            (
                lambda w, clocks, bound: {o for o in clocks if abs(clocks[o] - clocks[w]) > bound},
                "is ahead: a pull waits only for workers behind it",
            ),
            (lambda worker, clocks, bound: set(), "is 3 behind, more than 2"),
            (
                lambda w, clocks, bound: {o for o in clocks if clocks[o] < clocks[w]},
                "is 1 behind, less than 2: that is allowed",
            ),
            (lambda worker, clocks, bound: bool(bound), "Return a set of workers"),
        ),
    ),
    Task(
        "staleness_bound",
        "staleness_bound(step, pause)",
        "return the smallest bound at which no worker waits while one worker pauses once",
        "Every worker needs step seconds for a gradient. One of them pauses once, for "
        "pause seconds.",
        staleness_bound,
        (
            "How many gradients do the others push while one of them pauses?",
            "A bound is a whole number of gradients, and part of a step counts, so use math.ceil.",
        ),
        judge_bound,
        (
            (lambda step, pause: pause / step, "it returns 4.5: a bound is a whole number"),
            (lambda step, pause: int(pause / step), "with your bound of 4 the others wait 5 ms"),
            (lambda step, pause: math.ceil(pause / step) + 1, "more than 5 ahead: 5 suffices"),
            (lambda step, pause: 5, "a pause of 0 µs: with your bound of 5 no worker waits"),
        ),
        worth=len(PAIRS),
    ),
    Task(
        "round_ends",
        "round_ends(arrivals, backup)",
        "return the time at which a round of dist_sync with backup workers is complete",
        "arrivals[w] is the time at which the gradient of worker w arrives [s]. A round does not "
        "wait\nfor the last `backup` gradients.",
        round_ends,
        (
            "Without backup workers, which gradient completes the round?",
            "Sort the arrivals. How many of them does the round need?",
        ),
        Calls(
            round_ends,
            [([0.2, 0.9, 0.3], 0), ([0.2, 0.9, 0.3], 1), ([5.0, 1.0, 4.0, 3.0, 2.0], 2)],
            _why_round,
        ),
        (
            (lambda arrivals, backup: max(arrivals), "it waits for all, including the backup"),
            (lambda arrivals, backup: sorted(arrivals)[backup], "it counts from the first"),
            (lambda arrivals, backup: sorted(arrivals)[-backup - 2], "it drops one too many"),
            (lambda arrivals, b: arrivals.sort() or arrivals[-b - 1], "arguments must not change"),
        ),
    ),
    Task(
        "counted_once",
        "counted_once(pushes)",
        "return the pushes that a server applies, in their order",
        "pushes is a list of (worker, number, settled) in order of arrival.\n"
        "The pushes of a worker may arrive in any order, and several times.\n"
        "Those with a number below the worker's highest settled value were applied earlier.",
        counted_once,
        (
            "(worker, number) identifies a push. Remember those that you have applied.",
            "Keep the highest settled value of each worker. Do not apply pushes below it, "
            "even if you have never seen them.",
        ),
        Calls(counted_once, _PUSHES, _why_counted),
        (
            (list, "(0, 1, 0) is repeated: it counts once"),
            (
                lambda pushes: [*{p[1]: p for p in reversed(pushes)}.values()][::-1],
                "(1, 1, 0) belongs to another worker: each worker numbers its own pushes",
            ),
            (
                lambda pushes: [*dict.fromkeys(pushes)],
                "(0, 8, 5) is below its worker's highest settled value: it was applied earlier",
            ),
            (only_increasing, "(0, 2, 0) has not been applied: remember all numbers"),
            (lambda pushes: [counted_once(pushes), pushes.clear()][0], "arguments must not"),
        ),
    ),
    Task(
        "two_bit",
        "two_bit(gradient, rest, threshold)",
        "return the values that 2-bit compression sends, and the new rest, as two lists",
        "gradient and rest are lists of the same length. rest is what earlier calls did not send.\n"
        "Each value sent is -threshold, +threshold, or 0 if the sum lies between them.",
        two_bit,
        (
            "Which sum do you compare with the threshold?",
            "Add the rest to the gradient. The new rest is this sum minus the value sent.",
        ),
        Calls(
            two_bit,
            [
                ([0.75, -0.25, -1.5], [0.0, 0.0, 0.0], 0.5),
                ([0.375, -0.25, 0.25], [0.25, -0.125, -0.5], 0.5),
                ([3.0, -2.0], [-1.0, 0.0], 2.0),
            ],
            _why_two_bit,
        ),
        (
            (
                lambda gradient, rest, t: two_bit(gradient, [0.0] * len(rest), t),
                "add the rest of the earlier gradients before comparing",
            ),
            (lambda *case: (two_bit(*case)[0], [0.0] * len(case[0])), "what was not sent"),
            (lambda *case: two_bit(*case)[0], "return two lists: the values sent, and the new"),
            (
                lambda g, r, t: ([t if a + b > 0 else -t for a, b in zip(g, r, strict=True)], r),
                "expected ([0.5, 0.0, -0.5], [0.25, -0.25, -1.0])",
            ),
        ),
    ),
]
