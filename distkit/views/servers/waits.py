"""Waits of workers for each other in a run with a parameter server, and each node's work. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from distkit.consistency import Rule
from distkit.events import Op, Span
from distkit.trace.log import EventLog
from distkit.views.scene.frame import clean
from distkit.views.scene.units import joined
from distkit.views.servers.story import Gradient, Place, Request, Story

#: So many nodes are named, then they are counted; of so many changes of a wait all are noted.
MAX_NAMES, MAX_CHANGES = 3, 256


class Missing:
    """Of some nodes, those that somebody waits for; it changes at ``times`` [s]."""

    times: list[float]

    def at(self, time: float) -> tuple[int, ...]:
        """The workers that are missing at a time."""
        raise NotImplementedError


class Absent(Missing):
    """Nodes that have not come, given when each one comes [s]."""

    def __init__(self, everybody: Iterable[int], came: dict[int, float]) -> None:
        self.everybody, self.came = list(everybody), came
        self.times = sorted(set(came.values()))

    def at(self, time: float) -> tuple[int, ...]:
        """The workers that have not come yet."""
        return tuple(n for n in self.everybody if self.came.get(n, math.inf) > time)


class Inbox:
    """The gradients in the inbox of a key; they change at ``times`` [s]."""

    def __init__(self, workers: list[int], gradients: list[Gradient]) -> None:
        self.workers, self.of = workers, defaultdict[int, list[Gradient]](list)
        self.times = sorted({t for g in gradients for t in (g.arrived, g.taken) if t is not None})
        for g in gradients:
            self.of[g.push.node].append(g)

    def arrived(self, time: float) -> list[int]:
        """Whose gradients are here."""
        return [w for w in self.workers if self._here(self.of[w], time)]

    def _here(self, mine: list[Gradient], time: float) -> bool:
        i = bisect_right(mine, time, key=lambda g: g.arrived)
        return i > 0 and (mine[i - 1].taken or math.inf) > time


class Round(Missing):
    """Workers whose gradients are missing until an update takes one that lies in the inbox."""

    def __init__(self, rule: Rule, inbox: Inbox, gradient: Gradient) -> None:
        self.rule, self.inbox, self.times = rule, inbox, inbox.times
        self.until = math.inf if gradient.taken is None else gradient.taken

    def at(self, time: float) -> tuple[int, ...]:
        """Whose gradient is not here, unless the update has begun."""
        inbox, version = self.inbox, int(time >= self.until)
        found = self.rule.awaits(1, version, inbox.arrived(time), inbox.workers, {})
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Wait:
    """``node`` waits from ``begin`` to ``end`` (infinity: still) for nodes that change with time.

    ``kind`` is "register", "init", "pull" or "barrier"; ``asked`` is what is not answered.
    """

    kind: str
    node: int
    begin: float
    end: float
    missing: Missing
    asked: Request | None = None

    def on(self, time: float) -> tuple[int, ...]:
        """Whom it waits for at a time."""
        return tuple(n for n in self.missing.at(time) if n != self.node)

    @property
    def changes(self) -> list[float]:
        """The times when that may change; of a great many only some, and the last."""
        times = self.missing.times
        mine = times[bisect_right(times, self.begin) : bisect_left(times, self.end)]
        return [*mine[:: 1 + len(mine) // MAX_CHANGES], *mine[-1:]]

    @property
    def real(self) -> bool:
        """True if it was for somebody: else its answer only came after other work."""
        stuck = self.asked is not None and (self.asked.unanswered or self.asked.refused)
        return stuck or any(self.on(t) for t in (self.begin, *self.changes))


@dataclass(frozen=True, slots=True)
class Status:
    """From ``time`` on ``node`` is doing this: "waits", "asks", "works", "ended" or "" for nothing.

    ``awaited``: whom it waits for, of those that are asked about.
    """

    time: float
    node: int
    kind: str
    text: str
    awaited: tuple[int, ...] = ()


def find(story: Story) -> list[Wait]:
    """Every wait for somebody else, in the order of their begins."""
    found = [*_registrations(story), *_inits(story), *_pulls(story), *_barriers(story)]
    return sorted((w for w in found if w.begin < w.end), key=lambda w: (w.begin, w.node))


def _until(request: Request, story: Story) -> float:
    """The time when a request was answered or given up, or its run was over."""
    ends = (request.left, request.back, request.failed, story.over(request.run))
    return min(t for t in ends if t is not None)


def _registrations(story: Story) -> Iterator[Wait]:
    """The scheduler answers nobody before the last node has come."""
    everybody = [*story.of("worker"), *story.of("server")]
    runs: dict[int, list[Request]] = defaultdict(list)
    for r in story.requests:
        if r.op is Op.REGISTER:
            runs[r.run].append(r)
    for asked in runs.values():
        absent = Absent(everybody, {r.node: r.arrived for r in asked if r.arrived is not None})
        for r in asked:
            yield Wait("register", r.node, r.sent, _until(r, story), absent, r)


def _inits(story: Story) -> Iterator[Wait]:
    """A worker that only announces a key waits for the one that gives its value."""
    given = {r.place: r for r in story.requests if r.op is Op.INIT and r.whole}
    for r in story.requests:
        if r.op is not Op.INIT or r.optimizer or r.at_once or r.arrived is None:
            continue
        giver = given.get(r.place)
        came = {giver.node: giver.arrived} if giver and giver.arrived is not None else {}
        absent = Absent([giver.node] if giver else [], came)
        yield Wait("init", r.node, r.arrived, _until(r, story), absent, r)


def _pulls(story: Story) -> Iterator[Wait]:
    """A pull that is held waits for a round, or for workers that are too far behind."""
    workers = story.of("worker")
    lying: dict[Place, list[Gradient]] = defaultdict(list)
    for g in story.gradients:
        lying[g.push.place].append(g)
    inboxes = {place: Inbox(workers, all_) for place, all_ in lying.items()}
    for r in story.requests:
        if r.op is not Op.PULL or r.at_once or r.arrived is None:
            continue
        found: Missing = Absent([], {})
        if (inbox := inboxes.get(r.place)) is not None:
            # of its worker, those that came before it: it waits until they are applied
            clock = bisect_right(inbox.of[r.node], r.arrived, key=lambda g: g.arrived)
            rule = story.rules[r.run]
            if not rule.halts:
                found = _behind(rule.needs(clock), inbox)
            elif clock:
                found = Round(rule, inbox, inbox.of[r.node][clock - 1])
        wait = Wait("pull", r.node, r.arrived, _until(r, story), found, r)
        if wait.real:
            yield wait


def _behind(least: int, inbox: Inbox) -> Absent:
    """Workers of whom fewer than ``least`` gradients have come."""
    if least <= 0:
        return Absent([], {})
    came = {w: inbox.of[w][least - 1].arrived for w in inbox.workers if len(inbox.of[w]) >= least}
    return Absent(inbox.workers, came)


def _barriers(story: Story) -> Iterator[Wait]:
    for members in story.barriers:
        absent = Absent(story.of("worker"), {s.rank: s.start for s in members})
        for s in members:
            end = math.inf if s.end is None else s.end
            yield Wait("barrier", s.rank, s.start, end, absent)


# -- what each node is doing ------------------------------------------------------------


@dataclass
class _Doing:
    """The operations that a node has begun and not ended."""

    waits: list[Wait] = field(default_factory=list)
    asks: list[Request] = field(default_factory=list)
    works: list[Span] = field(default_factory=list)

    def status(self, time: float, node: int, names: dict[int, str]) -> Status:
        held = [w for w in self.waits if w.on(time)]
        if held:
            awaited = tuple(sorted({n for w in held for n in w.on(time)}))
            where = "barrier: " if all(w.kind == "barrier" for w in held) else ""
            told = f"{where}waits for {listed(awaited, names)}"
            return Status(time, node, "waits", told, awaited)
        if self.asks:
            keys = dict.fromkeys(r.key for r in self.asks)
            told = clean(next(iter(keys))) if len(keys) == 1 else f"{len(keys)} keys"
            return Status(time, node, "asks", f"pulls {told}")
        if self.works:
            return Status(time, node, "works", clean(self.works[-1].label) or "computes")
        return Status(time, node, "", "")


def statuses(
    trace: EventLog, story: Story, waits: Iterable[Wait], names: dict[int, str], nodes: set[int]
) -> list[Status]:
    """The work of these nodes, each time that it changes."""
    steps: dict[int, list[tuple[float, int, str, object]]] = defaultdict(list)

    def add(node: int, begin: float, end: float, what: str, item: object) -> None:
        if end <= begin or node not in nodes:
            return
        steps[node].append((begin, 1, what, item))
        if end < math.inf:
            steps[node].append((end, 0, what, item))

    for w in waits:
        add(w.node, w.begin, w.end, "waits", w)
        if w.node in nodes:
            steps[w.node] += [(t, 2, "", None) for t in w.changes]
    for r in story.requests:
        if r.op is Op.PULL:
            back = r.back if r.back is not None else r.failed
            add(r.node, r.sent, math.inf if back is None else back, "asks", r)
    for s in trace.spans:
        if s.op is Op.MARK and story.roles.get(s.rank) == "worker":
            add(s.rank, s.start, math.inf if s.end is None else s.end, "works", s)
    found = [s for node, all_ in steps.items() for s in _follow(node, all_, names, nodes)]
    ends = (s for s in _ends(trace) if s.node in nodes)
    return sorted([*found, *ends], key=lambda s: s.time)


def _follow(
    node: int, steps: list[tuple[float, int, str, object]], names: dict[int, str], nodes: set[int]
) -> Iterator[Status]:
    """The statuses of one node: of what happens at the same time, only the outcome."""
    steps.sort(key=lambda s: s[:2])
    doing, before = _Doing(), Status(0.0, node, "", "")
    for i, (time, kind, what, item) in enumerate(steps):
        if kind < 2:
            items: list[object] = getattr(doing, what)
            items.append(item) if kind else items.remove(item)
        if i + 1 < len(steps) and steps[i + 1][0] == time:
            continue
        status = doing.status(time, node, names)
        status = replace(status, awaited=tuple(n for n in status.awaited if n in nodes))
        if replace(status, time=before.time) != before:
            before = status
            yield status


def _ends(trace: EventLog) -> Iterator[Status]:
    """Nodes that have ended, after the last that was heard of them."""
    last = {e.rank: e.time for e in trace.events}
    for rank, about in trace.meta.get("ends", {}).items():
        if (time := last.get(int(rank))) is not None:
            how = str(about.get("how") or "ended")
            told = {"returned": "has returned", "released": "was released"}.get(how, how)
            yield Status(time, int(rank), "ended", told)


def listed(nodes: Sequence[int], names: dict[int, str]) -> str:
    """Some nodes in words.

    >>> listed([0, 2], {0: "worker 0", 2: "worker 2"}), listed(range(8), {})
    ('worker 0 and worker 2', '8 others')
    """
    told = [names.get(n, f"rank {n}") for n in nodes]
    if len(told) > MAX_NAMES:
        return f"{len(told)} others"
    return joined(told)
