"""Mistakes that do not cause a hang: missing waits, lost messages, slow ranks. No side effects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import median

from distkit._format import named
from distkit.diagnosis import groups, rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding, request_name
from distkit.diagnosis.rank_state import RankStatus
from distkit.events import P2P, Op, Span, State
from distkit.trace.calls import at, call
from distkit.trace.info import several
from distkit.trace.log import grouped

#: Thresholds for a straggler: the time that others waited for it [s] and its fraction of the run;
#: the number of collectives that it reached last and their fraction of all collectives.
_MIN_SECONDS, _MIN_SHARE = 0.1, 0.2
_MIN_TIMES, _MIN_RATE = 3, 0.75

#: Minimum median delay of a straggler [s]; a busy machine causes delays of milliseconds.
_MIN_DELAY = 0.03

#: A message counts as lost after this time [s] plus its size at this bandwidth [bytes/s].
_LOST_AFTER, _MIN_BANDWIDTH = 1.0, 1e8


def lint_findings(facts: Evidence, previous: list[Finding]) -> Iterator[Finding]:
    """Find problems that do not cause a hang, mistakes first, except those in ``previous``."""
    unwaited = _never_waited(facts)
    forgotten = {(s.rank, s.seq) for s in unwaited}
    yield from _used_early_findings(facts, forgotten)
    yield from _forgotten(facts, unwaited)
    yield from _nonmembers(facts)
    yield from groups.remarks(facts, previous, forgotten)
    in_backend = [] if previous else [*_in_backend(facts)]
    yield from _slow_ranks(facts, {rank for finding in in_backend for rank in finding.waiting})
    yield from in_backend
    yield from _stragglers(facts)


def _forgotten(facts: Evidence, unwaited: list[Span]) -> Iterator[Finding]:
    """Find unmatched messages, and asynchronous calls that were never waited for."""
    unmatched = [s for s in facts.unmatched if facts.returned(s.rank) and facts.returned(s.peer)]
    yield from map(_unmatched_finding, unmatched)
    yield from _forgotten_calls(facts, [s for s in unwaited if s not in unmatched])


def _unmatched_finding(span: Span) -> Finding:
    rule = rules.never_received if span.op is Op.SEND else rules.never_sent
    gone = [span.peer] if span.peer is not None else []
    return rule.finding(span, culprits=[span.rank], missing=gone, span=span, gone=gone, one_of="")


def _nonmembers(facts: Evidence) -> Iterator[Finding]:
    """Find collectives that ranks called on groups they do not belong to."""
    calls = {(s.rank, s.op, s.where): s for s in facts.calls_of_nonmembers}.values()
    ranks = sorted({s.rank for s in calls})
    if ranks:
        yield rules.not_a_member.finding(*calls, culprits=ranks, here=Calls(calls), ranks=ranks)


# -- asynchronous calls ---------------------------------------------------------------------


def _used_early_findings(facts: Evidence, forgotten: set[tuple[int, int]]) -> Iterator[Finding]:
    """Find tensors that were used before ``wait()``, one finding per line.

    Args:
        facts: the evidence of the run.
        forgotten: ``(rank, seq)`` of calls never waited for, which already have a finding.
    """
    touched: dict[tuple[int, int], Span] = {}
    for touch in facts.trace.spans:
        key = _request(touch) if touch.op is Op.TOUCH else None
        if key is not None and key not in forgotten:
            touched[key] = touch

    def place(span: Span) -> tuple[str, Op]:
        touch = touched[span.rank, span.seq]
        is_late = touch.attributes.get("function") == ""  # detected only at the wait
        return "" if is_late else touch.where, span.op

    known = [facts.by_key[key] for key in touched if key in facts.by_key]
    for (where, _), spans in grouped(known, place).items():
        writes = all("writes" in touched[s.rank, s.seq].attributes for s in spans)
        yield _used_early(spans, writes, where)
    for s in facts.spans:
        if _is_changed(s) and (s.rank, s.seq) not in touched.keys() | forgotten:
            yield _used_early([s], writes=True, where="")


def _request(touch: Span) -> tuple[int, int] | None:
    """Return ``(rank, seq)`` of the call whose tensor was used."""
    known = touch.match is not None and touch.match.isdecimal()
    return (touch.rank, int(touch.match or 0)) if known else None


def _is_changed(span: Span) -> bool:
    """Return whether a sent tensor changed during the send; numpy may have written to it."""
    before, after = span.before, span.after
    if span.op is not Op.SEND or span.state is not State.COMPLETED or not (before and after):
        return False
    texts = [repr((s.values, s.min, s.max)) for s in (before, after) if before != after]
    return len(set(texts)) > 1  # compare as text, because NaN is not equal to itself


def _used_early(spans: list[Span], writes: bool, where: str) -> Finding:
    ranks = sorted({s.rank for s in spans})
    rule = rules.buffer_in_use
    if writes:
        received = spans[0].op is Op.RECV
        rule = rules.buffer_overwritten if received else rules.buffer_changed
    lines = " and".join(dict.fromkeys(at(s.where) for s in spans))
    return rule.finding(
        culprits=ranks,
        lines={s.rank: where or s.where for s in spans},
        ranks=ranks,
        calls=f"{_possessive(ranks)} {_call_names(spans)}{lines}",
        early=rule.fill("early", where=where) if where else "",
        name=request_name(spans[0]),
    )


def _never_waited(facts: Evidence) -> list[Span]:
    """Return the asynchronous calls of ranks that have finished without waiting for them."""
    recorded = facts.trace.info.unwaited
    collectives = [facts.by_key.get((r, seq)) for r, calls in recorded.items() for seq in calls]
    messages = [s for s in facts.spans if s.op in P2P and s.state is State.STARTED]
    unwaited = [*messages, *(s for s in collectives if s is not None)]
    return [s for s in unwaited if facts.returned(s.rank)]


def _forgotten_calls(facts: Evidence, spans: Iterable[Span]) -> Iterator[Finding]:
    """Find calls never waited for: the messages, and then the collectives of each line."""
    groups = grouped(spans, lambda s: ("", None) if s.op in P2P else (s.where, s.op))
    uses = {_request(touch): touch.where for touch in facts.trace.spans if touch.op is Op.TOUCH}
    for (_, op), group in groups.items():
        used = next((uses[s.rank, s.seq] for s in group if (s.rank, s.seq) in uses), "")
        rule = rules.not_waited
        if op is not None:
            rule = rules.barrier_not_waited if op is Op.BARRIER else rules.result_not_waited
        yield rule.finding(
            *group,
            culprits=sorted({s.rank for s in group}),
            calls=_clauses(group),
            used=rules.not_waited.fill("used", where=used) if used else "",
            where=used,
        )


def _clauses(spans: list[Span]) -> str:
    """Return clauses that name the ranks that have not waited for their calls, with lines."""
    parts = []
    for where, group in grouped(spans, lambda s: s.where).items():
        ranks = sorted({s.rank for s in group})
        owner = f"{_possessive(ranks)} " if group[0].op in P2P else ""
        parts.append(f"{named(ranks)} never waited for {owner}{_call_names(group)}{at(where)}")
    return ", ".join(parts)


def _possessive(ranks: list[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _call_names(spans: list[Span]) -> str:
    """Return calls as text, with their peers if all calls are the same."""
    names = {f"i{call(s)}" if s.op in P2P else f"{s.op}(async_op=True)" for s in spans}
    if len(names) == 1:
        return names.pop()
    return " and ".join(sorted({request_name(s) for s in spans}))


# -- slow ranks --------------------------------------------------------------------------


def _slow_ranks(facts: Evidence, in_backend: set[int]) -> Iterator[Finding]:
    """Find running ranks that others wait for."""
    waiting: dict[int, list[Span]] = defaultdict(list)
    for rank in facts.ranks:
        rank_state = facts.graph.rank_state(rank)
        if rank_state.status is RankStatus.BLOCKED and rank not in facts.stuck:
            for other in rank_state.waits_for:
                waiting[other].append(facts.span(rank_state))
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

    The first collective of a group and the worst delay of a rank are ignored, since startup, such
    as imports, may cause them. New groups are ignored as well, and calls made before the previous
    one has ended, which share its delay.
    """
    delays_by_rank: dict[int, list[float]] = defaultdict(list)
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
                delays_by_rank[starts[-1][1]].append(
                    starts[-1][0] - starts[(len(starts) - 1) // 2][0]
                )
    repeated = {r: sum(sorted(delays)[:-1]) for r, delays in delays_by_rank.items()}
    slowest = max(repeated, key=lambda r: repeated[r], default=-1)
    late, seconds = len(delays_by_rank.get(slowest, [])), repeated.get(slowest, 0.0)
    if not late or median(delays_by_rank[slowest]) < _MIN_DELAY:
        return
    if late < max(_MIN_TIMES, _MIN_RATE * total) or seconds < max(
        _MIN_SECONDS, _MIN_SHARE * facts.trace.seconds
    ):
        return
    yield rules.late_again.finding(
        culprits=[slowest],
        rank=slowest,
        late=late,
        total=total,
        seconds=sum(delays_by_rank[slowest]),
    )


# -- operations stuck in the backend -----------------------------------------------------------


def _in_backend(facts: Evidence) -> Iterator[Finding]:
    """Find operations that do not complete although all partners have arrived."""
    by_match: dict[str, list[Span]] = defaultdict(list)
    hosts = sorted({*several(facts.trace.info).values()})
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
            network=rules.in_backend.fill("network", hosts=",".join(hosts)) if hosts else "",
        )


def _current_operation(facts: Evidence, rank: int) -> Span | None:
    """Return the operation that a rank waits in, or else its latest operation."""
    spans = [s for s in facts.by_key.values() if s.rank == rank]
    return max(spans, key=lambda s: (s.state is State.BLOCKED, s.seq), default=None)


def _waits_long(facts: Evidence, span: Span) -> bool:
    """Return whether a rank has waited longer than any transfer takes."""
    blocked = span.state is State.BLOCKED or (
        span.state is State.FAILED and span.rank in facts.released
    )
    return blocked and _waited(facts, span) > _LOST_AFTER + span.nbytes / _MIN_BANDWIDTH


def _waited(facts: Evidence, span: Span) -> float:
    return (span.end or facts.trace.info.until or 0.0) - span.start
