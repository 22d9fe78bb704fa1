"""One run of a function on the ranks: its results, its trace, and how it went wrong."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import dumps, loads
from typing import Any

from distkit.cluster.notebook import place, show_figures, sources
from distkit.cluster.runs import report
from distkit.cluster.runs.prints import Prints
from distkit.cluster.runs.rank_controller import RankController
from distkit.cluster.runs.replacements import Replacements, failed, note
from distkit.cluster.runs.watchdog import DeadlockWatchdog
from distkit.diagnosis.diagnose import Finding
from distkit.errors import DistkitError, RunError, RunStopped
from distkit.events import Event, Op
from distkit.recording import blackbox
from distkit.recording.recorder import to_event
from distkit.trace.trace import Trace

#: When one rank fails, the others get this long to fail or finish by themselves [s] …
GRACE = 0.3
#: … and after they were told to let go, this long until their processes are ended [s].
LET_GO = 2.0
#: … or only so long, if they wait in what cannot be interrupted.
QUICK = 0.2

#: A rank that has not begun a run after this long [s] never will: its process is replaced.
BEGIN = 30.0

#: A run that ended well is looked through for mistakes if it has at most so many events.
LOOKED_AT = 10_000

#: A trace keeps at most this many events; it says how many more there were.
LIMIT = 2_000_000


class Run:
    """A function running, or run, on the ranks.

    ``results`` (one per rank), ``trace`` and ``seconds`` are what remains. While it still
    runs, ``trace`` is what has arrived so far; ``wait()`` waits, ``interrupt()`` ends it.
    In a notebook it displays as the timeline of its messages.
    """

    def __init__(
        self,
        name: str,
        number: int,
        ranks: list[int],
        meta: dict[str, Any],
        *,
        wait_forever: bool = False,
    ) -> None:
        self.name, self.number, self.ranks = name, number, ranks
        self._meta = {**meta, "name": name, "groups": {}, "raising": {}, "unreduced": {}}
        self.stepped, self.doomed = False, set[int]()  # those that dk.trouble is going to kill
        self.lost = ""  # why all ranks have ended at once, if their cluster is over
        self.hung: dict[int, float] = {}  # how long those were silent that are ended for it [s]
        self._lives = Replacements()
        #: Puts the ranks' times into the reader's; a stepped run's leaves the pauses out.
        self.clock: Callable[[float], float] = float
        self._watch, self._wait_forever = DeadlockWatchdog(), wait_forever
        self._deadlock: list[Finding] = []
        self._explained = 0.0  # when it was found
        self._events: list[Event] = []
        self._packed: list[tuple[int, int, bytes]] = []  # arrived, not yet looked at
        self._unpacking = threading.RLock()  # a subscriber may look at the trace
        self._arrived = self._dropped = 0  # events
        self._rows: dict[int, int] = defaultdict(int)  # that arrived from each rank
        self._trace: Trace | None = None
        self._outcomes: dict[int, dict[str, Any]] = {}
        self._failing: dict[int, dict[str, Any]] = {}  # what ranks raised that cannot yet say more
        self._unpacked: list[Any] | None = None
        self._reading = threading.RLock()  # a result may look at the run
        self._begun: set[int] = set()
        self._order: list[int] = []  # ranks in the order in which they ended
        self._changed = threading.Condition()
        self._interrupted, self._aftermath = False, "halt"  # of a rank that dies
        self._after = "the cluster is ready for the next run"
        self._ended: set[int] = set()  # ranks whose processes we had to end
        self.prints = Prints()
        self._figures: list[tuple[int, bytes]] = []  # PNG pictures, not yet shown
        self._subscribers: list[Callable[[list[Event]], None]] = []
        self.on_end: Callable[[], None] = lambda: None  # a rank has ended, or begins again
        self._done, self._telling = threading.Event(), threading.RLock()
        self._started, self.seconds = time.perf_counter(), 0.0
        self._error: RunError | None = None
        self._shown = self._looked = False

    def __repr__(self) -> str:
        if not self.finished:
            state = f"running on {len(self.ranks)} ranks"
        elif self._error is not None:
            state = f"failed: {str(self._error).splitlines()[0]}"
        else:
            state = f"{len(self.ranks)} ranks, {self.seconds:.3g} s, {self._arrived} events"
            state += "".join(f", {r['name']} replaced" for r in self.replaced)
        return f"<Run {self.number} of {self.name}: {state}>"

    def _ipython_display_(self) -> None:
        """Show the timeline; nothing twice in one cell."""
        from IPython.display import display

        from distkit.views import Timeline

        if self._shown or (self.finished and not self._arrived):
            display({"text/plain": repr(self)}, raw=True)
        else:
            display(Timeline(self if not self.finished else self.trace))

    # -- what remains -----------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if all ranks have ended, well or not."""
        return self._done.is_set()

    @property
    def ending(self) -> bool:
        """True if it is over, or was told to be."""
        return self.finished or self._interrupted

    @property
    def results(self) -> list[Any]:
        """The function's results, by rank; waits, and raises as :meth:`wait` does."""
        self.wait()
        return self._unpack_results()

    @property
    def output(self) -> list[str]:
        """The output of each rank so far, by rank; a notebook may show less of it."""
        return [self.prints.all_of(rank) for rank in self.ranks]

    @property
    def error(self) -> RunError | None:
        """The error of the run, None if there is none."""
        if self.finished and self._error is None:
            self._unpack_results()
        return self._error

    @property
    def replaced(self) -> list[dict[str, Any]]:
        """Processes that ended during the run and were replaced: node, name, how and time [s]."""
        return [{**r, "time": self.clock(r["time"])} for r in self._lives.replaced]

    @property
    def trace(self) -> Trace:
        """The communication of the ranks, as far as it has arrived."""
        if self._trace is None or not self.finished:
            self._unpack()
            events, until = list(self._events), self.clock(time.monotonic())
            told = {"replaced": self.replaced} if self.replaced else {}
            self._trace = Trace(
                events,
                {
                    "until": until,
                    "ends": report.ends(list(self._outcomes.values())),
                    **self._meta,
                    "sources": sources(events),
                    **told,
                },
            )
        return self._trace

    @property
    def findings(self) -> list[Finding]:
        """The findings of :meth:`distkit.Trace.diagnose`, as far as the trace has arrived."""
        return self._deadlock or self.trace.diagnose()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until all ranks have ended; what they print appears, labelled.

        Raises:
            RankError: the function raised on a rank, or a rank died.
            DeadlockError: ranks waited for each other for ever; it says which, where and why.
            RunInterrupted: the run was interrupted by ``cluster.interrupt()``.
            KeyboardInterrupt: it was interrupted here: all ranks have ended.
            TimeoutError: ``timeout`` seconds have passed; the run goes on.
        """
        try:
            with self.ended_by_interrupt():
                if not self.prints.print_until(lambda: self.finished, timeout):
                    raise TimeoutError(f"{self.name} still runs after {timeout} s; it goes on")
        finally:
            figures, self._figures = self._figures, []
            show_figures(figures)
            with self._telling:  # what a view shows in the end belongs to the cell that waited
                pass
        first, self._looked = not self._looked, True
        if first:
            report.warn(report.of_worn(self.name, self._outcomes.values()))
        if self.error is not None:
            raise self.error
        if first:
            report.warn(report.of_replacements(self.name, self.replaced))
            report.warn(report.of_threads(self.name, self.haunted))
            report.warn(report.of_copies(self.name, self._outcomes.values()))
            report.warn([text for o in self._outcomes.values() for text in o.get("missed", ())])
            if self._arrived <= LOOKED_AT or self.died:
                report.warn(report.of_returned(self.name, self._outcomes.values(), self.trace))
                report.warn(report.of_findings(self.findings))
        return self

    @contextmanager
    def ended_by_interrupt(self) -> Iterator[None]:
        """An interrupt of the reader's in here ends the run on every rank, whatever it met."""
        try:
            yield
        except RunStopped:  # it was, further down
            raise
        except KeyboardInterrupt:
            # where the ranks are now: of a short trace at once, since to release them adds to it
            found = self.findings if self._arrived <= LOOKED_AT else []
            self.interrupt()
            self.prints.print_until(lambda: self.finished, None)
            raise report.stopped(self, found or self.findings) from None

    def __await__(self) -> Generator[Any, None, Run]:
        """Wait, as :meth:`wait` does, while other coroutines go on."""
        import asyncio  # whoever awaits has it

        yield from asyncio.to_thread(self._done.wait).__await__()
        return self.wait()

    def interrupt(self) -> None:
        """End the function on every rank, wherever it is; the cluster stays usable."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def abandon(self, why: str) -> None:
        """The cluster is being stopped, or restarted, as ``why`` says: its ranks end."""
        self._ended.update(self.ranks)
        self._after = why
        self.interrupt()

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Have all events handed over: those so far now, others from a thread; [] at the end."""
        with self._unpacking:
            self._unpack_all()
            if self._events:
                callback(list(self._events))
            self._subscribers.append(callback)
        if self.finished:
            callback([])
        return lambda: self._subscribers.remove(callback)

    # -- what arrives from the ranks --------------------------------------------

    def hear(self, rank: int, kind: str, what: Any) -> None:
        """One message of a rank's."""
        if kind == "rows":
            self.add_rows(rank, *what)
        elif kind == "text":
            self.prints.add(rank, *what)
        elif kind == "replaced":
            how = report.cause(what, hung=self.hung.get(rank, 0.0))
            self._meta.get("stopped", {}).pop(str(rank), None)
            self._lives.begin(rank, self._named(rank), how, time.monotonic())
        elif kind == "outcome":
            self.add_outcome(rank, what)
        elif kind == "begun":
            with self._changed:
                self._begun.add(rank)
                self._changed.notify_all()
        elif kind == "stopped":
            self._note_stop(rank, *what)
        elif kind == "failing":
            with self._changed:
                self._failing[rank] = what
                self._changed.notify_all()
        elif kind == "group":
            self._meta["groups"].update([what])
        elif kind == "raising":
            seq, text, where = what
            known = {"seq": seq, "text": text, "where": place(where)}
            self._meta["raising"] = {**self._meta["raising"], str(rank): known}
        elif kind == "threads":
            known_threads = self._meta.setdefault("threads", {})
            known_threads.setdefault(str(rank), []).append(what)
        elif kind == "unreduced":
            self._meta["unreduced"] = {**self._meta["unreduced"], str(rank): what}
        elif kind == "aftermath":  # of ranks that die, as the store's on_crash says
            self._aftermath = what
        elif kind == "figure":
            self._figures.append((rank, what))
        elif kind == "waits":
            with self._changed:
                self._watch.hear(rank, *what)
                self._changed.notify_all()

    def _note_stop(self, rank: int, number: int, since: float) -> None:
        """A rank's process was stopped by this signal, then; with 0 it goes on."""
        stopped = self._meta.setdefault("stopped", {})
        self._meta.setdefault("silent_since", {})[str(rank)] = self.clock(since)
        if rank not in self.ranks:  # a server or the scheduler: a diagnosis tells
            stopped.pop(str(rank), None)
            stopped.update({str(rank): signal.Signals(number).name} if number else {})
        elif number:
            how = stopped[str(rank)] = signal.Signals(number).name
            pid = self._meta["ranks"][str(rank)]["pid"]
            self.prints.add(rank, "stderr", report.of_stop(rank, how, pid) + "\n")
        elif stopped.pop(str(rank), None):
            self.prints.add(rank, "stderr", f"rank {rank} continues\n")

    def add_rows(self, rank: int, count: int, packed: bytes) -> None:
        """Events of a rank, still packed: on a busy machine looking at them slows the ranks."""
        if self._arrived + count > LIMIT:
            self._dropped += count
            return
        self._arrived += count
        self._rows[rank] += count
        self._packed.append((rank, self._lives.first(rank), packed))
        if self._subscribers:
            self._unpack()

    def _unpack(self) -> None:
        """Turn what has arrived into events, and hand them to the subscribers: each one once."""
        with self._unpacking:
            if new := self._unpack_all():
                for callback in list(self._subscribers):
                    callback(new)

    def _unpack_all(self) -> list[Event]:
        packed = list(self._packed)
        new = [
            to_event(rank, row if not first else (row[0] + first, *row[1:]), place, self.clock)
            for rank, first, rows in packed
            for row in loads(rows)
        ]
        del self._packed[: len(packed)]  # only now: an interrupt may have come before
        self._events.extend(new)
        return new

    def add_outcome(self, rank: int, outcome: dict[str, Any]) -> None:
        """A rank has ended the function."""
        with self._changed:
            if rank not in self._outcomes:
                spared = "died" in outcome and self._aftermath == "continue"
                self._outcomes[rank] = {**outcome, "spared": spared}
                if "died" not in outcome:  # whoever speaks continues
                    self._meta.get("stopped", {}).pop(str(rank), None)
                self._order.append(rank)
                self._changed.notify_all()
        self.on_end()

    def life(self, rank: int) -> int:
        """The number of processes that had this rank's place in this run before."""
        return self._lives.of(rank)

    def add_death(self, rank: int, status: int, folder: str) -> None:
        """A rank's process has ended; its files tell what it did last."""
        if self.finished:  # its process was ended with its cluster
            return
        text = ""
        with suppress(OSError):
            box = Path(folder, f"rank-{rank}.box")
            last = blackbox.read(box, self.number, self._rows[rank])
            self.add_rows(rank, len(last), dumps(last))
            text = Path(folder, f"rank-{rank}.log").read_text(errors="replace")[-20_000:]
        if rank in self._failing:
            said = {"rank": rank, "error": report.cut_short(self._failing[rank]), "intact": False}
            self.add_outcome(rank, said)
            return
        if rank in self._ended:
            ended = {"died": "it could not be released, and was ended", "released": True}
            self.add_outcome(rank, {"rank": rank, "log": "", "intact": False, **ended})
            return
        silent = self.hung.get(rank, 0.0)
        how = report.cause(status, asked=rank in self.doomed, hung=silent)
        with self._changed:
            over = self.ending or self._failed() or bool(self._deadlock)
            if self._aftermath == "replace" and not over and self._lives.vacate(rank, how):
                self._changed.notify_all()
                return
        self.add_outcome(rank, {"rank": rank, "died": how, "log": text, "intact": False})

    # -- conducting -------------------------------------------------------------

    def conduct(self, crew: RankController) -> None:
        """See the run through to its end: when one rank fails, the others are released."""
        try:
            self._see_through(crew)
            self._conclude()
        except Exception as error:  # a mistake of ours: nobody may wait for ever because of it
            traceback.print_exc(file=sys.__stderr__)
            self._error = report.mistaken(self.name, error)
            self._end(crew, self.waiting)
        finally:
            self._announce()

    def _see_through(self, crew: RankController) -> None:
        self._until_end_or_deadlock(crew)
        if self.waiting:
            if not (self._interrupted or self._deadlock):
                self._until(lambda: self._interrupted or not self.waiting, GRACE)
            crew.release(self.waiting, self.number)
            self._until(lambda: not self.waiting, QUICK)
            self._end(crew, self._deaf())
            self._until(lambda: not self.waiting, LET_GO)
            self._end(crew, self.waiting)
            self._until(lambda: not self.waiting, LET_GO)
        crew.settle(self.number)

    def _until_end_or_deadlock(self, crew: RankController) -> None:
        def over() -> bool:
            return self._interrupted or self._failed() or not self.waiting

        vacant = self._lives.vacant
        while True:
            late = {*self.waiting} - self._begun - self._stopped()
            left = self._started + BEGIN - time.perf_counter() if late else None
            self._until(lambda: over() or vacant or self._watch.due(self.waiting), left)
            if over():
                return
            if vacant:
                self._replace(crew, *vacant.popitem())
                continue
            if left is not None and time.perf_counter() > self._started + BEGIN:
                late -= self._begun
                self._begun |= late
                self.hung.update(dict.fromkeys(late, BEGIN))
                crew.end(late)
            if not self._watch.due(self.waiting):
                continue
            certain = self._watch.judge(self.trace, self.waiting)
            if certain and not self._wait_forever:
                self._deadlock, self._explained = certain, time.monotonic()
                return

    def _replace(self, crew: RankController, rank: int, how: str) -> None:
        """A rank's process has ended: what it was in failed, and another begins."""
        began = time.monotonic()
        self._unpack()
        self.add_rows(rank, *failed(self._events, rank, self._lives.first(rank), began))
        self._lives.begin(rank, self._named(rank), how, began)
        self.on_end()
        self._rows[rank] = 0
        self._watch.forget(rank)
        self.doomed.discard(rank)
        self.hung.pop(rank, None)
        try:
            crew.replace(self, rank, self._lives.of(rank))
        except DistkitError as error:
            said = {"rank": rank, "died": f"{how}; a replacement could not be started: {error}"}
            self.add_outcome(rank, {**said, "log": "", "intact": False})
        self.add_rows(rank, *note(how, began, time.monotonic()))
        self.on_end()

    def _named(self, node: int) -> str:
        return str(self._meta["ranks"][str(node)]["name"])

    def _end(self, crew: RankController, ranks: list[int]) -> None:
        self._ended.update(ranks)
        crew.end(ranks)

    def _deaf(self) -> list[int]:
        """The ranks that cannot be let go: stopped ones, and those that receive from anybody."""
        spans = self.trace.spans if self.waiting else []
        last = {s.rank: s for s in spans if s.op is Op.RECV and s.end is None and s.peer is None}
        return [r for r in self.waiting if r in last or r in self._stopped()]

    def _stopped(self) -> set[int]:
        return {int(r) for r in self._meta.get("stopped", {})}

    @property
    def haunted(self) -> list[int]:
        """The ranks on which threads of the function go on that communicate, or were released."""
        return [r for r, o in self._outcomes.items() if o.get("haunted")]

    @property
    def unfit(self) -> list[int]:
        """The ranks whose processes are of no more use, for this reason or another."""
        return [r for r, o in self._outcomes.items() if o.get("haunted") or o.get("worn")]

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [r for r in self.ranks if r not in self._outcomes]

    @property
    def intact(self) -> bool:
        """True if the next run can use the process group: whole on every rank, and in step."""
        outcomes = self._outcomes
        if self.waiting or not all(o["intact"] for o in outcomes.values()):
            return False
        if len({o["made"] for o in outcomes.values()}) > 1:
            return False
        counts = {r: o.get("collectives", {}) for r, o in outcomes.items()}
        return all(
            len({counts[r].get(group, 0) for r in members if r in counts}) <= 1
            for group, members in self._meta["groups"].items()
        )

    @property
    def died(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [r for r, o in self._outcomes.items() if "died" in o]

    def _failed(self) -> bool:
        outcomes = self._outcomes.values()
        return bool(self._failing) or any("result" not in o and not o["spared"] for o in outcomes)

    def _until(self, condition: Callable[[], Any], timeout: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(condition, timeout)

    def _conclude(self) -> None:
        """Decide how it went."""
        self.seconds = time.perf_counter() - self._started
        outcomes = [self._outcomes.get(r, report.lost(r)) for r in self.ranks]
        self._note_ends(outcomes)
        if self._failed() or self.waiting:
            self._error = report.verdict(self.name, outcomes, self._order, self.trace)
        if self._deadlock and not any(o.get("error", {}).get("leaving") for o in outcomes):
            self._error = report.deadlock(self.name, self._deadlock, outcomes)
        if self._interrupted and self._ended.issuperset(self.died):
            stopped = self._meta.get("stopped", {}).items()
            who = {
                f"rank {n}" if int(n) in self.ranks else self._named(int(n)): how
                for n, how in stopped
            }
            self._error = report.interrupted(self.name, self._after, who)
        if self.lost and self._error is not None:
            self._error = RunError(f"{self.name} was ended: {self.lost}")

    def _announce(self) -> None:
        """Tell everybody that it is over."""
        if self._error is not None:
            self._error.run = self
        with self._telling:
            self._done.set()
            self.prints.end()
            for callback in list(self._subscribers):
                callback([])

    def _unpack_results(self) -> list[Any]:
        """The results by rank, read where somebody asks for them: their classes are the user's."""
        with self._reading:
            if self._unpacked is None:
                results = [self._read(self._outcomes.get(r, {})) for r in self.ranks]
                self._unpacked = results
        return self._unpacked

    def _read(self, outcome: dict[str, Any]) -> Any:
        if outcome.get("result") is None:
            return None
        try:
            return loads(outcome["result"])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._error = self._error or report.unreadable(outcome["rank"], outcome["of"], error)
            self._error.run = self
            return None

    def _note_ends(self, outcomes: list[dict[str, Any]]) -> None:
        """Add what the ranks said about themselves in the end to the trace."""

        def counts(key: str) -> dict[str, Any]:
            return {str(o["rank"]): o[key] for o in outcomes if o.get(key)}

        lost = {"notebook": self._dropped} if self._dropped else {}
        self._meta.update(
            dropped=counts("dropped") | lost,
            without_values=counts("without_values"),
            unwaited=counts("unwaited"),
            unseen=counts("unseen"),
            seconds=self.seconds,
            interrupted=self._interrupted,
            until=self.clock(time.monotonic()),
            ends=report.ends(outcomes),
        )
        self._trace = None
