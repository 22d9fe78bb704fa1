"""How a laboratory starts: what must be there, the keeper, and the words for what fails."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory.tools import PATH, find

#: A script that runs without distkit's other modules.
_KEEPER = Path(__file__).with_name("keeper.py")

_FORBIDDEN = (
    "This machine does not allow it. Use root; or allow user namespaces: `sysctl -w "
    "user.max_user_namespaces=10000`, and on Ubuntu 24.04 or later `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`; or start the container with --privileged."
)


def check_platform(rootless: bool, outside: bool) -> None:
    """Find out before the start that there can be no laboratory here.

    Raises:
        LaboratoryError: this is not Linux, a program is missing, or only root may do this.
    """
    if sys.platform != "linux":
        raise LaboratoryError(
            f"a laboratory is made of Linux's namespaces, and this is {sys.platform}. "
            "Use a Linux machine, or a Linux container with --privileged."
        )
    if outside and rootless:
        raise LaboratoryError(
            "only root can connect the hosts with the network outside. Run what shall reach them "
            "on the head: lab.run('head', …) or `distkit lab-hosts -- COMMAND`."
        )
    for program in ("ip", "nsenter", "setpriv", "unshare"):
        find(program)


def routes() -> list[str]:
    """The networks that this machine has routes to, as ``ip`` names them."""
    words = (line.split() for line in ip("route show table all").splitlines())
    return [next((word for word in line if word[0].isdigit()), "default") for line in words]


def ip(commands: str) -> str:
    """Run ``ip`` commands, one a line, on this machine itself; return what they print."""
    words = [find("ip"), "-4", "-batch", "-"]
    ran = subprocess.run(words, input=commands, capture_output=True, text=True)
    if ran.returncode:
        raise LaboratoryError(f"`ip` failed: {' '.join(ran.stderr.split())}")
    return ran.stdout


def start(plan: dict[str, Any], held: int | None) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Start the keeper; return it and the pid of each host's first process.

    Args:
        plan: what the keeper makes.
        held: holds the laboratory's folder, as long as somebody has it open.

    Raises:
        LaboratoryError: a host cannot be made.
    """
    maker = _handle()
    plan = {**plan, "maker": maker}
    passed = [fd for fd in (maker, held) if fd is not None]
    log = Path(plan["folder"], "keeper.log")
    with log.open("w") as errors:
        keeper = subprocess.Popen(
            [sys.executable, "-IS", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is for the maker, which ends it
            env={**os.environ, "PATH": PATH},
        )
    for fd in passed:
        os.close(fd)
    try:
        answer = _ask(keeper, plan)
    except BaseException:
        keeper.terminate()
        keeper.wait()
        raise
    if "hosts" in answer:
        return keeper, answer["hosts"]
    keeper.wait()
    raise LaboratoryError(explain(answer["error"]))


def _handle() -> int:
    """A file that can be read once this process has ended."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise LaboratoryError(
            f"the laboratory cannot be made: pidfd_open: {error.strerror}. It needs Linux 5.3."
        ) from error


def _ask(keeper: subprocess.Popen[str], plan: dict[str, Any]) -> dict[str, Any]:
    """Give the keeper its plan, and wait for its answer."""
    assert keeper.stdin and keeper.stdout
    with keeper.stdin, keeper.stdout:
        keeper.stdin.write(json.dumps(plan) + "\n")
        keeper.stdin.flush()
        line = keeper.stdout.readline()
    if not line:
        said = Path(plan["folder"], "keeper.log").read_text().strip()
        return {"error": f"its keeper ended with status {keeper.wait()}\n{said}"}
    answer: dict[str, Any] = json.loads(line)
    return answer


def explain(error: str) -> str:
    """An error's message, with the remedy if it is one of permission."""
    refusals = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSPC)
    forbidden = any(os.strerror(number) in error for number in refusals)
    return f"the laboratory cannot be made: {error}. {_FORBIDDEN * forbidden}".strip()
