"""Mistakes that cause no hang: forgotten waits, lost messages, slow ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from distkit.diagnosis import groups, requests, rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding
from distkit.diagnosis.kvstore import incomplete
from distkit.diagnosis.rank_state import Doing
from distkit.events import P2P, Op, Span, State

#: A rank is a straggler when the others waited for it at least so long [s], and such a share
#: of the run; and when it came last so often, and to such a share of the collectives.
_LONG, _SHARE = 0.1, 0.2
_OFTEN, _MOSTLY = 3, 0.75

#: A busy machine delays a rank by some milliseconds each time; a straggler is later [s].
_EACH = 0.03

#: A message whose sender has left without waiting is lost when it has not come after this
#: long [s] and at so many bytes per second.
_LOST, _SLOW = 1.0, 1e8


def remarks(facts: Evidence, told: list[Finding]) -> Iterator[Finding]:
    """Remarks that explain no hang, mistakes first; none that has been ``told``."""
    open_still = requests.never_waited(facts)
    forgotten = {(s.rank, s.seq) for s in open_still}
    yield from requests.used_early(facts, forgotten)
    yield from (f for f in _forgotten(facts, open_still) if not _is_told(f, told))
    yield from incomplete(facts)
    yield from _strangers(facts)
    yield from groups.remarks(facts, told, forgotten)
    in_backend = [] if told else [*_in_backend(facts)]  # else that is why
    yield from _awaited(facts, {rank for finding in in_backend for rank in finding.waiting})
    yield from in_backend
    yield from _late(facts)


def _is_told(finding: Finding, told: list[Finding]) -> bool:
    return any(finding.lines.items() <= other.lines.items() for other in told)


def _forgotten(facts: Evidence, open_still: list[Span]) -> Iterator[Finding]:
    """Messages without an end, and asynchronous calls that nobody waited for."""
    alone = [s for s in facts.alone if facts.returned(s.rank) and facts.returned(s.peer)]
    yield from map(_without_end, alone)
    lost = {s: finding for s in open_still if s.op in P2P and (finding := _left_behind(facts, s))}
    yield from (finding for s, finding in lost.items() if s not in alone)
    yield from requests.forgotten(facts, [s for s in open_still if s not in (*alone, *lost)])


def _left_behind(facts: Evidence, mine: Span) -> Finding | None:
    """A request that its rank has left behind, if the message is lost with it."""
    other = next((b if a is mine else a for a, b in facts.pairs if mine in (a, b)), None)
    if other is None or not _waits_long(facts, other):
        return None
    return rules.left_behind.finding(
        mine, culprits=[mine.rank], waiting=[other.rank], hang=True, mine=mine, other=other
    )


def _without_end(mine: Span) -> Finding:
    rule = rules.never_received if mine.op is Op.SEND else rules.never_sent
    gone = [mine.peer] if mine.peer is not None else []
    return rule.finding(mine, culprits=[mine.rank], missing=gone, mine=mine, gone=gone, one_of="")


def _strangers(facts: Evidence) -> Iterator[Finding]:
    """Collectives that ranks called on groups of others."""
    calls = {(s.rank, s.op, s.where): s for s in facts.strangers}.values()
    ranks = sorted({s.rank for s in calls})
    if ranks:
        yield rules.not_a_member.finding(*calls, culprits=ranks, here=Calls(calls), ranks=ranks)


# -- slow ranks --------------------------------------------------------------------------


def _awaited(facts: Evidence, in_backend: set[int]) -> Iterator[Finding]:
    """Ranks that others wait for at the moment, and that still compute: they may yet come."""
    waiting: dict[int, list[Span]] = defaultdict(list)
    for rank in facts.ranks:
        standing = facts.board.standing(rank)
        if standing.doing is Doing.BLOCKED and rank not in facts.stuck:
            for other in standing.waits_for:
                waiting[other].append(facts.span(standing))
    slow = {r: s for r, s in waiting.items() if facts.runs(r) and r not in in_backend}
    for rank, spans in slow.items():
        yield rules.straggler.finding(
            *spans,
            culprits=[rank],
            waiting=[s.rank for s in spans],
            here=Calls(spans),
            rank=rank,
            is_="was" if rank in facts.held else "is",
        )


def _late(facts: Evidence) -> Iterator[Finding]:
    """The rank that came last to the collectives again and again, when that cost much.

    The first collective of a group, and the worst delay of a rank, may be due to the start alone:
    to the first import of a module, say. And making groups is no work that is shared out. Calls
    made before an earlier one has ended are late by the same delay: nobody waits for each.
    """
    lost: dict[int, list[float]] = defaultdict(list)
    total = 0
    for group, calls in facts.calls.items():
        if len(calls) < len(facts.members(group)):
            continue
        for before, column in pairwise(zip(*calls.values(), strict=False)):
            starts = sorted((s.start, s.rank) for s in column)
            in_turn = all(
                p.end is not None and p.end <= s.start for p, s in zip(before, column, strict=True)
            )
            if in_turn and len(starts) > 1 and column[0].op is not Op.NEW_GROUP:
                total += 1
                lost[starts[-1][1]].append(starts[-1][0] - starts[(len(starts) - 1) // 2][0])
    again = {r: sum(sorted(delays)[:-1]) for r, delays in lost.items()}
    slowest = max(again, key=lambda r: again[r], default=-1)
    came, seconds = len(lost.get(slowest, [])), again.get(slowest, 0.0)
    if not came or median(lost[slowest]) < _EACH:
        return
    if came < max(_OFTEN, _MOSTLY * total) or seconds < max(_LONG, _SHARE * facts.trace.seconds):
        return
    yield rules.late_again.finding(
        culprits=[slowest], rank=slowest, came=came, total=total, seconds=sum(lost[slowest])
    )


# -- nobody is missing ---------------------------------------------------------------------


def _in_backend(facts: Evidence) -> Iterator[Finding]:
    """Operations whose partners have all come, and that do not end."""
    together: dict[str, list[Span]] = defaultdict(list)
    for rank in facts.ranks:
        mine = _in_which(facts, rank)
        if mine is not None and mine.match is None and rank not in facts.stuck:
            match = facts.trace.matches.get((rank, mine.seq))
            if match is not None and facts.runs(rank) and _waits_long(facts, mine):
                together[match].append(mine)
    for spans in together.values():
        yield rules.in_backend.finding(
            *spans,
            waiting=[s.rank for s in spans],
            here=Calls(spans, facts.call),
            seconds=max(_waited(facts, s) for s in spans),
            network=_cut(facts, spans),
        )


def _in_which(facts: Evidence, rank: int) -> Span | None:
    """The operation that a rank waits in, perhaps an earlier one than its latest."""
    mine = [s for s in facts.by_key.values() if s.rank == rank]
    return max(mine, key=lambda s: (s.state is State.BLOCKED, s.seq), default=None)


def _cut(facts: Evidence, spans: list[Span]) -> str:
    """The network as a cause, where ranks of several hosts take part."""
    peers = {r for s in spans for r in ([s.peer] if s.peer is not None else facts.members(s.group))}
    known = facts.trace.hosts
    hosts = sorted({known[rank] for rank in peers | {s.rank for s in spans} if rank in known})
    if len(hosts) < 2:
        return ""
    return rules.in_backend.say("network", hosts=",".join(hosts))


def _waits_long(facts: Evidence, span: Span) -> bool:
    """True if a rank has waited longer than any transfer takes."""
    held = span.state is State.BLOCKED or (span.state is State.FAILED and span.rank in facts.held)
    return held and _waited(facts, span) > _LOST + span.nbytes / _SLOW


def _waited(facts: Evidence, span: Span) -> float:
    return (span.end or facts.trace.info.until or 0.0) - span.start
