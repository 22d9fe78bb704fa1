"""Reasons why ranks are stuck: the rules over the wait-for graph. Pure.

Each rule takes the operations of the stuck ranks that nothing explains yet, and returns a finding
and the stuck ranks that it is about, or None.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from distkit._format import named, ordinal, times
from distkit.diagnosis.advice import advice, headline
from distkit.diagnosis.divergence import (
    BARRIER,
    UNUSED,
    left_out,
    minority,
    not_coming,
    uneven,
    unused,
)
from distkit.diagnosis.facts import ASKED, Evidence
from distkit.diagnosis.findings import Finding, Kind, clauses, lines, listed, placed, verb
from distkit.diagnosis.mismatches import NEW_GROUP
from distkit.events import COLLECTIVES, P2P, Op, Span
from distkit.trace.awaiting import similar
from distkit.trace.calls import SILENT, STOPPED, at, call, keys, last_call, raised_at, seen

#: A finding, and the stuck ranks that it is about.
Told = tuple[Finding, set[int]]

#: The operations of stuck ranks.
Stuck = Mapping[int, Span]


# -- the other end is there, and does not fit ---------------------------------------------


def wrong_end(facts: Evidence, stuck: Stuck) -> Told | None:
    """Two ends of messages that were meant for each other, and miss each other."""
    for rule in (_tag_or_group, _taken, _source, _destination, _groups):
        for mine in stuck.values():
            if (found := rule(facts, mine)) is not None:
                finding, other = found
                return finding, {r for r in (mine.rank, other, *finding.culprits) if r in stuck}
    return None


def _tag_or_group(facts: Evidence, mine: Span) -> tuple[Finding, int] | None:
    """A message between the same two ranks, with another tag or in another group."""
    for other in facts.alone if mine.op in P2P else ():
        if not _would_meet(mine, other) or _elsewhere(facts, mine, other):
            continue
        send, recv = (mine, other) if mine.op is Op.SEND else (other, mine)
        if send.group != recv.group:
            return _wrong_group(facts, send, recv), other.rank
        if send.tag != recv.tag:
            return _wrong_tag(send, recv), other.rank
    return None


def _would_meet(one: Span, other: Span) -> bool:
    """True if one sends to the other, who receives from it, tags and groups aside."""
    fits = other.op in P2P and other.op is not one.op and other.peer == one.rank
    return fits and one.peer in (other.rank, None)


def _elsewhere(facts: Evidence, mine: Span, other: Span) -> bool:
    """True if the other rank sits in a message of its own with this one: that is the cause."""
    standing = facts.stuck.get(other.rank)
    return (
        standing is not None
        and standing.op in P2P
        and standing.peer == mine.rank
        and standing.seq != other.seq
    )


def _wrong_tag(send: Span, recv: Span) -> Finding:
    return Finding(
        Kind.WRONG_TAG,
        f"rank {send.rank} sends to rank {recv.rank} with tag {send.tag or 0}{at(send.where)}, "
        f"but rank {recv.rank} waits for tag {recv.tag or 0} "
        f"in recv(src={'any' if recv.peer is None else recv.peer}){at(recv.where)}.",
        "Give the send and its receive the same tag.",
        tuple(sorted({send.rank, recv.rank})),
        lines=lines(send, recv),
    )


def _wrong_group(facts: Evidence, *spans: Span) -> Finding:
    said = clauses(spans, "wait in", {s.rank: facts.call(s) for s in spans})
    alike = len({tuple(facts.members(s.group)) for s in spans}) == 1
    return Finding(
        Kind.WRONG_GROUP,
        f"{said}: they use different groups{' of the same ranks' * alike}, so they never match.",
        "Pass the same group on both sides."
        + " Each new_group makes another one: use them in the same order on every rank." * alike,
        tuple(sorted({s.rank for s in spans})),
        lines=lines(*spans),
    )


def _taken(facts: Evidence, mine: Span) -> tuple[Finding, int] | None:
    """A receive whose message an earlier one has taken, which receives from any source."""
    if mine.op is not Op.RECV or mine.peer is None:
        return None
    taken = [
        s
        for s in facts.from_anybody
        if (s.rank, s.peer, s.group, s.tag) == (mine.rank, mine.peer, mine.group, mine.tag)
        and s.seq < mine.seq
    ]
    left = [
        s for s in facts.alone if s.op is Op.SEND and s.peer == mine.rank and s.rank != mine.peer
    ]
    if not taken:
        return None
    early = taken[-1]
    other = f"; what rank {left[0].rank} sends{at(left[0].where)} is left over" if left else ""
    return Finding(
        Kind.MESSAGE_RACE,
        f"rank {mine.rank} waits in {call(mine)}{placed(mine)}, but its recv(src=any)"
        f"{at(early.where)} has taken the message of rank {mine.peer}, which came first{other}.",
        f"Pass src= to the recv{at(early.where)} too; or receive every message from any source, "
        "and take the sender from what recv returns.",
        (mine.rank,),
        missing_ranks=(mine.peer,),
        lines=lines(mine, *left[:1]),
    ), left[0].rank if left else mine.rank


def _source(facts: Evidence, mine: Span) -> tuple[Finding, int] | None:
    """A receive from one rank, while the message is from another."""
    if mine.op is not Op.RECV or mine.peer is None or _in_conversation(facts, mine):
        return None
    for send in facts.alone:
        if send.op is Op.SEND and send.peer == mine.rank and send.group == mine.group:
            is_gone = facts.is_gone(mine.peer)
            gone = f", which has {facts.over([mine.peer])}" if is_gone else ""
            return Finding(
                Kind.WRONG_SOURCE,
                f"rank {mine.rank} waits in {call(mine)}{placed(mine)} for rank {mine.peer}"
                f"{gone}; but it is rank {send.rank} that sends to it, "
                f"in {call(send)}{at(send.where)}.",
                f"Receive from rank {send.rank}, or let rank {mine.peer} send.",
                (mine.rank,),
                lines=lines(mine, send),
            ), send.rank
    return None


def _destination(facts: Evidence, mine: Span) -> tuple[Finding, int] | None:
    """A message to one rank, while another waits for it."""
    if mine.op not in P2P:
        return None
    wants = Op.RECV if mine.op is Op.SEND else Op.SEND
    for other in facts.alone:
        send, recv = (mine, other) if mine.op is Op.SEND else (other, mine)
        meant = recv.peer == send.rank and recv.group == send.group and send.peer != recv.rank
        if other.op is not wants or not meant or _in_conversation(facts, send):
            continue
        gone = [send.peer] if send.peer is not None and facts.is_gone(send.peer) else []
        over = f", which has {facts.over(gone)}" if gone else ""
        return Finding(
            Kind.WRONG_DESTINATION,
            f"rank {send.rank} sends to rank {send.peer}{over}, in {call(send)}{placed(send)}; "
            f"but it is rank {recv.rank} that waits for it, in {call(recv)}{placed(recv)}.",
            f"Send to rank {recv.rank}, or receive on rank {send.peer}.",
            (send.rank,),
            lines=lines(send, recv),
        ), other.rank
    return None


def _in_conversation(facts: Evidence, mine: Span) -> bool:
    """True if a chain of messages leads from this one back to its rank: a circle.

    It is none if each rank of it has sent to another one already: those messages went astray.
    """
    rank, circle = mine.peer, [mine.rank]
    while rank is not None and rank not in circle:
        circle.append(rank)
        standing = facts.stuck.get(rank)
        rank = standing.peer if standing is not None and standing.op in P2P else None
    astray = {s.rank for s in facts.alone if s.op is Op.SEND and not _is_stuck_in(facts, s)}
    return rank == mine.rank and not astray.issuperset(circle)


def _is_stuck_in(facts: Evidence, span: Span) -> bool:
    standing = facts.stuck.get(span.rank)
    return standing is not None and standing.seq == span.seq


def _groups(facts: Evidence, mine: Span) -> tuple[Finding, int] | None:
    """The same collective, by ranks that wait for each other in different groups."""
    if mine.op not in COLLECTIVES:
        return None
    for rank in facts.stuck[mine.rank].waits_for:
        theirs = facts.stuck.get(rank)
        if theirs is None or mine.rank not in theirs.waits_for or theirs.group == mine.group:
            continue
        if theirs.op is mine.op:
            return _all_in(facts, mine.group, theirs.group, mine.op), rank
    return None


def _all_in(facts: Evidence, group: str, other: str, op: Op) -> Finding:
    """Those who are stuck in the same collective of two groups: the fewer are the odd ones."""
    spans = [s for s in facts.stuck_spans() if s.op is op and s.group in (group, other)]
    halves = [[s.rank for s in spans if s.group == g] for g in (group, other)]
    return replace(_wrong_group(facts, *spans), culprits=minority(halves))


# -- the other end will not come ------------------------------------------------------------


def left_alone(facts: Evidence, stuck: Stuck) -> Told | None:
    """A rank waits for one that has come to the end of its program; messages first."""
    calls = [s for s in stuck.values() if s.match is None]
    for mine in sorted(calls, key=lambda s: s.op not in P2P):
        gone = [r for r in facts.stuck[mine.rank].waits_for if facts.is_gone(r)]
        everyone = mine.op is Op.RECV and mine.peer is None
        if not gone or (everyone and len(gone) < len(facts.stuck[mine.rank].waits_for)):
            continue
        if mine.op in P2P:
            return _no_partner(facts, mine, gone), {mine.rank}
        together = {
            r
            for r, s in stuck.items()
            if s.group == mine.group and s.op is mine.op and facts.nth(s) == facts.nth(mine)
        }
        return _not_called(facts, {r: stuck[r] for r in together}, gone), together
    return None


def _no_partner(facts: Evidence, mine: Span, gone: list[int]) -> Finding:
    sends = mine.op is Op.SEND
    if mine.peer is None:
        did = sum(r.rank == mine.rank and s.rank in gone for s, r in facts.pairs)
    else:
        did = sum(_ends(s, r) == _ends(mine, mine) for s, r in facts.pairs)
    what = "receiving" if sends else "sending"
    done = f"after {what} {did} message{'s' * (did > 1)}" if did else f"without {what} anything"
    has = "has" if len(gone) == 1 else "have"
    return Finding(
        Kind.NO_RECEIVER if sends else Kind.NO_SENDER,
        f"rank {mine.rank} waits in {call(mine)}{placed(mine)}, "
        f"but {named(gone)} {has} {facts.over(gone)} {done}{facts.known_of(gone)}.",
        f"Add the missing {'recv' if sends else 'send'} on "
        f"{'one of ' * (len(gone) > 1)}{named(gone)}, or remove this {mine.op}: each send needs "
        "one recv.",
        tuple(gone),
        missing_ranks=tuple(gone),
        lines=lines(mine),
    )


def _ends(send: Span, recv: Span) -> tuple[int | None, int | None]:
    return (
        send.rank if send.op is Op.SEND else send.peer,
        recv.rank if recv.op is Op.RECV else recv.peer,
    )


def _not_called(facts: Evidence, here: Stuck, gone: list[int]) -> Finding:
    """A collective that some ranks wait in, and others have ended without."""
    mine = here[min(here)]
    if "gradients" in mine.attributes and facts.sees_gradients:
        return _without_backward(facts, here, gone)
    say = {r: facts.call(s) for r, s in here.items()}
    waiting = clauses(here.values(), "wait in", say)
    over = facts.over(gone)
    absent = f"{verb(gone, 'have')} {over} without calling it"
    counts = {r: (facts.called(r, mine), facts.called(gone[0], mine)) for r in here}
    more, fewer = counts[min(here)]
    kind, remedy = _why_not_called(facts, mine, here, gone)
    if mine.where and more > fewer > 0 and kind in (Kind.SKIPPED, Kind.MISSING_BARRIER):
        kind, remedy = Kind.UNEVEN, uneven(facts, mine)
    if kind is Kind.UNEVEN:
        absent = f"{verb(gone, 'have')} called it {times(fewer)} and {over}"
        waiting += f" for the {ordinal(more)} time"
    if kind is Kind.UNUSED_PARAMETER:
        absent = f"{verb(gone, 'have')} {over} without sending all of its gradients"
    culprits = minority([sorted(here), gone])
    if kind in (Kind.NEW_GROUP, Kind.UNUSED_PARAMETER) or len(here) == len(gone):
        culprits = tuple(gone)
    return Finding(
        kind,
        f"{waiting}, but {absent}{facts.known_of(gone)}.",
        remedy,
        culprits,
        missing_ranks=tuple(gone),
        lines=lines(*here.values()),
    )


def _without_backward(facts: Evidence, here: Stuck, gone: list[int]) -> Finding:
    """Gradients that some ranks wait for, and others have ended without."""
    if (found := left_out(facts, gone, here.values())) is not None:
        return found
    mine = here[min(here)]
    text = facts.program.text(mine.where)
    inside = bool(text) and "backward" not in text  # the call of an autograd function
    waiting = clauses(here.values(), "wait in", dict.fromkeys(here, "a backward pass"))
    culprits = minority([sorted(here), gone])
    return Finding(
        Kind.SKIPPED if inside else Kind.UNEVEN,
        f"{waiting} for {named(gone)}, but {verb(gone, 'have')} {facts.over(gone)} without "
        f"{'coming to it' if inside else 'another one'}{facts.known_of(gone)}.",
        AUTOGRAD if inside else uneven(facts, mine, gradients=True),
        tuple(gone) if len(here) == len(gone) else culprits,
        missing_ranks=tuple(gone),
        lines=lines(*here.values()),
    )


#: After a backward pass in which a function of the user's communicates.
AUTOGRAD = (
    "Autograd comes only to functions that the loss depends on: a new tensor, such as torch.empty "
    "for want of data, cuts the graph. Let the loss depend on the same functions on every rank, "
    "if only times zero."
)


def _why_not_called(facts: Evidence, mine: Span, here: Stuck, gone: list[int]) -> tuple[Kind, str]:
    if mine.op is Op.NEW_GROUP:
        return Kind.NEW_GROUP, NEW_GROUP
    if "gradients" in mine.attributes:
        if _whole_backward(facts, mine):
            return Kind.UNEVEN, uneven(facts, mine)
        return Kind.UNUSED_PARAMETER, UNUSED
    if mine.group != "world" and not any(facts.calls[mine.group].get(r) for r in gone):
        return Kind.WRONG_GROUP, (
            "Every member of a group has to call its collectives, and only members can: "
            "look at which ranks are in it, and which of them come here."
        )
    kind = Kind.MISSING_BARRIER if mine.op is Op.BARRIER else Kind.SKIPPED
    away = f"look for an `if` or an early return that keeps {named(gone)} away"
    remedy = BARRIER if mine.op is Op.BARRIER else f"Let every rank call it: {away}."
    return kind, (not_coming(facts, mine, gone, kind) or remedy) + _of_a_group(facts, here)


def _of_a_group(facts: Evidence, here: Stuck) -> str:
    """That those who wait are the members of a group, and may have meant it."""
    theirs = any({*s.attributes.get("members", ())} == {*here} for s in facts.spans)
    alone = len(here) > 1 and all(s.group == "world" for s in here.values())
    return f" Or pass group=, if only {named(here)} are meant." if theirs and alone else ""


def _whole_backward(facts: Evidence, mine: Span) -> bool:
    """True if the open gradients are those of a whole backward pass.

    Each pass sends the same number of bytes, however they are packed into buckets.
    """
    row = [s for s in facts.calls[mine.group][mine.rank] if "gradients" in s.attributes]
    waiting = sum(s.nbytes for s in row if s.seq >= mine.seq)
    done = sum(s.nbytes for s in row if s.seq < mine.seq)
    return waiting > 0 and done > 0 and done % waiting == 0


def without_key(facts: Evidence, stuck: Stuck) -> Told | None:
    """Ranks wait for a key of a store that no rank has set."""
    mine = next((s for s in stuck.values() if s.op is Op.STORE_WAIT), None)
    if mine is None:
        return None
    here = {r: s for r, s in stuck.items() if (s.op, s.attributes) == (mine.op, mine.attributes)}
    others = [r for r in facts.board.ranks if r not in here]
    if "ranks" in mine.attributes:
        return _not_at_barrier(facts, here, others), {*here}
    wanted = facts.board.keys.missing(mine)
    meant = [similar(key, facts.board.keys.set) for key in wanted]
    near = [facts.board.keys.set[key] for key in meant if key]
    known = [f"; rank {e.rank} has called {call(e)}{at(e.where)}" for e in near]
    where = "".join(_instead_of_key(facts, rank) for rank in others)
    theirs = [facts.span(facts.stuck[rank]) for rank in others if rank in facts.stuck]
    names = keys(wanted)
    return Finding(
        Kind.MISSING_KEY,
        f"{clauses(here.values(), 'wait in')}, but no rank has set {names}{''.join(known)}{where}.",
        f"Let a rank set {names} before the others need it; look for another spelling, or for an "
        "`if` that keeps store.set away.",
        tuple(others or sorted(here)),
        missing_ranks=tuple(others),
        lines=lines(*here.values(), *theirs),
    ), {*here}


def _instead_of_key(facts: Evidence, rank: int) -> str:
    """The current state of a rank that might have set a key."""
    if facts.is_gone(rank):
        return f"; rank {rank} has {facts.over([rank])}"
    its = facts.stuck.get(rank)
    return f"; rank {rank} waits in {facts.call(facts.span(its))}{at(its.where)}" if its else ""


def _not_at_barrier(facts: Evidence, here: Stuck, others: list[int]) -> Finding:
    away = [r for r in others if r not in facts.board.keys.came(here[min(here)])]
    where = "".join(_instead_of_key(facts, rank) for rank in away)
    return Finding(
        Kind.MISSING_BARRIER,
        f"{clauses(here.values(), 'wait in')} for {named(away or here)}{where}.",
        "Let as many ranks call it as its second argument says, with the same key.",
        tuple(away or sorted(here)),
        missing_ranks=tuple(away),
        lines=lines(*here.values()),
    )


# -- all wait for each other --------------------------------------------------------------


def circle(facts: Evidence, stuck: Stuck) -> Told | None:
    """Ranks each of which waits for the next, and the last one for the first."""
    ways = {r: [w for w in facts.stuck[r].waits_for if w in stuck] for r in stuck}
    start = next((r for r in stuck if ways[r]), None)
    if start is None:
        return None
    path = [start]
    while (after := ways[path[-1]][0]) not in path:
        path.append(after)
    ring = _shortest(after, ways)
    return _cycle(facts, [stuck[r] for r in ring]), set(ring)


def _shortest(start: int, ways: Mapping[int, list[int]]) -> list[int]:
    """The shortest way from a rank back to itself, beginning with its lowest rank."""
    came = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for after in ways[rank]:
            if after not in came:
                came[after] = rank
                queue.append(after)
    ring = [start]
    while came[ring[-1]] != start:
        ring.append(came[ring[-1]])
    ring.reverse()
    first = ring.index(min(ring))
    return ring[first:] + ring[:first]


def _cycle(facts: Evidence, ring: list[Span]) -> Finding:
    ops = {s.op for s in ring}
    said = [f"rank {s.rank} waits in {facts.call(s)}{placed(s)}" for s in ring]
    each = "each waits for the other" if len(ring) == 2 else "each waits for the next, in a circle"
    remedy = {
        Op.RECV: "Let one of them send first.",
        Op.SEND: "Let one of them receive first, or use isend.",
    }
    mixed = "Make these calls in the same order on every rank."
    ranks = tuple(sorted(s.rank for s in ring))
    return Finding(
        Kind.RECV_CYCLE if ops == {Op.RECV} and len(ring) == 2 else Kind.CYCLE,
        f"{listed(said, ', ')}: {each}.",
        remedy[ring[0].op] if len(ops) == 1 and ops <= P2P else mixed,
        ranks,
        missing_ranks=ranks,
        lines=lines(*ring),
    )


# -- ranks that failed ------------------------------------------------------------------------


def gone(how: str) -> str:
    """One word for how a process ended."""
    return "hung" if SILENT in how else "ended"


def search(how: str) -> str:
    """The remedy for a process that has ended."""
    if ASKED in how:
        return "That is what you asked for."
    if SILENT in how:
        return STOPPED
    return next((told for words, told in _ENDS.items() if words in how), _ENDS[""])


#: How a process ended, and what to do about that.
_ENDS = {
    "gloo": "What it received is larger than its tensor: compare the shapes, dtypes and splits "
    "that the ranks pass to this call, and the order of their calls.",
    "SIGKILL": "It was killed from outside, by the system if there was too little memory: use "
    "smaller batches, or fewer ranks.",
    "SIGSEGV": "It crashed in native code: look at what it called last, and with which arguments.",
    "exit status": "Look for a call of os._exit, also in a library: raise an exception instead.",
    "": "Look for what ended it: os._exit, a crash in native code, or too little memory.",
}


#: DDP's words for two ranks that wrap different models.
_OTHER_MODEL = re.compile(r"expects same model .* Rank (\d+) has .* rank (\d+) has inconsistent")


def _prior_iteration(facts: Evidence, ranks: list[int], places: dict[int, str]) -> Finding:
    """DDP's complaint in the next forward pass that gradients have been missing."""
    lacking = facts.left_out("unreduced", facts.ranks) or {r: [] for r in ranks}
    found = unused(lacking, [])
    message = f"{found.message.partition(';')[0]}{_at_all(places)}."
    return replace(found, message=message, culprits=tuple(lacking), lines=places)


def _at_all(places: Mapping[int, str]) -> str:
    """The line at which DDP raised."""
    return f" before the next one{at(sorted(places.values())[0])}" if any(places.values()) else ""


def failure(facts: Evidence, ranks: list[int], how: str, text: str, where: str) -> Finding:
    """Ranks that raised or died in the same way."""
    last = [s for r in ranks if (s := last_call(facts.trace.spans, r)) is not None]
    places = {r: where for r in ranks} if where else lines(*last) if how == "raised" else {}
    culprits = tuple(ranks)
    if how == "raised":
        line = facts.program.text(where)
        kind, remedy = Kind.RAISED, advice(text, line) or TRACEBACK
        if (odd := _OTHER_MODEL.search(text)) is not None:
            culprits = tuple(sorted(map(int, odd.groups())))
        if "finished reduction in the prior iteration" in text:
            return _prior_iteration(facts, ranks, places)
        message = f"{named(ranks)} {raised(text, where, line)}."
    else:
        kind, remedy = Kind.DIED, search(text)
        of = f"process of {named(ranks)}" if len(ranks) == 1 else f"processes of {named(ranks)}"
        who = f"{named([last[0].rank])} was " if last and len(ranks) > 1 else ""
        after = f"; {who}{seen(last[0])}" if last and not where else ""
        message = f"the {of} {gone(text)} ({headline(text)[:_LONGEST]}){at(where)}{after}."
    return Finding(kind, message, remedy, culprits, missing_ranks=tuple(ranks), lines=places)


def raised(text: str, where: str, line: str = "") -> str:
    """An exception in a sentence, after who raised it.

    Args:
        text: the name of its class, and what it says.
        where: the user's line that raised it.
        line: the text of that line.

    >>> raised("SystemExit: 0", "a.py:3")
    'called sys.exit(0) at a.py:3'
    """
    said = headline(text, line)[:_LONGEST]
    name, _, code = said.partition(": ")
    if name == "SystemExit":
        return f"called sys.exit({code}){at(where)}"
    return f"raised {raised_at(said, where)}"


_LONGEST = 200  # characters of an exception's first line that are shown


def first(finding: Finding) -> Finding:
    """The finding of a rank that raised, where others wait for it."""
    if finding.kind is not Kind.RAISED:
        return finding
    if " called sys.exit(" in finding.message:
        return replace(finding, remedy=LEAVE_TOGETHER)
    known = "" if finding.remedy == TRACEBACK else f"{finding.remedy} "
    return replace(finding, remedy=f"{known}{FIRST}")


FIRST = "Fix this first: the others wait because of it."
TRACEBACK = "Look at its traceback."
LEAVE_TOGETHER = (
    "Leave the program on every rank after the same calls: let an all_reduce tell the others that "
    "one wants to stop, and leave together."
)
