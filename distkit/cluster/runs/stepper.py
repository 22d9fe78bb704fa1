"""Going through a run step by step, looking back, and doing the same again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distkit._format import named
from distkit.cluster.runs.conductor import ENDS_WITHIN
from distkit.cluster.runs.lockstep import Go, Lockstep, Moment
from distkit.cluster.runs.run import Run
from distkit.diagnosis.diagnose import Finding
from distkit.diagnosis.rank_state import Doing, RankState
from distkit.errors import StepError
from distkit.events import Event, Op
from distkit.trace.trace import Trace


class Stepper:
    """A run that stops before each communication, until it is let go.

    Any program can be stepped through, DDP included: the gate is where torch hands its
    communication to the backend. A worker of a parameter server stops before each call of its
    KVStore, however many keys it has; a push that was let go has arrived when the step is over,
    so that workers let go one after the other come to the servers in this order. Times in its
    trace leave the pauses out.

    Made by :meth:`distkit.Cluster.step`. In a notebook it displays as a cockpit with the same
    controls. As a context manager it ends the run when the block is left.

    Example:
        >>> stepper = cluster.step(ring, x)          # doctest: +SKIP
        >>> stepper.next()                           # doctest: +SKIP
        >>> stepper.next(rank=1)                     # doctest: +SKIP
        >>> stepper.run_to(op="all_reduce").finish().results       # doctest: +SKIP
    """

    def __init__(self, run: Run, go: Go, collect: Callable[[], None] = lambda: None) -> None:
        self.run, self.name, self.ranks = run, run.name, run.ranks
        self.position, self.playing = 0, False
        self._stepping = threading.Lock()
        self._pause = threading.Event()
        self._watchers: list[Callable[[], None]] = []
        self._cockpit: Any = None
        self._conductor = run._conductor
        self._lockstep = Lockstep(self._conductor, go, collect, self._notify)

    # -- going on -------------------------------------------------------------------

    def next(self, rank: int | None = None) -> Stepper:
        """Let the next communication of every paused rank go, or only that of one rank.

        Returns when nobody moves any more: each rank is paused again, blocked or at its end. While
        looking back, ``next()`` goes one moment forward instead.

        Raises:
            StepError: it is over, there is no such rank, or that rank is not paused.
            RankError, DeadlockError: the run ended with it.
        """
        with self._one_at_a_time():
            if self.position < len(self.moments) - 1 and rank is None:
                self.seek(self.position + 1)
                return self
            self._step(self._paused() if rank is None else [self._check(rank)])
        return self

    def play(self, speed: float = 1.0) -> Stepper:
        """Make ``speed`` steps per second until the end, :meth:`pause` or the stop button.

        While looking back it shows the moments up to now again, and nobody moves.

        Raises:
            StepError: ``speed`` is not positive, or it is over.
        """
        if not speed > 0:
            raise StepError(f"play(speed={speed}): steps per second must be more than 0.")
        self._pause.clear()
        self._set_playing(True)
        again = self.position < len(self.moments) - 1
        try:
            while not self._pause.is_set():
                due = time.monotonic() + 1 / speed
                self.next()
                if (self.finished or again) and self.position == len(self.moments) - 1:
                    break
                self._pause.wait(max(0.0, due - time.monotonic()))
        finally:
            self._set_playing(False)
        return self

    def pause(self) -> Stepper:
        """Stop playing."""
        self._pause.set()
        return self

    def run_to(self, *, line: int | str | None = None, op: Op | str | None = None) -> Stepper:
        """Go on until every rank that gets there is paused at a line, or before an operation.

        It makes one step in any case, so that it can be called again and again.

        Args:
            line: a line's number, or with its file: ``"In[5]:3"``, ``"train.py:31"``.
            op: ``"all_reduce"``, ``"send"`` …

        Raises:
            StepError: neither is given, or no rank got there.
        """
        if line is None and op is None:
            raise StepError(
                'run_to() needs a line or an operation: run_to(line=7) or run_to(op="all_reduce").'
            )
        self._check_line(line)
        if op is not None and str(op) not in {str(o) for o in Op}:
            raise StepError(f"there is no operation {op!r}: choose from {', '.join(map(str, Op))}.")

        def there(s: RankState) -> bool:
            return (line is None or f":{s.where}".endswith(f":{line}")) and op in (None, s.op)

        with self._one_at_a_time():
            self._step(self._paused())
            while away := [s.rank for s in self._lockstep.paused if not there(s)]:
                self._step(away)
        if not any(map(there, self._lockstep.paused)):
            raise StepError(f"no rank came to {op or f'line {line}'} and paused there.")
        return self

    def finish(self) -> Run:
        """Let everybody go on to the end, and wait for it.

        Raises:
            RankError, DeadlockError, …: as :meth:`distkit.Cluster.run`.
        """
        if self.run.finished:
            return self.run.wait()
        self.let_go()
        try:
            return self.run.wait()
        finally:
            self._note(())

    def let_go(self) -> None:
        """Let everybody go on to the end, and do not wait for it."""
        self.pause()
        if not self.run.finished:
            self._lockstep.let_go(self.ranks, None)

    def stop(self) -> None:
        """End the run on every rank, wherever it is; the cluster stays usable."""
        self.pause()
        if self.run.finished:
            return
        self.run.interrupt()
        self._conductor.done.wait(ENDS_WITHIN)
        self._note(())

    # -- looking back ---------------------------------------------------------------

    def back(self, n: int = 1) -> Stepper:
        """Look at the program ``n`` steps earlier; the ranks stay where they are."""
        return self.seek(max(0, self.position - n))

    def seek(self, position: int) -> Stepper:
        """Look at the moment with this number; -1 is now.

        Raises:
            StepError: there is no such moment.
        """
        count = len(self.moments)
        if not -count <= position < count:
            raise StepError(f"there is no moment {position}: there are moments 0 to {count - 1}.")
        self.position = position % count
        self._notify()
        return self

    @property
    def moments(self) -> list[Moment]:
        """The moments from the first pause until now."""
        return self._lockstep.moments

    @property
    def moment(self) -> Moment:
        """The moment looked at."""
        return self.moments[self.position]

    @property
    def shown(self) -> Trace:
        """The trace up to the moment looked at: the values of the ranks' tensors as they were."""
        whole = self.trace
        return Trace(whole.events[: self.moment.events], whole.info)

    # -- the same again -------------------------------------------------------------

    @property
    def choices(self) -> list[tuple[int, ...]]:
        """The ranks that were let go in each step: the interleaving of this run."""
        return [moment.choice for moment in self.moments if moment.choice]

    def save(self, path: str | Path) -> Path:
        """Write the choices as JSON, for :meth:`replay`.

        Raises:
            StepError: the name is that of a picture.
        """
        path = Path(path)
        if path.suffix in (".svg", ".png", ".pdf", ".html"):
            raise StepError(
                f"save({str(path)!r}) writes the choices as JSON: use a name that ends in .json. "
                "For a picture, dk.Timeline(stepper.trace).save(…)."
            )
        plain = {"program": self.name, "ranks": len(self.ranks), "choices": self.choices}
        path.write_text(json.dumps(plain), encoding="utf-8")
        return path

    def replay(self, choices: str | Path | Sequence[Sequence[int]]) -> Stepper:
        """Make the same choices again: the same interleaving, and the same result.

        Args:
            choices: a file that :meth:`save` wrote, or a list such as ``[(0, 1), (1,), (0,)]``.

        Raises:
            StepError: the file is none of these, or a rank to be let go is not paused.
        """
        for number, choice in enumerate(_choices(choices), 1):
            with self._one_at_a_time():
                try:
                    ranks = [self._check(rank) for rank in choice]
                except StepError as error:
                    raise StepError(f"step {number} of the replay: {error}") from None
                self._step(ranks)
        return self

    # -- what a view wants to know ----------------------------------------------------

    @property
    def trace(self) -> Trace:
        """All that has been recorded; the pauses are left out of its times."""
        return self.run.trace

    @property
    def finished(self) -> bool:
        """True if all ranks have ended."""
        return self.run.finished

    @property
    def findings(self) -> list[Finding]:
        """The findings: why it cannot go on, or what was wrong when it is over."""
        if self.run.finished:
            return self.run.findings
        return [f for f in self.run.findings if f.hang] if self._lockstep.deadlocked else []

    @property
    def error(self) -> str:
        """The error of the run in words; "" if there is none."""
        return "" if self.run.error is None else str(self.run.error)

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Have events handed over as they arrive, from another thread; [] means the end."""
        return self.run.subscribe(callback)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it told, from any thread, that there is something new to show."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def __repr__(self) -> str:
        last = len(self.moments) - 1
        state = "has ended" if self.finished else "looking back" if self.position < last else "now"
        head = f"<Stepper of {self.name}: step {self.position} of {last}, {state}>"
        return "\n".join([head, *(f"  {s}" for s in self.moment.standings)])

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

    # -- who may go -------------------------------------------------------------------

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise StepError("another step is in progress. Wait for it, or call pause().")
        try:
            yield
        finally:
            self._stepping.release()

    def _paused(self) -> list[int]:
        """The ranks that can be let go; somebody must be."""
        self._check_not_over()
        paused = [s.rank for s in self._lockstep.paused]
        standings = self._lockstep.standings
        if paused or any(s.doing is Doing.RUNNING for s in standings):
            return paused  # with none, we wait for those that run
        raise StepError("no rank can continue: " + "; ".join(map(str, standings)))

    def _check(self, rank: int) -> int:
        self._check_not_over()
        if rank not in self.ranks:
            raise StepError(f"there is no rank {rank!r}: there are ranks 0 to {self.ranks[-1]}.")
        if self.position < len(self.moments) - 1:
            raise StepError(
                f"this is the past (step {self.position} of {len(self.moments) - 1}): "
                "go back to now with seek(-1) before you let a rank go."
            )
        standing = self._lockstep.standings[rank]
        if standing.doing is not Doing.PAUSED:
            paused = [s.rank for s in self._lockstep.paused]
            can = f"Let {named(paused)} go." if paused else "No rank can."
            raise StepError(f"rank {rank} is not paused and cannot be let go. {standing}. {can}")
        return rank

    def _check_line(self, line: int | str | None) -> None:
        """A line that no known source has is a slip of the pen."""
        if not isinstance(line, int):
            return
        longest = {f: len(t.splitlines()) for f, t in self.trace.info.sources.items()}
        if longest and not 0 < line <= max(longest.values()):
            known = ", ".join(f"{file} has {n} lines" for file, n in longest.items())
            raise StepError(f"there is no line {line}: {known}.")

    def _check_not_over(self) -> None:
        if self.run.finished:
            error = f" with {type(self.run.error).__name__}" if self.run.error else ""
            raise StepError(
                f"{self.name} has ended{error}: there is nothing left to step through. Look back "
                "with back(), or step through it again: cluster.step(…)."
            )

    def settle(self) -> Stepper:
        """Wait until nobody moves by itself."""
        self._step(())
        return self

    def _step(self, ranks: Iterable[int]) -> None:
        choice = tuple(ranks)
        self.run._conductor.check_owner()
        if choice:
            self._lockstep.let_go(choice)
        try:
            self._lockstep.settle(choice)
        finally:
            self._show_now()
        if self.run.error is not None:
            raise self.run.error

    def _note(self, choice: tuple[int, ...]) -> None:
        self._lockstep.note(choice)
        self._show_now()

    def _show_now(self) -> None:
        self.position = len(self.moments) - 1
        if threading.current_thread() is threading.main_thread():
            self._conductor.prints.print_now()
        self._notify()

    def _set_playing(self, playing: bool) -> None:
        self.playing = playing
        self._notify()

    def _notify(self) -> None:
        for callback in list(self._watchers):
            callback()


def _choices(given: str | Path | Sequence[Sequence[int]]) -> list[list[int]]:
    if not isinstance(given, (str, Path)):
        return [[choice] if isinstance(choice, int) else list(choice) for choice in given]
    try:
        plain = json.loads(Path(given).read_text(encoding="utf-8"))
        return [[int(rank) for rank in choice] for choice in plain["choices"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StepError(f"{given} was not written by stepper.save() ({error}).") from None
