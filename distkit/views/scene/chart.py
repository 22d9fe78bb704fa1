"""Curves in a box: the line chart of static pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distkit.views.scene import svg
from distkit.views.scene.theme import GRAY, INK
from distkit.views.scene.values_svg import figure

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
