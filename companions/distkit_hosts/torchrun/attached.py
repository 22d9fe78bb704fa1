"""Record a rank that another launcher has started: torchrun, Slurm, MPI, or a shell.

The script creates the process group and its store, and selects devices. The tap records the rank's
calls in a file, which ``distkit replay FOLDER`` merges with the files of the other ranks. A
notebook of the same user on the same machine may connect to the rank's socket, to pause, resume or
stop the rank.

A script records itself with :func:`record`. Under ``distkit trace -- torchrun …``,
:mod:`distkit_hosts.torchrun.launching` inserts ``-m distkit_hosts.torchrun.attached FOLDER`` before
the script in the launcher's command.
"""

from __future__ import annotations

import atexit
import faulthandler
import linecache
import os
import runpy
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from distkit.cluster.processes import cleanup
from distkit.cluster.processes.channel import Channel
from distkit.cluster.rank.process_group import TIMING
from distkit.cluster.rank.rank import Gate, run_script
from distkit.errors import StartError
from distkit.events import STACK, WORLD, Op
from distkit.recording import recorder as _recorder
from distkit.recording.call_context import CallContext, describe_exception
from distkit.recording.encoding import BlackBox, Row
from distkit.recording.recorder import Flusher, Recorder, is_user_file
from distkit.recording.tap import tap
from distkit_hosts.launched import Launched, detect
from distkit_hosts.torchrun.rankfile import SUFFIX, RankFile, clock, pid_namespace

#: The default folder for the ranks' files.
FOLDER = "trace"
#: Environment variable with the pid of a recorded rank; processes that it starts are not recorded.
_ATTACHED = "DISTKIT_ATTACHED"
#: Maximum length of a source file's text in a record [characters].
_MAX_SOURCE = 200_000
#: The signals that launchers and users send to stop a rank.
_ENDING = signal.SIGTERM, signal.SIGINT
#: Time limit for the GPU's pending work at the end of the script [s].
_GPU_TIMEOUT = 2.0

_current: Attached | None = None


def record(folder: str | Path = FOLDER) -> None:
    """Record this rank's communication from now on, regardless of the launcher.

    Call it before ``init_process_group``. Afterwards, ``distkit replay FOLDER`` shows all ranks.
    The call has no effect in a rank that is already recorded, or in processes that such a rank
    starts.

    Args:
        folder: the folder for the files of all ranks, created if it does not exist. Ranks on
            several hosts may share it; otherwise, copy their files into one folder afterwards.

    Raises:
        StartError: an environment variable for the rank or the number of ranks is missing or
            invalid, or the folder cannot be written.

    Example:
        >>> import distkit as dk                        # doctest: +SKIP
        >>> dk.hosts.record()                                 # doctest: +SKIP
    """
    global _current
    has_recorded_parent = os.environ.get(_ATTACHED, str(os.getpid())) != str(os.getpid())
    if _current is None and not has_recorded_parent and _recorder.current() is None:
        launched = detect(os.environ)
        _current = Attached(launched, Path(folder).absolute())
        if launched.launcher != "none":  # otherwise, this process may start ranks
            os.environ[_ATTACHED] = str(os.getpid())


class Attached:
    """The recorder of this process.

    Args:
        launched: the launcher and the rank of this process.
        folder: the folder for the rank's file.
    """

    def __init__(self, launched: Launched, folder: Path) -> None:
        began, host = (time.monotonic(), time.time()), socket.gethostname()
        name = f"{launched.rank:05}-{host}-{os.getpid()}-{began[1]:.0f}"
        header = {
            "rank": launched.rank,
            "world_size": launched.world_size,
            "host": host,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "pid_namespace": pid_namespace(),
            "launcher": launched.launcher,
            "clock": clock(),
            "began": began,
            "folder": str(Path.cwd()),
            "program": Path(sys.argv[0]).name,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._temporary = [folder / f"{name}.box", folder / f"{name}.fault"]
            self._box = BlackBox(self._temporary[0])
            self._fault = self._temporary[1].open("wb")
            self._recorder = Recorder(launched.rank, copy_to=partial(self._box.store, 1))
            self._control = ControlSocket(self._recorder, self._release)
            header["socket"] = self._control.path
            self._file = RankFile(folder / f"{name}{SUFFIX}", header)
        except OSError as error:
            raise StartError(
                f"{folder}: the ranks' files cannot be written there ({error.strerror}). "
                "Use another folder."
            ) from error
        self._pid, self._end = os.getpid(), ("returned", "", "")
        self._sources = set[str]()
        self._waits: Any = None  # the latest wait since the last heartbeat
        self._install()
        self._log_signals()
        self._flusher = _Flusher(self._recorder, self._emit, self._record_heartbeat)

    def _install(self) -> None:
        """Install the hooks."""
        tap.on_gpu = torch.backends.cuda.is_built()
        if tap.on_gpu:
            os.environ.setdefault(*TIMING)
        tap.install()
        # ranks may be on different hosts, so calls are not compared before they reach the backend
        tap.call_context = CallContext(self._file.note, None, lambda: None)
        tap.groups.on_group = self._on_group
        _recorder.set_current(self._recorder)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._stop_in_child)
        sys.excepthook = partial(self._excepthook, sys.excepthook)

    # -- recording ---------------------------------------------------------------------------------

    def _on_group(self, name: str, members: list[int]) -> None:
        import torch.distributed as dist

        self._file.note("group", (name, members))
        if name == WORLD:
            self._recorder.rank = dist.get_rank()  # may differ from the launcher's number
            self._file.note("world", (dist.get_rank(), len(members)))

    def _emit(self, kind: str, value: Any) -> None:
        """Record the flusher's rows, or keep its waits for the next heartbeat."""
        if kind == "rows":
            _, rows = value
            self._add_sources(rows)
            self._file.write_rows(rows)
        else:
            self._waits = value

    def _add_sources(self, rows: list[Row]) -> None:
        """Add the text of each source file when it first appears."""
        lines = {
            line for row in rows for line in (row[4][6], *dict(row[4][7] or ()).get(STACK, ()))
        }
        for file in {line.rpartition(":")[0] for line in lines} - self._sources:
            self._sources.add(file)
            # names that are not files have no text
            if text := "".join(linecache.getlines(file))[:_MAX_SOURCE]:
                self._file.note("source", (file, text))

    def _record_heartbeat(self) -> None:
        """Record that the rank is running, its latest wait, and what was not recorded."""
        lost = self._recorder.dropped + self._file.lost
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        losses = lost, self._recorder.without_values, dict(self._recorder.unrecorded), cuda
        self._file.note("beat", (time.monotonic(), time.time(), self._waits, *losses))
        self._waits = None

    # -- the end --------------------------------------------------------------------------------

    def record_exception(self, error: BaseException) -> None:
        """Record the exception that ends the rank."""
        if isinstance(error, KeyboardInterrupt):
            self._end = "released", "", ""
        elif not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._end = "raised", *describe_exception(error)

    def _excepthook(
        self,
        default: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        tb: TracebackType | None,
    ) -> None:
        """Print a traceback that begins in the script, as it does without distkit."""
        if os.getpid() == self._pid:
            self.record_exception(error)
        while tb is not None and tb.tb_next and not is_user_file(tb.tb_frame.f_code.co_filename):
            tb = tb.tb_next
        default(kind, error.with_traceback(tb), tb)

    def _release(self, reason: str) -> None:
        """Print this rank's current position and exit.

        Meanwhile, SIGTERM is only logged: a launcher sends it as soon as another rank has exited.
        """
        faulthandler.register(signal.SIGTERM, self._fault, all_threads=False)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [f for f in traceback.extract_stack(frame) if is_user_file(f.filename)]
        lines = traceback.format_list(frames)
        self._end = "released", "", ""
        self._at_exit()
        report = "".join([*lines, f"Released: {reason}\n"])
        sys.stderr.write(textwrap.indent(report, f"[rank{self._recorder.rank}]: "))
        sys.stderr.flush()
        os._exit(1)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        tap.record_completions()
        if self._end[0] == "returned":
            tap.wait_for_gpu(_GPU_TIMEOUT)
        unwaited = tap.unwaited.calls()
        _recorder.set_current(None)
        self._flusher.close()
        self._file.note("unwaited", unwaited)
        self._file.note("end", (*self._end, time.monotonic()))
        self._file.close()
        self._control.close()
        self._stop_logging_signals()
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def _stop_in_child(self) -> None:
        """Stop recording in a child process."""
        _recorder.set_current(None)
        self._stop_logging_signals()
        self._control.close_listener()

    def _log_signals(self) -> None:
        """Make faulthandler log signals that end the rank, even during a C++ call.

        The effects of the signals are unchanged. Only the frames of the thread that receives the
        signal are written, because reading the frames of a running thread can crash the process.
        """
        self._logs_crashes = not faulthandler.is_enabled()
        if self._logs_crashes:
            faulthandler.enable(self._fault)
        for number in _ENDING:
            faulthandler.register(number, self._fault, all_threads=False, chain=True)

    def _stop_logging_signals(self) -> None:
        for number in _ENDING:
            faulthandler.unregister(number)
        if self._logs_crashes:
            faulthandler.disable()
        self._fault.close()


class ControlSocket:
    """The rank's end of the connection to a notebook.

    It is a Unix socket in a folder that only this user can access. The rank continues when the
    connection is closed. :attr:`path` is "" if the socket cannot be created.

    Args:
        recorder: the rank's recorder.
        release: called with the reason when the notebook stops the rank.
    """

    def __init__(self, recorder: Recorder, release: Callable[[str], None]) -> None:
        self._recorder, self._release = recorder, release
        self._gate: Gate | None = None  # set in a stepped rank
        self.path, self._listener = "", socket.socket(socket.AF_UNIX)
        with suppress(StartError, OSError):
            folder = cleanup.make_folder(cleanup.new_prefix())
            self._listener.bind(f"{folder}/control")
            self._listener.listen(1)
            self.path = f"{folder}/control"
            threading.Thread(target=self._listen, name="distkit-control", daemon=True).start()

    def wait_at_gate(self, op: Op, nbytes: int) -> None:
        """Wait at the gate; a hook of the tap."""
        gate = self._gate
        if gate is not None:
            gate.wait()

    def close(self) -> None:
        """Close and remove the socket."""
        self.close_listener()
        if self.path:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)

    def close_listener(self) -> None:
        """Close the listening socket; a forked child of the rank closes only its copy."""
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):  # the rank is ending
            while True:
                self._serve(Channel(self._listener.accept()[0]))

    def _serve(self, channel: Channel) -> None:
        """Execute commands from one notebook, then resume the rank."""
        with suppress(EOFError, OSError):
            channel.send("ready")
            while True:
                self._handle_command(*channel.recv())
        self._handle_command("go", None)
        channel.close()

    def _handle_command(self, command: str, argument: Any) -> None:
        if command == "release":
            self._release(argument)
        elif command == "step" and self._gate is None:
            self._gate = Gate()
            self._gate.on_wait = self._recorder.request_flush
            self._recorder.stepped = True
            if self.wait_at_gate not in tap.before:
                tap.before.append(self.wait_at_gate)
        elif command == "go" and self._gate is not None:
            self._gate.allow(argument)
            if argument is None:
                self._gate, self._recorder.stepped = None, False


class _Flusher(Flusher):
    """Calls ``heartbeat`` after each flush.

    Args:
        recorder: as for :class:`Flusher`.
        emit: as for :class:`Flusher`, but called with a list of rows.
        heartbeat: called without arguments.
    """

    def __init__(
        self, recorder: Recorder, emit: Callable[[str, Any], None], heartbeat: Callable[[], None]
    ) -> None:
        self._heartbeat = heartbeat
        super().__init__(recorder, emit, pack=list)

    def flush(self, last: bool = False) -> None:
        """Write the collected rows and record that the rank is running."""
        super().flush(last)
        self._heartbeat()


def main(argv: list[str]) -> None:
    """Run a script or a module as Python does, and record it.

    Args:
        argv: ``FOLDER SCRIPT [ARGUMENT ...]``, or ``-m MODULE`` in place of the script.
    """
    folder, *command = argv
    is_module = command[0] == "-m"
    command = command[is_module:]
    sys.argv[:] = command
    try:
        record(folder)
    except StartError as error:
        print(f"distkit: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        if is_module:  # found in the current folder first, as with ``python -m``
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            del sys.path[0]  # replaced with the script's folder
            _recorder.add_user_file(command[0])
            run_script(Path(command[0]), command[1:])
    except BaseException as error:
        if _current is not None:
            _current.record_exception(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
