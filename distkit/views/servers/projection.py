"""Projection of a run with a parameter server: keyframes, keys, versions, waits. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distkit._format import count, human_bytes, human_seconds, joined
from distkit.events import Op, Span
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, name
from distkit.views.scene.summaries import written
from distkit.views.servers.history import (
    Death,
    Place,
    Request,
    ServerHistory,
    Stretch,
    Update,
    Wait,
    deaths,
    find,
    listed,
    read,
    statuses,
)
from distkit.views.servers.layout import MAX_WORKERS, histogram

#: The last keyframes are drawn, the others dropped in blocks; the counters count all.
MAX_KEYFRAMES, BLOCK = 6_000, 1_000

#: Begin and end of a version [s], its number, the staleness of its gradients by worker, and its
#: values if they are few.
Version = tuple[float, float, tuple[int, Mapping[int, int], str]]


@dataclass(frozen=True)
class Row:
    """A key on a server: the size of its value [bytes], and its ``part`` (number, of how many)."""

    server: int
    key: str
    nbytes: int
    part: tuple[int, int] | None

    @property
    def share(self) -> str:
        """The part, in words."""
        return "part {} of {}".format(*self.part) if self.part else ""


@dataclass(frozen=True)
class Serving:
    """All that is drawn of a run; of its keyframes, those from ``first`` on. Times in [s]."""

    trace: EventLog
    live: bool
    history: ServerHistory
    waits: list[Wait]
    names: dict[int, str]
    keyframes: list[Keyframe]
    first: int
    start: float
    end: float
    rows: dict[Place, Row]
    versions: dict[Place, list[Version]]
    doing: dict[int, list[Stretch]]  # by drawn worker
    staleness: Json

    @property
    def title(self) -> str:
        """The name of the run."""
        return clean(self.trace.info.name) or "Servers"

    def done(self, kind: str) -> list[Keyframe]:
        """The keyframes of a kind that have ended."""
        return [b for b in self.keyframes if b.kind == kind and b.end is not None]


def project(trace: EventLog, live: bool = False) -> Serving:
    """Project the parameter server of a run.

    Args:
        trace: the run.
        live: whether the run continues.

    >>> project(EventLog()).keyframes
    []
    """
    history = read(trace)
    waits, names, rows, order = (
        find(history),
        _names(trace, history),
        _rows(history),
        keyframes(history, deaths(trace)),
    )
    first = 0 if len(order) <= MAX_KEYFRAMES else -(-(len(order) - MAX_KEYFRAMES) // BLOCK) * BLOCK
    return Serving(
        trace,
        live,
        history,
        waits,
        names,
        order,
        first,
        start=trace.start if not first else order[first].begin,
        end=trace[-1].time if len(trace) else 0.0,
        rows=rows,
        versions=_versions(history, rows),
        doing=statuses(trace, history, waits, names, {*history.of("worker")[:MAX_WORKERS]}),
        staleness=histogram(g.late for g in history.gradients if g.late is not None),
    )


def _names(trace: EventLog, history: ServerHistory) -> dict[int, str]:
    ranks = {*trace.info.ranks, *history.roles, *trace.ranks}
    return {rank: name(trace.info, rank) for rank in ranks}


def _rows(history: ServerHistory) -> dict[Place, Row]:
    """Every key on every server with a request for it, in the order of the requests."""
    size: Counter[Place] = Counter()
    for r in history.requests:
        if r.op is not Op.REGISTER and not r.optimizer:
            nbytes = r.nbytes if r.op is not Op.PULL else r.nbytes_back
            size[r.server, r.key] = max(size[r.server, r.key], nbytes)
    for u in history.updates:
        size[u.server, u.key] += 0
    parts: dict[str, list[int]] = defaultdict(list)
    for server, key in sorted(size):
        parts[key].append(server)
    found = {}
    for (server, key), nbytes in size.items():
        mine = parts[key]
        part = (mine.index(server) + 1, len(mine)) if len(mine) > 1 else None
        found[server, key] = Row(server, clean(key), nbytes, part)
    return found


def _versions(history: ServerHistory, rows: dict[Place, Row]) -> dict[Place, list[Version]]:
    """The versions of each key, in order."""
    given: dict[Place, tuple[float, Request]] = {}  # the first request that shows a value
    for r in history.requests:
        lost = r.failed is not None and (r.refused or r.left is None)
        if r.place not in rows or r.arrived is None or lost or (r.op is Op.INIT and not r.whole):
            continue
        if r.place not in given or r.arrived < given[r.place][0]:
            given[r.place] = r.arrived, r
    none: Mapping[int, int] = {}
    changes = [
        (arrived, place, 0, none, r.value if r.op is Op.INIT else None)
        for place, (arrived, r) in given.items()
    ]
    changes += [
        (u.end, u.place, u.version, u.late, u.value) for u in history.updates if u.end is not None
    ]
    found: dict[Place, list[Version]] = defaultdict(list)
    for time, place, version, late, value in sorted(changes, key=lambda c: c[:3]):
        if version == 0 and place in found:
            continue  # an update was recorded before the first value
        if found[place]:
            begin, _, before = found[place][-1]
            found[place][-1] = begin, time, before
        found[place].append((time, math.inf, (version, late, written(value))))
    return found


def opening(run: Serving) -> float:
    """The moment to show first: the end of a live run, otherwise its most instructive event.

    This is the last death, the last pull without an answer, or the first update, if possible with
    a stale gradient.
    """
    if run.live:
        return run.end
    if died := run.done("death"):
        return died[-1].begin
    if stuck := [w.begin for w in run.waits if w.kind == "pull" and w.asked and w.asked.stuck]:
        return max(stuck)
    updates = run.done("update")
    stale = [u for u in updates if any(u.subject.late.values())]
    ends = (u.end for u in [*stale, *updates] if u.end is not None and u.end >= run.start)
    return next(ends, run.end)


# -- words ------------------------------------------------------------------------------


def facts(run: Serving) -> list[str]:
    """Facts beside the title."""
    history, device = run.history, run.trace.info.device
    modes = dict.fromkeys(r.key for r in history.requests if r.op is Op.REGISTER and r.key)
    roles = [(len(history.of(role)), role) for role in ("worker", "server")]
    return [
        *(clean(mode) for mode in modes),
        *(count(n, role) for n, role in roles if n),
        *([device] if device else []),
    ]


def rule_sentence(history: ServerHistory) -> str:
    """The consistency rule of this run's servers, in a sentence."""
    workers, most = len(history.of("worker")), history.quorum()
    known = history.updates or any(r.op is Op.REGISTER and r.key for r in history.requests)
    if not known or not workers:
        return ""
    if most <= 1 and workers > 1 and history.rule.staleness is not None:
        ahead = count(history.rule.staleness, "gradient")
        return (
            f"Each gradient is applied when it arrives. A worker that is more than {ahead} "
            "ahead of another waits in its pull."
        )
    if most <= 1 and workers > 1:
        return (
            "Each gradient is applied when it arrives: no worker waits for another's. A gradient "
            "is late when others updated the value after its worker had pulled it."
        )
    if most == workers > 1:
        fewer = any(0 < len(u.late) < most for u in history.updates)
        return (
            f"An update takes one gradient of each of the {workers} workers. They are collected "
            "in the inbox of their key, and pulls wait for the update."
        ) + (" Some updates of this run took fewer." if fewer else "")
    late = " of a round. Later ones are not counted." if most > 1 else "."
    return f"An update takes the first {count(most, 'gradient')}{late}"


def notices(run: Serving) -> list[str]:
    """Warnings and notes for the reader."""
    return [*_warnings(run), *notes(run)]


def notes(run: Serving) -> list[str]:
    """Notices that report no problem."""
    late = sum(r.dropped for r in run.history.requests)
    whole = len(run.keyframes)
    found = [
        (f"{count(late, 'gradient')} came too late: not counted", late),
        (f"the last {whole - run.first:,} of {whole:,} messages and updates are shown", run.first),
    ]
    return [words for words, shown in found if shown]


def _warnings(run: Serving) -> list[str]:
    history, names, info = run.history, run.names, run.trace.info
    refused = sum(r.refused for r in history.requests)
    pulls = (w.asked for w in run.waits if w.kind == "pull" and w.asked)
    stuck = sum(r.left is None and r.back is None for r in pulls)
    lost = sum(b.end is None and b.kind != "barrier" and not b.answered for b in run.keyframes)
    dropped = run.trace.dropped
    dead = [names[rank] for rank in info.ends if info.died(rank) and rank in names]
    again = [one.name for one in info.replaced]
    servers = [name for rank in history.of("server") if (name := names[rank]) in (*dead, *again)]
    found = [
        (f"{', '.join(dead)} died", dead),
        (f"{', '.join(again)} died and had to be replaced", again),
        (
            f"what {joined(servers)} recorded last may be missing: counts may be too low",
            servers,
        ),
        (f"{count(stuck, 'pull')} never answered", stuck and not run.live),
        (f"{count(lost, 'message')} did not arrive", lost and not run.live),
        (f"{count(refused, 'request')} refused", refused),
        (f"{count(dropped, 'event')} dropped: the recorder's buffer was full", dropped),
    ]
    return [words for words, shown in found if shown]


@dataclass(frozen=True, slots=True)
class Keyframe:
    """An event from ``src`` to ``dst``, with its times [s]; ``end`` is None if it never ended."""

    kind: str  # push, pull, weights, init, optimizer, register, book, update, barrier or death
    src: int
    dst: int
    begin: float
    end: float | None
    subject: Any  # a request, an update, the spans of a barrier, or a death

    @property
    def answered(self) -> bool:
        """True for an answered request, which arrived even if its arrival was not recorded."""
        return isinstance(self.subject, Request) and self.subject.back is not None

    @property
    def nbytes(self) -> int:
        """The payload [bytes]."""
        if not isinstance(self.subject, Request) or self.kind == "pull":
            return 0
        return self.subject.nbytes_back if self.kind == "weights" else self.subject.nbytes

    @property
    def value(self) -> str:
        """The values that it carries, if they are few."""
        carries = self.kind in ("push", "weights", "init", "update")
        return written(self.subject.value) if carries else ""

    @property
    def lost(self) -> bool:
        """True if the server refused its value or dropped it as late."""
        refused = self.kind in ("push", "init") and self.subject.refused
        return refused or (self.kind == "push" and self.subject.dropped)


def keyframes(history: ServerHistory, deaths: Iterable[Death] = ()) -> list[Keyframe]:
    """All keyframes in the order of their ends, followed by those that never ended."""
    found = [*_messages(history)]
    found += [Keyframe("update", u.server, u.server, u.begin, u.end, u) for u in history.updates]
    found += [Keyframe("death", d[0], d[0], d[1], d[1], d) for d in deaths]
    for members in history.barriers:
        ends = [s.end for s in members if s.end is not None]
        end = max(ends) if len(ends) == len(members) else None
        first = min(members, key=lambda s: s.start)
        found.append(Keyframe("barrier", first.rank, first.rank, first.start, end, members))
    return sorted(found, key=lambda b: (b.end is None, b.end or b.begin, b.begin))


_KINDS = {Op.PUSH: "push", Op.PULL: "pull", Op.INIT: "init", Op.REGISTER: "register"}
_ANSWERS = {Op.PULL: "weights", Op.REGISTER: "book"}


def _messages(history: ServerHistory) -> Iterator[Keyframe]:
    for r in history.requests:
        kind = "optimizer" if r.optimizer else _KINDS[r.op]
        yield Keyframe(kind, r.node, r.server, r.sent, _after(r.sent, r.arrived), r)
        if r.left is not None and r.op in _ANSWERS and not r.refused:
            yield Keyframe(_ANSWERS[r.op], r.server, r.node, r.left, _after(r.left, r.back), r)


def _after(begin: float, end: float | None) -> float | None:
    """The end, or the begin if the clocks put it earlier."""
    return None if end is None else max(begin, end)


class Captions:
    """The captions of a run's keyframes.

    Args:
        history: the history of the run.
        waits: the waits of the run.
        names: the names of the nodes by rank.
    """

    def __init__(
        self, history: ServerHistory, waits: Iterable[Wait], names: dict[int, str]
    ) -> None:
        self.history, self.names = history, names
        self.held = {id(w.asked): w for w in waits if w.asked is not None}
        self.members = len(history.of("worker")) + len(history.of("server"))
        self.quorum = history.quorum()
        self.inbox = defaultdict[Place, list[Request]](list)
        for g in history.gradients:
            self.inbox[g.place].append(g)
        self.registered = sorted(arrived for arrived, _, _ in history.present())

    def name(self, node: int) -> str:
        """The name of a node."""
        return self.names.get(node, f"rank {node}")

    def of(self, keyframe: Keyframe) -> tuple[str, str]:
        """A sentence and details."""
        sentence, more = getattr(self, f"_{keyframe.kind}")(keyframe.subject)
        if keyframe.end is None and isinstance(keyframe.subject, Request):
            more = "not recorded by its server" if keyframe.answered else "it has not arrived"
        size = human_bytes(keyframe.nbytes) if keyframe.nbytes else ""
        return clean(sentence), clean(" · ".join(filter(None, [more, size])))

    def _push(self, r: Request) -> tuple[str, str]:
        more = "refused" if r.refused else f"computed from v{r.version}"
        if r.dropped:
            more += ": too late, not counted"
        elif not r.refused and r.arrived is not None and self.quorum > 1:
            more += f" · {self._in_inbox(r.place, r.arrived)} of {self.quorum} have arrived"
        if r.alone:
            more += f" · applied in v{r.by}" if r.by is not None else ""
            more += " · its worker has ended"
        return f"{self.name(r.node)} pushes its gradient of {r.key} to {self.name(r.server)}", more

    def _in_inbox(self, place: Place, time: float) -> int:
        """The number of workers with a gradient in the inbox just after a time."""
        mine = self.inbox[place]
        recent = mine[: bisect_right(mine, time, key=lambda g: g.arrived or 0.0)][-256:]
        return len({g.node for g in recent if g.taken > time})

    def _awaited(self, r: Request, template: str) -> str:
        """The nodes that a request waits for when it arrives, in words."""
        wait = self.held.get(id(r))
        awaited = wait.on(wait.begin) if wait else ()
        return template.format(listed(awaited, self.names)) if awaited else ""

    def _pull(self, r: Request) -> tuple[str, str]:
        more = self._awaited(r, "waits for the gradient of {}") or "waits" * (id(r) in self.held)
        return f"{self.name(r.node)} asks {self.name(r.server)} for {r.key}", more

    def _weights(self, r: Request) -> tuple[str, str]:
        wait = self.held.get(id(r))
        more = f"waited {human_seconds(wait.end - wait.begin)}" if wait else "answered at once"
        return f"{self.name(r.server)} sends {r.key} v{r.version} to {self.name(r.node)}", more

    def _init(self, r: Request) -> tuple[str, str]:
        does = "gives the first value of" if r.whole else "announces"
        more = "refused" if r.refused else self._awaited(r, "waits for {} to give it")
        return f"{self.name(r.node)} {does} {r.key} to {self.name(r.server)}", more

    def _optimizer(self, r: Request) -> tuple[str, str]:
        return f"{self.name(r.node)} sends {self.name(r.server)} an optimizer", r.optimizer

    def _register(self, r: Request) -> tuple[str, str]:
        present = bisect_right(self.registered, -math.inf if r.arrived is None else r.arrived)
        more = f"{present} of {self.members} have registered"
        return f"{self.name(r.node)} registers with the scheduler", more

    def _book(self, r: Request) -> tuple[str, str]:
        return f"the scheduler sends {self.name(r.node)} the addresses of all nodes", ""

    def _update(self, u: Update) -> tuple[str, str]:
        late = [f"{self.name(w)} ({n} late)" if n else self.name(w) for w, n in u.late.items()]
        more = f"{len(late)} gradients" if len(late) > 8 else " + ".join(late)
        return f"{self.name(u.server)} updates {u.key} to v{u.version}", more and f"with {more}"

    def _death(self, death: Death) -> tuple[str, str]:
        node, _, replaced = death
        return (
            f"{self.name(node)} dies",
            "this is its last heartbeat" if replaced is None else "another takes its place",
        )

    def _barrier(self, members: list[Span]) -> tuple[str, str]:
        if all(s.end is not None for s in members):
            return "all have passed the barrier", ""
        missing = sorted({*self.history.of("worker")} - {s.rank for s in members})
        return "barrier", f"waits for {listed(missing, self.names)}" if missing else ""
