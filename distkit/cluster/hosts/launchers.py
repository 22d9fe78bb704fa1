"""ipyparallel's launchers, as agents need them. All their configuration stays as it is.

An agent is no engine: it needs no IPython profile and no connection files, and what it says must
be heard at once. See docs/decisions.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import (
    SlurmEngineSetLauncher,
    SSHEngineLauncher,
    SSHEngineSetLauncher,
)
from ipyparallel.cluster.shellcmd import ShellCommandSend
from traitlets import Unicode, default

#: Sent to the Python there by its input, which nobody else on either machine can read.
_BEGIN = """\
import os, sys
os.environ.update({env})
try:
    os.execvp({cmd}[0], {cmd})
except OSError as error:
    sys.exit(f"{{error.strerror}}: {{error.filename or {cmd}[0]}}")
"""


class Connection(ShellCommandSend):  # type: ignore[misc]
    """One connection to a machine, for as long as the agent there lives.

    ipyparallel's way makes four, imports IPython there to create a profile, writes the output into
    a file there, and asks once a minute whether the process still is.
    """

    process: subprocess.Popen[bytes]

    def initialize(self) -> None:
        """Do not ask which shell is there: nothing that depends on it is said to it."""
        self.shell_info = "linux", "sh"

    def has_python(self, python_path: str | None = None) -> bool:
        """Do not ask: the one command that follows tells."""
        return True

    def check_output_python_module(self, module_params: Sequence[str], **kwargs: Any) -> str:
        """Create no profile."""
        return ""

    def cmd_start(
        self, cmd: list[str], env: dict[str, str] | None = None, output_file: str | None = None
    ) -> int:
        """Start a command there; what it says, and what ssh says, goes to a file here."""
        with Path(str(output_file)).open("wb") as log:
            self.process = subprocess.Popen(
                [*self.shell, *self.args, self.python_path, "-IS", "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as there:  # it may end, and says why
            there.write(_BEGIN.format(env=env or {}, cmd=cmd).encode())
        return self.process.pid

    def cmd_kill(self, pid: int, sig: int | None = None) -> None:
        """End the connection."""
        self.process.send_signal(sig or signal.SIGTERM)


class AgentBySSH(SSHEngineLauncher):  # type: ignore[misc]
    """An agent on one machine."""

    _ssh_sender: Connection | None = None

    @default("remote_output_file")
    def _default_remote_output_file(self) -> str:
        return f"{self.profile_dir}/log/{self.identifier.replace('/', '-')}.log"

    @property
    def ssh_sender(self) -> Connection:
        """The connection."""
        if self._ssh_sender is None:
            words = [*self.ssh_args, self.location]
            self._ssh_sender = Connection(
                self.ssh_cmd, words, self.remote_python, send_receiver_code=True, log=self.log
            )
        return self._ssh_sender

    def wait_one(self, timeout: float) -> int:
        """The exit status; TimeoutError when there is none yet."""
        try:
            return self.ssh_sender.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def get_output(self, remove: bool = False) -> str:
        """What the agent and ssh have said."""
        with suppress(OSError):
            return Path(self.remote_output_file).read_text(errors="replace")
        return ""


class AgentsBySSH(SSHEngineSetLauncher):  # type: ignore[misc]
    """Agents on several machines; all connections begin at once."""

    launcher_class = AgentBySSH

    #: Called with a machine, the exit status and what was said.
    on_one_end: Callable[[str, int, str], None] = lambda host, status, said: None

    def _notice_engine_stopped(self, data: dict[str, Any]) -> None:
        name = data["identifier"]
        said = self.launchers[name].get_output()
        super()._notice_engine_stopped(data)
        self.on_one_end(name.rpartition("/")[0], data["exit_code"], said)


class AgentsBySlurm(SlurmEngineSetLauncher):  # type: ignore[misc]
    """Agents by one ``sbatch`` and one ``srun``.

    Some tasks end at once, which must not end the others (``--wait=0``); one task a machine forks
    ranks, which may use all that the machine has for the job (``--cpu-bind=none``).
    """

    default_template = Unicode(
        """#!/bin/sh
#SBATCH --export=ALL
#SBATCH --job-name=distkit
srun --wait=0 --kill-on-bad-exit=0 --cpu-bind=none {program_and_args}
"""
    )

    batch_template: Any = SlurmEngineSetLauncher.batch_template

    def _insert_options_in_script(self) -> None:
        """Insert ``options``, too, which ipyparallel forgets."""
        super()._insert_options_in_script()
        if self.options:
            self.batch_template = self.batch_template.replace("\n", "\n#SBATCH {options}\n", 1)


#: In the place of ipyparallel's own, by the name that ``engines=`` has.
OURS: dict[str, type[Any]] = {"ssh": AgentsBySSH, "slurm": AgentsBySlurm}
