"""Follow a run of another launcher by reading the files that its ranks write."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from distkit._format import joined, named
from distkit.cluster.runs import report
from distkit.cluster.runs.run import Run, draw_waits
from distkit.cluster.runs.stepper import Stepper
from distkit.cluster.runs.watchdog import DeadlockWatchdog
from distkit.diagnosis import rules
from distkit.diagnosis.diagnose import Finding, diagnose
from distkit.errors import DeadlockError, RunError, StepError, TraceFileError
from distkit.events import Event
from distkit.trace.calls import raised_at
from distkit.trace.info import RankEnd, RunInfo
from distkit.trace.log import EventLog
from distkit.trace.trace import Trace
from distkit_hosts.torchrun import merge, rankfile
from distkit_hosts.torchrun.attached import FOLDER
from distkit_hosts.torchrun.others import AttachedRanks, AttachedRun, outcome

#: Polling interval [s], and its minimum as a multiple of the last read's duration.
PERIOD, READ_MULTIPLE = 0.2, 5
#: Maximum delay of another machine's writes to a shared folder [s].
MAX_DELAY = 10.0


def follow(folder: str | Path = FOLDER, *, timeout: float = 60.0) -> Following:
    """Follow ranks that torchrun, ``srun`` or ``mpiexec`` has started, while they run.

    The ranks are recorded by ``distkit trace -- torchrun …`` or :func:`distkit_hosts.record`. The
    result displays a live timeline, and can be passed to other views: ``dk.Stage(following)``.
    Ranks on this machine can be stepped through and stopped; ranks on other machines are followed
    through a shared folder. The call prints a message and waits if not all ranks have started.

    Args:
        folder: the folder of the ranks' files, on this machine or shared with theirs. If it has
            several runs, the latest is used.
        timeout: how long to wait for all ranks to start [s].

    Raises:
        TimeoutError: not all ranks started in time.

    Example:
        >>> import distkit as dk
        >>> run = dk.hosts.follow("trace")                    # doctest: +SKIP
        >>> run.diagnose()                              # doctest: +SKIP
        >>> run.step().next()                           # doctest: +SKIP
    """
    end, announced = time.monotonic() + timeout, False
    while True:
        following = Following(Path(folder))
        if following.whole:
            return following
        if not announced:
            message = f"Waiting up to {timeout:.0f} s for all ranks to start"
            print(f"{message} in {Path(folder).absolute()}.", flush=True)
            announced = True
        if time.monotonic() > end:
            raise TimeoutError(
                f"{following.begun} in {Path(folder).absolute()} after {timeout:.0f} s. Start them "
                f"with `distkit trace --out {folder} -- torchrun …`, pass the folder that was "
                "named there, or wait longer with timeout=…."
            )
        time.sleep(PERIOD)


class Following:
    """A run of another launcher, read from its ranks' files, with the attributes of a live Run.

    :meth:`step` and :meth:`interrupt` reach the ranks of this machine through their sockets. The
    ranks continue when this kernel ends.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listeners: list[Callable[[list[Event]], None]] = []
        self._sent = set[tuple[int, int, str]]()  # the events sent to listeners
        self._reading, self._polls = threading.RLock(), False
        self._sizes, self._read = dict[Path, int](), 0.0  # of the files, when they were read
        self._grown_at = dict[Path, float]()  # when each file was last seen to grow
        self._trace, self._records = Trace(), list[rankfile.Record]()
        self._generation, self._watchdog = 0, DeadlockWatchdog()
        self._deadlock: list[Finding] = []
        self._ending = False  # after interrupt()
        self._control: tuple[AttachedRanks, Stepper] | None = None  # of the current generation
        self._refresh()

    @property
    def trace(self) -> Trace:
        """The communication of all ranks so far."""
        with self._reading:
            self._refresh()
            return self._trace

    @property
    def whole(self) -> bool:
        """Whether all ranks have started."""
        info = self._trace.info
        return bool(info.ranks) and len(info.ranks) >= info.world_size

    @property
    def begun(self) -> str:
        """The number of ranks that have started, as text."""
        known, size = len(self._trace.info.ranks), self._trace.info.world_size
        return f"{known} of {size} ranks have started" if size else "no rank has started"

    @property
    def finished(self) -> bool:
        """Whether all ranks have ended and their launcher does not restart them."""
        with self._reading:
            self._refresh()
            return self._is_over()

    def _is_over(self) -> bool:
        if not self.whole or len(self._trace.info.ends) < len(self._trace.info.ranks):
            return False
        here = [r.about for r in self._records if rankfile.is_here(r.about)]
        return not any(
            a["launcher"] == "torchrun" and rankfile.is_running(a["parent"]) for a in here
        )

    def diagnose(self) -> list[Finding]:
        """Return the mistakes so far: which rank waits for which, and why."""
        return self.trace.diagnose()

    @property
    def findings(self) -> list[Finding]:
        """The permanent deadlock of the ranks, or else the mistakes so far."""
        trace = self.trace
        return self._deadlock or trace.diagnose()

    @property
    def ends(self) -> dict[int, str]:
        """How each ended rank ended: "returned", "raised ValueError: … at train.py:7"."""
        return {rank: _describe_end(end) for rank, end in self.trace.info.ends.items()}

    def wait(self, timeout: float | None = None) -> Following:
        """Wait until all ranks have ended and their launcher does not restart them.

        Raises:
            RankError: the program raised on a rank, or a rank died.
            DeadlockError: ranks wait for each other forever, or did until a connection broke.
            TimeoutError: ``timeout`` seconds have passed.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            began = time.monotonic()
            if self.finished:
                break
            if self._deadlock and not self._ending:
                state = "The ranks still wait: run.interrupt() ends those on this machine."
                raise self._deadlocked(self._deadlock, state)
            if end is not None and began > end:
                raise TimeoutError(f"{self._name} still runs after {timeout} s, and continues")
            _pause(began)
        trace = self._trace
        outcomes = [outcome(rank, end) for rank, end in trace.info.ends.items()]
        error = report.verdict(self._name, outcomes, trace)
        if hangs := self._deadlock or (_ended_hangs(trace) if error is not None else []):
            raise self._deadlocked(hangs, "All ranks have ended.") from error
        if error is not None:
            raise error
        return self

    def _deadlocked(self, hangs: list[Finding], state: str) -> DeadlockError:
        error = report.deadlock(hangs, state)
        error.draw = lambda: draw_waits(self._trace)
        return error

    # -- the ranks of this machine --------------------------------------------------------------

    def step(self) -> Stepper:
        """Pause each rank before its next communication, and return a stepper.

        Time limits of the program still apply. ``stepper.let_go()`` lets the ranks continue by
        themselves, and so does the end of this kernel; ``stepper.stop()`` ends them. Restarted
        ranks are not paused until the next call.

        Raises:
            StepError: a rank has ended, is on another machine, or has no socket.
            RunError: a rank does not answer.
        """
        self._refresh()
        ranks = self._ranks()
        blocked = {rank: why for rank, record in ranks.items() if (why := _obstacle(record))}
        if blocked:
            raise StepError(
                f"{self._name} cannot be stepped through from here: {named(blocked)} "
                f"{joined(sorted({*blocked.values()}))}. All ranks must run on the notebook's "
                "machine, as the same user; views and findings need only the folder."
            )
        controller, stepper = self._connect(ranks)
        controller.step()
        try:
            return stepper.settle()
        except KeyboardInterrupt:
            stepper.let_go()
            raise

    def interrupt(self) -> None:
        """End the program on the ranks of this machine, wherever they wait.

        Each rank raises an error with the reason, such as a deadlock. The launcher then decides:
        torchrun ends the other ranks, or restarts all with ``--max-restarts``.

        Raises:
            RunError: no rank is on this machine, or one does not answer.
        """
        hangs = [str(f) for f in self.findings if f.hang]
        local = {r: record for r, record in self._ranks().items() if not _obstacle(record)}
        if not local:
            raise RunError(
                f"no rank of {self._name} can be reached: they have ended, or are on other "
                "machines. Stop their launcher there."
            )
        controller, stepper = self._connect(local)
        controller.why = "\n".join(["ended by a notebook that follows the run", *hangs])
        self._ending = True
        stepper.run.interrupt()

    def _ranks(self) -> dict[int, rankfile.Record]:
        return merge.starts_of(self._records)[-1]

    def _connect(self, ranks: dict[int, rankfile.Record]) -> tuple[AttachedRanks, Stepper]:
        """Connect to these ranks, unless already connected."""
        if self._control is None or self._control[1].finished:
            info = self._trace.info
            run = AttachedRun(ranks, RunInfo(world_size=info.world_size, ranks=info.ranks))
            controller = AttachedRanks(run, ranks)
            self._control = controller, Stepper(Run(run), controller)
            threading.Thread(target=run.conduct, args=(controller,), daemon=True).start()
        return self._control

    # -- listeners ------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Call ``callback`` with past events, then new ones (from a thread), and [] at the end."""
        with self._reading:
            over = self._publish()
            if self._trace.events:
                callback(list(self._trace.events))
            if over:
                callback([])
                return lambda: None
            self._listeners.append(callback)
            if not self._polls:
                self._polls = True
                threading.Thread(target=self._poll, name="distkit-follow", daemon=True).start()
        return partial(self._unsubscribe, callback)

    def _unsubscribe(self, callback: Callable[[list[Event]], None]) -> None:
        if callback in self._listeners:  # a restart of the ranks removes all
            self._listeners.remove(callback)

    def __repr__(self) -> str:
        state = "ended" if self.finished else "deadlocked" if self._deadlock else "running"
        ranks, events = len(self._trace.info.ranks), len(self._trace.events)
        ends = [f"rank {rank} {how}" for rank, how in self.ends.items() if how != "returned"]
        state = ", ".join([state, *ends])
        return f"<Following {self._folder}: {ranks} ranks, {events} events, {state}>"

    @property
    def _name(self) -> str:
        return self._trace.info.name

    def _ipython_display_(self) -> None:
        from distkit.views import Timeline

        Timeline(self)._ipython_display_()

    # -- the thread -----------------------------------------------------------------------------

    def _poll(self) -> None:
        while True:
            began = time.monotonic()
            with self._reading:
                self._polls = bool(self._listeners) and not self._publish()
                if not self._polls:
                    return
            _pause(began)

    def _publish(self) -> bool:
        """Send new events to the listeners, and [] at the end; return whether all is over."""
        over = self.finished
        new = [e for e in self._trace.events if (e.rank, e.seq, e.state.value) not in self._sent]
        self._sent.update((e.rank, e.seq, e.state.value) for e in new)
        for callback in list(self._listeners):
            if new:
                callback(new)
            if over:
                callback([])
        return over

    def _refresh(self) -> None:
        """Read the files, if they have grown or a rank may have ended without a report."""
        with self._reading:
            files = rankfile.find_files([self._folder]) if self._folder.is_dir() else []
            sizes = {path: path.stat().st_size for path in files}
            now = time.monotonic()
            self._grown_at |= {path: now for path in files if sizes[path] != self._sizes.get(path)}
            due = self._read + merge.RECENT  # when a silent rank counts as ended
            if not files or (sizes == self._sizes and (self._is_over() or now < due)):
                return
            try:
                remote = {r.path for r in self._records if r.about["clock"] != rankfile.clock()}
                delay = {path: MAX_DELAY if path in remote else merge.RECENT / 2 for path in files}
                self._records = [
                    rankfile.read(path, is_growing=now - self._grown_at[path] < delay[path])
                    for path in files
                ]
                self._trace, self._sizes = merge.merged_trace(self._records, Trace), sizes
                self._read = now
            except TraceFileError:  # a rank has just created its file
                return
            self._watch()

    def _watch(self) -> None:
        """Check whether the ranks wait for each other forever."""
        info = self._trace.info
        generation = len(merge.starts_of(self._records))
        if generation != self._generation:
            if self._generation:  # a view shows one start
                for callback in self._listeners:
                    callback([])
                self._listeners.clear()
                self._sent.clear()
            self._generation, self._watchdog = generation, DeadlockWatchdog()
            self._deadlock, self._ending = [], False
        for rank, wait in info.waits.items():
            self._watchdog.record_wait(rank, wait.seqs, wait.since, wait.until)
        running = [r for r in info.ranks if r not in info.ends]
        if not self._deadlock and self.whole and self._watchdog.due(running):
            self._deadlock = self._watchdog.judge(self._trace, running)


def _ended_hangs(trace: EventLog) -> list[Finding]:
    """Return the hangs that ended when a rank left and connections broke.

    Return [] if a rank failed by itself, because the others may wait for that rank.
    """
    findings = diagnose(trace)
    failed = any(f.code in (rules.raised.code, rules.died.code) for f in findings)
    return [] if failed else [f for f in findings if f.hang]


def _pause(began: float) -> None:
    """Wait before the next read, longer if reads are slow."""
    time.sleep(max(PERIOD, READ_MULTIPLE * (time.monotonic() - began)))


def _obstacle(record: rankfile.Record) -> str:
    """Return the reason why this process cannot connect to a rank; "" if it can."""
    if record.fault or "end" in record.notes:
        return "have ended"
    if not rankfile.is_here(record.about):
        return f"are on {record.about['host']}"
    path = Path(record.about.get("line", ""))
    return "" if _is_ours(path.parent) and path.is_socket() else "have no socket for this user"


def _is_ours(folder: Path) -> bool:
    """Return True if a folder belongs to this user, and others have no access."""
    with suppress(OSError):
        status = os.lstat(folder)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        return private and status.st_uid == os.getuid()
    return False


def _describe_end(end: RankEnd) -> str:
    text = end.how + (f" ({end.text})" if end.how == "died" else f" {end.text}")
    return raised_at(text.rstrip(), end.where)
