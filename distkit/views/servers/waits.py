"""Waits of workers for each other in a run with a parameter server, and their activity. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from distkit._format import joined
from distkit.events import Op, Span
from distkit.trace.log import EventLog
from distkit.views.scene.frame import clean
from distkit.views.scene.marks import pieces
from distkit.views.servers.history import Place, Request, ServerHistory

#: The largest numbers of nodes that are listed by name, and of changes of a wait that are kept.
MAX_NAMES, MAX_CHANGES = 3, 256
#: The nodes that are missing at a time.
Missing = Callable[[float], Collection[int]]


@dataclass(frozen=True, slots=True)
class Wait:
    """``node`` waits from ``begin`` to ``end`` (infinity: still); at ``times`` others may change.

    ``kind`` is "register", "init", "pull" or "barrier"; ``asked`` is the pending request.
    """

    kind: str
    node: int
    begin: float
    end: float
    missing: Missing
    times: list[float]
    asked: Request | None = None

    def on(self, time: float) -> tuple[int, ...]:
        """The nodes that it waits for at a time."""
        return tuple(n for n in self.missing(time) if n != self.node)

    @property
    def changes(self) -> list[float]:
        """The times at which these may change, thinned out if there are many."""
        mine = self.times[bisect_right(self.times, self.begin) : bisect_left(self.times, self.end)]
        return [*mine[:: 1 + len(mine) // MAX_CHANGES], *mine[-1:]]

    @property
    def real(self) -> bool:
        """True if it was for another node: otherwise the server was only busy."""
        stuck = self.asked is not None and self.asked.stuck
        return stuck or any(self.on(t) for t in (self.begin, *self.changes))


@dataclass(frozen=True, slots=True)
class Status:
    """What a node is doing: "waits", "asks", "works", "ended" or "" for nothing.

    ``awaited``: the drawn nodes that it waits for.
    """

    kind: str = ""
    text: str = ""
    awaited: tuple[int, ...] = ()


#: Begin and end [s] of a node's activity; the end is None if it continues.
Stretch = tuple[float, float | None, Status]
#: A node, the time of its death, and of its replacement if there was one [s].
Death = tuple[int, float, float | None]


def find(history: ServerHistory) -> list[Wait]:
    """Every wait for another node, in the order of their begins."""
    found = [*_registrations(history), *_inits(history), *_pulls(history), *_barriers(history)]
    return sorted((w for w in found if w.begin < w.end), key=lambda w: (w.begin, w.node))


def _until(request: Request) -> float:
    """The time when a request was answered or given up, or infinity."""
    ends = (request.left, request.back, request.failed)
    return min((t for t in ends if t is not None), default=math.inf)


def _absent(nodes: list[int], arrivals: dict[int, float]) -> tuple[Missing, list[float]]:
    """The nodes that have not arrived at a time, from their arrivals [s]; and the changes."""

    def missing(time: float) -> list[int]:
        return [n for n in nodes if arrivals.get(n, math.inf) > time]

    return missing, sorted(set(arrivals.values()))


def _registrations(history: ServerHistory) -> Iterator[Wait]:
    """The scheduler answers when the last node has registered."""
    asked = [r for r in history.requests if r.op is Op.REGISTER]
    came = {r.node: r.arrived for r in asked if r.arrived is not None}
    absent = _absent([*history.of("worker"), *history.of("server")], came)
    for r in asked:
        yield Wait("register", r.node, r.sent, _until(r), *absent, r)


def _inits(history: ServerHistory) -> Iterator[Wait]:
    """A worker that announces a key waits for the worker that sends its value."""
    given = {r.place: r for r in history.requests if r.op is Op.INIT and r.whole}
    for r in history.requests:
        if r.op is not Op.INIT or r.optimizer or r.at_once or r.arrived is None:
            continue
        giver = given.get(r.place)
        came = {giver.node: giver.arrived} if giver and giver.arrived is not None else {}
        absent = _absent([giver.node] if giver else [], came)
        yield Wait("init", r.node, r.arrived, _until(r), *absent, r)


class _Inbox:
    """The gradients of a key by worker, oldest first; the inbox changes at ``times``."""

    def __init__(self, gradients: Iterable[Request]) -> None:
        self.of = defaultdict[int, list[Request]](list)
        changes = set()
        for g in gradients:
            self.of[g.node].append(g)
            changes |= {g.arrived, g.taken}
        self.times = sorted(t for t in changes if t is not None and t < math.inf)

    def clock(self, worker: int, time: float) -> int:
        """The number of a worker's gradients that have arrived."""
        return bisect_right(self.of[worker], time, key=lambda g: g.arrived or 0.0)

    def taken(self, worker: int, n: int, time: float) -> bool:
        """True if an update has taken a worker's n-th gradient, from 1."""
        return n < 1 or self.of[worker][n - 1].taken <= time


def _pulls(history: ServerHistory) -> Iterator[Wait]:
    """A held pull waits for a round, or for workers that are too far behind."""
    lying: dict[Place, list[Request]] = defaultdict(list)
    for g in history.gradients:
        lying[g.place].append(g)
    inboxes = {place: _Inbox(all_) for place, all_ in lying.items()}
    workers = history.of("worker")
    for r in history.requests:
        if r.op is Op.PULL and not r.at_once and r.arrived is not None:
            held = _held(r, history, inboxes.get(r.place, _Inbox(())), workers)
            wait = Wait("pull", r.node, r.arrived, _until(r), *held, r)
            if wait.real:
                yield wait


def _held(
    r: Request, history: ServerHistory, inbox: _Inbox, workers: list[int]
) -> tuple[Missing, list[float]]:
    """The workers that the rule lets a pull wait for."""
    rule, clock = history.rule, inbox.clock(r.node, r.arrived or 0.0)

    def missing(time: float) -> list[int]:
        clocks = {w: inbox.clock(w, time) for w in workers}
        here = [w for w, n in clocks.items() if not inbox.taken(w, n, time)]
        version = clock - (not inbox.taken(r.node, clock, time))
        return sorted(rule.awaits(clock, version, here, workers, clocks))

    return missing, inbox.times if rule.needs(clock) > 0 else []


def _barriers(history: ServerHistory) -> Iterator[Wait]:
    for members in history.barriers:
        absent = _absent(history.of("worker"), {s.rank: s.start for s in members})
        for s in members:
            end = math.inf if s.end is None else s.end
            yield Wait("barrier", s.rank, s.start, end, *absent)


# -- what each node is doing ------------------------------------------------------------


def statuses(
    trace: EventLog,
    history: ServerHistory,
    waits: Iterable[Wait],
    names: dict[int, str],
    nodes: set[int],
) -> dict[int, list[Stretch]]:
    """The activity of these nodes, from one change to the next."""
    items: dict[int, list[tuple[float, float | None, Any]]] = defaultdict(list)
    for w in waits:
        if w.node in nodes:
            times = pairwise([w.begin, *w.changes, w.end])
            items[w.node] += [(a, b, w) for a, b in times]
    for r in history.requests:
        if r.op is Op.PULL:
            items[r.node].append((r.sent, r.back if r.back is not None else r.failed, r))
    for s in trace.spans:
        if s.op is Op.MARK and history.roles.get(s.rank) == "worker":
            items[s.rank].append((s.start, s.end, s))
    for node, ended in _ends(trace).items():
        items[node].append(ended)
    for node, time, until in deaths(trace):
        items[node].append((time, until, Status("ended", "died")))
    return {node: list(_stretches(items[node], names, nodes)) for node in nodes}


def _stretches(
    items: list[tuple[float, float | None, Any]], names: dict[int, str], nodes: set[int]
) -> Iterator[Stretch]:
    """The statuses of a node from the beginning, merged while they are equal."""
    begin, before = -math.inf, Status()
    for time, _, here in pieces([(-math.inf, None, None), *items]):
        status = _status(here, time, names, nodes)
        if status != before:
            yield begin, time, before
            begin, before = time, status
    yield begin, None, before


def _status(here: list[Any], time: float, names: dict[int, str], nodes: set[int]) -> Status:
    """The status of a node, from its open items."""
    if ended := [it for it in here if isinstance(it, Status)]:
        return ended[-1]
    if held := [w for w in here if isinstance(w, Wait) and w.on(time)]:
        awaited = sorted({n for w in held for n in w.on(time)})
        where = "barrier: " if all(w.kind == "barrier" for w in held) else ""
        told = f"{where}waits for {listed(awaited, names)}"
        return Status("waits", told, tuple(n for n in awaited if n in nodes))
    if asked := list(dict.fromkeys(r.key for r in here if isinstance(r, Request))):
        keys = clean(asked[0]) if len(asked) == 1 else f"{len(asked)} keys"
        return Status("asks", f"pulls {keys}")
    if works := [s for s in here if isinstance(s, Span)]:
        return Status("works", clean(works[-1].label) or "computes")
    return Status()


def _ends(trace: EventLog) -> dict[int, Stretch]:
    """The nodes that have ended, each from its last event or its end."""
    last = {e.rank: e.time for e in trace.events}
    found: dict[int, Stretch] = {}
    for rank, end in trace.info.ends.items():
        how, heard = end.how, last.get(rank)
        told = heard if end.time is None else end.time
        # a death is noticed later than it happens: it is shown after the last event
        if (time := heard if how == "died" and heard is not None else told) is not None:
            words = {"returned": "has returned", "released": "was released"}.get(how, str(how))
            found[rank] = (time, None, Status("ended", words))
    return found


def deaths(trace: EventLog) -> list[Death]:
    """The deaths of a run, in the order of their times."""
    ends, until = _ends(trace), trace[-1].time if len(trace) else 0.0
    found: list[Death] = [
        (node, min(time, until), None)
        for node, (time, _, status) in ends.items()
        if status.text == "died"
    ]
    for one in trace.info.replaced:
        node, time = one.node, min(one.time, until)
        later = (e.time for e in trace.events if e.rank == node and e.time > time)
        found.append((node, time, min(later, default=None)))
    return sorted(found, key=lambda death: death[1])


def listed(nodes: Sequence[int], names: dict[int, str]) -> str:
    """A list of nodes in words.

    >>> listed([0, 2], {0: "worker 0", 2: "worker 2"}), listed(range(8), {})
    ('worker 0 and worker 2', '8 others')
    """
    told = [names.get(n, f"rank {n}") for n in nodes]
    if len(told) > MAX_NAMES:
        return f"{len(told)} others"
    return joined(told)
