"""Notices that ranks wait for each other for ever. Pure: told what they wait in, and when.

A rank that waits says so again and again: since when, and that it still does. When the waits of
several ranks have an instant in common, everything they did before it is in the trace, and
nothing that they did after it can be missing: they did nothing. What is a deadlock in that
picture is one for good, so no healthy program is ever accused.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from distkit.diagnosis.diagnose import Finding, diagnose
from distkit.diagnosis.facts import Evidence
from distkit.trace.log import EventLog

#: While some ranks still compute, the others' waits are looked at after this long [s]; twice as
#: long each time that nothing was wrong.
PATIENCE = 1.0


class DeadlockWatchdog:
    """The waits of the ranks of one run."""

    def __init__(self) -> None:
        # rank -> the operations that its threads wait in, since when, until when
        self._waits: dict[int, tuple[tuple[int, ...], float, float]] = {}
        self._seen: object = None  # the constellation that was looked at, and was fine
        self._key: object = None
        self._since = self._looked = 0.0
        self._patience = PATIENCE / 2

    def hear(self, rank: int, seqs: tuple[int, ...], since: float, until: float) -> None:
        """A rank waits in its operations ``seqs``: from ``since`` until at least ``until``."""
        self._waits[rank] = seqs, since, until

    def waits(self, rank: int, seq: int) -> bool:
        """True if the latest that a rank has said is that it waits in this operation."""
        return rank in self._waits and seq in self._waits[rank][0]

    def forget(self, rank: int) -> None:
        """It has ended, and another has its place."""
        self._waits.pop(rank, None)

    def due(self, running: Collection[int]) -> bool:
        """True if it is worth a look; ``running`` are the ranks that have not ended."""
        waiting = [r for r in running if r in self._waits]
        key = tuple((r, self._waits[r][0]) for r in waiting), tuple(running)
        if key != self._key:
            self._key, self._since = key, time.monotonic()
        if not waiting:
            return False
        if key == self._seen:  # looked at before: again after a while, some things time tells
            return time.monotonic() - self._looked > self._patience
        if len(waiting) == len(running):
            return self._at_once(waiting)
        return time.monotonic() - self._since > max(PATIENCE, self._patience)

    def judge(self, trace: EventLog, running: Collection[int]) -> list[Finding]:
        """The deadlocks that are certain."""
        found = [f for f in diagnose(trace) if f.hang and not self._moves(trace, running)]
        if not found:
            self._seen, self._looked = self._key, time.monotonic()
            self._patience *= 2
        return [f for f in found if self._at_once({*f.waiting, *f.culprits} & set(running))]

    def _moves(self, trace: EventLog, running: Collection[int]) -> bool:
        """True if one of several threads of a rank waits for something that is on its way."""
        some = {
            (r, seq)
            for r in running
            for seq in self._waits.get(r, ((), 0, 0))[0]
            if len(self._waits[r][0]) > 1
        }
        if not some:
            return False
        board = Evidence(trace).board
        spans = [s for s in trace.spans if (s.rank, s.seq) in some]
        return len(spans) < len(some) or any(board.has_come(s) for s in spans)

    def _at_once(self, ranks: Iterable[int]) -> bool:
        """True if there is an instant at which all of these waited."""
        waits = [self._waits.get(r) for r in ranks]
        known = [w for w in waits if w is not None]
        return len(known) == len(waits) > 0 and (
            max(since for _, since, _ in known) <= min(until for *_, until in known)
        )
