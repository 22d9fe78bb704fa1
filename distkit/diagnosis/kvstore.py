"""Causes of unanswered requests to a parameter server, such as missing pushes. No side effects."""

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

#: Order of examination. Barriers come last, because workers that omit a push often wait at one.
_ORDER = (Op.PULL, Op.INIT, Op.REGISTER, Op.BARRIER)


def unanswered(facts: Evidence, stuck: Mapping[int, Span]) -> tuple[Finding, set[int]] | None:
    """Find workers whose requests depend on workers that have finished or are stuck."""
    requests = [s for s in stuck.values() if s.match is not None]
    for request in sorted(requests, key=lambda s: (_ORDER.index(s.op), s.rank)):
        awaited = facts.graph.awaiting.awaited_by(request)
        gone = [w for w in awaited.workers if facts.returned(w)]
        absent = gone or [w for w in awaited.workers if w in facts.stuck]
        if absent:
            here = {s.rank: s for s in requests if _waits_for_same(facts, s, request, absent)}
            return _unanswered_finding(facts, here, absent), {*here, *(set(absent) & stuck.keys())}
    return None


def _waits_for_same(facts: Evidence, request: Span, other: Span, absent: list[int]) -> bool:
    """Return whether two requests wait for the same condition."""
    request_awaited, other_awaited = (
        facts.graph.awaiting.awaited_by(request),
        facts.graph.awaiting.awaited_by(other),
    )
    same = (request.op, _key(request), request_awaited.count) == (
        other.op,
        _key(other),
        other_awaited.count,
    )
    return (
        same and not set(absent).isdisjoint(request_awaited.workers) and request.rank not in absent
    )


def _unanswered_finding(facts: Evidence, here: Mapping[int, Span], absent: list[int]) -> Finding:
    request = here[min(here)]
    phrases = grouped(absent, lambda w: _activity(facts, request, w))
    others = listed([f"{verb(ws, word)} {phrase}" for (word, phrase), ws in phrases.items()])
    culprits = outliers([sorted(here), absent])
    if len(here) == len(absent) or request.op in (Op.INIT, Op.REGISTER):
        culprits = tuple(sorted(absent))
    rule, remedy = _rule_and_remedy(facts, request, absent)
    return rule.finding(
        *here.values(),
        *(facts.stuck[w] for w in absent if w in facts.stuck),
        message=rules.unanswered.message,
        remedy=remedy,
        culprits=culprits,
        missing=absent,
        here=Calls(here.values()),
        condition=_condition(facts, request),
        others=others,
    )


def _condition(facts: Evidence, request: Span) -> str:
    """Return a phrase that names the condition the request waits for."""
    awaiting = facts.graph.awaiting
    count = awaiting.awaited_by(request).count
    if request.op is Op.INIT:
        return " for the value of rank 0"
    if request.op is not Op.PULL:
        return f" for the {ordinal(count)} time" if count > 1 else ""
    if awaiting.rule.halts:
        return f" for the {ordinal(count)} gradient of every worker"
    return f" until every worker has pushed it {times(count)}"


def _activity(facts: Evidence, request: Span, worker: int) -> tuple[str, str]:
    """Return a verb in the plural, and a phrase, that describe what an absent worker does."""
    done = facts.graph.awaiting.done(worker, request)
    verb_stem = "push" if request.op is Op.PULL else "call"
    rank_state = facts.stuck.get(worker)
    if rank_state is not None:
        before = f"after {verb_stem}ing it {times(done)}" if done else f"before {verb_stem}ing it"
        return "wait", f"in {facts.call(rank_state)}{at(rank_state.where)} {before}"
    known = facts.known_reasons([worker])
    if done:
        return "have", f"{verb_stem}ed it {times(done)} and finished{known}"
    return "have", f"finished without {verb_stem}ing it{known}"


def _rule_and_remedy(facts: Evidence, request: Span, absent: list[int]) -> tuple[rules.Rule, str]:
    """Return the rule that the absent workers violate, and the remedy that replaces its remedy."""
    if any(facts.stuck[w].op is not Op.BARRIER for w in absent if w in facts.stuck):
        return rules.cycle, ""
    if request.op is not Op.PULL:
        return _RULES_BY_OP[request.op], ""
    rule, policy = rules.missing_push, facts.graph.awaiting.rule
    return rule, "" if policy.halts else rule.fill("bound")


#: The rule for each operation other than a pull.
_RULES_BY_OP: dict[Op, rules.Rule] = {
    Op.INIT: rules.missing_init,
    Op.REGISTER: rules.missing_worker,
    Op.BARRIER: rules.missing_barrier,
}


def _key(s: Span) -> object:
    return s.attributes.get("key")


def remedy_for_waiting(failure: Finding, waiting: Iterable[Span]) -> str:
    """Return the remedy of a failure, including how the waiting workers could continue."""
    if failure.rule is not rules.died or all(s.match is None for s in waiting):
        return failure.remedy
    return f"{failure.remedy} " + rules.died.fill("continue_without", ranks=failure.culprits)
