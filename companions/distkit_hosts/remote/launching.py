"""Agents on other machines, started by ssh, by ipyparallel's launchers, or in engines there.

The launchers start :mod:`distkit_hosts.remote.agent` where they would start an engine, as one
``srun`` or ``mpiexec`` for a whole allocation. Where the kernel is, and the keys, go with
them in an environment variable: never in arguments, which everybody on a machine can read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from distkit.errors import StartError
from distkit.gone import GONE
from distkit_hosts.remote.agent import AGENT

#: Options for ssh, unless the user gives others: no questions, and no long wait for a dead machine.
SSH_OPTIONS = "BatchMode=yes ConnectTimeout=8 ServerAliveInterval=5 ServerAliveCountMax=3"

#: An engine answers within this time [s], unless it is busy.
_ANSWER = 30.0

#: What the launchers start in the place of an engine.
_MODULE = "distkit_hosts.remote.agent"

#: The launchers tell the terminal that runs Jupyter what is in the error as well.
_SILENT = logging.Logger("distkit.launchers", logging.CRITICAL)

#: How often a batch system is asked how a job stands [s]; and when it is asked whether it is over.
_ASK, _ASK_AT_THE_END = 2.0, 0.2

#: Who was told to end has ended within this time [s], or is ended.
_GRACE = 3.0

#: Ends a job, and removes its output, when its input ends: with this process, however that ends.
_AFTERWARDS = ["sh", "-c", 'read -r _; "$@"; rm -f "$0"']

#: What squeue says of jobs that come to no more.
_OVER = ("BOOT", "CANCELLED", "COMPLETED", "DEADLINE", "FAIL", "NODE", "OUT_OF", "PREEMPT", "TIME")


class Launch:
    """Agents that are being started. Everything is told to whoever gave ``fail``.

    Args:
        where: what the agents are told, see :class:`distkit_hosts.remote.agent.Agent`.
        fail: called, from another thread, with the reason why some or all will not come.
    """

    def __init__(self, where: dict[str, Any], fail: Callable[[str], None]) -> None:
        self.where, self.fail = where, fail
        self.state = ""  # of the job, for the status card

    def start(self) -> None:
        """Begin; returns at once."""
        raise NotImplementedError

    def words(self) -> str:
        """What whoever started the agents says of them now; "" for nothing."""
        return ""

    def stop(self) -> None:
        """End what may be left, once agents were told to leave."""
        return


class ByCommands(Launch):
    """Agents that commands of this machine start; each lasts as long as its agents.

    Args:
        name: of the launcher, for messages.
        commands: what starts agents, by the machine's name.
        options: of their processes, as of Popen.
    """

    def __init__(
        self,
        name: str,
        commands: dict[str, list[str]],
        where: dict[str, Any],
        fail: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(where, fail)
        self._name, self._commands, self._options = name, commands, options
        self._processes: list[subprocess.Popen[bytes]] = []
        self._over = False

    def start(self) -> None:
        """Begin; returns at once."""
        for host, command in self._commands.items():
            log = tempfile.TemporaryFile()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is not meant for it
                    **self._options,
                )
            except OSError as error:
                log.close()
                name = f"{self._name}: {error.strerror}: {error.filename}"
                raise StartError(f"{name}. Install it, or name it.") from error
            self._processes.append(process)
            threading.Thread(target=self._serve, args=(host, process, log), daemon=True).start()

    def _serve(self, host: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        """Start the agent, and tell of its end."""
        with log:
            process.communicate(self._program(host))
            if not self._over:
                log.seek(0)
                said = log.read().decode(errors="replace")
                self.fail(self._explain(host, process.returncode, said))

    def _program(self, host: str) -> bytes:
        """What the command reads from its input."""
        return b""

    def _explain(self, host: str, status: int, said: str) -> str:
        """Why a command has ended; what it has said is known."""
        return f"{self._name}: the processes have ended.{quoted(said, sys.executable)}"

    def stop(self) -> None:
        """End what may be left, once agents were told to leave."""
        self._over, end = True, time.monotonic() + _GRACE
        for process in self._processes:
            for kill in (process.terminate, process.kill):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, end - time.monotonic()))
                    break
                kill()


#: Sent to the remote Python through its standard input, which other users cannot read.
_BEGIN = """\
import os, sys
os.environ.update({env})
try:
    os.execvp({cmd}[0], {cmd})
except OSError as error:
    sys.exit(f"{{error.strerror}}: {{error.filename or {cmd}[0]}}")
"""

_SSH_OPTIONS = "environment", "remote_python", "ssh_args", "ssh_cmd"


class BySSH(ByCommands):
    """One agent on each of several machines, and one connection to it for as long as it lives.

    Args:
        hosts: ``name``, ``user@name`` or ``name:port``.
        options: ``ssh_cmd``, ``ssh_args``, ``remote_python`` and ``environment``.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        options: dict[str, Any],
        where: dict[str, Any],
        fail: Callable[[str], None],
    ) -> None:
        _check_options(options, _SSH_OPTIONS, "its connections by ssh")
        ours = [word for option in SSH_OPTIONS.split() for word in ("-o", option)]
        # of each option the first counts
        self._ssh = [*options.get("ssh_cmd", ["ssh"]), *options.get("ssh_args", ()), *ours]
        self._python = options.get("remote_python", sys.executable)
        path = {"PYTHONPATH": here} if (here := os.environ.get("PYTHONPATH")) else {}
        self._environment = {**path, **options.get("environment", {})}
        commands = {host: [*self._command(host), self._python, "-IS", "-"] for host in hosts}
        super().__init__("ssh", commands, where, fail)

    def _command(self, host: str) -> list[str]:
        """What enters a machine."""
        place, _, port = host.partition(":")
        return [*self._ssh, *(["-p", port] if port else []), place]

    def _program(self, host: str) -> bytes:
        env = {**self._environment, AGENT: json.dumps({**self.where, "name": host})}
        return _BEGIN.format(env=env, cmd=[self._python, "-m", _MODULE]).encode()

    def _explain(self, host: str, status: int, said: str) -> str:
        if status == 255:
            what = f"{host} cannot be entered with {shlex.join(self._command(host))}"
            remedy = (
                "Make that command work without a password; distkit doctor --hosts "
                f"{host.partition(':')[0]} tells what is missing."
            )
        elif status in (126, 127):
            what = f"{host} has no Python at {self._python}"
            remedy = "Name the one there: remote_python='/path/to/python'."
        else:
            what = f"the agent on {host} ended with status {status}"
            remedy = f"Look for the cause there: {self._python} -m distkit doctor"
        return f"{what}.{quoted(said, self._python)}\n{remedy}".rstrip()


class ByBatch(Launch):
    """Agents in a job of a batch system, of which ``squeue`` tells where that is Slurm.

    Args:
        name: of the launcher, as in ``ipyparallel.Cluster(engines=name)``.
        n: how many processes.
        launcher: ipyparallel's.
    """

    def __init__(
        self,
        name: str,
        n: int,
        launcher: Any,
        where: dict[str, Any],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(where, fail)
        self._name, self._n, self._launcher = name, n, launcher
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distkit-launch", daemon=True)

    def start(self) -> None:
        """Submit the job."""
        try:
            self._launcher.start(self._n)
        except subprocess.CalledProcessError as error:
            said = (error.output or b"").decode(errors="replace")
            what = f"{self._name}: the command failed with status {error.returncode}."
            raise StartError(what + quoted(said, sys.executable)) from None
        self._thread.start()

    def _watch(self) -> None:
        """Ask for the job until it is over, and see that nothing of it is left."""
        launcher = self._launcher
        file = launcher.output_file if launcher.passing else ""
        end = [*_AFTERWARDS, file, *launcher.delete_command, launcher.job_id]
        quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        with subprocess.Popen(end, stdin=subprocess.PIPE, start_new_session=True, **quiet):
            while not self._over.is_set():
                self.state = self._state()
                if self.state.startswith(_OVER) or "Invalid job id" in self.state:
                    what = f"{self._name}: job {launcher.job_id} is {self.state}."
                    self.fail(what + quoted(self._output(), sys.executable))
                    return
                self._over.wait(_ASK)
            self._await("RUNNING", "COMPLETING")  # it ends by itself as its agents leave

    def words(self) -> str:
        """How the job stands; of one that is being ended, how it ends."""
        state = self._await("COMPLETING")
        return f"\n{self._name}: job {self._launcher.job_id} is {state}." if state else ""

    def _await(self, *states: str) -> str:
        """The state of the job, when it is none of these any more or does not change."""
        end = time.monotonic() + _GRACE
        while (state := self._state()).startswith(states) and time.monotonic() < end:
            time.sleep(_ASK_AT_THE_END)
        return state

    def _state(self) -> str:
        """The state of the job and the reason for it, as squeue has them; "" for another system."""
        ask = ["squeue", "--noheader", "--states=all", "--format=%T %r"]
        with suppress(OSError, subprocess.TimeoutExpired):
            ran = subprocess.run(
                [*ask, f"--jobs={self._launcher.job_id}"],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
            return ran.stdout.strip() or ran.stderr.strip()
        return ""

    def _output(self) -> str:
        """What the job has written into its file."""
        file = self._launcher.output_file
        try:
            return Path(file).read_text(errors="replace")
        except OSError:
            return (
                f"Its output, {file}, is not here. Name a file that the machines can write and "
                "this one can read: output_file='/shared/distkit.log'."
            )

    def stop(self) -> None:
        """End what may be left, once agents were told to leave."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(4 * _GRACE)


def _kind(name: str) -> Any:
    """The class of a launcher."""
    from ipyparallel.cluster.launcher import find_launcher_class

    from distkit_hosts.remote.slurm import AgentsBySlurm

    try:
        return AgentsBySlurm if name == "slurm" else find_launcher_class(name, "engine")
    except KeyError:
        raise StartError(
            f"engines={name!r} is none of ipyparallel's launchers. Use 'ssh', 'mpi', 'slurm', "
            "'pbs', 'sge', 'lsf', 'htcondor' or 'local'."
        ) from None


def _make(name: str, folder: str, options: dict[str, Any], where: dict[str, Any]) -> Any:
    """ipyparallel's launcher, set up to start agents."""
    kind = _kind(name)
    known = kind.class_traits(config=True)
    options = {**options}
    on = options.pop("mpi_hosts", {}) if name == "mpi" else {}
    _check_options(options, known, f"ipyparallel's {kind.__name__}")
    Path(folder, "log").mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "engine_cmd": [options.get("remote_python", sys.executable), "-m", _MODULE],
        "profile_dir": folder,
        "work_dir": folder,
        "cluster_id": "distkit",
        "log": _SILENT,
        **options,
        "environment": {AGENT: json.dumps(where), **options.get("environment", {})},
    }
    if "submit_command" in known:  # or what it says goes to the terminal that runs Jupyter
        submit = options.get("submit_command", kind.submit_command.default_args[0])
        given["submit_command"] = ["sh", "-c", 'exec "$@" 2>&1', submit[0], *submit]
        # the machines of a batch system share the home, and no temporary folder
        given.setdefault("output_file", f"{Path.home()}/.{Path(folder).name}.log")
    if name == "mpi":
        given["work_dir"] = "/"  # MPICH has it on all machines, or starts nothing
        given["mpi_args"] = _mpi_args(options, on)
    launcher = kind(**given)
    launcher.passing = "output_file" not in options
    return launcher


def _check_options(options: Iterable[str], known: Iterable[str], whose: str) -> None:
    for unknown in (option for option in options if option not in known):
        gone = GONE.get(f"dk.Cluster({unknown}=…)")
        raise StartError(
            gone
            or f"{unknown!r} is no option of dk.Cluster, nor of {whose}: use one of "
            f"{', '.join(sorted(known))}."
        )


def _mpi_args(options: dict[str, Any], on: dict[str, int]) -> list[str]:
    """Arguments for mpiexec: Open MPI's passes on what it is told to, and would bind to cores."""
    command, args = options.get("mpi_cmd", ["mpiexec"]), options.get("mpi_args")
    try:
        ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        raise StartError(
            f"there is no {command[0]} here. Install an MPI, such as Debian's openmpi-bin, or name "
            "its command: mpi_cmd=['/opt/mpi/bin/mpiexec']."
        ) from None
    hosts = ",".join(f"{name}:{n}" for name, n in on.items())
    if "Open MPI" not in ran.stdout and "OpenRTE" not in ran.stdout:
        return [*(["-hosts", hosts] if on else []), *(args or ())]
    path = ["-x", "PYTHONPATH"] if "PYTHONPATH" in os.environ else []
    bind = [] if args and "--bind-to" in args else ["--bind-to", "none"]
    where = ["-H", hosts] if on else ["--oversubscribe"] if args is None else []
    return ["-x", AGENT, *path, *bind, *where, *(args or ())]


def quoted(said: str, python: str = "") -> str:
    """The last lines of what a program has said, indented; and how to install what it misses."""
    lines = [line for line in said.strip().splitlines() if line.strip("- ")][-30:]
    text = "".join(f"\n    {line}" for line in lines)
    if missing := re.findall(r"No module named '(\w+)", said):
        text += f"\nInstall it there: {python} -m pip install {missing[-1]}"
    return text


# -- in the engines of somebody else -----------------------------------------------------------


class InEngines(Launch):
    """An agent of each engine.

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
        from ipyparallel import TimeoutError as NoAnswer

        asked = {
            n: self._client[n].apply_async(_in_engine, self.where, n) for n in self._client.ids
        }
        for engine, answer in asked.items():
            try:
                if said := answer.get(timeout=_ANSWER):
                    self.fail(f"engine {engine}: {said}")
            except NoAnswer:
                self.fail(f"engine {engine} does not answer within {_ANSWER:.0f} s. Is it busy?")
            except Exception as error:
                self.fail(f"engine {engine} could not begin: {type(error).__name__}: {error}")


def launch(
    by: Any,
    ranks: dict[str, int] | int,
    folder: str,
    options: dict[str, Any],
    where: dict[str, Any],
    fail: Callable[[str], None],
) -> Launch:
    """Agents in engines, by ssh on these machines, or so many by one of ipyparallel's launchers.

    Args:
        by: a client of the engines, or a name as in ``ipyparallel.Cluster(engines=name)``.
        ranks: on each machine, or how many in all.
        folder: for the launcher's files.
        options: its configuration.
        where: see :class:`Launch`.
        fail: see :class:`Launch`.
    """
    if not isinstance(by, str):
        return InEngines(by, where, fail)
    if isinstance(ranks, dict):
        return BySSH(ranks, options, where, fail)
    launcher = _make(by, folder, options, where)
    if hasattr(launcher, "job_id"):
        return ByBatch(by, ranks, launcher, where, fail)
    launcher.n = ranks
    commands = {by: launcher.args}
    if by == "local":
        commands = {f"{by} {n}": launcher.engine_cmd for n in range(ranks)}
    env = {**os.environ, **launcher.get_env()}
    return ByCommands(by, commands, where, fail, env=env, cwd=launcher.work_dir)


def connect(name: str) -> Any:
    """A client of an existing ipyparallel cluster, by the name of its profile.

    Raises:
        StartError: there is none, or it has no engines.
    """
    import ipyparallel

    try:
        client = ipyparallel.Client(profile=name, timeout=10)
    except Exception as error:
        said = str(error)
    else:
        if client.ids:
            return client
        said = "it has no engines"
    raise StartError(
        f"there is no ipyparallel cluster of profile {name!r} to attach to: {said}\nStart one with "
        f"ipcluster start --profile={name}, or give a client: "
        "dk.Cluster.attach(ipyparallel.Client(…))."
    )


def _in_engine(where: dict[str, Any], order: int) -> str:
    """In an engine: start an agent that ends with it; what is wrong, or ""."""
    import importlib.util
    import json
    import os
    import platform
    import subprocess
    import sys
    import threading

    if importlib.util.find_spec("distkit") is None:
        return (
            f"there is no distkit on {platform.node()}. Install it there: {sys.executable} -m pip "
            "install distkit"
        )
    about = json.dumps({**where, "order": order, "parent": os.getpid()})
    process = subprocess.Popen(
        [sys.executable, "-m", "distkit_hosts.remote.agent"],
        env={**os.environ, "DISTKIT_AGENT": about},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, daemon=True).start()  # or it stays as a zombie
    return ""


_in_engine.__module__ = "__main__"  # or engines import this module, which they may lack
