"""Steps the ranks of a run: resumes them, and waits until all are paused, blocked or finished.

The rules are in :class:`distkit.diagnosis.rank_state.WaitForGraph`, which is pure; this module adds
threads and time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distkit.cluster.runs import report
from distkit.cluster.runs.conductor import Conductor
from distkit.diagnosis.rank_state import RankState, RankStatus, WaitForGraph
from distkit.events import Event

#: Time without events after which a blocked rank counts as settled [s]: messages may be in transit.
SETTLE_TIME = 0.01

#: Timeout for the explanation of a deadlock [s].
DIAGNOSIS_TIMEOUT = 3.0

#: Opens the ranks' gates a number of times, or permanently if None.
Go = Callable[[Iterable[int], "int | None"], None]


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the program between two steps.

    ``choice`` has the ranks that the step resumed, none at the beginning and after ``finish()``;
    ``rank_states`` is the state of each rank; ``events`` is the number of events so far; ``time``
    is the trace's time [s].
    """

    events: int
    time: float
    choice: tuple[int, ...]
    rank_states: tuple[RankState, ...]


class Lockstep:
    """The ranks of a stepped run, and its moments so far.

    Args:
        run: the submitted run; its times exclude the pauses from now on.
        go: opens ranks' gates.
        collect: makes servers flush their events.
        changed: called, from any thread, when there is a new moment, or the run has ended.
    """

    def __init__(
        self, run: Conductor, go: Go, collect: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        self.run, self._go, self._collect, self._changed = run, go, collect, changed
        self.moments: list[Moment] = []
        self._graph = WaitForGraph(len(run.ranks))
        self._received: Counter[int] = Counter()  # number of events of each rank
        self._received_before: dict[int, int] = {}  # when each resumed rank was resumed
        self._last_time = 0.0  # time of the latest event, without the pauses
        self._paused = False  # the program is at the latest moment
        self._pauses = 0.0  # total length of all pauses except the current one [s]
        self._resumed_at = 0.0  # end of the latest pause, without the pauses
        run.live.clock, run.on_end = self._clock, self._update_moment
        run.live.subscribe(self._on_events)

    # -- state ----------------------------------------------------------------------

    @property
    def rank_states(self) -> list[RankState]:
        """The state of every rank."""
        return self._graph.rank_states

    @property
    def deadlocked(self) -> bool:
        """True if some ranks are blocked, and no other rank can unblock them."""
        status = {s.status for s in self.rank_states}
        return RankStatus.BLOCKED in status and not status & {RankStatus.PAUSED, RankStatus.RUNNING}

    # -- stepping -------------------------------------------------------------------

    def resume(self, ranks: list[int], count: int | None = 1) -> None:
        """Open the gates of some ranks, ``count`` times or permanently; end the pause."""
        with self.run.changed:
            if self._paused:
                self._pauses = time.monotonic() - self._last_time
                self._resumed_at, self._paused = self._last_time, False
            self._received_before = {r: self._received[r] for r in ranks}
        self._go(ranks, count)

    def settle(self, choice: tuple[int, ...] = ()) -> None:
        """Wait until no rank can move by itself, and record the moment."""
        changed = self.run.changed
        with changed:
            while True:
                changed.wait_for(self._is_settled)
                blocked = any(s.status is RankStatus.BLOCKED for s in self.rank_states)
                if not blocked or not changed.wait_for(lambda: not self._is_settled(), SETTLE_TIME):
                    break
        if self._is_ending():
            self.run.done.wait(DIAGNOSIS_TIMEOUT)
        if not self.run.finished:
            self._collect()  # the servers' events belong to this moment
        self.note(choice)

    def note(self, choice: tuple[int, ...]) -> None:
        """Record the current state as a moment."""
        with self.run.changed:
            self._note_ends()
            self.moments.append(self._current_moment(choice))
            self._paused = self.moments[-1].events > 0
        self._changed()

    def _current_moment(self, choice: tuple[int, ...]) -> Moment:
        return Moment(self._received.total(), self._last_time, choice, tuple(self.rank_states))

    def _is_settled(self) -> bool:
        """Return True if no rank can move by itself. Called with the lock held."""
        self._note_ends()
        if any(
            self._received[r] == n and r in self.run.waiting
            for r, n in self._received_before.items()
        ):
            return self.run.finished  # the rank has not yet received its permit
        return self._graph.settled or self.run.failed or self.run.finished

    def _is_ending(self) -> bool:
        """Return True if the run is about to end: all ranks ended, one failed, or a deadlock."""
        over = not self.run.waiting or self.run.failed
        return over or (self.deadlocked and not self.run.wait_forever)

    def _note_ends(self) -> None:
        for name, members in self.run.live.info.groups.items():
            self._graph.group(name, members)
        outcomes = list(self.run.outcomes.values())
        tolerated = {o.rank for o in outcomes if o.tolerated}
        for rank, end in report.ends(outcomes).items():
            why = end.text.partition("\n")[0]
            why += "; the others continue without it" * (rank in tolerated)
            self._graph.end(rank, end.how, why)

    def _update_moment(self) -> None:
        """Add what happens without a step, such as a rank's end, to the latest moment."""
        with self.run.changed:
            if self._paused:
                self._note_ends()
                self.moments[-1] = self._current_moment(self.moments[-1].choice)
        self._changed()

    def _on_events(self, events: list[Event]) -> None:
        with self.run.changed:
            self._graph.feed(events)
            self._received.update(e.rank for e in events)
            self._last_time = max([self._last_time, *(e.time for e in events)])
            self.run.changed.notify_all()
        self._update_moment()

    def _clock(self, timestamp: float) -> float:
        """Subtract the pauses from a time; a time in a pause becomes its start."""
        if self._paused:
            return self._last_time
        return max(self._resumed_at, timestamp - self._pauses)
