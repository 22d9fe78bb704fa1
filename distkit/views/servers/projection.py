"""Projection of a run with a parameter server: keyframes, keys, versions, waits. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from distkit._format import count, joined
from distkit.events import Op
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, name
from distkit.views.scene.summaries import written
from distkit.views.servers.history import Place, Request, ServerHistory, read
from distkit.views.servers.keyframes import Keyframe, keyframes
from distkit.views.servers.layout import MAX_WORKERS, histogram
from distkit.views.servers.waits import Stretch, Wait, deaths, find, statuses

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
