"""Mismatches between the calls of a collective, and between the ends of a message. No side effects.

The n-th collective of a rank on a group is compared with the n-th of every other member, which also
reveals mistakes without a hang. The same call on different lines is not a mistake: programs contain
``if rank == 0: … else: …``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from distkit._format import named
from distkit.diagnosis import rules
from distkit.diagnosis.divergence import (
    Column,
    diverged,
    find_unused_parameters,
    outliers,
    shifted,
)
from distkit.diagnosis.evidence import Evidence
from distkit.diagnosis.rules import (
    Calls,
    Finding,
    fill,
    lines_of,
    location,
    tensor,
    with_tensor,
)
from distkit.events import Op, Span
from distkit.trace.calls import at, call, comparable_size, difference
from distkit.trace.log import grouped

#: A finding, and the operations involved.
Mismatch = tuple[Finding, list[Span]]

#: For each call that every rank must make: the rule that a missing call violates, and the call's
#: name in messages.
_REQUIRED_CALLS: dict[Op, tuple[rules.Rule, str]] = {
    Op.NEW_GROUP: (rules.new_group, "new_group"),
    Op.BARRIER: (rules.missing_barrier, "the barrier"),
}

_MAX_REORDERED = 8  # maximum number of calls that may be reordered


def collectives(evidence: Evidence) -> Iterator[Mismatch]:
    """Find the first mismatch of each group, and different reductions before it."""
    for group, calls in evidence.calls.items():
        reported = set()
        for nth in range(max(map(len, calls.values()))):
            column = {r: row[nth] for r, row in calls.items() if nth < len(row)}
            finding = _compare(evidence, calls, nth, column)
            if finding is None:
                continue
            signature = finding.rule, tuple(sorted(set(finding.lines.values())))
            if signature not in reported:
                yield _thread_remedy(evidence, group, finding), list(column.values())
            reported.add(signature)
            if finding.rule is not rules.different_reduction:
                break  # later mismatches are consequences


def _thread_remedy(evidence: Evidence, group: str, finding: Finding) -> Finding:
    """Replace the remedy if several threads call collectives on the group."""
    ranks = [rank for rank, groups in evidence.trace.info.threads.items() if group in groups]
    if not ranks:
        return finding
    return replace(finding, remedy=rules.mismatch.fill("threads", ranks=ranks))


def _compare(
    evidence: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    spans = list(column.values())
    differ = {d for s in spans[1:] if (d := difference(spans[0], s))}
    kind = next((d for d in _KINDS if d in differ), "")
    if not kind:
        if spans[0].op is Op.ALL_TO_ALL and (found := _all_to_all_mismatch(evidence, column)):
            return found
        if all(s.where == spans[0].where for s in spans):
            return None  # the common case
        return _swapped_lines(evidence, calls, nth, column) or shifted(evidence, calls, nth, column)
    if len({"gradients" in s.attributes for s in spans}) == 2:
        found = _gradients(evidence, column)
        if found is not None:
            return found
    if _reordered_calls(calls, nth, column, where=False):
        return _another_order(calls, nth, column)
    return diverged(evidence, calls, nth, column) or _differing(evidence, kind, column)


def _all_to_all_mismatch(evidence: Evidence, column: Column) -> Finding | None:
    """Find an all_to_all that sends a rank more or fewer rows than it expects."""
    if any("sends" in s.attributes for s in column.values()):
        return _split_mismatch(evidence, column)
    sizes = {s.nbytes for s in column.values()}
    if len(sizes) == 1 or not any(map(evidence.failed_in, column.values())):
        return None  # may be intentional
    rows = grouped(column, lambda rank: column[rank].nbytes)
    return replace(_differing(evidence, "size", column), culprits=outliers(list(rows.values())))


def _split_mismatch(evidence: Evidence, column: Column) -> Finding | None:
    """Find the first rank that sends more or fewer rows than the receiver expects."""
    members = evidence.members(next(iter(column.values())).group)
    if len({(s.dtype, s.shape[1:]) for s in column.values() if s.nbytes}) > 1:
        return None  # rows of different sizes
    if any("Split sizes" in end.text for r, end in evidence.ends.items() if r in column):
        return None  # torch reports splits that do not fit the call's tensor
    splits = {r: _split_sizes(s, len(members)) for r, s in column.items()}
    for sender, receiver in product(splits, splits):
        sent, awaited = splits[sender][0], splits[receiver][1]
        dst, src = members.index(receiver), members.index(sender)
        if dst < len(sent) and src < len(awaited) and sent[dst] != awaited[src]:
            send, recv = column[sender], column[receiver]
            return rules.split_mismatch.finding(
                send,
                recv,
                culprits=sorted({sender, receiver}),
                send=send,
                receiver="itself" if sender == receiver else named([receiver]),
                rows=(sent[dst], awaited[src]),
                sent=str([*sent]),
                awaited=str([*awaited]),
                where=location(recv) if recv.where != send.where else "",
            )
    return None


def _split_sizes(span: Span, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the number of rows that a rank sends to each member, and that it expects from each."""
    even = [span.shape[0] // size] * size if span.shape else []
    return span.attributes.get("sends", even), span.attributes.get("receives", even)


# -- one position of a group's sequence -----------------------------------------------


def _classes(column: Column) -> list[list[int]]:
    """Group the ranks whose calls agree."""
    classes: list[list[int]] = []
    for rank, span in sorted(column.items()):
        for ranks in classes:
            if not difference(column[ranks[0]], span):
                ranks.append(rank)
                break
        else:
            classes.append([rank])
    return classes


def _finding(
    rule: rules.Rule,
    column: Column,
    write: Callable[[Span], str] = call,
    *,
    remedy: str = "",
    culprits: Sequence[int] = (),
    **values: Any,
) -> Finding:
    return rule.finding(
        *column.values(),
        remedy=remedy,
        culprits=culprits or outliers(_classes(column)),
        calls=Calls(column.values(), write),
        **values,
    )


def _differing(evidence: Evidence, kind: str, column: Column) -> Finding:
    """Return the finding for calls that differ in ``kind``, a key of ``_KINDS``."""
    if kind == "op" and (finding := _required(evidence, column)) is not None:
        return finding
    rule, write = _KINDS[kind]
    to_one = next(iter(column.values())).op in (Op.REDUCE, Op.GATHER)
    remedy = _same_tensor(evidence, column) if rule is rules.different_tensor else ""
    return _finding(rule, column, write, remedy=remedy, root="destination" if to_one else "source")


def _required(evidence: Evidence, column: Column) -> Finding | None:
    """Find ranks that do not make a call that every rank must make."""
    called = {s.op for s in column.values()}
    for op in [op for op in _REQUIRED_CALLS if op in called]:
        rule, name = _REQUIRED_CALLS[op]
        others = [r for r, s in column.items() if s.op is not op]
        missing = [r for r in others if not _makes_extra_call(evidence, column, r, op)]
        if missing and (op is Op.NEW_GROUP or len(others) <= len(column) / 2):
            message = rules.divergence.sentences["waits_for_all"]
            return _finding(rule, column, message=message, culprits=missing, name=name)
    return None


def _makes_extra_call(evidence: Evidence, column: Column, rank: int, op: Op) -> bool:
    """Return whether a rank makes an extra call before it reaches the call of the other ranks.

    If the others have made the extra call equally often, the rank has skipped their call instead.
    """
    span, other = column[rank], next(s for s in column.values() if s.op is op)
    counts = [evidence.count_earlier_calls(s.rank, span.where, s) for s in (span, other)]
    names = () if counts[0] == counts[1] > 0 else evidence.program.calls_below(evidence.path(span))
    return any(str(op) in name for name in names)


def _same_tensor(evidence: Evidence, column: Column) -> str:
    """Return the remedy for different tensors, based on their differences and lines."""
    rule, same_order = rules.different_tensor, rules.another_order.remedy
    spans = [*column.values()]
    dtypes = [s.dtype for s in spans]
    one_call = len({s.where for s in spans}) == 1
    reductions_differ = len({s.attributes.get("reduction") for s in spans}) > 1
    if not one_call and reductions_differ:
        return same_order + rule.fill("one_call")
    if len({*dtypes}) > 1:
        return rule.fill(
            "dtype", dtype=max(dtypes, key=lambda d: (dtypes.count(d), *_dtype_rank(d)))
        )
    cause = ""
    if one_call and evidence.count_calls(spans[0].rank, spans[0]) > 1 and evidence.nth(spans[0]):
        cause = rule.fill("last_batch")
    return fill(rule.remedy, cause=cause)


def _dtype_rank(dtype: str) -> tuple[bool, int]:
    """Return a sort key: floating-point dtypes after others, then by size."""
    return "float" in dtype, int("".join(filter(str.isdigit, dtype)) or 0)


def _with_reduction(span: Span) -> str:
    return call(span) if span.attributes else f"{span.op}(sum)"


#: The rule of each kind of difference, most serious first, and the function that formats the calls.
_KINDS: dict[str, tuple[rules.Rule, Callable[[Span], str]]] = {
    "op": (rules.different_collective, call),
    "members": (rules.new_group_members, call),
    "root": (rules.different_root, call),
    "dtype": (rules.different_tensor, with_tensor),
    "size": (rules.different_tensor, with_tensor),
    "reduction": (rules.different_reduction, _with_reduction),
}


def _gradients(evidence: Evidence, column: Column) -> Finding | None:
    """Find ranks that continue without gradients that the others reduce."""
    ranks = [r for r, s in column.items() if "gradients" not in s.attributes]
    others = [s for r, s in column.items() if r not in ranks]
    skipped = [column[r] for r in ranks]
    if (finding := find_unused_parameters(evidence, ranks, others)) is None:
        return None
    cause = finding.message[:-1]
    message = fill("{cause}, and {calls:continue with}.", cause=cause, calls=Calls(skipped))
    return replace(finding, message=message, lines=lines_of(*column.values()))


# -- lines ------------------------------------------------------------------------


def _key(span: Span, where: bool) -> tuple[object, ...]:
    attribute = span.attributes.get
    parameters = attribute("reduction"), attribute("function"), attribute("members")
    key = (span.op, span.peer, parameters, comparable_size(span), span.dtype)
    return (*key, span.where) if where else key


def _reordered_calls(calls: dict[int, list[Span]], nth: int, column: Column, where: bool) -> int:
    """Return the number of upcoming calls that differ between ranks only in order; 0 if none.

    With ``where``, calls on different lines count as different, and each may occur only once.
    """
    rows = [calls[r][nth : nth + _MAX_REORDERED] for r in column]
    keys = [[_key(s, where) for s in row] for row in rows]
    for width in range(2, min(map(len, keys)) + 1):
        counters = [Counter(row[:width]) for row in keys]
        if where and max(counters[0].values()) > 1:
            return 0
        if all(counter == counters[0] for counter in counters[1:]):
            return width
    return 0


def _swapped_lines(
    evidence: Evidence, calls: dict[int, list[Span]], nth: int, column: Column
) -> Finding | None:
    """Find equal calls that ranks make in different orders, which makes the results wrong."""
    lines = {s.where for s in column.values()}
    if len(lines) == 1 or "" in lines or {s.op for s in column.values()} <= _WITHOUT_TENSOR:
        return None
    if any(evidence.program.are_alternatives(a, b) for a, b in combinations(lines, 2)):
        return None
    if not _reordered_calls(calls, nth, column, where=True):
        return None
    return _another_order(calls, nth, column)


_WITHOUT_TENSOR = {Op.BARRIER, Op.NEW_GROUP}


def _another_order(calls: dict[int, list[Span]], nth: int, column: Column) -> Finding:
    after = {r: calls[r][nth + 1] for r in column}

    def two_calls(span: Span) -> str:
        first = column[span.rank]
        return f"{with_tensor(first)}{at(first.where)} and then {with_tensor(span)}"

    rows = grouped(after, lambda rank: two_calls(after[rank]))
    return rules.another_order.finding(
        *column.values(),
        culprits=outliers(list(rows.values())),
        calls=Calls(after.values(), two_calls),
    )


# -- messages -----------------------------------------------------------------------


def messages(evidence: Evidence) -> Iterator[Mismatch]:
    """Find messages whose ends differ in size or dtype, one finding per pair of lines.

    Later differences between the same two ranks are consequences of the first.
    """
    by_lines: dict[tuple[str, str], list[tuple[Span, Span]]] = defaultdict(list)
    # the lines of the first different pair, by sender, receiver, group and tag
    first_lines: dict[tuple[object, ...], tuple[str, str]] = {}
    for send, recv in evidence.pairs:
        if send.dtype and recv.dtype and not _same_layout(send, recv):
            ends = send.rank, recv.rank, send.group, send.tag
            by_lines[first_lines.setdefault(ends, (send.where, recv.where))].append((send, recv))
    for pairs in by_lines.values():
        spans = [s for pair in pairs for s in pair]
        yield _wrong_tensor(evidence, *pairs[0], spans), spans


def _same_layout(one: Span, other: Span) -> bool:
    return (one.dtype, one.nbytes) == (other.dtype, other.nbytes)


def _wrong_tensor(evidence: Evidence, send: Span, recv: Span, spans: list[Span]) -> Finding:
    rule, repeats = rules.wrong_tensor, len(spans) // 2 - 1
    return rule.finding(
        remedy=_same_message(evidence, send, recv),
        culprits=sorted({s.rank for s in spans}),
        lines={**lines_of(*spans), **lines_of(send, recv)},
        send=send,
        recv=recv,
        sent=tensor(send),
        got=tensor(recv),
        others=rule.fill("others", n=repeats) if repeats else "",
    )


def _same_message(evidence: Evidence, send: Span, recv: Span) -> str:
    """Return the remedy for a message that does not fit its buffer."""
    alternatives = [
        s
        for end, other in ((send, recv), (recv, send))
        for s in evidence.spans
        if (s.op, s.rank, s.group, s.tag) == (end.op, end.rank, end.group, end.tag)
        and s.seq != end.seq
        and s.peer == end.peer
        and _same_layout(s, other)
    ]
    if alternatives:
        return rules.crossed_messages.remedy
    later_calls = [evidence.program.calls_below(evidence.path(s)) for s in (send, recv)]
    has_others = all(
        any(word in name for name in names)
        for names, word in zip(later_calls, ("send", "recv"), strict=True)
    )
    return fill(
        rules.wrong_tensor.remedy, other=rules.wrong_tensor.fill("other") if has_others else ""
    )
