"""A run with a parameter server as plain data: places, beats, inboxes, versions, waits.

Everything is an interval in trace time, so that both painters find the state of a moment by looking
at what has begun and not ended.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from distkit.events import Op
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.units import count
from distkit.views.servers import layout
from distkit.views.servers.beats import Beat, Teller, answered, beats, nbytes, plain
from distkit.views.servers.staleness import bin_of, histogram
from distkit.views.servers.story import Story, Update, read
from distkit.views.servers.waits import Status, Wait, find, statuses

#: At most so many beats are drawn, the last ones; the counters count all. They go in blocks.
MAX_BEATS, BLOCK = 6_000, 1_000


def project(trace: EventLog, live: bool = False) -> Json:
    """The parameter server of a run.

    Args:
        trace: the run; or several, one after the other.
        live: whether the run goes on.

    >>> project(EventLog())["beats"]
    []
    """
    story = read(trace)
    waits, names = find(story), _names(trace, story)
    quorum, rows = story.quorum, _rows(story)
    order = beats(story)
    first = 0 if len(order) <= MAX_BEATS else -(-(len(order) - MAX_BEATS) // BLOCK) * BLOCK
    start = trace.start if not first else order[first].begin
    end = trace[-1].time if len(trace) else 0.0
    teller = Teller(story, waits, names)
    at = {place: i for i, place in enumerate(rows)}
    drawn = _drawn(story, rows, names, max(quorum.values(), default=1))
    doing = statuses(trace, story, waits, names, {w["rank"] for w in drawn["workers"]})
    staleness = histogram(g.late for g in story.gradients if g.late is not None)
    return {
        "title": clean(str(trace.meta.get("name", ""))),
        "facts": _facts(trace, story),
        "notices": _notices(trace, story, waits, order, first, names, live),
        "said": _said(story, quorum),
        "live": live,
        "start": start,
        "end": end,
        "opening": end if live else _opening(waits, story, start, end),
        **drawn,
        "lanes": [[rank, i, names.get(rank, f"rank {rank}")] for i, rank in enumerate(trace.ranks)],
        "beats": [plain(b, at, teller.told(b)) for b in order[first:]],
        "gradients": _gradients(story, at, quorum, start, staleness),
        "held": [
            [at[w.asked.server, w.asked.key], w.node, w.begin, _finite(w.end)]
            for w in waits
            if w.kind == "pull" and w.asked and w.end >= start
        ],
        "updates": [
            [at[u.server, u.key], u.version, u.begin, u.end, list(u.late.items())]
            for u in _recent(story.updates, start)
        ],
        "versions": [v for v in _versions(story, at) if v[3] is None or v[3] > start],
        "status": _lasting(_from(doing, start)),
        "present": [
            [r.node, r.run, r.arrived, _finite(story.over(r.run))]
            for r in story.requests
            if r.op is Op.REGISTER and r.arrived is not None
        ],
        "staleness": staleness,
        "base": _sums(order[:first], story, start, staleness),
    }


def _names(trace: EventLog, story: Story) -> dict[int, str]:
    about = {int(rank): a for rank, a in trace.meta.get("ranks", {}).items()}
    return {
        rank: clean(str(about.get(rank, {}).get("name") or f"rank {rank}"))
        for rank in {*about, *story.roles}
    }


def _finite(time: float) -> float | None:
    return time if math.isfinite(time) else None


def _rows(story: Story) -> list[tuple[int, str]]:
    """Every key on every server that was ever asked for it, in the order of asking."""
    places = {
        (r.server, r.key): r.nbytes
        for r in story.requests
        if r.op is not Op.REGISTER and not r.optimizer
    }
    return list(dict.fromkeys([*places, *((u.server, u.key) for u in story.updates)]))


# -- places -----------------------------------------------------------------------------


def _drawn(story: Story, rows: list[tuple[int, str]], names: dict[int, str], quorum: int) -> Json:
    """The layout of the picture."""
    servers, workers, others = (story.of(role) for role in ("server", "worker", "scheduler"))
    width = layout.FIELD if others or len(servers) > layout.MAX_SERVERS else layout.WIDTH
    keys = Counter(server for server, _ in rows)
    cards = layout.cards(servers, keys, width)
    top = cards[0]["y"] + cards[0]["h"] + layout.AISLE if cards else 80
    people = layout.people(workers, top, width)
    for one in (*cards, *people):
        one["name"] = names[one["rank"]]
    scheduler = (
        [
            {
                "rank": others[0],
                "name": "scheduler",
                "x": layout.WIDTH - 66,
                "y": top - layout.AISLE / 2 - 14,
            }
        ]
        if others
        else []
    )
    return {
        "cards": cards,
        "workers": people,
        "scheduler": scheduler,
        "stubs": layout.stubs(servers, workers, top, width),
        "rows": _placed(story, rows, {c["rank"]: c for c in cards}, quorum),
        "everybody": len(servers) + len(workers),
        "quorum": quorum,
        "team": workers if quorum == len(workers) > 1 else [],
    }


def _placed(
    story: Story, rows: list[tuple[int, str]], cards: dict[int, Json], quorum: int
) -> list[Json]:
    """The rows, with how big the value is and which part of it this server has."""
    size: Counter[tuple[int, str]] = Counter()
    for r in story.requests:
        at = r.server, r.key
        size[at] = max(size[at], r.nbytes if r.op is not Op.PULL else r.nbytes_back)
    parts: dict[str, list[int]] = {}
    for server, key in sorted(rows):
        parts.setdefault(key, []).append(server)
    nth: Counter[int] = Counter()
    found = []
    for server, key in rows:
        mine = parts[key]
        part = [mine.index(server) + 1, len(mine)] if len(mine) > 1 else None
        place = (
            layout.row(cards[server], nth[server], quorum) if server in cards else {"shown": False}
        )
        nth[server] += 1
        found.append(
            {
                "server": server,
                "key": clean(key),
                "nbytes": size[server, key],
                "part": part,
                **place,
            }
        )
    return found


# -- intervals --------------------------------------------------------------------------


def _gradients(
    story: Story,
    at: dict[tuple[int, str], int],
    quorum: dict[int, int],
    start: float,
    staleness: Json,
) -> list[list[object]]:
    """Row, worker, from when to when in the inbox, slot, from which version, bin of staleness."""
    slots = {w: i for i, w in enumerate(story.of("worker"))}
    whole = max(quorum.values(), default=1)
    found: list[list[object]] = []
    busy: dict[int, dict[int, float]] = {}  # until when each slot of a row is taken
    for g in story.gradients:
        row, until = at[g.push.server, g.push.key], min(g.taken or math.inf, story.over(g.push.run))
        mine = busy.setdefault(row, {})
        slot = slots.get(g.push.node, 0)
        if whole < len(slots):
            free = (i for i in range(whole) if mine.get(i, -math.inf) <= g.arrived)
            slot = next(free, whole - 1)
        mine[slot] = until
        if until >= start:
            found.append(
                [
                    row,
                    g.push.node,
                    g.arrived,
                    _finite(until),
                    slot,
                    g.push.version,
                    bin_of(staleness, g.late),
                ]
            )
    return found


def _versions(story: Story, at: dict[tuple[int, str], int]) -> list[list[Any]]:
    """Row, version, from when to when, and whose gradients the update took: [worker, late]."""
    given: dict[tuple[int, int], float] = {}  # when each row got its first value, in each run
    for r in story.requests:
        row = at.get((r.server, r.key))
        lost = r.failed is not None and (r.refused or r.left is None)
        if row is None or r.arrived is None or lost or (r.op is Op.INIT and not r.whole):
            continue
        given[r.run, row] = min(given.get((r.run, row), math.inf), r.arrived)
    changes: list[tuple[float, int, int, int, list[tuple[int, int]]]]
    changes = [(time, run, row, 0, []) for (run, row), time in given.items()]
    for u in story.updates:
        if u.end is not None:
            changes.append((u.end, u.run, at[u.server, u.key], u.version, list(u.late.items())))
    over = {run: _finite(story.over(run)) for run in story.begins}
    found: list[list[Any]] = []
    last: dict[int, tuple[int, list[Any]]] = {}
    for time, run, place, version, late in sorted(changes):
        before, entry = last.get(place, (-1, [place, 0, time, None]))
        if version == 0 and before == run:
            continue  # it has one: the server's note of the first came later
        entry[3] = time if entry[3] is None else min(entry[3], time)
        found.append([place, version, time, over.get(run), late])
        last[place] = run, found[-1]
    return found


def _from(status: Sequence[Status], start: float) -> list[Status]:
    """The statuses since a time, and the last one before it of each node."""
    before = {s.node: s for s in status if s.time <= start}
    return [*before.values(), *(s for s in status if s.time > start)]


def _lasting(status: list[Status]) -> list[list[Any]]:
    """Node, kind, from when to when, text, and whom it waits for."""
    found, last = [], dict[int, list[Any]]()
    for s in status:
        if s.node in last:
            last[s.node][3] = s.time
        last[s.node] = [s.node, s.kind, s.time, None, s.text, list(s.awaited)]
        found.append(last[s.node])
    return found


def _recent(updates: list[Update], start: float) -> list[Update]:
    """The updates since a time, and the last one before it of each key."""
    old = {u.place: u for u in updates if u.end is not None and u.end < start}
    return [*old.values(), *(u for u in updates if u.end is None or u.end >= start)]


def _sums(done: Iterable[Beat], story: Story, start: float, staleness: Json) -> Json:
    """Counts of the beats that are not drawn, and of the gradients applied before."""
    pushes = pulls = updates = there = back = 0
    for b in done:
        if b.end is None:
            continue
        pushes, pulls = pushes + (b.kind == "push"), pulls + (b.kind == "weights")
        updates += isinstance(b.of, Update)
        size = nbytes(b)
        there, back = there + size * (b.kind == "push"), back + size * (b.kind == "weights")
    late = Counter(
        bin_of(staleness, g.late)
        for g in story.gradients
        if g.taken is not None and g.taken < start
    )
    return {
        "pushes": pushes,
        "pulls": pulls,
        "updates": updates,
        "there": there,
        "back": back,
        "late": [late[n] for n in range(len(staleness["labels"]))],
    }


def _opening(waits: list[Wait], story: Story, start: float, end: float) -> float:
    """A moment that tells what this run is like.

    Somebody who never gets an answer, or a refusal: when it has asked. Else when the most stale
    gradient has been applied, if possible while nobody waits; else where most gradients and pulls
    wait longest.
    """
    pulls = [w for w in waits if w.kind == "pull" and w.end >= start]
    if stuck := [w for w in pulls if w.asked and (w.asked.unanswered or w.asked.refused)]:
        return max(w.begin for w in stuck)
    taken = {(u.place, u.begin): u.end or u.begin for u in story.updates}
    late = [
        (g.late, taken[g.push.place, g.taken])
        for g in story.gradients
        if g.late and g.taken is not None and g.taken >= start
    ]
    begins, ends = sorted(w.begin for w in waits), sorted(w.end for w in waits)
    calm = [one for one in late if bisect_right(begins, one[1]) == bisect_right(ends, one[1])]
    if late:
        return max(calm or late, key=lambda one: (one[0], -one[1]))[1]
    steps = [step for w in pulls for step in ((w.begin, 2), (w.end, -2))]
    for g in story.gradients:
        until = min(end if g.taken is None else g.taken, story.over(g.push.run))
        steps += [(g.arrived, 1), (until, -1)] if until >= start else []
    return _fullest(steps, end)


def _fullest(steps: list[tuple[float, int]], end: float) -> float:
    """The begin of the stretch in which the running sum of the steps, squared, lasts longest."""
    steps.sort()
    here, most, best = 0, 0.0, end
    for (time, more), (after, _) in pairwise([*steps, (end, 0)]):
        here += more
        if here * here * (after - time) > most:
            most, best = here * here * (after - time), time
    return best


# -- words ------------------------------------------------------------------------------


def _facts(trace: EventLog, story: Story) -> list[str]:
    modes = dict.fromkeys(r.key for r in story.requests if r.op is Op.REGISTER and r.key)
    roles = [(len(story.of(role)), role) for role in ("worker", "server")]
    return [
        *(clean(mode) for mode in modes),
        *(count(n, role) for n, role in roles if n),
        *([str(trace.meta["device"])] if trace.meta.get("device") else []),
    ]


def _said(story: Story, quorum: dict[int, int]) -> str:
    """The rule by which this run's servers decide, in a sentence."""
    workers, most = len(story.of("worker")), max(quorum.values(), default=0)
    known = story.updates or any(r.op is Op.REGISTER and r.key for r in story.requests)
    if not known or not workers:
        return ""
    bounds = [rule.staleness for rule in story.rules.values() if rule.staleness is not None]
    if most <= 1 and workers > 1 and bounds:
        ahead = count(max(bounds), "gradient")
        return (
            f"Each gradient is applied when it arrives. A pull waits while a worker is more "
            f"than {ahead} behind."
        )
    if most <= 1 and workers > 1:
        return (
            "Each gradient is applied when it arrives: no worker waits. A gradient is late when "
            "others updated the value after its worker had pulled it."
        )
    if most == workers > 1:
        return (
            f"An update takes one gradient of each of the {workers} workers. They are collected "
            "in the inbox of their key, and pulls wait for the update."
        )
    late = " of a round. Later ones are not counted." if most > 1 else "."
    return f"An update takes the first {count(most, 'gradient')}{late}"


def _notices(
    trace: EventLog,
    story: Story,
    waits: list[Wait],
    order: list[Beat],
    first: int,
    names: dict[int, str],
    live: bool,
) -> list[str]:
    refused = sum(r.refused for r in story.requests)
    dropped = sum(r.dropped for r in story.requests)
    stuck = [w for w in waits if w.kind == "pull" and w.asked and w.asked.unanswered]
    lost = sum(b.end is None and b.kind != "barrier" and not answered(b) for b in order)
    whole = len(order)
    dead = [
        names[int(r)]
        for r, a in trace.meta.get("ends", {}).items()
        if a.get("how") == "died" and int(r) in names
    ]
    again = [str(r["name"]) for r in trace.meta.get("replaced", ())]
    servers = [name for rank in story.of("server") if (name := names[rank]) in (*dead, *again)]
    found = [
        (f"{', '.join(dead)} died", dead),
        (f"{', '.join(again)} died and had to be replaced", again),
        (
            f"what {' and '.join(servers)} recorded last may be missing: counts may be too low",
            servers,
        ),
        (f"{count(len(stuck), 'pull')} never answered", stuck and not live),
        (f"{count(lost, 'message')} not arrived", lost and not live),
        (f"{count(refused, 'request')} refused", refused),
        (f"{count(dropped, 'gradient')} came too late: not counted", dropped),
        (f"{count(trace.dropped, 'event')} dropped: the recorder's buffer was full", trace.dropped),
        (f"the last {whole - first:,} of {whole:,} messages and updates are shown", first),
    ]
    return [words for words, shown in found if shown]
