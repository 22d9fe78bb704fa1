"""Start agents on other machines: over SSH, with ipyparallel launchers, or from engines there.

The launchers start :mod:`distkit_hosts.remote.agent` in place of an engine, with one ``srun`` or
``mpiexec`` for a whole allocation. The kernel's endpoint and the keys are passed in an
environment variable, not in arguments, which every user of a machine can read.
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
from distkit_hosts.remote.agent import AGENT, start_in_engine

#: Options for ssh, after the user's: no prompts, and a short timeout for unreachable machines.
SSH_OPTIONS = "BatchMode=yes ConnectTimeout=8 ServerAliveInterval=5 ServerAliveCountMax=3"

#: Timeout for an engine's reply [s].
_REPLY_TIMEOUT = 30.0

#: The module that the launchers start in place of an engine.
_MODULE = "distkit_hosts.remote.agent"

#: Logger of the launchers, which otherwise log errors to the terminal that runs Jupyter.
_SILENT = logging.Logger("distkit.launchers", logging.CRITICAL)

#: Polling interval for a job's state [s], and the shorter interval while the job is ending.
_POLL_INTERVAL, _FINAL_POLL_INTERVAL = 2.0, 0.2

#: Grace period for processes and jobs to end on their own [s].
_GRACE = 3.0

#: Command that cancels a job and removes the job's output when the command's input is closed, even
#: if the kernel is killed.
_CLEAN_UP = ["sh", "-c", 'read -r _; "$@"; rm -f "$0"']

#: Prefixes of squeue's states for jobs that have ended.
_FINAL_STATES = (
    "BOOT",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAIL",
    "NODE",
    "OUT_OF",
    "PREEMPT",
    "TIME",
)


class Launch:
    """Starts agents.

    Args:
        kernel: the kernel's endpoint and keys; see :class:`distkit_hosts.remote.agent.Agent`.
        fail: called from another thread with the reason that agents cannot start or have exited.
    """

    def __init__(self, kernel: dict[str, Any], fail: Callable[[str], None]) -> None:
        self.kernel, self.fail = kernel, fail
        self.state = ""  # the job's state, shown on the status card

    def start(self) -> None:
        """Start the agents, without waiting."""

    def details(self) -> str:
        """Return the launcher's description of the agents; "" for none."""
        return ""

    def stop(self) -> None:
        """Stop the launcher after the agents have been asked to exit."""


class CommandLaunch(Launch):
    """Starts agents with commands on this machine; each command runs for as long as its agent.

    Args:
        name: the name of the launcher, for messages.
        commands: the commands, by the name of the machine or launcher.
        options: options for ``Popen``.
    """

    def __init__(
        self,
        name: str,
        commands: dict[str, list[str]],
        kernel: dict[str, Any],
        fail: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(kernel, fail)
        self._name, self._commands, self._options = name, commands, options
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def start(self) -> None:
        """Start the agents, without waiting."""
        for host, command in self._commands.items():
            log = tempfile.TemporaryFile()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that Ctrl-C does not reach it
                    **self._options,
                )
            except OSError as error:
                log.close()
                name = f"{self._name}: {error.strerror}: {error.filename}"
                raise StartError(f"{name}. Install it, or pass another command.") from error
            self._processes.append(process)
            threading.Thread(target=self._serve, args=(host, process, log), daemon=True).start()

    def _serve(self, host: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        """Send the command its input, wait until it exits, and report its exit."""
        with log:
            process.communicate(self._program(host))
            if not self._stopped:
                log.seek(0)
                output = log.read().decode(errors="replace")
                self.fail(self._explain(host, process.returncode, output))

    def _program(self, host: str) -> bytes:
        """Return the input of a command."""
        return b""

    def _explain(self, host: str, status: int, output: str) -> str:
        """Explain why a command has exited, with its output."""
        return f"{self._name}: the processes have exited.{quote_output(output, sys.executable)}"

    def stop(self) -> None:
        """Stop remaining processes after the agents have been asked to exit."""
        self._stopped, end = True, time.monotonic() + _GRACE
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


class SSHLaunch(CommandLaunch):
    """Starts one agent on each machine, through one connection that lasts as long as the agent.

    Args:
        hosts: ``name``, ``user@name`` or ``name:port``.
        options: ``ssh_cmd``, ``ssh_args``, ``remote_python`` and ``environment``.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        options: dict[str, Any],
        kernel: dict[str, Any],
        fail: Callable[[str], None],
    ) -> None:
        _check_options(options, _SSH_OPTIONS, "its ssh connections")
        defaults = [word for option in SSH_OPTIONS.split() for word in ("-o", option)]
        # ssh uses the first value of each option
        self._ssh = [*options.get("ssh_cmd", ["ssh"]), *options.get("ssh_args", ()), *defaults]
        self._python = options.get("remote_python", sys.executable)
        import_path = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}
        self._environment = {**import_path, **options.get("environment", {})}
        commands = {host: [*self._command(host), self._python, "-IS", "-"] for host in hosts}
        super().__init__("ssh", commands, kernel, fail)

    def _command(self, host: str) -> list[str]:
        """Return the ssh command for a machine."""
        name, _, port = host.partition(":")
        return [*self._ssh, *(["-p", port] if port else []), name]

    def _program(self, host: str) -> bytes:
        env = {**self._environment, AGENT: json.dumps({**self.kernel, "name": host})}
        return _BEGIN.format(env=env, cmd=[self._python, "-m", _MODULE]).encode()

    def _explain(self, host: str, status: int, output: str) -> str:
        if status == 255:
            problem = f"{host} cannot be reached with {shlex.join(self._command(host))}"
            remedy = (
                "Make that command work without a password; distkit doctor --hosts "
                f"{host.partition(':')[0]} reports the cause."
            )
        elif status in (126, 127):
            problem = f"{host} has no Python at {self._python}"
            remedy = "Pass the path of Python on that machine: remote_python='/path/to/python'."
        else:
            problem = f"the agent on {host} exited with status {status}"
            remedy = (
                f"To find the cause, run this on that machine: {self._python} -m distkit doctor"
            )
        return f"{problem}.{quote_output(output, self._python)}\n{remedy}".rstrip()


class BatchLaunch(Launch):
    """Starts agents in a job of a batch system; for Slurm, ``squeue`` reports its state.

    Args:
        name: the name of the launcher, as in ``ipyparallel.Cluster(engines=name)``.
        n: the number of processes.
        launcher: the ipyparallel launcher.
    """

    def __init__(
        self,
        name: str,
        n: int,
        launcher: Any,
        kernel: dict[str, Any],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(kernel, fail)
        self._name, self._n, self._launcher = name, n, launcher
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distkit-launch", daemon=True)

    def start(self) -> None:
        """Submit the job."""
        try:
            self._launcher.start(self._n)
        except subprocess.CalledProcessError as error:
            output = (error.output or b"").decode(errors="replace")
            problem = f"{self._name}: the command failed with status {error.returncode}."
            raise StartError(problem + quote_output(output, sys.executable)) from None
        self._thread.start()

    def _watch(self) -> None:
        """Poll the job until it ends, and clean up after it."""
        launcher = self._launcher
        file = launcher.output_file if launcher.owns_output_file else ""
        end = [*_CLEAN_UP, file, *launcher.delete_command, launcher.job_id]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(end, stdin=pipe, stdout=null, stderr=null, start_new_session=True):
            while not self._stopped.is_set():
                self.state = self._state()
                if self.state.startswith(_FINAL_STATES) or "Invalid job id" in self.state:
                    problem = f"{self._name}: job {launcher.job_id} is {self.state}."
                    self.fail(problem + quote_output(self._output(), sys.executable))
                    return
                self._stopped.wait(_POLL_INTERVAL)
            self._await("RUNNING", "COMPLETING")  # the job ends when its agents exit

    def details(self) -> str:
        """Return the job's state, after waiting for the final state of an ending job."""
        state = self._await("COMPLETING")
        return f"\n{self._name}: job {self._launcher.job_id} is {state}." if state else ""

    def _await(self, *states: str) -> str:
        """Wait while the job is in one of these states, up to a limit, and return its state."""
        end = time.monotonic() + _GRACE
        while (state := self._state()).startswith(states) and time.monotonic() < end:
            time.sleep(_FINAL_POLL_INTERVAL)
        return state

    def _state(self) -> str:
        """Return the job's state and its reason, from squeue; "" for another batch system."""
        ask = ["squeue", "--noheader", "--states=all", "--format=%T %r"]
        with suppress(OSError, subprocess.TimeoutExpired):
            result = subprocess.run(
                [*ask, f"--jobs={self._launcher.job_id}"],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
            return result.stdout.strip() or result.stderr.strip()
        return ""

    def _output(self) -> str:
        """Return the output of the job."""
        with suppress(OSError):  # the home folder is not shared
            return Path(self._launcher.output_file).read_text(errors="replace")
        return ""

    def stop(self) -> None:
        """Stop remaining processes after the agents have been asked to exit."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(4 * _GRACE)


def _make(name: str, folder: str, options: dict[str, Any], kernel: dict[str, Any]) -> Any:
    """Return an ipyparallel launcher that starts agents."""
    from ipyparallel.cluster.launcher import find_launcher_class

    from distkit_hosts.remote.slurm import AgentsBySlurm

    try:
        kind = AgentsBySlurm if name == "slurm" else find_launcher_class(name, "engine")
    except KeyError:
        raise StartError(
            f"engines={name!r} is not an ipyparallel launcher. Use 'ssh', 'mpi', 'slurm', "
            "'pbs', 'sge', 'lsf', 'htcondor' or 'local'."
        ) from None
    known = kind.class_traits(config=True)
    options = {**options}
    counts = options.pop("mpi_hosts", {}) if name == "mpi" else {}
    _check_options(options, known, f"the ipyparallel launcher {kind.__name__}")
    traits: dict[str, Any] = {
        "engine_cmd": [options.get("remote_python", sys.executable), "-m", _MODULE],
        "profile_dir": folder,
        "work_dir": folder,
        "cluster_id": "distkit",
        "log": _SILENT,
        **options,
        "environment": {AGENT: json.dumps(kernel), **options.get("environment", {})},
    }
    if "submit_command" in known:  # otherwise its errors go to the terminal that runs Jupyter
        submit = options.get("submit_command", kind.submit_command.default_args[0])
        traits["submit_command"] = ["sh", "-c", 'exec "$@" 2>&1', submit[0], *submit]
        # the machines of a batch system share the home folder, but no temporary folder
        traits.setdefault("output_file", f"{Path.home()}/.{Path(folder).name}.log")
    if name == "mpi":
        traits["work_dir"] = "/"  # MPICH needs a folder that exists on all machines
        traits["mpi_args"] = _mpi_args(options, counts)
    launcher = kind(**traits)
    launcher.owns_output_file = "output_file" not in options
    return launcher


def _check_options(options: Iterable[str], known: Iterable[str], launcher: str) -> None:
    for unknown in (option for option in options if option not in known):
        raise StartError(
            f"{unknown!r} is not an option of dk.Cluster or of {launcher}: use one of "
            f"{', '.join(sorted(known))}."
        )


def _mpi_args(options: dict[str, Any], counts: dict[str, int]) -> list[str]:
    """Return mpiexec's arguments. Open MPI needs some to pass variables and to disable binding."""
    command, args = options.get("mpi_cmd", ["mpiexec"]), options.get("mpi_args")
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError:
        raise StartError(
            f"{command[0]} is not installed here. Install an MPI (Debian: openmpi-bin), or pass "
            "its command: mpi_cmd=['/opt/mpi/bin/mpiexec']."
        ) from None
    hosts = ",".join(f"{name}:{n}" for name, n in counts.items())
    if "Open MPI" not in result.stdout and "OpenRTE" not in result.stdout:
        return [*(["-hosts", hosts] if counts else []), *(args or ())]
    path = ["-x", "PYTHONPATH"] if "PYTHONPATH" in os.environ else []
    bind = [] if args and "--bind-to" in args else ["--bind-to", "none"]
    hosts_args = ["-H", hosts] if counts else ["--oversubscribe"] if args is None else []
    return ["-x", AGENT, *path, *bind, *hosts_args, *(args or ())]


def quote_output(output: str, python: str = "") -> str:
    """Return the last lines of a program's output, and how to install a missing module."""
    lines = [line for line in output.strip().splitlines() if line.strip("- ")][-30:]
    text = "".join(f"\n    {line}" for line in lines)
    if missing := re.findall(r"No module named '(\w+)", output):
        text += f"\nInstall it there: {python} -m pip install {missing[-1]}"
    return text


# -- in existing engines -----------------------------------------------------------


class EngineLaunch(Launch):
    """Starts an agent in each engine of an existing cluster.

    Args:
        client: an ``ipyparallel.Client``.
    """

    def __init__(self, client: Any, kernel: dict[str, Any], fail: Callable[[str], None]) -> None:
        super().__init__(kernel, fail)
        self._client = client

    def start(self) -> None:
        """Start the agents; wait until every engine has started its agent."""
        started = {
            n: self._client[n].apply_async(start_in_engine, self.kernel) for n in self._client.ids
        }
        for n, result in started.items():
            try:
                result.get(timeout=_REPLY_TIMEOUT)
            except Exception as error:
                raise StartError(
                    f"engine {n} could not start an agent: {error}. Its Python needs distkit: "
                    "python -m pip install distkit"
                ) from error


def launch(
    launcher: Any,
    ranks: dict[str, int] | int,
    folder: str,
    options: dict[str, Any],
    kernel: dict[str, Any],
    fail: Callable[[str], None],
) -> Launch:
    """Return a launch of agents: from engines, over SSH, or with an ipyparallel launcher.

    Args:
        launcher: a client of the engines, or a name as in ``ipyparallel.Cluster(engines=name)``.
        ranks: the number of ranks on each machine, or in total.
        folder: the folder for the launcher's files.
        options: options for the launcher.
        kernel: see :class:`Launch`.
        fail: see :class:`Launch`.
    """
    if not isinstance(launcher, str):
        return EngineLaunch(launcher, kernel, fail)
    if isinstance(ranks, dict):
        return SSHLaunch(ranks, options, kernel, fail)
    name, launcher = launcher, _make(launcher, folder, options, kernel)
    if hasattr(launcher, "job_id"):
        return BatchLaunch(name, ranks, launcher, kernel, fail)
    launcher.n = ranks
    commands = {name: launcher.args}
    if name == "local":
        commands = {f"{name} {n}": launcher.engine_cmd for n in range(ranks)}
    env = {**os.environ, **launcher.get_env()}
    return CommandLaunch(name, commands, kernel, fail, env=env, cwd=launcher.work_dir)


def connect(name: str) -> Any:
    """Return a client of an existing ipyparallel cluster, by the name of its profile.

    Raises:
        StartError: there is no such cluster, or it has no engines.
    """
    import ipyparallel

    try:
        client = ipyparallel.Client(profile=name, timeout=10)
    except Exception as error:
        reason = str(error)
    else:
        if client.ids:
            return client
        reason = "it has no engines"
    raise StartError(
        f"there is no ipyparallel cluster with profile {name!r} to attach to: {reason}\nStart one "
        f"with ipcluster start --profile={name}, or pass a client: "
        "dk.Cluster.attach(ipyparallel.Client(…))."
    )
