"""Causes of unanswered requests to a parameter server: missing pushes and nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distkit._format import ordinal, times
from distkit.diagnosis import rules
from distkit.diagnosis.divergence import outliers
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Calls, Finding, listed, verb
from distkit.events import Op, Span
from distkit.trace.calls import at
from distkit.trace.log import grouped

#: Order of examination: workers that omit a push often wait at a barrier.
_ORDER = (Op.PULL, Op.INIT, Op.REGISTER, Op.BARRIER)


def unanswered(facts: Evidence, stuck: Mapping[int, Span]) -> tuple[Finding, set[int]] | None:
    """Find workers whose request depends on workers that have finished or wait themselves."""
    asked = [s for s in stuck.values() if s.match is not None]
    for mine in sorted(asked, key=lambda s: (_ORDER.index(s.op), s.rank)):
        awaited = facts.graph.awaiting.awaited_by(mine)
        gone = [w for w in awaited.workers if facts.returned(w)]
        absent = gone or [w for w in awaited.workers if w in facts.stuck]
        if absent:
            here = {s.rank: s for s in asked if _waits_for_same(facts, s, mine, absent)}
            return _unanswered_finding(facts, here, absent), {*here, *(set(absent) & stuck.keys())}
    return None


def _waits_for_same(facts: Evidence, one: Span, mine: Span, absent: list[int]) -> bool:
    """Return whether two requests wait for the same condition."""
    awaits, awaited = facts.graph.awaiting.awaited_by(one), facts.graph.awaiting.awaited_by(mine)
    same = (one.op, _key(one), awaits.count) == (mine.op, _key(mine), awaited.count)
    return same and not set(absent).isdisjoint(awaits.workers) and one.rank not in absent


def _unanswered_finding(facts: Evidence, here: Mapping[int, Span], absent: list[int]) -> Finding:
    mine = here[min(here)]
    phrases = grouped(absent, lambda w: _activity(facts, mine, w))
    others = listed([f"{verb(ws, word)} {rest}" for (word, rest), ws in phrases.items()])
    culprits = outliers([sorted(here), absent])
    if len(here) == len(absent) or mine.op in (Op.INIT, Op.REGISTER):
        culprits = tuple(sorted(absent))
    rule, remedy = _rule_and_remedy(facts, mine, absent)
    return rule.finding(
        *here.values(),
        *(facts.stuck[w] for w in absent if w in facts.stuck),
        message=rules.unanswered.message,
        remedy=remedy,
        culprits=culprits,
        missing=absent,
        here=Calls(here.values()),
        condition=_condition(facts, mine),
        others=others,
    )


def _condition(facts: Evidence, mine: Span) -> str:
    """Return the condition that the request waits for, as text."""
    awaiting = facts.graph.awaiting
    count = awaiting.awaited_by(mine).count
    if mine.op is Op.INIT:
        return " for the value of rank 0"
    if mine.op is not Op.PULL:
        return f" for the {ordinal(count)} time" if count > 1 else ""
    if awaiting.rule.backup:
        return f" for round {count}, which needs gradients of all but {awaiting.rule.backup}"
    if awaiting.rule.halts:
        return f" for the {ordinal(count)} gradient of every worker"
    return f" until every worker has pushed it {times(count)}"


def _activity(facts: Evidence, mine: Span, worker: int) -> tuple[str, str]:
    """Return what an absent worker does instead: a verb in the plural, and the rest."""
    done = facts.graph.awaiting.done(worker, mine)
    do = "push" if mine.op is Op.PULL else "call"
    rank_state = facts.stuck.get(worker)
    if rank_state is not None:
        before = f"after {do}ing it {times(done)}" if done else f"before {do}ing it"
        return "wait", f"in {facts.call(rank_state)}{at(rank_state.where)} {before}"
    known = facts.known_reasons([worker])
    if done:
        return "have", f"{do}ed it {times(done)} and finished{known}"
    return "have", f"finished without {do}ing it{known}"


def _rule_and_remedy(facts: Evidence, mine: Span, absent: list[int]) -> tuple[rules.Rule, str]:
    """Return the rule violated by the absent workers, and a remedy that replaces the rule's."""
    ops = {facts.stuck[w].op for w in absent if w in facts.stuck} - {Op.BARRIER}
    if ops:
        pulls = ops == {Op.PULL} and mine.op is Op.PULL
        return rules.cycle, rules.cycle.say("pulls") if pulls else ""
    if mine.op is not Op.PULL:
        return _RULES_BY_OP[mine.op], ""
    missing, awaited = rules.missing_push, facts.graph.awaiting.rule
    if awaited.backup:
        return missing, missing.say("late")
    if awaited.halts:
        return missing, ""
    wait = all(w in facts.stuck for w in absent)
    return missing, missing.say("barrier" if wait else "bound")


#: The rule by operation, if the waiting request is not a pull.
_RULES_BY_OP: dict[Op, rules.Rule] = {
    Op.INIT: rules.missing_init,
    Op.REGISTER: rules.missing_worker,
    Op.BARRIER: rules.missing_barrier,
}


def _key(s: Span) -> object:
    return s.attributes.get("key")


def remedy_for_waiting(failure: Finding, waiting: Iterable[Span]) -> str:
    """Return the remedy of a failure, extended by how the waiting workers could continue."""
    if failure.rule is not rules.died or all(s.match is None for s in waiting):
        return failure.remedy
    return f"{failure.remedy} " + rules.died.say("go_on", ranks=failure.culprits)
