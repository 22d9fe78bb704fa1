"""Encodes the operations of a trace for the browser.

``columns`` has the text and, as ``bytes``, the concatenated little-endian arrays. ``parts`` lists
the arrays as ``[name, type, length]``. js/columns.js decodes them.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distkit.views.scene.frame import Json
from distkit.views.timeline.columns import MAX_VALUES, Columns

#: Maximum number of operations with values in a page.
PAGE_VALUES = 400

_TYPES = {"f8": "<f8", "i4": "<i4", "f4": "<f4"}


def packed(columns: Columns, *, thin: bool = False) -> Json:
    """Return the frame with bars and arrows as ``columns``; ``thin`` limits the values further."""
    ops, pairs = columns.ops, columns.pairs
    order, tracks = columns.tracks()
    index_of = np.full(len(ops) + 1, -1)  # -1, for "none", stays -1
    index_of[order] = np.arange(len(order))
    arrows = columns.drawn_arrows()
    parts: dict[str, tuple[str, NDArray[Any]]] = {
        "start": ("f8", ops.start[order]),
        "end": ("f8", ops.end[order]),
        "sent": ("f8", pairs.sent[arrows]),
        "received": ("f8", pairs.received[arrows]),
        "seq": ("i4", ops.seq[order]),
        "category": ("i4", ops.category[order]),
        "tie": ("i4", pairs.tie[order]),
        "send": ("i4", index_of[pairs.send[arrows]]),
        "recv": ("i4", index_of[pairs.recv[arrows]]),
    }
    valued, numbers = _values(columns, index_of, thin)
    parts |= {"valued": ("i4", valued), "numbers": ("f4", numbers)}
    parts |= {
        name: ("f4", column) if column.dtype == float else ("i4", index_of[column])
        for name, column in columns.waited().items()
    }
    return {
        **columns.frame,
        "columns": {
            "categories": columns.categories,
            "tracks": tracks,
            "parts": [[name, kind, len(array)] for name, (kind, array) in parts.items()],
            "bytes": b"".join(
                array.astype(_TYPES[kind]).tobytes() for kind, array in parts.values()
            ),
        },
    }


def _values(
    columns: Columns, index_of: NDArray[np.int64], thin: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return five integers per tensor, and the values of all tensors.

    The integers are bar, 0 (before) or 1 (after), size, sampled, count. Norm, minimum and maximum
    precede a tensor's values.
    """
    heads: list[tuple[int, ...]] = []
    bodies: list[tuple[float, ...]] = []
    for i, pair in columns.values(PAGE_VALUES if thin else MAX_VALUES).items():
        for when, summary in enumerate(pair):
            if summary is not None and index_of[i] >= 0:
                size = min(summary.size, 2**31 - 1)
                heads.append((int(index_of[i]), when, size, summary.sampled, len(summary.values)))
                bodies.append((summary.norm, summary.min, summary.max, *summary.values))
    with np.errstate(over="ignore"):
        numbers = np.array([*chain.from_iterable(bodies)], np.float64).astype("<f4")
    return np.array([*chain.from_iterable(heads)], "<i4"), _round(numbers)


def _round(numbers: NDArray[Any]) -> NDArray[Any]:
    """Round to about four significant digits, so that the numbers compress well."""
    bits = numbers.view("<u4")
    finite = np.isfinite(numbers)
    return np.where(finite, (bits + np.uint32(0x200)) & np.uint32(0xFFFFFC00), bits).view("<f4")
