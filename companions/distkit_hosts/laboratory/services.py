"""SSH in the laboratory: OpenSSH's server on each host, with keys created for the laboratory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory.plan import user
from distkit_hosts.laboratory.starting import find

if TYPE_CHECKING:
    from distkit_hosts.laboratory.laboratory import Laboratory

#: Time limit for the start of servers [s]; most take a second or two.
_START_TIMEOUT = 60.0


def start_daemon(lab: Laboratory, host: str, command: str) -> None:
    """Start a program in the background on a host."""
    ran = lab.run(host, ["sh", "-c", command], cwd="/", capture_output=True, text=True)
    if ran.returncode:
        raise LaboratoryError(f"on {host}, `{command}` failed: {ran.stderr.strip()}")


def wait_for(query: Callable[[], str], is_up: Callable[[str], bool], failure: str) -> None:
    """Wait until a program reports that it is up; raise an error with ``failure`` otherwise."""
    deadline = time.monotonic() + _START_TIMEOUT
    while not is_up(output := query()):
        if time.monotonic() > deadline:
            raise LaboratoryError(f"{failure}: {output}")
        time.sleep(0.02)


_SSH_SERVER = """\
HostKey {0}/host_key
AuthorizedKeysFile {0}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 500
UseDNS no
Subsystem sftp internal-sftp
"""

_SSH_CLIENT = """\
Host {hosts}
    User {user}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
    HostKeyAlias laboratory
    BatchMode yes
    LogLevel ERROR
"""


def start_ssh(lab: Laboratory) -> None:
    """Start a server on each host unless it runs, and wait until all of them listen.

    Raises:
        LaboratoryError: OpenSSH is missing, or a server does not start.
    """
    server, configuration = find("sshd"), lab.folder / "sshd_config"
    if not configuration.exists():
        _configure_ssh(lab, configuration)
        for host in lab.hosts:  # root's server needs the folder
            start = f"exec {server} -f {configuration} -E {_log(lab, host)}"
            start_daemon(lab, host, f"mkdir -p /run/sshd; {start}")
    for host in lab.hosts:
        wait_for(
            _log(lab, host).read_text,
            lambda output: "listening on" in output,
            f"the SSH server of {host} does not listen",
        )


def _configure_ssh(lab: Laboratory, configuration: Path) -> None:
    folder, name = lab.folder, user()
    find("ssh")
    for key in ("key", "host_key"):
        command = [find("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    host_key = folder.joinpath("host_key.pub").read_text()
    folder.joinpath("known_hosts").write_text(f"laboratory {host_key}")
    # root's account is locked on some machines; one without a password is not
    folder.joinpath("shadow").write_text(f"{name}:*:20000:0:99999:7:::\n")
    hosts = [*lab.hosts, *map(lab.address, lab.hosts)]
    text = _SSH_CLIENT.format(hosts=" ".join(hosts), user=name, folder=folder)
    folder.joinpath("ssh_config").write_text(text)
    configuration.write_text(_SSH_SERVER.format(folder))


def _log(lab: Laboratory, host: str) -> Path:
    return lab.folder / host / "sshd.log"
