"""Progress of a run, recorded on the ranks and computed from events.

A completed mark with the attribute ``step``, and ``steps`` if the total is known, sets the
progress. A mark labelled ``step``, or a step of :func:`distkit.watch_gradients`, adds one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import TypeVar

from distkit.events import COMPUTATION, Event, Op, State
from distkit.recording import recorder
from distkit.recording.gradients import is_recorded_step

T = TypeVar("T")

#: Approximate maximum number of marks of a loop.
MAX_MARKS = 100


def progress(iterable: Iterable[T], total: int | None = None) -> Iterator[T]:
    """Iterate over ``iterable``, and show each rank's progress in the notebook.

    Steps appear in the timeline as marked computation, and move the bar of a
    :class:`distkit.Experiment`. At most a hundred steps are recorded: each step of a
    loop of 100, every tenth of a loop of 1,000. Outside a recorded run, this only iterates.

    Args:
        iterable: the items of the loop.
        total: the number of steps, if ``len(iterable)`` is not available.

    >>> [x for x in progress(range(3))]
    [0, 1, 2]
    """
    if recorder.current() is None:
        yield from iterable
        return
    end = total if total is not None else length_hint(iterable) or None
    for n, item in enumerate(iterable, 1):
        rec = recorder.current() if is_recorded(n, end) else None
        if rec is None:
            yield item
            continue
        facts, seq, where = {"step": n} | ({"steps": end} if end else {}), rec.next_seq(), ""
        try:
            where = recorder.user_line(2)
            rec.record(seq, Op.MARK, State.STARTED, attributes=facts, where=where)
            yield item
        finally:
            rec.record(seq, Op.MARK, State.COMPLETED, attributes=facts, where=where)


def is_recorded(step: int, total: int | None) -> bool:
    """Return whether a step, counted from 1, is recorded.

    >>> [n for n in range(1, 301) if is_recorded(n, 300)][:3]
    [1, 3, 6]
    >>> is_recorded(1000, 1001), is_recorded(1001, 1001)
    (False, True)
    """
    if total is None:
        return is_recorded_step(step)
    return step == 1 or step * MAX_MARKS // total > (step - 1) * MAX_MARKS // total or step == total


class Meter:
    """Computes the progress of a run from its events, without side effects.

    >>> m = Meter()
    >>> m.feed([Event(0, 0, Op.MARK, State.COMPLETED, 0.0, attributes={"step": 3, "steps": 20})])
    >>> m.done, m.total, m.operations
    (3, 20, 0)
    """

    def __init__(self) -> None:
        self.operations = 0
        self._done: Counter[int] = Counter()
        self._total: dict[int, int | None] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Process events in the order of arrival."""
        for e in events:
            if e.op is Op.MARK:
                self._mark(e)
            elif e.state is State.COMPLETED and e.op not in COMPUTATION:
                self.operations += 1

    def _mark(self, e: Event) -> None:
        facts = e.attributes
        number, is_done = facts.get("step"), e.state is State.COMPLETED
        if number is not None:
            self._total[e.rank], self._done[e.rank] = facts.get("steps"), number - (not is_done)
        elif (
            "step" in (facts.get("label"), facts.get("watched")) and self._total.get(e.rank) is None
        ):  # unless ``progress`` counts the steps
            self._total[e.rank] = None
            self._done[e.rank] += is_done

    @property
    def done(self) -> int | None:
        """The number of steps of the slowest rank; None without marks."""
        return min((self._done[r] for r in self._total), default=None)

    @property
    def total(self) -> int | None:
        """The total number of steps; None if unknown."""
        known = {t for t in self._total.values() if t is not None}
        return max(known) if known and None not in self._total.values() else None
