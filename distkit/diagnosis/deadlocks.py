"""Causes of stuck ranks, found in the wait-for graph. No side effects.

The public functions that return a :data:`Cause` receive the operations of the stuck ranks that no
finding explains yet. They return None if they find nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from distkit._format import named
from distkit.diagnosis import rules
from distkit.diagnosis.divergence import (
    find_unused_parameters,
    missing_call_remedy,
    outliers,
    uneven_remedy,
    unused,
)
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.rules import (
    Calls,
    Finding,
    advice,
    clauses,
    fill,
    headline,
    lines_of,
    listed,
)
from distkit.events import COLLECTIVES, P2P, WORLD, Op, Span
from distkit.trace.awaiting import similar
from distkit.trace.calls import at, call, keys, last_call, last_seen, raised_at

#: A finding, and the stuck ranks that it explains.
Cause = tuple[Finding, set[int]]

#: The operations of the stuck ranks, by rank.
Stuck = Mapping[int, Span]


# -- mismatched ends -----------------------------------------------------------------------


def wrong_end(evidence: Evidence, stuck: Stuck) -> Cause | None:
    """Find calls that were intended for each other but do not match."""
    for find in (_tag_or_group, _message_taken, _wrong_source, _wrong_destination, _mixed_groups):
        for span in stuck.values():
            if (finding := find(evidence, span)) is not None:
                return finding, {span.rank, *finding.culprits, *finding.lines} & stuck.keys()
    return None


def _ends(evidence: Evidence, span: Span) -> Iterator[tuple[Span, Span]]:
    """Yield this call and each unmatched call in the other direction, as (send, receive)."""
    for other in evidence.unmatched if span.op in P2P else ():
        if other.op in P2P and other.op is not span.op:
            yield (span, other) if span.op is Op.SEND else (other, span)


def _tag_or_group(evidence: Evidence, span: Span) -> Finding | None:
    """Find a send and a receive between the same ranks that differ in tag or group."""
    for send, recv in _ends(evidence, span):
        if send.peer != recv.rank or recv.peer not in (send.rank, None):
            continue
        if send.group != recv.group:
            return _wrong_group(evidence, send, recv)
        if send.tag != recv.tag:
            return rules.wrong_tag.finding(
                send,
                recv,
                culprits=sorted({send.rank, recv.rank}),
                send=send,
                recv=recv,
                sent=send.tag or 0,
                awaited=recv.tag or 0,
            )
    return None


def _wrong_group(evidence: Evidence, *spans: Span) -> Finding:
    same_members = len({tuple(evidence.members(s.group)) for s in spans}) == 1
    rule = rules.equal_groups if same_members else rules.wrong_group
    ranks = sorted({s.rank for s in spans})
    return rule.finding(*spans, culprits=ranks, calls=Calls(spans, evidence.call))


def _message_taken(evidence: Evidence, span: Span) -> Finding | None:
    """Find a receive whose message was consumed by an earlier receive from any source."""
    if span.op is not Op.RECV or span.peer is None:
        return None
    taken = [
        s
        for s in evidence.any_source_receives
        if (s.rank, s.peer, s.group, s.tag) == (span.rank, span.peer, span.group, span.tag)
        and s.seq < span.seq
    ]
    unmatched = [
        s
        for s in evidence.unmatched
        if s.op is Op.SEND and s.peer == span.rank and s.rank != span.peer
    ]
    if not taken:
        return None
    rule = rules.message_race
    return rule.finding(
        span,
        *unmatched[:1],
        culprits=[span.rank],
        missing=[span.peer],
        span=span,
        early=taken[-1],
        left=rule.fill("left", left=unmatched[0]) if unmatched else "",
    )


def _wrong_source(evidence: Evidence, span: Span) -> Finding | None:
    """Find a receive that names the wrong sender: another rank sends the message."""
    if span.op is not Op.RECV or span.peer is None or _in_wait_chain(evidence, span):
        return None
    for send, recv in _ends(evidence, span):
        if send.peer == recv.rank and send.group == recv.group:
            return rules.wrong_source.finding(
                recv,
                send,
                culprits=[recv.rank],
                span=recv,
                send=send,
                ended_clause=evidence.ended_clause(recv.peer),
            )
    return None


def _wrong_destination(evidence: Evidence, span: Span) -> Finding | None:
    """Find a send that names the wrong destination: another rank is waiting for the message."""
    for send, recv in _ends(evidence, span):
        was_intended = (
            recv.peer == send.rank and recv.group == send.group and send.peer != recv.rank
        )
        if was_intended and not _in_wait_chain(evidence, send):
            return rules.wrong_destination.finding(
                send,
                recv,
                culprits=[send.rank],
                send=send,
                recv=recv,
                ended_clause=evidence.ended_clause(send.peer),
            )
    return None


def _in_wait_chain(evidence: Evidence, span: Span) -> bool:
    """Return whether a chain of waiting ranks leads from this call back to its own rank.

    A chain is ignored if each of its ranks has an unmatched send other than the call in which it
    is waiting: such a send is misdirected.
    """
    rank, chain = span.peer, [span.rank]
    while rank is not None and rank not in chain:
        chain.append(rank)
        wait = evidence.stuck.get(rank)
        rank = wait.peer if wait is not None and wait.op in P2P else None
    misdirected = {
        s.rank
        for s in evidence.unmatched
        if s.op is Op.SEND and s is not evidence.stuck.get(s.rank)
    }
    return rank == span.rank and not misdirected.issuperset(chain)


def _mixed_groups(evidence: Evidence, span: Span) -> Finding | None:
    """Find ranks that are waiting for each other in the same collective on different groups."""
    if span.op not in COLLECTIVES:
        return None
    for rank in evidence.waits_for[span.rank]:
        other = evidence.stuck.get(rank)
        if other is None or other.op is not span.op or other.group == span.group:
            continue
        if span.rank in evidence.waits_for[rank]:
            groups = span.group, other.group
            spans = [s for s in evidence.stuck.values() if s.op is span.op and s.group in groups]
            halves = [[s.rank for s in spans if s.group == g] for g in groups]
            return replace(_wrong_group(evidence, *spans), culprits=outliers(halves))
    return None


# -- finished partners -----------------------------------------------------------------------


def finished_partner(evidence: Evidence, stuck: Stuck) -> Cause | None:
    """Find a rank that is waiting for a finished rank; examine messages before collectives."""
    calls = [s for s in stuck.values() if s.match is None]
    for span in sorted(calls, key=lambda s: s.op not in P2P):
        absent = [r for r in evidence.waits_for[span.rank] if evidence.has_ended(r)]
        any_source = span.op is Op.RECV and span.peer is None
        if not absent or (any_source and len(absent) < len(evidence.waits_for[span.rank])):
            continue
        if span.op in P2P:
            return _no_partner(evidence, span, absent), {span.rank}
        same_call = {
            r
            for r, s in stuck.items()
            if s.group == span.group and s.op is span.op and evidence.nth(s) == evidence.nth(span)
        }
        return _not_called(evidence, {r: stuck[r] for r in same_call}, absent), same_call
    return None


def _no_partner(evidence: Evidence, span: Span, absent: list[int]) -> Finding:
    sends = span.op is Op.SEND
    ends = [(s.rank, r.rank) if sends else (r.rank, s.rank) for s, r in evidence.pairs]
    rule = rules.no_receiver if sends else rules.no_sender
    return rule.finding(
        span,
        culprits=absent,
        missing=absent,
        span=span,
        absent=absent,
        one_of="one of " * (len(absent) > 1),
        end_phrase=evidence.end_phrase(absent),
        count=sum(rank == span.rank and peer in absent for rank, peer in ends),
        reasons=evidence.known_reasons(absent),
    )


def _not_called(evidence: Evidence, waits: Stuck, absent: list[int]) -> Finding:
    """Return the finding for a collective that only some ranks have called."""
    span = waits[min(waits)]
    unused_parameters = find_unused_parameters(evidence, absent, waits.values())
    if "gradients" in span.attributes and unused_parameters is not None:
        return unused_parameters
    n, m = (evidence.count_calls(rank, span) for rank in (min(waits), absent[0]))
    rule, remedy = _why_not_called(evidence, span, waits, absent)
    uneven_calls = span.where and n > m > 0
    if uneven_calls and rule in (rules.skipped, rules.missing_barrier):
        rule, remedy = rules.uneven_end, uneven_remedy(evidence, span)
    culprits = outliers([sorted(waits), absent])
    if rule is rules.new_group or len(waits) == len(absent):
        culprits = tuple(absent)
    return rule.finding(
        *waits.values(),
        remedy=remedy,
        culprits=culprits,
        missing=absent,
        calls=Calls(waits.values(), evidence.call),
        absent=absent,
        end_phrase=evidence.end_phrase(absent),
        reasons=evidence.known_reasons(absent),
        n=n,
        m=m,
    )


def _why_not_called(
    evidence: Evidence, span: Span, waits: Stuck, absent: list[int]
) -> tuple[rules.Rule, str]:
    """Return the rule, and the remedy that replaces the rule's remedy, if any."""
    if "gradients" in span.attributes:
        text = evidence.program.text(span.where)
        if text and "backward" not in text:  # the line calls an autograd function
            return rules.skipped_function, ""
        return rules.uneven_backward_end, uneven_remedy(evidence, span, gradients=True)
    if span.op is Op.NEW_GROUP:
        return rules.new_group, ""
    if span.group != "world" and not any(evidence.calls[span.group].get(r) for r in absent):
        return rules.member_missing, ""
    rule = rules.missing_barrier if span.op is Op.BARRIER else rules.skipped
    remedy = missing_call_remedy(evidence, span) or fill(rule.remedy, absent=absent)
    return rule, remedy + _group_hint(evidence, waits)


def _group_hint(evidence: Evidence, waits: Stuck) -> str:
    """Return a hint to pass ``group=`` if the waiting ranks are exactly the members of a group."""
    is_group = any({*s.attributes.get("members", ())} == {*waits} for s in evidence.spans)
    in_world = len(waits) > 1 and all(s.group == "world" for s in waits.values())
    return rules.divergence.fill("pass_group", ranks=[*waits]) if is_group and in_world else ""


def missing_key(evidence: Evidence, stuck: Stuck) -> Cause | None:
    """Find ranks that are waiting for a store key that no rank has set."""
    span = next((s for s in stuck.values() if s.op is Op.STORE_WAIT), None)
    if span is None:
        return None
    waits = {r: s for r, s in stuck.items() if (s.op, s.attributes) == (span.op, span.attributes)}
    others = [r for r in evidence.graph.ranks if r not in waits]
    missing = evidence.graph.keys.missing(span)
    similar_keys = [similar(key, evidence.graph.keys.set_events) for key in missing]
    near_events = [evidence.graph.keys.set_events[key] for key in similar_keys if key]
    other_spans = [evidence.stuck[rank] for rank in others if rank in evidence.stuck]
    ends = [f"{named([r])} has {evidence.end_phrase([r])}" for r in others if evidence.has_ended(r)]
    activities = [*ends, *(clauses([s], "wait in", evidence.call) for s in other_spans)]
    rule = rules.missing_key
    finding = rule.finding(
        *waits.values(),
        *other_spans,
        culprits=others or sorted(waits),
        missing=others,
        calls=Calls(waits.values()),
        keys=keys(missing),
        near="".join(rule.fill("near", set=e, call=call(e)) for e in near_events),
        others="".join(f"; {text}" for text in activities),
    )
    return finding, {*waits}


def destroyed_group(evidence: Evidence, stuck: Stuck) -> Cause | None:
    """Find ranks that are waiting in a call on a group that another member has destroyed."""
    for rank, span in stuck.items():
        candidates = [evidence.destroy_marks.get((r, span.group)) for r in evidence.waits_for[rank]]
        marks = [
            m for m in candidates if m is not None and evidence.program.skips(m.where, span.where)
        ]
        if marks:
            spans_by_rank = {
                r: s for r, s in stuck.items() if (s.group, s.op) == (span.group, span.op)
            }
            ranks = sorted({m.rank for m in marks})
            finding = rules.destroyed_group.finding(
                *marks,
                *spans_by_rank.values(),
                culprits=ranks,
                missing=ranks,
                ranks=ranks,
                group="the default group" if span.group == WORLD else "the group",
                where=marks[0].where,
                calls=Calls(spans_by_rank.values(), evidence.call),
            )
            return finding, set(spans_by_rank)
    return None


# -- cycles -------------------------------------------------------------------------------


def wait_cycle(evidence: Evidence, stuck: Stuck) -> Cause | None:
    """Find a cycle of ranks, each of which waits for the next."""
    edges = {r: [w for w in evidence.waits_for[r] if w in stuck] for r in stuck}
    start = next((r for r in stuck if edges[r]), None)
    if start is None:
        return None
    path = [start]
    while (following := edges[path[-1]][0]) not in path:
        path.append(following)
    ring = path[path.index(following) :]
    first = ring.index(min(ring))
    ring = ring[first:] + ring[:first]
    return _cycle(evidence, [stuck[r] for r in ring]), set(ring)


def _cycle(evidence: Evidence, ring: list[Span]) -> Finding:
    ops = {s.op for s in ring}
    remedies = {Op.RECV: rules.recv_cycle.remedy, Op.SEND: rules.cycle.fill("sends")}
    rule = rules.recv_cycle if ops == {Op.RECV} and len(ring) == 2 else rules.cycle
    ranks = sorted(s.rank for s in ring)
    return rule.finding(
        *ring,
        remedy=remedies.get(ring[0].op, "") if len(ops) == 1 else "",
        culprits=ranks,
        missing=ranks,
        ring=listed([clauses([s], "wait in", evidence.call) for s in ring]),
        next="other" if len(ring) == 2 else "next, in a cycle",
    )


# -- failed ranks -----------------------------------------------------------------------------


def remedy_for_end(cause: str) -> str:
    """Return the remedy for a process that has exited."""
    return next((r for text, r in rules.ENDINGS.items() if text in cause), rules.died.remedy)


#: Matches DDP's error for two ranks that wrap different models.
_OTHER_MODEL = re.compile(r"expects same model .* Rank (\d+) has .* rank (\d+) has inconsistent")


def _prior_iteration(
    evidence: Evidence, ranks: list[int], lines_by_rank: dict[int, str]
) -> Finding:
    """Return the finding for DDP's error about gradients missing in the previous iteration."""
    rule = rules.unused_before
    where = sorted(lines_by_rank.values())[0] if any(lines_by_rank.values()) else ""
    before = rule.fill("before", where=where) if where else ""
    missing = evidence.unused_parameters(evidence.ranks) or {r: [] for r in ranks}
    return unused(rule, missing, [], lines=lines_by_rank, before=before)


def failure(evidence: Evidence, ranks: list[int], how: str, text: str, where: str) -> Finding:
    """Return the finding for ranks that raised the same error or died in the same way."""
    last_calls = [s for r in ranks if (s := last_call(evidence.trace.spans, r)) is not None]
    lines = {r: where for r in ranks} if where else lines_of(*last_calls) if how == "raised" else {}
    if how == "raised":
        if "finished reduction in the prior iteration" in text:
            return _prior_iteration(evidence, ranks, lines)
        line = evidence.program.text(where)
        mismatch = _OTHER_MODEL.search(text)
        return rules.raised.finding(
            remedy=advice(text, line),
            culprits=ranks if mismatch is None else sorted(map(int, mismatch.groups())),
            missing=ranks,
            lines=lines,
            ranks=ranks,
            raised=raised(text, where, line),
        )
    owner = f"{named([last_calls[0].rank])} was " if last_calls and len(ranks) > 1 else ""
    return rules.died.finding(
        remedy=remedy_for_end(text),
        culprits=ranks,
        missing=ranks,
        lines=lines,
        process="process" if len(ranks) == 1 else "processes",
        ranks=ranks,
        how=headline(text),
        where=where,
        after=f"; {owner}{last_seen(last_calls[0])}" if last_calls and not where else "",
    )


def raised(text: str, where: str, line: str = "") -> str:
    """Return an exception as the predicate of a sentence about a rank.

    Args:
        text: the exception's class name and message.
        where: the line that raised it.
        line: the source text of that line.

    >>> raised("SystemExit: 0", "a.py:3")
    'called sys.exit(0) at a.py:3'
    """
    summary = headline(text, line)
    name, _, code = summary.partition(": ")
    if name == "SystemExit":
        return f"called sys.exit({code}){at(where)}"
    return f"raised {raised_at(summary, where)}"


def remedy_for_awaited_ranks(failure: Finding, waiting: Iterable[Span]) -> str:
    """Return the remedy for failed ranks that others wait for."""
    if failure.rule is rules.died and any(s.match is not None for s in waiting):
        return f"{failure.remedy} " + rules.died.fill("continue_without", ranks=failure.culprits)
    if failure.rule is not rules.raised:
        return failure.remedy
    if " called sys.exit(" in failure.message:
        return rules.raised.fill("stop_together")
    remedy = "" if failure.remedy == rules.raised.remedy else f"{failure.remedy} "
    return remedy + rules.raised.fill("first")
