"""The figures: an algorithm as rounds of transfers, for all ranks at once.

A schedule is data, so that it can be proved right (:func:`held`), drawn, timed and compared
with what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int_]


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange, in which transfers happen at the same time.

    Transfer ``i`` carries chunk ``chunk[i]`` from rank ``src[i]`` to rank ``dst[i]``, which
    adds it to its own (``reduce``) or replaces its own by it.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    reduce: bool


def ring(n: int) -> Iterator[Round]:
    """Bandwidth-optimal all-reduce: 2(n-1) rounds of K/n bytes per rank, K bytes in all.

    Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.

    Args:
        n: number of ranks.

    Example:
        >>> first = next(ring(4))
        >>> first.src, first.dst, first.chunk
        (array([0, 1, 2, 3]), array([1, 2, 3, 0]), array([0, 1, 2, 3]))
    """
    r = np.arange(n)
    for s in range(n - 1):  # reduce-scatter
        yield Round(src=r, dst=(r + 1) % n, chunk=(r - s) % n, reduce=True)
    for s in range(n - 1):  # all-gather
        yield Round(src=r, dst=(r + 1) % n, chunk=(r + 1 - s) % n, reduce=False)


def held(schedule: Iterable[Round], n: int) -> Ints:
    """Whose contributions each rank holds in the end: ``have[rank, chunk, contributor]``.

    An all-reduce is right when every entry is 1: everybody's contribution, and none twice.

    Args:
        schedule: rounds over ``n`` ranks and ``n`` chunks.
        n: number of ranks.

    Returns:
        Counts of shape (n, n, n).

    Example:
        >>> bool((held(ring(5), 5) == 1).all())
        True
    """
    have = np.zeros((n, n, n), dtype=int)
    have[np.arange(n), :, np.arange(n)] = 1
    for t in schedule:
        moving = have[t.src, t.chunk]
        have[t.dst, t.chunk] = moving + have[t.dst, t.chunk] * t.reduce
    return have
