"""The kernel's handle on a zygote: fork from it, hear who ended.

That of this machine, :func:`server`, is started at the first use and kept warm: a second cluster
forks from the same process. Those of other machines are :mod:`distkit_hosts.remote.host`'s.
See :mod:`distkit.cluster.processes.zygote` for the other side.
"""

from __future__ import annotations

import itertools
import os
import pickle
import platform
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any

from distkit.cluster import machine
from distkit.cluster.gpus import Gpus, examine
from distkit.cluster.processes import boot, folders
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.descendants import PATIENCE
from distkit.errors import StartError

#: A zygote answers within this time [s]; it may be importing torch.
ANSWER = 60.0

#: A process that was killed has ended within this time [s].
ENDED = 5.0

#: The signal that has stopped a process, 0 if it goes on; and when [s, monotonic].
Stop = tuple[int, float]


class Child:
    """A forked process: its pid, its lifeline, and what to do when it ends.

    ``number`` is by which the zygote speaks of it.
    """

    def __init__(self, channel: Channel, server: ForkServer, number: int) -> None:
        self.channel, self.server, self.number = channel, server, number
        self.pid = 0  # until it has begun
        self.status: int | None = None  # exit status, negative for a signal
        self.stopped: Stop = (0, 0.0)
        #: Called with that, from another thread, when the process is stopped and when it goes on.
        self.on_stop: Callable[[Stop], None] = lambda stop: None
        self._silent = False  # its line has come to its end
        #: Its status, when its last words have been heard.
        self._end: futures.Future[int] = futures.Future()

    def await_start(self) -> None:
        """Wait for its first message.

        Raises:
            StartError: it could not be forked.
        """
        try:
            self.pid = int(self.channel.recv()[1])
        except EOFError as e:
            raise StartError(self.server.why()) from e

    def hear(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(message)`` from another thread for all that it says from now on."""
        self.channel.listen(callback, self._fell_silent)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(status)`` once, from another thread, when the process has ended.

        Whatever it said before has been heard by then.
        """
        self._end.add_done_callback(lambda end: callback(end.result()))

    def wait(self, timeout: float) -> bool:
        """Wait until the process has ended; False when it has not within ``timeout`` seconds."""
        return bool(futures.wait([self._end], timeout).done)

    def ended(self, status: int) -> None:
        """Note the end; those who asked are told when its last words have been heard."""
        self.status = status
        self.channel.hang_up()  # a process that it forked may hold the other end
        self._tell()

    def _fell_silent(self) -> None:
        self._silent = True
        self._tell()

    def _tell(self) -> None:
        if self.status is not None and self._silent:
            with suppress(futures.InvalidStateError):  # both threads have come here
                self._end.set_result(self.status)


class ForkServer:
    """Talks to a zygote: of this host, see :func:`server`, or of another one.

    Args:
        channel: the line to the zygote.
        host: the name of the machine that it is on.
    """

    def __init__(self, channel: Channel, host: str) -> None:
        self.channel, self.host = channel, host
        self._asking, self.closed = threading.Lock(), False
        self._numbers, self._children = itertools.count(1), dict[int, Child]()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._on_loss: list[Callable[[str], None]] = []
        self._lost = threading.Event()  # the zygote has ended
        _every.add(self)
        channel.listen(self._hear, self._lose)

    @property
    def alive(self) -> bool:
        """True if the zygote is there to fork from."""
        return not (self._lost.is_set() or self.channel.broken())

    def make_folder(self, processes: int, controller: bool = False) -> str:
        """A new folder that only this user can enter, for so many processes' files.

        Raises:
            StartError: there is no room for them, or they may not open as many as they need.
        """
        raise NotImplementedError

    def why(self) -> str:
        """The reason why nothing can be forked."""
        raise NotImplementedError

    def on_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call ``callback(why)``, from another thread, if the zygote ends with all that it forked.

        It is called before the children's ends are told. Returns what removes the callback.
        """
        self._on_loss.append(callback)
        return partial(self._on_loss.remove, callback)

    def preload(self, *modules: str) -> None:
        """Have modules imported in the zygote now, without waiting."""
        self._send({"do": "import", "modules": list(modules)})

    def fork(self, run: str, *, folder: str, log: str, **arguments: Any) -> Child:
        """Fork a child running ``run`` ("module:function") and wait for its first word."""
        return fork_all(run, [(self, {"folder": folder, "log": log, **arguments})])[0]

    def ask_for(self, run: str, *, folder: str, log: str, **arguments: Any) -> Child:
        """Have a child forked, without waiting until it has begun."""
        number = next(self._numbers)
        word = {"do": "fork", "number": number, "run": run, "log": log, "folder": folder}
        ours, theirs = Channel.pair()
        child = self._children[number] = Child(ours, self, number)
        with theirs:
            packed = pickle.dumps({"folder": folder, **arguments})
            self._send({**word, "arguments": packed}, theirs.fileno())
        return child

    def gpus(self, device: str) -> Gpus:
        """The GPUs that ranks may use; torch is asked only where there are some."""
        found = {"found": []} if device == "cpu" else self.devices()
        return examine(found, self._ask({"do": "torch"}) if found["found"] else {})

    def devices(self) -> dict[str, Any]:
        """The machine's answer of :func:`distkit.cluster.machine.gpus`."""
        return machine.gpus()

    def complete(self) -> None:
        """Have the zygote import now what programs import late, without waiting."""
        self._send({"do": "complete"})

    def wait_until_idle(self) -> None:
        """Wait until the zygote has done what it was asked."""
        self._ask({"do": "torch"})

    def kill(self, children: list[Child], over: bool = False) -> None:
        """End children, and whatever they started; ``over``: their logs are not needed."""
        with suppress(OSError):
            numbers = [child.number for child in children]
            self.channel.send({"do": "kill", "numbers": numbers, "over": over})

    def remove(self, folder: str) -> None:
        """Remove a folder that children worked in."""
        with suppress(OSError):
            self.channel.send({"do": "remove", "folder": folder})

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            self.channel.send(message, fd)
        except OSError as e:
            raise StartError(self.why()) from e

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send something that is answered; the answer, one caller after the other."""
        with self._asking:
            self._send(message)
            try:
                answer = self._answers.get(timeout=ANSWER)
            except queue.Empty:
                raise StartError(f"the fork server on {self.host} does not answer.") from None
        if "lost" in answer:
            raise StartError(self.why())
        return answer

    def _hear(self, news: dict[str, Any]) -> None:
        """Of a child that has stopped, goes on or has ended; or an answer."""
        if "stopped" in news:
            child = self._children[news["stopped"]]
            child.stopped = news["signal"], time.monotonic()
            child.on_stop(child.stopped)
        elif "exit" in news:
            self._children.pop(news["exit"]).ended(news["status"])
        else:
            self._answers.put(news)

    def _lose(self) -> None:
        """The zygote has ended, and with it all its children."""
        self._lost.set()
        self._answers.put({"lost": True})
        for callback in [] if self.closed else list(self._on_loss):
            callback(self.why())
        orphans, self._children = list(self._children.values()), {}
        for child in orphans:
            child.channel.hang_up()
            child.ended(-signal.SIGKILL)

    def forget(self) -> None:
        """In a fork of the kernel: let go of the lines, or what was forked would outlive it."""
        for child in self._children.values():
            child.channel.close_here()
        self.channel.close_here()


class LocalForkServer(ForkServer):
    """Starts the zygote of this machine. Use :func:`server`."""

    def __init__(self) -> None:
        self._folders: dict[str, int] = {}  # and what holds their locks
        ours, theirs = Channel.pair()
        with theirs:
            self.process = start_zygote(theirs)
        super().__init__(ours, platform.node())

    @property
    def alive(self) -> bool:
        """True if the zygote is there to fork from."""
        return super().alive and self.process.poll() is None

    def make_folder(self, processes: int, controller: bool = False) -> str:
        """A new folder on this machine, locked while this process lives."""
        machine.check_files(processes, controller)
        folder, held = folders.make(processes)
        self._folders[folder] = held
        return folder

    def remove(self, folder: str) -> None:
        """Remove a folder that children worked in."""
        held = self._folders.pop(folder, None)
        try:
            self.channel.send({"do": "remove", "folder": folder})
        except OSError:  # the zygote has ended, and its reaper sees that nobody works there
            self._await_end()
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            if held is not None:
                os.close(held)

    def close(self) -> None:
        """End the zygote and everything that it forked."""
        self.closed = True
        self.channel.close()
        self._await_end()
        for folder in list(self._folders):  # nobody has removed them, so the zygote was killed
            self.remove(folder)

    def _await_end(self) -> None:
        """Wait until the zygote has ended, and then its reaper."""
        try:
            self.process.wait(5 + PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def why(self) -> str:
        """The reason why nothing can be forked."""
        if self.closed:
            return "no more processes can be started: this process is ending."
        with suppress(subprocess.TimeoutExpired):  # it may have just ended
            code = self.process.wait(1 if self.channel.broken() else 0)
            return (
                f"the process that ranks are forked from ended ({_how(code)}), and all ranks with "
                "it. Its messages are in the terminal that runs Jupyter."
            )
        return (
            "no more processes can be started: the limit of processes or of memory is reached. "
            "Stop other clusters, or ask for fewer ranks."
        )

    def forget(self) -> None:
        """In a fork of the kernel: let go of the lines and the locks."""
        super().forget()
        for held in self._folders.values():
            os.close(held)
        self._folders.clear()


def fork_all(run: str, each: Iterable[tuple[ForkServer, dict[str, Any]]]) -> list[Child]:
    """Fork several at once: their starts overlap. If one cannot be had, none stays.

    Args:
        run: what they call, "module:function".
        each: where each is forked, and its arguments.
    """
    asked: list[Child] = []
    try:
        for one, arguments in each:
            asked.append(one.ask_for(run, **arguments))
        for child in asked:
            child.await_start()
    except BaseException:
        for child in asked:  # who hears that its line is broken, ends
            child.channel.close()
        raise
    return asked


def end(children: Iterable[Child], over: bool = False) -> None:
    """End processes, on whichever machines they are, and whatever they started.

    Args:
        children: the processes.
        over: their run has ended, so that other machines need not send their logs.
    """
    of: dict[ForkServer, list[Child]] = {}
    for child in children:
        of.setdefault(child.server, []).append(child)
    for one, mine in of.items():
        one.kill(mine, over)


def shut(children: Iterable[Child], within: float = ENDED) -> None:
    """End processes, wait so long [s] until they have ended, and break the lines to them."""
    children = [*children]
    end(children, over=True)
    for child in children:
        child.wait(within)
        child.channel.hang_up()


def start_zygote(line: socket.socket, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Start a zygote of this machine that obeys what comes by ``line``.

    Args:
        line: its end of the line.
        stderr: where its messages go, as for Popen.
    """
    zygote = "distkit.cluster.processes.zygote:main"
    return subprocess.Popen(
        boot.command(zygote, line.fileno(), tempfile.gettempdir()),
        pass_fds=[line.fileno()],
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C is not meant for it
    )


def _environ() -> dict[str, str]:
    """The zygote's surroundings: what it imports is told, and what ranks import is up to them."""
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environ.pop("PYTHONPATH", None)
    environ.pop("CUDA_VISIBLE_DEVICES", None)  # of a MIG slice: torch would ask CUDA, not NVML
    return environ


def _how(code: int) -> str:
    """The end of the zygote, as its reaper tells; or of the reaper itself."""
    number = -code if code < 0 else code - 128
    return f"signal {signal.Signals(number).name}" if number > 0 else f"exit status {code}"


_server: LocalForkServer | None = None
_every: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_guard = threading.Lock()


def server() -> LocalForkServer:
    """This process's fork server, started if need be; the closed one when this process ends."""
    global _server
    with _guard:
        if _server is None or not (_server.alive or _server.closed):
            _server = LocalForkServer()
            # at exit finalizers run from the latest to the first: its clusters close before it
            weakref.finalize(_server, _server.close)
        return _server


def call_beside(run: str, *arguments: str) -> None:
    """Call ``run`` ("module:function") while the fork server starts, which it will need."""
    server()
    boot.call(run, *arguments)


def _forget() -> None:
    """In a fork of the kernel: let go of the line, or the zygote would outlive the kernel."""
    global _server, _guard
    _guard = threading.Lock()
    for one in _every:
        one.forget()
    _every.clear()
    _server = None


os.register_at_fork(after_in_child=_forget)
