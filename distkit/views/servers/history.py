"""Reconstructs the history of a run with a parameter server from its events. No side effects.

The history contains requests with their replies, updates, and the waits of workers. A gradient is
in the inbox of its key from its arrival until an update applies it. The consistency rule of the run
determines the workers that a pull waits for.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter, itemgetter

from msgspec import structs

from distkit._format import joined
from distkit.consistency import Rule, rule_of
from distkit.events import Op, Span, State, Summary, key_name
from distkit.trace.log import EventLog, grouped
from distkit.views.scene.frame import clean
from distkit.views.scene.marks import intervals
from distkit.views.scene.values import format_values

#: A key on a server.
ServerKey = tuple[int, str]
#: At most MAX_NAMES nodes are listed by name, and at most MAX_WORKERS workers are drawn.
MAX_NAMES, MAX_WORKERS = 3, 10


@dataclass(slots=True, eq=False)
class Request:
    """A request from ``node`` to a server. Times are in seconds, or None if unknown.

    ``version`` is the version that a pull returned, or that a push's gradient was computed from.
    A request is ``refused`` if the reply was an error. A gradient is ``dropped`` if it was too late
    for its update. Other gradients stay in the inbox until the time ``applied``, which is
    infinity if no update applies them. ``nth`` is the number of earlier gradients in the same
    update. ``awaiting`` contains the nodes that a pull waits for when it arrives.
    """

    span: Span
    node: int
    server_key: ServerKey
    arrived: float | None
    reply_sent: float | None
    reply_received: float | None
    value: Summary | None  # summary of the tensor in the request or reply
    refused: bool
    dropped: bool = False
    version: int = 0
    nth: int = 0
    applied: float = math.inf
    awaiting: tuple[int, ...] = ()

    @property
    def answered(self) -> float:
        """Time of the reply or the request's end, whichever is earlier [s]; infinity if neither."""
        return min((t for t in (self.reply_sent, self.span.end) if t is not None), default=math.inf)

    @property
    def unanswered(self) -> bool:
        """True if the request was refused, or no reply was recorded."""
        return self.refused or (self.reply_sent is None and self.reply_received is None)

    @property
    def blocked(self) -> bool:
        """True for a pull that has arrived and either waits for others or has no reply."""
        waits = self.unanswered or bool(self.awaiting)
        return self.span.op is Op.PULL and self.arrived is not None and waits


@dataclass(frozen=True, slots=True)
class Update:
    """An update of a key. ``staleness`` has a number for each worker whose gradient it applies."""

    server_key: ServerKey
    version: int
    begin: float
    end: float | None
    staleness: Mapping[int, int]
    value: Summary | None  # after the update


@dataclass(frozen=True, slots=True)
class Status:
    """The activity of a node.

    ``kind`` is "waits" (for the ``awaited`` nodes), "works", "stopped", "ended", or "" for none.
    """

    kind: str = ""
    text: str = ""
    awaited: tuple[int, ...] = ()


#: Begin and end [s] of a status. The end is None or infinite if the status continues.
StatusInterval = tuple[float, float | None, Status]
#: The end of a node: rank, time [s], time of its replacement [s], and how it ended.
Ending = tuple[int, float, float | None, str]
#: A version of a key: time [s], number, staleness by worker, and its values as text if few.
Version = tuple[float, int, Mapping[int, int], str]
#: Begin and end [s] of a wait, and the awaited nodes.
Wait = tuple[float, float, tuple[int, ...]]


@dataclass
class ServerHistory:
    """The requests, updates and waits of a run."""

    roles: dict[int, str]  # "worker", "server" or "scheduler", by rank
    rule: Rule
    requests: list[Request]
    updates: list[Update]
    gradients: list[Request] = field(default_factory=list)  # accepted pushes, in order of arrival
    versions: dict[ServerKey, list[Version]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[int, list[Wait]] = field(default_factory=lambda: defaultdict(list))  # by worker

    def ranks_of(self, *roles: str) -> list[int]:
        """Return the ranks with one of these roles."""
        return sorted(rank for rank, role in self.roles.items() if role in roles)

    @cached_property
    def registered(self) -> dict[int, float]:
        """The time when each node registered [s]."""
        return {
            r.node: r.arrived
            for r in self.requests
            if r.span.op is Op.REGISTER and r.arrived is not None
        }

    @cached_property
    def quorum(self) -> int:
        """The number of gradients in a complete update."""
        return (
            max(1, len(self.ranks_of("worker")) - self.rule.backup) if self.rule.has_rounds else 1
        )


def read(trace: EventLog) -> ServerHistory:
    """Return the history of a trace."""
    pairs = [ends for ends in trace.pairs.requests() if ends[0].state is not State.SCHEDULED]
    registrations = [s for s, *_ in pairs if s.op is Op.REGISTER]
    roles: dict[int, str] = {s.peer: "scheduler" for s in registrations if s.peer is not None}
    roles |= {rank: metadata.role for rank, metadata in trace.info.ranks.items() if metadata.role}
    default = structs.asdict(trace.info.consistency)  # simulations have no registrations
    consistency = next((s.attributes for s in reversed(registrations) if s.attributes), default)
    history = ServerHistory(
        roles,
        rule=rule_of(**{"mode": "", **consistency}),
        requests=[_request(*ends) for ends in pairs],
        updates=sorted(_updates(trace.spans, roles), key=lambda u: u.begin),
    )
    _mark_dropped(history.requests, [reply for *_, reply in pairs])
    _find_versions(history)
    _fill_inboxes(history)
    _find_waits(history, trace)
    return history


def _request(s: Span, received: Span | None, reply: Span | None) -> Request:
    assert s.peer is not None
    value = s.before or (received.after if received else None)
    if s.op is Op.PULL:
        value = s.after or (reply.before if reply else None)
    return Request(
        span=s,
        node=s.rank,
        server_key=(s.peer, s.label),
        arrived=received.end if received else None,
        reply_sent=reply.start if reply else None,
        reply_received=s.end if s.state is State.COMPLETED else None,
        value=value,
        refused=reply is not None and "refused" in reply.attributes,
    )


def _updates(spans: Iterable[Span], roles: dict[int, str]) -> Iterator[Update]:
    """Yield the servers' updates."""
    for s in spans:
        fields = s.attributes
        if s.op is Op.MARK and "version" in fields and roles.get(s.rank) == "server":
            # the peer of a backup's update is the server that it replaces
            server = s.rank if s.peer is None else s.peer
            staleness = dict(
                zip(fields.get("workers", ()), fields.get("stale_by", ()), strict=False)
            )
            yield Update(
                (server, key_name(fields["key"])),
                fields["version"],
                s.start,
                s.end,
                staleness,
                s.after,
            )


def _mark_dropped(requests: list[Request], replies: list[Span | None]) -> None:
    """Mark the gradients that arrived too late; each reply states how many were dropped so far."""
    counted: Counter[tuple[int, ServerKey]] = Counter()
    pairs = [(reply, r) for r, reply in zip(requests, replies, strict=True) if reply]
    for reply, r in sorted(pairs, key=lambda pair: pair[0].start):
        if (dropped := reply.attributes.get("dropped", 0)) > counted[r.node, r.server_key]:
            r.dropped, counted[r.node, r.server_key] = True, dropped


def _find_versions(history: ServerHistory) -> None:
    """Determine the versions of each key, and the version of each pull and push."""
    versions = history.versions
    for u in history.updates:
        if u.end is not None:
            versions[u.server_key].append((u.end, u.version, u.staleness, format_values(u.value)))
    arrivals = [(r.arrived, r) for r in history.requests if r.arrived is not None and not r.refused]
    for time, r in sorted(arrivals, key=itemgetter(0)):
        op, known = r.span.op, versions[r.server_key]
        implied = op in (Op.PUSH, Op.PULL) or (op is Op.INIT and r.span.dtype)
        if implied and all(created > time and number > 0 for created, number, *_ in known[:1]):
            known.insert(0, (time, 0, {}, format_values(r.value) if op is Op.INIT else ""))
    pulled: dict[tuple[int, ServerKey], list[tuple[float, int]]] = defaultdict(list)
    for r in history.requests:
        known, pulls = versions[r.server_key], pulled[r.node, r.server_key]
        if r.span.op is Op.PUSH:
            r.version = next((n for time, n in reversed(pulls) if time <= r.span.start), 0)
        elif r.span.op is Op.PULL and r.answered < math.inf:
            index = bisect_right(known, r.answered, key=itemgetter(0))
            r.version = known[index - 1][1] if index else 0
            pulls.append((math.inf if r.reply_received is None else r.reply_received, r.version))


def _fill_inboxes(history: ServerHistory) -> None:
    """Determine which update applies each gradient; a worker's gradients are applied in order."""
    accepted = [
        (r.arrived, r)
        for r in history.requests
        if r.span.op is Op.PUSH and r.arrived is not None and not (r.refused or r.dropped)
    ]
    history.gradients = [r for _, r in sorted(accepted, key=itemgetter(0))]
    queues = {
        source: deque(gradients)
        for source, gradients in grouped(
            history.gradients, lambda g: (g.server_key, g.node)
        ).items()
    }
    for u in history.updates:
        for worker in u.staleness:
            if queue := queues.get((u.server_key, worker)):
                queue.popleft().applied = u.begin
    for gradients in grouped(history.gradients, lambda g: (g.server_key, g.applied)).values():
        for nth, gradient in enumerate(gradients):
            gradient.nth = nth


# -- waits ------------------------------------------------------------------------


def _find_waits(history: ServerHistory, trace: EventLog) -> None:
    """Determine the waits for registrations and barriers and, for drawn workers, for gradients."""
    workers, nodes = history.ranks_of("worker"), history.ranks_of("worker", "server")
    drawn, clocks = workers[:MAX_WORKERS], _Clocks(history, workers)
    for r in history.requests:
        if r.span.op is Op.REGISTER:
            begin, end = r.span.start, r.answered
            history.waits[r.node] += _absences(r.node, nodes, history.registered, begin, end)
        elif r.span.op is Op.PULL and r.arrived is not None and r.node in drawn:
            waits = list(clocks.waits(r, r.arrived))
            r.awaiting = waits[0][2] if waits else ()
            history.waits[r.node] += waits
    spans = (s for s in trace.spans if s.op is Op.BARRIER and s.state is not State.SCHEDULED)
    for barrier in trace.grouped_by_match(s for s in spans if s.rank in workers):
        arrivals = {s.rank: s.start for s in barrier}
        for s in barrier:
            end = math.inf if s.end is None else s.end
            history.waits[s.rank] += _absences(s.rank, workers, arrivals, s.start, end)


_TIMES = attrgetter("arrived", "applied")  # times of a gradient


class _Clocks:
    """The numbers of each worker's gradients that have arrived and been applied, by time."""

    def __init__(self, history: ServerHistory, workers: Sequence[int]) -> None:
        self.rule, self.workers = history.rule, workers
        self.sources = grouped(history.gradients, lambda g: (g.server_key, g.node))
        self.changes = {
            server_key: sorted(chain.from_iterable(map(_TIMES, gradients)))
            for server_key, gradients in grouped(history.gradients, lambda g: g.server_key).items()
        }

    def waits(self, pull: Request, begin: float) -> Iterator[Wait]:
        """Yield the waits of a pull that arrives at ``begin``."""
        clock = self._clocks(pull.server_key, begin)[0][pull.node]
        changes = self.changes.get(pull.server_key, [])
        interval = slice(bisect_right(changes, begin), bisect_left(changes, pull.answered))
        for a, b in pairwise([begin, *changes[interval], pull.answered]):
            arrived, applied = self._clocks(pull.server_key, a)
            present = [w for w in self.workers if arrived[w] > applied[w]]
            awaited = self.rule.awaits(clock, applied[pull.node], present, self.workers, arrived)
            if a < b and (others := awaited - {pull.node}):
                yield a, b, tuple(sorted(others))

    def _clocks(self, server_key: ServerKey, time: float) -> tuple[dict[int, int], dict[int, int]]:
        """Return how many of each worker's gradients have arrived, and how many are applied."""
        sources = {w: self.sources.get((server_key, w), []) for w in self.workers}
        arrived, applied = (
            {w: bisect_right(source, time, key=attrgetter(name)) for w, source in sources.items()}
            for name in ("arrived", "applied")
        )
        return arrived, applied


def _absences(
    node: int, members: Sequence[int], arrivals: Mapping[int, float], begin: float, end: float
) -> Iterator[Wait]:
    """Yield a node's wait for the other, absent members in each interval between arrivals."""
    changes = sorted({time for time in arrivals.values() if begin < time < end})
    for a, b in pairwise([begin, *changes, end]):
        if absent := tuple(n for n in members if n != node and arrivals.get(n, math.inf) > a):
            yield a, b, absent


# -- activity of nodes ------------------------------------------------------------


def statuses(
    trace: EventLog, history: ServerHistory, names: dict[int, str]
) -> dict[int, list[StatusInterval]]:
    """Return the statuses of each drawn worker, and when each status begins and ends."""
    items: dict[int, list[StatusInterval]] = defaultdict(list)
    for s in trace.spans:
        if s.op is Op.MARK:
            items[s.rank].append((s.start, s.end, Status("works", clean(s.label or "computes"))))
    for node, waits in history.waits.items():
        items[node] += [(a, b, Status("waits", awaited=awaited)) for a, b, awaited in waits]
    for node, time, until, how in endings(trace):
        # a node that is stopped while it waits is shown as waiting
        items[node].append(
            (time, until, Status("stopped" if how == "was stopped" else "ended", how))
        )
    return {
        node: list(_status_intervals(items[node], names))
        for node in history.ranks_of("worker")[:MAX_WORKERS]
    }


def _status_intervals(
    items: list[StatusInterval], names: dict[int, str]
) -> Iterator[StatusInterval]:
    """Yield the statuses of a node in time order."""
    for begin, end, active in intervals([(-math.inf, None, Status()), *items]):
        latest = {status.kind: status for status in active}
        awaited = tuple(sorted({n for status in active for n in status.awaited}))
        if "waits" in latest:
            latest["waits"] = Status("waits", f"waits for {listed(awaited, names)}", awaited)
        yield (
            begin,
            end,
            next(latest[k] for k in ("ended", "waits", "stopped", "works", "") if k in latest),
        )


def endings(trace: EventLog) -> list[Ending]:
    """Return how and when each node ended, in time order.

    A node that died and was not replaced ends at its last event.
    """
    last = {e.rank: e.time for e in trace.events}
    result: list[Ending] = [
        (
            rank,
            last[rank] if trace.info.died(rank) or end.time is None else end.time,
            None,
            {"returned": "has returned", "released": "was stopped"}.get(end.how, end.how),
        )
        for rank, end in trace.info.ends.items()
        if rank in last
    ]
    for replacement in trace.info.replaced:
        node, time = replacement.node, replacement.time
        times = (e.time for e in trace.events if e.rank == node and e.time > time)
        result.append((node, time, min(times, default=None), "died"))
    return sorted(result, key=itemgetter(1))


def listed(nodes: Sequence[int], names: dict[int, str]) -> str:
    """Return a list of nodes as text.

    >>> listed([0, 2], {0: "worker 0", 2: "worker 2"}), listed(range(8), {})
    ('worker 0 and worker 2', '8 others')
    """
    if len(nodes) > MAX_NAMES:
        return f"{len(nodes)} others"
    return joined([names.get(n, f"rank {n}") for n in nodes])
