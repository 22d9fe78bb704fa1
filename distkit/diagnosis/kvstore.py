"""Causes of unanswered requests to a parameter server, such as missing pushes. No side effects."""

from __future__ import annotations

from collections.abc import Mapping

from distkit._format import ordinal, times
from distkit.diagnosis import rules
from distkit.diagnosis.divergence import outliers
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.rules import Calls, Finding, listed, verb
from distkit.events import Op, Span
from distkit.trace.calls import at
from distkit.trace.log import grouped

#: The rule for each kind of request, in order of examination. Barriers are last, because workers
#: that omit a push often wait at one.
_RULES: dict[Op, rules.Rule] = {
    Op.PULL: rules.missing_push,
    Op.INIT: rules.missing_init,
    Op.REGISTER: rules.missing_worker,
    Op.BARRIER: rules.missing_barrier,
}


def unanswered(evidence: Evidence, stuck: Mapping[int, Span]) -> tuple[Finding, set[int]] | None:
    """Find workers whose requests depend on workers that have finished or are stuck."""
    requests = [s for s in stuck.values() if s.match is not None]
    awaited = {s.rank: evidence.graph.pending.awaited_by(s) for s in requests}

    def condition(request: Span) -> tuple[object, ...]:
        return request.op, request.attributes.get("key"), awaited[request.rank].count

    for request in sorted(requests, key=lambda s: ([*_RULES].index(s.op), s.rank)):
        workers = awaited[request.rank].workers
        finished = {w for w in workers if evidence.returned(w)}
        if absent := finished or {w for w in workers if w in evidence.stuck}:
            waits = {
                s.rank: s
                for s in requests
                if condition(s) == condition(request)
                and s.rank not in absent
                and not absent.isdisjoint(awaited[s.rank].workers)
            }
            return _unanswered_finding(evidence, waits, sorted(absent)), {
                *waits,
                *absent & stuck.keys(),
            }
    return None


def _unanswered_finding(
    evidence: Evidence, waits: Mapping[int, Span], absent: list[int]
) -> Finding:
    request = waits[min(waits)]
    phrases = grouped(absent, lambda w: _activity(evidence, request, w))
    others = listed([f"{verb(ws, word)} {phrase}" for (word, phrase), ws in phrases.items()])
    culprits = outliers([sorted(waits), absent])
    if len(waits) == len(absent) or request.op in (Op.INIT, Op.REGISTER):
        culprits = tuple(absent)
    rule, remedy = _rule_and_remedy(evidence, request, absent)
    return rule.finding(
        *waits.values(),
        *(evidence.stuck[w] for w in absent if w in evidence.stuck),
        message=rules.unanswered.message,
        remedy=remedy,
        culprits=culprits,
        missing=absent,
        calls=Calls(waits.values()),
        condition=_condition(evidence, request),
        others=others,
    )


def _condition(evidence: Evidence, request: Span) -> str:
    """Return the condition that the request waits for, as a phrase."""
    pending = evidence.graph.pending
    count = pending.awaited_by(request).count
    if request.op is Op.INIT:
        return " for the value of worker 0"
    if request.op is not Op.PULL:
        return f" for the {ordinal(count)} time" if count > 1 else ""
    if pending.rule.has_rounds:
        return f" for the {ordinal(count)} gradient of every worker"
    return f" until every worker has pushed it {times(count)}"


def _activity(evidence: Evidence, request: Span, worker: int) -> tuple[str, str]:
    """Describe the activity of an absent worker: a verb in the plural, and a phrase."""
    count = evidence.graph.pending.count(worker, request)
    verb_stem = "push" if request.op is Op.PULL else "call"
    wait = evidence.stuck.get(worker)
    if wait is not None:
        order = f"after {verb_stem}ing it {times(count)}" if count else f"before {verb_stem}ing it"
        return "wait", f"in {evidence.call(wait)}{at(wait.where)} {order}"
    reasons = evidence.known_reasons([worker])
    if count:
        return "have", f"{verb_stem}ed it {times(count)} and finished{reasons}"
    return "have", f"finished without {verb_stem}ing it{reasons}"


def _rule_and_remedy(
    evidence: Evidence, request: Span, absent: list[int]
) -> tuple[rules.Rule, str]:
    """Return the rule that the absent workers violate, and a remedy if the rule's does not fit."""
    if any(evidence.stuck[w].op is not Op.BARRIER for w in absent if w in evidence.stuck):
        return rules.cycle, ""
    bounded = request.op is Op.PULL and not evidence.graph.pending.rule.has_rounds
    return _RULES[request.op], rules.missing_push.fill("bound") if bounded else ""
