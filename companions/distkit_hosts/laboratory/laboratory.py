"""The laboratory: several hosts on this machine, commands on them, and faults on request."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from distkit.cluster.processes import folders
from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import plan, services, starting
from distkit_hosts.laboratory.starting import find

#: Variables not passed to hosts: their folders and sockets exist only on the machine.
_UNSET = {"TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "SSH_CONNECTION"}


#: On a host: listen at an address, and pass the socket to the process at the other end of a pair.
_PASS_LISTENER = """\
import socket, sys
peer = socket.socket(fileno=int(sys.argv[2]))
with peer, socket.create_server((sys.argv[1], 0)) as listener:
    socket.send_fds(peer, [b"!"], [listener.fileno()])
"""


class Laboratory:
    r"""Hosts on this machine with a separate network, until ``close()`` or the end of ``with``.

    Each host has its own network interface, hostname, processes, shared memory (``/dev/shm``),
    ``/tmp``, ``/run`` and ``/etc/hosts``. All other files are those of the machine: the same
    Python, the same home. The hosts end with the process that created them, even if it is killed.

    Root is not needed where user namespaces are allowed. :meth:`options` are a cluster's options
    for ranks on the hosts.

    Args:
        hosts: their names.
        head: name of an additional host on which launchers run; None for none.
        skew: offset of a host's monotonic clock from the machine's [s]. The
            time of day cannot differ: Linux has no namespace for it.
        shared: folders in ``/tmp`` that the hosts also share. The current folder, the home
            and those of Python and distkit are always shared.

    Raises:
        LaboratoryError: namespaces are not allowed, a program is missing, or a name is invalid.

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
        skew: Mapping[str, int] | None = None,
        shared: Sequence[str | Path] = (),
    ) -> None:
        #: The names of all hosts, the head first.
        self.hosts = plan.check_names([head, *hosts] if head else hosts)
        self._addresses = plan.addresses(self.hosts)
        for host in skew or {}:
            self._check(host)
        starting.check_platform()
        folders.sweep(tempfile.gettempdir())
        made, held = folders.make()
        #: The folder of the laboratory, on all hosts and here.
        self.folder = Path(made)
        self._open = ExitStack()  # sockets of the hosts that are held here
        #: The addresses that each host knows.
        self._names: dict[str, dict[str, str | None]]
        self._names = {host: {**self._addresses} for host in self.hosts}
        self._skew = skew or {}
        for host in self.hosts:
            self.folder.joinpath(host).mkdir()
            self._write_names(host)
        all_shared = plan.shared_folders([made, *shared])
        full_plan = plan.make_plan(self.folder, self._addresses, all_shared, self._skew)
        self._keeper, pids = starting.start(full_plan, held)
        self._pids = dict(zip(self.hosts, pids, strict=True))
        #: For each fault, the hosts that take part, and the function that ends it.
        self._faults: dict[str, tuple[set[str], Callable[[], None]]] = {}

    def run(
        self, host: str, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host and wait for it, with the options of :func:`subprocess.run`.

        Raises:
            LaboratoryError: the host does not exist.
        """
        return subprocess.run(**self._entering(host, argv, **options))

    def popen(self, host: str, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, with the options of :class:`subprocess.Popen`.

        The returned process represents the command, which ends with it. Only signals that end the
        process have an effect.

        Raises:
            LaboratoryError: the host does not exist.
        """
        return subprocess.Popen(**self._entering(host, argv, **options))

    def enter(self, host: str, cwd: str | Path | None = None) -> list[str]:
        """Return the prefix of a command that runs it on a host.

        Args:
            host: the host.
            cwd: the command's working folder; None for the current one.

        Raises:
            LaboratoryError: the host does not exist.
        """
        user = f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"
        as_user = [find("unshare"), "--user", *user] if starting.ROOTLESS else []
        settings = ["--pdeathsig", "KILL", "env", f"--chdir={cwd or Path.cwd()}"]
        return [*self._administer(host), *as_user, find("setpriv"), *settings]

    def address(self, host: str) -> str:
        """Return the address of a host in the laboratory's network.

        Raises:
            LaboratoryError: the host does not exist.
        """
        self._check(host)
        return self._addresses[host]

    def wait(self) -> None:
        """Wait until the hosts have ended."""
        self._keeper.wait()

    def close(self) -> None:
        """End the hosts and all their processes, and remove their files."""
        self._keeper.terminate()
        self._keeper.wait()
        self._open.close()

    def ssh(self) -> None:
        """Start an SSH server on each host, so that ``ssh alpha`` works on all of them.

        Raises:
            LaboratoryError: OpenSSH is missing, or a server does not start.
        """
        services.start_ssh(self)

    def options(self) -> dict[str, Any]:
        """Return the options of ``dk.Cluster`` in this process for ranks on the hosts.

        The cluster connects to the hosts by SSH from the head, where it also listens.

        ::

            with Laboratory(["alpha", "beta"]) as lab:
                cluster = dk.Cluster(hosts={"alpha": 2, "beta": 2}, **lab.options())

        Raises:
            LaboratoryError: SSH cannot be started.
        """
        self.ssh()
        return {"ssh_cmd": [*self.enter(self.hosts[0]), find("ssh")], "interface": self._listener}

    def slurm(self) -> None:
        """Start Slurm: ``srun``, ``sbatch`` and ``salloc`` work on the head; the others are nodes.

        Each node accepts two tasks.

        Raises:
            LaboratoryError: Slurm is missing, or does not start.
        """
        services.start_slurm(self)

    # -- faults --------------------------------------------------------------------------------

    def cut(self, *hosts: str) -> None:
        """Cut hosts off from all others: packets to and from them are lost silently.

        Raises:
            LaboratoryError: the host does not exist.
        """
        for host in hosts:
            self.drop(host, None)
            self.drop(None, host)

    def drop(
        self,
        source: str | None,
        to: str | None,
        port: int | None = None,
    ) -> None:
        """Drop the packets that one host sends to another, in this direction only.

        Args:
            source: the sending host; None for all.
            to: the receiving host; None for all.
            port: drop only packets to this TCP port.

        Raises:
            LaboratoryError: the host does not exist.
        """
        device = self._port(source) if source else None
        rule = plan.rule(device, self.address(to) if to else None, port)
        self._inject(
            rule,
            {host for host in (source, to) if host},
            lambda: self._admin(None, "ip", "rule", "add", "pref", "100", *rule.split()),
            lambda: self._admin(None, "ip", "rule", "del", "pref", "100", *rule.split()),
        )

    def slow(self, host: str, rate: str) -> None:
        """Limit the rate of a host in each direction, for example to ``"100mbit"``.

        Raises:
            LaboratoryError: the host does not exist, or the rate is invalid.
        """
        bucket = plan.bucket(rate).split()
        self._inject(
            f"{host} is slow",
            {host},
            lambda: self._queue(host, "add", *bucket),
            lambda: self._queue(host, "del"),
        )

    def unname(self, host: str, to: str | None = None, on: Sequence[str] | None = None) -> None:
        """Make a host's name unresolvable, or make it resolve to another address.

        Args:
            host: the name.
            to: the wrong address; None for no address.
            on: the hosts on which this applies; None for all.

        Raises:
            LaboratoryError: the host does not exist.
        """
        for resolver in self.hosts if on is None else on:
            self._inject(
                f"{resolver} does not know {host}",
                {host, resolver},
                partial(self._rename, resolver, host, to),
                partial(self._rename, resolver, host, self.address(host)),
            )

    def crash(self, host: str) -> None:
        """Kill a host permanently, as a power failure does: the others are not notified.

        Raises:
            LaboratoryError: the host does not exist.
        """
        self.cut(host)  # otherwise its connections would be closed
        self._faults = {name: fault for name, fault in self._faults.items() if host not in fault[0]}
        os.kill(self._pids.pop(host), signal.SIGKILL)

    def mend(self, *hosts: str) -> None:
        """Undo the faults that involve these hosts; without arguments, undo all faults.

        Raises:
            LaboratoryError: the host does not exist.
        """
        for host in hosts:
            self._check(host)
        for name, (involved, undo) in list(self._faults.items()):
            if not hosts or involved & {*hosts}:
                del self._faults[name]
                undo()

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- internals -----------------------------------------------------------------------------

    def _inject(
        self, name: str, hosts: set[str], apply: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Inject a fault, replacing one that differs only in severity."""
        if name in self._faults:
            self._faults.pop(name)[1]()
        apply()
        self._faults[name] = (hosts, undo)

    @cached_property
    def _listener(self) -> socket.socket:
        """Return a socket of this process that listens on the head, at a free port."""
        head = self.hosts[0]
        local, remote = socket.socketpair()
        with local, remote:
            argv = [
                sys.executable,
                "-ISc",
                _PASS_LISTENER,
                self.address(head),
                str(remote.fileno()),
            ]
            self.run(head, argv, pass_fds=[remote.fileno()], cwd="/", check=True)
            (fd,) = socket.recv_fds(local, 1, 1)[1]
        return self._open.enter_context(socket.socket(fileno=fd))

    def _port(self, host: str) -> str:
        """Return the router's device that leads to a host."""
        self._check(host)
        return f"port{self.hosts.index(host)}"

    def _queue(self, host: str, verb: str, *arguments: str) -> None:
        """Change the queues at both ends of a host's link."""
        for end, device in (None, self._port(host)), (host, "eth0"):
            self._admin(end, "tc", "qdisc", verb, "dev", device, "root", *arguments)

    def _rename(self, resolver: str, host: str, to: str | None) -> None:
        """Make a host resolve a name to this address."""
        self._pid(resolver)
        self._names[resolver][host] = to
        self._write_names(resolver)

    def _entering(self, host: str, argv: Sequence[str | Path], **options: Any) -> dict[str, Any]:
        """Return the options of subprocess.run for a command on a host."""
        command = [*self.enter(host, options.pop("cwd", None)), *map(str, argv)]
        env = {**(options.pop("env", None) or os.environ)}
        passed = {name: value for name, value in env.items() if name not in _UNSET}
        return {"args": command, "env": passed, **options}

    def _administer(self, host: str | None) -> list[str]:
        """Return the command prefix for an administrator of a host, None for the router."""
        spaces = ["--mount", "--net", *(["--uts", "--ipc", "--pid"] if host else [])]
        spaces += ["--user", "--preserve-credentials"] if starting.ROOTLESS else []
        spaces += ["--time"] if host in self._skew else []
        return [find("nsenter"), f"--target={self._pid(host)}", *spaces]

    def _admin(self, host: str | None, program: str, *arguments: str) -> None:
        argv = [*self._administer(host), find(program), *arguments]
        result = subprocess.run(argv, capture_output=True, text=True)
        if result.returncode:
            command = shlex.join([program, *arguments])
            raise LaboratoryError(f"`{command}` failed: {result.stderr.strip()}")

    def _check(self, host: str) -> None:
        if host not in self._addresses:
            raise LaboratoryError(f"there is no host {host!r}. Hosts: {', '.join(self.hosts)}")

    def _pid(self, host: str | None) -> int:
        """Return the pid of a host's first process; for None, that of the keeper in the router."""
        if self._keeper.poll() is not None:
            raise LaboratoryError("the laboratory has ended. Create another one.")
        if host is None:
            return self._keeper.pid
        self._check(host)
        if host not in self._pids:
            raise LaboratoryError(f"{host} has crashed.")
        return self._pids[host]

    def _write_names(self, host: str) -> None:
        """Write a host's ``/etc/hosts``."""
        text = plan.hosts_file(self._names[host])
        self.folder.joinpath(host, "hosts").write_text(text)
