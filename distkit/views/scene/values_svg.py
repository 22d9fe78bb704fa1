"""Values in a static picture: heat maps, and what is no number in them."""

from __future__ import annotations

import math
from collections import defaultdict

from distkit.events import Summary
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.summaries import number
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT, channels

#: The colours of the largest magnitudes, and so many steps from paper to each.
NEGATIVE, POSITIVE, LEVELS = "#0072b2", "#e08200", 9
PAPER = "#f3f5f7"
#: A tensor of up to so many elements is written in a line.
MOST_WRITTEN = 6


def heat(x: float, y: float, summary: Json, most: float, width: float) -> tuple[str, float]:
    """A heat map whose left upper corner is at x, y; and its height.

    Cells of one colour make one path: that keeps the file small.

    Args:
        x: of the corner, in pixels.
        y: of the corner, in pixels.
        summary: plain data of a summary.
        most: the magnitude painted in full.
        width: the most room there is, in pixels.
    """
    columns = max(1, summary["columns"])
    rows = max(1, math.ceil(len(summary["values"]) / columns))
    side = max(1, min(24, math.floor(width / columns)))
    tall = max(18, side) if rows == 1 else max(4, side)
    paths: dict[str, list[str]] = defaultdict(list)
    for i, v in enumerate(summary["values"]):
        corner = f"M{x + i % columns * side:.0f} {y + i // columns * tall:.0f}"
        paths[color(v, most)].append(f"{corner}h{side}v{tall}h-{side}z")
        if isinstance(v, str):
            paths["odd"].append(f"{corner}l{side} {tall}m0-{tall}l-{side} {tall}")
    crosses = paths.pop("odd", [])
    back = svg.rect(x, y, side * columns, tall * rows, f'fill="{PAPER}"', "", 0)
    body = "".join(f'<path fill="{c}" d="{"".join(d)}"/>' for c, d in paths.items() if c != PAPER)
    odd = f'<path stroke="{WARNING_LIGHT}" d="{"".join(crosses)}"/>' if crosses else ""
    return back + body + odd, float(tall * rows)


def color(v: float | str, most: float) -> str:
    """Zero is paper, positive orange, negative blue; a pale red for what is no number."""
    if isinstance(v, str):
        return svg.tint(WARNING_LIGHT, 0.25)
    level = round(LEVELS * min(1.0, abs(v) / most)) if most else 0
    if level == 0:
        return PAPER
    full, paper = channels(POSITIVE if v > 0 else NEGATIVE), channels(PAPER)
    mixed = (round(p + level / LEVELS * (c - p)) for c, p in zip(full, paper, strict=True))
    return f"#{''.join(f'{c:02x}' for c in mixed)}"


def figure(x: float | str | None) -> str:
    """A number in three digits, with a real minus.

    >>> figure(-0.12345), figure("nan"), figure(None)
    ('−0.123', 'NaN', '–')
    """
    if x is None:
        return "–"
    if isinstance(x, str):
        return {"nan": "NaN", "inf": "∞", "-inf": "−∞"}[x]
    return (f"{x:,.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.3g}").replace("-", "−")


def numbers(summary: Json) -> str:
    """A summary in one line.

    >>> numbers({"min": 0.0, "max": 1.0, "norm": 2.0, "values": [0.0, "nan"]})
    '0 to 1, norm 2, 1 × NaN'
    """
    odd = [(sum(v == word for v in summary["values"]), word) for word in ("nan", "inf", "-inf")]
    more = "".join(f", {n} × {figure(word)}" for n, word in odd if n)
    known = [v for v in summary["values"] if not isinstance(v, str)] or ["nan"]
    whole = not isinstance(summary["min"], str)
    low, high = (summary["min"], summary["max"]) if whole else (min(known), max(known))
    return f"{figure(low)} to {figure(high)}, norm {figure(summary['norm'])}{more}"


def written(s: Summary | None) -> str:
    """All values of a small tensor; nothing of a larger one, or of one not looked at.

    >>> written(Summary((3.0, -0.5), 3.04, -0.5, 3.0, 2)), written(None)
    ('[3, −0.5]', '')
    """
    if s is None or not len(s.values) == s.size <= MOST_WRITTEN:
        return ""
    return f"[{', '.join(figure(number(v)) for v in s.values)}]"


def verdict(x: float, y: float, ok: bool, wrong: bool, words: str) -> str:
    """A mark and a sentence."""
    fill = "#0b8a66" if ok else WARNING_LIGHT if wrong else GRAY
    mark = svg.text(x, y, "=" if ok else "≠", fill, 'font-weight="700" font-size="14"')
    return mark + svg.text(x + 15, y, words, INK)
