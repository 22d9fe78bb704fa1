"""Start a laboratory: check the requirements, start the keeper, and explain errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.errors import LaboratoryError

#: The Debian package of each program.
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "hostname": "hostname",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "sh": "dash",
    "ssh": "openssh-client",
    "scp": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
}

#: An ordinary user's PATH lacks the folders of administrators' programs.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin:/usr/sbin:/sbin"])

#: An ordinary user is root in a user namespace, which all hosts share.
ROOTLESS = os.geteuid() != 0

#: A script that runs without distkit's other modules.
_KEEPER = Path(__file__).with_name("keeper.py")

_FORBIDDEN = (
    "This machine does not allow it. Use root; or allow user namespaces: `sysctl -w "
    "user.max_user_namespaces=10000`, and on Ubuntu 24.04 or later `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`; or start the container with --privileged."
)


def check_platform() -> None:
    """Check whether this machine can run a laboratory.

    Raises:
        LaboratoryError: this is not Linux, or a program is missing.
    """
    if sys.platform != "linux":
        raise LaboratoryError(
            f"a laboratory needs Linux namespaces, but this is {sys.platform}. "
            "Use a Linux machine, or a Linux container with --privileged."
        )
    for program in ("ip", "hostname", "nsenter", "setpriv", "unshare"):
        find(program)


def start(plan: dict[str, Any]) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the keeper; return it and the pid of each host's first process.

    Args:
        plan: from :func:`distkit_hosts.laboratory.plan.make_plan`.

    Raises:
        LaboratoryError: a host cannot be created.
    """
    try:
        owner = os.pidfd_open(os.getpid())  # readable once this process has ended
    except OSError as error:
        raise LaboratoryError(
            f"the laboratory cannot be created: pidfd_open: {error.strerror}. It needs Linux 5.3."
        ) from error
    plan = {**plan, "owner": owner}
    spaces = ["--net", "--mount", *(["--user", "--map-root-user"] if ROOTLESS else [])]
    errors = tempfile.TemporaryFile("w+")
    keeper = subprocess.Popen(
        [find("unshare"), *spaces, "--propagation=slave", sys.executable, "-IS", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        pass_fds=[owner],
        start_new_session=True,  # Ctrl-C reaches the owner, which ends it
        env={**os.environ, "PATH": PATH},
    )
    os.close(owner)
    assert keeper.stdin and keeper.stdout
    try:
        with errors, keeper.stdout:
            with suppress(BrokenPipeError), keeper.stdin:  # it has failed to start
                keeper.stdin.write(json.dumps(plan) + "\n")
            if answer := keeper.stdout.readline():
                return keeper, json.loads(answer)
            keeper.wait()
            errors.seek(0)
            raise LaboratoryError(explain("; ".join(errors.read().splitlines())))
    except BaseException:
        keeper.terminate()
        keeper.wait()
        shutil.rmtree(plan["folder"], ignore_errors=True)
        raise


def explain(error: str) -> str:
    """Return an error's message, with the remedy if a permission is missing."""
    refusals = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSPC)
    forbidden = any(os.strerror(number) in error for number in refusals)
    return f"the laboratory cannot be created: {error}. {_FORBIDDEN * forbidden}".strip()


def find(name: str) -> str:
    """Return the path of a program.

    Raises:
        LaboratoryError: it is not installed here.
    """
    if path := shutil.which(name, path=PATH):
        return path
    raise LaboratoryError(
        f"the laboratory needs the program `{name}`, which is not installed here. "
        f"On Debian or Ubuntu: sudo apt-get install {_PACKAGES[name]}"
    )
