"""What a lane of the picture needs to know: a free row for each bar, and how busy its rank was."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Rows:
    """Hands out rows of a lane, the topmost free one first, so that no two bars overlap."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []

    def take(self) -> int:
        """A row for an operation that begins."""
        if self._free:
            return heapq.heappop(self._free)
        self.count += 1
        return self.count - 1

    def free(self, row: int) -> None:
        """The operation in this row has ended."""
        heapq.heappush(self._free, row)


class Busy:
    """The time covered by intervals that may overlap: their union, kept sorted and disjoint."""

    def __init__(self, intervals: Iterable[tuple[float, float]] = ()) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._seconds = 0.0
        for start, end in intervals:
            self.add(start, end)

    def add(self, start: float, end: float) -> None:
        """Cover [start, end] as well.

        >>> b = Busy([(0, 2), (1, 3), (5, 6)])
        >>> b.seconds
        4.0
        """
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._seconds += end - start - self._length(first, last)
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    @property
    def seconds(self) -> float:
        """The total length of the union."""
        return self._seconds

    def _length(self, first: int, last: int | None = None) -> float:
        """The length of some intervals."""
        return sum(self._ends[first:last]) - sum(self._starts[first:last])

    def with_open(self, starts: Iterable[float], end: float) -> float:
        """The total length when operations that have not ended are counted up to ``end``."""
        earliest = min(starts, default=end)
        cut = bisect_left(self._ends, earliest)
        if cut < len(self._starts):
            earliest = min(earliest, self._starts[cut])
        return self._seconds - self._length(cut) + end - earliest
