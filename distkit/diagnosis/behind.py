"""Records of calls without completions: ranks that are behind, and limits of the record. Pure.

A rank that has made fewer calls than others is not necessarily wrong: in a running job, some rank
is always last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distkit.diagnosis import rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding, with_tensor
from distkit.events import Span
from distkit.trace.calls import CUT, call
from distkit.trace.log import grouped

_MAX_FINDINGS = 5  # maximum number of findings, causes first


#: A finding, and the ranks that are ahead.
Gap = tuple[Finding, list[int]]


def behind(facts: Evidence) -> list[Finding]:
    """Find the ranks that are behind; those that wait for no other come first."""
    gaps = [*_collectives(facts), *_messages(facts)]
    waiting = {rank for _, ahead in gaps for rank in ahead}
    gaps.sort(key=lambda gap: sum(rank in waiting for rank in gap[0].culprits))
    return [finding for finding, _ in gaps[:_MAX_FINDINGS]]


def not_judged_findings(facts: Evidence, found: list[Finding]) -> Iterator[Finding]:
    """Find what cannot be judged from the record, and the remedies.

    Args:
        facts: the record.
        found: the findings so far.
    """
    limits = facts.trace.info.limits
    rule = rules.not_judged
    for what, limit in limits.items():
        finding = rule.finding(text=limit.text, advice=limit.remedy)
        if what == "completions" and not found and "matching" not in limits:
            finding = replace(finding, message=rule.say("even", text=limit.text))
        yield finding


def _dump(facts: Evidence, rank: int) -> str:
    """Return how to inspect a rank, if its process is known."""
    known = facts.trace.info.rank(rank)
    return rules.behind.say("dump", pid=known.pid, host=known.host) if known.pid else ""


def _collectives(facts: Evidence) -> Iterator[Gap]:
    """Find the groups in which some ranks have made fewer calls than others."""
    for group, calls in facts.calls.items():
        if group not in facts.trace.info.groups:
            continue  # its members are unknown
        counts = {r: len(calls.get(r, ())) for r in facts.members(group) if r in facts.ranks}
        most = max(counts.values())
        fewer = [r for r, n in counts.items() if n + _missing_calls(facts, r) < most]
        least = min((counts[r] for r in fewer), default=most)
        some = [r for r in fewer if counts[r] == least]
        ahead = [r for r, n in counts.items() if n > least]
        if some:
            then = calls[next(r for r in ahead if counts[r] > least)][least]
            yield _behind(facts, some, ahead, calls.get(some[0], [])[-1:], then), ahead


def _behind(
    facts: Evidence, some: list[int], ahead: list[int], last: list[Span], then: Span
) -> Finding:
    rule, n = rules.behind, len(facts.calls[then.group].get(some[0], ()))
    its, have = ("their", "have") if len(some) > 1 else ("its", "has")
    made = rule.say("made_none", have=have)
    if last:
        made = rule.say("made", its=its, n=n, call=with_tensor(last[0]), where=last[0].where)
    return rule.finding(
        *last,
        then,
        culprits=some,
        missing=some,
        ranks=some,
        ahead=ahead,
        last=made,
        then=with_tensor(then),
        group=facts.call(then).removeprefix(call(then)),
        where=then.where,
        first=some[0],
        dump=_dump(facts, some[0]),
    )


def _messages(facts: Evidence) -> Iterator[Gap]:
    """Find the first unmatched send or receive between each pair of ranks."""
    unmatched = sorted(facts.unmatched, key=lambda s: (s.rank, s.seq))
    known = (s for s in unmatched if s.peer in facts.ranks)
    for (rank, peer), spans in grouped(known, lambda s: (s.rank, s.peer or 0)).items():
        if len(spans) > _missing_calls(facts, peer):
            finding = rules.message_behind.finding(
                spans[0],
                culprits=[peer],
                missing=[peer],
                first=peer,
                done="received" if spans[0].op == "send" else "sent",
                rank=rank,
                call=with_tensor(spans[0]),
                where=spans[0].where,
                dump=_dump(facts, peer),
            )
            yield finding, [rank]


def _missing_calls(facts: Evidence, rank: int) -> int:
    """Return the maximum number of a rank's calls that the record may lack."""
    info = facts.trace.info
    anyone = info.limits["matching"].calls if "matching" in info.limits else 0
    return anyone + info.unseen.get(rank, {}).get(CUT, 0)
