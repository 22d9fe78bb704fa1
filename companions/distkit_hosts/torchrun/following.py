"""Follow a run that another launcher started, through the files of its ranks, and control it.

The files contain the events of all ranks, on this machine and on others. Ranks on this machine can
also be paused and stopped through their sockets.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit._format import joined, named
from distkit.cluster.processes.channel import Channel
from distkit.cluster.runs import report
from distkit.cluster.runs.conductor import Conductor, RankController
from distkit.cluster.runs.outcome import CONNECTION_BROKEN, Failure, Frame, Outcome
from distkit.cluster.runs.run import Run
from distkit.cluster.runs.stepper import Stepper
from distkit.errors import RunError, StepError, TraceFileError
from distkit.recording.encoding import encode_rows
from distkit.trace.calls import raised_at
from distkit.trace.info import RankEnd, RunInfo
from distkit.trace.trace import Trace
from distkit_hosts.torchrun import merge, rankfile
from distkit_hosts.torchrun.attached import FOLDER
from distkit_hosts.torchrun.rankfile import Record

#: The time between polls is at least ``POLL_INTERVAL`` seconds and at least ``READ_MULTIPLE`` times
#: the duration of the last read.
POLL_INTERVAL, READ_MULTIPLE = 0.05, 5
#: Maximum time until another machine's writes appear in a shared folder [s].
MAX_DELAY = 10.0
#: Timeout for a rank's reply [s]; a suspended or already controlled rank does not reply.
REPLY_TIMEOUT = 5.0
#: Entries of a rank's file that a run handles like messages from a cluster's rank.
_MESSAGES = "group", "raising", "threads", "unreduced"
#: The reason that a released rank prints.
_RELEASED = "ended by a notebook that follows the run"


def follow(folder: str | Path = FOLDER, *, timeout: float = 60.0) -> Following:
    """Follow ranks that torchrun, ``srun`` or ``mpiexec`` has started, while they are running.

    The ranks are recorded by ``distkit trace -- torchrun …`` or :func:`distkit_hosts.record`. The
    result displays a live timeline, and can be passed to other views: ``dk.Stage(following)``.
    Ranks on this machine can be stepped through and stopped; ranks on other machines are followed
    through a shared folder. The call prints a message and waits if not all ranks have started.
    After the launcher has restarted the ranks, call this function again.

    Args:
        folder: the folder with the ranks' files, on this machine or shared with theirs. If it
            contains several runs, the latest is used.
        timeout: how long to wait for all ranks to start [s].

    Raises:
        TimeoutError: not all ranks started in time.

    Example:
        >>> import distkit as dk
        >>> run = dk.hosts.follow("trace")                    # doctest: +SKIP
        >>> run.findings                                # doctest: +SKIP
        >>> run.step().next()                           # doctest: +SKIP
    """
    deadline, path = time.monotonic() + timeout, Path(folder)
    ranks = _latest_attempt(path)
    if _missing(ranks):
        message = f"Waiting up to {timeout:.0f} s for all ranks to start"
        print(f"{message} in {path.absolute()}.", flush=True)
    while missing := _missing(ranks):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{missing} in {path.absolute()} after {timeout:.0f} s. Start them with `distkit "
                f"trace --out {folder} -- torchrun …`, pass the folder of that command, or "
                "wait longer with timeout=…."
            )
        time.sleep(POLL_INTERVAL)
        ranks = _latest_attempt(path)
    return Following(ranks)


def _missing(ranks: Mapping[int, Record]) -> str:
    """Describe how many ranks have started; "" if all have."""
    size = max((record.world_size for record in ranks.values()), default=0)
    if not ranks:
        return "no rank has started"
    return f"{len(ranks)} of {size} ranks have started" if len(ranks) < size else ""


def _latest_attempt(folder: Path) -> dict[int, Record]:
    """Return the latest attempt in a folder, without ranks whose numbers are not known yet."""
    try:
        files = rankfile.find_files([folder]) if folder.is_dir() else []
        records = [rankfile.read(path) for path in files]
        known = [r for r in records if r.header["launcher"] != "none" or "world" in r.notes]
        return merge.attempts_of(known)[-1]
    except TraceFileError:  # no file yet, or a rank has just created its file
        return {}


class Following(Run):
    """One attempt of a run that another launcher started, with the attributes of a cluster's run.

    :meth:`step` and :meth:`interrupt` reach the ranks on this machine through their sockets. The
    ranks continue when this kernel ends.

    Args:
        records: the content of the ranks' files, by rank.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self._attached, self._control = AttachedRun(records), SocketControl(records)
        super().__init__(self._attached)
        self._stepper: Stepper | None = None
        self._attached.poll()
        threading.Thread(target=self._attached.conduct, args=(self._control,), daemon=True).start()
        if self._attached.unfinished:
            threading.Thread(target=self._poll, name="distkit-follow", daemon=True).start()
        else:  # the run has already ended
            self._attached.finished_event.wait()

    @property
    def ends(self) -> dict[int, str]:
        """How each rank ended, such as "returned" or "raised ValueError: … at train.py:7"."""
        return {rank: _describe_end(end) for rank, end in self.trace.info.ends.items()}

    def wait(self, timeout: float | None = None) -> Following:
        """Wait until all ranks have ended.

        Raises:
            RankError: the program raised on a rank, or a rank died.
            DeadlockError: ranks would wait for each other forever.
            TimeoutError: ``timeout`` seconds have passed.
        """
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while not self.finished:
            if self._attached.deadlock and not self._attached.ending:
                state = "The ranks are still waiting: run.interrupt() ends those on this machine."
                raise report.deadlock_error(self._attached.deadlock, state, self.trace)
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} is still running after {timeout} s, and continues")
            self._attached.finished_event.wait(POLL_INTERVAL)
        if self.error is not None:
            raise self.error
        return self

    def step(self) -> Stepper:
        """Pause each rank before its next communication call and return a stepper.

        Time limits of the program still apply. ``stepper.resume_all()`` or the exit of this kernel
        resumes the ranks; ``stepper.stop()`` terminates them.

        Raises:
            StepError: a rank has ended, is on another machine, or has no socket.
            RunError: a rank does not respond.
        """
        obstacles = self._obstacles()
        if obstacles:
            raise StepError(
                f"{self.name} cannot be stepped through from here ({named(obstacles)}: "
                f"{joined(sorted({*obstacles.values()}))}). All ranks must run on the notebook's "
                "machine, as the same user; views and findings need only the folder."
            )
        self._control.connect(self.ranks)
        if self._stepper is None:
            self._stepper = Stepper(self, self._control)
        self._control.step()
        try:
            return self._stepper.settle()
        except KeyboardInterrupt:
            self._stepper.resume_all()
            raise

    def interrupt(self) -> None:
        """Stop the ranks on this machine, whether they are computing or waiting.

        Each rank prints its position and the reason, such as a deadlock, and exits with status 1.
        The launcher then decides: torchrun terminates the other ranks, or restarts all ranks if
        ``--max-restarts`` allows it.

        Raises:
            RunError: no rank is running on this machine, or one does not respond.
        """
        obstacles = self._obstacles()
        local = [rank for rank in self.ranks if rank not in obstacles]
        if not local:
            raise RunError(
                f"no rank of {self.name} can be reached: all have ended, or are on other "
                "machines. Stop the launcher there."
            )
        self._control.connect(local)
        self._control.reason = "\n".join([_RELEASED, *(str(f) for f in self.findings if f.hang)])
        self._attached.interrupt()

    def _obstacles(self) -> dict[int, str]:
        """Return the ranks that cannot be controlled from here, and the reasons."""
        found = {rank: _obstacle(record) for rank, record in self._attached.records.items()}
        found |= dict.fromkeys(self._attached.outcomes, "ended")
        return {rank: reason for rank, reason in found.items() if reason}

    def _poll(self) -> None:
        while self._attached.unfinished and not self.finished:
            start = time.monotonic()
            self._attached.poll()
            time.sleep(max(POLL_INTERVAL, READ_MULTIPLE * (time.monotonic() - start)))
        self._control.close()


def _obstacle(record: Record) -> str:
    """Explain why this process cannot connect to a rank; "" if it can."""
    if not rankfile.is_here(record.header):
        return f"on {record.header['host']}"
    path = Path(record.header.get("socket", ""))
    with suppress(OSError):
        folder = path.parent.lstat()  # reject the sockets of other users
        if stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.getuid():
            return "" if path.is_socket() else "no socket"
    return "no socket for this user"


def _describe_end(end: RankEnd) -> str:
    text = end.how + (f" ({end.text})" if end.how == "died" else f" {end.text}")
    return raised_at(text.rstrip(), end.where)


# -- the run ---------------------------------------------------------------------------------------


class AttachedRun(Conductor):
    """A run that its launcher ends; ranks are released only on request.

    Args:
        records: the content of the ranks' files, by rank.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        info = merge.merged_trace([*records.values()], Trace).info
        self.records = {
            rank: Record(r.path, r.header, is_growing=True) for rank, r in records.items()
        }
        self._has_one_clock = len({r.header["clock"] for r in records.values()}) == 1
        self._grown_at = dict.fromkeys(records, time.monotonic())
        initial = RunInfo(world_size=info.world_size, ranks=info.ranks, groups=info.groups)
        conclusion = "their launcher decides what happens next"
        super().__init__(info.name, 1, [*records], initial, conclusion=conclusion)

    @property
    def trace(self) -> Trace:
        """The communication recorded so far, with the clocks of several hosts aligned."""
        if self._has_one_clock:
            return super().trace
        return merge.merged_trace([*self.records.values()], Trace)

    def poll(self) -> None:
        """Read what the ranks have written since the last call."""
        changed = [rank for rank in self.unfinished if self._update(rank)]
        if changed:
            clocks = merge.Clocks(self.records)
            for rank in changed:
                for wait in merge.waits(self.records[rank], clocks):
                    self.handle_event(rank, "waits", (wait.seqs, wait.since, wait.until))

    def _update(self, rank: int) -> bool:
        """Read what a rank has written; return whether its record may have changed."""
        record, now = self.records[rank], time.monotonic()
        with suppress(OSError, TraceFileError):  # the folder was removed, or an entry is damaged
            for kind, value in record.update():
                self._grown_at[rank] = now
                if kind == "rows":
                    self._add(rank, value)
                elif kind in _MESSAGES:
                    self.handle_event(rank, kind, value)
            delay = merge.RECENT if rankfile.is_here(record.header) else MAX_DELAY
            if "end" in record.notes:
                self._end(rank, record)
            elif now - self._grown_at[rank] > delay:  # ended without a report, or suspended
                self._grown_at[rank] = now
                self._end(rank, rankfile.read(record.path))
        return self._grown_at[rank] == now

    def _end(self, rank: int, record: Record) -> None:
        """Record the end of a rank unless the rank may still be running."""
        end = merge.end_of(record)
        if end is not None:
            self.records[rank] = record
            self._add(rank, record.rows[self.live.rows[rank] :])
            self.add_outcome(_outcome(rank, end, killed=rank in self._killed_ranks))

    def _add(self, rank: int, rows: list[Any]) -> None:
        self.handle_event(rank, "rows", (len(rows), encode_rows(rows)))

    def _release(self, controller: RankController) -> None:
        self._wait_until(lambda: self._interrupted or not self.unfinished)
        if self.unfinished:
            super()._release(controller)
        self._wait_until(lambda: not self.unfinished)  # the launcher ends the ranks elsewhere


def _outcome(rank: int, end: RankEnd, *, killed: bool) -> Outcome:
    """Return the outcome of a rank with this end; ``killed`` means that this process killed it."""
    if killed and end.how == "died":
        return Outcome(rank, error=Failure("Released", released=True))
    if end.how == "died":
        return Outcome(rank, died=end.text)
    if end.how == "returned":
        return Outcome(rank)
    kind, _, text = end.text.partition(": ")
    file, _, line = end.where.rpartition(":")
    frames: list[Frame] = [(file, int(line), "", None)] if file else []
    return Outcome(
        rank,
        error=Failure(
            kind,
            text,
            frames,
            end.time or 0.0,
            released=end.how == "released",
            consequence=CONNECTION_BROKEN.search(text) is not None,
        ),
    )


class SocketControl(RankController):
    """Controls the ranks on this machine through their sockets.

    Args:
        records: the content of the ranks' files, by rank.
    """

    def __init__(self, records: Mapping[int, Record]) -> None:
        self.reason = _RELEASED
        self._headers = {rank: record.header for rank, record in records.items()}
        self._channels: dict[int, Channel] = {}

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect to these ranks, unless already connected.

        Raises:
            RunError: a rank does not respond.
        """
        for rank in ranks:
            if rank not in self._channels:
                self._channels[rank] = _connect(rank, self._headers[rank]["socket"])

    def open_gates(self, ranks: Iterable[int], count: int | None) -> None:
        """Add ``count`` permits to the gates of these ranks; None opens the gates permanently."""
        self._send(ranks, "go", count)

    def step(self) -> None:
        """Pause all ranks before each communication call."""
        self._send(self._channels, "step", None)

    def release(self, ranks: Iterable[int]) -> None:
        """Release these ranks, whether they are computing or waiting."""
        self._send(ranks, "release", self.reason)

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill the processes of these ranks, if connected."""
        for rank in self._channels.keys() & {*ranks}:
            with suppress(OSError):
                os.kill(self._headers[rank]["pid"], signal.SIGKILL)

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.close()

    def _send(self, ranks: Iterable[int], *message: Any) -> None:
        for rank in self._channels.keys() & {*ranks}:
            with suppress(OSError):  # the rank has just ended
                self._channels[rank].send(message)


def _connect(rank: int, path: str) -> Channel:
    """Return the channel to a rank's socket, once the rank has replied."""
    sock = socket.socket(socket.AF_UNIX)
    channel = Channel(sock)
    sock.settimeout(REPLY_TIMEOUT)
    try:
        sock.connect(path)
        channel.recv()
    except (OSError, EOFError) as error:
        channel.close()
        raise RunError(
            f"rank {rank} does not respond. Another notebook may be controlling it, or it may be "
            "suspended or exiting. Try again, or check the terminal of its launcher."
        ) from error
    sock.settimeout(None)
    return channel
