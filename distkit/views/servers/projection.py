"""Projects a run with a parameter server to captioned keyframes and keys. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distkit._format import count, human_bytes, human_seconds, joined
from distkit.events import Op
from distkit.trace.log import EventLog
from distkit.views.scene.frame import clean, name
from distkit.views.scene.summaries import written
from distkit.views.servers.history import (
    Ending,
    Request,
    ServerHistory,
    ServerKey,
    Stretch,
    Update,
    endings,
    listed,
    read,
    statuses,
)

#: Maximum number of drawn keyframes, and the size of dropped blocks. Counters include them.
MAX_KEYFRAMES, BLOCK = 6_000, 1_000


@dataclass(frozen=True)
class Row:
    """A key on a server, with the size of its value [bytes], and its part, such as (1, 2)."""

    server: int
    key: str
    nbytes: int
    part: tuple[int, int] | None

    @property
    def size(self) -> str:
        """The size and the part as text."""
        part = "part {} of {}".format(*self.part) if self.part else ""
        return " · ".join(filter(None, [human_bytes(self.nbytes) if self.nbytes else "", part]))


@dataclass(frozen=True, slots=True)
class Keyframe:
    """An event from ``src`` to ``dst``, with its times [s]; ``end`` is None if it never ended.

    ``who`` and ``more`` describe it. It is ``lost`` if a server refused its value or dropped it as
    late.
    """

    kind: str  # push, pull, weights, init, optimizer, register, book, update or death
    src: int
    dst: int
    begin: float
    end: float | None
    subject: Any  # a request, an update or an ending
    who: str
    more: str = ""
    nbytes: int = 0
    lost: bool = False

    @property
    def arrived(self) -> bool:
        """True if it has ended, or has a reply although its end was not recorded."""
        answered = isinstance(self.subject, Request) and self.subject.back is not None
        return self.end is not None or answered


@dataclass(frozen=True)
class Serving:
    """The data to draw of a run. Keyframes before ``first`` are not drawn. Times are in seconds."""

    trace: EventLog
    live: bool
    history: ServerHistory
    names: dict[int, str]
    endings: list[Ending]
    keyframes: list[Keyframe]
    first: int
    rows: dict[ServerKey, Row]
    status: dict[int, list[Stretch]]  # of drawn workers

    @property
    def start(self) -> float:
        """Start of the picture [s]."""
        return self.keyframes[self.first].begin if self.first else self.trace.start

    @property
    def end(self) -> float:
        """End of the picture [s]."""
        return self.trace[-1].time if len(self.trace) else 0.0

    @property
    def title(self) -> str:
        """The name of the run."""
        return clean(self.trace.info.name) or "Servers"

    def done(self, kind: str) -> list[Keyframe]:
        """Return the keyframes of a kind that have ended."""
        return [b for b in self.keyframes if b.kind == kind and b.end is not None]


def project(trace: EventLog, live: bool = False) -> Serving:
    """Project the parameter server of a run.

    Args:
        trace: the run.
        live: whether the run is in progress.

    >>> project(EventLog()).keyframes
    []
    """
    history, node_ends = read(trace), endings(trace)
    ranks = {*trace.info.ranks, *history.roles, *trace.ranks}
    names = {rank: name(trace.info, rank) for rank in ranks}
    status = statuses(trace, history, names)
    keyframes = [*_messages(history, names), *_others(history, node_ends, names)]
    keyframes.sort(key=lambda b: (b.end is None, b.end or b.begin, b.begin))
    first = max(0, -(-(len(keyframes) - MAX_KEYFRAMES) // BLOCK) * BLOCK)
    return Serving(trace, live, history, names, node_ends, keyframes, first, _rows(history), status)


def _rows(history: ServerHistory) -> dict[ServerKey, Row]:
    """Return every requested key on every server, in the order of the requests."""
    size: Counter[ServerKey] = Counter()
    for r in history.requests:
        if r.span.op is not Op.REGISTER and "optimizer" not in r.span.attributes:
            size[r.place] = max(size[r.place], r.span.nbytes)
    size.update(dict.fromkeys((u.place for u in history.updates), 0))
    parts: dict[str, list[int]] = defaultdict(list)
    for server, key in sorted(size):
        parts[key].append(server)
    result = {}
    for (server, key), nbytes in size.items():
        servers = parts[key]
        part = (servers.index(server) + 1, len(servers)) if len(servers) > 1 else None
        result[server, key] = Row(server, clean(key), nbytes, part)
    return result


# -- keyframes --------------------------------------------------------------------------

_TEXTS = {
    "push": "{node} pushes its gradient of {key} to {server}",
    "pull": "{node} asks {server} for {key}",
    "weights": "{server} sends {key} v{version} to {node}",
    "init": "{node} {gives} {key} to {server}",
    "optimizer": "{node} sends {server} an optimizer",
    "register": "{node} registers with the scheduler",
    "book": "the scheduler sends {node} the addresses of all nodes",
}


#: Requests whose replies are drawn, because the reply carries the data.
_ANSWERED = (Op.PULL, Op.REGISTER)


def _messages(history: ServerHistory, names: dict[int, str]) -> Iterator[Keyframe]:
    """Yield the requests, and the replies with weights or addresses."""
    for r in history.requests:
        op, sent, (server, _) = r.span.op, r.span.start, r.place
        kind = "optimizer" if "optimizer" in r.span.attributes else str(op)
        values, nbytes = ("", 0) if op in _ANSWERED else (written(r.value), r.span.nbytes)
        end = None if r.arrived is None else max(sent, r.arrived)
        lost = r.refused or r.dropped
        details = [_more(r, history, names), human_bytes(nbytes) if nbytes else "", values]
        if end is None:
            details[0] = "not arrived" if r.back is None else "not recorded by its server"
        captions = _text(kind, r, names), _line(details)
        yield Keyframe(kind, r.node, server, sent, end, r, *captions, nbytes, lost)
        if r.left is None or r.refused or op not in _ANSWERED:
            continue
        end = None if r.back is None else max(r.left, r.back)
        waited = human_seconds(r.answered - (r.arrived or r.left))
        details = [
            f"waited {waited}" if r.held else "answered immediately",
            human_bytes(r.span.nbytes),
        ]
        if op is Op.REGISTER:
            yield Keyframe("book", server, r.node, r.left, end, r, _text("book", r, names))
        else:
            captions = _text("weights", r, names), _line([*details, written(r.value)])
            yield Keyframe("weights", server, r.node, r.left, end, r, *captions, r.span.nbytes)


def _text(kind: str, r: Request, names: dict[int, str]) -> str:
    node, server = (names.get(rank, f"rank {rank}") for rank in (r.node, r.place[0]))
    gives = "gives the first value of" if r.span.dtype else "announces"
    fields = {"node": node, "server": server, "key": r.place[1], "version": r.version}
    return clean(_TEXTS[kind].format(**fields, gives=gives))


def _line(parts: list[str]) -> str:
    return clean(" · ".join(filter(None, parts)))


def _more(r: Request, history: ServerHistory, names: dict[int, str]) -> str:
    """Return the details of a request."""
    op, awaited = r.span.op, r.awaited[0][1] if r.awaited else ()
    others = listed([n for n in awaited if n != r.node], names)
    if "optimizer" in r.span.attributes:
        return str(r.span.attributes["optimizer"])
    if op is Op.REGISTER:
        present = sum(time <= (r.arrived or 0.0) for time in history.registered.values())
        return f"{present} of {len(history.ranks_of('worker', 'server'))} have registered"
    if op is Op.PULL:
        return f"waits for the gradient of {others}" if others else "waits" * r.held
    if r.refused:
        return "refused"
    if op is Op.INIT:
        return ""
    counts = f" · {r.nth} of {history.quorum} have arrived" if r.nth and history.quorum > 1 else ""
    text = f"computed from v{r.version}" + (": too late, not counted" if r.dropped else counts)
    applied = f" · applied in v{r.by}" if r.by is not None else ""
    return text + applied


def _others(
    history: ServerHistory, node_ends: list[Ending], names: dict[int, str]
) -> Iterator[Keyframe]:
    """Yield the updates and deaths."""
    for u in history.updates:
        yield _update(u, names)
    for ending in node_ends:
        node, time, replaced, how = ending
        if how == "died":
            more = "this is its last heartbeat" if replaced is None else "another takes its place"
            who = f"{names.get(node, f'rank {node}')} dies"
            yield Keyframe("death", node, node, time, time, ending, who, more)


def _update(u: Update, names: dict[int, str]) -> Keyframe:
    server, key = u.place
    staleness = {names.get(w, f"rank {w}"): late for w, late in u.late.items()}
    names_text = " + ".join(f"{w} ({late} late)" if late else w for w, late in staleness.items())
    workers = f"{len(staleness)} gradients" if len(staleness) > 8 else names_text
    who = clean(f"{names.get(server, f'rank {server}')} updates {key} to v{u.version}")
    more = _line([workers and f"with {workers}", written(u.value)])
    return Keyframe("update", server, server, u.begin, u.end, u, who, more)


def opening(run: Serving) -> float:
    """Return the moment to show first: the end of a live run, else its most instructive event.

    This is the last death, the last pull without a reply, or the first update, preferably with a
    stale gradient.
    """
    if run.live:
        return run.end
    if died := run.done("death"):
        return died[-1].begin
    if stuck := [r.arrived or 0.0 for r in run.history.requests if r.held and r.stuck]:
        return max(stuck)
    updates = run.done("update")
    stale = [u for u in updates if any(u.subject.late.values())]
    ends = (u.end for u in [*stale, *updates] if u.end is not None and u.end >= run.start)
    return next(ends, run.end)


# -- text -------------------------------------------------------------------------------


def facts(run: Serving) -> list[str]:
    """Return the facts next to the title."""
    history = run.history
    modes = (clean(r.place[1]) for r in history.requests if r.span.op is Op.REGISTER)
    roles = [(len(history.ranks_of(role)), role) for role in ("worker", "server")]
    counts = [count(n, role) for n, role in roles if n]
    return [*filter(None, [*dict.fromkeys(modes), *counts, run.trace.info.device])]


def rule_sentence(history: ServerHistory) -> str:
    """Return a sentence about the consistency rule of the run's servers."""
    workers, quorum, rule = len(history.ranks_of("worker")), history.quorum, history.rule
    has_servers = history.updates or any(r.span.op is Op.REGISTER for r in history.requests)
    if not has_servers or not workers:
        return ""
    if quorum <= 1 and workers > 1 and rule.staleness is not None:
        return (
            "Each gradient is applied when it arrives. A worker that is more than "
            f"{count(rule.staleness, 'gradient')} ahead of another waits in its pull."
        )
    if quorum <= 1 and workers > 1:
        return (
            "Each gradient is applied when it arrives: no worker waits for another. A gradient "
            "is late if others updated the value after its worker had pulled it."
        )
    if quorum == workers > 1:
        fewer = any(0 < len(u.late) < quorum for u in history.updates)
        return (
            f"An update takes one gradient of each of the {workers} workers. They are collected "
            "in the inbox of their key, and pulls wait for the update."
        ) + (" Some updates of this run took fewer." if fewer else "")
    late = " of a round. Later ones are not counted." if quorum > 1 else "."
    return f"An update takes the first {count(quorum, 'gradient')}{late}"


def notes(run: Serving) -> list[str]:
    """Return the notices that are not warnings."""
    late = sum(r.dropped for r in run.history.requests)
    total = len(run.keyframes)
    texts = [
        (f"{count(late, 'gradient')} too late, not counted", late),
        (f"the last {total - run.first:,} of {total:,} messages and updates are shown", run.first),
    ]
    return [words for words, shown in texts if shown]


def notices(run: Serving) -> list[str]:
    """Return warnings and notes for the reader."""
    history, names, info = run.history, run.names, run.trace.info
    refused = sum(r.refused for r in history.requests)
    stuck = sum(r.held and r.left is None and r.back is None for r in history.requests)
    lost = sum(not b.arrived and b.kind != "update" for b in run.keyframes)
    dropped = run.trace.dropped
    dead = [names[rank] for rank in info.ends if info.died(rank) and rank in names]
    replaced = [replacement.name for replacement in info.replaced]
    servers = [
        name for rank in history.ranks_of("server") if (name := names[rank]) in (*dead, *replaced)
    ]
    texts = [
        (f"{', '.join(dead)} died", dead),
        (f"{', '.join(replaced)} died and had to be replaced", replaced),
        (f"the last events of {joined(servers)} may be missing: counts may be too low", servers),
        (f"{count(stuck, 'pull')} never answered", stuck and not run.live),
        (f"{count(lost, 'message')} did not arrive", lost and not run.live),
        (f"{count(refused, 'request')} refused", refused),
        (f"{count(dropped, 'event')} dropped: the recorder's buffer was full", dropped),
    ]
    return [words for words, shown in texts if shown] + notes(run)
