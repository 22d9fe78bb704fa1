"""Slurm in a laboratory: the controller on the head node, and a daemon on every other host.

The selected plugins need no cgroups, so Slurm runs wherever a laboratory does.
"""

from __future__ import annotations

import os
import pwd
import secrets
from pathlib import Path

from distkit_hosts.laboratory import Laboratory
from distkit_hosts.laboratory.starting import find, start_daemon, wait_for

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
    """Start munge, the controller and the daemons once; wait until all nodes are idle.

    Args:
        lab: a laboratory; its first host runs the controller, and the others are nodes.

    Raises:
        LaboratoryError: Slurm is not installed here, or does not start.
    """
    if _settings(lab).exists():
        return
    munged, controller, daemon = map(find, ("munged", "slurmctld", "slurmd"))
    head, *nodes = lab.hosts
    text = _SLURM.format(
        head=head, nodes=",".join(nodes), user=pwd.getpwuid(os.getuid()).pw_name, folder=lab.folder
    )
    _settings(lab).write_text(text)
    key = lab.folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for host in lab.hosts:
        options = f"--key-file={key} --log-file={lab.folder / host / 'munged.log'}"
        start_daemon(
            lab, host, f"mkdir -pm 711 /run/munge /run/slurm; exec {munged} --force {options}"
        )
    start_daemon(lab, head, f"exec {controller}")
    for host in nodes:
        start_daemon(lab, host, f"exec {daemon}")
    states = ["sinfo", "--noheader", "--Node", "--format=%T"]
    wait_for(
        lambda: lab.run(head, states, cwd="/", capture_output=True, text=True).stdout,
        lambda output: output.split() == ["idle"] * len(nodes),
        "Slurm's nodes do not come up",
    )
