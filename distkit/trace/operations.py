"""From events to operations, and from operations to what belongs together. Pure.

The events of one operation fold into a span; a send and its receive into a message; the
members of one collective get one id.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from distkit.events import COLLECTIVES, P2P, REQUESTS, Event, Message, Op, Span, State

#: The operations of each process in a rank's place are numbered from a multiple of this.
APART = 1 << 32


def spans(events: Iterable[Event]) -> list[Span]:
    """One span per operation, in the order of their starts."""
    parts: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for e in events:
        parts[e.rank, e.seq].append(e)
    return sorted(map(span_of, parts.values()), key=lambda s: (s.start, s.rank, s.seq))


def span_of(events: Sequence[Event]) -> Span:
    """Fold the transitions of one operation, in the order of time, into a span."""
    first, last = events[0], events[-1]
    started = next((e for e in events if e.state is State.STARTED), first)
    ended = last.state in (State.COMPLETED, State.FAILED)
    return Span(
        rank=first.rank,
        seq=first.seq,
        op=first.op,
        state=last.state,
        start=started.time,
        end=last.time if ended else None,
        peer=last.peer if last.peer is not None else first.peer,
        group=first.group,
        nbytes=max(e.nbytes for e in events),
        shape=first.shape or last.shape,
        dtype=first.dtype or last.dtype,
        tag=last.tag if last.tag is not None else first.tag,
        where=first.where,
        attributes=last.attributes or first.attributes,
        match=first.match or last.match or None,
        # a receive's buffer may hold anything: earlier recorders looked at it all the same
        before=None if first.op is Op.RECV else started.summary or first.summary,
        after=last.summary if ended else None,
    )


def matches(spans: list[Span]) -> dict[tuple[int, int], str]:
    """The match of each operation; see :attr:`distkit.events.Trace.matches`."""
    count: dict[tuple[object, ...], int] = defaultdict(int)
    found = {}
    for s in sorted(spans, key=lambda s: (s.rank, s.seq)):
        if s.match is not None:
            found[s.rank, s.seq] = s.match
        elif s.op in COLLECTIVES:
            nth = count[s.rank, s.group]
            count[s.rank, s.group] += 1
            found[s.rank, s.seq] = f"{s.group}#{nth}"
        elif s.op in P2P and s.peer is not None:
            src, dst = (s.rank, s.peer) if s.op is Op.SEND else (s.peer, s.rank)
            nth = count[s.op, s.group, src, dst, s.tag]
            count[s.op, s.group, src, dst, s.tag] += 1
            found[s.rank, s.seq] = f"{s.group}:{src}>{dst}:{s.tag}#{nth}"
    return found


def messages(spans: list[Span], matches: dict[tuple[int, int], str]) -> list[Message]:
    """Every point-to-point transfer, in the order of sending; those never sent come last."""
    found = [*_p2p_messages(spans, matches), *_request_messages(spans)]
    return sorted(found, key=lambda m: m.sent if m.sent is not None else math.inf)


def _p2p_messages(spans: list[Span], matches: dict[tuple[int, int], str]) -> Iterator[Message]:
    """Join each send with its receive; an end without a partner stays a half message."""
    ends: dict[str, dict[Op, Span]] = defaultdict(dict)
    for s in spans:
        if s.op in P2P and s.match is None and (s.rank, s.seq) in matches:
            ends[matches[s.rank, s.seq]][s.op] = s
    for pair in ends.values():
        send, recv = pair.get(Op.SEND), pair.get(Op.RECV)
        some = send or recv
        assert some is not None and some.peer is not None
        yield Message(
            src=send.rank if send else some.peer,
            dst=recv.rank if recv else some.peer,
            op=Op.SEND,
            nbytes=some.nbytes,
            tag=some.tag,
            group=some.group,
            attributes=some.attributes,
            sent=send.start if send and send.state is not State.SCHEDULED else None,
            received=recv.end if recv and recv.state is not State.FAILED else None,
            send=(send.rank, send.seq) if send else None,
            recv=(recv.rank, recv.seq) if recv else None,
        )


def _request_messages(spans: list[Span]) -> Iterator[Message]:
    """A request with a match id is two messages: there, and the reply back."""
    asked = {s.match: s for s in spans if s.op in REQUESTS and s.match is not None}
    got = {s.match: s for s in spans if s.op is Op.RECV and s.match is not None}
    back = {s.match: s for s in spans if s.op is Op.SEND and s.match is not None}
    for match, s in asked.items():
        if s.peer is None or s.state is State.SCHEDULED:
            continue
        server, reply = got.get(match), back.get(match)
        me = (s.rank, s.seq)
        yield Message(
            s.rank,
            s.peer,
            s.op,
            server.nbytes if server else s.nbytes,
            s.start,
            server.end if server else None,
            s.tag,
            s.attributes,
            s.group,
            me,
            (server.rank, server.seq) if server else None,
        )
        if reply:
            yield Message(
                s.peer,
                s.rank,
                s.op,
                reply.nbytes,
                reply.start,
                s.end,
                s.tag,
                s.attributes,
                s.group,
                (reply.rank, reply.seq),
                me,
            )
