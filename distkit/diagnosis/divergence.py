"""Points where ranks diverge: calls that only some make, loops that some leave early. Pure.

The ranks' sequences of calls tell where they part. Which of them is on a way of its own, and why,
the program's text tells: see :mod:`distkit.diagnosis.program`.
"""

from __future__ import annotations

from collections.abc import Iterable

from distkit._format import named, ordinal, times
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding, Kind, clauses, lines, verb
from distkit.diagnosis.program import Guard, Path, Place, Program
from distkit.events import Op, Span
from distkit.trace.calls import at, raised_at

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
            return _left_earlier(facts, calls, nth, column, inside, outside)
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
    culprits = minority([inside, outside]) if len(inside) != len(outside) else tuple(inside)
    under = f", under {guard.place}" * (not guard.leads_away)
    did = [facts.before(r, there[0].where, column[r]) for r in (inside[0], outside[0])]
    again = (
        f" for the {ordinal(did[1] + 1)} time, which {verb(inside, 'have')} called {times(did[0])}"
    )
    return Finding(
        Kind.DIFFERENT_COLLECTIVE,
        f"only {clauses(here, 'call')}{under}; meanwhile {clauses(there, 'call')}"
        f"{again if did[0] else ''}.",
        all_or_none(facts, here[0], guard),
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
        uneven(facts, here[0], gradients),
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

SAME_CALLS = "Every rank of the group has to make the same calls: "
ALL_OR_NONE = "move this one out of the condition {guard}, or let no rank make it."
ALIKE = "let {guard} come out the same on every rank, or move this one out of it."
KEPT_AWAY = "{guard} keeps some ranks from this one."
HIDDEN = " {handler} hides the exception of a rank that raises before it comes here."
SAME_NUMBER = "Give every rank the same number of {what}"
SAME_BRANCH = (
    "Make all ranks take the same branch at {exits}: what decides there has to be the same "
    "everywhere, so all_reduce it first."
)
AGREE = "what decides there has to be the same everywhere, so all_reduce it first"
BATCHES = "for batches, use DistributedSampler and drop_last=True"
STREAM = (
    "an IterableDataset has no length: for batches of DDP, write the loop inside "
    "`with Join([model]):`, from torch.distributed.algorithms.join; else agree on the number first"
)
LOOK = "look for a break, return or continue that only some ranks reach"
NO_SYNC = ", and the same number of backward passes outside of no_sync()"


def all_or_none(facts: Evidence, span: Span, guard: Guard) -> str:
    """The remedy for a call that only some ranks make, by what keeps the others away."""
    hidden = facts.program.hides(facts.path(span))
    if guard.place.loops:
        return f"{SAME_CALLS}{SAME_NUMBER.format(what=f'iterations of {guard.place}').lower()}."
    if guard.leads_away:
        also = HIDDEN.format(handler=hidden[0]) if hidden and "raise" in guard.place.words else ""
        return SAME_CALLS + KEPT_AWAY.format(guard=guard.place) + also
    return SAME_CALLS + (ALL_OR_NONE if guard.names_rank else ALIKE).format(guard=guard.place)


def uneven(facts: Evidence, span: Span, gradients: bool = False) -> str:
    """The remedy where some ranks reach a line more often than others."""
    path = facts.path(span)
    exits, loops = facts.program.exits(path), facts.program.loops(path)
    guard = facts.program.keeps_away(path)
    decides = guard is not None and not (guard.place.loops or guard.leads_away)
    if guard is not None and decides and guard.names_rank:
        return all_or_none(facts, span, guard)
    what = f"iterations of {_either(loops)}" if loops else "batches"
    also = NO_SYNC * (gradients and any("no_sync" in e.words for e in exits))
    even = SAME_NUMBER.format(what=what) + also
    if not exits and loops and loops[0].words.startswith("while "):
        return f"{even}: {AGREE}."
    even += f" ({STREAM if facts.program.mentions('IterableDataset') else BATCHES})"
    if exits:
        return f"{SAME_BRANCH.format(exits=_either(exits))} {even}."
    if guard is not None and decides:
        return f"{even}, and look at {guard.place}."
    return f"{even}." if loops else f"{even}, and {LOOK}."


def _either(exits: Iterable[Place]) -> str:
    some = [str(e) for e in exits]
    return " and ".join(some) if len(some) <= _EXITS else ", ".join([*some[:_EXITS], "…"])


def left_out(facts: Evidence, ranks: Iterable[int], spans: Iterable[Span]) -> Finding | None:
    """Backward passes that have ended without all gradients, so that the others wait for them."""
    some = [*ranks]
    if lacking := facts.left_out("unreduced", some):
        return unused(lacking, spans)
    if modules := facts.left_out("unused", some):
        return _unused_modules(modules, spans)
    return None


def unused(lacking: dict[int, list[str]], spans: Iterable[Span]) -> Finding:
    """Ranks that have left parameters of DDP's models out, and those who wait for them."""
    names = sorted({n for found in lacking.values() for n in found} - {"?"})
    which = f" ({', '.join(names)})" if names else ""
    said = f"ended a backward pass without the gradients of some parameters{which}"
    return _incomplete(lacking, spans, said, UNUSED)


def _unused_modules(modules: dict[int, list[str]], spans: Iterable[Span]) -> Finding:
    """Ranks whose loss does not depend on some modules that FSDP2 shards."""
    names = ", ".join(sorted({n for found in modules.values() for n in found}))
    said = f"ended a backward pass without a gradient for {names}, whose result it did not use"
    return _incomplete(modules, spans, said, UNUSED_MODULE.format(names=names))


def _incomplete(
    lacking: dict[int, list[str]], spans: Iterable[Span], said: str, remedy: str
) -> Finding:
    ranks, waiting = tuple(lacking), list(spans)
    say = dict.fromkeys((s.rank for s in waiting), "gradients")
    return Finding(
        Kind.UNUSED_PARAMETER,
        f"{verb(ranks, 'have')} {said}; {clauses(waiting, 'wait for', say)}.",
        remedy,
        ranks,
        missing_ranks=ranks,
        lines=lines(*waiting),
    )


UNUSED_MODULE = (
    "Let the loss depend on the result of {names} on every rank, if only times zero: FSDP reduces "
    "the gradients of a module on all ranks, or on none."
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


def not_coming(facts: Evidence, mine: Span, gone: Iterable[int], kind: Kind) -> str:
    """The remedy where ranks end without a call that others wait in; "" if unknown."""
    path, away = facts.path(mine), {*gone}
    others = {s.where for s in facts.spans if s.rank in away and s.where}
    guard = facts.program.keeps_away(path, [(line,) for line in sorted(others)])
    if guard is not None and kind in (Kind.SKIPPED, Kind.MISSING_BARRIER, Kind.UNEVEN):
        return all_or_none(facts, mine, guard)
    exits = facts.program.exits(path)
    if exits and mine.op is not Op.NEW_GROUP:
        return f"Make every rank reach it: {_either(exits)} may keep some away."
    if hidden := facts.program.hides(path):
        return f"Make every rank reach it.{HIDDEN.format(handler=hidden[0])}"
    return ""
