"""The programs that a laboratory needs, and what to do where they are missing."""

from __future__ import annotations

import os
import shutil

from distkit.errors import LaboratoryError

#: The Debian package of each program.
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "umount": "mount",
    "sh": "dash",
    "ssh": "openssh-client",
    "scp": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
}

#: An ordinary user's PATH does not have the folders where administrators' programs are.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin:/usr/sbin:/sbin"])


def find(name: str) -> str:
    """The path of a program.

    Raises:
        LaboratoryError: it is not installed here.
    """
    if path := shutil.which(name, path=PATH):
        return path
    raise LaboratoryError(
        f"the laboratory needs the program `{name}`, which is not installed here. "
        f"On Debian or Ubuntu: sudo apt-get install {_PACKAGES[name]}"
    )
