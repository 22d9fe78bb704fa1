"""Numbers in pictures, and curves in a static one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distkit.events import Summary
from distkit.views.scene import svg
from distkit.views.scene.summaries import number
from distkit.views.scene.theme import GRAY, INK

#: The colours of the largest magnitudes.
NEGATIVE, POSITIVE = "#0072b2", "#e08200"
#: A tensor of up to so many elements is written in a line.
MOST_WRITTEN = 6


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


def written(s: Summary | None) -> str:
    """All values of a small tensor; nothing of a larger one, or of one not looked at.

    >>> written(Summary((3.0, -0.5), 3.04, -0.5, 3.0, 2)), written(None)
    ('[3, −0.5]', '')
    """
    if s is None or not len(s.values) == s.size <= MOST_WRITTEN:
        return ""
    return f"[{', '.join(figure(number(v)) for v in s.values)}]"


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
