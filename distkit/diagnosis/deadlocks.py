"""Causes of stuck ranks, found in the wait-for graph. Pure.

Each function takes the operations of the stuck ranks that are not explained yet, and returns a
finding and the stuck ranks that it explains, or None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from distkit._format import named
from distkit.diagnosis import rules
from distkit.diagnosis.advice import advice, headline
from distkit.diagnosis.divergence import left_out, not_coming, outliers, uneven, unused
from distkit.diagnosis.facts import INJECTED, Evidence
from distkit.diagnosis.findings import (
    Calls,
    Finding,
    clauses,
    fill,
    lines_of,
    listed,
)
from distkit.events import COLLECTIVES, P2P, Op, Span
from distkit.trace.awaiting import similar
from distkit.trace.calls import SILENT, STOPPED, at, call, keys, last_call, raised_at, seen

#: A finding, and the stuck ranks that it explains.
Cause = tuple[Finding, set[int]]

#: The operations of stuck ranks.
Stuck = Mapping[int, Span]


# -- the other end exists, but does not match ----------------------------------------------


def wrong_end(facts: Evidence, stuck: Stuck) -> Cause | None:
    """Find two ends of a message that were meant for each other but do not match."""
    for pair in (_tag_or_group, _message_taken, _wrong_source, _wrong_destination, _mixed_groups):
        for mine in stuck.values():
            if (finding := pair(facts, mine)) is not None:
                return finding, {mine.rank, *finding.culprits, *finding.lines} & stuck.keys()
    return None


def _tag_or_group(facts: Evidence, mine: Span) -> Finding | None:
    """Find a message between the same two ranks with a different tag or group."""
    for other in facts.unmatched if mine.op in P2P else ():
        if not _would_meet(mine, other):
            continue
        send, recv = (mine, other) if mine.op is Op.SEND else (other, mine)
        if send.group != recv.group:
            return _wrong_group(facts, send, recv)
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


def _would_meet(one: Span, other: Span) -> bool:
    """Return whether two ends would match if tags and groups were ignored."""
    is_opposite = other.op in P2P and other.op is not one.op and other.peer == one.rank
    return is_opposite and one.peer in (other.rank, None)


def _wrong_group(facts: Evidence, *spans: Span) -> Finding:
    alike = len({tuple(facts.members(s.group)) for s in spans}) == 1
    rule = rules.groups_alike if alike else rules.wrong_group
    ranks = sorted({s.rank for s in spans})
    return rule.finding(*spans, culprits=ranks, here=Calls(spans, facts.call))


def _message_taken(facts: Evidence, mine: Span) -> Finding | None:
    """Find a receive whose message was taken by an earlier receive from any source."""
    if mine.op is not Op.RECV or mine.peer is None:
        return None
    taken = [
        s
        for s in facts.any_source_receives
        if (s.rank, s.peer, s.group, s.tag) == (mine.rank, mine.peer, mine.group, mine.tag)
        and s.seq < mine.seq
    ]
    left = [
        s
        for s in facts.unmatched
        if s.op is Op.SEND and s.peer == mine.rank and s.rank != mine.peer
    ]
    if not taken:
        return None
    rule = rules.message_taken
    return rule.finding(
        mine,
        *left[:1],
        culprits=[mine.rank],
        missing=[mine.peer],
        mine=mine,
        early=taken[-1],
        left=rule.say("left", left=left[0]) if left else "",
    )


def _wrong_source(facts: Evidence, mine: Span) -> Finding | None:
    """Find a receive from one rank while another rank sends the message."""
    if mine.op is not Op.RECV or mine.peer is None or _in_conversation(facts, mine):
        return None
    for send in facts.unmatched:
        if send.op is Op.SEND and send.peer == mine.rank and send.group == mine.group:
            return rules.wrong_source.finding(
                mine,
                send,
                culprits=[mine.rank],
                mine=mine,
                send=send,
                over=facts.clause_if_gone(mine.peer),
            )
    return None


def _wrong_destination(facts: Evidence, mine: Span) -> Finding | None:
    """Find a message to one rank while another rank waits for it."""
    if mine.op not in P2P:
        return None
    wants = Op.RECV if mine.op is Op.SEND else Op.SEND
    for other in facts.unmatched:
        send, recv = (mine, other) if mine.op is Op.SEND else (other, mine)
        is_meant = recv.peer == send.rank and recv.group == send.group and send.peer != recv.rank
        if other.op is wants and is_meant and not _in_conversation(facts, send):
            return rules.wrong_destination.finding(
                send,
                recv,
                culprits=[send.rank],
                send=send,
                recv=recv,
                over=facts.clause_if_gone(send.peer),
            )
    return None


def _in_conversation(facts: Evidence, mine: Span) -> bool:
    """Return whether a chain of waiting ranks leads from this message back to its rank.

    It does not count if each rank of the chain has an unmatched send: those are misdirected.
    """
    rank, circle = mine.peer, [mine.rank]
    while rank is not None and rank not in circle:
        circle.append(rank)
        rank_state = facts.stuck.get(rank)
        rank = rank_state.peer if rank_state is not None and rank_state.op in P2P else None
    astray = {
        s.rank for s in facts.unmatched if s.op is Op.SEND and s is not facts.stuck.get(s.rank)
    }
    return rank == mine.rank and not astray.issuperset(circle)


def _mixed_groups(facts: Evidence, mine: Span) -> Finding | None:
    """Find ranks that wait for each other in the same collective of different groups."""
    if mine.op not in COLLECTIVES:
        return None
    for rank in facts.waits_for[mine.rank]:
        theirs = facts.stuck.get(rank)
        if theirs is None or mine.rank not in facts.waits_for[rank] or theirs.group == mine.group:
            continue
        if theirs.op is mine.op:
            return _mixed_group_finding(facts, mine.group, theirs.group, mine.op)
    return None


def _mixed_group_finding(facts: Evidence, group: str, other: str, op: Op) -> Finding:
    """Return the finding for one collective called on two groups; the culprits are the fewer."""
    spans = [s for s in facts.stuck.values() if s.op is op and s.group in (group, other)]
    halves = [[s.rank for s in spans if s.group == g] for g in (group, other)]
    return replace(_wrong_group(facts, *spans), culprits=outliers(halves))


# -- the other end has finished -------------------------------------------------------------


def left_alone(facts: Evidence, stuck: Stuck) -> Cause | None:
    """Find a rank that waits for one that has reached the end of its program; messages first."""
    calls = [s for s in stuck.values() if s.match is None]
    for mine in sorted(calls, key=lambda s: s.op not in P2P):
        gone = [r for r in facts.waits_for[mine.rank] if facts.is_gone(r)]
        everyone = mine.op is Op.RECV and mine.peer is None
        if not gone or (everyone and len(gone) < len(facts.waits_for[mine.rank])):
            continue
        if mine.op in P2P:
            return _no_partner(facts, mine, gone), {mine.rank}
        together = {
            r
            for r, s in stuck.items()
            if s.group == mine.group and s.op is mine.op and facts.nth(s) == facts.nth(mine)
        }
        return _not_called(facts, {r: stuck[r] for r in together}, gone), together
    return None


def _no_partner(facts: Evidence, mine: Span, gone: list[int]) -> Finding:
    if mine.peer is None:
        done = sum(r.rank == mine.rank and s.rank in gone for s, r in facts.pairs)
    else:
        done = sum(_endpoints(s, r) == _endpoints(mine, mine) for s, r in facts.pairs)
    rule = rules.no_receiver if mine.op is Op.SEND else rules.no_sender
    return rule.finding(
        mine,
        culprits=gone,
        missing=gone,
        mine=mine,
        gone=gone,
        one_of="one of " * (len(gone) > 1),
        over=facts.over(gone),
        done=done,
        known=facts.known_reasons(gone),
    )


def _endpoints(send: Span, recv: Span) -> tuple[int | None, int | None]:
    return (
        send.rank if send.op is Op.SEND else send.peer,
        recv.rank if recv.op is Op.RECV else recv.peer,
    )


def _not_called(facts: Evidence, here: Stuck, gone: list[int]) -> Finding:
    """Return the finding for a collective that some ranks wait in and others ended without."""
    mine = here[min(here)]
    if "gradients" in mine.attributes:
        return _without_backward(facts, here, gone)
    more, fewer = facts.called(min(here), mine), facts.called(gone[0], mine)
    rule, remedy = _why_not_called(facts, mine, here, gone)
    often = mine.where and more > fewer > 0
    if often and rule in (rules.skipped, rules.missing_barrier):
        rule, remedy = rules.uneven_end, uneven(facts, mine)
    culprits = outliers([sorted(here), gone])
    if rule is rules.new_group or len(here) == len(gone):
        culprits = tuple(gone)
    return rule.finding(
        *here.values(),
        remedy=remedy,
        culprits=culprits,
        missing=gone,
        here=Calls(here.values(), facts.call),
        gone=gone,
        over=facts.over(gone),
        known=facts.known_reasons(gone),
        more=more,
        fewer=fewer,
    )


def _without_backward(facts: Evidence, here: Stuck, gone: list[int]) -> Finding:
    """Return the finding for gradients that some ranks wait for and others ended without."""
    if (found := left_out(facts, gone, here.values())) is not None:
        return found
    mine = here[min(here)]
    text = facts.program.text(mine.where)
    inside = bool(text) and "backward" not in text  # the call of an autograd function
    rule = rules.skipped_function if inside else rules.uneven_backward_end
    return rule.finding(
        *here.values(),
        remedy=rule.remedy if inside else uneven(facts, mine, gradients=True),
        culprits=gone if len(here) == len(gone) else outliers([sorted(here), gone]),
        missing=gone,
        here=Calls(here.values()),
        gone=gone,
        over=facts.over(gone),
        known=facts.known_reasons(gone),
    )


def _why_not_called(
    facts: Evidence, mine: Span, here: Stuck, gone: list[int]
) -> tuple[rules.Rule, str]:
    """Return the rule, and a remedy that replaces the rule's; "" for none."""
    if mine.op is Op.NEW_GROUP:
        return rules.new_group, ""
    if mine.group != "world" and not any(facts.calls[mine.group].get(r) for r in gone):
        return rules.member_missing, ""
    rule = rules.missing_barrier if mine.op is Op.BARRIER else rules.skipped
    remedy = not_coming(facts, mine, gone) or fill(rule.remedy, gone=gone)
    return rule, remedy + _group_hint(facts, here)


def _group_hint(facts: Evidence, here: Stuck) -> str:
    """Return a hint if the waiting ranks are the members of a group that they may have meant."""
    theirs = any({*s.attributes.get("members", ())} == {*here} for s in facts.spans)
    alone = len(here) > 1 and all(s.group == "world" for s in here.values())
    return rules.divergence.say("meant", ranks=[*here]) if theirs and alone else ""


def without_key(facts: Evidence, stuck: Stuck) -> Cause | None:
    """Find ranks that wait for a key of a store that no rank has set."""
    mine = next((s for s in stuck.values() if s.op is Op.STORE_WAIT), None)
    if mine is None:
        return None
    here = {r: s for r, s in stuck.items() if (s.op, s.attributes) == (mine.op, mine.attributes)}
    others = [r for r in facts.graph.ranks if r not in here]
    wanted = facts.graph.keys.missing(mine)
    meant = [similar(key, facts.graph.keys.set) for key in wanted]
    near = [facts.graph.keys.set[key] for key in meant if key]
    theirs = [facts.stuck[rank] for rank in others if rank in facts.stuck]
    rule = rules.missing_key
    finding = rule.finding(
        *here.values(),
        *theirs,
        culprits=others or sorted(here),
        missing=others,
        here=Calls(here.values()),
        keys=keys(wanted),
        near="".join(rule.say("near", set=e, call=call(e)) for e in near),
        others=_activity_of(facts, others),
    )
    return finding, {*here}


def _activity_of(facts: Evidence, ranks: list[int]) -> str:
    """Return what ranks that do not wait here are doing, as text."""
    stuck = [facts.stuck[r] for r in ranks if r in facts.stuck]
    gone = [f"rank {r} has {facts.over([r])}" for r in ranks if facts.is_gone(r)]
    said = [clauses([s], "wait in", facts.call) for s in stuck]
    return "".join(f"; {words}" for words in (*gone, *said))


# -- all wait for each other --------------------------------------------------------------


def circle(facts: Evidence, stuck: Stuck) -> Cause | None:
    """Find a cycle of ranks, each of which waits for the next."""
    ways = {r: [w for w in facts.waits_for[r] if w in stuck] for r in stuck}
    start = next((r for r in stuck if ways[r]), None)
    if start is None:
        return None
    path = [start]
    while (after := ways[path[-1]][0]) not in path:
        path.append(after)
    ring = path[path.index(after) :]
    first = ring.index(min(ring))
    ring = ring[first:] + ring[:first]
    return _cycle(facts, [stuck[r] for r in ring]), set(ring)


def _cycle(facts: Evidence, ring: list[Span]) -> Finding:
    ops = {s.op for s in ring}
    remedies = {Op.RECV: rules.recv_cycle.remedy, Op.SEND: rules.cycle.say("sends")}
    rule = rules.recv_cycle if ops == {Op.RECV} and len(ring) == 2 else rules.cycle
    ranks = sorted(s.rank for s in ring)
    return rule.finding(
        *ring,
        remedy=remedies.get(ring[0].op, "") if len(ops) == 1 else "",
        culprits=ranks,
        missing=ranks,
        ring=listed([clauses([s], "wait in", facts.call) for s in ring]),
        next="other" if len(ring) == 2 else "next, in a circle",
    )


# -- ranks that failed ------------------------------------------------------------------------


def gone(how: str) -> str:
    """Return "hung" or "ended", depending on how a process ended."""
    return "hung" if SILENT in how else "ended"


def search(how: str) -> str:
    """Return the remedy for a process that has ended."""
    if INJECTED in how:
        return rules.died.say("asked")
    if SILENT in how:
        return STOPPED
    found = (remedy for words, remedy in rules.ENDINGS.items() if words in how)
    return next(found, rules.died.remedy)


#: DDP's error for two ranks that wrap different models.
_OTHER_MODEL = re.compile(r"expects same model .* Rank (\d+) has .* rank (\d+) has inconsistent")


def _prior_iteration(facts: Evidence, ranks: list[int], places: dict[int, str]) -> Finding:
    """Return the finding for DDP's error about gradients missing in the previous iteration."""
    rule = rules.unused_before
    where = sorted(places.values())[0] if any(places.values()) else ""
    before = rule.say("before", where=where) if where else ""
    lacking = facts.left_out("unreduced", facts.ranks) or {r: [] for r in ranks}
    return unused(rule, lacking, [], lines=places, before=before)


def failure(facts: Evidence, ranks: list[int], how: str, text: str, where: str) -> Finding:
    """Return the finding for ranks that raised or died in the same way."""
    last = [s for r in ranks if (s := last_call(facts.trace.spans, r)) is not None]
    places = {r: where for r in ranks} if where else lines_of(*last) if how == "raised" else {}
    if how == "raised":
        if "finished reduction in the prior iteration" in text:
            return _prior_iteration(facts, ranks, places)
        line = facts.program.text(where)
        odd = _OTHER_MODEL.search(text)
        return rules.raised.finding(
            remedy=advice(text, line),
            culprits=ranks if odd is None else sorted(map(int, odd.groups())),
            missing=ranks,
            lines=places,
            ranks=ranks,
            raised=raised(text, where, line),
        )
    who = f"{named([last[0].rank])} was " if last and len(ranks) > 1 else ""
    return rules.died.finding(
        remedy=search(text),
        culprits=ranks,
        missing=ranks,
        lines=places,
        process="process" if len(ranks) == 1 else "processes",
        ranks=ranks,
        ended=gone(text),
        how=headline(text),
        where=where,
        after=f"; {who}{seen(last[0])}" if last and not where else "",
    )


def raised(text: str, where: str, line: str = "") -> str:
    """Return an exception as the predicate of a sentence about a rank.

    Args:
        text: the name of its class and its message.
        where: the user's line that raised it.
        line: the text of that line.

    >>> raised("SystemExit: 0", "a.py:3")
    'called sys.exit(0) at a.py:3'
    """
    said = headline(text, line)
    name, _, code = said.partition(": ")
    if name == "SystemExit":
        return f"called sys.exit({code}){at(where)}"
    return f"raised {raised_at(said, where)}"


def first(finding: Finding) -> Finding:
    """Adapt the finding of a rank that raised while others wait for it."""
    if finding.rule is not rules.raised:
        return finding
    if " called sys.exit(" in finding.message:
        return replace(finding, remedy=rules.raised.say("leave_together"))
    known = "" if finding.remedy == rules.raised.remedy else f"{finding.remedy} "
    return replace(finding, remedy=known + rules.raised.say("first"))
