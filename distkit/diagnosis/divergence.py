"""Points where ranks diverge: calls that only some make, loops that some leave early. Pure.

The ranks' sequences of calls tell where they part. Which of them is on a way of its own, and why,
the program's text tells: see :mod:`distkit.diagnosis.program`.
"""

from __future__ import annotations

from collections.abc import Iterable

from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding, Kind, clauses, lines, times, verb
from distkit.diagnosis.program import Place
from distkit.events import Op, Span
from distkit.trace.calls import at, named, ordinal, raised_at

#: Calls at one position of a group's sequence, by rank.
Column = dict[int, Span]

_EXITS = 3  # so many ways out of a loop are named
_FURTHEST = 8  # so many calls may one rank have made more than another


def minority(classes: list[list[int]]) -> tuple[int, ...]:
    """The ranks outside the largest class; all of them when none is the largest."""
    sizes = sorted(map(len, classes))
    most = [c for c in classes if len(c) == sizes[-1]]
    odd = [c for c in classes if c is not most[0]] if len(most) == 1 else classes
    return tuple(sorted(r for c in odd for r in c))


def parted(
    facts: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """Two lines at one position, told apart by the loops and conditions around them."""
    sides: dict[str, list[int]] = {}
    for rank, span in sorted(column.items()):
        sides.setdefault(span.where, []).append(rank)
    if len(sides) != 2 or "" in sides:
        return None
    (one, some), (other, rest) = sides.items()
    program = facts.program
    if program.alternatives(one, other):
        return None
    if any(s.op is Op.NEW_GROUP for s in column.values()):
        return None
    around, beside = program.parting(one, other), program.parting(other, one)
    sides_of = ((around, beside, some, rest), (beside, around, rest, some))
    for place, _, inside, outside in sides_of:
        before = place is not None and program.follows(place.where, column[outside[0]].where)
        if place is not None and place.loops and not before:
            return _left_earlier(facts, calls, nth, column, inside, outside)
    for place, opposite, inside, outside in sides_of:
        if place is not None and not place.loops and (opposite is None or opposite.loops):
            return _only(column, place, inside, outside)
    return None


def _only(column: Column, place: Place, inside: list[int], outside: list[int]) -> Finding:
    """Some ranks make a call under a condition, and the others go on without."""
    here, there = [column[r] for r in inside], [column[r] for r in outside]
    culprits = minority([inside, outside]) if len(inside) != len(outside) else tuple(inside)
    return Finding(
        Kind.DIFFERENT_COLLECTIVE,
        f"only {clauses(here, 'call')}, under {place}; meanwhile {clauses(there, 'call')}.",
        ALL_OR_NONE.format(condition=place),
        culprits,
        lines=lines(*column.values()),
    )


def _left_earlier(
    facts: Evidence,
    calls: dict[int, list[Span]],
    nth: int,
    column: Column,
    inside: list[int],
    outside: list[int],
) -> Finding:
    """Some ranks are in a loop still that the others have left."""
    here, there = [column[r] for r in inside], [column[r] for r in outside]
    where, gradients = here[0].where, "gradients" in here[0].attributes
    did = [sum(s.where == where for s in calls[r][:nth]) for r in (inside[0], outside[0])]
    if gradients:
        said = f"{clauses(here, 'start', dict.fromkeys(inside, 'one more backward pass'))}"
        then = clauses(there, "go on to")
    else:
        said = f"{clauses(here, 'call')} for the {ordinal(did[0] + 1)} time"
        after = f" after {times(did[1])}" if did[1] else " without calling it"
        then = f"{clauses(there, 'go on to')}{after}"
    return Finding(
        Kind.UNEVEN,
        f"{said}, while {then}: they run different numbers of iterations.",
        uneven(facts, where, gradients),
        minority([inside, outside]),
        lines=lines(*column.values()),
    )


def shifted(
    facts: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """Calls that fit by chance: one rank makes more calls than another from here on, and hangs."""
    group = next(iter(column.values())).group
    if len({s.where for s in column.values()}) < 2 or not _is_held(facts, group):
        return None
    for more in column:
        for fewer in column:
            if more != fewer and _has_more(calls[more][nth:], calls[fewer][nth:]):
                return parted(facts, calls, nth, column)
    return None


def _is_held(facts: Evidence, group: str) -> bool:
    return any(s.group == group and s.match is None for s in facts.stuck_spans())


def _has_more(one: list[Span], other: list[Span]) -> bool:
    """True if one goes on as the other does, but for some calls before."""
    mine, theirs = ([(s.op, s.where) for s in row] for row in (one, other))
    if not mine or not theirs or mine[0] == theirs[0]:
        return False
    for extra in range(1, min(_FURTHEST, len(mine) - 1) + 1):
        both = min(len(mine) - extra, len(theirs))
        if mine[extra : extra + both] == theirs[:both]:
            return len(mine) > len(theirs) or mine[1 : 1 + both] != theirs[1 : 1 + both]
    return False


# -- remedies -------------------------------------------------------------------------

ALL_OR_NONE = (
    "Every rank of the group has to make the same calls: move this one out of the condition "
    "{condition}, or let no rank make it."
)
BATCHES = "for batches, use DistributedSampler and drop_last=True"
LOOK = "look for a break, return or continue that only some ranks reach"
NO_SYNC = ", and the same number of backward passes outside of no_sync()"


def uneven(facts: Evidence, where: str, gradients: bool = False) -> str:
    """The remedy where some ranks reach a line more often than others."""
    exits, loops = facts.program.exits(where), facts.program.loops(where)
    what = f"iterations of {_either(loops)}" if loops else "batches"
    also = NO_SYNC * (gradients and any("no_sync" in e.words for e in exits))
    even = f"Give every rank the same number of {what}{also} ({BATCHES})"
    if exits:
        return (
            f"Make all ranks take the same branch at {_either(exits)}: what decides there has to "
            f"be the same everywhere, so all_reduce it first. {even}."
        )
    condition = facts.program.condition(where)
    look = f"look at {condition}" if condition is not None else LOOK
    return f"{even}." if loops and condition is None else f"{even}, and {look}."


def _either(exits: Iterable[Place]) -> str:
    some = [str(e) for e in exits]
    return " and ".join(some) if len(some) <= _EXITS else ", ".join([*some[:_EXITS], "…"])


def unused(facts: Evidence, lacking: dict[int, list[str]], spans: Iterable[Span]) -> Finding:
    """Backward passes that have ended without all gradients, so that the others wait for them."""
    ranks, waiting = list(lacking), list(spans)
    names = sorted({n for found in lacking.values() for n in found} - {"?"})
    which = f" ({', '.join(names)})" if names else ""
    say = dict.fromkeys((s.rank for s in waiting), "gradients")
    return Finding(
        Kind.UNUSED_PARAMETER,
        f"{verb(ranks, 'have')} ended a backward pass without the gradients of some parameters"
        f"{which}; {clauses(waiting, 'wait for', say)}.",
        UNUSED,
        tuple(ranks),
        missing_ranks=tuple(ranks),
        lines=lines(*waiting),
    )


UNUSED = (
    "Use every parameter of the model in every forward pass, on every rank, "
    "or pass find_unused_parameters=True to DDP."
)


def in_flight(facts: Evidence, span: Span) -> Finding | None:
    """A rank that waits in a collective on its way out of an exception."""
    text, where = facts.raising(span)
    if not text:
        return None
    first = text.splitlines()[0][:200]
    return Finding(
        Kind.RAISED,
        f"rank {span.rank} raised {raised_at(first, where)}, and with this exception under way "
        f"waits in {facts.call(span)}{at(span.where)}.",
        f"Fix the exception first. The call at {span.where} stands in a `finally`, an `except` "
        f"or an `__exit__`: without the exception {named([span.rank])} would not be there yet.",
        (span.rank,),
        lines={span.rank: where or span.where},
    )


#: What follows a message about a barrier.
BARRIER = "Call barrier() on every rank, or on none."


def not_coming(facts: Evidence, mine: Span, kind: Kind) -> str:
    """The remedy where ranks end without a call that others wait in; "" if unknown."""
    condition = facts.program.condition(mine.where)
    if condition is not None and kind in (Kind.SKIPPED, Kind.MISSING_BARRIER, Kind.UNEVEN):
        return ALL_OR_NONE.format(condition=condition)
    exits = facts.program.exits(mine.where)
    if exits and mine.op is not Op.NEW_GROUP:
        return f"Make every rank reach it: {_either(exits)} may keep some away."
    return ""
