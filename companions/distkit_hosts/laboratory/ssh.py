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


def start(lab: Laboratory) -> None:
    """Start a server on each host, once; wait until all of them listen.

    Raises:
        LaboratoryError: OpenSSH is missing, or a server does not start.
    """
    server, configuration = find("sshd"), lab.folder / "sshd_config"
    if not configuration.exists():
        _configure(lab, configuration)
        for host in lab.hosts:  # root's server needs the folder
            command = f"mkdir -p /run/sshd; exec {server} -f {configuration} -E {_log(lab, host)}"
            lab.run(host, ["sh", "-c", command], check=True)
    deadline = time.monotonic() + _PATIENCE
    for host in lab.hosts:
        while "listening on" not in (said := _log(lab, host).read_text()):
            if time.monotonic() > deadline:
                raise LaboratoryError(f"the SSH server of {host} does not listen: {said}")
            time.sleep(0.005)


def _configure(lab: Laboratory, configuration: Path) -> None:
    folder, name = lab.folder, user()
    find("ssh")
    for key in ("key", "host_key"):
        make = [find("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    host_key = folder.joinpath("host_key.pub").read_text()
    folder.joinpath("known_hosts").write_text(f"laboratory {host_key}")
    # an account without a password is not a locked one, as root's is on some machines
    folder.joinpath("shadow").write_text(f"{name}:*:20000:0:99999:7:::\n")
    hosts = [*lab.hosts, *map(lab.address, lab.hosts)]
    text = _CLIENT.format(hosts=" ".join(hosts), user=name, folder=folder)
    folder.joinpath("ssh_config").write_text(text)
    configuration.write_text(_SERVER.format(folder))


def _log(lab: Laboratory, host: str) -> Path:
    return lab.folder / host / "sshd.log"
