"""The laboratory: hosts made of namespaces, commands on them, and faults on request."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.errors import LaboratoryError
from distkit.laboratory import network, slurm, starting
from distkit.laboratory.faults import Faults
from distkit.laboratory.plan import OUTSIDE, Plan, check_names, shared_folders
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
            and by :meth:`ssh`, and the hosts reach them at :attr:`outside`, whose name there is
            ``outside``.
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
        self._faults = Faults()
        self._relays: list[subprocess.Popen[Any]] = []
        self._wrong_names: dict[str, dict[str, str | None]] = {host: {} for host in self.hosts}
        for host in self.hosts:
            self.folder.joinpath(host).mkdir()
            self._write_names(host)
        self._ssh = Ssh(self)
        slurm.prepare(self)
        self._plan = Plan(
            self.folder,
            self.network,
            {host: self._addresses[host] for host in self.hosts},
            rootless=os.geteuid() != 0,
            shared=shared_folders([made, *shared]),
            skew=skew or {},
            private=private or {},
        )
        self._keeper, self._pids = starting.start(self._plan.for_keeper(), held)
        if outside:
            try:
                self._connect_outside()
            except LaboratoryError:
                self.close()
                raise

    # -- what runs on the hosts ----------------------------------------------------------------

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

    def ssh(self) -> list[str]:
        """Start an SSH server on each host; return the words that begin an ``ssh`` command.

        On the hosts, ``ssh alpha`` works as it is; elsewhere these words choose the laboratory's
        key and addresses: ``[*lab.ssh(), "alpha", "hostname"]``.

        Raises:
            LaboratoryError: OpenSSH is missing, or a server does not start.
        """
        return self._ssh.start()

    def options(self) -> dict[str, Any]:
        """The options with which ``dk.Cluster`` outside reaches the hosts.

        ::

            with Laboratory(["alpha", "beta"], outside=True) as lab:
                cluster = dk.Cluster(hosts={"alpha": 2, "beta": 2}, **lab.options())

        Raises:
            LaboratoryError: nothing outside can reach the hosts, or SSH cannot be started.
        """
        if not self.outside:
            raise LaboratoryError(
                "a cluster outside cannot reach these hosts. Make them with outside=True, "
                "as root, or start the cluster on the head."
            )
        _, *settings = ssh = self.ssh()
        scp = [find("scp"), *settings]
        return {"ssh_cmd": ssh, "scp_cmd": scp, "interface": self.outside}

    def slurm(self, cpus: int = 2) -> None:
        """Start Slurm: ``srun``, ``sbatch`` and ``salloc`` work on the head, all others are nodes.

        Args:
            cpus: how many tasks each node takes.

        Raises:
            LaboratoryError: Slurm is missing, or does not start.
        """
        slurm.start(self, cpus)

    def forward(self, port: int, host: str = "head") -> int:
        """Make a TCP port of a host reachable from this machine alone, at 127.0.0.1.

        A browser outside can show what a program on the head, such as JupyterLab, serves there.

        Args:
            port: where a program on the host listens, or will, at that host's 127.0.0.1.
            host: the host.

        Returns:
            The port of this machine: the same number if it is free, else another.

        Raises:
            LaboratoryError: there is no such host.
        """
        self._check(host)
        with starting.listen(port) as listener:
            words = [sys.executable, "-IS", str(starting.RELAY), str(listener.fileno()), str(port)]
            self._relays.append(self.popen(host, words, pass_fds=[listener.fileno()], cwd="/"))
            return int(listener.getsockname()[1])

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
        device = self._port(source) if source else None
        rule = network.rule(device, self.address(to) if to else None, port, reject)
        self._faults.add(
            rule,
            {host for host in (source, to) if host},
            lambda: self._admin(None, "ip", "rule", "add", "pref", "100", *rule.split()),
            lambda: self._admin(None, "ip", "rule", "del", "pref", "100", *rule.split()),
        )

    def slow(self, host: str, rate: str) -> None:
        """Limit what a host sends, and what it receives, each to a rate such as ``"100mbit"``.

        Raises:
            LaboratoryError: there is no such host, or it is no rate.
        """
        bucket = network.bucket(rate).split()
        self._faults.add(
            f"{host} is slow",
            {host},
            lambda: self._queue(host, "add", *bucket),
            lambda: self._queue(host, "del"),
        )

    def narrow(self, host: str, mtu: int) -> None:
        """Limit the size of the packets on a host's line, 1500 bytes otherwise.

        Raises:
            LaboratoryError: there is no such host, or no network has packets of that size.
        """
        self._faults.add(
            f"{host} has small packets",
            {host},
            lambda: self._link(host, "mtu", str(mtu)),
            lambda: self._link(host, "mtu", "1500"),
        )

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
            self._faults.add(
                f"{where} does not know {host}",
                {host, where},
                partial(self._rename, where, {host: to}),
                partial(self._rename, where, {}, host),
            )

    def fill(self, host: str, folder: str = "/tmp") -> None:
        """Fill the file system of ``/tmp``, ``/dev/shm`` or another folder that is a host's own.

        Raises:
            LaboratoryError: there is no such host, or the folder is not its own.
        """
        self._pid(host)
        own = self._plan.own(host)
        if folder not in own:
            raise LaboratoryError(f"{folder} is not {host}'s own. Its own are {', '.join(own)}.")
        where = shlex.quote(folder)
        used = f"$(df --output=used --block-size=4k {where} | tail -n 1)"
        # an ordinary user may not repeat the options that are there, as mount would
        remount = f"used={used}; mount --options-mode=ignore -o remount,{{}} tmpfs {where}"
        full = remount.format("nr_blocks=$((used > 0 ? used : 1))")
        self._faults.add(
            f"{folder} of {host} is full",
            {host},
            lambda: self._admin(host, "sh", "-c", full),
            lambda: self._admin(host, "sh", "-c", remount.format("size=50%")),
        )

    def replace(self, host: str, path: str | Path, by: str | Path) -> None:
        """Let a host see another file, or folder, in the place of one: another Python, a library.

        ::

            lab.replace("beta", sys.executable, "/usr/bin/python3")

        Args:
            host: the only one that sees it so.
            path: what is replaced.
            by: what the host sees instead; both are files, or both are folders.

        Raises:
            LaboratoryError: there is no such host, or one of the files is not there.
        """
        self._faults.add(
            f"{path} of {host}",
            {host},
            lambda: self._admin(host, "mount", "--bind", str(by), str(path)),
            lambda: self._admin(host, "umount", "--lazy", str(path)),
        )

    def crash(self, host: str) -> None:
        """End a host for good, as a power failure does: nobody is told.

        Raises:
            LaboratoryError: there is no such host.
        """
        self.cut(host)  # or its connections would be closed
        self._faults.forget(host)
        os.kill(self._pids.pop(host), signal.SIGKILL)

    def mend(self, *hosts: str) -> None:
        """Undo the faults in which these hosts take part; all faults without arguments.

        Raises:
            LaboratoryError: there is no such host.
        """
        for host in hosts:
            self._check(host)
        self._faults.mend({*hosts} if hosts else None)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the hosts and all that runs on them; remove all traces of them."""
        self._keeper.terminate()
        for process in (self._keeper, *self._relays):
            process.wait()
        if self.outside:
            with suppress(LaboratoryError):  # the kernel may have been quicker
                starting.ip(f"link del lab{self._keeper.pid}")

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

    def _port(self, host: str) -> str:
        """The router's device that leads to a host."""
        self._check(host)
        return OUTSIDE if host == OUTSIDE else f"port{self.hosts.index(host)}"

    def _queue(self, host: str, verb: str, *words: str) -> None:
        """Change the queues at both ends of a host's line."""
        for where, device in self._ends(host):
            self._admin(where, "tc", "qdisc", verb, "dev", device, "root", *words)

    def _link(self, host: str, *words: str) -> None:
        """Change both ends of a host's line."""
        for where, device in self._ends(host):
            self._admin(where, "ip", "link", "set", "dev", device, *words)

    def _ends(self, host: str) -> list[tuple[str | None, str]]:
        """Both ends of a host's line: where they are, and what they are called there."""
        return [(None, self._port(host)), (host, "eth0")]

    def _rename(self, where: str, names: Mapping[str, str | None], right: str = "") -> None:
        """Let a host resolve names wrongly, and one right again."""
        self._pid(where)
        self._wrong_names[where].pop(right, None)
        self._wrong_names[where] |= names
        self._write_names(where)

    def _write_names(self, host: str) -> None:
        """Write a host's ``/etc/hosts``."""
        names: dict[str, str | None] = {**self._addresses}
        if self.outside:
            names.setdefault(socket.gethostname(), self.outside)
        text = network.hosts_file({**names, **self._wrong_names[host]})
        self.folder.joinpath(host, "hosts").write_text(text)
