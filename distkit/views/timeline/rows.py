"""The rows of a lane's bars: those that overlap lie below each other."""

from __future__ import annotations

import heapq

import numpy as np

from distkit.trace.columns import Ints
from distkit.trace.matching import Operations


def rows(ops: Operations, events: int) -> Ints:
    """The row of each operation in its lane: the topmost that is free when it begins.

    Args:
        ops: the operations.
        events: the number of events that they are made of.
    """
    found = np.zeros(len(ops), np.int64)
    until = np.where(ops.ended, ops.last, events)
    by_lane = np.lexsort((ops.begin, ops.rank * 2 + ops.mark))
    lane = (ops.rank * 2 + ops.mark)[by_lane]
    for part in np.split(by_lane, np.flatnonzero(np.diff(lane)) + 1):
        if len(part):
            found[part] = _of_lane(ops.begin[part], until[part])
    return found


def _of_lane(begin: Ints, until: Ints) -> Ints:
    """Rows for the bars of one lane, in the order in which they begin."""
    rows = np.zeros(len(begin), np.int64)
    over = np.maximum.accumulate(until)
    alone = begin[1:] > over[:-1]  # all before it have ended
    crowded = np.flatnonzero(~(np.append(True, alone) & np.append(alone, True)))
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for i, first, last in zip(
        crowded.tolist(), begin[crowded].tolist(), until[crowded].tolist(), strict=True
    ):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, count = count, count + 1
        heapq.heappush(busy, (last, row))
        rows[i] = row
    return rows
