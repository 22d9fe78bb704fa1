"""Compares the tensors of all ranks before and after each operation.

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


def project(trace: EventLog, *, live: bool = False, max_values: int = MAX_VALUES) -> Json:
    """Return the tensors of each message and collective with recorded values.

    Args:
        trace: the run.
        live: whether the run is in progress.
        max_values: maximum number of values; a notice reports further operations.
    """
    groups = operations(trace)
    recorded = [g for g in groups if any(s.before or s.after for s in g)]
    ops: list[Json] = []
    cost = 0
    for group in recorded:
        cost += sum(len(x.values) for s in group[:MAX_RANKS] for x in (s.before, s.after) if x)
        if cost > max_values:
            break
        ops.append(_operation(trace, group))
    return {
        **headline(trace),
        "live": live,
        "ops": ops,
        "notices": list(_notices(groups, recorded, len(ops))),
    }


def operations(trace: EventLog) -> list[list[Span]]:
    """Return the spans of each message and collective with a tensor, sorted by start."""
    tied = trace.together(s for s in trace.spans if s.op not in COMPUTATION)
    groups = [sorted(g, key=_sort_key) for g in tied if any(s.dtype for s in g)]
    return sorted(groups, key=lambda group: group[0].start)  # a receiver may start much earlier


def _sort_key(s: Span) -> tuple[bool, int]:
    """Return a key that sorts the sender before the receiver, and collectives by rank."""
    return s.op is Op.RECV, s.rank


def _notices(groups: Sequence[object], recorded: Sequence[list[Span]], shown: int) -> Iterator[str]:
    if len(recorded) < len(groups):
        yield (
            f"{count(len(groups) - len(recorded), 'operation')} not shown: their values were not "
            "recorded, to keep recording cheap"
        )
    if shown < len(recorded):
        yield f"the first {shown:,} of {len(recorded):,} operations with values are shown"
    if any(len(group) > MAX_RANKS for group in recorded[:shown]):
        yield f"the first {MAX_RANKS} ranks are drawn; all ranks are compared"


def _operation(trace: EventLog, group: list[Span]) -> Json:
    first = group[0]
    before = _verdict(trace, [(s.rank, s.before) for s in group], "")
    results = [(s.rank, s.before if s.op is Op.SEND else s.after) for s in group]
    after = _verdict(trace, results, "message" if first.op in P2P else first.op)
    differing = after.pop("off")
    before.pop("off")
    shown = group[:MAX_RANKS]
    summaries = [x for s in shown for x in (s.before, s.after) if x]
    return {
        "title": _title(trace, group),
        "where": clean(first.where.rpartition("/")[2]),
        "time": first.start - trace.start,
        "tensor": f"{first.dtype} {list(first.shape)}" if first.dtype else "",
        "ranks": [_rank(trace, s, differing.get(s.rank, [])) for s in shown],
        "more": len(group) - len(shown),
        "before": before,
        "after": after,
        "most": rounded(largest(v for x in summaries for v in x.values)),
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


def _verdict(trace: EventLog, summaries: list[tuple[int, Summary | None]], what: str) -> Json:
    """Return the verdict on equal values, a sentence, and the positions at which ranks differ.

    Args:
        trace: the run, for the names of its ranks.
        summaries: each rank and its values.
        what: "message", the collective's name, or "" for values before the call.
    """
    known = [(rank, s) for rank, s in summaries if s is not None]
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
    differing = [rank for rank, s in known if key(s) != key(base)]
    off = {rank: unequal(base, values[rank]) for rank in differing}
    by = rounded(max(distance(base, values[rank]) for rank in differing))
    return {
        "word": "different",
        "expected": what == "message" or what in AGREEING,
        "text": _different(trace, what, len(by_key), differing, by),
        "off": off,
    }


def _same(trace: EventLog, known: list[tuple[int, Summary]], what: str) -> str:
    if what == "message":
        return f"{name(trace.info, known[1][0])} received what {name(trace.info, known[0][0])} sent"
    s = known[0][1]
    part = f", comparing {len(s.values)} of {s.size:,} values" if s.size > len(s.values) else ""
    return f"the same on all {len(known)} ranks{part}"


def _different(trace: EventLog, what: str, kinds: int, differ: list[int], by: float | None) -> str:
    amount = f", by up to {by:g}" if by else ""
    if what == "message":
        return f"the received values differ from the sent values{amount}"
    if kinds > 2 or len(differ) > 3:
        return f"{kinds} different tensors{amount}"
    names = ", ".join(name(trace.info, rank) for rank in differ)
    return f"{names} differ{'s' if len(differ) == 1 else ''} from the others{amount}"


#: Widths of the scene and of row names, height of a tensor [px].
WIDTH, LEFT, HIGH = 720, 84, 120
STILLS = 12  # operations in the table; the static picture has fewer


def draw(data: Json) -> Json:
    """Return the picture of a run's tensors, for both painters.

    Args:
        data: the result of :func:`project`.
    """
    ops, scene = data["ops"], Scene(WIDTH, 0)
    heights = [_table(scene, n, op) for n, op in enumerate(ops)]
    scene.height = max(heights, default=0)
    waiting = "waiting for the first message"
    last = max(0.0, len(ops) - 1.0)
    return picture(
        scene,
        title=data["title"] or "Tensors",
        view="tensors",
        facts=data["facts"],
        notices=data["notices"],
        live=data["live"],
        empty="" if ops else waiting if data["live"] else "no tensor values were recorded",
        unit="operation",
        end=last,
        opening=last if data["live"] else 0.0,
        keyframes=[_keyframe(n, op) for n, op in enumerate(ops)],
        list={"name": "operations", "all": "all ranks", "rows": [*map(_row, range(len(ops)), ops)]},
        stills=[[n, heights[n]] for n in _select_stills(ops)],
    )


def _keyframe(n: int, op: Json) -> Json:
    verdicts = [
        {**op[when], "text": op[when]["text"] if op["message"] else f"{when}: {op[when]['text']}"}
        for when in ("before", "after")
        if op[when]["word"]
    ]
    tensors = [s for r in op["ranks"] for s in (r["before"], r["after"]) if s]
    size, shown = max((s["size"], len(s["values"])) for s in tensors)
    part = f"{shown} of {count(size, 'value')}, evenly spaced" if shown < size else ""
    details = filter(None, [op["tensor"], part, f"at {human_seconds(op['time'])}"])
    return {
        "begin": float(n),
        "end": float(n),
        "who": op["title"],
        "more": " · ".join(details),
        "where": op["where"],
        "verdicts": verdicts,
    }


def _row(n: int, op: Json) -> list[object]:
    """Return the list row of an operation; readers filter the list by rank."""
    wrong = bool(op["after"].get("expected"))
    differing = [[r["lane"] % 8, str(r["rank"]), ""] for r in op["ranks"] if r["off"] and wrong]
    names = [r["name"] for r in op["ranks"]]
    return [n, names, op["title"], f" {op['tensor']}", "≠" if wrong else "", differing, 0]


def _select_stills(ops: list[Json]) -> list[int]:
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
    """Return a rank's tensor after a call, with frames around cells that differ by rank."""
    previous = r["before"]["values"] if r["before"] else ()
    return Cell(r["after"], _lines(r["after"]), previous, r["off"], wrong=bool(r["off"]))


def _lines(s: Json | None) -> list[tuple[str, Sequence[str]]]:
    return [("count", [bounds(s)]), norm(s)] if s else []
