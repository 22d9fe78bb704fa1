"""Mistakes that cause no hang: missing waits, lost messages, slow ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from distkit.diagnosis import groups, requests, rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding
from distkit.diagnosis.kvstore import incomplete
from distkit.diagnosis.rank_state import RankStatus
from distkit.events import P2P, Op, Span, State

#: Thresholds for a straggler: time for which others waited for it [s], and fraction of the run;
#: number of collectives to which it came last, and fraction of all collectives.
_MIN_SECONDS, _MIN_SHARE = 0.1, 0.2
_MIN_TIMES, _MIN_RATE = 3, 0.75

#: Minimum median delay of a straggler [s]; a busy machine causes delays of milliseconds.
_MIN_DELAY = 0.03

#: A message counts as lost after this time [s] plus its size at this bandwidth [bytes/s].
_LOST_AFTER, _MIN_BANDWIDTH = 1.0, 1e8


def lint_findings(facts: Evidence, previous: list[Finding]) -> Iterator[Finding]:
    """Find problems that cause no hang, mistakes first, except those in ``previous``."""
    open_still = requests.never_waited(facts)
    forgotten = {(s.rank, s.seq) for s in open_still}
    yield from requests.used_early(facts, forgotten)
    yield from (f for f in _forgotten(facts, open_still) if not _is_reported(f, previous))
    yield from incomplete(facts)
    yield from _nonmembers(facts)
    yield from groups.remarks(facts, previous, forgotten)
    in_backend = [] if previous else [*_in_backend(facts)]
    yield from _slow_ranks(facts, {rank for finding in in_backend for rank in finding.waiting})
    yield from in_backend
    yield from _stragglers(facts)


def _is_reported(finding: Finding, previous: list[Finding]) -> bool:
    return any(finding.lines.items() <= other.lines.items() for other in previous)


def _forgotten(facts: Evidence, open_still: list[Span]) -> Iterator[Finding]:
    """Find unmatched messages, and asynchronous calls that were never waited for."""
    unmatched = [s for s in facts.unmatched if facts.returned(s.rank) and facts.returned(s.peer)]
    yield from map(_unmatched_finding, unmatched)
    lost = {s: finding for s in open_still if s.op in P2P and (finding := _lost_request(facts, s))}
    yield from (finding for s, finding in lost.items() if s not in unmatched)
    yield from requests.forgotten(facts, [s for s in open_still if s not in (*unmatched, *lost)])


def _lost_request(facts: Evidence, mine: Span) -> Finding | None:
    """Return a finding about a request whose message was lost when its rank ended."""
    other = next((b if a is mine else a for a, b in facts.pairs if mine in (a, b)), None)
    if other is None or not _waits_long(facts, other):
        return None
    return rules.left_behind.finding(
        mine, culprits=[mine.rank], waiting=[other.rank], hang=True, mine=mine, other=other
    )


def _unmatched_finding(mine: Span) -> Finding:
    rule = rules.never_received if mine.op is Op.SEND else rules.never_sent
    gone = [mine.peer] if mine.peer is not None else []
    return rule.finding(mine, culprits=[mine.rank], missing=gone, mine=mine, gone=gone, one_of="")


def _nonmembers(facts: Evidence) -> Iterator[Finding]:
    """Find collectives that ranks called on groups they do not belong to."""
    calls = {(s.rank, s.op, s.where): s for s in facts.calls_of_nonmembers}.values()
    ranks = sorted({s.rank for s in calls})
    if ranks:
        yield rules.not_a_member.finding(*calls, culprits=ranks, here=Calls(calls), ranks=ranks)


# -- slow ranks --------------------------------------------------------------------------


def _slow_ranks(facts: Evidence, in_backend: set[int]) -> Iterator[Finding]:
    """Find ranks that others wait for and that still compute."""
    waiting: dict[int, list[Span]] = defaultdict(list)
    for rank in facts.ranks:
        standing = facts.graph.standing(rank)
        if standing.doing is RankStatus.BLOCKED and rank not in facts.stuck:
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
            is_="was" if rank in facts.released else "is",
        )


def _stragglers(facts: Evidence) -> Iterator[Finding]:
    """Find a rank that repeatedly came last to collectives at a significant cost.

    The first collective of a group and the worst delay of a rank are ignored, since they may be due
    to startup, such as imports. So are new groups, and calls made before the previous one has
    ended, which share one delay.
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
    if not came or median(lost[slowest]) < _MIN_DELAY:
        return
    if came < max(_MIN_TIMES, _MIN_RATE * total) or seconds < max(
        _MIN_SECONDS, _MIN_SHARE * facts.trace.seconds
    ):
        return
    yield rules.late_again.finding(
        culprits=[slowest], rank=slowest, came=came, total=total, seconds=sum(lost[slowest])
    )


# -- operations stuck in the backend -----------------------------------------------------------


def _in_backend(facts: Evidence) -> Iterator[Finding]:
    """Find operations that do not complete although all partners have arrived."""
    by_match: dict[str, list[Span]] = defaultdict(list)
    for rank in facts.ranks:
        span = _current_operation(facts, rank)
        if span is not None and span.match is None and rank not in facts.stuck:
            match = facts.trace.matches.get((rank, span.seq))
            if match is not None and facts.runs(rank) and _waits_long(facts, span):
                by_match[match].append(span)
    for spans in by_match.values():
        yield rules.in_backend.finding(
            *spans,
            waiting=[s.rank for s in spans],
            here=Calls(spans, facts.call),
            seconds=max(_waited(facts, s) for s in spans),
            network=_network_hint(facts, spans),
        )


def _current_operation(facts: Evidence, rank: int) -> Span | None:
    """Return the operation that a rank waits in, or else its latest."""
    spans = [s for s in facts.by_key.values() if s.rank == rank]
    return max(spans, key=lambda s: (s.state is State.BLOCKED, s.seq), default=None)


def _network_hint(facts: Evidence, spans: list[Span]) -> str:
    """Return a hint about the network if ranks of several hosts take part."""
    peers = {r for s in spans for r in ([s.peer] if s.peer is not None else facts.members(s.group))}
    known = facts.trace.hosts
    hosts = sorted({known[rank] for rank in peers | {s.rank for s in spans} if rank in known})
    if len(hosts) < 2:
        return ""
    return rules.in_backend.say("network", hosts=",".join(hosts))


def _waits_long(facts: Evidence, span: Span) -> bool:
    """Return whether a rank has waited longer than any transfer takes."""
    held = span.state is State.BLOCKED or (
        span.state is State.FAILED and span.rank in facts.released
    )
    return held and _waited(facts, span) > _LOST_AFTER + span.nbytes / _MIN_BANDWIDTH


def _waited(facts: Evidence, span: Span) -> float:
    return (span.end or facts.trace.info.until or 0.0) - span.start
