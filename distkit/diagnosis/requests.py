"""Asynchronous calls that were not waited for, or whose tensors were used before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distkit._format import named
from distkit.diagnosis import rules
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding
from distkit.events import P2P, Op, Span, State
from distkit.trace.calls import at, call
from distkit.trace.log import grouped


def used_early(facts: Evidence, forgotten: set[tuple[int, int]]) -> Iterator[Finding]:
    """Find tensors that were used before ``wait()``, one finding per line.

    Args:
        facts: the run.
        forgotten: ``(rank, seq)`` of calls never waited for, which have a finding already.
    """
    touched: dict[tuple[int, int], Span] = {}
    for touch in facts.trace.spans:
        key = _request(touch) if touch.op is Op.TOUCH else None
        if key is not None and key not in forgotten:
            touched[key] = touch

    def place(span: Span) -> tuple[str, Op]:
        touch = touched[span.rank, span.seq]
        is_late = touch.attributes.get("function") == ""  # detected only at the wait
        return "" if is_late else touch.where, span.op

    known = [facts.by_key[key] for key in touched if key in facts.by_key]
    for (where, _), spans in grouped(known, place).items():
        writes = all("writes" in touched[s.rank, s.seq].attributes for s in spans)
        yield _used_early(spans, writes, where)
    for s in facts.spans:
        if _is_changed(s) and (s.rank, s.seq) not in touched.keys() | forgotten:
            yield _used_early([s], writes=True, where="")


def _request(touch: Span) -> tuple[int, int] | None:
    """Return ``(rank, seq)`` of the call whose tensor was used."""
    known = touch.match is not None and touch.match.isdecimal()
    return (touch.rank, int(touch.match or 0)) if known else None


def _is_changed(span: Span) -> bool:
    """Return whether a sent tensor has other values at the end; numpy may have written them."""
    before, after = span.before, span.after
    if span.op is not Op.SEND or span.state is not State.COMPLETED or not (before and after):
        return False
    texts = [repr((s.values, s.min, s.max)) for s in (before, after) if before != after]
    return len(set(texts)) > 1  # compares texts, because NaN is not equal to itself


def _used_early(spans: list[Span], writes: bool, where: str) -> Finding:
    ranks = sorted({s.rank for s in spans})
    rule = rules.buffer_in_use
    if writes:
        received = spans[0].op is Op.RECV
        rule = rules.buffer_overwritten if received else rules.buffer_changed
    lines = " and".join(dict.fromkeys(at(s.where) for s in spans))
    return rule.finding(
        culprits=ranks,
        lines={s.rank: where or s.where for s in spans},
        ranks=ranks,
        calls=f"{_possessive(ranks)} {_call_names(spans)}{lines}",
        early=rule.say("early", where=where) if where else "",
        name=name(spans[0]),
    )


def never_waited(facts: Evidence) -> list[Span]:
    """Return the asynchronous calls of ranks that have finished without waiting for them."""
    noted = facts.trace.info.unwaited
    collectives = [facts.by_key.get((r, seq)) for r, calls in noted.items() for seq in calls]
    open_still = [s for s in facts.spans if s.op in P2P and s.state is State.STARTED]
    found = [*open_still, *(s for s in collectives if s is not None)]
    return [s for s in found if facts.returned(s.rank)]


def forgotten(facts: Evidence, spans: Iterable[Span]) -> Iterator[Finding]:
    """Find calls that were never waited for: messages, then the collectives of each line."""
    together = grouped(spans, lambda s: ("", None) if s.op in P2P else (s.where, s.op))
    uses = {_request(touch): touch.where for touch in facts.trace.spans if touch.op is Op.TOUCH}
    for (_, op), some in together.items():
        used = next((uses[s.rank, s.seq] for s in some if (s.rank, s.seq) in uses), "")
        rule = rules.not_waited
        if op is not None:
            rule = rules.barrier_not_waited if op is Op.BARRIER else rules.result_not_waited
        yield rule.finding(
            *some,
            culprits=sorted({s.rank for s in some}),
            calls=_clauses(some),
            used=rules.not_waited.say("used", where=used) if used else "",
            where=used,
        )


def _clauses(spans: list[Span]) -> str:
    """Return clauses about the ranks that have not waited for their calls, with lines."""
    parts = []
    for where, some in grouped(spans, lambda s: s.where).items():
        ranks = sorted({s.rank for s in some})
        its = f"{_possessive(ranks)} " if some[0].op in P2P else ""
        parts.append(f"{named(ranks)} never waited for {its}{_call_names(some)}{at(where)}")
    return ", ".join(parts)


def _possessive(ranks: list[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _call_names(spans: list[Span]) -> str:
    """Return calls as text, with their peers if those are the same everywhere."""
    names = {f"i{call(s)}" if s.op in P2P else f"{s.op}(async_op=True)" for s in spans}
    return next(iter(names)) if len(names) == 1 else " and ".join(sorted({name(s) for s in spans}))


def name(span: Span) -> str:
    """Return the name of the function that made an asynchronous call."""
    return f"i{span.op}" if span.op in P2P else str(span.op)
