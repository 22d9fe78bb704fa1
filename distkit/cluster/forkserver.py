"""The kernel's handle on its zygote: start it, fork from it, hear who ended.

One per kernel process, started at the first use and kept warm: a second cluster forks from
the same process. See :mod:`distkit.cluster.zygote` for the other side.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.channel import Channel
from distkit.cluster.lines import lines
from distkit.errors import StartError

_LONGEST = 90  # a Unix socket's path ends at 107 bytes on Linux, 103 on macOS
_WSL = Path("/dev/dxg")  # how Windows' Linux shows its GPU

OnExit = Callable[[int], None]


class Child:
    """A forked process: its pid, its lifeline, and what to do when it ends."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = int(channel.recv()[1])
        self.status: int | None = None  # exit status, negative for a signal
        self._on_exit: list[OnExit] = []
        self._heard = self._silent = False  # is its line listened to? has it come to its end?
        self._lock = threading.Lock()

    def hear(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(message)`` from another thread for all that it says."""
        self._heard = True
        lines().add(self.channel, callback, self._fell_silent)

    def on_exit(self, callback: OnExit) -> None:
        """Call ``callback(status)`` once, from another thread, when the process has ended.

        Whatever it said before has been heard by then.
        """
        with self._lock:
            if not self._over:
                self._on_exit.append(callback)
                return
        callback(self.status or 0)

    @property
    def _over(self) -> bool:
        return self.status is not None and (self._silent or not self._heard)

    def wait(self, timeout: float) -> bool:
        """Wait until the process has ended; False when it has not within ``timeout`` seconds."""
        done = threading.Event()
        self.on_exit(lambda status: done.set())
        return done.wait(timeout)

    def ended(self, status: int) -> None:
        """Note the end; those who asked are told when its last words have been heard."""
        if self.status is None:
            self.status = status
            if self._heard:
                self.channel.finish()  # a process that it forked may hold the other end
            self._tell()

    def _fell_silent(self) -> None:
        self._silent = True
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            if not self._over:
                return
            callbacks, self._on_exit = self._on_exit, []
        for callback in callbacks:
            try:
                callback(self.status or 0)
            except Exception:  # one listener's mistake must not keep the news from all others
                traceback.print_exc(file=sys.__stderr__)

    def let_go(self) -> None:
        """Break the line to it."""
        if self._heard:
            self.channel.hang_up()
        else:
            self.channel.close()


class ForkServer:
    """Starts the zygote and talks to it. Use :func:`server`."""

    def __init__(self) -> None:
        self._lock, self.closed = threading.Lock(), False
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}  # ended before we had noted them
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.channel, theirs = Channel.pair()
        environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        command = [sys.executable, "-m", "distkit.cluster.zygote", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=_importable(environ),
                stdin=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is not meant for it
            )  # fmt: skip
        threading.Thread(target=self._listen, name="distkit-forkserver", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the zygote is there to fork from."""
        return self.process.poll() is None

    def preload(self, *modules: str) -> None:
        """Have modules imported in the zygote now, without waiting."""
        self._send({"do": "import", "modules": list(modules)})

    def fork(self, run: str, *, folder: str, log: str, **arguments: Any) -> Child:
        """Fork a child running ``run`` ("module:function") and wait for its first word."""
        ours, theirs = Channel.pair()
        with theirs:
            command = {"do": "fork", "run": run, "folder": folder, "log": log, **arguments}
            self._send(command, theirs.fileno())
        return self._adopt(ours)

    def fork_all(self, run: str, each: list[dict[str, Any]]) -> list[Child]:
        """Fork several at once: their starts overlap."""
        ends = []
        for arguments in each:
            ours, theirs = Channel.pair()
            with theirs:
                self._send({"do": "fork", "run": run, **arguments}, theirs.fileno())
            ends.append(ours)
        return [self._adopt(ours) for ours in ends]

    def gpus(self, device: str) -> int:
        """How many GPUs torch sees for this wish; asks torch only where there are device files."""
        if device == "cpu" or not (list(Path("/dev").glob("nvidia[0-9]*")) or _WSL.exists()):
            return 0
        self._send({"do": "gpus"})
        return self._answers.get(timeout=60)

    def kill(self, children: list[Child]) -> None:
        """End children, and whatever they started."""
        with suppress(OSError):
            self.channel.send({"do": "kill", "pids": [c.pid for c in children]})

    def remove(self, folder: str) -> None:
        """Remove a folder that children worked in."""
        with suppress(OSError):
            self.channel.send({"do": "remove", "folder": folder})

    def close(self) -> None:
        """End the zygote and everything that it forked."""
        self.closed = True
        self.channel.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            self.channel.send(message, fd)
        except OSError as e:
            raise StartError(self._why()) from e

    def _adopt(self, channel: Channel) -> Child:
        try:
            child = Child(channel)
        except EOFError as e:
            channel.close()
            raise StartError(self._why()) from e
        with self._lock:
            self._children[child.pid] = child
            status = self._early.pop(child.pid, None)
        if status is not None:
            child.ended(status)
        return child

    def _why(self) -> str:
        """Why nothing can be forked."""
        if self.closed:
            return "no more processes can be started: this process is ending."
        return _gone(self.process)

    def _listen(self) -> None:
        """Hear of ended children; when the zygote itself ends, all of them have."""
        try:
            while True:
                news = self.channel.recv()
                if "gpus" in news:
                    self._answers.put(news["gpus"])
                    continue
                with self._lock:
                    child = self._children.pop(news["exit"], None)
                    if child is None:
                        self._early[news["exit"]] = news["status"]
                if child is not None:
                    child.ended(news["status"])
        except EOFError:
            self.channel.close()
            with self._lock:
                orphans, self._children = list(self._children.values()), {}
            for child in orphans:
                child.let_go()
                child.ended(-signal.SIGKILL)


def _importable(environ: dict[str, str]) -> dict[str, str]:
    """Let the zygote find distkit where this process found it, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def _gone(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return (
            "no more processes can be started: the limit of processes or of memory is reached. "
            "Stop other clusters, or ask for fewer ranks."
        )
    return (
        f"the process that ranks are forked from ended ({code}). "
        "Its messages are in the terminal that runs Jupyter; "
        "make the cluster again to start a new one."
    )


_server: ForkServer | None = None
_guard = threading.Lock()


def server() -> ForkServer:
    """This process's fork server, started if need be; the closed one when this process ends."""
    global _server
    with _guard:
        if _server is None or not (_server.alive or _server.closed):
            _server = ForkServer()
            # at exit finalizers run from the latest to the first: its clusters close before it
            weakref.finalize(_server, _server.close)
        return _server


def _forget() -> None:
    """In a fork of the kernel: let go of the line, or the zygote would outlive the kernel."""
    global _server, _guard
    _guard = threading.Lock()
    if _server is not None:
        for child in _server._children.values():
            child.channel._sock.close()
        _server.channel._sock.close()
        _server = None


os.register_at_fork(after_in_child=_forget)


def private_folder() -> str:
    """A new folder that only this user can enter: sockets and rendezvous files live there."""
    try:
        folder = tempfile.mkdtemp(prefix="distkit-")  # made with mode 0700
        if len(os.fsencode(folder)) <= _LONGEST:
            return folder
        Path(folder).rmdir()
        raise OSError(errno.ENAMETOOLONG, "its path is too long for sockets")
    except OSError as error:
        raise StartError(
            f"no folder can be made in {tempfile.gettempdir()} ({error.strerror}). "
            "Free some space there, or set TMPDIR to a folder with a short path that can be "
            "written to."
        ) from error
