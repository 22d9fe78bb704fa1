"""Mistakes that do not cause a hang: missing waits, lost messages, leaked groups, slow ranks.

No side effects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import median

from distkit.diagnosis import rules
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.rules import Calls, Finding
from distkit.events import COMPUTATION, P2P, WORLD, Op, Span, State
from distkit.trace.calls import call
from distkit.trace.info import hosts_if_several
from distkit.trace.log import grouped

#: Minimum time that others wait for a straggler: in seconds, and as a fraction of the run.
_MIN_WAIT, _MIN_WAIT_FRACTION = 0.1, 0.2
#: Minimum number of collectives that a straggler calls last: absolute, and as a fraction of all.
_MIN_LATE_CALLS, _MIN_LATE_FRACTION = 3, 0.75

#: Minimum median delay of a straggler [s]; a busy machine causes delays of milliseconds.
_MIN_DELAY = 0.03

#: An operation counts as stuck in the backend after this time [s] plus its size divided by this
#: bandwidth [bytes/s].
_LOST_AFTER, _MIN_BANDWIDTH = 1.0, 1e8


def lint_findings(evidence: Evidence, previous: list[Finding]) -> Iterator[Finding]:
    """Find problems that do not cause a hang.

    Groups that only some ranks created, and operations stuck in the backend, are reported only if
    there are no ``previous`` findings.
    """
    unwaited = _never_waited(evidence)
    forgotten = {(s.rank, s.seq) for s in unwaited}
    yield from _used_early_findings(evidence, forgotten)
    yield from _forgotten(evidence, unwaited)
    yield from _nonmembers(evidence)
    yield from _used_after_destroy(evidence)
    yield from _destroyed_too_early(evidence, forgotten)
    yield from _leaked(evidence)
    if not previous:
        yield from _created_by_some(evidence)
    in_backend = [] if previous else [*_in_backend(evidence)]
    yield from _slow_ranks(evidence, {rank for finding in in_backend for rank in finding.waiting})
    yield from in_backend
    yield from _stragglers(evidence)


def _forgotten(evidence: Evidence, unwaited: list[Span]) -> Iterator[Finding]:
    """Find unmatched messages, and asynchronous calls that were never waited for."""
    unmatched = [
        s for s in evidence.unmatched if evidence.returned(s.rank) and evidence.returned(s.peer)
    ]
    for s in unmatched:
        rule = rules.never_received if s.op is Op.SEND else rules.never_sent
        absent = [s.peer] if s.peer is not None else []
        yield rule.finding(s, culprits=[s.rank], missing=absent, span=s, absent=absent, one_of="")
    yield from _forgotten_calls(evidence, [s for s in unwaited if s not in unmatched])


def _nonmembers(evidence: Evidence) -> Iterator[Finding]:
    """Find collectives that ranks called on groups they do not belong to."""
    calls = {(s.rank, s.op, s.where): s for s in evidence.nonmember_calls}.values()
    ranks = sorted({s.rank for s in calls})
    if ranks:
        yield rules.not_a_member.finding(*calls, culprits=ranks, calls=Calls(calls), ranks=ranks)


# -- asynchronous calls ---------------------------------------------------------------------


def _used_early_findings(evidence: Evidence, forgotten: set[tuple[int, int]]) -> Iterator[Finding]:
    """Find tensors that were used before ``wait()``, one finding per line.

    Args:
        evidence: the evidence from the run.
        forgotten: ``(rank, seq)`` of calls that were never waited for, which get their own finding.
    """
    touched = {call: touch for call, touch in evidence.touches.items() if call not in forgotten}

    def line_and_op(span: Span) -> tuple[str, Op]:
        touch = touched[span.rank, span.seq]
        is_late = touch.attributes.get("function") == ""  # detected only at the wait
        return "" if is_late else touch.where, span.op

    calls = [evidence.by_key[key] for key in touched if key in evidence.by_key]
    for (where, _), spans in grouped(calls, line_and_op).items():
        writes = all("writes" in touched[s.rank, s.seq].attributes for s in spans)
        yield _used_early(spans, writes, where)
    for s in evidence.spans:
        if _is_changed(s) and (s.rank, s.seq) not in touched.keys() | forgotten:
            yield _used_early([s], writes=True, where="")


def _is_changed(span: Span) -> bool:
    """Return whether a sent tensor changed during the send, even if numpy changed it."""
    before, after = span.before, span.after
    if span.op is not Op.SEND or span.state is not State.COMPLETED or not (before and after):
        return False
    values = [repr((s.values, s.min, s.max)) for s in (before, after) if before != after]
    return len(set(values)) > 1  # compared as text, because NaN is not equal to itself


def _used_early(spans: list[Span], writes: bool, where: str) -> Finding:
    ranks = sorted({s.rank for s in spans})
    rule = rules.buffer_in_use
    if writes:
        received = spans[0].op is Op.RECV
        rule = rules.buffer_overwritten if received else rules.buffer_changed
    return rule.finding(
        culprits=ranks,
        lines={s.rank: where or s.where for s in spans},
        calls=Calls(spans, _async_call),
        early=rule.fill("early", where=where) if where else "",
    )


def _never_waited(evidence: Evidence) -> list[Span]:
    """Return the asynchronous calls of ranks that have finished without waiting for them."""
    recorded = evidence.trace.info.unwaited
    collectives = [evidence.by_key.get((r, seq)) for r, calls in recorded.items() for seq in calls]
    messages = [s for s in evidence.spans if s.op in P2P and s.state is State.STARTED]
    return [s for s in [*messages, *collectives] if s is not None and evidence.returned(s.rank)]


def _forgotten_calls(evidence: Evidence, spans: Iterable[Span]) -> Iterator[Finding]:
    """Find calls that were never waited for: first messages, then the collectives on each line."""
    groups = grouped(spans, lambda s: ("", None) if s.op in P2P else (s.where, s.op))
    for (_, op), group in groups.items():
        touches = (
            evidence.touches[s.rank, s.seq] for s in group if (s.rank, s.seq) in evidence.touches
        )
        first_use = next((touch.where for touch in touches), "")
        rule = rules.not_waited
        if op is not None:
            rule = rules.barrier_not_waited if op is Op.BARRIER else rules.result_not_waited
        yield rule.finding(
            *group,
            culprits=sorted({s.rank for s in group}),
            calls=Calls(group, _async_call),
            used=rules.not_waited.fill("used", where=first_use) if first_use else "",
            where=first_use,
        )


def _async_call(span: Span) -> str:
    """Return an asynchronous call as text."""
    return f"i{call(span)}" if span.op in P2P else f"{span.op}(async_op=True)"


# -- groups -----------------------------------------------------------------------------------


def _leaked(evidence: Evidence) -> Iterator[Finding]:
    """Find lines that create groups repeatedly without keeping or destroying the earlier ones."""
    lost = (s for s in evidence.spans if isinstance(s.attributes.get("lost"), int))
    for where, spans in grouped(lost, lambda s: s.where).items():
        ranks = sorted({s.rank for s in spans})
        yield rules.leaked_group.finding(
            *spans,
            culprits=ranks,
            ranks=ranks,
            where=where,
            n=max(s.attributes["lost"] for s in spans) + 1,
        )


def _created_by_some(evidence: Evidence) -> Iterator[Finding]:
    """Find groups that only some ranks have created."""
    world = evidence.members(WORLD)
    if not world or not all(map(evidence.returned, world)):
        return
    created = {
        r: [s for s in evidence.spans if s.rank == r and s.op is Op.NEW_GROUP] for r in world
    }
    fewest = min(map(len, created.values()))
    spans_by_rank = {r: calls[fewest] for r, calls in created.items() if len(calls) > fewest}
    if not spans_by_rank:
        return
    absent = [r for r in world if r not in spans_by_rank]
    yield rules.new_group_counts.finding(
        *spans_by_rank.values(),
        culprits=absent,
        missing=absent,
        calls=Calls(spans_by_rank.values()),
        absent=absent,
    )


def _used_after_destroy(evidence: Evidence) -> Iterator[Finding]:
    """Find calls on groups that the calling rank has already destroyed."""
    uses = defaultdict[tuple[str, str], dict[int, Span]](dict)
    for s in evidence.trace.spans:
        end = evidence.destroy_marks.get((s.rank, s.group))
        if end is not None and end.seq < s.seq and s.op not in COMPUTATION and s.group != WORLD:
            uses[end.where, s.where].setdefault(s.rank, s)
    for (where, _), spans in uses.items():
        yield rules.used_after_destroy.finding(
            *spans.values(),
            culprits=sorted(spans),
            calls=Calls(spans.values()),
            they="it has" if len(spans) == 1 else "they have",
            where=where,
        )


def _destroyed_too_early(evidence: Evidence, forgotten: set[tuple[int, int]]) -> Iterator[Finding]:
    """Find groups that were destroyed before the program waited for calls on them.

    Args:
        evidence: the evidence from the run.
        forgotten: ``(rank, seq)`` of calls that were never waited for, which get their own finding.
    """
    destroyed: dict[str, list[tuple[Span, Span]]] = defaultdict(list)
    for (rank, _), end in evidence.destroy_marks.items():
        seqs = end.attributes.get("open")
        keys = [(rank, seq) for seq in seqs] if isinstance(seqs, tuple) else []
        calls = [
            evidence.by_key[key] for key in keys if key in evidence.by_key and key not in forgotten
        ]
        if calls:
            destroyed[end.where].append((end, calls[0]))
    for where, pairs in destroyed.items():
        ranks = sorted(end.rank for end, _ in pairs)
        yield rules.destroyed_too_early.finding(
            *(end for end, _ in pairs),
            culprits=ranks,
            ranks=ranks,
            where=where,
            call=pairs[0][1],
        )


# -- slow ranks --------------------------------------------------------------------------


def _slow_ranks(evidence: Evidence, in_backend: set[int]) -> Iterator[Finding]:
    """Find running ranks for which others are waiting."""
    waiting: dict[int, list[Span]] = defaultdict(list)
    for rank in evidence.ranks:
        wait = evidence.graph.wait(rank)
        if wait is not None and rank not in evidence.stuck:
            for other in evidence.graph.rank_state(rank).waits_for:
                waiting[other].append(evidence.by_key[rank, wait.seq])
    slow = {r: s for r, s in waiting.items() if evidence.is_running(r) and r not in in_backend}
    for rank, spans in slow.items():
        yield rules.straggler.finding(
            *spans,
            culprits=[rank],
            waiting=[s.rank for s in spans],
            calls=Calls(spans),
            rank=rank,
            is_="was" if rank in evidence.released else "is",
        )


def _stragglers(evidence: Evidence) -> Iterator[Finding]:
    """Find a rank that was repeatedly the last to call collectives, at a significant cost.

    The first collective of a group is ignored, and the worst delay of a rank does not count toward
    the cost, since imports and other startup work may cause these delays. New groups are ignored
    too, and so are calls made before the previous call has ended, because they share its delay.
    """
    delays_by_rank: dict[int, list[float]] = defaultdict(list)
    total = 0
    for group, calls in evidence.calls.items():
        if len(calls) < len(evidence.members(group)):
            continue
        for before, column in pairwise(zip(*calls.values(), strict=False)):
            starts = sorted((s.start, s.rank) for s in column)
            is_sequential = all(
                p.end is not None and p.end <= s.start for p, s in zip(before, column, strict=True)
            )
            if is_sequential and len(starts) > 1 and column[0].op is not Op.NEW_GROUP:
                total += 1
                delays_by_rank[starts[-1][1]].append(
                    starts[-1][0] - starts[(len(starts) - 1) // 2][0]
                )
    repeated = {r: sum(sorted(delays)[:-1]) for r, delays in delays_by_rank.items()}
    slowest = max(repeated, key=lambda r: repeated[r], default=-1)
    delays = delays_by_rank[slowest]
    if (
        len(delays) >= max(_MIN_LATE_CALLS, _MIN_LATE_FRACTION * total)
        and median(delays) >= _MIN_DELAY
        and repeated[slowest] >= max(_MIN_WAIT, _MIN_WAIT_FRACTION * evidence.trace.seconds)
    ):
        yield rules.repeatedly_late.finding(
            culprits=[slowest],
            rank=slowest,
            late=len(delays),
            total=total,
            seconds=sum(delays),
        )


# -- operations stuck in the backend -----------------------------------------------------------


def _in_backend(evidence: Evidence) -> Iterator[Finding]:
    """Find operations that do not complete although all partners have arrived."""
    by_match: dict[str, list[Span]] = defaultdict(list)
    hosts = sorted({*hosts_if_several(evidence.trace.info).values()})
    for rank in filter(evidence.is_running, evidence.ranks):
        wait = evidence.graph.wait(rank)
        if wait is not None and (rank, wait.seq) in evidence.trace.matches and wait.match is None:
            span = evidence.by_key[rank, wait.seq]
            if _waited(evidence, span) > _LOST_AFTER + span.nbytes / _MIN_BANDWIDTH:
                by_match[evidence.trace.matches[rank, span.seq]].append(span)
    for spans in by_match.values():
        yield rules.in_backend.finding(
            *spans,
            waiting=[s.rank for s in spans],
            calls=Calls(spans, evidence.call),
            seconds=max(_waited(evidence, s) for s in spans),
            network=rules.in_backend.fill("network", hosts=",".join(hosts)) if hosts else "",
        )


def _waited(evidence: Evidence, span: Span) -> float:
    return (span.end or evidence.trace.info.until or 0.0) - span.start
