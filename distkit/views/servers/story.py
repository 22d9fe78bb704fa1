"""The history of a run with a parameter server, read from its events alone. Pure.

Requests with their answers, updates, and the gradients in between: from its arrival until an update
takes it, a gradient lies in the inbox of its key. Nothing here knows how servers decide.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distkit.consistency import Asynchronous, Rule, Synchronous, rule_of
from distkit.events import NO_ATTRIBUTES, REQUESTS, Op, Span, State, key_name
from distkit.trace.log import EventLog

_MATCH = re.compile(r"kv:(\d+):\d+:\d+")

#: A key of one server, in one run.
Place = tuple[int, int, str]


@dataclass(slots=True, eq=False)
class Request:
    """A request of ``node`` to ``server``, and its way: times in seconds, None: not (yet).

    ``version`` is that of the value: for a pull the one it got, for a push the one that its
    gradient was computed from. ``at_once``: the answer left before the server did anything else.
    ``refused``: it was an error. ``alone``: the node ended before it had the answer.
    """

    op: Op
    key: str
    node: int
    server: int
    run: int
    sent: float
    arrived: float | None
    left: float | None
    back: float | None
    failed: float | None
    nbytes: int
    nbytes_back: int
    where: str
    whole: bool  # it carried a tensor, or was answered with one
    at_once: bool
    late: int = 0  # the answer's: so many gradients of its node came too late for their round
    version: int = 0
    dropped: bool = False
    refused: bool = False
    alone: bool = False
    terms: Mapping[str, Any] = NO_ATTRIBUTES  # of a register: the mode, and what is not as usual
    optimizer: str = ""  # its name, if this is no key's first value but sets the optimizer

    @property
    def place(self) -> Place:
        """The key that it is about."""
        return self.run, self.server, self.key

    @property
    def unanswered(self) -> bool:
        """True if neither its server nor its node knows of an answer."""
        return self.left is None and self.back is None


@dataclass(slots=True, eq=False)
class Gradient:
    """A push in the inbox of a key, from its arrival until ``taken`` by an update."""

    push: Request
    arrived: float
    taken: float | None = None
    by: int | None = None  # the version that this one made
    late: int | None = None  # so many updates came between the pull and this one


@dataclass(slots=True, eq=False)
class Update:
    """An update of a key: ``late`` says of each worker how stale its gradient was."""

    run: int
    server: int
    key: str
    version: int
    begin: float
    end: float | None
    late: dict[int, int] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """The key that it is about."""
        return self.run, self.server, self.key


@dataclass(frozen=True)
class Story:
    """A run, or several: everything in the order of time."""

    roles: dict[int, str]  # "worker", "server" or "scheduler", by rank
    begins: dict[int, float]  # when each run began
    quorum: dict[int, int]  # how many gradients make an update, by run
    rules: dict[int, Rule]  # what decides who waits, by run
    requests: list[Request]
    updates: list[Update]
    gradients: list[Gradient]
    barriers: list[list[Span]]

    def over(self, run: int) -> float:
        """The begin of the next run, when the servers forget; infinity if there is none."""
        return min((t for r, t in self.begins.items() if r > run), default=math.inf)

    def of(self, role: str) -> list[int]:
        """The ranks with this role."""
        return sorted(rank for rank, mine in self.roles.items() if mine == role)


def read(trace: EventLog) -> Story:
    """The story of a trace."""
    requests = list(_requests(trace.spans))
    roles = _roles(trace, requests)
    begins: dict[int, float] = {}
    for r in requests:
        begins[r.run] = min(begins.get(r.run, r.sent), r.sent)
    updates = list(_updates(trace.spans, requests, roles))
    _drop(requests)
    _part(requests, trace)
    gradients = _inboxes(requests, updates)
    _date(requests, updates)
    barriers: dict[str, list[Span]] = defaultdict(list)
    for s in trace.spans:
        if s.op is Op.BARRIER and roles.get(s.rank) == "worker" and s.state is not State.SCHEDULED:
            barriers[trace.matches[s.rank, s.seq]].append(s)
    workers = sum(role == "worker" for role in roles.values())
    quorum, rules = _rules(begins, requests, updates, workers)
    return Story(
        roles,
        begins,
        quorum,
        rules,
        requests,
        updates,
        gradients,
        list(barriers.values()),
    )


def _rules(
    begins: Iterable[int], requests: list[Request], updates: list[Update], workers: int
) -> tuple[dict[int, int], dict[int, Rule]]:
    """Quorum and rule as a run's updates show; as its mode says while there are none."""
    terms = {r.run: r.terms for r in requests if r.op is Op.REGISTER and r.terms}
    quorum, rules = dict[int, int](), dict[int, Rule]()
    for run in begins:
        told = rule_of(**{"mode": "", **terms.get(run, {})})
        taken = [len(u.late) for u in updates if u.run == run]
        n = quorum[run] = max(taken, default=max(1, workers - told.backup) if told.halts else 1)
        rules[run] = Synchronous(workers - n) if n > 1 else Asynchronous(told.staleness)
    return quorum, rules


# -- requests ---------------------------------------------------------------------------


def _requests(spans: Iterable[Span]) -> Iterator[Request]:
    asked: list[Span] = []
    ends: dict[Op, dict[str, Span]] = {Op.RECV: {}, Op.SEND: {}}
    for s in spans:
        if s.match is None:
            continue
        if s.op in ends:
            ends[s.op].setdefault(s.match, s)  # a request that comes twice counts once
        elif s.op in REQUESTS and s.peer is not None and s.state is not State.SCHEDULED:
            asked.append(s)
    for s in asked:
        yield _request(s, ends[Op.RECV].get(s.match or ""), ends[Op.SEND].get(s.match or ""))


def _request(s: Span, got: Span | None, reply: Span | None) -> Request:
    assert s.peer is not None and s.match is not None
    run = _MATCH.fullmatch(s.match)
    done = s.state is State.COMPLETED
    return Request(
        op=s.op,
        key=s.label,
        node=s.rank,
        server=s.peer,
        run=int(run[1]) if run else 0,
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
        late=reply.attributes.get("dropped", 0) if reply else 0,
        refused=reply is not None and "refused" in reply.attributes,
        terms=s.attributes if s.op is Op.REGISTER else NO_ATTRIBUTES,
        optimizer=s.attributes.get("optimizer", ""),
    )


def _part(requests: list[Request], trace: EventLog) -> None:
    """Mark those whose nodes have ended: whatever the server did, nobody heard the answer."""
    ended = {
        int(rank)
        for rank, end in trace.meta.get("ends", {}).items()
        if end.get("how") != "returned"
    }
    again = {int(one["node"]) for one in trace.meta.get("replaced", ())}
    for r in requests:
        if r.back is None and not r.refused:
            cut = r.failed is not None and r.left is not None and r.node in ended | again
            r.alone = cut or (r.failed is None and r.node in ended)


def _roles(trace: EventLog, requests: list[Request]) -> dict[int, str]:
    """The role of each node: as the run says, else as it behaves."""
    behave: dict[int, str] = {}
    for r in requests:
        if r.op is Op.REGISTER:
            behave.setdefault(r.server, "scheduler")
        else:
            behave |= {r.node: "worker", r.server: "server"}
    said = {
        int(rank): str(about.get("role") or "")
        for rank, about in trace.meta.get("ranks", {}).items()
    }
    return behave | {
        rank: role for rank, role in said.items() if role in ("worker", "server", "scheduler")
    }


# -- updates ----------------------------------------------------------------------------


def _updates(
    spans: Iterable[Span], requests: list[Request], roles: dict[int, str]
) -> Iterator[Update]:
    """The servers' marks; each belongs to the run whose messages its server gets."""
    heard: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for r in requests:
        if r.arrived is not None:
            heard[r.server].append((r.arrived, r.run))
    for times in heard.values():
        times.sort()
    for s in spans:
        facts = s.attributes
        if s.op is not Op.MARK or "version" not in facts or roles.get(s.rank) != "server":
            continue
        server = s.rank if s.peer is None else s.peer  # in whose place it serves
        times = heard[server]
        i = bisect_right(times, (s.start, math.inf))
        run = times[max(i - 1, 0)][1] if times else 0
        late = dict(zip(facts.get("workers", ()), facts.get("late", ()), strict=False))
        yield Update(run, server, key_name(facts["key"]), facts["version"], s.start, s.end, late)


def _drop(requests: list[Request]) -> None:
    """Mark the gradients that came too late: the answer to each tells how many there were."""
    seen: dict[tuple[int, Place], int] = defaultdict(int)
    pushes = [r for r in requests if r.op is Op.PUSH and r.left is not None]
    for r in sorted(pushes, key=lambda r: r.left or 0.0):
        who = r.node, r.place
        r.dropped, seen[who] = r.late > seen[who], max(r.late, seen[who])


def _inboxes(requests: list[Request], updates: list[Update]) -> list[Gradient]:
    """Each gradient that came; an update takes the oldest one of each of its workers."""
    steps: dict[Place, list[tuple[float, Request | Update]]] = defaultdict(list)
    for r in requests:
        if r.op is Op.PUSH and r.arrived is not None and not (r.refused or r.dropped):
            steps[r.place].append((r.arrived, r))
    for u in updates:
        steps[u.place].append((u.begin, u))
    found: list[Gradient] = []
    for of_one in steps.values():
        inbox: dict[int, deque[Gradient]] = defaultdict(deque)
        for time, step in sorted(of_one, key=lambda s: (s[0], isinstance(s[1], Update))):
            if isinstance(step, Update):
                _take(inbox, step)
            else:
                inbox[step.node].append(Gradient(step, time))
                found.append(inbox[step.node][-1])
    return sorted(found, key=lambda g: g.arrived)


def _take(inbox: dict[int, deque[Gradient]], update: Update) -> None:
    """Empty the inbox as far as an update says; one that says nothing takes of everybody."""
    for worker in list(update.late) or [w for w, waiting in inbox.items() if waiting]:
        late = update.late.setdefault(worker, 0)
        if inbox[worker]:
            gradient = inbox[worker].popleft()
            gradient.taken, gradient.by, gradient.late = update.begin, update.version, late


def _date(requests: list[Request], updates: list[Update]) -> None:
    """Note which version each pull got, and each gradient was computed from."""
    history: dict[Place, list[tuple[float, int]]] = defaultdict(list)
    for u in updates:
        history[u.place].append((u.end if u.end is not None else math.inf, u.version))
    pulled: dict[tuple[int, Place], list[tuple[float, int]]] = defaultdict(list)
    for r in requests:
        if r.op is Op.PULL and r.left is not None:
            r.version = _last(history[r.place], r.left)
            if r.back is not None:
                pulled[r.node, r.place].append((r.back, r.version))
    for got in pulled.values():
        got.sort()
    for r in requests:
        if r.op is Op.PUSH:
            r.version = _last(pulled[r.node, r.place], r.sent)


def _last(known: list[tuple[float, int]], time: float) -> int:
    """The latest version known at a time; 0: the first value."""
    i = bisect_right(known, (time, 1 << 62))
    return known[i - 1][1] if i else 0
