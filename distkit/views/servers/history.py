"""The history of a run with a parameter server, read from its events alone. Pure.

It consists of requests with their answers, updates, and gradients: from its arrival until an update
takes it, a gradient is in the inbox of its key. The consistency rule is inferred, not assumed.
The waits of workers for each other, and what each node does, follow from these.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from msgspec import structs

from distkit._format import joined
from distkit.consistency import Asynchronous, Rule, Synchronous, rule_of
from distkit.events import NO_ATTRIBUTES, Op, Span, State, Summary, key_name
from distkit.trace.log import EventLog
from distkit.views.scene.frame import clean
from distkit.views.scene.marks import pieces

#: A key on a server.
Place = tuple[int, str]


@dataclass(slots=True, eq=False)
class Request:
    """A request of ``node`` to ``server``. Times are in seconds; None means not (yet).

    ``version`` is the version that a pull returned, or from which a push's gradient was computed.
    ``at_once``: the server replied before any other work. ``refused``: the reply was an error.
    ``alone``: the node ended before it received the reply. A gradient that counts is in the inbox
    of its key until ``taken`` by an update.
    """

    op: Op
    key: str
    node: int
    server: int
    sent: float
    arrived: float | None
    left: float | None
    back: float | None
    failed: float | None
    nbytes: int
    nbytes_back: int
    where: str
    whole: bool  # whether the request or the reply carried a tensor
    at_once: bool
    lost: int = 0  # by the reply: number of the node's gradients that missed their round
    version: int = 0
    dropped: bool = False
    refused: bool = False
    alone: bool = False
    terms: Mapping[str, Any] = NO_ATTRIBUTES  # of a registration: the mode and options
    optimizer: str = ""  # its name, if the request sets the optimizer
    taken: float = math.inf
    by: int | None = None  # the version that this update made
    late: int | None = None  # number of updates between the pull and this one
    value: Summary | None = None  # of the tensor in the request or reply

    @property
    def place(self) -> Place:
        """The key, with its server."""
        return self.server, self.key

    @property
    def stuck(self) -> bool:
        """True if it was refused, or neither end recorded a reply."""
        return self.refused or (self.left is None and self.back is None)


@dataclass(slots=True, eq=False)
class Update:
    """An update of a key; ``late`` has the staleness of each worker's gradient."""

    server: int
    key: str
    version: int
    begin: float
    end: float | None
    late: dict[int, int] = field(default_factory=dict)
    value: Summary | None = None  # after it

    @property
    def place(self) -> Place:
        """The key, with its server."""
        return self.server, self.key


@dataclass(frozen=True)
class ServerHistory:
    """All that happened, in the order of time."""

    roles: dict[int, str]  # "worker", "server" or "scheduler", by rank
    rule: Rule
    requests: list[Request]
    updates: list[Update]
    gradients: list[Request]  # pushes that count, in the order of arrival
    barriers: list[list[Span]]

    def of(self, role: str) -> list[int]:
        """The ranks with this role."""
        return sorted(rank for rank, mine in self.roles.items() if mine == role)

    def present(self) -> list[tuple[float, None, Request]]:
        """The registered nodes: begin, no end, and request."""
        asked = (r for r in self.requests if r.op is Op.REGISTER)
        return [(r.arrived, None, r) for r in asked if r.arrived is not None]

    def quorum(self) -> int:
        """The largest number of gradients in an update."""
        return len(self.of("worker")) - self.rule.backup if self.rule.halts else 1


def read(trace: EventLog) -> ServerHistory:
    """The history of a trace."""
    requests = [
        _request(*ends) for ends in trace.pairs.requests() if ends[0].state is not State.SCHEDULED
    ]
    roles = _roles(trace, requests)
    updates = list(_updates(trace.spans, roles))
    _drop(requests)
    _part(requests, trace)
    gradients = _walk(requests, updates)
    barriers = trace.together(
        s
        for s in trace.spans
        if s.op is Op.BARRIER and roles.get(s.rank) == "worker" and s.state is not State.SCHEDULED
    )
    workers = sum(role == "worker" for role in roles.values())
    rule = _rule(requests, updates, workers, structs.asdict(trace.info.terms))
    return ServerHistory(roles, rule, requests, updates, gradients, barriers)


def _rule(
    requests: list[Request], updates: list[Update], workers: int, usual: Mapping[str, Any]
) -> Rule:
    """The rule shown by the updates, or by the mode if there are none.

    ``usual`` are the terms of a run without registrations, such as a simulation.
    """
    terms = next((r.terms for r in reversed(requests) if r.terms), usual)
    told = rule_of(**{"mode": "", **terms})
    usually = max(1, workers - told.backup) if told.halts else 1
    n = max((len(u.late) for u in updates), default=usually)
    return Synchronous(workers - n) if n > 1 else Asynchronous(told.staleness)


# -- requests ---------------------------------------------------------------------------


def _request(s: Span, got: Span | None, reply: Span | None) -> Request:
    assert s.peer is not None
    done = s.state is State.COMPLETED
    return Request(
        op=s.op,
        key=s.label,
        node=s.rank,
        server=s.peer,
        sent=s.start,
        arrived=got.end if got else None,
        left=reply.start if reply else None,
        back=s.end if done else None,
        failed=None if done else s.end,
        nbytes=got.nbytes if got else 0 if s.op is Op.PULL else s.nbytes,
        nbytes_back=reply.nbytes if reply else s.nbytes if done and s.op is Op.PULL else 0,
        where=s.where,
        whole=bool(s.dtype or (got and got.dtype)),
        at_once=bool(got and reply and reply.seq == got.seq + 1),
        lost=reply.attributes.get("dropped", 0) if reply else 0,
        refused=reply is not None and "refused" in reply.attributes,
        terms=s.attributes if s.op is Op.REGISTER else NO_ATTRIBUTES,
        optimizer=s.attributes.get("optimizer", ""),
        value=_value(s, got, reply),
    )


def _value(s: Span, got: Span | None, reply: Span | None) -> Summary | None:
    """The tensor's summary, from either end."""
    if s.op is Op.PULL:
        return s.after or (reply.before if reply else None)
    return s.before or (got.after if got else None)


def _part(requests: list[Request], trace: EventLog) -> None:
    """Mark requests of nodes that ended before receiving the reply."""
    ended = {rank for rank, end in trace.info.ends.items() if end.how != "returned"}
    again = {one.node for one in trace.info.replaced}
    for r in requests:
        if r.back is None and not r.refused:
            cut = r.failed is not None and r.left is not None and r.node in ended | again
            r.alone = cut or (r.failed is None and r.node in ended)


def _roles(trace: EventLog, requests: list[Request]) -> dict[int, str]:
    """The role of each node, from the run's info or else from its requests."""
    behave: dict[int, str] = {}
    for r in requests:
        if r.op is Op.REGISTER:
            behave.setdefault(r.server, "scheduler")
        else:
            behave |= {r.node: "worker", r.server: "server"}
    return behave | {
        rank: known.role
        for rank, known in trace.info.ranks.items()
        if known.role in ("worker", "server", "scheduler")
    }


# -- updates ----------------------------------------------------------------------------


def _updates(spans: Iterable[Span], roles: dict[int, str]) -> Iterator[Update]:
    """The servers' updates."""
    for s in spans:
        facts = s.attributes
        if s.op is Op.MARK and "version" in facts and roles.get(s.rank) == "server":
            server = s.rank if s.peer is None else s.peer  # a backup serves for its peer
            late = dict(zip(facts.get("workers", ()), facts.get("late", ()), strict=False))
            key, version = key_name(facts["key"]), facts["version"]
            yield Update(server, key, version, s.start, s.end, late, s.after)


def _drop(requests: list[Request]) -> None:
    """Mark the gradients that came too late, counted by the replies."""
    seen: dict[tuple[int, Place], int] = defaultdict(int)
    pushes = [r for r in requests if r.op is Op.PUSH and r.left is not None]
    for r in sorted(pushes, key=lambda r: r.left or 0.0):
        who = r.node, r.place
        r.dropped, seen[who] = r.lost > seen[who], max(r.lost, seen[who])


#: The order of simultaneous events.
UPDATED, LEFT, BACK, SENT, ARRIVED, TAKEN = range(6)


def _walk(requests: list[Request], updates: list[Update]) -> list[Request]:
    """Process all events in the order of time, and return the gradients that count.

    Note the version that each pull got and each gradient was computed from. An update takes the
    oldest gradient of each of its workers from the inbox.
    """
    versions: dict[Place, int] = {}
    pulled: dict[tuple[int, Place], int] = {}
    inboxes: dict[Place, dict[int, deque[Request]]] = defaultdict(lambda: defaultdict(deque))
    gradients = []
    steps = [*_steps_of_requests(requests), *((u.begin, TAKEN, u) for u in updates)]
    steps += [(u.end, UPDATED, u) for u in updates if u.end is not None]
    for _, step, it in sorted(steps, key=lambda s: s[:2]):
        if step == UPDATED:
            versions[it.place] = it.version
        elif step == LEFT:
            it.version = versions.get(it.place, 0)
        elif step == TAKEN:
            _take(inboxes[it.place], it)
        elif step == BACK:
            pulled[it.node, it.place] = it.version
        elif step == SENT:
            it.version = pulled.get((it.node, it.place), 0)
        else:
            inboxes[it.place][it.node].append(it)
            gradients.append(it)
    return gradients


def _steps_of_requests(requests: list[Request]) -> Iterator[tuple[float, int, Any]]:
    for r in requests:
        if r.op is Op.PUSH:
            yield r.sent, SENT, r
            if r.arrived is not None and not (r.refused or r.dropped):
                yield r.arrived, ARRIVED, r
        if r.op is Op.PULL and r.left is not None:
            yield r.left, LEFT, r
            if r.back is not None:
                yield r.back, BACK, r


def _take(inbox: dict[int, deque[Request]], update: Update) -> None:
    """Take an update's gradients from the inbox; one without workers takes one of each."""
    for worker in list(update.late) or [w for w, waiting in inbox.items() if waiting]:
        late = update.late.setdefault(worker, 0)
        if inbox[worker]:
            gradient = inbox[worker].popleft()
            gradient.taken, gradient.by, gradient.late = update.begin, update.version, late


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
