"""Start a laboratory, and the SSH servers on its hosts.

An OpenSSH server runs on each host, with keys created for the laboratory.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.errors import LaboratoryError

if TYPE_CHECKING:
    from distkit_hosts.laboratory.laboratory import Laboratory

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

#: Includes the folders for administrators' programs, which an ordinary user's PATH lacks.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin:/usr/sbin:/sbin"])

#: Whether all hosts share a user namespace that maps an ordinary user to root.
ROOTLESS = os.geteuid() != 0

#: A script that runs without the other modules of distkit.
_INIT = Path(__file__).with_name("init.py")

_FORBIDDEN = (
    "This machine does not allow it. Run as root; or allow user namespaces: `sysctl -w "
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
    """Start the init process; return it and the pid of each host's first process.

    Args:
        plan: the result of :func:`distkit_hosts.laboratory.plan.make_plan`.

    Raises:
        LaboratoryError: a host cannot be created.
    """
    owner = os.pidfd_open(os.getpid())  # readable once this process has exited
    plan = {**plan, "owner": owner}
    spaces = ["--net", "--mount", *(["--user", "--map-root-user"] if ROOTLESS else [])]
    errors = tempfile.TemporaryFile("w+")
    init = subprocess.Popen(
        [find("unshare"), *spaces, "--propagation=slave", sys.executable, "-IS", _INIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        pass_fds=[owner],
        start_new_session=True,  # Ctrl-C reaches only the owner, which stops init
        env={**os.environ, "PATH": PATH},
    )
    os.close(owner)
    assert init.stdin and init.stdout
    with errors, init.stdout:
        with suppress(BrokenPipeError), init.stdin:  # init has failed to start
            init.stdin.write(json.dumps(plan) + "\n")
        if reply := init.stdout.readline():
            return init, json.loads(reply)
        init.wait()
        shutil.rmtree(plan["folder"], ignore_errors=True)
        errors.seek(0)
        raise LaboratoryError(explain("; ".join(errors.read().splitlines())))


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


# -- programs on the hosts -------------------------------------------------------------------------

#: Timeout for servers to start [s]; most take a second or two.
_START_TIMEOUT = 60.0


def start_daemon(lab: Laboratory, host: str, command: str) -> None:
    """Start a program in the background on a host."""
    result = lab.run(host, ["sh", "-c", command], cwd="/", capture_output=True, text=True)
    if result.returncode:
        raise LaboratoryError(f"on {host}, `{command}` failed: {result.stderr.strip()}")


def wait_for(query: Callable[[], str], is_up: Callable[[str], bool], failure: str) -> None:
    """Wait until a program reports that it is up; raise a LaboratoryError after a timeout."""
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
    """Start a server on each host unless one is running, and wait until all are listening.

    Raises:
        LaboratoryError: OpenSSH is missing, or a server does not start.
    """
    server, configuration = find("sshd"), lab.folder / "sshd_config"
    if not configuration.exists():
        _configure_ssh(lab, configuration)
        for host in lab.hosts:  # sshd needs the folder if it runs as root
            start = f"exec {server} -f {configuration} -E {_log(lab, host)}"
            start_daemon(lab, host, f"mkdir -p /run/sshd; {start}")
    for host in lab.hosts:
        wait_for(
            _log(lab, host).read_text,
            lambda output: "listening on" in output,
            f"the SSH server on {host} is not listening",
        )


def _configure_ssh(lab: Laboratory, configuration: Path) -> None:
    folder, name = lab.folder, pwd.getpwuid(os.getuid()).pw_name
    for key in ("key", "host_key"):
        command = [find("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    host_key = folder.joinpath("host_key.pub").read_text()
    folder.joinpath("known_hosts").write_text(f"laboratory {host_key}")
    # root's account is locked on some machines; an account without a password is not
    folder.joinpath("shadow").write_text(f"{name}:*:20000:0:99999:7:::\n")
    hosts = [*lab.hosts, *map(lab.address, lab.hosts)]
    text = _SSH_CLIENT.format(hosts=" ".join(hosts), user=name, folder=folder)
    folder.joinpath("ssh_config").write_text(text)
    configuration.write_text(_SSH_SERVER.format(folder))


def _log(lab: Laboratory, host: str) -> Path:
    return lab.folder / host / "sshd.log"
