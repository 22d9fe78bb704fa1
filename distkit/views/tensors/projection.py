"""Tensors before and after each operation, as plain data: rank beside rank, and who differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from distkit._format import count
from distkit.events import COMPUTATION, P2P, Op, Span, Summary
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, name
from distkit.views.scene.summaries import (
    distance,
    headline,
    in_columns,
    key,
    largest,
    rounded,
    unequal,
)

#: At most so many ranks of an operation are drawn, and so many values of all operations.
MAX_RANKS, MAX_VALUES = 16, 120_000

#: After these all ranks should hold the same.
AGREEING = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST})


def project(trace: EventLog, *, live: bool = False, room: int = MAX_VALUES) -> Json:
    """The tensors of a trace: one entry per message and collective whose values were noted.

    Args:
        trace: the run.
        live: whether the run goes on.
        room: for so many values; a notice names the operations beyond.
    """
    groups = operations(trace)
    seen = [g for g in groups if any(s.before or s.after for s in g)]
    ops: list[Json] = []
    cost = 0
    for group in seen:
        cost += sum(len(x.values) for s in group[:MAX_RANKS] for x in (s.before, s.after) if x)
        if cost > room:
            break
        ops.append(_operation(trace, group))
    return {
        **headline(trace),
        "live": live,
        "ops": ops,
        "notices": list(_notices(groups, seen, len(ops))),
    }


def operations(trace: EventLog) -> list[list[Span]]:
    """The spans of each message and collective with a tensor, in the order in which they began."""
    found = trace.together(s for s in trace.spans if s.op not in COMPUTATION)
    groups = [sorted(g, key=_place) for g in found if any(s.dtype for s in g)]
    return sorted(groups, key=lambda group: group[0].start)  # a receiver may wait long before


def _place(s: Span) -> tuple[bool, int]:
    """The sender before the receiver, otherwise by rank."""
    return s.op is Op.RECV, s.rank


def _notices(groups: Sequence[object], seen: Sequence[list[Span]], shown: int) -> Iterator[str]:
    if len(seen) < len(groups):
        yield (
            f"{count(len(groups) - len(seen), 'operation')} not shown: their values were not "
            "recorded, to keep recording cheap"
        )
    if shown < len(seen):
        yield f"the first {shown:,} of {len(seen):,} operations with values are shown"
    if any(len(group) > MAX_RANKS for group in seen[:shown]):
        yield f"the first {MAX_RANKS} ranks are drawn; all of them are compared"


def _operation(trace: EventLog, group: list[Span]) -> Json:
    first = group[0]
    before = _verdict(trace, [(s.rank, s.before) for s in group], "")
    held = [(s.rank, s.before if s.op is Op.SEND else s.after) for s in group]
    after = _verdict(trace, held, "message" if first.op in P2P else first.op)
    off = after.pop("off")
    before.pop("off")
    shown = group[:MAX_RANKS]
    seen = [x for s in shown for x in (s.before, s.after) if x]
    return {
        "title": _title(trace, group),
        "where": clean(first.where.rpartition("/")[2]),
        "time": first.start - trace.start,
        "tensor": f"{first.dtype} {list(first.shape)}" if first.dtype else "",
        "ranks": [_rank(trace, s, off.get(s.rank, [])) for s in shown],
        "more": len(group) - len(shown),
        "before": before,
        "after": after,
        "most": rounded(largest(v for x in seen for v in x.values)),
        "message": first.op in P2P,
    }


def _title(trace: EventLog, group: list[Span]) -> str:
    first = group[0]
    label = f" {clean(first.label)}" if first.label else ""
    if first.op in P2P and first.peer is not None:
        ends = (first.rank, first.peer) if first.op is Op.SEND else (first.peer, first.rank)
        return " → ".join(name(trace.info, r) for r in ends)
    return f"{first.op}{label}"


def _rank(trace: EventLog, s: Span, off: list[int]) -> Json:
    after = None if s.op is Op.SEND else s.after
    both = s.before is not None and after is not None and s.before.size == after.size
    changed = unequal(s.before, after) if both and s.before and after else []
    return {
        "rank": s.rank,
        "lane": trace.ranks.index(s.rank),
        "name": name(trace.info, s.rank),
        "role": _role(trace, s),
        "before": in_columns(s.before, s.shape) if s.before else None,
        "after": in_columns(after, s.shape) if after else None,
        "changed": changed,
        "compared": both,
        "off": off,
    }


def _role(trace: EventLog, s: Span) -> str:
    if s.peer is None:
        return ""
    if s.op in P2P:
        return ("sends to " if s.op is Op.SEND else "receives from ") + name(trace.info, s.peer)
    return "root" if s.peer == s.rank else ""


# -- equality across ranks -----------------------------------------------------------


def _verdict(trace: EventLog, held: list[tuple[int, Summary | None]], what: str) -> Json:
    """True if the ranks hold the same: a word, a sentence, the ranks that differ.

    Args:
        trace: for the ranks' names.
        held: each rank and its values.
        what: "message", the collective, or "" before it: what sameness would mean.
    """
    known = [(rank, s) for rank, s in held if s is not None]
    if len(known) < 2:
        return {"word": "", "text": "", "differ": [], "off": {}}
    by_key: dict[object, list[int]] = defaultdict(list)
    for rank, s in known:
        by_key[key(s)].append(rank)
    values = dict(known)
    same = min(by_key.values(), key=lambda ranks: (-len(ranks), ranks))
    base = values[known[0][0]] if what == "message" else values[same[0]]
    if len(by_key) == 1:
        return {"word": "same", "text": _same(trace, known, what), "differ": [], "off": {}}
    differ = [rank for rank, s in known if key(s) != key(base)]
    off = {rank: unequal(base, values[rank]) for rank in differ}
    by = rounded(max(distance(base, values[rank]) for rank in differ))
    return {
        "word": "different",
        "expected": what == "message" or what in AGREEING,
        "text": _different(trace, what, len(by_key), differ, by),
        "differ": differ,
        "off": off,
    }


def _same(trace: EventLog, known: list[tuple[int, Summary]], what: str) -> str:
    if what == "message":
        return f"{name(trace.info, known[1][0])} received what {name(trace.info, known[0][0])} sent"
    s = known[0][1]
    part = f", by {len(s.values)} of {s.size:,} values" if s.size > len(s.values) else ""
    return f"the same on all {len(known)} ranks{part}"


def _different(trace: EventLog, what: str, kinds: int, differ: list[int], by: float | None) -> str:
    amount = f", by up to {by:g}" if by else ""
    if what == "message":
        return f"what arrived differs from what was sent{amount}"
    if kinds > 2 or len(differ) > 3:
        return f"{kinds} different tensors{amount}"
    who = ", ".join(name(trace.info, rank) for rank in differ)
    return f"{who} differ{'s' if len(differ) == 1 else ''} from the others{amount}"
