"""The agent on another machine: a fork server for ranks, and a tunnel to the kernel.

The command ``python -m distkit_hosts.remote.agent`` is run over SSH, by an ipyparallel launcher in
place of an engine, or by an existing engine. The environment variable ``DISTKIT_AGENT`` is a JSON
object with the kernel's endpoint, the cluster's keys and, over SSH, this machine's name. One agent
per machine forks ranks; surplus agents that ``srun`` or ``mpiexec`` starts exit once all machines
have connected.

The agent forwards messages between the kernel and the fork server. When the tunnel breaks,
for example after a network timeout, all processes here exit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distkit.cluster import machine
from distkit.cluster.processes import cleanup
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.fork_client import start_fork_server
from distkit.cluster.processes.rank_spec import free_port, inherited_fields
from distkit.errors import StartError
from distkit_hosts.remote.tunnel import Multiplexer, Tunnel

#: The environment variable with the kernel's endpoint and keys.
AGENT = "DISTKIT_AGENT"

#: Timeout for the kernel's reply [s].
WELCOME_TIMEOUT = 15.0

#: Grace period for a fork server to finish an import before it is killed [s].
SHUTDOWN_TIMEOUT = 2.0

#: Interval between checks that the engine that started the agent is alive [s].
CHECK_INTERVAL = 1.0


class Agent:
    """A kernel's agent on this machine.

    Args:
        kernel: the kernel's ``endpoint`` and ``keys``; the ``name`` of this machine, if the kernel
            knows it; ``parent``, the pid of the engine that started this agent, if one did.
    """

    def __init__(self, kernel: dict[str, Any]) -> None:
        self._kernel = kernel
        self._welcomed, self._ended = False, threading.Event()
        self._prefix = cleanup.new_prefix()
        self._fork_server: Channel | None = None  # channel to the fork server
        multiplexer = self._multiplexer = Multiplexer(
            kernel["endpoint"], tuple(kernel["keys"]), listen=False
        )
        self._tunnel: Tunnel = multiplexer.connect()
        self._tunnel.on_message, self._tunnel.on_stream = self._on_message, self._fork
        self._tunnel.on_lost = self._end

    def serve(self) -> None:
        """Serve until the kernel has disconnected, then clean up."""
        if self._kernel.get("name"):
            self._start_fork_server()  # over SSH, this agent is never surplus
        self._multiplexer.start()
        self._tunnel.send({"here": self._describe_machine()})
        started = time.monotonic()
        while not self._ended.wait(CHECK_INTERVAL):
            if not self._welcomed and time.monotonic() - started > WELCOME_TIMEOUT:
                self._end(
                    f"no reply from {self._kernel['endpoint']}. Either the notebook's kernel has "
                    "exited, or its machine cannot be reached from here: see distkit doctor --hosts"
                )
            if self._kernel.get("parent", os.getppid()) != os.getppid():
                self._end("the engine that started the agent has exited")
        self._clean_up()

    def _describe_machine(self) -> dict[str, Any]:
        kernel_address = self._kernel["endpoint"].removeprefix("tcp://").rsplit(":", 1)[0]
        address = machine.local_address(kernel_address)
        return {
            "name": self._kernel.get("name") or platform.node(),
            "address": address,
            "interface": interface_of(address),
            "cpus": machine.cpus(),
            "memory": machine.memory(),
            "gpus": machine.gpus(),
            **versions(),
            # a folder with a package's name has a spec without an origin
            "missing": [
                name
                for name in ("torch", "ipyparallel")
                if getattr(find_spec(name), "origin", None) is None
            ],
            "executable": sys.executable,
            "pid": os.getpid(),
            "port": free_port(address),
            **inherited_fields(),
            "environ": {k: v for k, v in os.environ.items() if not _LAUNCHER.match(k)},
        }

    def _start_fork_server(self) -> None:
        self._fork_server, remote_end = Channel.pair()
        with remote_end:
            self._process = start_fork_server(remote_end, self._prefix)
        self._fork_server.send({"do": "call", "target": "distkit.cluster.processes.roles:preload"})
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self) -> None:
        """Forward the fork server's messages, with the files of processes that have exited."""
        assert self._fork_server is not None
        try:
            while True:
                message = self._fork_server.recv()
                if log := message.get("log"):
                    message["files"] = _final_files(Path(log))
                self._tunnel.send(message)
        except (EOFError, OSError):
            self._end("the process that ranks are forked from has exited")

    def _on_message(self, message: dict[str, Any]) -> None:
        """Handle a message from the kernel to this agent or the fork server."""
        match message["do"]:
            case "welcome":
                self._welcomed = True
                if self._fork_server is None:
                    self._start_fork_server()
            case "leave":
                self._end("")
            case "folder":
                self._make_folder(message["processes"], message["sockets"])
            case _:
                self._send_to_fork_server(message)

    def _fork(self, message: dict[str, Any]) -> socket.socket:
        """Fork a process; the kernel's stream is its lifeline."""
        local_end, remote_end = socket.socketpair()
        with remote_end:
            self._send_to_fork_server(message, remote_end.fileno())
        return local_end

    def _send_to_fork_server(self, message: dict[str, Any], fd: int | None = None) -> None:
        with suppress(OSError):  # the fork server has exited, which is reported separately
            if self._fork_server is not None:
                self._fork_server.send(message, fd)

    def _make_folder(self, processes: int, sockets: dict[str, str]) -> None:
        """Create a folder like the kernel's, and forward its sockets to the kernel's sockets."""
        try:
            folder = cleanup.make_folder(self._prefix, processes)
        except StartError as error:
            self._tunnel.send({"refused": str(error)})
            return
        listeners = {_listen(f"{folder}/{name}"): target for name, target in sockets.items()}
        threading.Thread(target=self._forward_connections, args=(listeners,), daemon=True).start()
        self._tunnel.send({"folder": folder})

    def _forward_connections(self, listeners: dict[socket.socket, str]) -> None:
        """Connect each local connection to the listener's target socket, through a stream."""
        with suppress(OSError):  # the tunnel is lost
            while True:
                for listener in select.select(list(listeners), [], [])[0]:
                    with listener.accept()[0] as connection:
                        self._tunnel.send({"to": listeners[listener]}, connection.fileno())

    def _end(self, reason: str) -> None:
        """Stop the agent and report the reason; ``reason`` is "" if the kernel has stopped it."""
        if reason and not self._ended.is_set():
            with suppress(OSError):  # the tunnel is lost
                self._tunnel.send({"ended": reason})
            with suppress(OSError):  # the terminal is closed
                print(
                    f"distkit: killing the ranks on this machine: {reason}",
                    file=sys.stderr,
                    flush=True,
                )
        self._ended.set()

    def _clean_up(self) -> None:
        """Terminate the fork server with all forked processes and remove the folders."""
        if self._fork_server is not None:
            self._fork_server.shutdown()
            try:
                self._process.wait(SHUTDOWN_TIMEOUT)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        cleanup.remove_folders(self._prefix)
        self._multiplexer.close()


#: Launchers' variables for the agent's own process, which ranks must not inherit.
_LAUNCHER = re.compile("OMPI_|PMIX_|PMI_|MPI_LOCAL|HYDI_|SLURM_(?!JOB)")


def versions() -> dict[str, str]:
    """Return the versions that must match on all machines."""
    return {
        "python": sys.version.split()[0],
        "distkit": sys.modules["distkit"].__version__,  # an import would be circular
    }


def interface_of(address: str) -> str:
    """Return the name of the interface with this address, or "" if there is none."""
    import psutil

    return next(
        (n for n, known in psutil.net_if_addrs().items() if address in [a.address for a in known]),
        "",
    )


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def _final_files(log: Path) -> dict[str, bytes]:
    """Return the log and the black box of a process that exited."""
    found = {}
    for file in (log, log.with_suffix(".box")):
        with suppress(OSError):
            found[file.name] = file.read_bytes()
    return found


def start_in_engine(kernel: dict[str, Any]) -> None:
    """Start an agent from an engine of an existing cluster; it exits with the engine."""
    process = subprocess.Popen(
        [sys.executable, "-m", "distkit_hosts.remote.agent"],
        env={**os.environ, AGENT: json.dumps({**kernel, "parent": os.getpid()})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, daemon=True).start()  # otherwise it would remain a zombie


def main() -> None:
    """Run this machine's agent."""
    for number in (signal.SIGINT, signal.SIGHUP):  # only the kernel handles these
        signal.signal(number, signal.SIG_IGN)
    Agent(json.loads(os.environ.pop(AGENT))).serve()


if __name__ == "__main__":
    main()
