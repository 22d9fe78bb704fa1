"""Mistakes with groups that are leaked, created by only some ranks, or destroyed too early.

No side effects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distkit.diagnosis import rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding
from distkit.events import COMPUTATION, WORLD, Op, Span
from distkit.trace.log import grouped


def leaked(facts: Evidence) -> Iterator[Finding]:
    """Find lines that create groups repeatedly without keeping or destroying the earlier ones."""
    lost = (s for s in facts.spans if isinstance(s.attributes.get("lost"), int))
    for where, spans in grouped(lost, lambda s: s.where).items():
        ranks = sorted({s.rank for s in spans})
        yield rules.leaked_group.finding(
            *spans,
            culprits=ranks,
            ranks=ranks,
            where=where,
            n=max(s.attributes["lost"] for s in spans) + 1,
        )


def created_by_some(facts: Evidence) -> Iterator[Finding]:
    """Find groups that only some ranks have created."""
    world = facts.members(WORLD)
    if not world or not all(map(facts.returned, world)):
        return
    created = {r: [s for s in facts.spans if s.rank == r and s.op is Op.NEW_GROUP] for r in world}
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


# -- destroyed ---------------------------------------------------------------------------------


def _destroy_marks(facts: Evidence) -> dict[tuple[int, str], Span]:
    """Return the marks of destroyed groups, by rank and group."""
    marks = [s for s in facts.trace.spans if s.op is Op.MARK and "destroyed" in s.attributes]
    return {(s.rank, s.attributes["destroyed"]): s for s in marks}


def used_after_destroy(facts: Evidence) -> Iterator[Finding]:
    """Find calls on groups that the calling rank has already destroyed."""
    ends, uses = _destroy_marks(facts), defaultdict[tuple[str, str], dict[int, Span]](dict)
    for s in facts.trace.spans:
        end = ends.get((s.rank, s.group))
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


def destroyed_too_early(facts: Evidence, forgotten: set[tuple[int, int]]) -> Iterator[Finding]:
    """Find groups that were destroyed before the program waited for calls on them.

    Args:
        facts: the evidence of the run.
        forgotten: ``(rank, seq)`` of calls that were never waited for and already have a finding.
    """
    destroyed: dict[str, list[tuple[Span, Span]]] = defaultdict(list)
    for (rank, _), end in _destroy_marks(facts).items():
        seqs = end.attributes.get("open")
        keys = [(rank, seq) for seq in seqs] if isinstance(seqs, tuple) else []
        calls = [facts.by_key[key] for key in keys if key in facts.by_key and key not in forgotten]
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


def destroyed(facts: Evidence, stuck: dict[int, Span]) -> tuple[Finding, set[int]] | None:
    """Find ranks that wait in a call on a group that another member has destroyed."""
    ends = _destroy_marks(facts)
    for rank, span in stuck.items():
        candidates = [ends.get((r, span.group)) for r in facts.waits_for[rank]]
        marks = [
            m for m in candidates if m is not None and facts.program.skips(m.where, span.where)
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
                calls=Calls(spans_by_rank.values(), facts.call),
            )
            return finding, set(spans_by_rank)
    return None
