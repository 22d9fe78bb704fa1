"""The laboratory: what runs on its hosts beside commands, and faults on request."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import network, slurm
from distkit_hosts.laboratory.faults import Faults
from distkit_hosts.laboratory.hosts import Hosts
from distkit_hosts.laboratory.plan import OUTSIDE
from distkit_hosts.laboratory.ssh import Ssh

#: On a host: listen at an address, and lend the socket to who holds the other end of a pair.
_LEND = """\
import socket, sys
with socket.create_server((sys.argv[1], 0)) as door, socket.socket(fileno=int(sys.argv[2])) as to:
    socket.send_fds(to, [b"!"], [door.fileno()])
"""


class Laboratory(Hosts):
    r"""Hosts on this machine, with a network of their own, until ``close()`` or ``with`` ends.

    Each host has its own network interface, hostname, processes, shared memory (``/dev/shm``),
    ``/tmp``, ``/run`` and ``/etc/hosts``. All other files are those of the machine: the same
    Python, the same home. The hosts end with the process that made them, however it ends.

    An ordinary user can make one where user namespaces are allowed, and have ranks on the hosts
    (:meth:`options`). Only root can make one that all processes outside reach (``outside=True``).

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

    def ssh(self) -> list[str]:
        """Start an SSH server on each host; return the words that begin an ``ssh`` command.

        On the hosts, ``ssh alpha`` works as it is; elsewhere these words choose the laboratory's
        key and addresses: ``[*lab.ssh(), "alpha", "hostname"]``.

        Raises:
            LaboratoryError: OpenSSH is missing, or a server does not start.
        """
        return self._ssh.start()

    def options(self) -> dict[str, Any]:
        """The options with which ``dk.Cluster`` in this process has ranks on the hosts.

        It enters them by SSH: directly with ``outside=True``, else from the head, where it also
        listens, by a socket that was made there.

        ::

            with Laboratory(["alpha", "beta"]) as lab:
                cluster = dk.Cluster(hosts={"alpha": 2, "beta": 2}, **lab.options())

        Raises:
            LaboratoryError: SSH cannot be started.
        """
        ssh = self.ssh()
        if self.outside:
            return {"ssh_cmd": ssh, "interface": self.outside}
        return {"ssh_cmd": [*self.enter(self.hosts[0]), ssh[0]], "interface": self._door}

    def slurm(self, cpus: int = 2) -> None:
        """Start Slurm: ``srun``, ``sbatch`` and ``salloc`` work on the head, all others are nodes.

        Args:
            cpus: how many tasks each node takes.

        Raises:
            LaboratoryError: Slurm is missing, or does not start.
        """
        slurm.start(self, cpus)

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

    def __enter__(self) -> Laboratory:
        return self

    # -- inside --------------------------------------------------------------------------------

    @cached_property
    def _faults(self) -> Faults:
        return Faults()

    @cached_property
    def _ssh(self) -> Ssh:
        return Ssh(self)

    @cached_property
    def _door(self) -> socket.socket:
        """A socket of this process that listens on the head, at any port."""
        head = self.hosts[0]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            words = [sys.executable, "-ISc", _LEND, self.address(head), str(theirs.fileno())]
            self.run(head, words, pass_fds=[theirs.fileno()], cwd="/", check=True)
            (lent,) = socket.recv_fds(ours, 1, 1)[1]
        self._doors.append(socket.socket(fileno=lent))
        return self._doors[-1]

    def _port(self, host: str) -> str:
        """The router's device that leads to a host."""
        self._check(host)
        return OUTSIDE if host == OUTSIDE else f"port{self.hosts.index(host)}"

    def _queue(self, host: str, verb: str, *words: str) -> None:
        """Change the queues at both ends of a host's line."""
        for where, device in self._ends(host):
            self._admin(where, "tc", "qdisc", verb, "dev", device, "root", *words)

    def _ends(self, host: str) -> list[tuple[str | None, str]]:
        """Both ends of a host's line: where they are, and what they are called there."""
        return [(None, self._port(host)), (host, "eth0")]

    def _rename(self, where: str, names: Mapping[str, str | None], right: str = "") -> None:
        """Let a host resolve names wrongly, and one right again."""
        self._pid(where)
        self._wrong_names[where].pop(right, None)
        self._wrong_names[where] |= names
        self._write_names(where)
