"""SSH in the laboratory: OpenSSH's own server on each host, with keys made for the laboratory.

Root's servers run as root; an ordinary user's run as that user, as OpenSSH allows.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory.plan import user
from distkit_hosts.laboratory.starting import find

if TYPE_CHECKING:
    from distkit_hosts.laboratory.laboratory import Laboratory

#: A server listens within some milliseconds; a loaded machine takes longer [s].
_PATIENCE = 20.0

_SERVER = """\
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

_CLIENT = """\
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


class Ssh:
    """The SSH servers of a laboratory, and what their clients need."""

    def __init__(self, lab: Laboratory) -> None:
        self._lab = lab
        self._started = False

    def start(self) -> None:
        """Start the servers, if they are not yet running."""
        find("ssh")
        if not self._started:
            self._configure()
            self._serve()
            self._started = True

    def _configure(self) -> None:
        folder, lab, name = self._lab.folder, self._lab, user()
        for key in ("key", "host_key"):
            make = [find("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(make, check=True)
        host_key = folder.joinpath("host_key.pub").read_text()
        folder.joinpath("known_hosts").write_text(f"laboratory {host_key}")
        folder.joinpath("sshd_config").write_text(_SERVER.format(folder))
        # an account without a password is not a locked one, as root's is on some machines
        folder.joinpath("shadow").write_text(f"{name}:*:20000:0:99999:7:::\n")
        hosts = [*lab.hosts, *map(lab.address, lab.hosts)]
        text = _CLIENT.format(hosts=" ".join(hosts), user=name, folder=folder)
        folder.joinpath("ssh_config").write_text(text)

    def _serve(self) -> None:
        server, folder = find("sshd"), self._lab.folder
        for host in self._lab.hosts:  # root's needs the folder
            start = (
                f"mkdir -p /run/sshd; exec {server} -f {folder}/sshd_config -E {self._log(host)}"
            )
            self._lab.run(host, ["sh", "-c", start], check=True)
        deadline = time.monotonic() + _PATIENCE
        for host in self._lab.hosts:
            while "listening on" not in (said := self._log(host).read_text()):
                if time.monotonic() > deadline:
                    raise LaboratoryError(f"the SSH server of {host} does not listen: {said}")
                time.sleep(0.005)

    def _log(self, host: str) -> Path:
        return self._lab.folder / host / "sshd.log"
