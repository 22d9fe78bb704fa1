"""Reconstructs the history of a run with a parameter server from its events. Pure.

The history has requests with their replies, and updates. One pass over both in time order finds the
versions of each key, the gradients in its inbox, and the workers that each held pull waits for. A
gradient is in the inbox from its arrival until an update uses it. The waits determine the activity
of each node.
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
    """A request of ``node`` to a server. Times are in seconds, None if the event did not happen.

    ``version`` is the version that a pull returned, or from which a push's gradient was computed.
    ``nth`` is the number of gradients that have arrived for the same update. A request is
    ``refused`` if the reply was an error. A gradient stays in the inbox of its key until it is
    ``taken`` by the update to version ``by``. ``clock`` is the number of gradients that a node has
    pushed when its pull arrives, and ``own`` the last of them. ``awaited`` has the nodes that a
    request waits for, from a time on.
    """

    span: Span
    node: int
    place: ServerKey
    arrived: float | None
    left: float | None
    back: float | None
    value: Summary | None  # of the tensor in the request or reply
    refused: bool
    dropped: bool = False
    version: int = 0
    nth: int = 0
    taken: float = math.inf
    by: int | None = None
    late: int | None = None  # number of updates between its pull and the update that used it
    clock: int = 0
    own: Request | None = None
    awaited: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    @property
    def answered(self) -> float:
        """The time of the reply or of giving up, else infinity."""
        return min((t for t in (self.left, self.span.end) if t is not None), default=math.inf)

    @property
    def stuck(self) -> bool:
        """True if the request was refused, or no reply was recorded."""
        return self.refused or (self.left is None and self.back is None)

    @property
    def held(self) -> bool:
        """True for a pull that waits for others or has no reply."""
        waits = self.stuck or any(nodes for _, nodes in self.awaited)
        return self.span.op is Op.PULL and self.arrived is not None and waits


@dataclass(slots=True, eq=False)
class Update:
    """An update of a key. ``late`` has the staleness of each worker's gradient."""

    place: ServerKey
    version: int
    begin: float
    end: float | None
    late: dict[int, int]
    value: Summary | None  # after the update


@dataclass(frozen=True, slots=True)
class Status:
    """The activity of a node.

    ``kind`` is "waits", "asks", "works", "ended" or "" for none. ``awaited`` are the nodes that it
    waits for.
    """

    kind: str = ""
    text: str = ""
    awaited: tuple[int, ...] = ()


#: Begin and end [s] of a status. The end is None or infinite if the status continues.
Stretch = tuple[float, float | None, Status]
#: A wait of a worker: rank, begin and end [s], status.
Wait = tuple[int, float, float, Status]
#: The end of a node: rank, time [s], time of its replacement [s], and how it ended.
Ending = tuple[int, float, float | None, str]
#: A version of a key: time [s], number, staleness of its gradients, and its values if few.
Version = tuple[float, int, Mapping[int, int], str]


@dataclass
class ServerHistory:
    """The requests, updates, barriers and waits of a run, in time order."""

    roles: dict[int, str]  # "worker", "server" or "scheduler", by rank
    rule: Rule
    requests: list[Request]
    updates: list[Update]
    barriers: list[list[Span]]
    gradients: list[Request] = field(default_factory=list)  # accepted pushes, in order of arrival
    versions: dict[ServerKey, list[Version]] = field(default_factory=lambda: defaultdict(list))
    waits: list[Wait] = field(default_factory=list)

    def ranks_of(self, *roles: str) -> list[int]:
        """Return the ranks with one of these roles."""
        return sorted(rank for rank, role in self.roles.items() if role in roles)

    @cached_property
    def registered(self) -> dict[int, float]:
        """The time when each node registered [s]."""
        registrations = (r for r in self.requests if r.span.op is Op.REGISTER)
        return {r.node: r.arrived for r in registrations if r.arrived is not None}

    @cached_property
    def quorum(self) -> int:
        """The number of gradients in a complete update."""
        return max(1, len(self.ranks_of("worker")) - self.rule.backup) if self.rule.halts else 1


def read(trace: EventLog) -> ServerHistory:
    """Return the history of a trace."""
    pairs = [ends for ends in trace.pairs.requests() if ends[0].state is not State.SCHEDULED]
    registrations = [s for s, *_ in pairs if s.op is Op.REGISTER]
    roles: dict[int, str] = {s.peer: "scheduler" for s in registrations if s.peer is not None}
    roles |= {rank: metadata.role for rank, metadata in trace.info.ranks.items() if metadata.role}
    default = structs.asdict(trace.info.consistency)  # simulations have no registrations
    consistency = next((s.attributes for s in reversed(registrations) if s.attributes), default)
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
    _Replay(history).run()
    history.waits = [*_waits(history)]
    return history


def _request(s: Span, received: Span | None, reply: Span | None) -> Request:
    assert s.peer is not None
    back = s.end if s.state is State.COMPLETED else None
    is_pull = s.op is Op.PULL
    refused = reply is not None and "refused" in reply.attributes
    value = s.before or (received.after if received else None)
    if is_pull:
        value = s.after or (reply.before if reply else None)
    return Request(
        span=s,
        node=s.rank,
        place=(s.peer, s.label),
        arrived=received.end if received else None,
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
            server = s.rank if s.peer is None else s.peer  # a backup replaces its peer
            late = dict(zip(facts.get("workers", ()), facts.get("late", ()), strict=False))
            place = server, key_name(facts["key"])
            yield Update(place, facts["version"], s.start, s.end, late, s.after)


def _mark_dropped(requests: list[Request], replies: list[Span | None]) -> None:
    """Mark the gradients that arrived too late; replies count those of each node."""
    counted: Counter[tuple[int, ServerKey]] = Counter()
    pairs = [(reply, r) for r, reply in zip(requests, replies, strict=True) if reply]
    for reply, r in sorted(pairs, key=lambda pair: pair[0].start):
        if (dropped := reply.attributes.get("dropped", 0)) > counted[r.node, r.place]:
            r.dropped, counted[r.node, r.place] = True, dropped


#: The order of simultaneous events.
UPDATED, ANSWERED, BACK, SENT, ARRIVED, TAKEN = range(6)


class _Replay:
    """Processes all events of a history in time order."""

    def __init__(self, history: ServerHistory) -> None:
        self.history, self.workers = history, history.ranks_of("worker")
        self.clocks: dict[ServerKey, Counter[int]] = defaultdict(Counter)
        self.inboxes: dict[ServerKey, dict[int, deque[Request]]] = defaultdict(dict)
        self.last: dict[tuple[int, ServerKey], Request] = {}
        self.pulled: dict[tuple[int, ServerKey], int] = {}
        self.held: dict[ServerKey, list[Request]] = defaultdict(list)

    def run(self) -> None:
        """Process the events from the first to the last."""
        for time, step, item in sorted(self._steps(), key=lambda s: s[:2]):
            versions = self.history.versions[item.place]
            if step == UPDATED:
                versions.append((time, item.version, item.late, written(item.value)))
            elif step == SENT:
                item.version = self.pulled.get((item.node, item.place), 0)
            elif step == BACK:
                self.pulled[item.node, item.place] = item.version
            elif step == ANSWERED:
                item.version = versions[-1][1] if versions else 0
                if item in self.held[item.place]:  # not if it was answered on arrival
                    self.held[item.place].remove(item)
            elif step == ARRIVED:
                self._arrive(item, time, versions)
            else:
                self._take(item)
            if step in (ARRIVED, TAKEN):
                for pull in self.held[item.place]:
                    if pull is item or pull.node in self.workers[:MAX_WORKERS]:
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
        """Process the arrival of a request; the first one implies that its key has a value."""
        op, inbox, source = r.span.op, self.inboxes[r.place], (r.node, r.place)
        if not versions and not r.refused and (op is not Op.INIT or r.span.dtype):
            versions.append((time, 0, {}, written(r.value) if op is Op.INIT else ""))
        if op is Op.PULL:
            r.clock, r.own = self.clocks[r.place][r.node], self.last.get(source)
            if r.answered > time:
                self.held[r.place].append(r)
        elif op is Op.PUSH and not (r.refused or r.dropped):
            inbox.setdefault(r.node, deque()).append(r)
            self.clocks[r.place][r.node] += 1
            self.last[source] = r
            self.history.gradients.append(r)
            r.nth = sum(map(bool, inbox.values()))

    def _take(self, update: Update) -> None:
        """Apply an update: remove the oldest gradient of each of its workers from the inbox."""
        inbox = self.inboxes[update.place]
        for worker in list(update.late) or [w for w, waiting in inbox.items() if waiting]:
            late = update.late.setdefault(worker, 0)
            if inbox.get(worker):
                gradient = inbox[worker].popleft()
                gradient.taken, gradient.by, gradient.late = update.begin, update.version, late

    def _awaited(self, pull: Request) -> tuple[int, ...]:
        """Return the workers that a pull waits for according to the consistency rule."""
        if self.history.rule.needs(pull.clock) <= 0:
            return ()
        present = [w for w, gradients in self.inboxes[pull.place].items() if gradients]
        version = pull.clock - (pull.own is not None and pull.own.taken == math.inf)
        clocks = {w: self.clocks[pull.place][w] for w in self.workers}
        awaited = self.history.rule.awaits(pull.clock, version, present, self.workers, clocks)
        return tuple(sorted(awaited - {pull.node}))


# -- activity of nodes ------------------------------------------------------------


def statuses(
    trace: EventLog, history: ServerHistory, names: dict[int, str]
) -> dict[int, list[Stretch]]:
    """Return the statuses of the drawn workers, from one change to the next."""
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
    drawn = history.ranks_of("worker")[:MAX_WORKERS]
    return {node: list(_stretches(items[node], names)) for node in drawn}


def _waits(history: ServerHistory) -> Iterator[Wait]:
    """Yield the waits of workers, from one change to the next."""
    members, registered = history.ranks_of("worker", "server"), history.registered
    drawn = history.ranks_of("worker")[:MAX_WORKERS]
    for r in history.requests:
        if r.span.op is Op.REGISTER and r.node in drawn:
            r.awaited = _absences(members, registered, r.span.start)
        yield from _intervals("waits", r.node, r.awaited, r.answered)
    for barrier in history.barriers:
        arrivals = {s.rank: s.start for s in barrier}
        for s in (s for s in barrier if s.rank in drawn):
            absences = _absences(history.ranks_of("worker"), arrivals, s.start)
            yield from _intervals("barrier", s.rank, absences, math.inf if s.end is None else s.end)


def _absences(
    members: Sequence[int], arrivals: Mapping[int, float], begin: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Return the absent members, from one arrival to the next."""
    changes = sorted({time for time in arrivals.values() if begin < time < math.inf})
    absent = (tuple(n for n in members if arrivals.get(n, math.inf) > a) for a in [begin, *changes])
    return list(zip([begin, *changes], absent, strict=True))


def _intervals(
    kind: str, node: int, awaited: list[tuple[float, tuple[int, ...]]], end: float
) -> Iterator[Wait]:
    """Yield the intervals in which a node waits for others."""
    for (a, nodes), (b, _) in pairwise([*awaited, (end, ())]):
        others = tuple(n for n in nodes if n != node)
        if others and a < min(b, end):
            yield node, a, min(b, end), Status(kind, awaited=others)


def _stretches(items: list[Stretch], names: dict[int, str]) -> Iterator[Stretch]:
    """Yield the statuses of a node from the start, merging equal ones."""
    begin, previous = -math.inf, Status()
    for time, _, activities in pieces([(-math.inf, None, Status()), *items]):
        status = _status(activities, names)
        if status != previous:
            yield begin, time, previous
            begin, previous = time, status
    yield begin, None, previous


def _status(activities: list[Status], names: dict[int, str]) -> Status:
    """Return the status of a node from its concurrent activities."""
    by_kind = grouped(activities, lambda status: status.kind)
    if held := [*by_kind.get("waits", ()), *by_kind.get("barrier", ())]:
        awaited = tuple(sorted({n for status in held for n in status.awaited}))
        prefix = "" if "waits" in by_kind else "barrier: "
        result = Status("waits", f"{prefix}waits for {listed(awaited, names)}", awaited)
    elif pulled := list(dict.fromkeys(status.text for status in by_kind.get("asks", ()))):
        keys = clean(pulled[0]) if len(pulled) == 1 else f"{len(pulled)} keys"
        result = Status("asks", f"pulls {keys}")
    else:
        works = [Status(), *by_kind.get("works", ())]
        result = Status(works[-1].kind, clean(works[-1].text))
    return by_kind["ended"][-1] if "ended" in by_kind else result


def endings(trace: EventLog) -> list[Ending]:
    """Return the ends of nodes, sorted by time."""
    end_of_trace, last = (
        trace[-1].time if len(trace) else 0.0,
        {e.rank: e.time for e in trace.events},
    )
    result: list[Ending] = []
    for rank, end in trace.info.ends.items():
        reported = last.get(rank) if end.time is None else end.time
        # a death is detected late: show it right after the last event
        time = last.get(rank, reported) if end.how == "died" else reported
        if time is not None:
            words = {"returned": "has returned", "released": "was released"}
            result.append((rank, min(time, end_of_trace), None, words.get(end.how, str(end.how))))
    for replacement in trace.info.replaced:
        time = min(replacement.time, end_of_trace)
        later = (e.time for e in trace.events if e.rank == replacement.node and e.time > time)
        result.append((replacement.node, time, min(later, default=None), "died"))
    return sorted(result, key=lambda ending: ending[1])


def listed(nodes: Sequence[int], names: dict[int, str]) -> str:
    """Return a list of nodes as text.

    >>> listed([0, 2], {0: "worker 0", 2: "worker 2"}), listed(range(8), {})
    ('worker 0 and worker 2', '8 others')
    """
    texts = [names.get(n, f"rank {n}") for n in nodes]
    if len(texts) > MAX_NAMES:
        return f"{len(texts)} others"
    return joined(texts)
