"""What hangs nobody and is worth saying: forgotten waits, lost messages, slow ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distkit.calls import at, call, named
from distkit.events import P2P, Op, Span, State
from distkit.standing import Doing
from distkit.trace.evidence import Evidence
from distkit.trace.findings import Finding, Kind, clauses, lines, verb

#: A rank is a straggler when the others waited for it at least so long [s], and such a share
#: of the run.
_LONG, _SHARE = 0.1, 0.2

#: A message whose sender has left without waiting is lost when it has not come after this
#: long [s] and at so many bytes per second.
_LOST, _SLOW = 1.0, 1e8


def remarks(facts: Evidence, told: list[Finding]) -> Iterator[Finding]:
    """What hangs nobody, mistakes first; not again what has been ``told``."""
    yield from _buffers(facts)
    for finding in _forgotten(facts):
        if not any(finding.lines.items() <= other.lines.items() for other in told):
            yield finding
    yield from _strangers(facts)
    yield from _awaited(facts)
    yield from _late(facts)


def _buffers(facts: Evidence) -> Iterator[Finding]:
    """Buffers of receives that were used before ``wait()``, one finding for each line."""
    seen = set()
    for e in facts.trace.events:
        if e.op is not Op.TOUCH or e.match is None or (e.rank, e.where) in seen:
            continue
        seen.add((e.rank, e.where))
        recv = facts.by_key.get((e.rank, int(e.match)))
        which = f"its i{call(recv)}{at(recv.where)}" if recv is not None else "its irecv"
        yield Finding(
            Kind.BUFFER_IN_USE,
            f"rank {e.rank} uses the buffer of {which} before wait(){at(e.where)}: "
            "what it finds there may be the old values.",
            "Call wait() on what irecv returned before using its buffer.",
            (e.rank,), lines={e.rank: e.where},
        )  # fmt: skip


def _forgotten(facts: Evidence) -> Iterator[Finding]:
    """Requests that nobody waited for on ranks that have finished, and messages without an end."""
    done = set()
    for mine in facts.alone:
        if facts.returned(mine.rank) and facts.returned(mine.peer):
            done.add((mine.rank, mine.seq))
            yield _without_end(mine)
    for mine in facts.spans:
        open_still = mine.op in P2P and mine.state is State.STARTED
        if open_still and facts.returned(mine.rank) and (mine.rank, mine.seq) not in done:
            yield _never_waited(facts, mine)


def _never_waited(facts: Evidence, mine: Span) -> Finding:
    """A request that its rank has left behind; at times the message is lost with it."""
    said = f"rank {mine.rank} never waited for its i{call(mine)}{at(mine.where)}"
    other = next((b if a is mine else a for a, b in facts.pairs if mine in (a, b)), None)
    lost = other is not None and _waits_in_vain(facts, other)
    if other is not None and lost:
        said += f" and has left; rank {other.rank} waits in {call(other)}{at(other.where)}"
    return Finding(
        Kind.NOT_WAITED, f"{said}.",
        "Call wait() on what isend and irecv return: only then the transfer is over.",
        (mine.rank,), waiting=(other.rank,) if other is not None and lost else (),
        lines=lines(mine), hang=lost,
    )  # fmt: skip


def _waits_in_vain(facts: Evidence, span: Span) -> bool:
    """Whether a rank has waited longer than any transfer takes."""
    held = span.state is State.BLOCKED or span.rank in facts.held
    waited = (span.end or float(facts.trace.meta.get("until", 0))) - span.start
    return held and waited > _LOST + span.nbytes / _SLOW


def _without_end(mine: Span) -> Finding:
    sends = mine.op is Op.SEND
    lost = "received what it sends" if sends else "sent what it wants to receive"
    return Finding(
        Kind.NO_RECEIVER if sends else Kind.NO_SENDER,
        f"rank {mine.peer} never {lost}: {call(mine)} of rank {mine.rank}{at(mine.where)}.",
        f"Add the missing {'recv' if sends else 'send'} on rank {mine.peer}, or remove this one.",
        (mine.rank,), missing_ranks=(mine.peer,) if mine.peer is not None else (),
        lines=lines(mine),
    )  # fmt: skip


def _strangers(facts: Evidence) -> Iterator[Finding]:
    """Collectives that ranks called on groups of others."""
    places: dict[tuple[Op, str], list[int]] = defaultdict(list)
    for s in facts.strangers:
        places[s.op, s.where].append(s.rank)
    for (op, where), found in places.items():
        ranks = sorted(set(found))
        yield Finding(
            Kind.WRONG_GROUP,
            f"{verb(ranks, 'call')} {op}(){at(where)} on a group without {named(ranks)}: "
            "nothing happens there.",
            "Call it on the group's members only, or make the group larger.",
            tuple(ranks), lines=dict.fromkeys(ranks, where),
        )  # fmt: skip


# -- slow ranks --------------------------------------------------------------------------


def _awaited(facts: Evidence) -> Iterator[Finding]:
    """Ranks that others wait for at the moment, and that still compute: they may yet come."""
    waiting: dict[int, list[Span]] = defaultdict(list)
    for rank in facts.ranks:
        standing = facts.board.standing(rank)
        if standing.doing is Doing.BLOCKED and rank not in facts.stuck:
            for other in standing.waits_for:
                waiting[other].append(facts.span(standing))
    slow = {r: spans for r, spans in waiting.items() if facts.runs(r)}
    for rank, spans in slow.items():
        yield Finding(
            Kind.STRAGGLER,
            f"{clauses(spans, 'wait in')} for rank {rank}, which "
            f"{'was' if rank in facts.held else 'is'} in no communication.",
            "If it computes, that is no hang: it may yet come.",
            (rank,), tuple(s.rank for s in spans), lines=lines(*spans),
        )  # fmt: skip


def _late(facts: Evidence) -> Iterator[Finding]:
    """The rank that came last to the collectives again and again, when that cost much."""
    lost: dict[int, float] = defaultdict(float)
    came: dict[int, int] = defaultdict(int)
    total = 0
    for group, calls in facts.calls.items():
        if len(calls) < len(facts.members(group)):
            continue
        for column in zip(*calls.values(), strict=False):
            starts = sorted((s.start, s.rank) for s in column)
            total += len(starts) > 1
            came[starts[-1][1]] += 1
            lost[starts[-1][1]] += starts[-1][0] - starts[(len(starts) - 1) // 2][0]
    slowest = max(lost, key=lambda r: lost[r], default=-1)
    seconds = lost.get(slowest, 0.0)
    if seconds < max(_LONG, _SHARE * facts.trace.seconds) or 2 * came[slowest] < total:
        return
    yield Finding(
        Kind.STRAGGLER,
        f"rank {slowest} came last to {came[slowest]} of {total} collectives: "
        f"the others waited {seconds:.2g} s for it in all.",
        "That is no hang: give it less to do, or look for what slows it down.",
        (slowest,),
    )
