"""On another machine: a zygote, and a tunnel to the kernel that wants ranks forked from it.

Run by ipyparallel's launchers in the place of an engine, or from an engine that somebody else
has started: ``python -m distkit_hosts.remote.agent``. The environment variable ``DISTKIT_AGENT``
says, as JSON, where the kernel listens, the cluster's keys, and this machine's name there. One
agent a machine forks; what ``srun`` or ``mpiexec`` has started beside it ends at once.

Whatever the kernel says goes on to the zygote, and what the zygote tells goes back. When the
tunnel breaks, and be it because the network is silent, everything here ends.
"""

from __future__ import annotations

import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distkit.cluster import machine
from distkit.cluster.processes import folders
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.forkserver import start_zygote
from distkit.cluster.processes.rank_spec import inherited
from distkit.errors import StartError
from distkit_hosts.launched import recognise
from distkit_hosts.remote.tunnel import Relay, Tunnel

#: The environment variable that says where the kernel is.
AGENT = "DISTKIT_AGENT"

#: Who has no answer of the kernel's after so long [s] gives up; and who cannot reach it at all.
WELCOME, REACH = 30.0, 10.0

#: A zygote that imports hears nothing; so long it may go on [s] when all else has ended.
IMPORTING = 2.0

#: When a zygote has ended, its last messages come within this time [s].
SAID = 1.0

#: How often to look whether the engine that started the agent is there [s].
WATCH = 1.0


class Agent:
    """What the kernel has on this machine.

    Args:
        where: ``endpoint`` and ``keys`` of the kernel's relay; ``name`` of this machine, "" if the
            kernel does not know it; ``network``, an address that is reached by the interface that
            ranks are to use, "" for that of the kernel.
    """

    def __init__(self, where: dict[str, Any]) -> None:
        self._where, self._place = where, recognise(os.environ, platform.node())
        self._answered, self._over = False, threading.Event()
        self._folders: dict[str, int | None] = {}
        #: The exit status: 0 if the kernel has ended this agent, or itself.
        self.status = 0
        self._zygote: Channel | None = None  # to the process that forks
        self._said: deque[str] = deque(maxlen=20)  # by that process
        relay = self._relay = Relay(where["endpoint"], tuple(where["keys"]), listen=False)
        self._tunnel: Tunnel = relay.connect()
        self._tunnel.on_word, self._tunnel.on_line = self._hear, self._fork
        self._tunnel.on_lost = self._end

    def serve(self) -> None:
        """Serve until the kernel is gone, then leave nothing behind."""
        if self._where.get("name") or self._place.local_rank == 0:
            self._start_zygote()  # sure to be used: it imports torch while the kernel is told
        self._relay.start()
        self._tunnel.say({"here": self._facts()})
        begun = time.monotonic()
        parent = self._where.get("parent")  # the engine that has started this agent, if one has
        while not self._over.wait(WATCH):
            waited = 0.0 if self._answered else time.monotonic() - begun
            if waited > (WELCOME if self._tunnel.reached else REACH):
                self._end(
                    f"no answer from {self._where['endpoint']}. Either the notebook's kernel has "
                    "ended, or its machine cannot be reached from here: see distkit doctor --hosts",
                    status=1,
                )
            if parent is not None and os.getppid() != parent:
                self._end("the engine that started it has ended")
        self._clean_up()

    def _facts(self) -> dict[str, Any]:
        kernel = self._where["endpoint"].removeprefix("tcp://").rsplit(":", 1)[0]
        address = machine.own_address(self._where.get("network") or kernel)
        return {
            "name": self._where.get("name") or platform.node(),
            "node": platform.node(),
            "address": address,
            "interface": interface_of(address),
            "cpus": machine.cpus(),
            "memory": machine.memory(),
            "gpus": machine.gpus(),
            **versions(),
            "missing": [name for name in ("torch", "ipyparallel") if not _is_installed(name)],
            "executable": sys.executable,
            "pid": os.getpid(),
            "order": self._where.get("order", self._place.rank),
            "port": _free_port(address),
            **inherited(),
            "environ": {k: v for k, v in os.environ.items() if not _LAUNCHER.match(k)},
        }

    def _start_zygote(self) -> None:
        self._zygote, theirs = Channel.pair()
        with theirs:
            self._process = start_zygote(theirs, subprocess.PIPE)
        self._listener = threading.Thread(target=self._overhear, daemon=True)
        self._listener.start()
        self._zygote.send({"do": "import", "modules": ["distkit.cluster.processes.preload:hook"]})
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _overhear(self) -> None:
        """Keep the zygote's latest messages for the kernel, and let them pass."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.decode(errors="replace"))
            _print(self._said[-1].rstrip())

    def _pass_on(self) -> None:
        """Tell the kernel what the zygote tells; of a process that has ended, its files, too."""
        assert self._zygote is not None
        try:
            while True:
                news = self._zygote.recv()
                if log := news.get("log"):
                    news["files"] = _last_words(Path(log))
                self._tunnel.say(news)
        except (EOFError, OSError):
            self._listener.join(SAID)
            self._end("the process that ranks are forked from ended", status=1)

    def _hear(self, word: dict[str, Any]) -> None:
        """A word of the kernel's: for this agent, or else for the zygote."""
        match word["do"]:
            case "welcome":
                self._answered = True
                if self._zygote is None:
                    self._start_zygote()
            case "leave":
                self._end("")
            case "folder":
                self._make_folder(word["processes"], word["sockets"])
            case _:
                self._tell_zygote(word)

    def _fork(self, word: dict[str, Any]) -> socket.socket:
        """Have a process forked; the line that the kernel begins is its lifeline."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._tell_zygote(word, theirs.fileno())
        return ours

    def _tell_zygote(self, word: dict[str, Any], fd: int | None = None) -> None:
        if word["do"] == "remove" and (held := self._folders.pop(word["folder"], None)) is not None:
            os.close(held)
        with suppress(OSError):  # it has ended, which the kernel is told
            if self._zygote is not None:
                self._zygote.send(word, fd)

    def _make_folder(self, processes: int, sockets: dict[str, str]) -> None:
        """Make a folder as the kernel has one, with sockets that lead to those of the kernel's."""
        try:
            machine.check_files(processes, False)
            folder, held = folders.make(processes)
        except StartError as error:
            self._tunnel.say({"refused": str(error)})
            return
        self._folders[folder] = held
        doors = {_listen(f"{folder}/{here}"): there for here, there in sockets.items()}
        threading.Thread(target=self._lead, args=(doors,), daemon=True).start()
        self._tunnel.say({"folder": folder})

    def _lead(self, doors: dict[socket.socket, str]) -> None:
        """Begin a line to the kernel's socket of that name for each connection to ours."""
        with suppress(OSError):  # the tunnel is lost
            while True:
                for door in select.select(list(doors), [], [])[0]:
                    self._tunnel.open({"to": doors[door]}, door.accept()[0])

    def _end(self, why: str, status: int = 0) -> None:
        if not self._over.is_set():
            self.status = status
            if why:
                _print(f"distkit: this machine's ranks end: {why}")
                with suppress(OSError):  # the tunnel is lost
                    self._tunnel.say({"ended": why, "said": "".join(self._said)})
        self._over.set()

    def _clean_up(self) -> None:
        """End the zygote, which ends all that it forked, and remove what launchers left."""
        if self._zygote is not None:
            self._zygote.hang_up()
            try:
                self._process.wait(IMPORTING)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._relay.close()


#: What launchers say of the agent's own process, which ranks must not take for themselves.
_LAUNCHER = re.compile("OMPI_|PMIX_|PMI_|MPI_LOCAL|HYDI_|SLURM_(?!JOB)")


def versions() -> dict[str, str]:
    """The versions that must agree between machines."""
    return {
        "python": sys.version.split()[0],
        "distkit": sys.modules["distkit"].__version__,  # to import it makes a circle
    }


def _is_installed(package: str) -> bool:
    """True if there is a package to import, not only a folder of its name."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _free_port(address: str) -> int:
    """A port of that interface that nobody uses now."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def interface_of(address: str) -> str:
    """The name of the interface that has this address."""
    import psutil

    return next(
        (n for n, known in psutil.net_if_addrs().items() if address in [a.address for a in known]),
        "",
    )


def _listen(path: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    door.bind(path)
    door.listen(64)
    return door


def _last_words(log: Path) -> dict[str, bytes]:
    """The log and the black box of a process that has ended."""
    found = {}
    for file in (log, log.with_suffix(".box")):
        with suppress(OSError):
            found[file.name] = file.read_bytes()
    return found


def _print(line: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Be this machine's agent."""
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and closed terminals are the kernel's
        signal.signal(number, signal.SIG_IGN)
    agent = Agent(json.loads(os.environ.pop(AGENT)))
    agent.serve()
    sys.exit(agent.status)


if __name__ == "__main__":
    main()
