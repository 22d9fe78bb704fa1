"""Converts a run with a parameter server to keys and captioned keyframes. No side effects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distkit._format import count, human_bytes, human_seconds
from distkit.events import Op
from distkit.trace.log import EventLog, grouped
from distkit.views.scene import frame
from distkit.views.scene.frame import applicable, clean, dotted, omissions
from distkit.views.scene.values import format_values
from distkit.views.servers.history import (
    MAX_WORKERS,
    Ending,
    Request,
    ServerHistory,
    ServerKey,
    StatusInterval,
    endings,
    listed,
    read,
    statuses,
)

#: The last MAX_KEYFRAMES keyframes of a run are drawn, with at most MAX_SERVERS servers. The moment
#: of the static picture is chosen among at most MAX_POSTERS updates.
MAX_KEYFRAMES, MAX_SERVERS, MAX_POSTERS = 6_000, 4, 100


@dataclass(frozen=True)
class Row:
    """A key on a server. ``part`` is a text such as "1/2" if the key is split, else ""."""

    key: str
    size: str
    part: str


@dataclass(frozen=True, slots=True)
class Keyframe:
    """An event from ``src`` to ``dst``, with its times [s]; ``end`` is None if it never ended.

    ``caption`` and ``details`` describe the event. A message is ``lost`` if the server refused it,
    or dropped its gradient as too late.
    """

    kind: str  # a key of ``_TEXTS``, "update" or "death"
    src: int
    dst: int
    begin: float
    end: float | None
    subject: Any  # a request, an update or an ending
    caption: str
    details: str = ""
    lost: bool = False


@dataclass(frozen=True)
class ServerProjection:
    """The data needed to draw a run. Times are in seconds.

    ``notices`` are warnings, and ``notes`` are other remarks, such as omissions.
    """

    trace: EventLog
    live: bool
    history: ServerHistory
    names: dict[int, str]
    keyframes: list[Keyframe]
    start: float
    rows: dict[ServerKey, Row]
    status: dict[int, list[StatusInterval]]  # statuses of the drawn workers
    notices: list[str]
    notes: list[str]

    @property
    def end(self) -> float:
        """End of the picture [s]."""
        return self.trace[-1].time if len(self.trace) else 0.0


def project(trace: EventLog, live: bool = False) -> ServerProjection:
    """Return the projection of a run with a parameter server.

    Args:
        trace: the run.
        live: whether the run is in progress.

    >>> project(EventLog()).keyframes
    []
    """
    history, node_ends = read(trace), endings(trace)
    ranks = {*trace.info.ranks, *history.roles, *trace.ranks}
    names = {rank: frame.name(trace.info, rank) for rank in ranks}
    keyframes = [
        *_messages(history, node_ends, names),
        *_updates_and_deaths(history, node_ends, names),
    ]
    keyframes.sort(key=lambda k: (k.end is None, k.end or k.begin, k.begin))
    start = _start(trace, history)
    keyframes = [k for k in keyframes if k.end is None or k.end > start]
    drawn = keyframes[-MAX_KEYFRAMES:]
    workers, servers = (len(history.ranks_of(role)) for role in ("worker", "server"))
    return ServerProjection(
        trace=trace,
        live=live,
        history=history,
        names=names,
        keyframes=drawn,
        start=start if len(drawn) == len(keyframes) else drawn[0].begin,
        rows=_rows(history),
        status=statuses(trace, history, names),
        notices=_warnings(trace, history, names, live),
        notes=[
            *omissions(
                ("messages and updates are drawn", len(drawn), len(keyframes)), which="last"
            ),
            *omissions(
                ("workers are drawn", min(workers, MAX_WORKERS), workers),
                ("servers are drawn", min(servers, MAX_SERVERS), servers),
            ),
        ],
    )


def _start(trace: EventLog, history: ServerHistory) -> float:
    """Return when the last node starts to register; before that, all others only wait [s]."""
    registrations = [r for r in history.requests if r.span.op is Op.REGISTER]
    complete = min(
        (r.reply_sent for r in registrations if r.reply_sent is not None), default=-math.inf
    )
    return max(
        (r.span.start for r in registrations if r.span.start <= complete), default=trace.start
    )


def _rows(history: ServerHistory) -> dict[ServerKey, Row]:
    """Return every requested key on every server, in the order of the requests."""
    nbytes: Counter[ServerKey] = Counter()
    for r in history.requests:
        if r.span.op is not Op.REGISTER and "optimizer" not in r.span.attributes:
            nbytes[r.server_key] = max(nbytes[r.server_key], r.span.nbytes)
    parts, rows = grouped(sorted(nbytes), lambda server_key: server_key[1]), {}
    for server_key, n in nbytes.items():
        _, key = server_key
        nth, total = parts[key].index(server_key) + 1, len(parts[key])
        part = f"{nth}/{total}" if total > 1 else ""
        size = dotted([human_bytes(n) if n else "", part and f"part {part}"])
        rows[server_key] = Row(clean(key), size, part)
    return rows


# -- keyframes --------------------------------------------------------------------------

_TEXTS = {
    "push": "{node} pushes its gradient of {key} to {server}",
    "pull": "{node} pulls {key} from {server}",
    "weights": "{server} sends {key} v{version} to {node}",
    "init": "{node} initializes {key} on {server}",
    "announce": "{node} declares {key} on {server}",
    "optimizer": "{node} sends an optimizer to {server}",
    "register": "{node} registers with the scheduler",
    "book": "the scheduler sends {node} the addresses of all nodes",
}


def _messages(
    history: ServerHistory, node_ends: list[Ending], names: dict[int, str]
) -> Iterator[Keyframe]:
    """Yield the requests, and the replies with weights or addresses."""
    dead = {node for node, _, replaced, how in node_ends if how == "died" and replaced is None}
    for r in history.requests:
        (server, key), sent = r.server_key, r.span.start
        node, peer = (names.get(rank, f"rank {rank}") for rank in (r.node, server))
        texts = {
            kind: clean(text.format(node=node, server=peer, key=key, version=r.version))
            for kind, text in _TEXTS.items()
        }
        kind = str(r.span.op)
        if r.span.op is Op.INIT and not r.span.dtype:
            kind = "optimizer" if "optimizer" in r.span.attributes else "announce"
        end = None if r.arrived is None else max(sent, r.arrived)
        details, lost = _details(r, kind, history, dead, names), r.refused or r.dropped
        yield Keyframe(kind, r.node, server, sent, end, r, texts[kind], details, lost)
        if kind in ("pull", "register") and r.reply_sent is not None and not r.refused:
            reply, details = ("weights", _reply_details(r)) if kind == "pull" else ("book", "")
            end = None if r.reply_received is None else max(r.reply_sent, r.reply_received)
            yield Keyframe(reply, server, r.node, r.reply_sent, end, r, texts[reply], details)


def _details(
    r: Request, kind: str, history: ServerHistory, dead: set[int], names: dict[int, str]
) -> str:
    """Return the details of a request."""
    size = [human_bytes(r.span.nbytes) if r.span.nbytes else "", format_values(r.value)]
    if r.arrived is None:
        return "did not arrive" if r.reply_received is None else "not recorded by its server"
    if kind == "register":
        present = sum(time <= r.arrived for time in history.registered.values())
        return f"{present} of {len(history.ranks_of('worker', 'server'))} have registered"
    if kind == "pull":
        others = listed(r.awaiting, names)
        until = " until the run ends" * (r.unanswered and not dead.isdisjoint(r.awaiting))
        return f"waits for the gradient of {others}{until}" if others else "waits" * r.blocked
    if kind == "optimizer":
        return str(r.span.attributes["optimizer"])
    if kind == "push":
        late = ": too late, not counted" if r.dropped else ""
        size.insert(0, "refused" if r.refused else f"computed from v{r.version}{late}")
    return dotted(size)


def _reply_details(r: Request) -> str:
    """Return the details of a reply with weights."""
    waited = f"waited {human_seconds(r.answered - (r.arrived or r.answered))}"
    wait = waited if r.blocked else "answered immediately"
    return dotted([wait, human_bytes(r.span.nbytes), format_values(r.value)])


def _updates_and_deaths(
    history: ServerHistory, node_ends: list[Ending], names: dict[int, str]
) -> Iterator[Keyframe]:
    """Yield the updates and deaths."""
    for u in history.updates:
        server, key = u.server_key
        workers = " + ".join(
            names.get(w, f"rank {w}") + f" (stale by {n})" * (n > 0) for w, n in u.staleness.items()
        )
        gradients = f"{len(u.staleness)} gradients" if len(u.staleness) > 8 else workers
        caption = clean(f"{names.get(server, f'rank {server}')} updates {key} to v{u.version}")
        details = dotted([gradients and f"with {gradients}", format_values(u.value)])
        yield Keyframe("update", server, server, u.begin, u.end, u, caption, details)
    for ending in node_ends:
        node, time, replaced, how = ending
        if how == "died":
            details = "this is its last event" if replaced is None else "a new process replaces it"
            caption = f"{names.get(node, f'rank {node}')} dies"
            yield Keyframe("death", node, node, time, time, ending, caption, details)


def opening(run: ServerProjection) -> float:
    """Return the moment that the view shows first.

    It is the end of a live run or of a run with an open pull, the last death, or else the start.
    """
    deaths = [k.begin for k in run.keyframes if k.kind == "death"]
    stuck = any(r.blocked and r.unanswered for r in run.history.requests)
    return run.end if run.live or stuck else max(deaths, default=run.start)


def poster(run: ServerProjection) -> float:
    """Return the moment of the static picture: the opening, or one of the first updates.

    If the opening is the start, it is an update, preferably with a stale gradient and few messages
    in flight, or the end if there are no updates.
    """
    updates = [u for u in run.history.updates if u.end is not None and u.end >= run.start]
    stale = [u for u in updates if any(u.staleness.values())]
    if (time := opening(run)) > run.start or not updates:
        return time if time > run.start else run.end
    ends = [u.end or run.end for u in stale or updates]
    in_flight = [(k.begin, k.end or run.end) for k in run.keyframes]
    return min(ends[:MAX_POSTERS], key=lambda t: sum(a < t < b for a, b in in_flight))


# -- text -------------------------------------------------------------------------------


def facts(run: ServerProjection) -> list[str]:
    """Return the texts next to the title."""
    modes = (clean(r.server_key[1]) for r in run.history.requests if r.span.op is Op.REGISTER)
    return [
        *filter(None, dict.fromkeys(modes)),
        *frame.facts(run.trace.info, len(run.trace.ranks)),
    ]


def rule_sentence(history: ServerHistory) -> str:
    """Return a sentence about the consistency rule of the run's servers."""
    workers, rule = len(history.ranks_of("worker")), history.rule
    if workers < 2 or not (history.updates or history.registered):
        return ""
    if rule.staleness is not None:
        return (
            "Each gradient is applied when it arrives. A worker that is more than "
            f"{count(rule.staleness, 'gradient')} ahead of another waits in its pull."
        )
    if not rule.has_rounds:
        return (
            "Each gradient is applied when it arrives, and each pull is answered immediately. "
            "Workers wait for each other only when they register, and at barriers."
        )
    if rule.backup:
        return (
            f"An update applies the first {count(history.quorum, 'gradient')} of a round. Later "
            "gradients are not counted."
        )
    return (
        f"An update applies one gradient from each of the {workers} workers. Gradients collect "
        "in the inbox of their key, and pulls wait for the update."
    )


def verdicts(history: ServerHistory) -> list[frame.Json]:
    """Return a verdict on the staleness of all gradients that were applied."""
    applied = [n for u in history.updates for n in u.staleness.values()]
    stale, total = sum(map(bool, applied)), count(len(applied), "gradient")
    text = (
        f"{stale:,} of {total} {'was' if stale == 1 else 'were'} stale: the value had been updated "
        "since the pull"
        if stale
        else f"no gradient was stale: {len(applied):,} of {total} were computed from the latest "
        "version"
    )
    return [
        {"word": "different" if stale else "same", "expected": False, "text": text}
        for _ in applied[:1]
    ]


def _warnings(
    trace: EventLog, history: ServerHistory, names: dict[int, str], live: bool
) -> list[str]:
    requests, info = history.requests, trace.info
    late, refused = sum(r.dropped for r in requests), sum(r.refused for r in requests)
    stuck = sum(r.blocked and r.reply_sent is None and r.reply_received is None for r in requests)
    lost = sum(r.arrived is None and r.reply_received is None for r in requests)
    dead = [names[rank] for rank in info.ends if info.died(rank) and rank in names]
    replaced = [replacement.name for replacement in info.replaced]
    return applicable(
        (f"{', '.join(dead)} died", dead),
        (f"{', '.join(replaced)} died and had to be replaced", replaced),
        (f"{count(stuck, 'pull')} never answered", stuck and not live),
        (f"{count(lost, 'message')} did not arrive", lost and not live),
        (f"{count(refused, 'request')} refused", refused),
        (f"{count(trace.dropped, 'event')} dropped: the recorder's buffer was full", trace.dropped),
        (f"{count(late, 'gradient')} too late, not counted", late),
    )
