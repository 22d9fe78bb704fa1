"""A run that goes on elsewhere, followed by the files that its ranks write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from distkit.diagnosis.diagnose import Finding
from distkit.errors import TraceFileError
from distkit.events import Event
from distkit.recording import merge, rankfile
from distkit.recording.attached import FOLDER
from distkit.trace.trace import Trace

#: How often to look for something new [s]; and so many times as long as it took to read it.
PERIOD, PAUSE = 0.2, 5


def follow(folder: str | Path = FOLDER, *, timeout: float = 60.0) -> Following:
    """Follow ranks that torchrun, ``srun`` or ``mpiexec`` has started, while they run.

    The ranks are recorded by ``distkit trace -- torchrun …``, ``torchrun -m distkit.attach …`` or
    :func:`distkit.record`. What this returns shows a live timeline, and every other view takes it,
    too: ``dk.Stage(dk.follow())``.

    Args:
        folder: where the ranks' files are, on this machine or shared with theirs; of several runs
            there the latest.
        timeout: so long to wait for all ranks to begin [s].

    Raises:
        TimeoutError: not all ranks have begun in time.

    Example:
        >>> import distkit as dk
        >>> run = dk.follow("trace")                    # doctest: +SKIP
        >>> run.diagnose()                              # doctest: +SKIP
    """
    end = time.monotonic() + timeout
    while True:
        following = Following(Path(folder))
        if following.whole:
            return following
        if time.monotonic() > end:
            raise TimeoutError(
                f"{len(following.trace.by_rank)} ranks have begun in {Path(folder).absolute()} "
                f"after {timeout:.0f} s. Start them with `distkit trace --out {folder} -- torchrun "
                "…`, give the folder that was named there, or wait longer with timeout=…."
            )
        time.sleep(PERIOD)


class Following:
    """A run by the files of its ranks: as a live :class:`distkit.Run`, but nobody can end it.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: Who is told of events, and of which each was.
        self._told: dict[Callable[[list[Event]], None], set[tuple[int, int, str]]] = {}
        self._reading, self._works = threading.RLock(), False
        self._sizes, self._read = dict[Path, int](), 0.0  # of the files, when they were read
        self._trace, self._records = Trace([], {}), list[rankfile.Record]()
        self._look()

    @property
    def trace(self) -> Trace:
        """The communication of all ranks, as far as their files tell."""
        with self._reading:
            self._look()
            return self._trace

    @property
    def whole(self) -> bool:
        """True if all ranks have begun."""
        known = self._trace.meta.get("ranks", {})
        return bool(known) and len(known) >= self._trace.meta["world_size"]

    @property
    def finished(self) -> bool:
        """True if all ranks have ended, and nobody is there to start them anew."""
        with self._reading:
            self._look()
            return self._is_over()

    def _is_over(self) -> bool:
        if not self.whole or len(self._trace.meta["ends"]) < len(self._trace.meta["ranks"]):
            return False
        here = [r.about for r in self._records if r.about["clock"] == rankfile.clock()]
        return not any(a["launcher"] == "torchrun" and _lives(a["parent"]) for a in here)

    def diagnose(self) -> list[Finding]:
        """The mistakes so far: which rank waits for which, and why."""
        return self.trace.diagnose()

    def subscribe(self, callback: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Have all events handed over: those so far now, others from a thread; [] at the end."""
        with self._reading:
            over, self._told[callback] = self.finished, set()
            self._tell(callback)
            if over:
                callback([])
            elif not self._works:
                self._works = True
                threading.Thread(target=self._work, name="distkit-follow", daemon=True).start()

        def unsubscribe() -> None:
            self._told.pop(callback, None)

        return unsubscribe

    def __repr__(self) -> str:
        state = "ended" if self.finished else "going on"
        ranks, events = len(self._trace.meta.get("ranks", {})), len(self._trace.events)
        return f"<Following {self._folder}: {ranks} ranks, {events} events, {state}>"

    def _ipython_display_(self) -> None:
        from distkit.views import Timeline

        Timeline(self)._ipython_display_()

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        over = False
        while not over:
            began = time.monotonic()
            with self._reading:
                self._works = bool(self._told)
                if not self._works:
                    return
                over = self.finished
                self._works = not over
                for callback in list(self._told):
                    self._tell(callback)
                    if over:
                        callback([])
            time.sleep(max(PERIOD, PAUSE * (time.monotonic() - began)))

    def _tell(self, callback: Callable[[list[Event]], None]) -> None:
        told = self._told.get(callback)
        if told is None:  # who does not listen any more
            return
        new = [e for e in self._trace.events if (e.rank, e.seq, e.state.value) not in told]
        told.update((e.rank, e.seq, e.state.value) for e in new)
        if new:
            callback(new)

    def _look(self) -> None:
        """Read the files, if they have grown or a rank may have ended without a word."""
        with self._reading:
            files = rankfile.found([self._folder]) if self._folder.is_dir() else []
            sizes = {path: path.stat().st_size for path in files}
            due = self._read + merge.RECENT  # the end of a rank that says nothing is known by time
            if not files or (sizes == self._sizes and (self._is_over() or time.monotonic() < due)):
                return
            try:
                self._records = [rankfile.read(path) for path in files]
                self._trace, self._sizes = merge.of(self._records, Trace), sizes
                self._read = time.monotonic()
            except TraceFileError:  # a rank has just made its file
                return


def _lives(pid: int) -> bool:
    """True if there is such a process, and it has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
