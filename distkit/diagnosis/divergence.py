"""Divergence of ranks: calls that only some ranks make, and loops that some ranks exit early.

No side effects.

The sequences of calls show where ranks diverge. The program's source code shows which ranks
deviate, and why. See :mod:`distkit.diagnosis.program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distkit._format import joined
from distkit.diagnosis import rules
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.program import Guard, Path, Program
from distkit.diagnosis.rules import Calls, Finding, headline
from distkit.events import Op, Span
from distkit.trace.calls import raised_at
from distkit.trace.log import grouped

#: Calls at one position in a group's sequence, by rank.
Column = dict[int, Span]

_MAX_SHIFT = 8  # maximum number of calls by which one rank may be ahead


def outliers(classes: list[list[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest class, or all ranks if several classes are largest."""
    sizes = sorted(map(len, classes))
    largest = [c for c in classes if len(c) == sizes[-1]]
    others = [c for c in classes if c is not largest[0]] if len(largest) == 1 else classes
    return tuple(sorted(r for c in others for r in c))


def diverged(
    evidence: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """Explain two different lines at one position by the loops and conditions around them."""
    sides = grouped(sorted(column), lambda rank: column[rank].where)
    if len(sides) != 2 or "" in sides:
        return None
    one, other = sides.values()
    path, other_path = (evidence.path(column[ranks[0]]) for ranks in (one, other))
    if any(s.op is Op.NEW_GROUP for s in column.values()):
        return None
    candidates = []
    for callers, others, here, there in (
        (one, other, path, other_path),
        (other, one, other_path, path),
    ):
        earlier = [s.where == here[0] for s in calls[others[0]][:nth]]
        guard = _diverging_guard(evidence.program, here, there, first=not any(earlier))
        if guard is not None and guard.statement.is_loop:
            both = callers[0], others[0]
            call_counts = [sum(s.where == here[0] for s in calls[rank][:nth]) for rank in both]
            return one_more(evidence, column, [callers, others], call_counts)
        candidates += [(guard, callers, others)] if guard is not None else []
    candidates = [f for f in candidates if not f[0].is_exit] or candidates
    return _only_some(evidence, column, *candidates[0]) if len(candidates) == 1 else None


def _diverging_guard(program: Program, here: Path, there: Path, *, first: bool) -> Guard | None:
    """Return the loop, condition or exit that makes some ranks skip a line.

    ``first`` means that the other ranks have never reached the line, so a condition on the rank may
    be the reason.
    """
    guards = program.differing_guards(here, there)
    by_rank = [g for g in guards if g.by_rank and not g.statement.is_loop]
    inward = [g for g in guards if not g.is_exit]
    candidates = [*(by_rank[-1:] if first else ()), *inward, *guards]
    # the other ranks have not yet reached a loop after their line
    suitable = (
        g
        for g in candidates
        if not (g.statement.is_loop and program.follows(g.statement.where, there))
    )
    return next(suitable, None)


def _only_some(
    evidence: Evidence, column: Column, guard: Guard, callers: list[int], others: list[int]
) -> Finding:
    """Return the finding for a call that only some ranks make because of a condition."""
    spans, other_spans = [column[r] for r in callers], [column[r] for r in others]
    earlier = [
        evidence.count_earlier_calls(r, other_spans[0].where, column[r])
        for r in (callers[0], others[0])
    ]
    rule = rules.only_some
    return rule.finding(
        *column.values(),
        remedy=guard_remedy(guard),
        culprits=outliers([callers, others]) if len(callers) != len(others) else callers,
        calls=Calls(spans),
        other_calls=Calls(other_spans),
        under="" if guard.is_exit else rule.fill("under", guard=guard.statement),
        again=rule.fill("again", n=earlier[1] + 1, ranks=callers, m=earlier[0])
        if earlier[0]
        else "",
    )


def one_more(
    evidence: Evidence, column: Column, sides: Sequence[list[int]], call_counts: Sequence[int]
) -> Finding:
    """Return the finding for a call that some ranks make once more than the others.

    Args:
        evidence: the evidence from the run.
        column: the calls of all ranks at this position.
        sides: the ranks that make the call once more, and the others.
        call_counts: the number of earlier calls on each side.
    """
    spans, other_spans = ([column[r] for r in side] for side in sides)
    gradients = "gradients" in spans[0].attributes
    rule = rules.uneven_backward if gradients else rules.uneven
    return rule.finding(
        *column.values(),
        remedy=uneven_remedy(evidence, spans[0], gradients),
        culprits=outliers([*sides]),
        calls=Calls(spans),
        other_calls=Calls(other_spans),
        n=call_counts[0] + 1,
        after=rule.fill("after", n=call_counts[1]) if call_counts[1] else rule.fill("without"),
    )


def shifted(
    evidence: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """If a rank is stuck, find calls that match by chance because one rank makes extra calls."""
    group = next(iter(column.values())).group
    is_stuck = any(s.group == group and s.match is None for s in evidence.stuck.values())
    if len({s.where for s in column.values()}) < 2 or not is_stuck:
        return None
    for leader in column:
        for follower in column:
            if leader != follower and _has_more(calls[leader][nth:], calls[follower][nth:]):
                return diverged(evidence, calls, nth, column)
    return None


def _has_more(one: list[Span], other: list[Span]) -> bool:
    """Return whether ``one`` starts with extra calls and then equals ``other``."""
    a, b = ([(s.op, s.where) for s in row] for row in (one, other))
    if not a or not b or a[0] == b[0]:
        return False
    for extra in range(1, min(_MAX_SHIFT, len(a) - 1) + 1):
        n = min(len(a) - extra, len(b))
        if a[extra : extra + n] == b[:n]:
            return len(a) > len(b) or a[1 : 1 + n] != b[1 : 1 + n]
    return False


# -- remedies -------------------------------------------------------------------------


def guard_remedy(guard: Guard) -> str:
    """Return the remedy for a call that only some ranks make, given its guard."""
    rule, statement = rules.divergence, guard.statement
    if statement.is_loop:
        remedy = rule.fill("same_number", what=f"iterations of {statement}").lower() + "."
    elif guard.is_exit:
        remedy = rule.fill("not_reached", guard=statement)
    else:
        remedy = rule.fill("all_or_none" if guard.by_rank else "same_result", guard=statement)
    return rule.fill("same_calls") + remedy


def uneven_remedy(evidence: Evidence, span: Span, gradients: bool = False) -> str:
    """Return the remedy for a line that some ranks reach more often than others."""
    rule, path = rules.divergence, evidence.path(span)
    exits, loops = evidence.program.exits(path), evidence.program.loops(path)
    guard = evidence.program.skipping_guard(path)
    if guard is not None and guard.by_rank and not (guard.statement.is_loop or guard.is_exit):
        return guard_remedy(guard)
    remedy = rule.fill(
        "same_number", what=f"iterations of {joined([*map(str, loops)])}" if loops else "batches"
    )
    if gradients and any("no_sync" in e.text for e in exits):
        remedy += rule.fill("no_sync")
    if not exits and loops and loops[0].text.startswith("while "):
        return f"{remedy}: " + rule.fill("agree")
    is_stream = any("IterableDataset" in text for text in evidence.trace.info.sources.values())
    remedy += rule.fill("stream" if is_stream else "batches")
    if exits:
        return (
            rule.fill("same_branch", exits=joined([*map(str, exits)]))
            + rule.fill("agree")
            + f" {remedy}."
        )
    return f"{remedy}." if loops else remedy + rule.fill("look_for_exits")


def missing_call_remedy(evidence: Evidence, span: Span) -> str:
    """Return the remedy for a call that some ranks skip while others wait in it; "" if unknown."""
    if (guard := evidence.program.skipping_guard(path := evidence.path(span))) is not None:
        return guard_remedy(guard)
    if not (exits := evidence.program.exits(path)):
        return uneven_remedy(evidence, span) if evidence.program.loops(path) else ""
    return rules.divergence.fill("may_be_skipped", exits=joined([*map(str, exits)]))


# -- gradients ------------------------------------------------------------------------


def find_unused_parameters(
    evidence: Evidence, ranks: Iterable[int], spans: Iterable[Span]
) -> Finding | None:
    """Find ranks that ended their backward pass without gradients that other ranks wait for."""
    parameters = evidence.unused_parameters(ranks)
    return unused(rules.unused_parameter, parameters, spans) if parameters else None


def unused(
    rule: rules.Rule,
    missing: dict[int, list[str]],
    spans: Iterable[Span],
    **values: Any,
) -> Finding:
    """Return the finding for ranks that did not use parameters, listed by rank in ``missing``."""
    names = ", ".join(
        sorted({n for missing_names in missing.values() for n in missing_names} - {"?"})
    )
    waiting = [*spans]
    ranks = [*missing]
    return rule.finding(
        *waiting,
        culprits=ranks,
        missing=ranks,
        ranks=ranks,
        names=f" ({names})" if names else "",
        others=Calls(waiting),
        **values,
    )


def raised_in_flight(evidence: Evidence, span: Span) -> Finding | None:
    """Return the finding for a rank that is in a collective while an exception is propagating."""
    error = evidence.raising(span)
    if error is None:
        return None
    return rules.raised_in_flight.finding(
        culprits=[span.rank],
        lines={span.rank: error.where or span.where},
        rank=span.rank,
        raised=raised_at(headline(error.text), error.where),
        call=evidence.call(span),
        where=span.where,
    )
