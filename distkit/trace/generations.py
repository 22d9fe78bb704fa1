"""Runs whose ranks were all started anew, as torchrun's agents do when one has ended. Pure.

Each generation has its own processes and process groups. In the trace of the whole, a rank's
operations are numbered from a multiple of :data:`~distkit.trace.info.APART`, the groups of
the earlier generations have names of their own, and ``info.generations`` has the facts of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from distkit.events import COLLECTIVES, P2P, Event, Op, State
from distkit.trace.info import APART, GenerationInfo, Replacement, RunInfo
from distkit.trace.log import EventLog

_IN_GROUPS = COLLECTIVES | P2P


def join(parts: Sequence[EventLog]) -> tuple[list[Event], RunInfo]:
    """The events and the facts of a run, from those of its generations in their order.

    Args:
        parts: ``info.began`` of each has the time at which each rank's process began, its
            ``ends`` that at which it ended.

    >>> from distkit.trace.info import RankEnd
    >>> died = RunInfo(began={0: 0.5}, ends={0: RankEnd("died", "signal SIGKILL", time=1.5)})
    >>> first = EventLog([Event(0, 0, Op.BARRIER, State.STARTED, 1.0)], died)
    >>> again = EventLog([Event(0, 0, Op.BARRIER, State.STARTED, 3.0)], RunInfo(began={0: 2.0}))
    >>> events, info = join([first, again])
    >>> [(e.label or str(e.state), e.group, e.time) for e in sorted(events, key=lambda e: e.time)]
    [('started', 'world (generation 0)', 1.0), ('failed', 'world (generation 0)', 1.5),
     ('generation 1: rank 0 died (signal SIGKILL)', 'world', 1.5),
     ('generation 1: rank 0 died (signal SIGKILL)', 'world', 2.0), ('started', 'world', 3.0)]
    >>> [len(part) for part in split(EventLog(events, info))]
    [4, 1]
    """
    if len(parts) == 1:
        return list(parts[0].events), parts[0].info
    events, groups = list[Event](), dict[str, list[int]]()
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        rename = {} if is_last else {name: _renamed(name, number) for name in _groups(part)}
        groups |= {rename.get(name, name): ranks for name, ranks in _groups(part).items()}
        its = list(part.events) if is_last else [*part.events, *_cut_short(part)]
        its += [] if is_last else _until_next(part, parts[number + 1], number + 1)
        events += (_moved(e, number * APART, rename) for e in its)
    return events, structs.replace(
        parts[-1].info,
        groups=groups,
        generations=[GenerationInfo(**p.info.own) for p in parts],
        ranks={r: about for p in parts for r, about in p.info.ranks.items()},
        sources={f: text for p in parts for f, text in p.info.sources.items()},
        replaced=[one for p in parts[:-1] for one in _dead(p)],
        raising={},
        unreduced=None,
        unused={},
        unwaited={},
    )


def split(trace: EventLog) -> list[EventLog]:
    """The generations of a run, each as if it were alone; the trace itself if there is only one."""
    facts = trace.info.generations
    if len(facts) < 2:
        return [trace]
    events: list[list[Event]] = [[] for _ in facts]
    for e in trace.events:
        events[min(e.seq // APART, len(facts) - 1)].append(e)
    parts = []
    for number, (its, own) in enumerate(zip(events, facts, strict=True)):
        rename = {_renamed(name, number): name for name in own.groups}
        ranks = {r: about for r, about in trace.info.ranks.items() if r in own.began}
        moved = [_moved(e, -number * APART, rename) for e in its]
        facts_of_one = {**structs.asdict(own), "ranks": ranks, "generations": []}
        parts.append(EventLog(moved, structs.replace(trace.info, **facts_of_one)))
    return parts


def _groups(part: EventLog) -> dict[str, list[int]]:
    """The groups of a generation, with the world, which it may have no facts of."""
    found: dict[str, list[int]] = {
        e.group: [] for e in part.events if e.op in _IN_GROUPS and e.group
    }
    return found | part.info.groups


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
    end = part.info.ends.get(rank)
    known = part.info.until if end is None or end.time is None else end.time
    return known or 0.0


def _dead(part: EventLog) -> list[Replacement]:
    """The ranks that ended a generation, the first to go first."""
    ends = part.info.ends
    those = [r for how in ("died", "raised") for r, end in ends.items() if end.how == how]
    gone = [
        Replacement(r, f"rank {r}", ends[r].text, _ended(part, r))
        for r in those
        if ends[r].how == ends[those[0]].how  # who raised when one died raised because of it
    ]
    return sorted(gone, key=lambda one: one.time)


def _until_next(part: EventLog, after: EventLog, number: int) -> Iterator[Event]:
    """A mark per rank, from the end of its process to the beginning of the next one."""
    dead = _dead(part)
    why = f"{dead[0].name} died ({dead[0].how})" if dead else "the ranks were started anew"
    if dead and part.info.ends[dead[0].node].how == "raised":
        why = f"{dead[0].name} raised {dead[0].how}"
    told = {"label": f"generation {number}: {why}"}
    for rank, began in after.info.began.items():
        if rank not in part.info.began:
            continue
        left = min(_ended(part, rank), began)
        for state, at in ((State.STARTED, left), (State.COMPLETED, began)):
            yield Event(rank, APART - 1, Op.MARK, state, at, attributes=told)
