"""Records of calls without their ends: which rank is behind, and what cannot be judged. Pure.

That a rank has made fewer calls than others is a fact of the record, not yet a mistake: in a job
that goes on, some rank is always the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distkit._format import ordinal
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding, Kind, verb, with_tensor
from distkit.events import Span
from distkit.trace.calls import CUT, at, call

_MOST = 5  # so many findings, the causes first


@dataclass(frozen=True)
class _Gap:
    """Ranks that have not made a call which others have made."""

    behind: tuple[int, ...]
    ahead: tuple[int, ...]
    said: str
    lines: dict[int, str]


def behind(facts: Evidence) -> list[Finding]:
    """The ranks that are behind: first those that wait for no other."""
    gaps = [*_collectives(facts), *_messages(facts)]
    waiting = {rank for gap in gaps for rank in gap.ahead}
    gaps.sort(key=lambda gap: sum(rank in waiting for rank in gap.behind))
    return [_finding(facts, gap) for gap in gaps[:_MOST]]


def unjudged(facts: Evidence, found: list[Finding]) -> Iterator[Finding]:
    """What the record cannot tell, and what to do about it.

    Args:
        facts: the record.
        found: what was found in it; where it is not certain what belongs together, only told here.
    """
    limits = facts.trace.info.limits
    for what, limit in limits.items():
        finding = Finding(Kind.NOT_JUDGED, limit.text, limit.remedy)
        if what == "communicators":
            then = " ".join(["If they are,", *map(str, found)]) if found else ""
            finding = replace(finding, message=f"{limit.text}. {then}".rstrip())
        if what == "completions" and not found and "matching" not in limits:
            even = "no rank is behind: all have made the same calls; "
            finding = replace(finding, message=even + finding.message)
        yield finding


def _finding(facts: Evidence, gap: _Gap) -> Finding:
    first = facts.trace.info.rank(gap.behind[0])
    where = f" (py-spy dump --pid {first.pid} on {first.host})" if first.pid else ""
    return Finding(
        Kind.BEHIND,
        gap.said,
        f"If the job hangs, see what rank {gap.behind[0]} does after that call{where}. If it does "
        "not, only the record ends there.",
        gap.behind,
        missing_ranks=gap.behind,
        lines=gap.lines,
    )


def _collectives(facts: Evidence) -> Iterator[_Gap]:
    """The groups in which some ranks have made fewer calls than others."""
    for group, calls in facts.calls.items():
        if group not in facts.trace.info.groups:
            continue  # whom else they were made with is not known
        counts = {r: len(calls.get(r, ())) for r in facts.members(group) if r in facts.ranks}
        most = max(counts.values())
        fewer = [r for r, n in counts.items() if n + _lost(facts, r) < most]
        least = min((counts[r] for r in fewer), default=most)
        some = tuple(r for r in fewer if counts[r] == least)
        ahead = tuple(r for r, n in counts.items() if n > least)
        if some:
            next_call = calls[next(r for r in ahead if counts[r] > least)][least]
            yield _gap(facts, some, ahead, calls[some[0]][-1:], next_call, least)


def _gap(
    facts: Evidence,
    some: tuple[int, ...],
    ahead: tuple[int, ...],
    last: list[Span],
    then: Span,
    made: int,
) -> _Gap:
    its, have = ("their", "have") if len(some) > 1 else ("its", "has")
    done = f"{have} made none of the calls"
    if last:
        done = f"{its} {ordinal(made)} and last call is {with_tensor(last[0])}{at(last[0].where)}"
    group = facts.call(then).removeprefix(call(then))
    said = (
        f"{verb(some, 'are')} behind: {done}, and {verb(ahead, 'have')} gone on to "
        f"{with_tensor(then)}{group}{at(then.where)}."
    )
    return _Gap(some, ahead, said, {span.rank: span.where for span in (*last, then)})


def _messages(facts: Evidence) -> Iterator[_Gap]:
    """Sends without their receive, and receives without their send: the first of each pair."""
    open_ends: dict[tuple[int, int], list[Span]] = {}
    for span in sorted(facts.alone, key=lambda s: (s.rank, s.seq)):
        if span.peer is not None and span.peer in facts.ranks:
            open_ends.setdefault((span.rank, span.peer), []).append(span)
    for (rank, peer), spans in open_ends.items():
        if len(spans) > _lost(facts, peer):
            what = "received" if spans[0].op == "send" else "sent"
            said = (
                f"rank {peer} is behind: it has not {what} what rank {rank} has called "
                f"{with_tensor(spans[0])} for{at(spans[0].where)}."
            )
            yield _Gap((peer,), (rank,), said, {rank: spans[0].where})


def _lost(facts: Evidence, rank: int) -> int:
    """How many calls of a rank the record may have lost."""
    info = facts.trace.info
    anyone = info.limits["matching"].calls if "matching" in info.limits else 0
    return anyone + info.unseen.get(rank, {}).get(CUT, 0)
