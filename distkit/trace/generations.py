"""Runs whose ranks were all started anew, as torchrun's agents do when one has ended. Pure.

Each generation has its own processes and process groups. In the trace of the whole, a rank's
operations are numbered from a multiple of :data:`~distkit.trace.operations.APART`, the groups of
the earlier generations have names of their own, and ``meta["generations"]`` has the facts of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distkit.events import COLLECTIVES, P2P, Event, Op, State
from distkit.trace.log import EventLog
from distkit.trace.operations import APART

Meta = dict[str, Any]

#: The facts that each generation has of its own.
_OF_CALLS = "raising", "unreduced", "unused", "unwaited"
_OWN = "world_size", "groups", "ends", "began", "until", *_OF_CALLS
_IN_GROUPS = COLLECTIVES | P2P


def join(parts: Sequence[EventLog]) -> tuple[list[Event], Meta]:
    """The events and the facts of a run, from those of its generations in their order.

    Args:
        parts: ``meta["began"]`` of each has the time at which each rank's process began, its
            ``"ends"`` that at which it ended.

    >>> first = EventLog([Event(0, 0, Op.BARRIER, State.STARTED, 1.0)], {"began": {"0": 0.5},
    ...     "ends": {"0": {"how": "died", "text": "signal SIGKILL", "time": 1.5}}, "until": 1.5})
    >>> again = EventLog([Event(0, 0, Op.BARRIER, State.STARTED, 3.0)], {"began": {"0": 2.0}})
    >>> events, meta = join([first, again])
    >>> [(e.label or str(e.state), e.group, e.time) for e in sorted(events, key=lambda e: e.time)]
    [('started', 'world (generation 0)', 1.0), ('failed', 'world (generation 0)', 1.5),
     ('generation 1: rank 0 died (signal SIGKILL)', 'world', 1.5),
     ('generation 1: rank 0 died (signal SIGKILL)', 'world', 2.0), ('started', 'world', 3.0)]
    >>> [len(part) for part in split(EventLog(events, meta))]
    [4, 1]
    """
    if len(parts) == 1:
        return list(parts[0].events), dict(parts[0].meta)
    events, groups = list[Event](), dict[str, list[int]]()
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        rename = {} if is_last else {name: _renamed(name, number) for name in _groups(part)}
        groups |= {rename.get(name, name): ranks for name, ranks in _groups(part).items()}
        its = list(part.events) if is_last else [*part.events, *_cut_short(part)]
        its += [] if is_last else _until_next(part, parts[number + 1], number + 1)
        events += (_moved(e, number * APART, rename) for e in its)
    meta = {n: fact for n, fact in parts[-1].meta.items() if n not in _OF_CALLS}
    meta["groups"] = groups
    meta["generations"] = [{n: p.meta[n] for n in _OWN if n in p.meta} for p in parts]
    meta["ranks"] = {r: about for p in parts for r, about in p.meta.get("ranks", {}).items()}
    meta["sources"] = {f: text for p in parts for f, text in p.meta.get("sources", {}).items()}
    meta["replaced"] = [one for p in parts[:-1] for one in _dead(p)]
    return events, meta


def split(trace: EventLog) -> list[EventLog]:
    """The generations of a run, each as if it were alone; the trace itself if there is only one."""
    facts = trace.meta.get("generations", [])
    if len(facts) < 2:
        return [trace]
    events: list[list[Event]] = [[] for _ in facts]
    for e in trace.events:
        events[min(e.seq // APART, len(facts) - 1)].append(e)
    parts = []
    for number, (its, own) in enumerate(zip(events, facts, strict=True)):
        rename = {_renamed(name, number): name for name in own.get("groups", {})}
        meta = {n: fact for n, fact in trace.meta.items() if n not in {*_OWN, "generations"}}
        ranks = own.get("began", {})
        meta["ranks"] = {r: about for r, about in meta.get("ranks", {}).items() if r in ranks}
        moved = [_moved(e, -number * APART, rename) for e in its]
        parts.append(EventLog(moved, {**meta, **own}))
    return parts


def _groups(part: EventLog) -> dict[str, list[int]]:
    """The groups of a generation, with the world, which it may have no facts of."""
    known: dict[str, list[int]] = part.meta.get("groups", {})
    return {e.group: [] for e in part.events if e.op in _IN_GROUPS and e.group} | known


def _renamed(group: str, number: int) -> str:
    return f"{group} (generation {number})"


def _moved(e: Event, by: int, rename: Mapping[str, str]) -> Event:
    group = rename.get(e.group, e.group) if e.op in _IN_GROUPS else e.group
    return replace(e, seq=e.seq + by, group=group)


def _cut_short(part: EventLog) -> Iterator[Event]:
    """The operations that the ranks were in fail: their processes have ended."""
    latest = {(e.rank, e.seq): e for e in part.events}
    for e in latest.values():
        if e.state not in (State.COMPLETED, State.FAILED):
            yield replace(
                e, state=State.FAILED, time=max(e.time, _ended(part, e.rank)), summary=None
            )


def _ended(part: EventLog, rank: int) -> float:
    """When the process of a rank has ended, as far as that is known [s]."""
    end = part.meta.get("ends", {}).get(str(rank), {})
    return float(end.get("time", part.meta.get("until", 0.0)))


def _dead(part: EventLog) -> list[Meta]:
    """The ranks that ended a generation, the first to go first."""
    ends = part.meta.get("ends", {})
    those = [r for how in ("died", "raised") for r, end in ends.items() if end["how"] == how]
    gone = [
        {"node": int(r), "name": f"rank {r}", "how": ends[r]["text"], "time": _ended(part, int(r))}
        for r in those
        if ends[r]["how"] == ends[those[0]]["how"]  # who raised when one died raised because of it
    ]
    return sorted(gone, key=lambda one: float(one["time"]))


def _until_next(part: EventLog, after: EventLog, number: int) -> Iterator[Event]:
    """A mark per rank, from the end of its process to the beginning of the next one."""
    dead = _dead(part)
    why = f"{dead[0]['name']} died ({dead[0]['how']})" if dead else "the ranks were started anew"
    if dead and part.meta["ends"][str(dead[0]["node"])]["how"] == "raised":
        why = f"{dead[0]['name']} raised {dead[0]['how']}"
    told = {"label": f"generation {number}: {why}"}
    before = part.meta.get("began", {})
    for rank, began in after.meta.get("began", {}).items():
        if rank not in before:
            continue
        left = min(_ended(part, int(rank)), began)
        for state, at in ((State.STARTED, left), (State.COMPLETED, began)):
            yield Event(int(rank), APART - 1, Op.MARK, state, at, attributes=told)
