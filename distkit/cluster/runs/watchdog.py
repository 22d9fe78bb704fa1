"""Detects deadlocks from the ranks' reports of their waits.

A waiting rank periodically reports the start of its wait. If the waits of several ranks include
the same instant, the trace contains everything that these ranks did before it, and none of them was
running at that instant. A deadlock at that instant is permanent, so a correct program is never
reported.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distkit.diagnosis.findings import Finding
    from distkit.trace.trace import Trace

#: Interval between checks while some ranks still compute [s]; doubled after each harmless result.
CHECK_INTERVAL = 1.0


class DeadlockWatchdog:
    """Detects deadlocks among the ranks of one run."""

    def __init__(self) -> None:
        # rank -> the operations that its threads wait in, start and latest report of the wait
        self._waits: dict[int, tuple[tuple[int, ...], float, float]] = {}
        self._harmless_key: object = None  # state of the waits at the last check without a deadlock
        self._key: object = None
        self._key_time = self._checked_at = 0.0
        self._interval = CHECK_INTERVAL / 2

    def record_wait(self, rank: int, seqs: tuple[int, ...], since: float, until: float) -> None:
        """Record that a rank waits in operations ``seqs``, at least from ``since`` to ``until``."""
        self._waits[rank] = seqs, since, until

    def forget(self, rank: int) -> None:
        """Remove a rank's report, because its process was replaced."""
        self._waits.pop(rank, None)

    def is_due(self, ranks: Collection[int]) -> bool:
        """Return True if a check is due; ``ranks`` are the ranks that have not ended."""
        waiting_ranks = [r for r in ranks if r in self._waits]
        key = tuple((r, self._waits[r][0]) for r in waiting_ranks), tuple(ranks)
        if key != self._key:
            self._key, self._key_time = key, time.monotonic()
        if not waiting_ranks:
            return False
        if key == self._harmless_key:  # check again later: some findings depend on time
            return time.monotonic() - self._checked_at > self._interval
        if len(waiting_ranks) == len(ranks):
            return self._is_simultaneous(waiting_ranks)
        return time.monotonic() - self._key_time > max(CHECK_INTERVAL, self._interval)

    def check(self, trace: Trace, ranks: Collection[int]) -> list[Finding]:
        """Return the deadlocks that are certain; ``ranks`` are the ranks that have not ended."""
        deadlocks = [
            f for f in trace.diagnose() if f.hang and not self._is_progressing(trace, ranks)
        ]
        if not deadlocks:
            self._harmless_key, self._checked_at = self._key, time.monotonic()
            self._interval *= 2
        return [
            f for f in deadlocks if self._is_simultaneous({*f.waiting, *f.culprits} & set(ranks))
        ]

    def _is_progressing(self, trace: Trace, ranks: Collection[int]) -> bool:
        """Return True if one of several threads of a rank waits for a message in transit."""
        waits = {
            (r, seq)
            for r in ranks
            for seq in self._waits.get(r, ((), 0, 0))[0]
            if len(self._waits[r][0]) > 1
        }
        if not waits:
            return False
        from distkit.diagnosis.facts import Evidence

        graph = Evidence(trace).graph
        spans = [s for s in trace.spans if (s.rank, s.seq) in waits]
        return len(spans) < len(waits) or any(graph.can_complete(s) for s in spans)

    def _is_simultaneous(self, ranks: Iterable[int]) -> bool:
        """Return True if all of these ranks waited at some instant."""
        waits = [self._waits.get(r) for r in ranks]
        reports = [w for w in waits if w is not None]
        return len(reports) == len(waits) > 0 and (
            max(since for _, since, _ in reports) <= min(until for *_, until in reports)
        )
