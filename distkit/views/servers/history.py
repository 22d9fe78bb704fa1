"""The history of a run with a parameter server, read from its events alone. Pure.

It consists of requests with their answers, updates, and gradients: from its arrival until an update
takes it, a gradient is in the inbox of its key. The consistency rule is inferred, not assumed.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from distkit.consistency import Asynchronous, Rule, Synchronous, rule_of
from distkit.events import NO_ATTRIBUTES, Op, Span, State, Summary, key_name
from distkit.trace.log import EventLog

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
