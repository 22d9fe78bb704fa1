"""Agents on other machines, started by ipyparallel's own launchers, or from its engines.

The launchers start :mod:`distkit.cluster.hosts.agent` where they would start an engine: over SSH,
or as one ``srun`` or ``mpiexec`` for a whole allocation. Where the kernel is, and the keys, go with
them in an environment variable: never in arguments, which everybody on a machine can read.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.hosts.agent import HOST
from distkit.errors import StartError

#: Options for ssh, unless the user gives some: no questions, and no long wait for a dead machine.
SSH_OPTIONS = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]

#: ipyparallel's names of the launchers that start agents by one command for all machines.
_MODULE = "distkit.cluster.hosts.agent"

#: How often a batch system is asked how a job stands [s].
_ASK = 2.0


class Launch(ABC):
    """Agents that are being started. Everything is told to whoever gave ``fail``.

    Args:
        where: what the agents are told, see :class:`distkit.cluster.hosts.agent.Agent`.
        fail: called, from another thread, with the reason why some or all will not come.
    """

    def __init__(self, where: dict[str, Any], fail: Callable[[str], None]) -> None:
        self.where, self.fail = where, fail
        self.state = ""  # of the job, for the status card

    @abstractmethod
    def start(self) -> None:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End what may be left: agents end by themselves when their tunnel breaks."""
        return


class ByLauncher(Launch):
    """Agents that one of ipyparallel's launchers of engine sets starts.

    Args:
        name: of the launcher, as in ``ipyparallel.Cluster(engines=name)``.
        n: how many processes.
        folder: for the launcher's files.
        options: its configuration.
    """

    def __init__(
        self,
        name: str,
        n: int,
        folder: str,
        options: dict[str, Any],
        where: dict[str, Any],
        fail: Callable[[str], None],
        what: str = "",
    ) -> None:
        super().__init__(where, fail)
        self._name, self._n, self._what = name, n, what or name
        self._launcher = _make(name, folder, options, where)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = threading.Event()

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name="distkit-launch", daemon=True).start()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except subprocess.CalledProcessError as error:
            self.fail(_words(self._what, error))
        except Exception as error:
            self.fail(f"{self._what}: {type(error).__name__}: {error}")

    async def _serve(self) -> None:
        """Have the launcher begin, and hear of its end: it tells in this thread's loop."""
        self._loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._launcher.on_stop(lambda data: ended.set())
        self._launcher.start(self._n)
        if hasattr(self._launcher, "job_id"):
            await self._watch_job()
        else:
            await ended.wait()
        if not self._over.is_set():
            said = self._launcher.get_output().strip()
            self.fail(f"{self._what}: the processes there have ended.{_quoted(said)}")

    async def _watch_job(self) -> None:
        """Ask the batch system for a job until it is gone."""
        ask = ["squeue", "--noheader", "--format=%T %r", f"--jobs={self._launcher.job_id}"]
        while not self._over.is_set():
            await asyncio.sleep(_ASK)
            with suppress(OSError):  # another system than Slurm: its state is not known
                said = await asyncio.to_thread(
                    subprocess.run, ask, capture_output=True, text=True, check=False
                )
                self.state = said.stdout.strip()
                if not self.state:
                    return

    def stop(self) -> None:
        """Have the batch system forget the job; processes end by themselves."""
        self._over.set()
        if job := getattr(self._launcher, "job_id", ""):
            with suppress(Exception):
                subprocess.run([*self._launcher.delete_command, job], timeout=10, check=False)


class BySSH(Launch):
    """One agent on each of several machines, by ipyparallel's SSH launcher, all at once.

    Args:
        hosts: ``name``, ``user@name`` or ``name:port``, as ipyparallel has it.
        folder: for the launcher's files.
        options: the launcher's configuration: ``ssh_cmd``, ``ssh_args``, ``remote_python``, ….
    """

    def __init__(
        self,
        hosts: list[str],
        folder: str,
        options: dict[str, Any],
        where: dict[str, Any],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(where, fail)
        options = {"ssh_args": SSH_OPTIONS, "remote_python": sys.executable, **options}
        ssh, there = options.get("ssh_cmd", ["ssh"]), f"{folder}-agent"
        self._ssh = [*ssh, *options["ssh_args"]]
        log = shlex.quote(f"{folder}/log/ssh.log")  # or it goes to the terminal that runs Jupyter
        options["ssh_cmd"] = ["sh", "-c", f'exec "$@" 2>>{log}', "sh", *ssh]
        self._each = {
            host: ByLauncher(
                "ssh",
                1,
                folder,
                {
                    "remote_profile_dir": there,
                    **options,
                    "engines": {host: {"n": 1, "to_send": []}},
                },
                {**where, "name": host, "profile": there},
                fail,
                host,
            )
            for host in hosts
        }

    def start(self) -> None:
        """Begin; returns at once."""
        for host in self._each:
            threading.Thread(target=self._begin, args=(host,), daemon=True).start()

    def _begin(self, host: str) -> None:
        """See whether the machine lets us in: what ssh says is lost in the launcher."""
        place, _, port = host.partition(":")
        command = [*self._ssh, *(["-p", port] if port else []), place, "true"]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode:
            self.fail(
                f"{host} cannot be entered with {shlex.join(command[:-1])}."
                f"{_quoted(tried.stderr)}\nMake that command work without a password; "
                f"distkit doctor --hosts {place} tells what is missing."
            )
        else:
            self._each[host].start()

    def stop(self) -> None:
        """Expect their ends from now on."""
        for launch in self._each.values():
            launch.stop()


class InEngines(Launch):
    """Agents in engines of an ipyparallel cluster that somebody else has started.

    Args:
        client: an ``ipyparallel.Client``.
    """

    def __init__(self, client: Any, where: dict[str, Any], fail: Callable[[str], None]) -> None:
        super().__init__(where, fail)
        self._client = client

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._begin, daemon=True).start()

    def _begin(self) -> None:
        try:
            view = self._client.direct_view(block=False)
            for said in view.apply(_begin, self.where).get(timeout=30):
                if said:
                    self.fail(said)
        except Exception as error:
            self.fail(f"an engine could not start ranks ({type(error).__name__}: {error}).")


def connect(name: str) -> Any:
    """A client of somebody's cluster, by the name of its profile or its cluster id.

    Raises:
        StartError: there is none, or it has no engines.
    """
    import ipyparallel

    said = ""
    for way in ({"profile": name}, {"cluster_id": name}):
        try:
            client = ipyparallel.Client(**way, timeout=10)
        except Exception as error:
            said += f"\n    {way}: {error}"
            continue
        if client.ids:
            return client
        said += f"\n    {way}: it has no engines"
    raise StartError(
        f"there is no ipyparallel cluster {name!r} to attach to: {said}\nStart one with ipcluster "
        "start, or give a client: dk.Cluster.attach(ipyparallel.Client(…))."
    )


def _begin(where: dict[str, Any]) -> str:
    """In an engine: start an agent that ends with it; what is wrong, or ""."""
    import importlib.util
    import json
    import os
    import subprocess
    import sys

    if importlib.util.find_spec("distkit") is None:
        import platform

        return (
            f"the engine on {platform.node()} has no distkit ({sys.executable}). Install it there: "
            "python -m pip install distkit"
        )
    subprocess.Popen(
        [sys.executable, "-m", "distkit.cluster.hosts.agent"],
        env={**os.environ, "DISTKIT_HOST": json.dumps({**where, "parent": os.getpid()})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return ""


def _make(name: str, folder: str, options: dict[str, Any], where: dict[str, Any]) -> Any:
    """ipyparallel's launcher, set up to start agents."""
    from ipyparallel.cluster.launcher import find_launcher_class

    try:
        kind = find_launcher_class(name, "engine")
    except KeyError:
        raise StartError(
            f"engines={name!r} is none of ipyparallel's launchers. Use 'ssh', 'mpi', 'slurm', "
            "'pbs', 'sge', 'lsf', 'htcondor' or 'local'."
        ) from None
    known = kind.class_traits(config=True)
    if unknown := [option for option in options if option not in known]:
        raise StartError(
            f"{unknown[0]!r} is no option of dk.Cluster, nor of ipyparallel's {kind.__name__}: "
            f"that has {', '.join(sorted(known))}."
        )
    python = options.get("remote_python", sys.executable)
    given: dict[str, Any] = {
        "engine_cmd": [python, "-m", _MODULE],
        "profile_dir": folder,
        "work_dir": folder,
        "cluster_id": "distkit",
        **options,
    }
    given["environment"] = {**options.get("environment", {}), HOST: json.dumps(where)}
    if "submit_command" in known:  # or what it says goes to the terminal that runs Jupyter
        submit = options.get("submit_command", kind.submit_command.default_args[0])
        given["submit_command"] = ["sh", "-c", 'exec "$@" 2>&1', "sh", *submit]
    if name == "mpi" and "mpi_args" not in options and _is_open_mpi(options.get("mpi_cmd")):
        given["mpi_args"] = ["-x", HOST, "--oversubscribe"]
    Path(folder, "log").mkdir(exist_ok=True)
    return kind(**given)


def _is_open_mpi(command: list[str] | None) -> bool:
    try:
        said = subprocess.run(
            [*(command or ["mpiexec"]), "--version"], capture_output=True, text=True, check=False
        )
    except OSError:
        raise StartError(
            f"there is no {(command or ['mpiexec'])[0]} here. Install an MPI, such as Debian's "
            "openmpi-bin, or name its command: mpi_cmd=['/opt/mpi/bin/mpiexec']."
        ) from None
    return "Open MPI" in said.stdout or "OpenRTE" in said.stdout


def _words(what: str, error: subprocess.CalledProcessError) -> str:
    said = (
        (error.output or b"") if isinstance(error.output, bytes) else (error.output or "").encode()
    )
    return f"{what}: the command failed with status {error.returncode}.{_quoted(said.decode())}"


def _quoted(said: str) -> str:
    """What a program has said, its last lines, indented."""
    lines = said.strip().splitlines()[-12:]
    return "".join(f"\n    {line}" for line in lines) if lines else " It said nothing."
