"""The kernel's client of a fork server: forks processes and receives their exit statuses.

All clusters share the client for this machine, which :func:`server` creates on first use.
:mod:`distkit_hosts.remote.fleet` contains the clients for other machines, and
:mod:`distkit.cluster.processes.fork_server` implements the fork server.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import pickle
import platform
import queue
import re
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit import imports
from distkit.cluster import machine
from distkit.cluster.plan import Gpus, examine
from distkit.cluster.processes import cleanup
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.cleanup import END_TIMEOUT
from distkit.errors import StartError

#: Timeout for a response from the fork server, which may be importing torch [s].
RESPONSE_TIMEOUT = 60.0

#: Modules that ranks import lazily, each with a pattern. An import can take seconds, so the fork
#: server imports a module before it forks the ranks of a call or a script that matches the pattern.
LATE_MODULES = {
    "torch._dynamo": rb"optim|DistributedDataParallel|distkit_strategies",
    "torch.distributed.fsdp": rb"torch\.distributed\.(fsdp|tensor)",
    "distkit_examples.demos": rb"distkit_examples\.demos",
}

#: Timeout for detecting that the fork server has exited [s].
LOSS_TIMEOUT = 0.5

#: Timeout for a killed process to exit [s].
KILL_TIMEOUT = 5.0


class Child:
    """A forked process: its pid, its lifeline, and its exit callbacks.

    ``number`` identifies the process in messages to and from the fork server.
    """

    def __init__(self, channel: Channel, server: ForkClient, number: int) -> None:
        self.channel, self.server, self.number = channel, server, number
        self.pid = 0  # until it has started
        self.status: int | None = None  # exit status, negative for a signal
        self._status_event = threading.Event()
        #: The exit status, set once the process's last message has been handled.
        self._exit: futures.Future[int] = futures.Future()

    def wait_for_start(self) -> None:
        """Wait for the process's first message.

        Raises:
            StartError: the process could not be forked.
        """
        try:
            self.pid = int(self.channel.recv()[1])
        except EOFError as e:
            raise StartError(self.server.loss_reason()) from e

    def send(self, message: Any) -> None:
        """Send a message.

        If the process has exited, the message is discarded; the exit is reported separately.
        """
        with suppress(OSError):
            self.channel.send(message)

    def on_message(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(message)`` from a new thread for each message that arrives."""
        self.channel.listen(callback, self._on_channel_closed)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(status)`` in some thread once the process has exited.

        All its messages have been handled by then.
        """
        self._exit.add_done_callback(lambda future: callback(future.result()))

    def wait(self, timeout: float) -> bool:
        """Wait until the process has exited; return False after a timeout [s]."""
        return bool(futures.wait([self._exit], timeout).done)

    def set_exit_status(self, status: int) -> None:
        """Set the exit status; callbacks are called once the last message has been handled."""
        self.status = status
        # children of the process may keep the other end open
        self.server.shut_down_channel(self.channel)
        self._status_event.set()

    def _on_channel_closed(self) -> None:
        self._status_event.wait()
        assert self.status is not None
        self._exit.set_result(self.status)


class ForkClient:
    """The client of a fork server on this host (see :func:`server`) or on another host.

    Args:
        channel: the channel to the fork server.
        host: the name of the fork server's machine.
    """

    def __init__(self, channel: Channel, host: str) -> None:
        self.channel, self.host = channel, host
        self._request_lock, self.closed = threading.Lock(), False
        self._numbers, self._children = itertools.count(1), dict[int, Child]()
        self._responses: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        #: Callbacks for the exit of the fork server and its children. They receive the reason and
        #: are called in another thread, before the children's exit callbacks.
        self.on_loss: set[Callable[[str], None]] = set()
        self.lost = threading.Event()  # the fork server has exited
        channel.listen(self._handle_message, self._handle_loss)

    def shut_down_channel(self, channel: Channel) -> None:
        """Shut down the channel of a process that has exited, after its last message."""
        channel.shutdown()

    def loss_reason(self) -> str:
        """Explain why no process can be forked."""
        raise NotImplementedError

    def preload(self, target: str) -> None:
        """Make the fork server import ``target`` ("module") or call it ("module:function")."""
        self._send({"do": "call", "target": target})

    def prepare(self, fn: Any, payload: bytes) -> None:
        """Make the fork server import the modules that a script or a pickled call needs."""
        text = Path(fn).read_bytes() if isinstance(fn, (str, Path)) else payload
        for module in [m for m, pattern in LATE_MODULES.items() if re.search(pattern, text)]:
            self.preload(module)

    def start_fork(self, target: str, *, folder: str, log: str, **arguments: Any) -> Child:
        """Request a child that calls ``target`` ("module:function"); do not wait for it."""
        number = next(self._numbers)
        channel, remote = Channel.pair()
        child = self._children[number] = Child(channel, self, number)
        request = {
            "do": "fork",
            "number": number,
            "target": target,
            "folder": folder,
            "log": log,
            "arguments": pickle.dumps({"folder": folder, **arguments}),
        }
        with remote:
            self._send(request, remote.fileno())
        return child

    def gpus(self, device: str) -> Gpus:
        """Return the GPUs that ranks may use; query torch only if the machine has GPUs."""
        report = {"found": []} if device == "cpu" else self.devices()
        return examine(report, self._ask({"do": "torch"}) if report["found"] else {})

    def devices(self) -> dict[str, Any]:
        """Return the result of :func:`distkit.cluster.machine.gpus` on the server's machine."""
        return machine.gpus()

    def wait_until_idle(self) -> None:
        """Wait until the fork server has executed all previous requests."""
        self._ask({"do": "torch"})

    def kill(self, children: list[Child], discard_logs: bool = False) -> None:
        """Kill children and their descendants; optionally discard their logs."""
        with suppress(OSError):
            self.channel.send(
                {
                    "do": "kill",
                    "numbers": [child.number for child in children],
                    "discard_logs": discard_logs,
                }
            )

    def remove(self, folder: str) -> None:
        """Remove a folder that children used."""
        with suppress(OSError):
            self.channel.send({"do": "remove", "folder": folder})

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            self.channel.send(message, fd)
        except OSError as e:
            raise StartError(self.loss_reason()) from e

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the response; a lock serializes the callers."""
        with self._request_lock:
            self._send(message)
            try:
                response = self._responses.get(timeout=RESPONSE_TIMEOUT)
            except queue.Empty:
                raise StartError(
                    f"the fork server on {self.host} did not respond within "
                    f"{RESPONSE_TIMEOUT:.0f} s. The machine may be overloaded: stop other programs."
                ) from None
        if "lost" in response:
            raise StartError(self.loss_reason())
        return response

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handle a child's exit, or a response."""
        if "exit" in message:
            self._children.pop(message["exit"]).set_exit_status(message["status"])
        else:
            self._responses.put(message)

    def _handle_loss(self) -> None:
        """Handle the exit of the fork server and of all its children."""
        self.lost.set()
        self._responses.put({"lost": True})
        for callback in [] if self.closed else list(self.on_loss):
            callback(self.loss_reason())
        orphans, self._children = list(self._children.values()), {}
        for child in orphans:
            child.channel.shutdown()
            child.set_exit_status(-signal.SIGKILL)


class LocalForkClient(ForkClient):
    """The client of a fork server that it starts on this machine. Use :func:`server`."""

    def __init__(self) -> None:
        self._prefix = cleanup.new_prefix()
        channel, remote = Channel.pair()
        with remote:
            self.process = start_fork_server(remote, self._prefix)
        super().__init__(channel, platform.node())

    def make_folder(self, processes: int) -> str:
        """Create a folder that only this user can access, for ``processes`` processes.

        Raises:
            StartError: the folder cannot be created.
        """
        return cleanup.make_folder(self._prefix, processes)

    def close(self) -> None:
        """Terminate the fork server and its descendants."""
        self.closed = True
        self.channel.close()
        try:
            self.process.wait(5 + END_TIMEOUT)  # its subreaper exits last
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def loss_reason(self) -> str:
        """Explain why no process can be forked."""
        if self.closed:
            return "no more processes can be started: this process is exiting."
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(1 if self.lost.wait(LOSS_TIMEOUT) else 0)
            exit_status = (
                f"signal {signal.Signals(status - 128).name}"
                if status > 128
                else f"status {status}"
            )
            return (
                f"the process that ranks are forked from exited ({exit_status}), and all "
                "ranks with it. Its output is in the terminal that runs Jupyter."
            )
        return (
            "no more processes can be started: the limit on processes or memory has been reached. "
            "Stop other clusters, or use fewer ranks."
        )


def fork_all(requests: Iterable[tuple[ForkClient, dict[str, Any]]]) -> list[Child]:
    """Fork several processes concurrently; if one fails, terminate the others.

    Args:
        requests: a client and the arguments of :meth:`ForkClient.start_fork` for each process.
    """
    children: list[Child] = []
    try:
        for fork_server, arguments in requests:
            children.append(fork_server.start_fork(**arguments))
        for child in children:
            child.wait_for_start()
    except BaseException:
        for child in children:  # a process exits when its channel is closed
            child.channel.close()
        raise
    return children


def kill_processes(children: Collection[Child], discard_logs: bool = False) -> None:
    """Kill processes on one or more machines, and all their descendants.

    Args:
        children: the processes.
        discard_logs: whether to discard the logs that other machines would send.
    """
    for fork_server in {child.server for child in children}:
        fork_server.kill([c for c in children if c.server is fork_server], discard_logs)


def shut_down(children: Iterable[Child], timeout: float = KILL_TIMEOUT) -> None:
    """Kill processes, wait up to ``timeout`` seconds for each, and close their channels."""
    children = [*children]
    kill_processes(children, discard_logs=True)
    for child in children:
        child.wait(timeout)
        child.channel.shutdown()


def start_fork_server(remote: socket.socket, prefix: str) -> subprocess.Popen[bytes]:
    """Start a fork server on this machine.

    Args:
        remote: the fork server's end of its channel.
        prefix: prefix of the folders that are removed when the fork server exits.
    """
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environ.pop("PYTHONPATH", None)  # the command sets sys.path, and ranks set it again
    environ.pop("CUDA_VISIBLE_DEVICES", None)  # with a MIG slice torch would query CUDA, not NVML
    return subprocess.Popen(
        imports.python_command(
            "distkit.cluster.processes.fork_server:main", remote.fileno(), prefix
        ),
        pass_fds=[remote.fileno()],
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
    )


_server: LocalForkClient | None = None
_server_lock = threading.Lock()


def server() -> LocalForkClient:
    """Return the client of this machine's fork server, which is started if necessary."""
    global _server
    with _server_lock:
        if _server is None or (_server.lost.is_set() and not _server.closed):
            _server = LocalForkClient()
            # finalizers run in reverse order at exit: clusters close before their fork server
            weakref.finalize(_server, _server.close)
            # otherwise Python examines torch's objects for a second before it exits
            atexit.register(gc.freeze)
        return _server


def call_during_start(target: str, *arguments: str) -> None:
    """Start the fork server and call ``target`` ("module:function") while it starts."""
    server()
    imports.call_target(target, *arguments)


def _forget() -> None:
    """Make a fork of this process start its own fork server."""
    global _server, _server_lock
    _server, _server_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
