"""Steps through a run, forward and back.

:class:`distkit.diagnosis.rank_state.WaitForGraph` determines which ranks can continue, without side
effects; this module adds threads and time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import distkit.trace.matching  # noqa: F401  not in a thread: a child forked meanwhile would block
from distkit._format import named
from distkit.cluster.runs.conductor import INTERRUPT_TIMEOUT, RankController
from distkit.cluster.runs.outcome import rank_ends
from distkit.cluster.runs.run import Run
from distkit.diagnosis.rank_state import RankState, RankStatus, WaitForGraph
from distkit.diagnosis.rules import Finding
from distkit.errors import StepError
from distkit.events import Event
from distkit.trace.trace import Trace

#: Blocked ranks are settled after ``SETTLE_TIME`` seconds without events: until then, a message may
#: still be in transit. ``DIAGNOSIS_TIMEOUT`` is the timeout for the explanation of a deadlock [s].
SETTLE_TIME, DIAGNOSIS_TIMEOUT = 0.01, 3.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the program between two steps.

    ``choice`` contains the ranks that the step resumed; it may be empty, as at the beginning and
    after ``finish()``. ``rank_states`` is the state of each rank; ``events`` is the number of
    events so far; ``time`` is the time of the latest event, on the trace's clock [s].
    """

    events: int
    time: float
    choice: tuple[int, ...]
    rank_states: tuple[RankState, ...]


class Stepper:
    """A run whose ranks pause before each communication call until they are resumed.

    It steps through any program, including DDP, because a rank pauses where torch passes an
    operation to the backend. A worker of a parameter server pauses before each call to its KVStore,
    regardless of the number of keys. A push has arrived by the end of its step, so the pushes of
    workers that are stepped one after another reach the servers in the same order. Times in the
    trace exclude the pauses.

    Created by :meth:`distkit.Cluster.step`. In a notebook it is displayed as a cockpit with the
    same controls. As a context manager it ends the run at the end of the block.

    Example:
        >>> stepper = cluster.step(ring, x)          # doctest: +SKIP
        >>> stepper.next()                           # doctest: +SKIP
        >>> stepper.next(rank=1)                     # doctest: +SKIP
        >>> stepper.finish().results                 # doctest: +SKIP
    """

    def __init__(self, run: Run, controller: RankController) -> None:
        self.run, self.name, self.ranks = run, run.name, run.ranks
        self.position, self.playing = 0, False
        #: The moments from the first pause to the latest.
        self.moments: list[Moment] = []
        self._step_lock = threading.Lock()
        self._pause_requested = threading.Event()
        self._watchers: list[Callable[[], None]] = []
        self._cockpit: Any = None
        self._controller, self._conductor = controller, run._conductor
        self._changed = self._conductor.changed
        self._graph = WaitForGraph(len(run.ranks), noun=self._conductor.live.info.rank_noun)
        self._event_counts: Counter[int] = Counter()  # number of events of each rank
        self._resume_counts: dict[int, int] = {}  # number of a rank's events when it was resumed
        self._last_time = 0.0  # time of the latest event, without the pauses
        self._paused = False  # whether the program is paused at the latest moment
        self._paused_seconds = 0.0  # total length of all pauses except the current one [s]
        self._resumed_at = 0.0  # end of the latest pause, without the pauses
        self._conductor.live.clock = self._clock
        self._conductor.on_end = self._update_moment
        self._conductor.live.subscribe(self._on_events)

    # -- stepping -------------------------------------------------------------------

    def next(self, rank: int | None = None) -> Stepper:
        """Execute the next communication call of every paused rank, or of one rank.

        Returns when each rank is paused again, blocked or finished. While looking back,
        ``next()`` moves one moment forward instead.

        Raises:
            StepError: the run has ended, or the rank does not exist or cannot be resumed.
            RankError, DeadlockError: the run ended in this step.
        """
        with self._step_lock:
            if self._looking_back and rank is None:
                return self.seek(self.position + 1)
            return self._step(self._choose(rank))

    def play(self, speed: float = 1.0) -> Stepper:
        """Take at most ``speed`` steps per second, until the run ends or :meth:`pause` is called.

        While looking back, this method first replays the moments recorded so far.

        Raises:
            StepError: ``speed`` is not positive, or the run has ended.
        """
        if not speed > 0:
            raise StepError(f"speed must be a positive number of steps per second; got {speed}.")
        self._pause_requested.clear()
        self.playing = True
        self._notify()
        try:
            while True:
                self.next()
                at_end = self.finished and not self._looking_back
                if at_end or self._pause_requested.wait(1 / speed):
                    return self
        finally:
            self.playing = False
            self._notify()

    def pause(self) -> Stepper:
        """Stop playing."""
        self._pause_requested.set()
        return self

    def finish(self) -> Run:
        """Run all ranks to completion and wait for them.

        Raises:
            RankError, DeadlockError, …: as for :meth:`distkit.Cluster.run`.
        """
        if self.run.finished:
            return self.run.wait()
        self.resume_all()
        try:
            return self.run.wait()
        finally:
            self._record_moment(())

    def resume_all(self) -> None:
        """Run all ranks to completion, without waiting."""
        self.pause()
        if not self.run.finished:
            self._resume(self.ranks, None)

    def stop(self) -> None:
        """Interrupt the run on every rank; the cluster stays usable."""
        self.pause()
        if self.run.finished:
            return
        self.run.interrupt()
        self._conductor.finished_event.wait(INTERRUPT_TIMEOUT)
        self._record_moment(())

    # -- looking back ---------------------------------------------------------------

    def back(self, n: int = 1) -> Stepper:
        """Show the moment ``n`` steps earlier; the ranks stay paused."""
        return self.seek(max(0, self.position - n))

    def seek(self, position: int) -> Stepper:
        """Show the moment with this number; -1 is the latest.

        Raises:
            StepError: the moment does not exist.
        """
        count = len(self.moments)
        if not -count <= position < count:
            raise StepError(f"moment {position} does not exist: the moments are 0 to {count - 1}.")
        self.position = position % count
        self._notify()
        return self

    @property
    def moment(self) -> Moment:
        """The displayed moment."""
        return self.moments[self.position]

    @property
    def _looking_back(self) -> bool:
        return self.position < len(self.moments) - 1

    # -- state for views --------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """The recorded events; their times exclude the pauses."""
        return self.run.trace

    @property
    def finished(self) -> bool:
        """True if the run is over."""
        return self.run.finished

    @property
    def findings(self) -> list[Finding]:
        """The findings about a deadlock, or all findings of a finished run."""
        if self.run.finished:
            return self.run.findings
        return [f for f in self.run.findings if f.hang] if self._is_deadlocked() else []

    @property
    def error(self) -> str:
        """The text of the run's error, or "" if there is none."""
        return "" if self.run.error is None else str(self.run.error)

    def subscribe(self, callback: Callable[[Sequence[Event]], None]) -> Callable[[], None]:
        """Call ``callback`` with all events so far, each new batch, and finally an empty list."""
        return self.run.subscribe(callback)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after each change, in any thread; return an unsubscribe function."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def __repr__(self) -> str:
        last = len(self.moments) - 1
        state = "has ended" if self.finished else "looking back" if self._looking_back else "latest"
        head = f"<Stepper of {self.name}: step {self.position} of {last}, {state}>"
        return "\n".join([head, *(f"  {s}" for s in self.moment.rank_states)])

    def _ipython_display_(self) -> None:
        if self._cockpit is None:
            from distkit.views.cockpit import Cockpit

            self._cockpit = Cockpit(self)
        self._cockpit._ipython_display_()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- steps ------------------------------------------------------------------------

    def _choose(self, rank: int | None) -> list[int]:
        """Return the ranks to resume: one, or all that are paused.

        If none is paused, the step waits for the running ranks.

        Raises:
            StepError: the run has ended, or these ranks cannot be resumed.
        """
        if self.run.finished:
            error = f" with {type(self.run.error).__name__}" if self.run.error else ""
            raise StepError(
                f"{self.name} has ended{error}: no steps are left. Go back with back(), or "
                "step through it again: cluster.step(…)."
            )
        rank_states, noun = self._graph.rank_states, self._graph.noun
        paused = [s.rank for s in rank_states if s.status is RankStatus.PAUSED]
        if rank is None:
            if paused or any(s.status is RankStatus.RUNNING for s in rank_states):
                return paused
            raise StepError("no rank can continue: " + "; ".join(map(str, rank_states)))
        if rank not in self.ranks:
            raise StepError(
                f"{noun} {rank!r} does not exist: the {noun}s are 0 to {self.ranks[-1]}."
            )
        if self._looking_back:
            raise StepError(
                f"an earlier step is displayed ({self.position} of {len(self.moments) - 1}): "
                "return to the latest with seek(-1) before you resume a rank."
            )
        if rank not in paused:
            advice = f"Resume {named(paused, noun)}." if paused else f"No {noun} can be resumed."
            raise StepError(
                f"{noun} {rank} is not paused and cannot be resumed. {rank_states[rank]}. {advice}"
            )
        return [rank]

    def settle(self) -> Stepper:
        """Wait until no rank can continue without being resumed."""
        return self._step([])

    def _step(self, ranks: list[int]) -> Stepper:
        if ranks:
            self._resume(ranks, 1)
        self._wait_until_settled()
        if self._is_ending():
            self._conductor.finished_event.wait(DIAGNOSIS_TIMEOUT)
        if not self.finished:
            self._controller.collect_events()  # the servers' events belong to this moment
        self._record_moment(tuple(ranks))
        if self.run.error is not None:
            raise self.run.error
        return self

    def _resume(self, ranks: list[int], count: int | None) -> None:
        """End the pause and open the gates of some ranks, ``count`` times or permanently."""
        with self._changed:
            if self._paused:
                self._paused_seconds = time.monotonic() - self._last_time
                self._resumed_at, self._paused = self._last_time, False
            self._resume_counts = {r: self._event_counts[r] for r in ranks}
        self._controller.open_gates(ranks, count)

    def _wait_until_settled(self) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(self._is_settled)
                blocked = any(s.status is RankStatus.BLOCKED for s in self._graph.rank_states)
                if not blocked or not self._changed.wait_for(
                    lambda: not self._is_settled(), SETTLE_TIME
                ):
                    return

    def _is_settled(self) -> bool:
        """Return True if no rank can continue without being resumed. The lock must be held."""
        run = self._conductor
        self._record_ends()
        if any(
            self._event_counts[r] == n and r in run.unfinished
            for r, n in self._resume_counts.items()
        ):
            return run.finished  # the rank has not yet received its permit
        running = any(s.status is RankStatus.RUNNING for s in self._graph.rank_states)
        return not running or run.failed or run.finished

    def _is_ending(self) -> bool:
        """Return True if all ranks have ended, one has failed, or the run is deadlocked."""
        run = self._conductor
        return not run.unfinished or run.failed or (self._is_deadlocked() and not run.wait_forever)

    def _is_deadlocked(self) -> bool:
        """Return True if some ranks are blocked, and no other rank can unblock them."""
        status = {s.status for s in self._graph.rank_states}
        return RankStatus.BLOCKED in status and not status & {RankStatus.PAUSED, RankStatus.RUNNING}

    # -- moments ----------------------------------------------------------------------

    def _record_moment(self, choice: tuple[int, ...]) -> None:
        """Record the current state as a moment and show it."""
        with self._changed:
            self._record_ends()
            self.moments.append(self._current_moment(choice))
            self._paused = self.moments[-1].events > 0
        self.position = len(self.moments) - 1
        if threading.current_thread() is threading.main_thread():
            self._conductor.output.print_now()
        self._notify()

    def _current_moment(self, choice: tuple[int, ...]) -> Moment:
        return Moment(
            self._event_counts.total(), self._last_time, choice, tuple(self._graph.rank_states)
        )

    def _record_ends(self) -> None:
        run = self._conductor
        self._graph.groups.update(run.live.info.groups)
        for rank, end in rank_ends(list(run.outcomes.values())).items():
            self._graph.end(rank, end.how, end.text.partition("\n")[0])

    def _update_moment(self) -> None:
        """Add events that occur without a step, such as a rank's end, to the latest moment."""
        with self._changed:
            if self._paused:
                self._record_ends()
                self.moments[-1] = self._current_moment(self.moments[-1].choice)
        self._notify()

    def _on_events(self, events: Sequence[Event]) -> None:
        with self._changed:
            self._graph.feed(events)
            self._event_counts.update(e.rank for e in events)
            self._last_time = max([self._last_time, *(e.time for e in events)])
            self._changed.notify_all()
        self._update_moment()

    def _clock(self, timestamp: float) -> float:
        """Subtract the pauses from a time; a time within a pause becomes the start of the pause."""
        if self._paused:
            return self._last_time
        return max(self._resumed_at, timestamp - self._paused_seconds)

    def _notify(self) -> None:
        for callback in list(self._watchers):
            callback()
