"""What should fit together and does not: the members of a collective, the ends of a message.

The n-th collective of a rank on a group belongs with the n-th of every other member, so that a
mistake that hangs nobody is found, too. The same call on other lines is no mistake: programs
say ``if rank == 0: … else: …``. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from distkit.calls import at, call, difference, share
from distkit.events import Op, Span
from distkit.trace.evidence import Evidence
from distkit.trace.findings import (
    Finding,
    Kind,
    clauses,
    lines,
    ordinal,
    tensor,
    times,
    verb,
    with_tensor,
)

#: A finding, and the operations that its mistake concerns.
Mismatch = tuple[Finding, list[Span]]

#: Calls at one position of a group's sequence, by rank.
Column = dict[int, Span]

_WINDOW = 8  # so far apart may calls be that changed places


def collectives(facts: Evidence) -> Iterator[Mismatch]:
    """The first contradiction of each group, and reductions that differ before it."""
    for calls in facts.calls.values():
        seen = set()
        for nth in range(max(map(len, calls.values()))):
            column = {r: row[nth] for r, row in calls.items() if nth < len(row)}
            finding = _compare(facts, calls, nth, column)
            if finding is None:
                continue
            place = finding.kind, tuple(sorted(set(finding.lines.values())))
            if place not in seen:
                yield finding, list(column.values())
            seen.add(place)
            if finding.kind is not Kind.DIFFERENT_REDUCTION:
                break  # what comes after it is its consequence


def _compare(
    facts: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    spans = list(column.values())
    what = next((d for s in spans[1:] if (d := difference(spans[0], s))), "")
    if not what:
        return _swapped_lines(facts, calls, nth, column)
    if len({s.label == "gradients" for s in spans}) == 2:
        return _unused(column)
    if _changed_places(calls, nth, column, where=False):
        return _another_order(calls, nth, column)
    return _uneven(calls, nth, column) or _KINDS[what](column)


# -- one position of a group's sequence -----------------------------------------------


def minority(classes: list[list[int]]) -> tuple[int, ...]:
    """The ranks outside the largest class; all of them when none is the largest."""
    sizes = sorted(map(len, classes))
    most = [c for c in classes if len(c) == sizes[-1]]
    odd = [c for c in classes if c is not most[0]] if len(most) == 1 else classes
    return tuple(sorted(r for c in odd for r in c))


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


def _says(column: Column, tensors: bool = False) -> str:
    if tensors:
        say = {r: with_tensor(s) for r, s in column.items()}
        return clauses(column.values(), "call", say)
    return clauses(column.values(), "call")


def _op(column: Column) -> Finding:
    ops = {s.op for s in column.values()}
    for op, make in ((Op.NEW_GROUP, _not_by_all), (Op.BARRIER, _no_barrier)):
        without = tuple(r for r, s in column.items() if s.op is not op)
        if op in ops and (op is Op.NEW_GROUP or len(without) <= len(column) / 2):
            return make(column, without)
    return _finding(
        Kind.DIFFERENT_COLLECTIVE, column,
        f"{_says(column)}: these calls belong together, and are not the same.",
        "Call the same collectives on every rank, in the same order; look for an `if` around one.",
    )  # fmt: skip


def _not_by_all(column: Column, without: tuple[int, ...]) -> Finding:
    message = f"{_says(column)}: new_group waits for every rank."
    return _finding(Kind.NEW_GROUP, column, message, NEW_GROUP, without)


def _no_barrier(column: Column, without: tuple[int, ...]) -> Finding:
    message = f"{_says(column)}: the barrier waits for every rank."
    return _finding(Kind.MISSING_BARRIER, column, message, BARRIER, without)


def _members(column: Column) -> Finding:
    return _finding(
        Kind.NEW_GROUP, column, f"{_says(column)}: that should be one and the same group.",
        "Call new_group with the same ranks everywhere, on every rank of the world.",
    )  # fmt: skip


def _root(column: Column) -> Finding:
    op = next(iter(column.values())).op
    word = "destination" if op in (Op.REDUCE, Op.GATHER) else "source"
    return _finding(
        Kind.DIFFERENT_ROOT, column, f"{_says(column)}: they name different roots.",
        f"Name the same {word} on every rank.",
    )  # fmt: skip


def _reduction(column: Column) -> Finding:
    say = {r: call(s) if s.label else f"{s.op}(sum)" for r, s in column.items()}
    return _finding(
        Kind.DIFFERENT_REDUCTION, column,
        f"{clauses(column.values(), 'call', say)}: the result is wrong, and nothing warns of it.",
        "Pass the same reduction on every rank.",
    )  # fmt: skip


def _tensor(column: Column) -> Finding:
    return _finding(
        Kind.DIFFERENT_TENSOR, column,
        f"{_says(column, tensors=True)}: together they need the same shape and dtype.",
        "Give every rank a tensor of the same shape and dtype: pad it, or cut it.",
    )  # fmt: skip


_KINDS = {"op": _op, "members": _members, "root": _root, "reduction": _reduction,
          "dtype": _tensor, "size": _tensor}  # fmt: skip


def _unused(column: Column) -> Finding:
    without = tuple(r for r, s in column.items() if s.label != "gradients")
    have = {r: s for r, s in column.items() if r not in without}
    gone = {r: column[r] for r in without}
    return _finding(
        Kind.UNUSED_PARAMETER, column,
        f"{clauses(have.values(), 'send', dict.fromkeys(have, 'gradients'))}, but "
        f"{clauses(gone.values(), 'go on to')}: some of the gradients are missing there.",
        UNUSED, without,
    )  # fmt: skip


# -- lines ------------------------------------------------------------------------


def _uneven(calls: dict[int, list[Span]], nth: int, column: Column) -> Finding | None:
    """One rank calls a line once more, where another has already gone on to the next."""
    for a, b in ((a, b) for a in column for b in column if a != b):
        one, other = column[a].where, column[b].where
        rows = [s.where for s in calls[a][:nth]], [s.where for s in calls[b][:nth]]
        before = rows[0].count(one)
        if not one or one == other or not before or before != rows[1].count(one):
            continue
        if _loops(rows[0], one, other):
            return _one_more(column, column[a], before)
    return None


def _loops(before: list[str], again: str, other: str) -> bool:
    """Whether a rank that calls ``again`` stays in its loop, and one that calls ``other`` left."""
    if other not in before:
        return True
    steps = set(pairwise(before))
    usual, leaving = (before[-1], again) in steps, (before[-1], other) in steps
    return before[::-1].index(again) < before[::-1].index(other) and (usual or not leaving)


def _one_more(column: Column, one: Span, before: int) -> Finding:
    more = [r for r, s in column.items() if s.where == one.where]
    rest = {r: s for r, s in column.items() if r not in more}
    message = (
        f"{clauses((column[r] for r in more), 'call')} for the {ordinal(before + 1)} time, "
        f"while {clauses(rest.values(), 'go on to')} after calling it {times(before)}: "
        "they do not have the same number of iterations."
    )
    return _finding(Kind.UNEVEN, column, message, UNEVEN, minority([more, list(rest)]))


def _key(span: Span, where: bool) -> tuple[object, ...]:
    what = (span.op, span.peer, span.label, share(span), span.dtype)
    return (*what, span.where) if where else what


def _changed_places(calls: dict[int, list[Span]], nth: int, column: Column, where: bool) -> int:
    """How many of the next calls are the same on all ranks but for their order; 0 if they differ.

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
    """Whether two lines are branches of an if: each rank goes through one of them."""
    file, _, _ = next(iter(places)).rpartition(":")
    text = facts.trace.meta.get("sources", {}).get(file, "").splitlines()
    numbers = sorted(int(place.rpartition(":")[2]) for place in places)
    between = text[numbers[0] - 1 : numbers[-1]]
    return any(line.strip().startswith(("else", "elif")) for line in between)


def _another_order(calls: dict[int, list[Span]], nth: int, column: Column) -> Finding:
    after = {r: calls[r][nth + 1] for r in column}
    say = {r: f"{with_tensor(s)}{at(s.where)} and then {with_tensor(after[r])}"
           for r, s in column.items()}  # fmt: skip
    ends = [replace(s, where=after[r].where) for r, s in column.items()]
    rows: dict[str, list[int]] = defaultdict(list)
    for r in column:
        rows[say[r]].append(r)
    return _finding(
        Kind.ANOTHER_ORDER, column,
        f"{clauses(ends, 'call', say)}: the same collectives, in another order.",
        "Call them in the same order on every rank: they are matched by their order alone.",
        minority(list(rows.values())),
    )  # fmt: skip


# -- messages -----------------------------------------------------------------------


def messages(facts: Evidence) -> Iterator[Mismatch]:
    """Messages whose two ends differ in size or dtype, one finding for each pair of lines."""
    found: dict[tuple[str, str], list[tuple[Span, Span]]] = defaultdict(list)
    for send, recv in facts.pairs:
        if send.dtype and recv.dtype and (
            send.dtype != recv.dtype or send.nbytes != recv.nbytes
        ):  # fmt: skip
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
        ranks, lines=lines(*spans),
    )  # fmt: skip


# -- remedies that more than one rule gives --------------------------------------------

NEW_GROUP = "Call new_group on every rank of the world, members or not: move it out of the `if`."
BARRIER = "Call barrier() on every rank, or on none."
UNUSED = (
    "Use every parameter of the model in every forward pass, on every rank, "
    "or pass find_unused_parameters=True to DDP."
)
UNEVEN = (
    "Give every rank the same number of batches (DistributedSampler and drop_last=True do), and "
    "look for a break, return or continue that only some ranks reach."
)
