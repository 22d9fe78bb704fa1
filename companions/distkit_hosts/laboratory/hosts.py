"""Hosts on this machine: how they are made, run commands, and end."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import network, starting
from distkit_hosts.laboratory.plan import OUTSIDE, Plan, check_names, shared_folders
from distkit_hosts.laboratory.tools import find

#: They name folders and sockets of the machine that a host does not have.
_NOT_PASSED = {"TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "SSH_CONNECTION"}


class Hosts:
    """Hosts with a network of their own: the base of :class:`~distkit_hosts.laboratory.Laboratory`.

    The arguments are documented there.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("alpha", "beta", "gamma"),
        *,
        head: str | None = "head",
        outside: bool = False,
        skew: Mapping[str, int] | None = None,
        shared: Sequence[str | Path] = (),
        private: Mapping[str, Sequence[str | Path]] | None = None,
    ) -> None:
        #: The names of all hosts, the head first.
        self.hosts = check_names([head, *hosts] if head else hosts)
        self._addresses: dict[str, str] = dict.fromkeys(self.hosts, "")
        for host in {*(skew or {}), *(private or {})}:
            self._check(host)
        starting.check_platform(os.geteuid() != 0, outside)
        self._address_all(outside)
        folders.sweep(tempfile.gettempdir())
        made, held = folders.make()
        #: What belongs to the laboratory, on all hosts and outside.
        self.folder = Path(made)
        self._doors: list[socket.socket] = []  # of the hosts, and held here
        self._wrong_names: dict[str, dict[str, str | None]] = {host: {} for host in self.hosts}
        self._plan = Plan(
            self.folder,
            self.network,
            {host: self._addresses[host] for host in self.hosts},
            rootless=os.geteuid() != 0,
            shared=shared_folders([made, *shared]),
            skew=skew or {},
            private=private or {},
        )
        self._plan.prepare()
        for host in self.hosts:
            self._write_names(host)
        self._keeper, self._pids = starting.start(self._plan.for_keeper(), held)
        if outside:
            try:
                self._connect_outside()
            except LaboratoryError:
                self.close()
                raise

    def run(
        self, host: str, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host and wait for it: :func:`subprocess.run` with its options.

        Raises:
            LaboratoryError: there is no such host.
        """
        return subprocess.run(**self._entering(host, argv, **options))

    def popen(self, host: str, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host: :class:`subprocess.Popen` with its options.

        The command ends with the process returned, which only stands for it: of the signals,
        only those that end it have an effect.

        Raises:
            LaboratoryError: there is no such host.
        """
        return subprocess.Popen(**self._entering(host, argv, **options))

    def enter(self, host: str, cwd: str | Path | None = None) -> list[str]:
        """The words that, put before a command, run it on a host.

        Args:
            host: the host.
            cwd: the folder in which the command runs; None: the current one.

        Raises:
            LaboratoryError: there is no such host.
        """
        user = f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"
        as_user = [find("unshare"), "--user", *user] if self._plan.rootless else []
        there = ["--pdeathsig", "KILL", "env", f"--chdir={cwd or Path.cwd()}"]
        return [*self._administer(host), *as_user, find("setpriv"), *there]

    def address(self, host: str) -> str:
        """The address of a host in the laboratory's network.

        Raises:
            LaboratoryError: there is no such host.
        """
        self._check(host)
        return self._addresses[host]

    def close(self) -> None:
        """End the hosts and all that runs on them; remove all traces of them."""
        self._keeper.terminate()
        self._keeper.wait()
        for door in self._doors:
            door.close()
        if self.outside:
            with suppress(LaboratoryError):  # the kernel may have been quicker
                starting.ip(f"link del lab{self._keeper.pid}")

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------

    def _address_all(self, outside: bool) -> None:
        taken, start = (starting.routes(), os.getpid()) if outside else ([], 0)
        #: The addresses of its network.
        self.network = network.free_network(taken, start)
        addresses = [str(address) for address in self.network.hosts()][1:]
        self._addresses = dict(zip(self.hosts, addresses, strict=False))
        #: The address of this process's own machine in that network; "" without ``outside=True``.
        self.outside = addresses[-1] if outside else ""
        if outside:
            self._addresses[OUTSIDE] = self.outside

    def _connect_outside(self) -> None:
        keeper = self._keeper.pid
        starting.ip(f"link add lab{keeper} type veth peer name {OUTSIDE} netns {keeper}")
        for line in network.serve(OUTSIDE, self.outside, self.network).splitlines():
            self._admin(None, "ip", *line.split())
        starting.ip(network.join(f"lab{keeper}", self.outside, self.network))

    def _entering(self, host: str, argv: Sequence[str | Path], **options: Any) -> dict[str, Any]:
        """The options of subprocess.run that run a command on a host."""
        words = [*self.enter(host, options.pop("cwd", None)), *map(str, argv)]
        env = {**(options.pop("env", None) or os.environ)}
        passed = {name: value for name, value in env.items() if name not in _NOT_PASSED}
        return {"args": words, "env": passed, **options}

    def _administer(self, host: str | None) -> list[str]:
        """The words that run a command as a host's administrator; as the router's for None."""
        spaces = ["--mount", "--net", *(["--uts", "--ipc", "--pid"] if host else [])]
        spaces += ["--user", "--preserve-credentials"] if self._plan.rootless else []
        spaces += ["--time"] if host in self._plan.skew else []
        return [find("nsenter"), f"--target={self._pid(host)}", *spaces]

    def _admin(self, host: str | None, program: str, *words: str) -> None:
        argv = [*self._administer(host), find(program), *words]
        ran = subprocess.run(argv, capture_output=True, text=True)
        if ran.returncode:
            command = shlex.join([program, *words])
            raise LaboratoryError(f"`{command}` failed: {ran.stderr.strip()}")

    def _check(self, host: str) -> None:
        if host not in self._addresses:
            raise LaboratoryError(f"there is no host {host!r}. Hosts: {', '.join(self.hosts)}")

    def _pid(self, host: str | None) -> int:
        """The first process of a host; the keeper, which is in the router, for None."""
        if self._keeper.poll() is not None:
            raise LaboratoryError("the laboratory has ended. Make another one.")
        if host is None:
            return self._keeper.pid
        self._check(host)
        if host not in self._pids:
            raise LaboratoryError(f"{host} has crashed, or is not a host of the laboratory's own.")
        return self._pids[host]

    def _write_names(self, host: str) -> None:
        """Write a host's ``/etc/hosts``."""
        names: dict[str, str | None] = {**self._addresses}
        if self.outside:
            names.setdefault(socket.gethostname(), self.outside)
        text = network.hosts_file({**names, **self._wrong_names[host]})
        self.folder.joinpath(host, "hosts").write_text(text)
