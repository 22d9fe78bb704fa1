"""Progress of a run, computed from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from distkit.events import COMPUTATION, Event, Op, State


class Meter:
    """Counts the steps and operations of a run from its events, without side effects.

    A step is a completed mark with the label ``step``, or a step of
    :func:`distkit.watch_gradients`.

    >>> m = Meter()
    >>> m.feed([Event(0, 0, Op.MARK, State.COMPLETED, 0.0, attributes={"label": "step"})])
    >>> m.done, m.operations
    (1, 0)
    """

    def __init__(self) -> None:
        self.operations = 0
        self._done: Counter[int] = Counter()  # by rank

    def feed(self, events: Iterable[Event]) -> None:
        """Process events in the order of arrival."""
        for e in events:
            is_step = "step" in (e.attributes.get("label"), e.attributes.get("watched"))
            if e.op is Op.MARK and is_step:
                self._done[e.rank] += e.state is State.COMPLETED
            elif e.state is State.COMPLETED and e.op not in COMPUTATION:
                self.operations += 1

    @property
    def done(self) -> int | None:
        """The number of steps that all ranks with steps have completed; None without such ranks."""
        return min(self._done.values(), default=None)
