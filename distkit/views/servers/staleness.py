"""Staleness of a run's gradients: the bins of a histogram and their places. Pure.

The staleness of a gradient is the number of updates between its worker's pull and the moment when
it is applied.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from distkit.views.scene.frame import Json
from distkit.views.scene.geometry import text_width

#: At most so many bins; the room for all of them, the width of one and the highest bar, in pixels.
MAX_BINS, ROOM, WIDEST, HIGH = 12, 200.0, 40.0, 36
AXIS = ["updates between a worker's pull", "and the use of its gradient"]
#: The size of the letters, how much wider than ours a page's font may be, and what is left free.
LETTERS, WIDER, FREE = 10.5, 1.14, 2.0


def histogram(late: Iterable[int]) -> Json:
    """Bins of equal width from 0 on, of one value each as long as there are few.

    ``width`` is in updates; ``labels`` has the first value of each bin, ``ranges`` all of them and
    ``totals`` its gradients at the end of the run; ``pitch`` is the distance of two bars in pixels,
    ``high`` the height of the highest one; ``axis`` is the axis' title.

    Args:
        late: the staleness of each gradient.

    >>> histogram([0, 0, 1, 3])["ranges"], histogram([0, 25, 427])["ranges"][:2]
    (['0', '1', '2', '3'], ['0–49', '50–99'])
    >>> histogram([0, 25, 427])["totals"]
    [2, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    found = Counter(late)
    most = max([2, *found])  # an axis of three values at least
    return next(d for width in _widths(most) if _fits(d := _binned(found, most, width)))


def bin_of(staleness: Json, late: int | None) -> int | None:
    """The number of the bin; None of a gradient that has not been applied."""
    return None if late is None else late // int(staleness["width"])


def said(staleness: Json) -> str:
    """The bins that are not empty, in words.

    >>> said(histogram([0, 0, 1]))
    '0: 2, 1: 1'
    """
    pairs = zip(staleness["ranges"], staleness["totals"], strict=True)
    return ", ".join(f"{label}: {n:,}" for label, n in pairs if n)


def brief(n: int) -> str:
    """A count in few letters.

    >>> brief(9_999), brief(123_458)
    ('9,999', '123k')
    """
    return f"{n:,}" if n < 10_000 else f"{n // 1000:,}k"


def _widths(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20 … from the first on that makes few bins."""
    widths = (k * 10**power for power in itertools.count() for k in (1, 2, 5))
    return (width for width in widths if most // width < MAX_BINS)


def _binned(found: Counter[int], most: int, width: int) -> Json:
    firsts = range(0, most + 1, width)
    totals = [0] * len(firsts)
    for late, n in found.items():
        totals[late // width] += n
    ranges = [f"{a:,}" if width == 1 else f"{a:,}–{a + width - 1:,}" for a in firsts]
    pitch = round(min(WIDEST, ROOM / len(firsts)), 1)
    return {
        "width": width,
        "labels": [f"{a:,}" for a in firsts],
        "ranges": ranges,
        "totals": totals,
        "pitch": pitch,
        "high": HIGH,
        "axis": AXIS,
    }


def _fits(drawn: Json) -> bool:
    """True if no label and no count reaches into the next bin; a single bin has no next one."""
    words = [*drawn["labels"], *map(brief, drawn["totals"])]
    widest = max(text_width(word, LETTERS) for word in words)
    return WIDER * widest + FREE <= drawn["pitch"] or len(drawn["labels"]) == 1
