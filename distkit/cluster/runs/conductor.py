"""Conducts one run: receives what its ranks report, and ends them when one has failed.

When a rank fails, the others get a moment to finish. They are then released, and at last killed.
The processes belong to a :class:`RankController`.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from distkit import companions
from distkit.cluster.notebook import place
from distkit.cluster.runs import report
from distkit.cluster.runs.live_trace import LiveTrace
from distkit.cluster.runs.outcome import Failure, Outcome
from distkit.cluster.runs.prints import Prints
from distkit.cluster.runs.watchdog import DeadlockWatchdog
from distkit.diagnosis.diagnose import Finding
from distkit.errors import ClusterError, DistkitError, RunError
from distkit.events import Event
from distkit.recording import blackbox
from distkit.recording.plain import encode_rows
from distkit.trace.info import Raising, Replacement, RunInfo
from distkit.trace.trace import Trace

#: When one rank fails, the others get this long to fail or finish by themselves [s] …
GRACE = 0.3
#: … and after they were told to let go, this long until their processes are ended [s].
LET_GO = 2.0
#: A run that was interrupted is over after this time [s].
ENDS_WITHIN = GRACE + 2 * LET_GO

#: A run is looked through for mistakes, when it is over, if it has at most so many events.
LOOKED_AT = 10_000

#: What is said of a cluster after a run that failed.
READY = "the cluster is ready for the next run"


class RankController:
    """The owner of a run's ranks."""

    def release(self, ranks: Iterable[int]) -> None:
        """End what these ranks do, and have them report where they were."""
        raise NotImplementedError

    def end(self, ranks: Iterable[int]) -> None:
        """End these ranks' processes; their deaths are reported to the run."""
        raise NotImplementedError

    def replace(self, run: Conductor, rank: int, life: int) -> None:
        """Put another in the place of a rank that has ended: asked for with a parameter server."""
        raise NotImplementedError

    def settle(self) -> None:
        """All have ended: have whoever else holds events of the run hand them over."""


class Conductor:
    """All that is known of a run, from its beginning to its end.

    Args:
        name: of the function.
        number: of the run; messages of other runs do not count.
        ranks: which take part.
        info: what is known of the cluster, for the trace.
        stepped: every rank is paused before each of its communications.
        wait_forever: do not end it when its ranks wait for each other for ever.
        expected_exits: the ranks that ``dk.trouble`` is going to kill.
        afterwards: what can be done after it.
        is_cell: it runs a ``%%ranks`` cell, whose processes stay.
    """

    def __init__(
        self,
        name: str,
        number: int,
        ranks: list[int],
        info: RunInfo,
        *,
        stepped: bool = False,
        wait_forever: bool = False,
        expected_exits: Iterable[int] = (),
        afterwards: str = READY,
        is_cell: bool = False,
    ) -> None:
        self.name, self.number, self.ranks = name, number, ranks
        self.stepped, self.wait_forever, self.is_cell = stepped, wait_forever, is_cell
        self._expected_exits = set(expected_exits)
        self.live, self.prints = LiveTrace(structs.replace(info, name=name)), Prints()
        self.figures: list[tuple[int, bytes]] = []  # PNG pictures, not yet shown
        self.watchdog = DeadlockWatchdog()
        self.deadlock: list[Finding] = []
        #: How it ended on each rank, in the order in which they ended.
        self.outcomes: dict[int, Outcome] = {}
        self._killed: set[int] = set()  # ranks whose processes were ended on purpose
        #: How long those were silent that are ended for it [s].
        self.silent_for: dict[int, float] = {}
        #: Processes that ended and were replaced: node, name, how and when.
        self.replacements: list[Replacement] = []
        self._vacant: dict[int, str] = {}  # ranks to be replaced, and how they ended
        self._on_crash = "halt"  # of a rank that dies
        self._interrupted, self._afterwards = False, afterwards
        self.forked = False  # it is the run of this process's parent
        self.cluster_failure = ""  # why all ranks have ended at once, if their cluster is over
        self.changed = threading.Condition()
        self.on_end: Callable[[], None] = lambda: None  # a rank has ended, or begins again
        self.done, self.announcing = threading.Event(), threading.RLock()
        self._started, self.seconds = time.perf_counter(), 0.0
        self.error: RunError | None = None
        self._found: list[Finding] = []  # when it was interrupted
        self._trace: Trace | None = None  # once nothing more can come
        self._concluded = False  # every rank has said its last word

    # -- what is known -----------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if all ranks have ended, well or not."""
        return self.done.is_set()

    @property
    def ending(self) -> bool:
        """True if it is over, or was told to be."""
        return self.finished or self._interrupted

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [r for r in self.ranks if r not in self.outcomes]

    @property
    def failed(self) -> bool:
        """True if a rank has failed, and the others cannot go on without it."""
        ended = self.outcomes.values()
        return any(not o.returned and not o.tolerated for o in ended)

    @property
    def died(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [r for r, o in self.outcomes.items() if o.died]

    @property
    def intact(self) -> bool:
        """True if the next cell can use the process group: whole on every rank, and in step."""
        outcomes = self.outcomes
        if self.waiting or not all(o.intact for o in outcomes.values()):
            return False
        return all(
            len({outcomes[r].collectives.get(group, 0) for r in members if r in outcomes}) <= 1
            for group, members in self.live.info.groups.items()
        )

    def life(self, node: int) -> int:
        """The number of processes that had this place in this run before."""
        return sum(r.node == node for r in self.replacements)

    @property
    def replaced(self) -> list[Replacement]:
        """The replacements so far, in the trace's time."""
        clock = self.live.clock
        return [structs.replace(r, time=clock(r.time)) for r in self.replacements]

    @property
    def trace(self) -> Trace:
        """The communication of the ranks, as far as it has arrived."""
        if self._trace is not None:
            return self._trace
        whole = self._concluded  # asked first: the rest may arrive while this is put together
        ends = self.live.info.ends or report.ends(self.outcomes.values())
        trace = self.live.so_far(ends, self.replaced)
        if whole:
            if trace.info.clocks:
                trace = companions.load("distkit_hosts.causality").in_order(trace)
            self._trace = trace
        return trace

    @property
    def findings(self) -> list[Finding]:
        """The deadlock that ended it, or what a diagnosis of its trace finds."""
        return self.deadlock or self.trace.diagnose()

    @property
    def _is_short(self) -> bool:
        """True if to look through what has arrived takes no time."""
        return self.live.arrived <= LOOKED_AT

    @property
    def _stands(self) -> bool:
        """True if a rank is stopped, or waits in the call that is the last it has told of."""
        last = self.live.latest(self.ranks)
        return bool(self._stopped()) or any(self.watchdog.waits(r, seq) for r, seq in last.items())

    def check_owner(self) -> None:
        """Raise ClusterError in a process that was forked during the run: it hears nothing."""
        if self.forked:
            raise ClusterError(report.of_fork(self.name))

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Have all events handed over: those so far now, others from a thread; [] at the end."""
        unsubscribe = self.live.subscribe(callback)
        if self.finished:
            callback([])
        return unsubscribe

    # -- what its owners do ------------------------------------------------------

    def interrupt(self) -> None:
        """End the function on every rank, wherever it is."""
        with self.changed:
            self._interrupted = True
            self.changed.notify_all()

    def abandon(self, why: str) -> None:
        """The cluster is being stopped, or restarted, as ``why`` says: its ranks end."""
        self._killed.update(self.ranks)
        self._afterwards = why
        self.interrupt()

    # -- what arrives from the ranks --------------------------------------------

    def hear(self, rank: int, kind: str, what: Any) -> None:
        """One message of a rank's, or of a server's."""
        match kind:
            case "rows":
                self.live.add(rank, *what)
            case "text":
                self.prints.add(rank, *what)
            case "figure":
                self.figures.append((rank, what))
            case "stopped":
                self._hear_stop(rank, *what)
            case "replaced":
                how = report.cause(what, silent_for=self.silent_for.get(rank, 0.0))
                self.live.forget("stopped", rank)
                self._begin_life(rank, how, time.monotonic())
            case "outcome":
                self.live.forget("stopped", rank)  # whoever speaks continues
                self.add_outcome(msgspec.convert(what, Outcome))
            case "waits":
                with self.changed:
                    self.watchdog.hear(rank, *what)
                    self.changed.notify_all()
            case "on_crash":
                self._on_crash = what
            case "unreached":
                for said in self._links.hear(rank, self.live.info.ranks[rank].host, what):
                    self.prints.add(rank, "stderr", f"{said}\n")
            case "group":
                name, members = what
                self.live.note("groups", name, [*members])
            case "raising":
                seq, text, where = what
                self.live.note(kind, rank, Raising(seq, text, place(where)))
            case "threads":
                self.live.note(kind, rank, [*self.live.info.threads.get(rank, ()), what])
            case "unreduced" | "unused":
                self.live.note(kind, rank, what)

    @cached_property
    def _links(self) -> Any:
        return companions.load("distkit_hosts.links").Links()

    def _hear_stop(self, rank: int, number: int, since: float) -> None:
        """A process was stopped by this signal, then; with 0 it goes on."""
        self.live.note("silent_since", rank, self.live.clock(since))
        how = signal.Signals(number).name if number else ""
        was_stopped = self.live.forget("stopped", rank)
        if how:
            self.live.note("stopped", rank, how)
        if rank not in self.ranks:  # a server or the scheduler: a diagnosis tells
            return
        if how:
            pid = self.live.info.ranks[rank].pid
            self.prints.add(rank, "stderr", report.of_stop(rank, how, pid) + "\n")
        elif was_stopped:
            self.prints.add(rank, "stderr", f"rank {rank} continues\n")

    def _stopped(self) -> set[int]:
        return {*self.live.info.stopped}

    def add_outcome(self, outcome: Outcome) -> None:
        """A rank has ended the function; the first notice counts."""
        rank = outcome.rank
        with self.changed:
            if rank not in self.outcomes:
                outcome.tolerated = bool(outcome.died) and self._on_crash == "continue"
                self.outcomes[rank] = outcome
                self.changed.notify_all()
        self.on_end()

    def add_death(self, rank: int, status: int, files: Path) -> None:
        """A rank's process has ended; its black box and its log, ``files``, tell what it did."""
        if self.finished:  # its process was ended with its cluster
            return
        at, log = self.live.clock(time.monotonic()), self._read_last_words(rank, files)
        if rank in self._killed:
            self.add_outcome(Outcome(rank, error=Failure("Released", time=at, released=True)))
        else:
            silent = self.silent_for.get(rank, 0.0)
            asked = rank in self._expected_exits
            how = report.cause(status, asked=asked, silent_for=silent, log=log)
            if not self._vacate(rank, how):
                self.add_outcome(Outcome(rank, died=how, died_at=at, log=log))

    def _read_last_words(self, rank: int, files: Path) -> str:
        """Add the events in a rank's black box; returns the end of its log."""
        with suppress(OSError, *blackbox.DAMAGED):
            box = files.with_suffix(".box").read_bytes()
            last = blackbox.rows_in(box, self.number, self.live.rows[rank])
            self.live.add(rank, len(last), encode_rows(last))
        with suppress(OSError):
            return files.with_suffix(".log").read_text(errors="replace")[-20_000:]
        return ""

    def _vacate(self, rank: int, how: str) -> bool:
        """Have a rank replaced, if its store asks for that and there is still something to do."""
        with self.changed:
            if self._on_crash != "replace" or self.life(rank) >= report.MOST_REPLACEMENTS:
                return False
            if self.is_cell or self.ending or self.failed or self.deadlock:
                return False
            self._vacant[rank] = how
            self.changed.notify_all()
            return True

    # -- conducting --------------------------------------------------------------

    def conduct(self, controller: RankController) -> None:
        """See the run through to its end: when one rank fails, the others are released."""
        # while the ranks begin: an import at exit would hide that Ctrl-C ended the program
        importlib.import_module("distkit.trace.matching")
        try:
            self._watch_over(controller)
            if self.waiting:
                self._release(controller)
            controller.settle()
            self._conclude()
        except Exception as error:  # a bug of distkit must not leave callers waiting
            traceback.print_exc(file=sys.__stderr__)
            self.error = report.mistaken(self.name, error)
            self._kill(controller, self.waiting)
        finally:
            self._announce()

    def _is_over(self) -> bool:
        return self._interrupted or self.failed or not self.waiting

    def _watch_over(self, controller: RankController) -> None:
        """Wait until all have ended, one has failed or all are blocked; replace those that die."""
        while True:
            self._until(lambda: self._is_over() or self._vacant or self._may_be_stuck())
            if self._is_over():
                return
            if self._vacant:
                self._replace(controller, *self._vacant.popitem())
                continue
            if self._may_be_stuck() and self._is_stuck():
                return

    def _may_be_stuck(self) -> bool:
        return not self.wait_forever and self.watchdog.due(self.waiting)

    def _is_stuck(self) -> bool:
        """True if ranks wait for each other for ever."""
        self.deadlock = self.watchdog.judge(self.trace, self.waiting)
        return bool(self.deadlock)

    def _release(self, controller: RankController) -> None:
        """Release the ranks that still wait, and end those that do not let go."""
        if not (self._interrupted or self.deadlock):
            self._until(lambda: self._interrupted or not self.waiting, GRACE)
        if self._interrupted and (self._is_short or self._stands):
            self._found = self.findings  # before the release, which adds to the trace
        controller.release(self.waiting)
        self._kill(controller, self._stopped() & {*self.waiting})
        self._until_all_ended(LET_GO)
        self._kill(controller, self.waiting)
        self._until_all_ended(LET_GO)

    def _kill(self, controller: RankController, these: Collection[int]) -> None:
        self._killed.update(these)
        controller.end(these)

    def _until(self, condition: Callable[[], Any], timeout: float | None = None) -> None:
        with self.changed:
            self.changed.wait_for(condition, timeout)

    def _until_all_ended(self, timeout: float) -> None:
        self._until(lambda: not self.waiting, timeout)

    def _replace(self, controller: RankController, rank: int, how: str) -> None:
        """A rank's process has ended: what it was in failed, and another begins."""
        began = time.monotonic()
        self.live.fail_pending(rank, began)
        self._begin_life(rank, how, began)
        self.on_end()
        self.watchdog.forget(rank)
        self._expected_exits.discard(rank)
        self.silent_for.pop(rank, None)
        try:
            controller.replace(self, rank, self.life(rank))
        except DistkitError as error:
            died = f"{how}; a replacement could not be started: {error}"
            self.add_outcome(Outcome(rank, died=died))
        self.live.mark_replacement(rank, how, began, time.monotonic())
        self.on_end()

    def _begin_life(self, node: int, how: str, at: float) -> None:
        """Another process begins in this place; the one before ended so."""
        self.live.begin_anew(node)
        name = self.live.info.ranks[node].name
        self.replacements.append(Replacement(node, name, how, at))

    # -- how it went ---------------------------------------------------------------

    def _conclude(self) -> None:
        """Decide how it went; the latest reason is the one that counts."""
        self.seconds = time.perf_counter() - self._started
        no_answer = [Outcome(r, died="no answer") for r in self.waiting]
        ended = [*self.outcomes.values(), *no_answer]
        outcomes = sorted(ended, key=lambda o: o.rank)
        self._note_ends(outcomes)
        error = self.error
        if self.failed or no_answer:
            error = report.verdict(self.name, ended, self.trace)
        if self.deadlock:
            error = report.deadlock(self.name, self.deadlock, outcomes, self._afterwards)
        if self._interrupted and not self.died:
            found = self._found or (self.findings if self._is_short else [])
            error = report.interrupted(self.name, self._afterwards, outcomes, found)
        if self.cluster_failure and error is not None:
            error = RunError(f"{self.name} was ended: {self.cluster_failure}")
        self.error = error  # at once: others read it while a long trace is diagnosed

    def _note_ends(self, outcomes: list[Outcome]) -> None:
        """Add what the ranks said about themselves in the end to the trace."""

        def reported(name: str) -> dict[Any, Any]:
            return {o.rank: getattr(o, name) for o in outcomes if getattr(o, name)}

        lost = {"notebook": self.live.dropped} if self.live.dropped else {}
        self.live.update(
            dropped=reported("dropped") | lost,
            without_values=reported("without_values"),
            unwaited=reported("unwaited"),
            unseen=reported("unseen"),
            seconds=self.seconds,
            interrupted=self._interrupted,
            until=self.live.clock(time.monotonic()),
            ends=report.ends(outcomes),
        )
        self._concluded = True

    def _announce(self) -> None:
        """Tell everybody that it is over."""
        with self.announcing:
            self.done.set()
            self.prints.end()
            self.live.end()
