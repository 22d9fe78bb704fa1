"""Mistakes that stop nobody and make numbers wrong: an order that is left to chance, or crossed.

Each is told only where the run *and* the program's text show it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from distkit.diagnosis import rules
from distkit.diagnosis.dataflow import argument, calls_at, order_matters, resemble
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import Finding, by_line
from distkit.events import COLLECTIVES, Op, Span, State
from distkit.trace.calls import at
from distkit.trace.log import grouped


def silent(facts: Evidence, told: Sequence[Finding]) -> Iterator[Finding]:
    """Remarks on values that may be wrong, if there is nothing that was ``told`` before."""
    if not told:  # else that is why
        yield from _races(facts)
        yield from _reordered(facts)
        yield from _crossed(facts)
        yield from _without_gradient(facts)


# -- messages that come first by chance -----------------------------------------------------


def _races(facts: Evidence) -> Iterator[Finding]:
    """Receives from any source that several senders may serve, where their order matters."""
    came = [s for s in facts.from_anybody if s.state is State.COMPLETED and s.peer is not None]
    rows = grouped(came, lambda s: (s.rank, s.group, s.tag))
    sends = {(r.rank, r.seq): s for s, r in facts.pairs}
    matters: dict[tuple[str, str], bool] = {}  # by the lines of two receives
    for row in rows.values():
        for one, other in pairwise(sorted(row, key=lambda s: s.seq)):
            send = sends.get((other.rank, other.seq))
            both = one.where, other.where
            if both not in matters:
                matters[both] = _decides_by_order(facts, one, other)
            if send is None or one.peer == other.peer or not matters[both]:
                continue
            if not _is_after(facts, send, one):
                yield _race(one, other)
                break


def _is_after(facts: Evidence, send: Span, recv: Span) -> bool:
    """True if a message may have been sent because another had been received before."""
    return any(
        s.rank == send.rank
        and s.seq < send.seq
        and (s.op is Op.RECV or s.op in COLLECTIVES or s.op is Op.STORE_WAIT)
        and (s.end is None or recv.end is None or s.end > recv.end)
        for s in facts.spans
    )


def _decides_by_order(facts: Evidence, one: Span, other: Span) -> bool:
    """True if the program takes the first message for something else than the second."""
    scopes = facts.program.scopes(one.where)
    if not scopes or scopes[:1] != facts.program.scopes(other.where)[:1]:
        return False
    lines_of = sorted({int(s.where.rpartition(":")[2]) for s in (one, other)})
    calls = [c for number in lines_of for c in calls_at(scopes[0], number, ("recv", "irecv"))]
    return len(calls) == len(lines_of) and order_matters(calls, scopes[0])


def _race(one: Span, other: Span) -> Finding:
    both = at(one.where) if one.where == other.where else f"{at(one.where)} and{at(other.where)}"
    senders = [s.peer for s in (one, other) if s.peer is not None]
    return rules.message_race.finding(
        one, culprits=[one.rank], rank=one.rank, where=both, senders=senders
    )


# -- a loop in another order on some ranks ---------------------------------------------------


def _reordered(facts: Evidence) -> Iterator[Finding]:
    """Collectives in a loop that takes the same things in another order on some ranks."""
    for calls in facts.calls.values():
        spans = (s for row in calls.values() for s in row if s.dtype)
        for (op, where), some in grouped(spans, lambda s: (s.op, s.where)).items():
            found = grouped(some, lambda s: s.rank)
            often = [len(row) for row in found.values()]
            if len(found) < 2 or min(often) < 2:
                continue
            loop = facts.program.reordered([where], directly=True)
            if loop is not None:
                ranks = sorted(found)
                yield rules.reordered_loop.finding(
                    *(row[0] for row in found.values()),
                    culprits=ranks,
                    ranks=ranks,
                    op=op,
                    where=where,
                    loop=loop,
                )


# -- messages into each other's buffers -------------------------------------------------------


def _crossed(facts: Evidence) -> Iterator[Finding]:
    """Messages of one size between two ranks that are received under each other's names."""

    def way(pair: tuple[Span, Span]) -> tuple[object, ...]:
        send, recv = pair
        return send.rank, recv.rank, send.group, send.tag, send.dtype, send.nbytes

    rows, seen = grouped(facts.pairs, way), set()
    for pairs in rows.values():
        for two in pairwise(pairs):
            places = tuple(s.where for pair in two for s in pair)
            if places in seen:
                continue
            seen.add(places)
            names = [[_argument(facts, end) for end in pair] for pair in two]
            if _is_crossed(names):
                yield _cross(*two, names)


def _is_crossed(names: list[list[str]]) -> bool:
    """True if each message has the name under which the other one is received, and not its own."""
    (sent, got), (then, there) = names
    crossed = resemble(sent, there) and resemble(then, got)
    return crossed and not resemble(sent, got) and not resemble(then, there)


def _argument(facts: Evidence, span: Span) -> str:
    """The name of the tensor that a call sends or receives; "" if the text does not tell."""
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
    ends = [*zip((*one, *other), (*names[0], *names[1]), strict=True)]
    if len({s.where for s, _ in ends}) == 1:
        said, here = [name for _, name in ends], at(recv.where)
    else:
        said, here = [f"{name}{at(s.where)}" for s, name in ends], ""
    return rules.crossed_messages.finding(
        send,
        recv,
        culprits=sorted({send.rank, recv.rank}),
        send=send,
        recv=recv,
        where=here,
        sent=said[::2],
        got=said[1::2],
    )


# -- gradients that torch loses ---------------------------------------------------------------


def _without_gradient(facts: Evidence) -> Iterator[Finding]:
    """Broadcasts of torch.distributed.nn.functional whose source gets no gradient."""
    found = (s for s in facts.spans if "zeroes_gradient" in s.attributes)
    for where, spans in by_line(found).items():
        mine = spans[min(spans)]
        yield rules.zero_gradient.finding(
            *spans.values(),
            culprits=sorted(spans),
            call=facts.call(mine),
            where=where,
            root=mine.peer,
        )
