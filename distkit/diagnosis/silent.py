"""Mistakes that silently give wrong numbers: races, reordered loops, crossed messages. Pure.

Each is reported only if both the run and the program's text show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from distkit.diagnosis import rules
from distkit.diagnosis.dataflow import argument, calls_at, order_matters, resemble
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding
from distkit.events import COLLECTIVES, Op, Span, State
from distkit.trace.calls import at
from distkit.trace.log import grouped


def silent_findings(facts: Evidence, previous: Sequence[Finding]) -> Iterator[Finding]:
    """Find values that may be wrong, unless ``previous`` findings explain them."""
    if not previous:
        yield from _message_races(facts)
        yield from _reordered(facts)
        yield from _crossed(facts)


# -- message races ----------------------------------------------------------------------------


def _message_races(facts: Evidence) -> Iterator[Finding]:
    """Find receives from any source whose result depends on the order of messages."""
    received = [
        s for s in facts.any_source_receives if s.state is State.COMPLETED and s.peer is not None
    ]
    rows = grouped(received, lambda s: (s.rank, s.group, s.tag))
    sends = {(r.rank, r.seq): s for s, r in facts.pairs}
    matters: dict[tuple[str, str], bool] = {}  # by the lines of two receives
    for row in rows.values():
        for one, other in pairwise(sorted(row, key=lambda s: s.seq)):
            send = sends.get((other.rank, other.seq))
            both = one.where, other.where
            if both not in matters:
                matters[both] = _depends_on_order(facts, one, other)
            if send is None or one.peer == other.peer or not matters[both]:
                continue
            if not _is_after(facts, send, one):
                yield _race(one, other)
                break


def _is_after(facts: Evidence, send: Span, recv: Span) -> bool:
    """Return whether a message may have been sent in reaction to another receive."""
    return any(
        s.rank == send.rank
        and s.seq < send.seq
        and (s.op is Op.RECV or s.op in COLLECTIVES or s.op is Op.STORE_WAIT)
        and (s.end is None or recv.end is None or s.end > recv.end)
        for s in facts.spans
    )


def _depends_on_order(facts: Evidence, one: Span, other: Span) -> bool:
    """Return whether the program uses the first message differently from the second."""
    scopes = facts.program.scopes(one.where)
    if not scopes or scopes[:1] != facts.program.scopes(other.where)[:1]:
        return False
    lines_of = sorted({int(s.where.rpartition(":")[2]) for s in (one, other)})
    calls = [c for number in lines_of for c in calls_at(scopes[0], number, ("recv", "irecv"))]
    return len(calls) == len(lines_of) and order_matters(calls, scopes[0])


def _race(one: Span, other: Span) -> Finding:
    lines = at(one.where) if one.where == other.where else f"{at(one.where)} and{at(other.where)}"
    senders = [s.peer for s in (one, other) if s.peer is not None]
    return rules.message_race.finding(
        one, culprits=[one.rank], rank=one.rank, where=lines, senders=senders
    )


# -- reordered loops ------------------------------------------------------------------------


def _reordered(facts: Evidence) -> Iterator[Finding]:
    """Find collectives in a loop that visits its items in a different order on some ranks."""
    for calls in facts.calls.values():
        spans = (s for row in calls.values() for s in row if s.dtype)
        for (op, where), line_spans in grouped(spans, lambda s: (s.op, s.where)).items():
            by_rank = grouped(line_spans, lambda s: s.rank)
            counts = [len(row) for row in by_rank.values()]
            if len(by_rank) < 2 or min(counts) < 2:
                continue
            loop = facts.program.reordered([where], directly=True)
            if loop is not None:
                ranks = sorted(by_rank)
                yield rules.reordered_loop.finding(
                    *(row[0] for row in by_rank.values()),
                    culprits=ranks,
                    ranks=ranks,
                    op=op,
                    where=where,
                    loop=loop,
                )


# -- crossed messages ------------------------------------------------------------------------


def _crossed(facts: Evidence) -> Iterator[Finding]:
    """Find equal-sized messages between two ranks that arrive in each other's buffer."""

    def channel_of(pair: tuple[Span, Span]) -> tuple[object, ...]:
        send, recv = pair
        return send.rank, recv.rank, send.group, send.tag, send.dtype, send.nbytes

    rows, seen = grouped(facts.pairs, channel_of), set()
    for pairs in rows.values():
        for neighbours in pairwise(pairs):
            places = tuple(s.where for pair in neighbours for s in pair)
            if places in seen:
                continue
            seen.add(places)
            names = [[_argument(facts, end) for end in pair] for pair in neighbours]
            if _is_crossed(names):
                yield _cross(*neighbours, names)


def _is_crossed(names: list[list[str]]) -> bool:
    """Return whether each sent tensor's name resembles only the other message's buffer."""
    (sent, got), (next_sent, next_got) = names
    crossed = resemble(sent, next_got) and resemble(next_sent, got)
    return crossed and not resemble(sent, got) and not resemble(next_sent, next_got)


def _argument(facts: Evidence, span: Span) -> str:
    """Return the name of the tensor that a call sends or receives; "" if unknown."""
    scopes = facts.program.scopes(span.where)
    if not scopes:
        return ""
    at_line = [
        s
        for s in facts.spans
        if (s.rank, s.where, s.op) == (span.rank, span.where, span.op) and s.seq <= span.seq
    ]
    return argument(scopes, int(span.where.rpartition(":")[2]), str(span.op), len(at_line) - 1)


def _cross(one: tuple[Span, Span], other: tuple[Span, Span], names: list[list[str]]) -> Finding:
    send, recv = one
    labelled = [*zip((*one, *other), (*names[0], *names[1]), strict=True)]
    if len({s.where for s, _ in labelled}) == 1:
        labels, where = [name for _, name in labelled], at(recv.where)
    else:
        labels, where = [f"{name}{at(s.where)}" for s, name in labelled], ""
    return rules.crossed_messages.finding(
        send,
        recv,
        culprits=sorted({send.rank, recv.rank}),
        send=send,
        recv=recv,
        where=where,
        sent=labels[::2],
        got=labels[1::2],
    )
