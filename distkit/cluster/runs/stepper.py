"""Steps through a run, forward and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from distkit._format import named
from distkit.cluster.runs.conductor import INTERRUPT_TIMEOUT
from distkit.cluster.runs.lockstep import Go, Lockstep, Moment
from distkit.cluster.runs.run import Run
from distkit.diagnosis.diagnose import Finding
from distkit.diagnosis.rank_state import RankStatus
from distkit.errors import StepError
from distkit.events import Event
from distkit.trace.trace import Trace


class Stepper:
    """A run whose ranks pause before each communication until they are resumed.

    It steps through any program, including DDP: the gate is where torch passes a communication to
    the backend. A worker of a parameter server pauses before each call of its KVStore, for any
    number of keys; a push has arrived at the end of its step, so workers that are stepped one after
    the other reach the servers in this order. Times in its trace exclude the pauses.

    Created by :meth:`distkit.Cluster.step`. In a notebook it displays as a cockpit with the same
    controls. As a context manager it ends the run at the end of the block.

    Example:
        >>> stepper = cluster.step(ring, x)          # doctest: +SKIP
        >>> stepper.next()                           # doctest: +SKIP
        >>> stepper.next(rank=1)                     # doctest: +SKIP
        >>> stepper.finish().results                 # doctest: +SKIP
    """

    def __init__(self, run: Run, go: Go, collect: Callable[[], None] = lambda: None) -> None:
        self.run, self.name, self.ranks = run, run.name, run.ranks
        self.position, self.playing = 0, False
        self._stepping = threading.Lock()
        self._pause_requested = threading.Event()
        self._watchers: list[Callable[[], None]] = []
        self._cockpit: Any = None
        self._conductor = run._conductor
        self._lockstep = Lockstep(self._conductor, go, collect, self._notify)

    # -- stepping -------------------------------------------------------------------

    def next(self, rank: int | None = None) -> Stepper:
        """Execute the next communication of every paused rank, or of one rank.

        Returns when each rank is paused again, blocked or at its end. While looking back,
        ``next()`` moves one moment forward instead.

        Raises:
            StepError: the run has ended, the rank does not exist, or is not paused.
            RankError, DeadlockError: the run ended in this step.
        """
        with self._stepping:
            if self._looking_back and rank is None:
                return self.seek(self.position + 1)
            return self._step(self._choose(rank))

    def play(self, speed: float = 1.0) -> Stepper:
        """Make ``speed`` steps per second until the end, :meth:`pause` or the stop button.

        While looking back it replays the moments up to now, without resuming ranks.

        Raises:
            StepError: ``speed`` is not positive, or the run has ended.
        """
        if not speed > 0:
            raise StepError(f"play(speed={speed}): expected steps per second, more than 0.")
        looking_back = self._looking_back
        self._pause_requested.clear()
        self.playing = True
        self._notify()
        try:
            while True:
                self.next()
                at_end = (self.finished or looking_back) and not self._looking_back
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
        """Run all ranks to their end, and wait until they have ended.

        Raises:
            RankError, DeadlockError, …: as :meth:`distkit.Cluster.run`.
        """
        if self.run.finished:
            return self.run.wait()
        self.let_go()
        try:
            return self.run.wait()
        finally:
            self._lockstep.note(())
            self._show_latest()

    def let_go(self) -> None:
        """Run all ranks to their end, without waiting."""
        self.pause()
        if not self.run.finished:
            self._lockstep.resume(self.ranks, None)

    def stop(self) -> None:
        """Interrupt the run on every rank; the cluster stays usable."""
        self.pause()
        if self.run.finished:
            return
        self.run.interrupt()
        self._conductor.done.wait(INTERRUPT_TIMEOUT)
        self._lockstep.note(())
        self._show_latest()

    # -- looking back ---------------------------------------------------------------

    def back(self, n: int = 1) -> Stepper:
        """Show the moment ``n`` steps earlier; the ranks stay paused."""
        return self.seek(max(0, self.position - n))

    def seek(self, position: int) -> Stepper:
        """Show the moment with this number; -1 is now.

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
    def moments(self) -> list[Moment]:
        """The moments from the first pause until now."""
        return self._lockstep.moments

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
        """True if all ranks have ended."""
        return self.run.finished

    @property
    def findings(self) -> list[Finding]:
        """The deadlock of a blocked run, or the findings of a finished run."""
        if self.run.finished:
            return self.run.findings
        return [f for f in self.run.findings if f.hang] if self._lockstep.deadlocked else []

    @property
    def error(self) -> str:
        """The text of the run's error; "" if there is none."""
        return "" if self.run.error is None else str(self.run.error)

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Call ``callback`` with all events so far, then with each new batch; [] is the end."""
        return self.run.subscribe(callback)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback``, from any thread, when the state has changed; return an undo."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def __repr__(self) -> str:
        last = len(self.moments) - 1
        state = "has ended" if self.finished else "looking back" if self._looking_back else "now"
        head = f"<Stepper of {self.name}: step {self.position} of {last}, {state}>"
        return "\n".join([head, *(f"  {s}" for s in self.moment.rank_states)])

    def _ipython_display_(self) -> None:
        if self._cockpit is None:
            from distkit.views.cockpit.scene import Cockpit

            self._cockpit = Cockpit(self)
        self._cockpit._ipython_display_()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.finished:
            self.stop()

    # -- steps ------------------------------------------------------------------------

    def _choose(self, rank: int | None) -> list[int]:
        """Return the ranks to resume: one, or all that are paused.

        If none is paused the step waits for the running ranks.

        Raises:
            StepError: the run has ended, or these ranks cannot be resumed.
        """
        if self.run.finished:
            error = f" with {type(self.run.error).__name__}" if self.run.error else ""
            raise StepError(
                f"{self.name} has ended{error}: no step is left. Look back with back(), or "
                "step through it again: cluster.step(…)."
            )
        rank_states = self._lockstep.rank_states
        paused = [s.rank for s in rank_states if s.status is RankStatus.PAUSED]
        if rank is None:
            if paused or any(s.status is RankStatus.RUNNING for s in rank_states):
                return paused
            raise StepError("no rank can continue: " + "; ".join(map(str, rank_states)))
        if rank not in self.ranks:
            raise StepError(f"rank {rank!r} does not exist: the ranks are 0 to {self.ranks[-1]}.")
        if self._looking_back:
            raise StepError(
                f"this is the past (step {self.position} of {len(self.moments) - 1}): "
                "return to now with seek(-1) before you resume a rank."
            )
        if rank not in paused:
            remedy = f"Resume {named(paused)}." if paused else "No rank can be resumed."
            raise StepError(
                f"rank {rank} is not paused and cannot be resumed. {rank_states[rank]}. {remedy}"
            )
        return [rank]

    def settle(self) -> Stepper:
        """Wait until no rank can move by itself."""
        return self._step([])

    def _step(self, ranks: list[int]) -> Stepper:
        if ranks:
            self._lockstep.resume(ranks)
        try:
            self._lockstep.settle(tuple(ranks))
        finally:
            self._show_latest()
        if self.run.error is not None:
            raise self.run.error
        return self

    def _show_latest(self) -> None:
        self.position = len(self.moments) - 1
        if threading.current_thread() is threading.main_thread():
            self._conductor.prints.print_now()
        self._notify()

    def _notify(self) -> None:
        for callback in list(self._watchers):
            callback()
