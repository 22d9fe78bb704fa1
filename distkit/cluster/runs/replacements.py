"""Replacements in the middle of a run, and how the trace shows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pickle import dumps
from typing import Any

from distkit.events import WORLD, Event, Op, State
from distkit.trace.operations import spans

#: A worker is replaced at most so often in a run: one that always ends does so for a reason.
MOST = 3

#: The operations of each life are numbered from a multiple of this.
APART = 1 << 32


class Replacements:
    """The lives that ranks, servers and the scheduler have had in a run.

    ``replaced`` tells what happened: the node's id and name, how it ended, and when. ``vacant``
    are the ranks whose places are to be taken, and how they ended.
    """

    def __init__(self) -> None:
        self._ended: Counter[int] = Counter()
        self.replaced: list[dict[str, Any]] = []
        self.vacant: dict[int, str] = {}

    def of(self, node: int) -> int:
        """The number of processes that had its place before."""
        return self._ended[node]

    def first(self, node: int) -> int:
        """From where its operations are numbered in the trace."""
        return APART * self._ended[node]

    def vacate(self, rank: int, how: str) -> bool:
        """Its place is to be taken; False if that was done too often."""
        if self._ended[rank] >= MOST:
            return False
        self.vacant[rank] = how
        return True

    def begin(self, node: int, name: str, how: str, at: float) -> None:
        """Another life begins; the one before ended so."""
        self._ended[node] += 1
        self.replaced.append({"node": node, "name": name, "how": how, "time": at})


def failed(events: Iterable[Event], rank: int, first: int, at: float) -> tuple[int, bytes]:
    """Rows that end the operations that a rank's process was in: their number, and pickled."""
    begun = spans(e for e in events if e.rank == rank)
    rows = [
        (
            s.seq - first,
            s.op,
            State.FAILED,
            at,
            (
                s.peer,
                s.group,
                s.nbytes,
                s.shape,
                s.dtype,
                s.tag,
                s.where,
                dict(s.attributes),
                s.match,
            ),
            None,
        )
        for s in begun
        if s.end is None and s.seq >= first
    ]
    return len(rows), dumps(rows)


def note(how: str, began: float, ended: float) -> tuple[int, bytes]:
    """Rows that show when a place was vacant, and why."""
    fields = (None, WORLD, 0, (), "", None, "", (("label", f"replaced: {how}"),), None)
    rows = [
        (-1, Op.MARK, state, at, fields, None)
        for state, at in ((State.STARTED, began), (State.COMPLETED, ended))
    ]
    return len(rows), dumps(rows)
