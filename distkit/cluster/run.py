"""One run of a function on the ranks: its results, its trace, and how it went wrong."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pickle import loads
from typing import Any, Protocol

import cloudpickle

from distkit.cluster import report
from distkit.cluster.notebook import place, sources
from distkit.errors import RunError, RunInterrupted
from distkit.events import Event, Trace
from distkit.trace.recorder import to_event

#: When one rank fails, the others get this long to fail or finish by themselves [s] …
GRACE = 0.3
#: … and after they were told to let go, this long until their processes are ended [s].
LET_GO = 3.0

#: A trace keeps at most this many events; it says how many more there were.
LIMIT = 2_000_000


class Crew(Protocol):
    """Those who run it: whatever can release or end ranks."""

    def release(self, ranks: Iterable[int], run: int) -> None:
        """Get these ranks out of whatever they wait in."""

    def end(self, ranks: Iterable[int]) -> None:
        """End these ranks' processes; their deaths are reported to the run."""

    def settle(self, run: int) -> None:
        """All have ended: have whoever else holds events of the run hand them over."""


class Run:
    """A function running, or run, on the ranks.

    ``results`` (one per rank), ``trace`` and ``seconds`` are what remains. While it still
    runs, ``trace`` is what has arrived so far; ``wait()`` waits, ``interrupt()`` ends it.
    In a notebook it displays as the timeline of its messages.
    """

    def __init__(self, name: str, number: int, ranks: list[int], meta: dict[str, Any]) -> None:
        self.name, self.number, self.ranks = name, number, ranks
        self._meta = {**meta, "name": name}
        self._events: list[Event] = []
        self._packed: list[tuple[int, bytes]] = []  # arrived, not yet looked at
        self._unpacking = threading.Lock()
        self._arrived = self._dropped = 0  # events
        self._trace: Trace | None = None
        self._outcomes: dict[int, dict[str, Any]] = {}
        self._order: list[int] = []  # ranks in the order in which they ended
        self._changed = threading.Condition()
        self._interrupted = False
        self._ended: set[int] = set()  # ranks whose processes we had to end
        self._texts: queue.SimpleQueue[tuple[int, str, str] | None] = queue.SimpleQueue()
        self._partial: dict[tuple[int, str], str] = {}
        self._subscribers: list[Callable[[list[Event]], None]] = []
        self._done = threading.Event()
        self._started, self.seconds = time.perf_counter(), 0.0
        self._error: RunError | None = None
        self._shown = False

    def __repr__(self) -> str:
        if not self.finished:
            state = f"running on {len(self.ranks)} ranks"
        elif self._error is not None:
            state = f"failed: {str(self._error).splitlines()[0]}"
        else:
            state = f"{len(self.ranks)} ranks, {self.seconds:.3g} s, {self._arrived} events"
        return f"<Run {self.number} of {self.name}: {state}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if self._shown or (self.finished and not self._arrived):
            return {"text/plain": repr(self)}
        from distkit.views import Timeline

        return Timeline(self if not self.finished else self.trace)._repr_mimebundle_(**kwargs)

    # -- what remains -----------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all ranks have ended, well or not."""
        return self._done.is_set()

    @property
    def ending(self) -> bool:
        """Whether it is over, or was told to be."""
        return self.finished or self._interrupted

    @property
    def results(self) -> list[Any]:
        """What the function returned, by rank; waits, and raises as :meth:`wait` does."""
        self.wait()
        return self._results

    @property
    def error(self) -> RunError | None:
        """What went wrong, None if nothing has."""
        return self._error

    @property
    def trace(self) -> Trace:
        """What the ranks said to each other, as far as it has arrived."""
        if self._trace is None or not self.finished:
            self._unpack()
            events, until = list(self._events), {"until": time.monotonic()}
            self._trace = Trace(events, {**until, **self._meta, "sources": sources(events)})
        return self._trace

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until all ranks have ended; what they print appears, labelled.

        Raises:
            RankError: the function raised on a rank, or a rank died.
            RunInterrupted: the run was interrupted by ``cluster.interrupt()``.
            KeyboardInterrupt: it was interrupted here: all ranks have ended.
            TimeoutError: ``timeout`` seconds have passed; the run goes on.
        """
        try:
            self._print_until_done(timeout)
        except KeyboardInterrupt:
            self.interrupt()
            self._print_until_done(None)
            stopped = KeyboardInterrupt(f"{self.name} was interrupted on all ranks")
            stopped.run = self  # type: ignore[attr-defined]  # as RunError has
            raise stopped from None
        if self._error is not None:
            raise self._error
        return self

    def interrupt(self) -> None:
        """End the function on every rank, wherever it is; the cluster stays usable."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Have events handed over as they arrive, from another thread; [] means the end."""
        self._unpack()  # the subscriber begins with the trace as it is now
        self._subscribers.append(callback)
        if self.finished:
            callback([])
        return lambda: self._subscribers.remove(callback)

    # -- what arrives from the ranks --------------------------------------------

    def add_rows(self, rank: int, count: int, packed: bytes) -> None:
        """Events of a rank, still packed: on a busy machine looking at them slows the ranks."""
        if self._arrived + count > LIMIT:
            self._dropped += count
            return
        self._arrived += count
        self._packed.append((rank, packed))
        if self._subscribers and (events := self._unpack()):
            for callback in list(self._subscribers):
                callback(events)

    def _unpack(self) -> list[Event]:
        """Turn what has arrived into events; return the new ones."""
        with self._unpacking:
            packed, self._packed = self._packed, []
            new = [to_event(rank, row, place) for rank, rows in packed for row in loads(rows)]
            self._events.extend(new)
        return new

    def add_text(self, rank: int, stream: str, text: str) -> None:
        """Something that a rank printed."""
        *lines, rest = (self._partial.pop((rank, stream), "") + text).split("\n")
        if rest:
            self._partial[rank, stream] = rest
        for line in lines:
            self._texts.put((rank, stream, line))

    def add_outcome(self, rank: int, outcome: dict[str, Any]) -> None:
        """A rank has ended the function."""
        with self._changed:
            if rank not in self._outcomes:
                self._outcomes[rank] = outcome
                self._order.append(rank)
                self._changed.notify_all()

    def add_death(self, rank: int, status: int, log: str = "") -> None:
        """A rank's process has ended."""
        if rank in self._ended:
            how = "it did not let go, and was ended"
            self.add_outcome(rank, {"rank": rank, "died": how, "log": "", "intact": False})
            return
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self.add_outcome(rank, {"rank": rank, "died": how, "log": log, "intact": False})

    # -- conducting -------------------------------------------------------------

    def conduct(self, crew: Crew) -> None:
        """See the run through to its end: when one rank fails, the others are released."""
        self._until(lambda: self._interrupted or self._failed() or not self.waiting)
        if self.waiting:
            if not self._interrupted:
                self._until(lambda: self._interrupted or not self.waiting, GRACE)
            crew.release(self.waiting, self.number)
            self._until(lambda: not self.waiting, LET_GO)
            self._ended = set(self.waiting)
            crew.end(self.waiting)
            self._until(lambda: not self.waiting, LET_GO)
        crew.settle(self.number)
        self._finish()

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [r for r in self.ranks if r not in self._outcomes]

    @property
    def intact(self) -> bool:
        """Whether the process group survived on every rank."""
        return all(o["intact"] for o in self._outcomes.values()) and not self.waiting

    @property
    def died(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [r for r, o in self._outcomes.items() if "died" in o]

    def _failed(self) -> bool:
        return any("result" not in o for o in self._outcomes.values())

    def _until(self, condition: Callable[[], Any], timeout: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(condition, timeout)

    def _finish(self) -> None:
        self.seconds = time.perf_counter() - self._started
        outcomes = [self._outcomes.get(r, report.lost(r)) for r in self.ranks]
        self._note_ends(outcomes)
        if self._failed() or self.waiting:
            self._error = report.verdict(self.name, outcomes, self._order, self.trace)
        if self._interrupted and self._ended.issuperset(self.died):
            self._error = RunInterrupted(
                f"{self.name} was interrupted on all ranks; the cluster is ready for the next run."
            )
        if self._error is not None:
            self._error.run = self
        results = (o.get("result") for o in outcomes)
        self._results = [None if r is None else cloudpickle.loads(r) for r in results]
        self._done.set()
        for (rank, stream), rest in sorted(self._partial.items()):
            self._texts.put((rank, stream, rest))
        self._texts.put(None)
        for callback in list(self._subscribers):
            callback([])

    def _note_ends(self, outcomes: list[dict[str, Any]]) -> None:
        """What the ranks said about themselves in the end belongs into the trace."""
        def counts(key: str) -> dict[str, int]:
            return {str(o["rank"]): o[key] for o in outcomes if o.get(key)}

        lost = {"notebook": self._dropped} if self._dropped else {}
        self._meta.update(
            dropped=counts("dropped") | lost, without_values=counts("without_values"),
            groups=dict(pair for o in outcomes for pair in o.get("groups", {}).items()),
            seconds=self.seconds, until=time.monotonic(),
        )  # fmt: skip
        self._trace = None

    # -- printing ---------------------------------------------------------------

    def _print_until_done(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not (self.finished and self._texts.empty()):
            left = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"{self.name} still runs after {timeout} s; it goes on")
            try:
                item = self._texts.get(timeout=left)
            except queue.Empty:
                continue
            if item is not None:
                rank, stream, line = item
                print(f"[rank {rank}] {line}", file=getattr(sys, stream), flush=True)
