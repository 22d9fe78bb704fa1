"""Record a rank that another launcher has started: torchrun, Slurm, MPI, or a shell.

The process group, its store and its devices are those of the script; the tap records its calls in
a file of the rank, which ``distkit replay FOLDER`` merges with the other ranks'. A notebook on the
same machine may connect to the rank's socket, to pause it and to let it continue.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from distkit.cluster.rank.process_group import TIMING
from distkit.errors import StartError
from distkit.events import STACK, WORLD
from distkit.recording import recorder as _recorder
from distkit.recording.blackbox import BlackBox
from distkit.recording.plain import Row, encode_rows
from distkit.recording.recorder import Flusher, Recorder, is_users
from distkit.recording.tap import tap
from distkit.recording.witness import CallContext, describe_exception
from distkit_hosts.launched import Launched, recognise
from distkit_hosts.torchrun.line import Line
from distkit_hosts.torchrun.rankfile import SUFFIX, RankFile, clock, pid_namespace

#: The default folder of the ranks' files.
FOLDER = "trace"
#: Set in a recorded rank to its pid; the processes that it starts are not recorded.
_ATTACHED = "DISTKIT_ATTACHED"
#: Maximum length of a source file's text in a record [characters].
_LONGEST = 200_000
#: The signals by which launchers and users end a rank.
_ENDING = signal.SIGTERM, signal.SIGINT
#: Time limit for the GPU's pending work at the end of the script [s].
_LANDS = 2.0

_here: Attached | None = None


def record(folder: str | Path = FOLDER) -> None:
    """Record this rank's communication from now on, with any launcher.

    Call it before ``init_process_group``. Afterwards ``distkit replay FOLDER`` shows all ranks.
    It does nothing in a rank that is already recorded, and in processes that such a rank starts.

    Args:
        folder: the folder for a file of each rank, created if it does not exist. Ranks of several
            hosts may share it; otherwise copy their files into one folder afterwards.

    Raises:
        StartError: the launcher's environment variables contradict each other, or the folder cannot
            be written.

    Example:
        >>> import distkit as dk                        # doctest: +SKIP
        >>> dk.hosts.record()                                 # doctest: +SKIP
    """
    global _here
    of_parent = os.environ.get(_ATTACHED, str(os.getpid())) != str(os.getpid())
    if _here is None and not of_parent and _recorder.current() is None:
        place = recognise(os.environ, socket.gethostname())
        _here = Attached(place, Path(folder).absolute())
        if place.launcher != "none":  # else this process may start ranks itself
            os.environ[_ATTACHED] = str(os.getpid())


def ended(error: BaseException) -> None:
    """Record the exception that ends this rank, if it is recorded."""
    if _here is not None:
        _here.ended(error)


class Attached:
    """The recording of this process.

    Args:
        place: its launcher and rank.
        folder: the folder for its file.
    """

    def __init__(self, place: Launched, folder: Path) -> None:
        began = time.monotonic(), time.time()
        name = f"{place.rank:05}-{place.host}-{os.getpid()}-{began[1]:.0f}"
        about = {
            "rank": place.rank,
            "world_size": place.world_size,
            "host": place.host,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "pid_namespace": pid_namespace(),
            "launcher": place.launcher,
            "clock": clock(),
            "began": began,
            "folder": str(Path.cwd()),
            "program": Path(sys.argv[0]).name,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._beside = [folder / f"{name}.box", folder / f"{name}.fault"]
            self._box = BlackBox(self._beside[0])
            self._fault = self._beside[1].open("wb")
            self._recorder = Recorder(place.rank, keep=partial(self._box.note, 1))
            self._line = Line(
                self._set_stepped, lambda: self._recorder.request_flush(), self._release
            )
            about["line"] = self._line.path
            self._file = RankFile(folder / f"{name}{SUFFIX}", about)
        except OSError as error:
            raise StartError(
                f"{folder}: the files of the ranks cannot be written there ({error.strerror}). "
                "Name another folder."
            ) from error
        self._pid, self._end = os.getpid(), ("returned", "", "")
        self._sources, self._written = set[str](), 0
        self._waits: Any = None  # the wait reported since the last beat
        self._install()
        self._hear_signals()
        self._flusher = _Flusher(self._recorder, self._emit, self._beat)

    def _set_stepped(self, on: bool) -> None:
        """Pause before each communication, or stop doing so."""
        if on and self._line.pass_by not in tap.before:
            tap.before.append(self._line.pass_by)
        self._recorder.stepped = on

    def _install(self) -> None:
        """Install the hooks."""
        tap.on_gpu = torch.backends.cuda.is_built()
        if tap.on_gpu:
            os.environ.setdefault(*TIMING)
        tap.install()
        # calls are not compared before the backend gets them, as the ranks may be on any hosts
        tap.call_context = CallContext(self._note, None, lambda: None)
        tap.groups.on_group = self._on_group
        tap.on_threads = partial(self._note, "threads")
        _recorder.set_current(self._recorder)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)
        sys.excepthook = partial(self._excepthook, sys.excepthook)

    # -- what is recorded --------------------------------------------------------------------------

    def _on_group(self, name: str, members: list[int]) -> None:
        import torch.distributed as dist

        self._note("group", (name, members))
        if name == WORLD:
            self._recorder.rank = dist.get_rank()  # a script may number the ranks differently
            self._file.note("world", (dist.get_rank(), len(members)))

    def _note(self, kind: str, what: Any) -> None:
        """Record a fact, and send it to a listener."""
        self._file.note(kind, what)
        self._line.emit(kind, what)

    def _emit(self, kind: str, what: Any) -> None:
        """Record the flusher's rows or waits, and send them to a listener."""
        if kind == "rows":
            count, rows = what
            self._add_sources(rows)
            self._file.rows(rows)
            self._written += count
        else:
            self._waits = what
        if self._line.heard:
            self._line.emit(kind, what if kind == "waits" else (count, encode_rows(rows)))

    def _add_sources(self, rows: list[Row]) -> None:
        """Add the text of each source file that appears for the first time."""
        lines = {
            line for row in rows for line in (row[4][6], *dict(row[4][7] or ()).get(STACK, ()))
        }
        for file in {line.rpartition(":")[0] for line in lines} - self._sources:
            self._sources.add(file)
            try:
                text = Path(file).read_text(errors="replace")[:_LONGEST]
            except OSError:  # the code is not from a file
                continue
            self._file.note("source", (file, text))

    def _beat(self) -> None:
        """Record that the rank runs, and the number of lost events."""
        lost = self._recorder.dropped + self._file.lost
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        told = lost, self._recorder.without_values, dict(self._recorder.unrecorded), cuda
        self._file.note("beat", (time.monotonic(), time.time(), self._waits, *told))
        self._waits = None
        self._line.take_up(self._written)

    # -- the end --------------------------------------------------------------------------------

    def ended(self, error: BaseException) -> None:
        """Record the exception that ends the rank."""
        if isinstance(error, KeyboardInterrupt):
            self._end = "released", "", ""
        elif not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._end = "raised", *describe_exception(error)

    def _excepthook(
        self,
        stock: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        at: TracebackType | None,
    ) -> None:
        """Print a traceback that begins in the script, as without distkit."""
        if os.getpid() == self._pid:
            self.ended(error)
        while at is not None and at.tb_next and not is_users(at.tb_frame.f_code.co_filename):
            at = at.tb_next
        stock(kind, error.with_traceback(at), at)

    def _release(self, why: str) -> None:
        """End this rank, and print where it was.

        SIGTERM is ignored: a launcher sends it as soon as another rank has exited.
        """
        faulthandler.register(signal.SIGTERM, self._fault, all_threads=False)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        walked = [*traceback.walk_stack(frame)][::-1]
        users = [one for one in walked if is_users(one[0].f_code.co_filename)]
        lines = traceback.StackSummary.extract(iter(users)).format()
        self._end = "released", "", ""
        self._at_exit()
        said = "".join([*lines, f"Released: {why}\n"])
        sys.stderr.write(textwrap.indent(said, f"[rank{self._recorder.rank}]: "))
        sys.stderr.flush()
        os._exit(1)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        tap.settle()
        if self._end[0] == "returned":
            tap.wait_for_gpu(_LANDS)
        unwaited = tap.unwaited.calls()
        _recorder.set_current(None)
        self._flusher.close()
        self._file.note("unwaited", unwaited)
        self._file.note("end", (*self._end, time.monotonic()))
        self._file.close()
        self._line.close()
        self._hear_no_signals()
        for path in self._beside:
            path.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Stop recording in a child process."""
        _recorder.set_current(None)
        self._hear_no_signals()
        self._line.close_here()

    def _hear_signals(self) -> None:
        """Let faulthandler write which signal ends the rank, also during a call of C++.

        The effect of the signal is unchanged. Only the frames of the thread that receives the
        signal are written, because reading those of a running thread can crash the process.
        """
        self._tells_crashes = not faulthandler.is_enabled()
        if self._tells_crashes:
            faulthandler.enable(self._fault)
        for number in _ENDING:
            faulthandler.register(number, self._fault, all_threads=False, chain=True)

    def _hear_no_signals(self) -> None:
        for number in _ENDING:
            faulthandler.unregister(number)
        if self._tells_crashes:
            faulthandler.disable()
        self._fault.close()


class _Flusher(Flusher):
    """Calls ``beat`` after each flush.

    Args:
        recorder: as for :class:`Flusher`.
        emit: as for :class:`Flusher`, but called with a list of rows.
        beat: called without arguments.
    """

    def __init__(
        self, recorder: Recorder, emit: Callable[[str, Any], None], beat: Callable[[], None]
    ) -> None:
        self._beat = beat
        super().__init__(recorder, emit, pack=list)

    def flush(self, last: bool = False) -> None:
        """Write the collected rows, and record that the rank runs."""
        super().flush(last)
        self._beat()
