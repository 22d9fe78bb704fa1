"""Values in a static picture: heat maps, what is no number in them, and curves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distkit.events import Summary
from distkit.views.scene import svg
from distkit.views.scene.frame import Json
from distkit.views.scene.summaries import number
from distkit.views.scene.theme import GRAY, INK, WARNING_LIGHT, channels, mixed

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
    full = channels(POSITIVE if v > 0 else NEGATIVE)
    return mixed(full, channels(PAPER), level / LEVELS)


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


#: A curve has about so many points.
MOST = 100
_SMALL = 'text-anchor="end" font-size="10.5"'


@dataclass(frozen=True)
class Curve:
    """One line of a chart; None where nothing is known."""

    points: Sequence[tuple[float, float | None]]
    color: str
    width: float = 1.2
    dash: str = ""


def chart(
    name: str,
    curves: Iterable[Curve],
    left: float,
    top: float,
    wide: float,
    tall: float,
    end: str,
    start: float = math.inf,
) -> Iterator[str]:
    """Curves above their zero, with the largest value, and in words where they ``end``.

    Args:
        name: of the chart, above it.
        curves: of which some value is known.
        left: of the box [pixels], as the following.
        top: of the box.
        wide: of the box, with room for a number at the left.
        tall: of the curves alone; words take 40 more.
        end: the last x in words.
        start: where the axis begins; at the first x unless given.
    """
    curves = list(curves)
    known = [(x, y) for c in curves for x, y in c.points if y is not None]
    low, high = min(0.0, *(y for _, y in known)), max(0.0, *(y for _, y in known))
    first, last = min(start, *(x for x, _ in known)), max(x for x, _ in known)
    across, up = (wide - 46) / ((last - first) or 1.0), tall / ((high - low) or 1.0)
    base, right = top + 24 + tall + low * up, left + wide - 4
    yield svg.text(left, top, name, INK, 'font-weight="700"')
    yield svg.text(left + 36, top + 24, figure(high), GRAY, _SMALL)
    yield svg.text(right, top + 38 + tall, end, GRAY, _SMALL)
    yield svg.line(left + 42, base, right, base, "#dde3e9", 1)
    for c in curves:
        places = " ".join(
            f"{left + 42 + (x - first) * across:.0f},{base - y * up:.0f}"
            for x, y in c.points[:: max(1, len(c.points) // MOST)]
            if y is not None
        )
        look = f'stroke="{c.color}" stroke-width="{c.width}"'
        dash = f' stroke-dasharray="{c.dash}"' if c.dash else ""
        yield f'<polyline fill="none" {look}{dash} points="{places}"/>'
