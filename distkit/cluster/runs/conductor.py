"""Controls one run: handles its ranks' messages, detects deadlocks, and terminates the ranks.

When a rank fails, the others get a grace period to finish. They are then released and, if
necessary, killed. A :class:`RankController` manages the processes.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from distkit import imports
from distkit._format import RANK_NOUN
from distkit.cluster.notebook import line_label
from distkit.cluster.runs.outcome import Failure, Outcome, exit_cause, rank_ends
from distkit.cluster.runs.received import LiveTrace, OutputBuffer
from distkit.errors import DistkitError, RunError, RunInterrupted
from distkit.recording.encoding import DECODE_ERRORS, encode_rows, rows_in
from distkit.trace.info import Raising, Replacement, RunInfo

if TYPE_CHECKING:
    from distkit.diagnosis.rules import Finding
    from distkit.trace.trace import Trace

#: Grace period for the other ranks to fail or finish after one has failed [s].
GRACE = 0.3
#: Time from a rank's release until its process is killed [s].
RELEASE_TIMEOUT = 2.0
#: Timeout for a run to end after an interrupt [s].
INTERRUPT_TIMEOUT = GRACE + 2 * RELEASE_TIMEOUT

#: A run with more events is not diagnosed when it ends, unless a rank has died.
MAX_DIAGNOSED_EVENTS = 10_000

#: Maximum number of times that a process is replaced in a run. If it fails again, its failure is
#: assumed to be permanent.
MAX_REPLACEMENTS = 3

#: Interval between checks while some ranks are still computing [s]; doubled by each check that
#: finds no deadlock.
CHECK_INTERVAL = 1.0

#: The clause of error messages that describes the cluster's state after a failed run.
READY = "the cluster is ready for the next run"

# the first conversion is not thread-safe, and several threads convert outcomes
msgspec.convert({"rank": 0}, Outcome)


class RankController:
    """Interface to the processes of a run's ranks."""

    def open_gates(self, ranks: Iterable[int], count: int | None) -> None:
        """Open the gates of these ranks ``count`` times, or permanently if None."""

    def release(self, ranks: Iterable[int]) -> None:
        """Make these ranks abort their function and report their position."""

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill these ranks' processes; their exits are reported to the run."""

    def replace(self, run: Conductor, rank: int, incarnation: int) -> None:
        """Replace a rank that has exited, in a cluster with a parameter server."""

    def collect_events(self) -> None:
        """Collect the events that servers and the scheduler have not sent yet."""


class Conductor:
    """Controls the ranks of a run and keeps its state.

    Args:
        name: name of the function.
        number: number of the run; messages from other runs are ignored.
        ranks: the participating ranks.
        info: metadata of the cluster, for the trace.
        stepped: whether every rank pauses before each communication call.
        wait_forever: whether the run continues when its ranks are deadlocked.
        expected_exits: the ranks that ``dk.inject_faults`` will kill.
        conclusion: clause about the state of the cluster after the run, for error messages.
        is_cell: whether the run executes a ``%%ranks`` cell, whose processes persist.
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
        conclusion: str = READY,
        is_cell: bool = False,
    ) -> None:
        self.name, self.number, self.ranks = name, number, ranks
        self.stepped, self.wait_forever, self.is_cell = stepped, wait_forever, is_cell
        info = structs.replace(info, name=name)
        self.live, self.output = LiveTrace(info), OutputBuffer(info.rank_noun)
        self.watchdog = DeadlockWatchdog()
        self.deadlock: list[Finding] = []
        #: Outcome of each rank, in the order in which the ranks ended.
        self.outcomes: dict[int, Outcome] = {}
        self._expected_exits = set(expected_exits)
        self._killed_ranks: set[int] = set()  # ranks whose processes were killed intentionally
        #: Processes that exited and were replaced: node, name, cause and time.
        self.replacements: list[Replacement] = []
        self._pending_replacements: dict[int, str] = {}  # ranks that died, and the causes
        self._on_crash = "halt"  # the KVStore's policy for a rank that dies
        self._interrupted, self._conclusion = False, conclusion
        self.abandoned = ""  # why the run was ended, regardless of its ranks' states
        self.changed = threading.Condition()
        #: Called after a rank has ended, or has been replaced.
        self.on_end: Callable[[], None] = lambda: None
        self.finished_event, self.finish_lock = threading.Event(), threading.RLock()
        self._start_time = self.seconds = 0.0
        self.error: RunError | None = None
        self._interrupt_findings: list[Finding] = []  # at the time of an interrupt
        self._trace: Trace | None = None  # set once it is complete

    # -- state -------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if the run is over, whether or not it succeeded."""
        return self.finished_event.is_set()

    @property
    def ending(self) -> bool:
        """True if the run has finished or has been interrupted."""
        return self.finished or self._interrupted

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not ended yet."""
        return [r for r in self.ranks if r not in self.outcomes]

    @property
    def failed(self) -> bool:
        """True if a rank has failed, and the others cannot continue without it."""
        return any(
            o.error or (o.died and self._on_crash != "continue") for o in self.outcomes.values()
        )

    @property
    def died(self) -> list[int]:
        """The ranks whose processes exited early, except for ranks that the run itself killed."""
        return [r for r, o in self.outcomes.items() if o.died]

    @property
    def intact(self) -> bool:
        """True if the next cell can use the process group: all ranks are intact and in sync."""
        outcomes = self.outcomes
        return (
            not self.unfinished
            and all(o.intact for o in outcomes.values())
            and all(
                len({outcomes[r].collectives.get(group, 0) for r in members if r in outcomes}) <= 1
                for group, members in self.live.info.groups.items()
            )
        )

    def incarnation(self, node: int) -> int:
        """Return the number of times that this node has been replaced during this run."""
        return sum(r.node == node for r in self.replacements)

    @property
    def trace(self) -> Trace:
        """The trace of the events received so far."""
        if self._trace is not None:
            return self._trace
        from distkit.trace.trace import without_idle_servers  # lazy: see LiveTrace.snapshot

        final_ends = self.live.info.ends  # read first: events may arrive while the trace is built
        ends = final_ends or rank_ends(self.outcomes.values())
        trace = self.live.snapshot(ends, self.replacements)
        if final_ends:
            if trace.info.clocks:
                trace = imports.load("distkit_hosts.causality").enforce_causality(trace)
            self._trace = trace = trace if self.stepped else without_idle_servers(trace)
        return trace

    @property
    def findings(self) -> list[Finding]:
        """The deadlock that ended the run, or the findings of a diagnosis."""
        return self.deadlock or self.trace.diagnose()

    # -- interruption ------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt the function on every rank."""
        with self.changed:
            self._interrupted = True
            self.changed.notify_all()

    def abandon(self, reason: str) -> None:
        """End the run, regardless of its ranks' states; its error quotes ``reason``."""
        self._killed_ranks.update(self.ranks)
        self.abandoned = self.abandoned or reason
        self.interrupt()

    # -- messages from the ranks ------------------------------------------------

    def handle_event(self, rank: int, kind: str, data: Any) -> None:
        """Handle a message from a rank or a server."""
        match kind:
            case "rows":
                self.live.add(rank, *data)
            case "text":
                self.output.add(rank, *data)
            case "replaced":
                self._begin_process(rank, exit_cause(data), time.monotonic())
            case "outcome":
                self.add_outcome(msgspec.convert(data, Outcome))
            case "waits":
                with self.changed:
                    self.watchdog.waits[rank] = data
                    self.changed.notify_all()
            case "on_crash":
                self._on_crash = data
            case "group":
                name, members = data
                self.live.add_metadata("groups", name, [*members])
            case "raising":
                seq, text, where = data
                self.live.add_metadata(kind, rank, Raising(seq, text, line_label(where)))
            case "threads":
                self.live.add_metadata(kind, rank, [*self.live.info.threads.get(rank, ()), data])
            case "unreduced":
                self.live.add_metadata(kind, rank, data)

    def add_outcome(self, outcome: Outcome) -> None:
        """Record the outcome of a rank, unless it already has one."""
        with self.changed:
            self.outcomes.setdefault(outcome.rank, outcome)
            self.changed.notify_all()
        self.on_end()

    def add_death(self, rank: int, status: int, files: Path) -> None:
        """Record the exit of a rank's process.

        ``files`` is the path of its black box and its log, without the suffix.
        """
        if self.finished:  # the cluster has killed the process
            return
        died_at, log = self.live.clock(time.monotonic()), self._read_files(rank, files)
        if rank in self._killed_ranks:
            self.add_outcome(Outcome(rank, error=Failure("Released", time=died_at, released=True)))
        else:
            cause = exit_cause(status, expected=rank in self._expected_exits, log=log)
            if not self._request_replacement(rank, cause):
                self.add_outcome(Outcome(rank, died=cause, died_at=died_at, log=log))

    def _read_files(self, rank: int, files: Path) -> str:
        """Add the events in a rank's black box; return the end of its log."""
        with suppress(OSError, *DECODE_ERRORS):
            rows = rows_in(
                files.with_suffix(".box").read_bytes(), self.number, self.live.rows[rank]
            )
            self.live.add(rank, len(rows), encode_rows(rows))
        with suppress(OSError):
            return files.with_suffix(".log").read_text(errors="replace")[-20_000:]
        return ""

    def _request_replacement(self, rank: int, cause: str) -> bool:
        """Request a replacement of a rank if the KVStore's policy and the run's state allow it."""
        with self.changed:
            if (
                self._on_crash != "replace"
                or self.incarnation(rank) >= MAX_REPLACEMENTS
                or self.is_cell
                or self.stepped
                or self.ending
                or self.failed
                or self.deadlock
            ):
                return False
            self._pending_replacements[rank] = cause
            self.changed.notify_all()
            return True

    # -- control -----------------------------------------------------------------

    def conduct(self, controller: RankController) -> None:
        """Control the run until it ends; when one rank fails, release the others."""
        self._start_time = time.perf_counter()
        RANK_NOUN.set(self.live.info.rank_noun)  # for messages that this thread formats
        try:
            self._monitor(controller)
            if self.unfinished:
                self._release(controller)
            controller.collect_events()
            self._conclude()
        except Exception as error:  # callers must not wait forever after a bug in distkit
            traceback.print_exc(file=sys.__stderr__)
            self.error = RunError(
                f"internal error in distkit while running {self.name} "
                f"({type(error).__name__}: {error}). The ranks were killed. Please report this bug."
            )
            self._kill_ranks(controller, self.unfinished)
        finally:
            with self.finish_lock:
                self.finished_event.set()
                self.output.end()
                self.live.end()

    def _is_over(self) -> bool:
        return self._interrupted or self.failed or not self.unfinished

    def _monitor(self, controller: RankController) -> None:
        """Replace ranks that die, until the run is over, interrupted or deadlocked.

        The run is over once all ranks have ended, or one has failed.
        """
        while not self.deadlock:
            self._wait_until(
                lambda: (
                    self._is_over()
                    or self._pending_replacements
                    or (not self.wait_forever and self.watchdog.is_due(self.unfinished))
                )
            )
            if self._is_over():
                return
            if self._pending_replacements:
                self._replace(controller, *self._pending_replacements.popitem())
            else:
                self.deadlock = self.watchdog.check(self.trace, self.unfinished)

    def _release(self, controller: RankController) -> None:
        """Release the remaining ranks and kill those that do not end in time."""
        if not (self._interrupted or self.deadlock):
            self._wait_until(lambda: self._interrupted or not self.unfinished, GRACE)
        if self._interrupted and self.live.event_count <= MAX_DIAGNOSED_EVENTS:
            self._interrupt_findings = self.findings  # before the release, which adds to the trace
        if self._interrupted or self.deadlock:
            self.live.released_at = time.monotonic()
        controller.release(self.unfinished)
        self._wait_until(lambda: not self.unfinished, RELEASE_TIMEOUT)
        self._kill_ranks(controller, self.unfinished)
        self._wait_until(lambda: not self.unfinished, RELEASE_TIMEOUT)

    def _kill_ranks(self, controller: RankController, ranks: Collection[int]) -> None:
        self._killed_ranks.update(ranks)
        controller.kill(ranks)

    def _wait_until(self, condition: Callable[[], Any], timeout: float | None = None) -> None:
        with self.changed:
            self.changed.wait_for(condition, timeout)

    def _replace(self, controller: RankController, rank: int, cause: str) -> None:
        """Replace a rank's process: fail its pending operations and start another process."""
        start = time.monotonic()
        self.live.fail_pending(rank, start)
        self._begin_process(rank, cause, start)
        self.on_end()
        self.watchdog.waits.pop(rank, None)
        self._expected_exits.discard(rank)
        try:
            controller.replace(self, rank, self.incarnation(rank))
        except DistkitError as error:
            self.add_outcome(
                Outcome(rank, died=f"{cause}; a replacement could not be started: {error}")
            )
        self.live.mark_replacement(rank, start, time.monotonic())
        self.on_end()

    def _begin_process(self, node: int, cause: str, start: float) -> None:
        """Record that a new process of this node starts and how the previous one exited."""
        self.live.begin_process(node)
        self.replacements.append(
            Replacement(node, self.live.info.ranks[node].name, cause, self.live.clock(start))
        )

    # -- conclusion ----------------------------------------------------------------

    def _conclude(self) -> None:
        """Determine the run's error; earlier checks take precedence."""
        self.seconds = time.perf_counter() - self._start_time
        unresponsive = [Outcome(r, died="no response") for r in self.unfinished]
        all_outcomes = [*self.outcomes.values(), *unresponsive]
        outcomes = sorted(all_outcomes, key=lambda o: o.rank)
        self._add_final_metadata(outcomes)
        if not (self.failed or unresponsive or self.deadlock or self._interrupted):
            return
        from distkit.cluster.runs import report  # lazy: it imports the diagnosis

        # assigned once: other threads read it during a long diagnosis
        if self.abandoned:
            self.error = RunInterrupted(
                "\n".join(
                    [
                        *map(str, report.notable(self._interrupt_findings)),
                        f"{self.name} was stopped: {self.abandoned.rstrip('.')}.",
                    ]
                )
            )
        elif self._interrupted and not self.died:
            self.error = report.interrupt_error(
                self.name, self._conclusion, outcomes, self._interrupt_findings
            )
        elif self.deadlock:
            self.error = report.deadlock_error(
                self.deadlock,
                report.with_state(f"{self.name} was stopped on all ranks", self._conclusion),
                self.trace,
            )
        elif self.failed or unresponsive:
            self.error = report.run_error(self.name, all_outcomes, self.trace)

    def _add_final_metadata(self, outcomes: list[Outcome]) -> None:
        """Add to the trace the metadata that the ranks reported when they ended."""

        def reported(name: str) -> dict[Any, Any]:
            return {o.rank: value for o in outcomes if (value := o.recorded.get(name))}

        self.live.update(
            dropped=reported("dropped") | ({"notebook": n} if (n := self.live.dropped) else {}),
            without_values=reported("without_values"),
            unwaited={rank: [*calls] for rank, calls in reported("unwaited").items()},
            unrecorded=reported("unrecorded"),
            interrupted=self._interrupted and not self.abandoned,
            until=self.live.clock(time.monotonic()),
            ends=rank_ends(outcomes),
        )


# -- deadlocks -------------------------------------------------------------------------------------


class DeadlockWatchdog:
    """Detects deadlocks among the ranks of one run from the waits that they report.

    A waiting rank periodically reports the start of its wait. If the waits of several ranks include
    the same instant, the trace contains everything that these ranks did before it, and none of them
    was running at that instant. A deadlock at that instant is permanent, so a correct program is
    never reported.
    """

    def __init__(self) -> None:
        #: For each rank: the operations in which its threads are waiting, the start of the wait,
        #: and a later time at which the rank was still waiting.
        self.waits: dict[int, tuple[tuple[int, ...], float, float]] = {}
        self._harmless_key: object = None  # the waits at the last check that found no deadlock
        self._key: object = None
        self._key_time = self._checked_at = 0.0
        self._interval = CHECK_INTERVAL / 2

    def is_due(self, ranks: Collection[int]) -> bool:
        """Return True if a check is due; ``ranks`` are the ranks that have not ended."""
        waiting_ranks = [r for r in ranks if r in self.waits]
        key = tuple((r, self.waits[r][0]) for r in waiting_ranks), tuple(ranks)
        if key != self._key:
            self._key, self._key_time = key, time.monotonic()
        if not waiting_ranks:
            return False
        if key == self._harmless_key:  # check again later: some findings depend on time
            return time.monotonic() - self._checked_at > self._interval
        if len(waiting_ranks) == len(ranks):
            return self._is_simultaneous(waiting_ranks)
        return time.monotonic() - self._key_time > max(CHECK_INTERVAL, self._interval)

    def check(self, trace: Trace, ranks: Collection[int]) -> list[Finding]:
        """Return the deadlocks that are certain; ``ranks`` are the ranks that have not ended."""
        deadlocks = [
            f for f in trace.diagnose() if f.hang and not self._is_progressing(trace, ranks)
        ]
        if not deadlocks:
            self._harmless_key, self._checked_at = self._key, time.monotonic()
            self._interval *= 2
        return [
            f for f in deadlocks if self._is_simultaneous({*f.waiting, *f.culprits} & set(ranks))
        ]

    def _is_progressing(self, trace: Trace, ranks: Collection[int]) -> bool:
        """Return True if a rank with several waiting threads may be able to continue."""
        waits = {
            (r, seq)
            for r in ranks
            for seq in self.waits.get(r, ((), 0, 0))[0]
            if len(self.waits[r][0]) > 1
        }
        if not waits:
            return False
        from distkit.diagnosis.evidence import Evidence

        graph = Evidence(trace).graph
        spans = [s for s in trace.spans if (s.rank, s.seq) in waits]
        return len(spans) < len(waits) or not all(map(graph.missing, spans))

    def _is_simultaneous(self, ranks: Iterable[int]) -> bool:
        """Return True if there is an instant at which all of these ranks were waiting."""
        waits = [self.waits.get(r) for r in ranks]
        reports = [w for w in waits if w is not None]
        return len(reports) == len(waits) > 0 and (
            max(since for _, since, _ in reports) <= min(until for *_, until in reports)
        )
