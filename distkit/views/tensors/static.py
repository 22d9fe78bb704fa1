"""The tensors as a static picture and as a table."""

from __future__ import annotations

from collections.abc import Iterator

from distkit._format import count
from distkit.views.scene import svg
from distkit.views.scene.frame import Json, flagged
from distkit.views.scene.geometry import text_width
from distkit.views.scene.theme import GRAY, INK, rank_color
from distkit.views.scene.values_svg import heat, numbers, verdict

WIDTH = 960
#: At most so many operations, and ranks of each, are drawn.
MAX_OPS, MAX_RANKS, ACROSS = 5, 8, 4


def to_svg(picture: Json) -> str:
    """Some operations of a run as an SVG document of at most 60 kB.

    >>> to_svg({"title": "", "facts": [], "ops": [], "notices": []}).startswith("<svg ")
    True
    """
    return svg.fitting(_document(picture, most) for most in range(MAX_OPS, 0, -1))


def _chosen(ops: list[Json], most: int) -> list[Json]:
    """The first operations, and among them every one kind once if that is more telling."""
    kinds = {(op["title"], op["tensor"], op["where"]): op for op in reversed(ops)}
    several = sorted(kinds.values(), key=lambda op: op["n"])
    return several[:most] if len(several) >= min(most, len(ops)) else ops[:most]


def _document(picture: Json, most: int) -> str:
    ops = _chosen(picture["ops"], most)
    title = picture["title"] or "Tensors"
    parts, y = svg.opening(title, " · ".join(picture["facts"]), flagged(picture))
    if not ops:
        parts.append(svg.text(24, y + 6, "no tensor values were recorded", GRAY))
        y += 12
    for op in ops:
        drawn, y = _operation(op, y)
        parts.append(drawn)
    if len(ops) < len(picture["ops"]):
        words = f"{len(ops)} of {count(len(picture['ops']), 'operation')} are drawn here"
        parts.append(svg.text(24, y + 6, words, GRAY))
        y += 12
    return svg.document(WIDTH, y + 14, title, "".join(parts))


def _operation(op: Json, y: float) -> tuple[str, float]:
    """One operation, and where the next one begins."""
    parts = [
        svg.line(24, y - 6, WIDTH - 24, y - 6, "#e9ecef", 1),
        svg.text(24, y + 16, op["title"], INK, 'font-size="14" font-weight="700"'),
    ]
    facts = "   ".join(filter(None, [op["tensor"], op["where"]]))
    at = 40 + text_width(op["title"], 15)
    parts.append(svg.text(at, y + 16, facts, GRAY, f'font-family="{svg.CODE}" font-size="11"'))
    x, y = 24.0, y + 38
    for when in ("before", "after"):
        if told := op[when]["text"]:
            words = told if op["message"] else f"{when}: {told}"
            wrong = bool(op[when].get("expected"))
            parts.append(verdict(x, y, op[when]["word"] == "same", wrong, words))
            x += 48 + text_width(words, 12)
    y += 14 if x > 24 else -8
    ranks = op["ranks"][:MAX_RANKS]
    room = (WIDTH - 48) / min(ACROSS, max(1, len(ranks)))
    for row in range(0, len(ranks), ACROSS):
        ends = []
        for i, r in enumerate(ranks[row : row + ACROSS]):
            drawn, end = _rank(r, 24 + i * min(room, 228), y, min(room, 228), op["most"] or 0.0)
            parts.append(drawn)
            ends.append(end)
        y = max(ends)
    hidden = op["more"] + len(op["ranks"]) - len(ranks)
    if hidden:
        parts.append(svg.text(24, y + 12, f"and {count(hidden, 'more rank')}", GRAY))
        y += 20
    return "".join(parts), y + 14


def _rank(r: Json, x: float, y: float, room: float, most: float) -> tuple[str, float]:
    parts = [
        f'<circle cx="{x + 5:.0f}" cy="{y + 8:.0f}" r="4.5" fill="{rank_color(r["lane"])}"/>',
        svg.text(x + 15, y + 12, r["name"], INK, 'font-weight="700"'),
        svg.text(x + 24 + text_width(r["name"], 13), y + 12, r["role"], GRAY),
    ]
    found = [s for s in (r["before"], r["after"]) if s]
    if not found:
        parts.append(svg.text(x, y + 34, "not recorded", GRAY))
        return "".join(parts), y + 44
    wide = max(s["columns"] for s in found) > 10
    each = room - 20 if wide or len(found) == 1 else (room - 50) / 2
    low, left = y + 20, x
    bottom = low
    for i, s in enumerate(found):
        drawn, height = heat(left, low, s, most, min(each, 150))
        if i and not wide:
            parts.append(svg.text(left - 14, low + height / 2 + 4, "→", GRAY))
        parts.append(drawn)
        bottom = max(bottom, low + height)
        left, low = (left, low + height + 5) if wide else (left + each + 18, low)
    parts.append(svg.text(x, bottom + 15, numbers(found[-1]), GRAY, 'font-size="10.5"'))
    return "".join(parts), bottom + 22


def to_table(picture: Json, limit: int = 12) -> str:
    """A table to read in a terminal: an operation per line, with what its ranks hold."""
    ops = picture["ops"]
    facts = [*picture["facts"], count(len(ops), "operation")]
    parts = [f"{picture['title'] or 'Tensors'}: {', '.join(facts)}"]
    for op in ops[:limit]:
        parts.append(f"  {op['n'] + 1}. {op['title']}  {op['tensor']}  {op['where']}".rstrip())
        parts += [f"     {line}" for line in _lines(op)]
    if len(ops) > limit:
        parts.append(f"  … and {len(ops) - limit:,} more")
    return "\n".join(parts + [f"  {line}" for line in flagged(picture)])


def _lines(op: Json) -> Iterator[str]:
    for when in ("before", "after"):
        if op[when]["text"]:
            yield op[when]["text"] if op["message"] else f"{when}: {op[when]['text']}"
    for r in op["ranks"][:MAX_RANKS]:
        found = [numbers(s) for s in (r["before"], r["after"]) if s]
        yield f"{r['name']}: {'  →  '.join(found) or 'not recorded'}"
