"""Groups that are left behind, made by some ranks only, or destroyed too early. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from distkit.diagnosis import requests, rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding, by_line
from distkit.events import COMPUTATION, WORLD, Op, Span
from distkit.trace.calls import at, call


def remarks(
    facts: Evidence, told: list[Finding], forgotten: set[tuple[int, int]]
) -> Iterator[Finding]:
    """What is wrong with groups, and hangs nobody.

    Args:
        facts: the run.
        told: the findings so far.
        forgotten: rank and number of calls never waited for: those have a finding already.
    """
    yield from _used_after(facts)
    yield from _open(facts, forgotten)
    yield from _left_behind(facts)
    if not told:
        yield from _not_by_all(facts)


def _left_behind(facts: Evidence) -> Iterator[Finding]:
    """Groups that a line makes again and again, while those before are neither held nor ended."""
    lost = (s for s in facts.spans if isinstance(s.attributes.get("lost"), int))
    for where, spans in by_line(lost).items():
        ranks = sorted(spans)
        said = {call(s) for s in spans.values()}
        yield rules.leaked_group.finding(
            *spans.values(),
            culprits=ranks,
            ranks=ranks,
            call=said.pop() if len(said) == 1 else "new_group",
            where=where,
            n=max(s.attributes["lost"] for s in spans.values()) + 1,
        )


def _not_by_all(facts: Evidence) -> Iterator[Finding]:
    """Groups that some ranks have made without the others."""
    world = facts.members(WORLD)
    if not world or not all(map(facts.returned, world)):
        return
    made = {r: [s for s in facts.spans if s.rank == r and s.op is Op.NEW_GROUP] for r in world}
    fewest = min(map(len, made.values()))
    here = {r: calls[fewest] for r, calls in made.items() if len(calls) > fewest}
    if not here:
        return
    gone = [r for r in world if r not in here]
    yield rules.new_group_counts.finding(
        *here.values(), culprits=gone, missing=gone, here=Calls(here.values()), gone=gone
    )


# -- destroyed ---------------------------------------------------------------------------------


def _ends(facts: Evidence) -> dict[tuple[int, str], Span]:
    """Where each rank has destroyed which group."""
    marks = [s for s in facts.trace.spans if s.op is Op.MARK and "destroyed" in s.attributes]
    return {(s.rank, s.attributes["destroyed"]): s for s in marks}


def _used_after(facts: Evidence) -> Iterator[Finding]:
    """Calls on groups that their own rank has destroyed before."""
    ends, found = _ends(facts), defaultdict[tuple[str, str], dict[int, Span]](dict)
    for s in facts.trace.spans:
        end = ends.get((s.rank, s.group))
        if end is not None and end.seq < s.seq and s.op not in COMPUTATION and s.group != WORLD:
            found[end.where, s.where].setdefault(s.rank, s)
    for (where, _), spans in found.items():
        yield rules.used_after_destroy.finding(
            *spans.values(),
            culprits=sorted(spans),
            here=Calls(spans.values()),
            they="it has" if len(spans) == 1 else "they have",
            where=where,
        )


def _open(facts: Evidence, forgotten: set[tuple[int, int]]) -> Iterator[Finding]:
    """Groups that were destroyed before the calls on them were waited for."""
    found: dict[str, list[tuple[Span, Span]]] = defaultdict(list)
    for (rank, _), end in _ends(facts).items():
        seqs = end.attributes.get("open")
        keys = [(rank, seq) for seq in seqs] if isinstance(seqs, tuple) else []
        still = [facts.by_key[key] for key in keys if key in facts.by_key and key not in forgotten]
        if still:
            found[end.where].append((end, still[0]))
    for where, pairs in found.items():
        ranks = sorted(end.rank for end, _ in pairs)
        yield rules.destroyed_too_early.finding(
            *(end for end, _ in pairs),
            culprits=ranks,
            ranks=ranks,
            where=where,
            name=requests.name(pairs[0][1]),
            call=pairs[0][1],
        )


def destroyed(facts: Evidence, stuck: dict[int, Span]) -> tuple[Finding, set[int]] | None:
    """Ranks wait in a call on a group that another member has destroyed."""
    ends = _ends(facts)
    for rank, mine in stuck.items():
        there = [ends.get((r, mine.group)) for r in facts.waits_for[rank]]
        by = [s for s in there if s is not None and facts.program.skips(s.where, mine.where)]
        if by:
            here = {r: s for r, s in stuck.items() if (s.group, s.op) == (mine.group, mine.op)}
            who = sorted({s.rank for s in by})
            finding = rules.destroyed_group.finding(
                *by,
                *here.values(),
                culprits=who,
                missing=who,
                ranks=who,
                group="the default group" if mine.group == WORLD else "the group",
                where=by[0].where,
                here=Calls(here.values(), facts.call),
            )
            return finding, set(here)
    return None


def explained(facts: Evidence, failure: Finding) -> Finding:
    """The failure of ranks, with its cause if they call on a group that they have destroyed."""
    ends = _ends(facts)
    texts = {facts.ends[r].text for r in failure.culprits if r in facts.ends}
    by = [s for (r, _), s in ends.items() if r in failure.culprits]
    if not by or not all(any(words in text for words in _GONE) for text in texts):
        return failure
    message = f"{failure.message[:-1]}: the group was destroyed{at(by[-1].where)}."
    return replace(failure, message=message, remedy=rules.used_after_destroy.remedy)


#: How torch refuses a group that was destroyed.
_GONE = (
    "not initialized in the world group map",
    "Invalid process group specified",
    "Default process group has not been initialized",
)
