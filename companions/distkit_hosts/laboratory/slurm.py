"""Slurm in the laboratory: its controller on the head, its daemon on each other host.

The plug-ins chosen need no cgroups, so that it runs where a laboratory does.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory.plan import user
from distkit_hosts.laboratory.starting import find

if TYPE_CHECKING:
    from distkit_hosts.laboratory.laboratory import Laboratory

#: Nodes register within a second or two; a loaded machine takes longer [s].
_PATIENCE = 60.0

_CONFIGURATION = """\
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
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _settings(lab: Laboratory) -> Path:
    return lab.folder / "slurm" / "slurm.conf"


def start(lab: Laboratory, cpus: int) -> None:
    """Start munge, the controller and the daemons, once; wait until all nodes are ready.

    Args:
        lab: its first host has the controller; the others are the nodes.
        cpus: how many tasks a node takes.

    Raises:
        LaboratoryError: Slurm is missing, or does not start.
    """
    if _settings(lab).exists():
        return
    munged, controller, daemon = map(find, ("munged", "slurmctld", "slurmd"))
    head, *nodes = lab.hosts
    if not nodes:
        raise LaboratoryError("Slurm needs a host for its controller, and at least one more.")
    _configure(lab, cpus)
    key = lab.folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for host in lab.hosts:
        where = f"--key-file={key} --log-file={lab.folder / host / 'munged.log'}"
        _daemon(lab, host, f"mkdir -pm 711 /run/munge /run/slurm; exec {munged} --force {where}")
    _daemon(lab, head, f"exec {controller}")
    for host in nodes:
        _daemon(lab, host, f"exec {daemon}")
    _wait(lab, head, len(nodes))


def _configure(lab: Laboratory, cpus: int) -> None:
    head, *nodes = lab.hosts
    text = _CONFIGURATION.format(
        head=head,
        nodes=",".join(nodes),
        user=user(),
        folder=lab.folder,
        cpus=cpus,
    )
    _settings(lab).write_text(text)


def _daemon(lab: Laboratory, host: str, command: str) -> None:
    """Start a program that goes on in the background."""
    ran = lab.run(host, ["sh", "-c", command], cwd="/", capture_output=True, text=True)
    if ran.returncode:
        raise LaboratoryError(f"on {host}, `{command}` failed: {ran.stderr.strip()}")


def _wait(lab: Laboratory, head: str, nodes: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    states = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while True:
        ran = lab.run(head, states, cwd="/", capture_output=True, text=True)
        if ran.stdout.split() == ["idle"] * nodes:
            return
        if time.monotonic() > deadline:
            raise LaboratoryError(f"Slurm's nodes do not come up: {ran.stdout or ran.stderr}")
        time.sleep(0.05)
