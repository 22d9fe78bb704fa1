"""The operations of a trace for the browser.

Columns are a few arrays in one buffer, which a browser takes in at once: ``columns`` holds what has
words, and ``bytes`` the arrays named in ``parts``, one behind the other, each
``[name, type, length]`` and little-endian. The browser's half is js/columns.js.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit.events import Summary
from distkit.views.scene.frame import Json
from distkit.views.timeline.columns import MAX_VALUES, Columns

#: So many operations have their values along in a page, and so many of each.
PAGE_VALUES, PAGE_CELLS = 400, 32

_TYPES = {"f8": "<f8", "i4": "<i4", "f4": "<f4"}


def packed(columns: Columns, *, thin: bool = False) -> Json:
    """The frame, and bars and arrows as ``columns``; fewer values when ``thin``."""
    ops, pairs = columns.ops, columns.pairs
    order, tracks = columns.tracks()
    place = np.full(len(ops) + 1, -1)  # -1, for "none", stays -1
    place[order] = np.arange(len(order))
    arrows = columns.drawn_arrows()
    parts: dict[str, tuple[str, NDArray[Any]]] = {
        "start": ("f8", ops.start[order]),
        "end": ("f8", ops.end[order]),
        "sent": ("f8", pairs.sent[arrows]),
        "received": ("f8", pairs.received[arrows]),
        "seq": ("i4", ops.seq[order]),
        "look": ("i4", ops.look[order]),
        "tie": ("i4", pairs.tie[order]),
        "send": ("i4", place[pairs.send[arrows]]),
        "recv": ("i4", place[pairs.recv[arrows]]),
    }
    valued, numbers = _values(columns, place, thin)
    parts |= {"valued": ("i4", valued), "numbers": ("f4", numbers)}
    parts |= {
        name: ("f4", some) if some.dtype == float else ("i4", place[some])
        for name, some in columns.caused().items()
    }
    return {
        **columns.frame,
        "columns": {
            "looks": columns.looks,
            "tracks": tracks,
            "parts": [[name, kind, len(array)] for name, (kind, array) in parts.items()],
            "bytes": b"".join(
                array.astype(_TYPES[kind]).tobytes() for kind, array in parts.values()
            ),
        },
    }


def _values(
    columns: Columns, place: NDArray[np.int64], thin: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Per tensor five whole numbers (bar, 0 before or 1 after, size, sampled, count), and values.

    The values are preceded by norm, minimum and maximum.
    """
    heads: list[tuple[int, ...]] = []
    bodies: list[tuple[float, ...]] = []
    for i, pair in columns.values(PAGE_VALUES if thin else MAX_VALUES).items():
        for when, summary in enumerate(pair):
            if summary is not None and place[i] >= 0:
                values = _thin(summary) if thin else summary.values
                sampled = summary.sampled
                heads.append(
                    (int(place[i]), when, min(summary.size, 2**31 - 1), sampled, len(values))
                )
                bodies.append((summary.norm, summary.min, summary.max, *values))
    with np.errstate(over="ignore"):
        numbers = np.array([*chain.from_iterable(bodies)], np.float64).astype("<f4")
    return np.array([*chain.from_iterable(heads)], "<i4"), _round(numbers)


def _thin(s: Summary) -> tuple[float, ...]:
    """Fewer values at equal strides."""
    return s.values[:: -(-len(s.values) // PAGE_CELLS) or 1]


def _round(numbers: NDArray[Any]) -> NDArray[Any]:
    """About four significant digits: what is left of a number packs well."""
    bits = numbers.view("<u4")
    finite = np.isfinite(numbers)
    return np.where(finite, (bits + np.uint32(0x200)) & np.uint32(0xFFFFFC00), bits).view("<f4")
