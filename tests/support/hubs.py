"""A JupyterHub on the loopback interface, with a server for each user.

If the tests run as root and can create a mount namespace, the hub's users are system users, as with
The Littlest JupyterHub. Only the hub and its servers see the /etc/passwd that lists these users.
Otherwise all servers run as the current user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kernels import TIMEOUT, Kernel, request
from waiting import wait_until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
#: User names, and the uid of the first one.
USERS, FIRST = ("ada", "bob"), 61001

#: The hub's configuration. Requests return when their action is done, or after the timeout.
_CONFIG = """
c = get_config()
c.JupyterHub.bind_url = "http://127.0.0.1:{public}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{private}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy}"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {token!r}
c.Authenticator.allow_all = True
c.JupyterHub.services = [{{"name": "test", "api_token": {token!r}, "admin": True}}]
c.JupyterHub.spawner_class = {spawner!r}
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/{{username}}"
c.JupyterHub.tornado_settings = dict.fromkeys(
    ["slow_spawn_timeout", "slow_stop_timeout"], {timeout}
)
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser"]
c.Spawner.args = {args!r}
c.Spawner.env_keep = ["PATH", "LANG", "DISTKIT_TEST_ID"]
c.Spawner.environment = {{"PYTHONPATH": {root!r}}}
c.Spawner.start_timeout = c.Spawner.http_timeout = {timeout}
"""

#: Sets up a mount namespace: more users, a /proc that hides the processes of other users, a second
#: /proc that shows them, and readable folders on the paths to Python and distkit.
_NAMESPACE = """set -e
mount --bind passwd /etc/passwd
mkdir proc; mount --bind /proc proc
mount -t proc -o hidepid=invisible proc /proc
mkdir stash; mount --rbind / stash
opened=""
for needed in $NEEDED; do
    at=$needed; closed=""
    while [ "$at" != / ]; do
        at=$(dirname "$at")
        setpriv --reuid=65534 --regid=65534 --clear-groups test -x "stash$at" || closed=$at
    done
    [ -n "$closed" ] || continue
    case "$opened" in *" $closed "*) ;; *) mount -t tmpfs -o mode=755 tmpfs "$closed";; esac
    opened="$opened $closed "
    mkdir -p "$needed"; mount --bind "stash$needed" "$needed"
done
umount --recursive --lazy stash
exec "$@"
"""


def missing() -> str:
    """Explain why no hub can run; "" if one can."""
    if not BIN.joinpath("configurable-http-proxy").exists():
        return "no proxy: run npm install --global --prefix .venv configurable-http-proxy@4"
    return ""


def real_users() -> bool:
    """Return whether system users can be created for the hub."""
    mount = "unshare --mount mount -t proc -o hidepid=invisible proc /proc".split()
    return not os.getuid() and not subprocess.run(mount, capture_output=True).returncode


@dataclass
class Hub:
    """A running hub. Its token is also the password of every user."""

    url: str
    token: str
    homes: Path
    process: subprocess.Popen[bytes]

    @property
    def proc(self) -> Path:
        """A /proc with the processes of all users, in the hub's namespace."""
        return self.homes / "proc"

    def request(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """Send a request to the hub and return its reply."""
        return request(f"{self.url}/hub/api{path}", self.token, method, body)

    def responds(self) -> bool:
        """Return whether the hub responds."""
        assert self.process.poll() is None, "the hub has exited"
        try:
            return bool(self.request("/info"))
        except (OSError, HTTPException):
            return False

    def is_running(self, user: str) -> bool:
        """Return whether a user's server is running."""
        return bool(self.request(f"/users/{user}")["servers"])

    def start(self, user: str) -> None:
        """Start a user's server."""
        self.request(f"/users/{user}/server", "POST", {})

    def kernel(self, user: str) -> Kernel:
        """Start a kernel on a user's server."""
        return Kernel.start(f"{self.url}/user/{user}", self.token)


@contextmanager
def hub(config: str = "") -> Iterator[Hub]:
    """Run a hub with :data:`USERS`; ``config`` is appended to its configuration."""
    folder = Path(tempfile.mkdtemp(prefix="hub-"))
    folder.chmod(0o755)
    ports, token = _free_ports(3), uuid.uuid4().hex
    real = real_users()
    settings = {
        **dict(zip(("public", "private", "proxy"), ports, strict=True)),
        "token": token,
        "spawner": "localprocess" if real else "simple",
        "python": sys.executable,
        "root": str(ROOT),
        "folder": folder,
        "args": [] if os.getuid() or real else ["--allow-root"],
        "timeout": TIMEOUT,
    }
    (folder / "config.py").write_text(_CONFIG.format(**settings) + config)
    command = [sys.executable, "-m", "jupyterhub", "--config=config.py"]
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    environ |= {"NEEDED": f"{ROOT} {Path(sys.prefix).resolve()} {sys.base_prefix}"}
    if real:
        _passwd(folder)
        command = ["unshare", "--mount", "sh", "-c", _NAMESPACE, "sh", *command]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)
    running = Hub(f"http://127.0.0.1:{ports[0]}", token, folder, process)
    try:
        wait_until(running.responds, TIMEOUT)
        for user in USERS:
            running.request(f"/users/{user}", "POST", {})
        yield running
    except BaseException:
        print((folder / "log").read_text()[-5000:])
        raise
    finally:
        process.terminate()
        process.wait(TIMEOUT)
        shutil.rmtree(folder)


def _passwd(folder: Path) -> None:
    """Write a passwd file with the users, and create their home folders."""
    lines = [":".join(map(str, entry)) for entry in pwd.getpwall()]
    for number, user in enumerate(USERS, FIRST):
        home = folder / user
        home.mkdir(0o700)
        os.chown(home, number, number)
        lines.append(f"{user}:x:{number}:{number}::{home}:/bin/sh")
    (folder / "passwd").write_text("\n".join(lines) + "\n")


def _free_ports(n: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
