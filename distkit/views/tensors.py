"""Compares and draws the tensors of all ranks before and after each operation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import attrgetter

from distkit._format import count, human_seconds
from distkit.events import COMPUTATION, P2P, Op, Span, Summary
from distkit.trace.log import EventLog, grouped
from distkit.views.scene.frame import Json, clean, dotted, facts, name, omissions
from distkit.views.scene.marks import Scene, picture, text
from distkit.views.scene.values import (
    Cell,
    Head,
    Table,
    bounds,
    distance,
    key,
    largest,
    norm,
    number,
    plain,
    unequal,
)

#: At most MAX_RANKS ranks are drawn per operation, and at most MAX_VALUES values in all. The text
#: table lists at most MAX_STILLS operations; the static picture shows fewer.
MAX_RANKS, MAX_VALUES, MAX_STILLS = 16, 120_000, 12

#: Collectives after which all ranks should have the same values.
AGREEING = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST})

#: Sizes [px].
WIDTH, NAME_WIDTH, TENSOR_HEIGHT = 720, 100, 120


def draw(trace: EventLog, *, live: bool = False, max_values: int = MAX_VALUES) -> Json:
    """Return the picture of a run's tensors for the SVG and browser renderers.

    Args:
        trace: the run.
        live: whether the run is in progress.
        max_values: maximum number of values; a notice states how many operations are shown.
    """
    groups = operations(trace)
    recorded = [group for group in groups if _summaries(group)]
    sizes = accumulate(sum(len(x.values) for x in _summaries(group)) for group in recorded)
    shown = [group for group, size in zip(recorded, sizes, strict=True) if size <= max_values]
    scene = Scene(WIDTH, 0)
    scales = {  # the largest magnitude in the tensors of each shape
        shape: largest(v for group in groups for x in _summaries(group) for v in x.values)
        for shape, groups in grouped(shown, lambda group: group[0].shape).items()
    }
    sends = grouped((s for s in trace.spans if s.before and s.op is Op.SEND), attrgetter("rank"))
    drawn = [
        _operation(scene, n, trace, group, scales[group[0].shape], _next_send(group[-1], sends))
        for n, group in enumerate(shown)
    ]
    scene.height = max((height for *_, height in drawn), default=0)
    last = max(0.0, len(drawn) - 1.0)
    return picture(
        scene,
        title=clean(trace.info.name) or "Tensors",
        view="tensors",
        facts=facts(trace.info, len(trace.ranks)),
        notices=list(_notices(groups, recorded, len(shown))),
        live=live,
        empty=""
        if drawn
        else "waiting for the first operation"
        if live
        else "no tensor values were recorded",
        unit="operation",
        end=last,
        opening=last if live else 0.0,
        keyframes=[keyframe for keyframe, *_ in drawn],
        list={"name": "operations", "all": "all ranks", "rows": [row for _, row, _ in drawn]},
        stills=[[n, height] for n, (*_, height) in enumerate(drawn[:MAX_STILLS])],
    )


def operations(trace: EventLog) -> list[list[Span]]:
    """Return the spans of each message and collective with a tensor, in order.

    A message starts when it is sent, and a collective starts when its first rank enters it. The
    sender precedes the receiver, and the spans of a collective are sorted by rank.
    """
    matched = trace.grouped_by_match(s for s in trace.spans if s.op not in COMPUTATION)
    groups = [
        sorted(g, key=lambda s: (s.op is Op.RECV, s.rank))
        for g in matched
        if any(s.dtype for s in g)
    ]
    return sorted(groups, key=lambda g: min((s.op is Op.RECV, s.start) for s in g))


def _next_send(s: Span, sends: dict[int, list[Span]]) -> Span | None:
    """Return the next send of a tensor of the same shape by the rank that received one."""
    if s.op is not Op.RECV or s.end is None:
        return None
    own = sends.get(s.rank, [])
    later = own[bisect_left(own, s.end, key=attrgetter("start")) :]
    return next((x for x in later if x.shape == s.shape), None)


def _difference(a: Summary, b: Summary | None) -> Summary | None:
    """Return the values of ``a`` minus those of ``b``; None if they are equal or not complete."""
    values = tuple(x - y for x, y in zip(a.values, b.values, strict=False)) if b else ()
    if not any(values) or len(values) < a.size:
        return None
    return Summary(values, math.hypot(*values), min(values), max(values), a.size, a.sampled)


def _summaries(group: list[Span]) -> list[Summary]:
    """Return the drawn summaries of an operation."""
    return [x for s in group[:MAX_RANKS] for x in (s.before, _after(s)) if x]


def _after(s: Span) -> Summary | None:
    return None if s.op is Op.SEND else s.after


def _notices(groups: Sequence[object], recorded: list[list[Span]], shown: int) -> Iterator[str]:
    if len(recorded) < len(groups):
        yield (
            f"{count(len(groups) - len(recorded), 'operation')} not shown: no values were "
            "recorded, to limit the overhead"
        )
    ranks = max(map(len, recorded[:shown]), default=0)
    yield from omissions(
        ("operations with values are shown", shown, len(recorded)),
        ("ranks are drawn; all ranks are compared", min(MAX_RANKS, ranks), ranks),
    )


def _operation(
    scene: Scene, n: int, trace: EventLog, group: list[Span], scale: float, later: Span | None
) -> tuple[Json, list[object], float]:
    """Draw an operation; return its keyframe, its row in the list, and its height."""
    first, summaries = group[0], _summaries(group)
    verdicts, differing = _compare(trace, group)
    tensor = f"{first.dtype} {list(first.shape)}" if first.dtype else ""
    size, values = max((s.size, len(s.values)) for s in summaries)
    part = f"{values} of {count(size, 'value')}, evenly spaced" if values < size else ""
    when = f"at {human_seconds(first.start - trace.start)}"
    keyframe = {
        "begin": float(n),
        "end": float(n),
        "caption": _title(trace, first),
        "details": dotted([tensor, part, when]),
        "where": clean(first.where.rpartition("/")[2]),
        "verdicts": verdicts,
    }
    ranks = [name(trace.info, s.rank) for s in group[:MAX_RANKS]]
    wrong = any(v["expected"] and v["word"] == "different" for v in verdicts)
    marks = [[trace.ranks.index(r) % 8, str(r), ""] for r in [*differing][:MAX_RANKS] if wrong]
    row = [n, ranks, keyframe["caption"], f" {when}", "≠" if wrong else "", marks, 0]
    return keyframe, row, _table(scene, n, trace, group, scale, differing, later)


def _title(trace: EventLog, first: Span) -> str:
    if first.op in P2P and first.peer is not None:
        ends = (first.rank, first.peer) if first.op is Op.SEND else (first.peer, first.rank)
        return " → ".join(name(trace.info, r) for r in ends)
    return clean(f"{first.op} {first.label}".rstrip())


# -- equality across ranks -----------------------------------------------------------


def _compare(trace: EventLog, group: list[Span]) -> tuple[list[Json], dict[int, list[int]]]:
    """Return verdicts on equality, and the positions at which each rank's result differs.

    A message is compared at both ends, a collective before and after.
    """
    op = group[0].op
    if op in P2P:
        ends = {s.rank: s.before if s.op is Op.SEND else s.after for s in group}
        return _verdict(trace, ends, "", expected=True)
    inputs, _ = _verdict(trace, {s.rank: s.before for s in group}, "before: ", expected=False)
    results, differing = _verdict(
        trace, {s.rank: s.after for s in group}, "after: ", expected=op in AGREEING
    )
    return inputs + results, differing


def _verdict(
    trace: EventLog, summaries: dict[int, Summary | None], prefix: str, *, expected: bool
) -> tuple[list[Json], dict[int, list[int]]]:
    """Return a verdict and, for each rank that differs, the positions at which it does.

    Both are empty if fewer than two ranks' values are known. The reference is the largest group of
    ranks with the same values. For a message, ``prefix`` is empty, and the reference is the sender.
    """
    available = {rank: s for rank, s in summaries.items() if s is not None}
    if len(available) < 2:
        return [], {}
    names = [name(trace.info, rank) for rank in available]
    kinds = sorted(
        grouped(available, lambda rank: key(available[rank])).values(), key=len, reverse=True
    )
    base = available[kinds[0][0]]
    if len(kinds) == 1:
        part = f", comparing {len(base.values)} of {base.size:,} values"
        sentence = (
            f"the same on all {len(available)} ranks{part * (base.size > len(base.values))}"
            if prefix
            else f"{names[1]} received the values that {names[0]} sent"
        )
        return [{"word": "same", "expected": expected, "text": prefix + sentence}], {}
    differing = {r: unequal(base, s) for r, s in available.items() if key(s) != key(base)}
    difference = max(distance(base, available[rank]) for rank in differing)
    sentence = f"{len(kinds)} different tensors"
    if not prefix:
        sentence = "the received values differ from the sent values"
    elif len(kinds) == 2 and len(differing) < 4:
        ranks = ", ".join(name(trace.info, rank) for rank in differing)
        sentence = f"{ranks} differ{'s' if len(differing) == 1 else ''} from the others"
    text = prefix + sentence + (f", by up to {number(difference):g}" if difference > 0 else "")
    return [{"word": "different", "expected": expected, "text": text}], differing


# -- the table -------------------------------------------------------------------------


def _table(
    scene: Scene,
    n: int,
    trace: EventLog,
    group: list[Span],
    scale: float,
    differing: dict[int, list[int]],
    later: Span | None,
) -> float:
    """Draw the table of an operation, with the receiver's next send; return its bottom edge."""
    drawn = group[:MAX_RANKS]
    lanes = {rank: lane for lane, rank in enumerate(trace.ranks)}
    heads: list[Head] = [(name(trace.info, s.rank), _role(trace, s), lanes[s.rank]) for s in drawn]
    height = 2 * TENSOR_HEIGHT if group[0].op in P2P else TENSOR_HEIGHT
    table = Table(scene, n, heads, NAME_WIDTH, WIDTH, height)
    rows = {
        "before": [_cell(s.before, s) for s in drawn],
        "after": [_cell(_after(s), s, differing.get(s.rank, ())) for s in drawn],
    }
    if group[0].op in P2P:  # a single row, with the sent and the received tensor
        pairs = zip(*rows.values(), strict=True)
        rows = {"values": [before if before.summary else after for before, after in pairs]}
    if later and later.before:
        blanks = [Cell(None, missing="")] * (len(drawn) - 1)
        added = _difference(later.before, _after(group[-1]))
        rows["adds"] = [*blanks, _cell(added, later)]
        rows["sends next"] = [*blanks, _cell(later.before, later)]
    shown = [(when, cells) for when, cells in rows.items() if any(cell.summary for cell in cells)]
    for i, (when, cells) in enumerate(shown):
        table.row(when, [], cells, scale, scaled=not i)
    if hidden := len(group) - len(drawn):
        table.add(0, table.bottom + 8, text(f"and {count(hidden, 'more rank')}", "small"))
        table.bottom += 16
    return table.bottom


def _role(trace: EventLog, s: Span) -> str:
    if s.peer is None:
        return ""
    if s.op in P2P:
        return ("sends to " if s.op is Op.SEND else "receives from ") + name(trace.info, s.peer)
    return "root" if s.peer == s.rank else ""


def _cell(summary: Summary | None, s: Span, differing: Sequence[int] = ()) -> Cell:
    """Return the cell of a rank's tensor, with frames around values that differ between ranks."""
    if summary is None:
        return Cell(None)
    drawn = plain(summary, s.shape)
    return Cell(drawn, [("count", [bounds(drawn)]), norm(drawn)], differing, wrong=bool(differing))
