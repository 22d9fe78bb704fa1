"""The history of a run with a parameter server, read from its events alone. Pure.

It consists of requests with their answers, and updates. One walk through both in the order of time
finds the versions of each key, the gradients in its inbox, from their arrival until an update takes
them, and the workers that each held pull waits for. What each node does follows from the waits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from msgspec import structs

from distkit._format import joined
from distkit.consistency import Rule, rule_of
from distkit.events import Op, Span, State, Summary, key_name
from distkit.trace.log import EventLog, grouped
from distkit.views.scene.frame import clean
from distkit.views.scene.marks import pieces
from distkit.views.scene.summaries import written

#: A key on a server.
ServerKey = tuple[int, str]
#: Maximum numbers of nodes listed by name, and of workers with tracked waits.
MAX_NAMES, MAX_WORKERS = 3, 10


@dataclass(slots=True, eq=False)
class Request:
    """A request of ``node`` to a server. Times are in seconds; None means not (yet).

    ``version`` is the version that a pull returned, or from which a push's gradient was computed;
    ``nth`` of the awaited gradients or registrations have come with it. ``refused``: the reply was
    an error. A gradient that counts is in the inbox of its key until ``taken`` by the update that
    made version ``by``. ``clock`` is the number of gradients of its node when a pull arrives,
    ``own`` the last of them; ``awaited`` has the nodes that it waits for from a time on.
    """

    span: Span
    node: int
    place: ServerKey
    arrived: float | None
    left: float | None
    back: float | None
    value: Summary | None  # of the tensor that it or the reply carried
    refused: bool
    dropped: bool = False
    version: int = 0
    nth: int = 0
    taken: float = math.inf
    by: int | None = None
    late: int | None = None  # number of updates between the pull and this one
    clock: int = 0
    own: Request | None = None
    awaited: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    @property
    def answered(self) -> float:
        """The time when it was answered or given up, or infinity."""
        return min((t for t in (self.left, self.span.end) if t is not None), default=math.inf)

    @property
    def stuck(self) -> bool:
        """True if it was refused, or neither end recorded a reply."""
        return self.refused or (self.left is None and self.back is None)

    @property
    def held(self) -> bool:
        """True for a pull that waits for others, or is never answered."""
        waits = self.stuck or any(nodes for _, nodes in self.awaited)
        return self.span.op is Op.PULL and self.arrived is not None and waits


@dataclass(slots=True, eq=False)
class Update:
    """An update of a key; ``late`` has the staleness of each worker's gradient."""

    place: ServerKey
    version: int
    begin: float
    end: float | None
    late: dict[int, int]
    value: Summary | None  # after it


@dataclass(frozen=True, slots=True)
class Status:
    """The activity of a node: "waits", "asks", "works", "ended" or "" for nothing.

    ``awaited``: the nodes that it waits for.
    """

    kind: str = ""
    text: str = ""
    awaited: tuple[int, ...] = ()


#: Begin and end [s] of a status; the end is None or infinite if it continues.
Stretch = tuple[float, float | None, Status]
#: A worker waits: its rank, begin and end [s].
Wait = tuple[int, float, float, Status]
#: A node, when it ended and when another took its place [s], and how it ended, in words.
Ending = tuple[int, float, float | None, str]
#: When it was made [s], its number, the staleness of its gradients, and its values if few.
Version = tuple[float, int, Mapping[int, int], str]


@dataclass
class ServerHistory:
    """All that happened, in the order of time."""

    roles: dict[int, str]  # "worker", "server" or "scheduler", by rank
    rule: Rule
    requests: list[Request]
    updates: list[Update]
    barriers: list[list[Span]]
    gradients: list[Request] = field(default_factory=list)  # pushes that count, as they arrive
    versions: dict[ServerKey, list[Version]] = field(default_factory=lambda: defaultdict(list))
    waits: list[Wait] = field(default_factory=list)

    def of(self, *roles: str) -> list[int]:
        """Return the ranks with one of these roles."""
        return sorted(rank for rank, mine in self.roles.items() if mine in roles)

    @cached_property
    def registered(self) -> dict[int, float]:
        """The time when the scheduler knew each node [s]."""
        asked = (r for r in self.requests if r.span.op is Op.REGISTER)
        return {r.node: r.arrived for r in asked if r.arrived is not None}

    @cached_property
    def quorum(self) -> int:
        """The number of gradients in a complete update."""
        return max(1, len(self.of("worker")) - self.rule.backup) if self.rule.halts else 1


def read(trace: EventLog) -> ServerHistory:
    """Return the history of a trace."""
    pairs = [ends for ends in trace.pairs.requests() if ends[0].state is not State.SCHEDULED]
    asked = [s for s, *_ in pairs if s.op is Op.REGISTER]
    roles: dict[int, str] = {s.peer: "scheduler" for s in asked if s.peer is not None}
    roles |= {rank: known.role for rank, known in trace.info.ranks.items() if known.role}
    usual = structs.asdict(trace.info.consistency)  # of a run without registrations: a simulation
    consistency = next((s.attributes for s in reversed(asked) if s.attributes), usual)
    barriers = trace.together(
        s
        for s in trace.spans
        if s.op is Op.BARRIER and roles.get(s.rank) == "worker" and s.state is not State.SCHEDULED
    )
    history = ServerHistory(
        roles,
        rule_of(**{"mode": "", **consistency}),
        [_request(*ends) for ends in pairs],
        [*_updates(trace.spans, roles)],
        barriers,
    )
    _mark_dropped(history.requests, [reply for *_, reply in pairs])
    _Walk(history).run()
    history.waits = [*_waits(history)]
    return history


def _request(s: Span, got: Span | None, reply: Span | None) -> Request:
    assert s.peer is not None
    back = s.end if s.state is State.COMPLETED else None
    is_pull = s.op is Op.PULL
    refused = reply is not None and "refused" in reply.attributes
    value = s.before or (got.after if got else None)
    if is_pull:
        value = s.after or (reply.before if reply else None)
    return Request(
        span=s,
        node=s.rank,
        place=(s.peer, s.label),
        arrived=got.end if got else None,
        left=reply.start if reply else None,
        back=back,
        value=value,
        refused=refused,
    )


def _updates(spans: Iterable[Span], roles: dict[int, str]) -> Iterator[Update]:
    """Yield the servers' updates."""
    for s in spans:
        facts = s.attributes
        if s.op is Op.MARK and "version" in facts and roles.get(s.rank) == "server":
            server = s.rank if s.peer is None else s.peer  # a backup serves for its peer
            late = dict(zip(facts.get("workers", ()), facts.get("late", ()), strict=False))
            place = server, key_name(facts["key"])
            yield Update(place, facts["version"], s.start, s.end, late, s.after)


def _mark_dropped(requests: list[Request], replies: list[Span | None]) -> None:
    """Mark the gradients that came too late: replies count those of each node."""
    seen: Counter[tuple[int, ServerKey]] = Counter()
    pairs = [(reply, r) for r, reply in zip(requests, replies, strict=True) if reply]
    for reply, r in sorted(pairs, key=lambda pair: pair[0].start):
        if (lost := reply.attributes.get("dropped", 0)) > seen[r.node, r.place]:
            r.dropped, seen[r.node, r.place] = True, lost


#: The order of simultaneous events.
UPDATED, ANSWERED, BACK, SENT, ARRIVED, TAKEN = range(6)


class _Walk:
    """Takes all events of a history in the order of time."""

    def __init__(self, history: ServerHistory) -> None:
        self.history, self.workers = history, history.of("worker")
        self.clocks: dict[ServerKey, Counter[int]] = defaultdict(Counter)
        self.inboxes: dict[ServerKey, dict[int, deque[Request]]] = defaultdict(dict)
        self.last: dict[tuple[int, ServerKey], Request] = {}
        self.pulled: dict[tuple[int, ServerKey], int] = {}
        self.held: dict[ServerKey, list[Request]] = defaultdict(list)

    def run(self) -> None:
        """Walk from the first event to the last."""
        for time, step, it in sorted(self._steps(), key=lambda s: s[:2]):
            versions = self.history.versions[it.place]
            if step == UPDATED:
                versions.append((time, it.version, it.late, written(it.value)))
            elif step == SENT:
                it.version = self.pulled.get((it.node, it.place), 0)
            elif step == BACK:
                self.pulled[it.node, it.place] = it.version
            elif step == ANSWERED:
                it.version = versions[-1][1] if versions else 0
                if it in self.held[it.place]:  # it may be answered when it arrives
                    self.held[it.place].remove(it)
            elif step == ARRIVED:
                self._arrive(it, time, versions)
            else:
                self._take(it)
            if step in (ARRIVED, TAKEN):
                for pull in self.held[it.place]:
                    if pull is it or pull.node in self.workers[:MAX_WORKERS]:
                        pull.awaited.append((time, self._awaited(pull)))

    def _steps(self) -> Iterator[tuple[float, int, Any]]:
        for r in self.history.requests:
            if r.span.op is Op.PUSH:
                yield r.span.start, SENT, r
            if r.arrived is None or r.span.op is Op.REGISTER:
                continue
            yield r.arrived, ARRIVED, r
            if r.span.op is Op.PULL and r.answered < math.inf:
                yield max(r.arrived, r.answered), ANSWERED, r
                if r.back is not None:
                    yield r.back, BACK, r
        for u in self.history.updates:
            yield u.begin, TAKEN, u
            if u.end is not None:
                yield u.end, UPDATED, u

    def _arrive(self, r: Request, time: float, versions: list[Version]) -> None:
        """Process a request at its server; the first one implies that its key has a value."""
        op, inbox, who = r.span.op, self.inboxes[r.place], (r.node, r.place)
        if not versions and not r.refused and (op is not Op.INIT or r.span.dtype):
            versions.append((time, 0, {}, written(r.value) if op is Op.INIT else ""))
        if op is Op.PULL:
            r.clock, r.own = self.clocks[r.place][r.node], self.last.get(who)
            if r.answered > time:
                self.held[r.place].append(r)
        elif op is Op.PUSH and not (r.refused or r.dropped):
            inbox.setdefault(r.node, deque()).append(r)
            self.clocks[r.place][r.node] += 1
            self.last[who] = r
            self.history.gradients.append(r)
            r.nth = sum(map(bool, inbox.values()))

    def _take(self, update: Update) -> None:
        """Apply an update: take the oldest gradient of each of its workers from the inbox."""
        inbox = self.inboxes[update.place]
        for worker in list(update.late) or [w for w, waiting in inbox.items() if waiting]:
            late = update.late.setdefault(worker, 0)
            if inbox.get(worker):
                gradient = inbox[worker].popleft()
                gradient.taken, gradient.by, gradient.late = update.begin, update.version, late

    def _awaited(self, pull: Request) -> tuple[int, ...]:
        """Return the workers that the rule lets a pull wait for."""
        if self.history.rule.needs(pull.clock) <= 0:
            return ()
        here = [w for w, gradients in self.inboxes[pull.place].items() if gradients]
        version = pull.clock - (pull.own is not None and pull.own.taken == math.inf)
        clocks = {w: self.clocks[pull.place][w] for w in self.workers}
        found = self.history.rule.awaits(pull.clock, version, here, self.workers, clocks)
        return tuple(sorted(found - {pull.node}))


# -- what each node is doing ------------------------------------------------------------


def statuses(
    trace: EventLog, history: ServerHistory, names: dict[int, str]
) -> dict[int, list[Stretch]]:
    """Return the activity of the drawn workers, from one change to the next."""
    items: dict[int, list[Stretch]] = defaultdict(list)
    for node, begin, end, status in history.waits:
        items[node].append((begin, end, status))
    for r in history.requests:
        if r.span.op is Op.PULL:
            items[r.node].append((r.span.start, r.span.end, Status("asks", r.place[1])))
    for s in trace.spans:
        if s.op is Op.MARK:
            items[s.rank].append((s.start, s.end, Status("works", s.label or "computes")))
    for node, time, until, words in endings(trace):
        items[node].append((time, until, Status("ended", words)))
    drawn = history.of("worker")[:MAX_WORKERS]
    return {node: list(_stretches(items[node], names)) for node in drawn}


def _waits(history: ServerHistory) -> Iterator[Wait]:
    """Yield every wait of a worker, from one change to the next."""
    members, registered = history.of("worker", "server"), history.registered
    drawn = history.of("worker")[:MAX_WORKERS]
    for r in history.requests:
        if r.span.op is Op.REGISTER and r.node in drawn:
            r.awaited = _absences(members, registered, r.span.start)
        yield from _spans("waits", r.node, r.awaited, r.answered)
    for barrier in history.barriers:
        came = {s.rank: s.start for s in barrier}
        for s in (s for s in barrier if s.rank in drawn):
            absences = _absences(history.of("worker"), came, s.start)
            yield from _spans("barrier", s.rank, absences, math.inf if s.end is None else s.end)


def _absences(
    members: Sequence[int], came: Mapping[int, float], begin: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the members that have not come, from one arrival to the next."""
    changes = sorted({time for time in came.values() if begin < time < math.inf})
    absent = (tuple(n for n in members if came.get(n, math.inf) > a) for a in [begin, *changes])
    return list(zip([begin, *changes], absent, strict=True))


def _spans(
    kind: str, node: int, awaited: list[tuple[float, tuple[int, ...]]], end: float
) -> Iterator[Wait]:
    """Yield the times in which a node waits for others."""
    for (a, nodes), (b, _) in pairwise([*awaited, (end, ())]):
        others = tuple(n for n in nodes if n != node)
        if others and a < min(b, end):
            yield node, a, min(b, end), Status(kind, awaited=others)


def _stretches(items: list[Stretch], names: dict[int, str]) -> Iterator[Stretch]:
    """Yield the statuses of a node from the beginning, merged while they are equal."""
    begin, before = -math.inf, Status()
    for time, _, here in pieces([(-math.inf, None, Status()), *items]):
        status = _status(here, names)
        if status != before:
            yield begin, time, before
            begin, before = time, status
    yield begin, None, before


def _status(here: list[Status], names: dict[int, str]) -> Status:
    """Return the status of a node, from all that it does."""
    of = grouped(here, lambda status: status.kind)
    if held := [*of.get("waits", ()), *of.get("barrier", ())]:
        awaited = tuple(sorted({n for status in held for n in status.awaited}))
        where = "" if "waits" in of else "barrier: "
        found = Status("waits", f"{where}waits for {listed(awaited, names)}", awaited)
    elif asked := list(dict.fromkeys(status.text for status in of.get("asks", ()))):
        keys = clean(asked[0]) if len(asked) == 1 else f"{len(asked)} keys"
        found = Status("asks", f"pulls {keys}")
    else:
        works = [Status(), *of.get("works", ())]
        found = Status(works[-1].kind, clean(works[-1].text))
    return of["ended"][-1] if "ended" in of else found


def endings(trace: EventLog) -> list[Ending]:
    """Return the ends of nodes, sorted by time."""
    over, last = trace[-1].time if len(trace) else 0.0, {e.rank: e.time for e in trace.events}
    found: list[Ending] = []
    for rank, end in trace.info.ends.items():
        told = last.get(rank) if end.time is None else end.time
        # a death is noticed later than it happens: it is shown after the last event
        time = last.get(rank, told) if end.how == "died" else told
        if time is not None:
            words = {"returned": "has returned", "released": "was released"}
            found.append((rank, min(time, over), None, words.get(end.how, str(end.how))))
    for one in trace.info.replaced:
        time = min(one.time, over)
        later = (e.time for e in trace.events if e.rank == one.node and e.time > time)
        found.append((one.node, time, min(later, default=None), "died"))
    return sorted(found, key=lambda ending: ending[1])


def listed(nodes: Sequence[int], names: dict[int, str]) -> str:
    """Return a list of nodes in words.

    >>> listed([0, 2], {0: "worker 0", 2: "worker 2"}), listed(range(8), {})
    ('worker 0 and worker 2', '8 others')
    """
    told = [names.get(n, f"rank {n}") for n in nodes]
    if len(told) > MAX_NAMES:
        return f"{len(told)} others"
    return joined(told)
