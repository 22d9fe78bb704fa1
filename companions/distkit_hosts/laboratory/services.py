"""SSH and Slurm in the laboratory.

OpenSSH's server runs on each host, with keys created for the laboratory, as root or as the ordinary
user. Slurm's controller is on the head, and its daemon on each other host; its plug-ins need no
cgroups, so it runs wherever a laboratory does.
"""

from __future__ import annotations

import secrets
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


def _daemon(lab: Laboratory, host: str, command: str) -> None:
    """Start a program in the background on a host."""
    ran = lab.run(host, ["sh", "-c", command], cwd="/", capture_output=True, text=True)
    if ran.returncode:
        raise LaboratoryError(f"on {host}, `{command}` failed: {ran.stderr.strip()}")


def _await(query: Callable[[], str], is_up: Callable[[str], bool], failure: str) -> None:
    """Wait until a program reports that it is up; raise an error with ``failure`` otherwise."""
    deadline = time.monotonic() + _START_TIMEOUT
    while not is_up(output := query()):
        if time.monotonic() > deadline:
            raise LaboratoryError(f"{failure}: {output}")
        time.sleep(0.02)


# -- SSH ------------------------------------------------------------------------------------------

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
            _daemon(lab, host, f"mkdir -p /run/sshd; {start}")
    for host in lab.hosts:
        _await(
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


# -- Slurm ----------------------------------------------------------------------------------------

_SLURM = """\
ClusterName=laboratory
SlurmctldHost={head}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
StateSaveLocation=/run/slurm/controller
SlurmdSpoolDir=/run/slurm/daemon
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={folder}/{head}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdTimeout=10
KillWait=2
ReturnToService=2
MailProg=/bin/true
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _settings(lab: Laboratory) -> Path:
    return lab.folder / "slurm" / "slurm.conf"


def start_slurm(lab: Laboratory) -> None:
    """Start munge, the controller and the daemons, unless they run; wait until all nodes are ready.

    Args:
        lab: the laboratory, whose first host has the controller; the others are nodes.

    Raises:
        LaboratoryError: Slurm is missing, or does not start.
    """
    if _settings(lab).exists():
        return
    munged, controller, daemon = map(find, ("munged", "slurmctld", "slurmd"))
    head, *nodes = lab.hosts
    if not nodes:
        raise LaboratoryError("Slurm needs a host for its controller and at least one other host.")
    text = _SLURM.format(head=head, nodes=",".join(nodes), user=user(), folder=lab.folder)
    _settings(lab).write_text(text)
    key = lab.folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for host in lab.hosts:
        options = f"--key-file={key} --log-file={lab.folder / host / 'munged.log'}"
        _daemon(lab, host, f"mkdir -pm 711 /run/munge /run/slurm; exec {munged} --force {options}")
    _daemon(lab, head, f"exec {controller}")
    for host in nodes:
        _daemon(lab, host, f"exec {daemon}")
    states = ["sinfo", "--noheader", "--Node", "--format=%T"]
    _await(
        lambda: lab.run(head, states, cwd="/", capture_output=True, text=True).stdout,
        lambda output: output.split() == ["idle"] * len(nodes),
        "Slurm's nodes do not come up",
    )
