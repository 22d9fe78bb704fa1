"""The scene of tensors: for each operation the values of each rank, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from distkit._format import count, human_seconds
from distkit.views.scene.frame import Json
from distkit.views.scene.marks import Scene, picture, text
from distkit.views.scene.summaries import figure
from distkit.views.scene.values import Cell, Table, bounds, norm

#: Widths of the scene and of the rows' names, height of a tensor [px].
WIDTH, LEFT, HIGH = 720, 84, 120
STILLS = 12  # operations in the table; the static picture has fewer
CHANGED = 0.35  # of the values: where more have changed, none are marked


def draw(found: Json) -> Json:
    """The picture of a run's tensors, for both painters.

    Args:
        found: the result of ``projection.project``.
    """
    ops, scene = found["ops"], Scene(WIDTH, 0)
    heights = [_operation(scene, n, op) for n, op in enumerate(ops)]
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
    """An operation in the list; the reader chooses those of a rank."""
    wrong = bool(op["after"].get("expected"))
    off = [[r["lane"] % 8, str(r["rank"]), ""] for r in op["ranks"] if r["off"] and wrong]
    names = [r["name"] for r in op["ranks"]]
    return [n, names, op["title"], f" {op['tensor']}", "≠" if wrong else "", off, 0]


def _chosen(ops: list[Json]) -> list[int]:
    """The first operations, or the first of each kind if there are several kinds."""
    kinds = {(op["title"], op["tensor"], op["where"]): n for n, op in reversed([*enumerate(ops)])}
    firsts = sorted(kinds.values())
    return (firsts if len(firsts) >= min(5, len(ops)) else [*range(len(ops))])[:STILLS]


def _operation(scene: Scene, n: int, op: Json) -> float:
    """The table of an operation, and where it ends."""
    ranks, most = op["ranks"], op["most"] or 0.0
    table = Table(scene, n, [(r["name"], r["role"], r["lane"]) for r in ranks], LEFT, WIDTH, HIGH)
    few = all(len(r["changed"]) <= CHANGED * len(r["after"]["values"]) for r in ranks if r["after"])
    before = [Cell(r["before"], _lines(r["before"])) for r in ranks]
    after = [_after(r, few) for r in ranks]
    rows = {"before": before, "after": after}
    if op["message"]:  # what was sent, beside what arrived
        rows = {"values": [b if b.summary else a for b, a in zip(before, after, strict=True)]}
    for name, cells in rows.items():
        if any(cell.summary for cell in cells):
            table.row(name, [f"colours: ±{figure(most)}"] if most else [], cells, most)
    if op["more"]:
        table.add(0, table.bottom + 8, text(f"and {count(op['more'], 'more rank')}", "small"))
        table.bottom += 16
    return table.bottom


def _after(r: Json, few: bool) -> Cell:
    """A rank's tensor after a call; cells that are wrong or that changed have a frame."""
    lines, changed = _lines(r["after"]), r["changed"]
    beside: Sequence[float | str] = ()
    if r["compared"]:
        lines.append(("small", [f"{len(changed) or 'none'} changed"]))
        beside = r["before"]["values"]
    marked = r["off"] or (changed if few else ())
    return Cell(r["after"], lines, beside, marked, wrong=bool(r["off"]))


def _lines(s: Json | None) -> list[tuple[str, Sequence[str]]]:
    return [("count", [bounds(s)]), norm(s)] if s else []
