"""Tensors of all ranks before and after each operation, and their differences.

``project`` compares the ranks as plain data, ``draw`` draws the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from distkit._format import count, human_seconds
from distkit.events import COMPUTATION, P2P, Op, Span, Summary
from distkit.trace.log import EventLog
from distkit.views.scene.frame import Json, clean, name
from distkit.views.scene.marks import Scene, picture, text
from distkit.views.scene.summaries import (
    distance,
    figure,
    headline,
    in_columns,
    key,
    largest,
    rounded,
    unequal,
)
from distkit.views.scene.values import Cell, Table, bounds, norm

#: Maximum numbers of drawn ranks per operation, and of values of all operations.
MAX_RANKS, MAX_VALUES = 16, 120_000

#: Collectives after which all ranks should hold equal values.
AGREEING = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST})


def project(trace: EventLog, *, live: bool = False, room: int = MAX_VALUES) -> Json:
    """Return the tensors of a trace: one entry per message and collective with recorded values.

    Args:
        trace: the run.
        live: whether the run is in progress.
        room: maximum number of values; a notice reports further operations.
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
    """Return the spans of each message and collective with a tensor, sorted by start."""
    found = trace.together(s for s in trace.spans if s.op not in COMPUTATION)
    groups = [sorted(g, key=_place) for g in found if any(s.dtype for s in g)]
    return sorted(groups, key=lambda group: group[0].start)  # a receiver may start much earlier


def _place(s: Span) -> tuple[bool, int]:
    """Return a sort key: sender before receiver, otherwise by rank."""
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
    return {
        "rank": s.rank,
        "lane": trace.ranks.index(s.rank),
        "name": name(trace.info, s.rank),
        "role": _role(trace, s),
        "before": in_columns(s.before, s.shape) if s.before else None,
        "after": in_columns(after, s.shape) if after else None,
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
    """Return whether the ranks hold equal values: verdict, sentence, differing ranks.

    Args:
        trace: has the ranks' names.
        held: each rank and its values.
        what: "message", the collective, or "" before it, which determines the sentence.
    """
    known = [(rank, s) for rank, s in held if s is not None]
    if len(known) < 2:
        return {"word": "", "text": "", "off": {}}
    by_key: dict[object, list[int]] = defaultdict(list)
    for rank, s in known:
        by_key[key(s)].append(rank)
    values = dict(known)
    same = min(by_key.values(), key=lambda ranks: (-len(ranks), ranks))
    base = values[known[0][0]] if what == "message" else values[same[0]]
    if len(by_key) == 1:
        return {"word": "same", "text": _same(trace, known, what), "off": {}}
    differ = [rank for rank, s in known if key(s) != key(base)]
    off = {rank: unequal(base, values[rank]) for rank in differ}
    by = rounded(max(distance(base, values[rank]) for rank in differ))
    return {
        "word": "different",
        "expected": what == "message" or what in AGREEING,
        "text": _different(trace, what, len(by_key), differ, by),
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


#: Widths of the scene and of row names, height of a tensor [px].
WIDTH, LEFT, HIGH = 720, 84, 120
STILLS = 12  # operations in the table; the static picture has fewer


def draw(found: Json) -> Json:
    """Return the picture of a run's tensors, for both painters.

    Args:
        found: the result of ``projection.project``.
    """
    ops, scene = found["ops"], Scene(WIDTH, 0)
    heights = [_table(scene, n, op) for n, op in enumerate(ops)]
    scene.height = max(heights, default=0)
    waiting = "waiting for the first message"
    last = max(0.0, len(ops) - 1.0)
    return picture(
        scene,
        title=found["title"] or "Tensors",
        view="tensors",
        facts=found["facts"],
        notices=found["notices"],
        live=found["live"],
        empty="" if ops else waiting if found["live"] else "no tensor values were recorded",
        unit="operation",
        end=last,
        opening=last if found["live"] else 0.0,
        keyframes=[_keyframe(n, op) for n, op in enumerate(ops)],
        list={"name": "operations", "all": "all ranks", "rows": [*map(_row, range(len(ops)), ops)]},
        stills=[[n, heights[n]] for n in _chosen(ops)],
    )


def _keyframe(n: int, op: Json) -> Json:
    verdicts = [
        {**op[when], "text": op[when]["text"] if op["message"] else f"{when}: {op[when]['text']}"}
        for when in ("before", "after")
        if op[when]["word"]
    ]
    tensors = [s for r in op["ranks"] for s in (r["before"], r["after"]) if s]
    size, shown = max((s["size"], len(s["values"])) for s in tensors)
    part = f"{shown} of {count(size, 'value')}, at equal distances" if shown < size else ""
    more = filter(None, [op["tensor"], part, f"at {human_seconds(op['time'])}"])
    return {
        "begin": float(n),
        "end": float(n),
        "who": op["title"],
        "more": " · ".join(more),
        "where": op["where"],
        "verdicts": verdicts,
    }


def _row(n: int, op: Json) -> list[object]:
    """Return an operation's row of the list, which can be filtered by rank."""
    wrong = bool(op["after"].get("expected"))
    off = [[r["lane"] % 8, str(r["rank"]), ""] for r in op["ranks"] if r["off"] and wrong]
    names = [r["name"] for r in op["ranks"]]
    return [n, names, op["title"], f" {op['tensor']}", "≠" if wrong else "", off, 0]


def _chosen(ops: list[Json]) -> list[int]:
    """Return the first operations, or the first of each kind if there are several kinds."""
    kinds = {(op["title"], op["tensor"], op["where"]): n for n, op in reversed([*enumerate(ops)])}
    firsts = sorted(kinds.values())
    return (firsts if len(firsts) >= min(5, len(ops)) else [*range(len(ops))])[:STILLS]


def _table(scene: Scene, n: int, op: Json) -> float:
    """Draw the table of an operation; return its bottom edge."""
    ranks, most = op["ranks"], op["most"] or 0.0
    table = Table(scene, n, [(r["name"], r["role"], r["lane"]) for r in ranks], LEFT, WIDTH, HIGH)
    before = [Cell(r["before"], _lines(r["before"])) for r in ranks]
    after = [_after(r) for r in ranks]
    rows = {"before": before, "after": after}
    if op["message"]:  # sent and received tensors
        rows = {"values": [b if b.summary else a for b, a in zip(before, after, strict=True)]}
    for when, cells in rows.items():
        if any(cell.summary for cell in cells):
            table.row(when, [f"colours: ±{figure(most)}"] if most else [], cells, most)
    if op["more"]:
        table.add(0, table.bottom + 8, text(f"and {count(op['more'], 'more rank')}", "small"))
        table.bottom += 16
    return table.bottom


def _after(r: Json) -> Cell:
    """Return a rank's tensor after a call; cells that differ from other ranks' have a frame."""
    beside = r["before"]["values"] if r["before"] else ()
    return Cell(r["after"], _lines(r["after"]), beside, r["off"], wrong=bool(r["off"]))


def _lines(s: Json | None) -> list[tuple[str, Sequence[str]]]:
    return [("count", [bounds(s)]), norm(s)] if s else []
