"""Mismatches: among the members of a collective, between the ends of a message.

The n-th collective of a rank on a group belongs with the n-th of every other member, so that a
mistake that hangs nobody is found, too. The same call on other lines is no mistake: programs
say ``if rank == 0: … else: …``. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from distkit.diagnosis.divergence import (
    BARRIER,
    UNUSED,
    Column,
    minority,
    parted,
    shifted,
    uneven,
    unused,
)
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import (
    Finding,
    Kind,
    clauses,
    lines,
    tensor,
    times,
    verb,
    with_tensor,
)
from distkit.events import Op, Span
from distkit.trace.calls import at, call, difference, named, ordinal, share

#: A finding, and the operations that its mistake concerns.
Mismatch = tuple[Finding, list[Span]]

#: A remedy that several rules give.
NEW_GROUP = "Call new_group on every rank of the world, members or not: move it out of the `if`."

#: Calls that every rank must make: the mistake when one does not, their name, and the remedy.
_WAIT_FOR_ALL = {
    Op.NEW_GROUP: (Kind.NEW_GROUP, "new_group", NEW_GROUP),
    Op.BARRIER: (Kind.MISSING_BARRIER, "the barrier", BARRIER),
}

_WINDOW = 8  # so far apart may calls be that changed places


def collectives(facts: Evidence) -> Iterator[Mismatch]:
    """The first contradiction of each group, and reductions that differ before it."""
    for group, calls in facts.calls.items():
        seen = set()
        for nth in range(max(map(len, calls.values()))):
            column = {r: row[nth] for r, row in calls.items() if nth < len(row)}
            finding = _compare(facts, calls, nth, column)
            if finding is None:
                continue
            place = finding.kind, tuple(sorted(set(finding.lines.values())))
            if place not in seen:
                yield _among_threads(facts, group, finding), list(column.values())
            seen.add(place)
            if finding.kind is not Kind.DIFFERENT_REDUCTION:
                break  # what comes after it is its consequence


def _among_threads(facts: Evidence, group: str, finding: Finding) -> Finding:
    """A remedy for threads that race, whose calls have no order."""
    threads: dict[str, list[str]] = facts.trace.meta.get("threads", {})
    ranks = [int(rank) for rank, groups in threads.items() if group in groups]
    if not ranks:
        return finding
    remedy = (
        f"Several threads of {named(ranks)} call collectives on this group, in no certain order: "
        "give each thread a group of its own, made by new_group, or call them all from one thread."
    )
    return replace(finding, remedy=remedy)


def _compare(
    facts: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    spans = list(column.values())
    what = next((d for s in spans[1:] if (d := difference(spans[0], s))), "")
    if not what:
        if spans[0].op is Op.ALL_TO_ALL and (found := _exchanged_unevenly(facts, column)):
            return found
        if all(s.where == spans[0].where for s in spans):
            return None  # nearly always
        return _swapped_lines(facts, calls, nth, column) or shifted(facts, calls, nth, column)
    if len({"gradients" in s.attributes for s in spans}) == 2:
        found = _gradients(facts, column)
        if found is not None:
            return found
    if _changed_places(calls, nth, column, where=False):
        return _another_order(calls, nth, column)
    return (
        parted(facts, calls, nth, column)
        or _uneven(facts, calls, nth, column)
        or _KINDS[what](column)
    )


def _exchanged_unevenly(facts: Evidence, column: Column) -> Finding | None:
    """An all_to_all of several sizes that the backend did not survive: else it may be meant."""
    sizes = {s.nbytes for s in column.values()}
    if len(sizes) > 1 and any(map(facts.ended_in, column.values())):
        rows: dict[int, list[int]] = defaultdict(list)
        for rank, span in column.items():
            rows[span.nbytes].append(rank)
        return replace(_tensor(column), culprits=minority(list(rows.values())))
    return None


# -- one position of a group's sequence -----------------------------------------------


def _classes(column: Column) -> list[list[int]]:
    """The ranks whose calls fit together."""
    found: list[list[int]] = []
    for rank, span in sorted(column.items()):
        for ranks in found:
            if not difference(column[ranks[0]], span):
                ranks.append(rank)
                break
        else:
            found.append([rank])
    return found


def _finding(
    kind: Kind, column: Column, message: str, remedy: str, culprits: tuple[int, ...] = ()
) -> Finding:
    culprits = culprits or minority(_classes(column))
    return Finding(kind, message, remedy, culprits, lines=lines(*column.values()))


def _says(column: Column) -> str:
    return clauses(column.values(), "call")


def _op(column: Column) -> Finding:
    ops = {s.op for s in column.values()}
    for op, (kind, name, remedy) in _WAIT_FOR_ALL.items():
        without = tuple(r for r, s in column.items() if s.op is not op)
        if op in ops and (op is Op.NEW_GROUP or len(without) <= len(column) / 2):
            message = f"{_says(column)}: {name} waits for every rank."
            return _finding(kind, column, message, remedy, without)
    return _finding(
        Kind.DIFFERENT_COLLECTIVE,
        column,
        f"{_says(column)}: these calls are matched with each other, but they differ.",
        "Call the same collectives on every rank, in the same order; look for an `if` around one.",
    )


def _members(column: Column) -> Finding:
    return _finding(
        Kind.NEW_GROUP,
        column,
        f"{_says(column)}: all must name the same group.",
        "Call new_group with the same ranks everywhere, on every rank of the world.",
    )


def _root(column: Column) -> Finding:
    op = next(iter(column.values())).op
    word = "destination" if op in (Op.REDUCE, Op.GATHER) else "source"
    return _finding(
        Kind.DIFFERENT_ROOT,
        column,
        f"{_says(column)}: they name different roots.",
        f"Name the same {word} on every rank.",
    )


def _reduction(column: Column) -> Finding:
    say = {r: call(s) if s.attributes else f"{s.op}(sum)" for r, s in column.items()}
    return _finding(
        Kind.DIFFERENT_REDUCTION,
        column,
        f"{clauses(column.values(), 'call', say)}: the result is wrong, and nothing warns of it.",
        "Pass the same reduction on every rank.",
    )


def _tensor(column: Column) -> Finding:
    say = {r: with_tensor(s) for r, s in column.items()}
    return _finding(
        Kind.DIFFERENT_TENSOR,
        column,
        f"{clauses(column.values(), 'call', say)}: all ranks must pass the same shape and dtype.",
        _same_tensor(column),
    )


def _same_tensor(column: Column) -> str:
    """The remedy for tensors that differ; those of a loop differ for reasons of their own."""
    spans = column.values()
    if len({s.dtype for s in spans}) > 1:
        return "Give every rank a tensor of the same dtype: x.to(torch.float32) converts it."
    remedy = "Give every rank a tensor of the same shape: pad it, or cut it"
    if len({s.where for s in spans}) == 1:
        remedy += "; usual causes: a smaller last batch (use drop_last=True), or calls in a "
        remedy += "different order"
    return f"{remedy}."


_KINDS = {
    "op": _op,
    "members": _members,
    "root": _root,
    "reduction": _reduction,
    "dtype": _tensor,
    "size": _tensor,
}


def _gradients(facts: Evidence, column: Column) -> Finding | None:
    """Some send gradients, and others go on: have they left some out, or made fewer steps?"""
    without = [r for r, s in column.items() if "gradients" not in s.attributes]
    have = [s for r, s in column.items() if r not in without]
    lacking = facts.unreduced(without)
    gone = [column[r] for r in without]
    if lacking:
        found = unused(facts, lacking, have)
        message = f"{found.message[:-1]}, and {clauses(gone, 'go on to')}."
        return replace(found, message=message, lines=lines(*column.values()))
    if facts.sees_gradients:
        return None
    return _finding(
        Kind.UNUSED_PARAMETER,
        column,
        f"{clauses(have, 'send', dict.fromkeys((s.rank for s in have), 'gradients'))}, but "
        f"{clauses(gone, 'go on to')}: some of the gradients are missing there.",
        UNUSED,
        tuple(without),
    )


# -- lines ------------------------------------------------------------------------


def _uneven(
    facts: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """One rank calls a line once more, where another has already gone on to the next."""
    for a, b in ((a, b) for a in column for b in column if a != b):
        one, other = column[a].where, column[b].where
        rows = [s.where for s in calls[a][:nth]], [s.where for s in calls[b][:nth]]
        before = rows[0].count(one)
        if not one or one == other or not before or before != rows[1].count(one):
            continue
        if _loops(rows[0], one, other):
            return _one_more(facts, column, column[a], before)
    return None


def _loops(before: list[str], again: str, other: str) -> bool:
    """True if a rank that calls ``again`` stays in its loop, and one that calls ``other`` left."""
    if other not in before:
        return True
    steps = set(pairwise(before))
    usual, leaving = (before[-1], again) in steps, (before[-1], other) in steps
    return before[::-1].index(again) < before[::-1].index(other) and (usual or not leaving)


def _one_more(facts: Evidence, column: Column, one: Span, before: int) -> Finding:
    more = [r for r, s in column.items() if s.where == one.where]
    rest = {r: s for r, s in column.items() if r not in more}
    message = (
        f"{clauses((column[r] for r in more), 'call')} for the {ordinal(before + 1)} time, "
        f"while {clauses(rest.values(), 'go on to')} after calling it {times(before)}: "
        "they run different numbers of iterations."
    )
    remedy = uneven(facts, one.where)
    return _finding(Kind.UNEVEN, column, message, remedy, minority([more, list(rest)]))


def _key(span: Span, where: bool) -> tuple[object, ...]:
    what = (span.op, span.peer, span.attributes, share(span), span.dtype)
    return (*what, span.where) if where else what


def _changed_places(calls: dict[int, list[Span]], nth: int, column: Column, where: bool) -> int:
    """The number of next calls that are the same on all ranks but for their order; 0 if none.

    With ``where``, lines tell the calls apart, each of them once.
    """
    rows = [calls[r][nth : nth + _WINDOW] for r in column]
    keys = [[_key(s, where) for s in row] for row in rows]
    for width in range(2, min(map(len, keys)) + 1):
        counts = [Counter(row[:width]) for row in keys]
        if where and max(counts[0].values()) > 1:
            return 0
        if all(count == counts[0] for count in counts[1:]):
            return width
    return 0


def _swapped_lines(
    facts: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """The same calls, but the ranks come to their lines in another order: silently wrong."""
    places = {s.where for s in column.values()}
    if len(places) == 1 or "" in places or {s.op for s in column.values()} <= _EMPTY:
        return None
    if not _changed_places(calls, nth, column, where=True) or _alternatives(facts, places):
        return None
    return _another_order(calls, nth, column)


_EMPTY = {Op.BARRIER, Op.NEW_GROUP}


def _alternatives(facts: Evidence, places: set[str]) -> bool:
    """True if two lines are branches of an if: each rank goes through one of them."""
    file, _, _ = next(iter(places)).rpartition(":")
    text = facts.trace.meta.get("sources", {}).get(file, "").splitlines()
    numbers = sorted(int(place.rpartition(":")[2]) for place in places)
    between = text[numbers[0] - 1 : numbers[-1]]
    return any(line.strip().startswith(("else", "elif")) for line in between)


def _another_order(calls: dict[int, list[Span]], nth: int, column: Column) -> Finding:
    after = {r: calls[r][nth + 1] for r in column}
    say = {
        r: f"{with_tensor(s)}{at(s.where)} and then {with_tensor(after[r])}"
        for r, s in column.items()
    }
    ends = [replace(s, where=after[r].where) for r, s in column.items()]
    rows: dict[str, list[int]] = defaultdict(list)
    for r in column:
        rows[say[r]].append(r)
    return _finding(
        Kind.ANOTHER_ORDER,
        column,
        f"{clauses(ends, 'call', say)}: the same collectives in a different order.",
        "Call them in the same order on every rank: they are matched by their order alone.",
        minority(list(rows.values())),
    )


# -- messages -----------------------------------------------------------------------


def messages(facts: Evidence) -> Iterator[Mismatch]:
    """Messages whose two ends differ in size or dtype, one finding for each pair of lines."""
    found: dict[tuple[str, str], list[tuple[Span, Span]]] = defaultdict(list)
    for send, recv in facts.pairs:
        if send.dtype and recv.dtype and (send.dtype != recv.dtype or send.nbytes != recv.nbytes):
            found[send.where, recv.where].append((send, recv))
    for pairs in found.values():
        send, recv = pairs[0]
        spans = [s for pair in pairs for s in pair]
        yield _wrong_tensor(send, recv, tuple(sorted({s.rank for s in spans})), spans), spans


def _wrong_tensor(send: Span, recv: Span, ranks: tuple[int, ...], spans: list[Span]) -> Finding:
    others = f" (and in {len(spans) // 2 - 1} more messages)" if len(spans) > 2 else ""
    return Finding(
        Kind.WRONG_TENSOR,
        f"{verb([send.rank], 'send')} {tensor(send)} to rank {recv.rank}{at(send.where)}, which "
        f"receives it into {tensor(recv)}{at(recv.where)}{others}.",
        "Give the receive buffer the shape and the dtype of what is sent.",
        ranks,
        lines=lines(*spans),
    )
