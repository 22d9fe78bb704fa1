"""Points where ranks diverge: calls that only some make, loops that some leave early. Pure.

The ranks' sequences of calls tell where they part. Which of them is on a way of its own, and why,
the program's text tells: see :mod:`distkit.diagnosis.program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distkit.diagnosis import rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding
from distkit.diagnosis.program import Guard, Path, Place, Program
from distkit.events import Op, Span
from distkit.trace.calls import raised_at
from distkit.trace.log import grouped

#: Calls at one position of a group's sequence, by rank.
Column = dict[int, Span]

_EXITS = 3  # so many ways out of a loop are named
_FURTHEST = 8  # so many calls may one rank have made more than another
_LONGEST = 200  # characters of an exception's first line that are shown


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
    sides = grouped(sorted(column), lambda rank: column[rank].where)
    if len(sides) != 2 or "" in sides:
        return None
    one, other = sides.values()
    here, there = (facts.path(column[ranks[0]]) for ranks in (one, other))
    if facts.program.alternatives(here, there):
        return None
    if any(s.op is Op.NEW_GROUP for s in column.values()):
        return None
    found = []
    for inside, outside, mine, theirs in ((one, other, here, there), (other, one, there, here)):
        before = [s.where == mine[0] for s in calls[outside[0]][:nth]]
        guard = _parting(facts.program, mine, theirs, first=not any(before))
        if guard is not None and guard.place.loops:
            both = inside[0], outside[0]
            did = [sum(s.where == mine[0] for s in calls[rank][:nth]) for rank in both]
            return one_more(facts, column, [inside, outside], did)
        found += [(guard, inside, outside)] if guard is not None else []
    found = [f for f in found if not f[0].leads_away] or found
    return _only(facts, column, *found[0]) if len(found) == 1 else None


def _parting(program: Program, here: Path, there: Path, *, first: bool) -> Guard | None:
    """What leads some ranks to a line and others past it: loop, condition or exit.

    ``first``: the others have never called it, so that a condition on the rank may be the reason.
    """
    guards = program.unshared(here, there)
    by_rank = [g for g in guards if g.by_rank and not g.place.loops]
    inward = [g for g in guards if not g.leads_away]
    best = [*(by_rank[-1:] if first else ()), *inward, *guards]
    # to a loop that comes later the other ranks have not come yet
    fits = (g for g in best if not (g.place.loops and program.follows(g.place.where, there)))
    return next(fits, None)


def _only(
    facts: Evidence, column: Column, guard: Guard, inside: list[int], outside: list[int]
) -> Finding:
    """Some ranks make a call under a condition, and the others go on without."""
    here, there = [column[r] for r in inside], [column[r] for r in outside]
    did = [facts.before(r, there[0].where, column[r]) for r in (inside[0], outside[0])]
    rule = rules.only_some
    return rule.finding(
        *column.values(),
        remedy=all_or_none(facts, here[0], guard),
        culprits=minority([inside, outside]) if len(inside) != len(outside) else inside,
        here=Calls(here),
        there=Calls(there),
        under="" if guard.leads_away else rule.say("under", guard=guard.place),
        again=rule.say("again", n=did[1] + 1, ranks=inside, m=did[0]) if did[0] else "",
    )


def one_more(
    facts: Evidence, column: Column, sides: Sequence[list[int]], did: Sequence[int]
) -> Finding:
    """Some ranks make a call once more, and the others go on to another one.

    Args:
        facts: the run.
        column: the calls of all of them.
        sides: those who make the call once more, and the others.
        did: how often each side has made the call before.
    """
    here, there = ([column[r] for r in side] for side in sides)
    gradients = "gradients" in here[0].attributes
    rule = rules.uneven_backward if gradients else rules.uneven
    return rule.finding(
        *column.values(),
        remedy=uneven(facts, here[0], gradients),
        culprits=minority([*sides]),
        here=Calls(here),
        there=Calls(there),
        n=did[0] + 1,
        after=rule.say("after", n=did[1]) if did[1] else rule.say("without"),
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
    return any(s.group == group and s.match is None for s in facts.stuck.values())


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


def all_or_none(facts: Evidence, span: Span, guard: Guard) -> str:
    """The remedy for a call that only some ranks make, by what keeps the others away."""
    rule, place = rules.divergence, guard.place
    if place.loops:
        what = rule.say("same_number", what=f"iterations of {place}").lower() + "."
    elif guard.leads_away:
        what = rule.say("keeps_away", guard=place)
        what += _hidden(facts, span) if "raise" in place.words else ""
    else:
        what = rule.say("all_or_none" if guard.names_rank else "alike", guard=place)
    return rule.say("same_calls") + what


def _hidden(facts: Evidence, span: Span) -> str:
    """The handler that lets a rank go on which has raised, if there is one."""
    handlers = facts.program.hides(facts.path(span))
    return " " + rules.divergence.say("hides", handler=handlers[0]) if handlers else ""


def uneven(facts: Evidence, span: Span, gradients: bool = False) -> str:
    """The remedy where some ranks reach a line more often than others."""
    rule, path = rules.divergence, facts.path(span)
    exits, loops = facts.program.exits(path), facts.program.loops(path)
    guard = facts.program.keeps_away(path)
    decides = guard is not None and not (guard.place.loops or guard.leads_away)
    if guard is not None and decides and guard.names_rank:
        return all_or_none(facts, span, guard)
    even = rule.say("same_number", what=f"iterations of {_either(loops)}" if loops else "batches")
    if gradients and any("no_sync" in e.words for e in exits):
        even += rule.say("no_sync")
    if not exits and loops and loops[0].words.startswith("while "):
        return f"{even}: " + rule.say("agree")
    even += rule.say("stream" if facts.program.mentions("IterableDataset") else "batches")
    if exits:
        return rule.say("same_branch", exits=_either(exits)) + rule.say("agree") + f" {even}."
    if guard is not None and decides:
        return even + rule.say("look_at", guard=guard.place)
    return f"{even}." if loops else even + rule.say("look")


def not_coming(facts: Evidence, mine: Span, gone: Iterable[int]) -> str:
    """The remedy where ranks end without a call that others wait in; "" if unknown."""
    path, away = facts.path(mine), {*gone}
    others = {s.where for s in facts.spans if s.rank in away and s.where}
    guard = facts.program.keeps_away(path, [(line,) for line in sorted(others)])
    if guard is not None:
        return all_or_none(facts, mine, guard)
    if exits := facts.program.exits(path):
        may = rules.divergence.say("may_keep_away", exits=_either(exits))
        return rules.divergence.say("reach", exits=may)
    hidden = _hidden(facts, mine)
    return rules.divergence.say("reach", exits="") + hidden if hidden else ""


def _either(exits: Iterable[Place]) -> str:
    some = [str(e) for e in exits]
    return " and ".join(some) if len(some) <= _EXITS else ", ".join([*some[:_EXITS], "…"])


# -- gradients ------------------------------------------------------------------------


def left_out(facts: Evidence, ranks: Iterable[int], spans: Iterable[Span]) -> Finding | None:
    """Backward passes that have ended without all gradients, so that the others wait for them."""
    some = [*ranks]
    if lacking := facts.left_out("unreduced", some):
        return unused(rules.unused_parameter, lacking, spans)
    if modules := facts.left_out("unused", some):
        return unused(rules.unused_module, modules, spans)
    return None


def unused(
    rule: rules.Rule,
    lacking: dict[int, list[str]],
    spans: Iterable[Span],
    **more: Any,
) -> Finding:
    """Ranks that have left something out, by its names, and those who wait for its gradients."""
    names = ", ".join(sorted({n for found in lacking.values() for n in found} - {"?"}))
    if rule is not rules.unused_module:
        names = f" ({names})" if names else ""
    waiting = [*spans]
    ranks = [*lacking]
    return rule.finding(
        *waiting,
        culprits=ranks,
        missing=ranks,
        ranks=ranks,
        names=names,
        others=Calls(waiting),
        **more,
    )


def in_flight(facts: Evidence, span: Span) -> Finding | None:
    """A rank that waits in a collective on its way out of an exception."""
    text, where = facts.raising(span)
    if not text:
        return None
    return rules.raised_in_flight.finding(
        culprits=[span.rank],
        lines={span.rank: where or span.where},
        rank=span.rank,
        raised=raised_at(text.splitlines()[0][:_LONGEST], where),
        call=facts.call(span),
        where=span.where,
    )
