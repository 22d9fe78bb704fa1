"""Mismatches: among the members of a collective, between the ends of a message.

The n-th collective of a rank on a group belongs with the n-th of every other member, so that a
mistake that hangs nobody is found, too. The same call on other lines is no mistake: programs
say ``if rank == 0: … else: …``. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

from distkit._format import named, ordinal, times
from distkit.diagnosis.divergence import (
    BARRIER,
    UNUSED,
    Column,
    left_out,
    minority,
    parted,
    shifted,
    uneven,
)
from distkit.diagnosis.facts import Evidence
from distkit.diagnosis.findings import (
    Finding,
    Kind,
    clauses,
    lines,
    placed,
    tensor,
    verb,
    with_tensor,
)
from distkit.events import Op, Span
from distkit.trace.calls import at, call, difference, share

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
    ranks = [rank for rank, groups in facts.trace.info.threads.items() if group in groups]
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
    differ = {d for s in spans[1:] if (d := difference(spans[0], s))}
    what = next((d for d in _KINDS if d in differ), "")
    if not what:
        if spans[0].op is Op.ALL_TO_ALL and (found := _exchanged(facts, column)):
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
        or _KINDS[what](facts, column)
    )


def _exchanged(facts: Evidence, column: Column) -> Finding | None:
    """An all_to_all in which a rank is not sent what it awaits."""
    if any("sends" in s.attributes for s in column.values()):
        return _splits(facts, column)
    sizes = {s.nbytes for s in column.values()}
    if len(sizes) == 1 or not any(map(facts.ended_in, column.values())):
        return None  # else it may be meant
    rows: dict[int, list[int]] = defaultdict(list)
    for rank, span in column.items():
        rows[span.nbytes].append(rank)
    return replace(_tensor(facts, column), culprits=minority(list(rows.values())))


def _splits(facts: Evidence, column: Column) -> Finding | None:
    """The first two ranks one of which sends more or fewer rows than the other awaits."""
    members = facts.members(next(iter(column.values())).group)
    if len({(s.dtype, s.shape[1:]) for s in column.values() if s.nbytes}) > 1:
        return None  # rows of different sizes
    if any("Split sizes" in end.text for r, end in facts.ends.items() if r in column):
        return None  # those of a call do not even fit its own tensor, and torch says so
    shares = {r: _shares(s, len(members)) for r, s in column.items()}
    for sender, receiver in product(shares, shares):
        sent, awaited = shares[sender][0], shares[receiver][1]
        to, of = members.index(receiver), members.index(sender)
        if to < len(sent) and of < len(awaited) and sent[to] != awaited[of]:
            ends = column[sender], column[receiver]
            return _split(*ends, (sent, awaited), (sent[to], awaited[of]))
    return None


def _shares(span: Span, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """The rows that a rank sends to each member, and those that it awaits from each."""
    even = [span.shape[0] // size] * size if span.shape else []
    return span.attributes.get("sends", even), span.attributes.get("receives", even)


def _split(
    send: Span, recv: Span, splits: tuple[Sequence[int], Sequence[int]], rows: tuple[int, int]
) -> Finding:
    each = "itself" if send.rank == recv.rank else f"rank {recv.rank}"
    awaits = "it" if send.rank == recv.rank else each
    return Finding(
        Kind.SPLIT_MISMATCH,
        f"rank {send.rank} sends {rows[0]} row{'s' * (rows[0] != 1)} to {each} in "
        f"{call(send)}{placed(send)} (input splits {[*splits[0]]}), but {awaits} awaits "
        f"{rows[1]} (output splits {[*splits[1]]})"
        f"{placed(recv) if recv.where != send.where else ''}.",
        SPLITS,
        tuple(sorted({send.rank, recv.rank})),
        lines=lines(send, recv),
    )


SPLITS = (
    "Output split i of rank j has to equal input split j of rank i: let the ranks exchange the "
    "counts first, by all_to_all_single of a tensor with one count for each rank."
)


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


def _op(facts: Evidence, column: Column) -> Finding:
    called = {s.op for s in column.values()}
    for op in [op for op in _WAIT_FOR_ALL if op in called]:
        kind, name, remedy = _WAIT_FOR_ALL[op]
        without = [r for r, s in column.items() if s.op is not op]
        missing = tuple(r for r in without if not _comes_to(facts, column, r, op))
        if missing and (op is Op.NEW_GROUP or len(without) <= len(column) / 2):
            message = f"{_says(column)}: {name} waits for every rank."
            return _finding(kind, column, message, remedy, missing)
    return _finding(
        Kind.DIFFERENT_COLLECTIVE,
        column,
        f"{_says(column)}: these calls are matched with each other, but they differ.",
        CHANGED_PLACES if _changes_places(facts, column) else DIFFERENT_CALLS,
    )


DIFFERENT_CALLS = (
    "Call the same collectives on every rank, in the same order; look for an `if` around one."
)
CHANGED_PLACES = "Call them in the same order on every rank: they have changed places on some."


def _comes_to(facts: Evidence, column: Column, rank: int, op: Op) -> bool:
    """True if a rank's call is one too many, and its text leads on to the one of the others.

    One that repeats what the others have done as often already has skipped theirs.
    """
    span, other = column[rank], next(s for s in column.values() if s.op is op)
    before = [facts.before(s.rank, span.where, s) for s in (span, other)]
    repeats = before[0] == before[1] > 0
    return not repeats and _is_ahead(facts, span, op)


def _is_ahead(facts: Evidence, span: Span, op: Op) -> bool:
    """True if the program's text leads from a call on to an operation."""
    return any(str(op) in name for name in facts.program.ahead(facts.path(span)))


def _changes_places(facts: Evidence, column: Column) -> bool:
    """True if the text leads each of two ranks on to what the other calls."""
    one, *others = column.values()
    return any(
        s.where != one.where and _is_ahead(facts, one, s.op) and _is_ahead(facts, s, one.op)
        for s in others
    )


def _members(facts: Evidence, column: Column) -> Finding:
    return _finding(
        Kind.NEW_GROUP,
        column,
        f"{_says(column)}: all must name the same group.",
        "Call new_group with the same ranks everywhere, on every rank of the world.",
    )


def _root(facts: Evidence, column: Column) -> Finding:
    op = next(iter(column.values())).op
    word = "destination" if op in (Op.REDUCE, Op.GATHER) else "source"
    return _finding(
        Kind.DIFFERENT_ROOT,
        column,
        f"{_says(column)}: they name different roots.",
        f"Name the same {word} on every rank.",
    )


def _reduction(facts: Evidence, column: Column) -> Finding:
    say = {r: call(s) if s.attributes else f"{s.op}(sum)" for r, s in column.items()}
    return _finding(
        Kind.DIFFERENT_REDUCTION,
        column,
        f"{clauses(column.values(), 'call', say)}: the result is wrong, and nothing warns of it.",
        "Pass the same reduction on every rank.",
    )


def _tensor(facts: Evidence, column: Column) -> Finding:
    say = {r: with_tensor(s) for r, s in column.items()}
    return _finding(
        Kind.DIFFERENT_TENSOR,
        column,
        f"{clauses(column.values(), 'call', say)}: all ranks must pass the same shape and dtype.",
        _same_tensor(facts, column),
    )


def _same_tensor(facts: Evidence, column: Column) -> str:
    """The remedy for tensors that differ, by what differs and where the calls stand."""
    spans = [*column.values()]
    dtypes, places = [s.dtype for s in spans], {s.where for s in spans}
    one_call = len(places) == 1
    unlike = len({s.attributes.get("reduction") for s in spans}) > 1
    if not one_call and (unlike or _changes_places(facts, column)):
        return f"{ORDER}; if it is one call, pass the same shape and dtype."
    path = facts.path(spans[0])
    if one_call and (loop := facts.program.reordered(path)) is not None:
        return f"{ORDER}: {loop} takes them in another order on some ranks."
    if len({*dtypes}) > 1:
        return SAME_DTYPE.format(dtype=max(dtypes, key=lambda d: (dtypes.count(d), *_room(d))))
    if not one_call:
        return f"{SAME_SHAPE}."
    if facts.called(spans[0].rank, spans[0]) > 1 and facts.nth(spans[0]):
        return f"{SAME_SHAPE}; {LAST_BATCH}."
    names = facts.program.unordered(path)
    return f"{SAME_SHAPE}{UNORDERED.format(loop=names) if names is not None else ''}."


SAME_SHAPE = "Give every rank a tensor of the same shape: pad it, or cut it"
SAME_DTYPE = "Give every rank a tensor of the same dtype: x.to(torch.{dtype}) converts it."
LAST_BATCH = (
    "usual causes: a smaller last batch (use drop_last=True), or calls in a different order"
)
UNORDERED = "; or sort what {loop} goes through, if its order differs among the ranks"
ORDER = "Call the collectives in the same order on every rank"


def _room(dtype: str) -> tuple[bool, int]:
    """Of two dtypes the floating one, or else the wider one, holds the values of both."""
    return "float" in dtype, int("".join(filter(str.isdigit, dtype)) or 0)


#: What differs, the worst first, and the finding that it makes.
_KINDS = {
    "op": _op,
    "members": _members,
    "root": _root,
    "dtype": _tensor,
    "size": _tensor,
    "reduction": _reduction,
}


def _gradients(facts: Evidence, column: Column) -> Finding | None:
    """Some send gradients, and others go on: have they left some out, or made fewer steps?"""
    without = [r for r, s in column.items() if "gradients" not in s.attributes]
    have = [s for r, s in column.items() if r not in without]
    gone = [column[r] for r in without]
    if (found := left_out(facts, without, have)) is not None:
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
    remedy = uneven(facts, one)
    return _finding(Kind.UNEVEN, column, message, remedy, minority([more, list(rest)]))


def _key(span: Span, where: bool) -> tuple[object, ...]:
    facts = span.attributes.get
    asked = facts("reduction"), facts("function"), facts("members")
    what = (span.op, span.peer, asked, share(span), span.dtype)
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
    text = facts.trace.info.sources.get(file, "").splitlines()
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
    """Messages whose two ends differ in size or dtype, one finding for each pair of lines.

    Between two ranks what differs later, on other lines, comes of the first.
    """
    found: dict[tuple[str, str], list[tuple[Span, Span]]] = defaultdict(list)
    first: dict[tuple[object, ...], tuple[str, str]] = {}  # the lines that differ, by the two ranks
    for send, recv in facts.pairs:
        if send.dtype and recv.dtype and not _alike(send, recv):
            ends = send.rank, recv.rank, send.group, send.tag
            found[first.setdefault(ends, (send.where, recv.where))].append((send, recv))
    for pairs in found.values():
        spans = [s for pair in pairs for s in pair]
        yield _wrong_tensor(facts, *pairs[0], spans), spans


def _alike(one: Span, other: Span) -> bool:
    return (one.dtype, one.nbytes) == (other.dtype, other.nbytes)


def _wrong_tensor(facts: Evidence, send: Span, recv: Span, spans: list[Span]) -> Finding:
    more = len(spans) // 2 - 1
    others = f" (and in {more} more message{'s' * (more > 1)})" if more else ""
    return Finding(
        Kind.WRONG_TENSOR,
        f"{verb([send.rank], 'send')} {tensor(send)} to rank {recv.rank}{at(send.where)}, which "
        f"receives it into {tensor(recv)}{at(recv.where)}{others}.",
        _same_message(facts, send, recv),
        tuple(sorted({s.rank for s in spans})),
        lines={**lines(*spans), **lines(send, recv)},
    )


def _same_message(facts: Evidence, send: Span, recv: Span) -> str:
    """The remedy for a message that does not fit its buffer: another one may have been meant."""
    meant = [
        s
        for end, other in ((send, recv), (recv, send))
        for s in facts.spans
        if (s.op, s.rank, s.group, s.tag) == (end.op, end.rank, end.group, end.tag)
        and s.seq != end.seq
        and s.peer == end.peer
        and _alike(s, other)
    ]
    if meant:
        return MESSAGE_ORDER
    ahead = [facts.program.ahead(facts.path(s)) for s in (send, recv)]
    more = all(any(w in name for name in a) for a, w in zip(ahead, ("send", "recv"), strict=True))
    return BUFFER + ANOTHER_MESSAGE * more


BUFFER = "Give the receive buffer the shape and the dtype of what is sent."
ANOTHER_MESSAGE = " If another message was meant, receive in the order of sending, or use tags."
MESSAGE_ORDER = (
    "Receive messages in the order in which they are sent, or give them tags: between two ranks "
    "they are matched by their order and tag alone."
)
