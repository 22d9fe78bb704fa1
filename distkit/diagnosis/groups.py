"""Groups that are left behind, made by some ranks only, or destroyed too early. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from distkit._format import named
from distkit.diagnosis import requests
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding, Kind, clauses, lines, verb
from distkit.diagnosis.mismatches import NEW_GROUP
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
    lost: dict[str, dict[int, Span]] = defaultdict(dict)
    for s in facts.spans:
        if isinstance(s.attributes.get("lost"), int):
            lost[s.where][s.rank] = s
    for where, spans in lost.items():
        ranks = sorted(spans)
        more = max(s.attributes["lost"] for s in spans.values())
        said = {call(s) for s in spans.values()}
        made = said.pop() if len(said) == 1 else "new_group"
        yield Finding(
            Kind.LEAKED_GROUP,
            f"{verb(ranks, 'make')} groups with {made}{at(where)} again and again; at least "
            f"{more + 1} are still alive: torch keeps each with its connections and threads.",
            "Make the group once, before the loop, or call dist.destroy_process_group(group) "
            "when it is no longer used.",
            tuple(ranks),
            lines=lines(*spans.values()),
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
    yield Finding(
        Kind.NEW_GROUP,
        f"{clauses(here.values(), 'call')}, and {named(gone)} {'does' if len(gone) == 1 else 'do'} "
        "not: torch names groups by counting these calls, so that later groups do not find "
        "together.",
        NEW_GROUP,
        tuple(gone),
        missing_ranks=tuple(gone),
        lines=lines(*here.values()),
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
        yield Finding(
            Kind.WRONG_GROUP,
            f"{clauses(spans.values(), 'call')} on a group that "
            f"{'it has' if len(spans) == 1 else 'they have'} destroyed{at(where)}.",
            "Call destroy_process_group after the last use of the group.",
            tuple(sorted(spans)),
            lines=lines(*spans.values()),
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
        yield Finding(
            Kind.WRONG_GROUP,
            f"{verb(ranks, 'destroy')} a group{at(where)} before waiting for "
            f"{requests.name(pairs[0][1])}{at(pairs[0][1].where)} on it.",
            "Call wait() on what is open before destroy_process_group.",
            tuple(ranks),
            lines=lines(*(end for end, _ in pairs)),
        )


def destroyed(facts: Evidence, stuck: dict[int, Span]) -> tuple[Finding, set[int]] | None:
    """Ranks wait in a call on a group that another member has destroyed."""
    ends = _ends(facts)
    for rank, mine in stuck.items():
        there = [ends.get((r, mine.group)) for r in facts.stuck[rank].waits_for]
        by = [s for s in there if s is not None and facts.program.skips(s.where, mine.where)]
        if by:
            here = {r: s for r, s in stuck.items() if (s.group, s.op) == (mine.group, mine.op)}
            say = {r: facts.call(s) for r, s in here.items()}
            where = f"{clauses(here.values(), 'wait in', say)}"
            who = sorted({s.rank for s in by})
            which = "the default group" if mine.group == WORLD else "the group"
            return (
                Finding(
                    Kind.WRONG_GROUP,
                    f"{verb(who, 'have')} destroyed {which}{at(by[0].where)}; {where}.",
                    "Let every member make the same calls on a group before one of them calls "
                    "destroy_process_group: move that behind the last of them, on every rank.",
                    tuple(who),
                    missing_ranks=tuple(who),
                    lines=lines(*by, *here.values()),
                ),
                set(here),
            )
    return None


def explained(facts: Evidence, failure: Finding) -> Finding:
    """The failure of ranks, with its cause if they call on a group that they have destroyed."""
    ends = _ends(facts)
    texts = {facts.ends[r].text for r in failure.culprits if r in facts.ends}
    by = [s for (r, _), s in ends.items() if r in failure.culprits]
    if not by or not all(any(words in text for words in _GONE) for text in texts):
        return failure
    return replace(
        failure,
        message=f"{failure.message[:-1]}: the group was destroyed{at(by[-1].where)}.",
        remedy="Call destroy_process_group once, after the last use of the group.",
    )


#: How torch refuses a group that was destroyed.
_GONE = (
    "not initialized in the world group map",
    "Invalid process group specified",
    "Default process group has not been initialized",
)
