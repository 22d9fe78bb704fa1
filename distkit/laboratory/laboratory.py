"""The laboratory: hosts made of namespaces, commands on them, and faults on request."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.errors import LaboratoryError
from distkit.laboratory import network, starting
from distkit.laboratory.ssh import Ssh
from distkit.laboratory.tools import find

#: They name folders and sockets of the machine that a host does not have.
_NOT_PASSED = {"TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "SSH_CONNECTION"}


class Laboratory:
    r"""Hosts on this machine, with a network of their own, until ``close()`` or ``with`` ends.

    Each host has its own network interface, hostname, processes, shared memory (``/dev/shm``),
    ``/tmp``, ``/run`` and ``/etc/hosts``. All other files are those of the machine: the same
    Python, the same home. The hosts end with the process that made them, however it ends.

    An ordinary user can make one where user namespaces are allowed. Only root can make one that
    processes outside can reach (``outside=True``).

    Args:
        hosts: their names.
        head: the name of one more host, where programs that start others run; None for none.
        outside: connect this process's own network too: its processes reach the hosts by address
            and by :meth:`ssh`, and the hosts reach them at :attr:`outside`.
        skew: by how much the monotonic clock of a host is ahead of the machine's [s]. The
            time of day cannot differ: Linux has no namespace for it.
        shared: folders in ``/tmp`` that the hosts share all the same. The current folder, the home
            and those of Python and distkit are shared always.
        private: more folders that are empty on a host when it starts: ``{"beta": [Path.home()]}``.

    Raises:
        LaboratoryError: namespaces are not allowed here, a program is missing, or a name is wrong.

    ::

        with Laboratory(["alpha", "beta"]) as lab:
            assert lab.run("alpha", ["hostname"], capture_output=True).stdout == b"alpha\n"
            lab.slow("beta", "100mbit")
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
        self.hosts = starting.check_names([head, *hosts] if head else hosts)
        self._skew, self._private = skew or {}, private or {}
        for host in {*self._skew, *self._private}:
            self._check(host)
        self._rootless = os.geteuid() != 0
        starting.check_platform(self._rootless, outside)
        self._rules: list[tuple[set[str], str]] = []
        self._slowed: set[str] = set()
        self._names: dict[str, dict[str, str | None]] = {host: {} for host in self.hosts}
        self._address_all(outside)
        folders.sweep(tempfile.gettempdir())
        made, held = folders.make()
        #: What belongs to the laboratory, on all hosts and outside.
        self.folder = Path(made)
        self._ssh = Ssh(self)
        for host in self.hosts:
            self.folder.joinpath(host).mkdir()
            self._write_names(host)
        plan = self._plan(starting.shared([made, *shared]))
        self._keeper, self._pids = starting.start(plan, held)
        if outside:
            self._connect_outside()

    # -- what runs on the hosts ----------------------------------------------------------------

    def run(self, host: str, argv: Sequence[str | Path], **options: Any) -> Any:
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

    def enter(self, host: str) -> list[str]:
        """The words that, put before a command, run it on a host.

        Raises:
            LaboratoryError: there is no such host.
        """
        user = f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"
        as_user = [find("unshare"), "--user", *user] if self._rootless else []
        return [*self._administer(host), *as_user, find("setpriv"), "--pdeathsig", "KILL"]

    def address(self, host: str) -> str:
        """The address of a host in the laboratory's network.

        Raises:
            LaboratoryError: there is no such host.
        """
        if host == "outside" and self.outside:
            return self.outside
        self._check(host)
        return self._addresses[host]

    def ssh(self) -> list[str]:
        """Start an SSH server on each host; return the words that begin an ``ssh`` command.

        On the hosts, ``ssh alpha`` works as it is; elsewhere these words choose the laboratory's
        key and addresses: ``[*lab.ssh(), "alpha", "hostname"]``.

        Raises:
            LaboratoryError: OpenSSH is missing, or a server does not start.
        """
        return self._ssh.start()

    # -- faults --------------------------------------------------------------------------------

    def cut(self, *hosts: str) -> None:
        """Cut hosts off from all others: what they send and what is sent to them is lost, silently.

        Raises:
            LaboratoryError: there is no such host.
        """
        for host in hosts:
            self.drop(host, None)
            self.drop(None, host)

    def drop(
        self,
        source: str | None,
        to: str | None,
        port: int | None = None,
        *,
        reject: bool = False,
    ) -> None:
        """Lose what one host sends to another, in this direction only.

        Args:
            source: the host that sends; None: all.
            to: the host that it is meant for; None: all.
            port: lose only what is for this TCP port.
            reject: tell the sender, as some firewalls do, instead of being silent.

        Raises:
            LaboratoryError: there is no such host.
        """
        ends = {host for host in (source, to) if host}
        device = self._port(source) if source else None
        address = self.address(to) if to else None
        rule = network.rule(device, address, port, reject)
        if (ends, rule) not in self._rules:
            self._admin(None, "ip", f"rule add pref 100 {rule}")
            self._rules.append((ends, rule))

    def slow(self, host: str, rate: str) -> None:
        """Limit what a host sends, and what it receives, each to a rate such as ``"100mbit"``.

        Raises:
            LaboratoryError: there is no such host, or it is no rate.
        """
        bucket = network.bucket(rate)
        for where, device in self._ends(host):
            self._admin(where, "tc", f"qdisc replace dev {device} root {bucket}")
        self._slowed.add(host)

    def unname(self, host: str, to: str | None = None, on: Sequence[str] | None = None) -> None:
        """Make a host's name impossible to resolve, or resolve to another address.

        Args:
            host: the name.
            to: the wrong address; None: none.
            on: the hosts where this is so; None: all.

        Raises:
            LaboratoryError: there is no such host.
        """
        self._check(host)
        for where in self.hosts if on is None else on:
            self._check(where)
            self._names[where][host] = to
            self._write_names(where)

    def mend(self, *hosts: str) -> None:
        """Undo the faults in which these hosts take part; all faults without arguments.

        Raises:
            LaboratoryError: there is no such host.
        """
        for host in hosts:
            self._check(host)
        for ends, rule in list(self._rules):
            if not hosts or ends & {*hosts}:
                self._admin(None, "ip", f"rule del pref 100 {rule}")
                self._rules.remove((ends, rule))
        for host in self._slowed & {*(hosts or self.hosts)}:
            for where, device in self._ends(host):
                self._admin(where, "tc", f"qdisc del dev {device} root")
            self._slowed.remove(host)
        for host in self.hosts:
            wrong = self._names[host]
            kept = {name: to for name, to in wrong.items() if hosts and not {host, name} & {*hosts}}
            self._names[host] = kept
            self._write_names(host)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the hosts and all that runs on them; remove all traces of them."""
        if self.outside and self._keeper.poll() is None:
            starting.ip(f"link del lab{self._keeper.pid}")  # the kernel would, some time later
        self._keeper.terminate()
        self._keeper.wait()

    def __enter__(self) -> Laboratory:
        return self

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

    def _plan(self, kept: list[str]) -> dict[str, Any]:
        """What the keeper makes."""
        ports = [
            network.connect(
                self._port(host), "eth0", self._addresses[host], f"{{{host}}}", self.network
            )
            for host in self.hosts
        ]
        return {
            "folder": str(self.folder),
            "rootless": self._rootless,
            "router": network.router(self.network) + "".join(ports),
            "hosts": [self._host_plan(host, kept) for host in self.hosts],
        }

    def _host_plan(self, host: str, kept: list[str]) -> dict[str, Any]:
        empty = {str(Path(folder).resolve()): "700" for folder in self._private.get(host, ())}
        return {
            "name": host,
            "skew": self._skew.get(host, 0),
            "network": network.join("eth0", self._addresses[host], self.network),
            "covers": sorted({**starting.COVERED, **empty}.items()),
            "keep": kept,
            "binds": [[str(self.folder / host / "hosts"), "/etc/hosts"], *self._ssh.binds()],
            # so that an ordinary user's SSH server can have its usual port
            "settings": {"net/ipv4/ip_unprivileged_port_start": "0"},
        }

    def _connect_outside(self) -> None:
        keeper = self._keeper.pid
        starting.ip(f"link add lab{keeper} type veth peer name outside netns {keeper}")
        for line in network.serve("outside", self.outside, self.network).splitlines():
            self._admin(None, "ip", line)
        starting.ip(network.join(f"lab{keeper}", self.outside, self.network))

    def _entering(self, host: str, argv: Sequence[str | Path], **options: Any) -> dict[str, Any]:
        """The options of subprocess.run that run a command on a host."""
        cwd = options.pop("cwd", None) or Path.cwd()
        env = {**(options.pop("env", None) or os.environ)}
        words = [*self.enter(host), "env", f"--chdir={cwd}", *map(str, argv)]
        passed = {name: value for name, value in env.items() if name not in _NOT_PASSED}
        return {"args": words, "env": passed, **options}

    def _administer(self, host: str | None) -> list[str]:
        """The words that run a command as a host's administrator; as the router's for None."""
        pid = self._pid(host) if host else self._keeper.pid
        spaces = ["--mount", "--net", *(["--uts", "--ipc", "--pid"] if host else [])]
        spaces += ["--user", "--preserve-credentials"] if self._rootless else []
        spaces += ["--time"] if host in self._skew else []
        return [find("nsenter"), f"--target={pid}", *spaces]

    def _admin(self, host: str | None, program: str, command: str) -> None:
        words = [*self._administer(host), find(program), *command.split()]
        ran = subprocess.run(words, capture_output=True, text=True)
        if ran.returncode:
            raise LaboratoryError(f"`{program} {command}` failed: {ran.stderr.strip()}")

    def _check(self, host: str) -> None:
        if host not in self.hosts:
            raise LaboratoryError(f"there is no host {host!r}. Hosts: {', '.join(self.hosts)}")

    def _pid(self, host: str) -> int:
        self._check(host)
        if self._keeper.poll() is not None:
            raise LaboratoryError("the laboratory has ended. Make another one.")
        return self._pids[host]

    def _port(self, host: str) -> str:
        """The router's device that leads to a host."""
        if host == "outside" and self.outside:
            return host
        self._check(host)
        return f"port{self.hosts.index(host)}"

    def _ends(self, host: str) -> list[tuple[str | None, str]]:
        """Both ends of a host's line: where they are and what they are called there."""
        return [(None, self._port(host)), (host, "eth0")]

    def _write_names(self, host: str) -> None:
        """Write a host's ``/etc/hosts``."""
        names: dict[str, str | None] = {**self._addresses}
        if self.outside:
            names |= {"outside": self.outside, socket.gethostname(): self.outside}
        text = network.hosts_file({**names, **self._names[host]})
        self.folder.joinpath(host, "hosts").write_text(text)
