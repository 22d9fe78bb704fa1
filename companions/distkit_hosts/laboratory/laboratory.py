"""Simulated hosts on this machine, with methods to run commands on them and inject faults."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from distkit.cluster.processes import cleanup
from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import plan, starting
from distkit_hosts.laboratory.starting import find

#: Variables not passed to hosts: their folders and sockets exist only on the machine.
_UNSET = {"TMPDIR", "TEMP", "TMP", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "SSH_CONNECTION"}


#: A program for a host: it listens on an address, and passes the socket through a socket pair.
_PASS_LISTENER = """\
import socket, sys
peer = socket.socket(fileno=int(sys.argv[2]))
with peer, socket.create_server((sys.argv[1], 0)) as listener:
    socket.send_fds(peer, [b"!"], [listener.fileno()])
"""


class Laboratory:
    r"""Hosts on this machine, each with its own network, until ``close()`` or the end of ``with``.

    Each host has its own network interface, hostname, processes, shared memory (``/dev/shm``),
    ``/tmp``, ``/run`` and ``/etc/hosts``. All other files, including Python and the home folder,
    are shared with the machine. The hosts are killed when the process that created them exits or
    is killed.

    Root is not needed if user namespaces are allowed. :meth:`options` returns the arguments for
    a cluster with ranks on the hosts.

    Args:
        hosts: the names of the hosts.
        head: the name of an additional host for launchers; None for no head.
        skew: offset of each host's monotonic clock from the machine's [s]. The time of day cannot
            differ, because Linux has no namespace for it.
        shared: folders in ``/tmp`` or another private folder that the hosts share anyway. The
            current folder, the home folder, and the Python and distkit folders are always shared.

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
        path = cleanup.make_folder(cleanup.new_prefix())
        #: The laboratory's folder, at the same path on every host and on this machine.
        self.folder = Path(path)
        self._open = ExitStack()  # sockets of the hosts in this process
        #: The addresses that each host knows.
        self._names = {host: dict[str, str | None](self._addresses) for host in self.hosts}
        self._skew = skew or {}
        for host in self.hosts:
            self.folder.joinpath(host).mkdir()
            self._write_names(host)
        all_shared = plan.shared_folders([path, *shared])
        full_plan = plan.make_plan(self.folder, self._addresses, all_shared, self._skew)
        self._init, pids = starting.start(full_plan)
        self._pids = dict(zip(self.hosts, pids, strict=True))
        self._faults: dict[str, Callable[[], None]] = {}  # fault -> the function that undoes it

    def run(
        self, host: str, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host and wait for it, with the options of :func:`subprocess.run`.

        Raises:
            LaboratoryError: the host does not exist.
        """
        return subprocess.run(**self._process_options(host, argv, **options))

    def popen(self, host: str, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, with the options of :class:`subprocess.Popen`.

        The returned process is a wrapper: killing it kills the command. Signals that do not kill
        the wrapper do not reach the command.

        Raises:
            LaboratoryError: the host does not exist.
        """
        return subprocess.Popen(**self._process_options(host, argv, **options))

    def enter(self, host: str, cwd: str | Path | None = None) -> list[str]:
        """Return the prefix that makes a command run on a host.

        Args:
            host: the host.
            cwd: the command's working directory; None for the current one.

        Raises:
            LaboratoryError: the host does not exist.
        """
        user = f"--map-user={os.getuid()}", f"--map-group={os.getgid()}"
        as_user = [find("unshare"), "--user", *user] if starting.ROOTLESS else []
        settings = ["--pdeathsig", "KILL", "env", f"--chdir={cwd or Path.cwd()}"]
        return [*self._admin_prefix(host), *as_user, find("setpriv"), *settings]

    def address(self, host: str) -> str:
        """Return the address of a host on the laboratory's network.

        Raises:
            LaboratoryError: the host does not exist.
        """
        self._check(host)
        return self._addresses[host]

    def close(self) -> None:
        """Stop all hosts, kill their processes and remove their files."""
        self._init.terminate()
        self._init.wait()
        self._open.close()

    def ssh(self) -> None:
        """Start an SSH server on each host, so that ``ssh alpha`` works on all of them.

        Raises:
            LaboratoryError: OpenSSH is missing, or a server does not start.
        """
        starting.start_ssh(self)

    def options(self) -> dict[str, Any]:
        """Return the arguments that make ``dk.Cluster`` in this process start ranks on the hosts.

        The cluster connects to the hosts over SSH from the first host, which is the head if there
        is one. It also listens there.

        ::

            with Laboratory(["alpha", "beta"]) as lab:
                cluster = dk.Cluster(hosts={"alpha": 2, "beta": 2}, **lab.options())

        Raises:
            LaboratoryError: SSH cannot be started.
        """
        self.ssh()
        return {"ssh_cmd": [*self.enter(self.hosts[0]), find("ssh")], "interface": self._listener}

    # -- faults --------------------------------------------------------------------------------

    def cut(self, *hosts: str) -> None:
        """Isolate hosts from all others: packets to and from them are dropped silently.

        Raises:
            LaboratoryError: a host does not exist.
        """
        for host in hosts:
            self.drop(host, None)
            self.drop(None, host)

    def drop(self, source: str | None, destination: str | None) -> None:
        """Drop the packets that one host sends to another, in this direction only.

        Args:
            source: the sending host; None for all.
            destination: the receiving host; None for all.

        Raises:
            LaboratoryError: a host does not exist.
        """
        rule = ["iif", self._port(source)] if source else []
        rule += ["to", self.address(destination)] if destination else []

        def change(verb: str) -> None:
            self._admin(None, "ip", "rule", verb, "pref", "100", *rule, "blackhole")

        self._inject(" ".join(rule), lambda: change("add"), lambda: change("del"))

    def slow(self, host: str, rate: str) -> None:
        """Limit a host's data rate in each direction, for example to ``"100mbit"``.

        Raises:
            LaboratoryError: the host does not exist, or the rate is invalid.
        """
        bucket = ["tbf", "rate", rate, "burst", "32kb", "latency", "50ms"]
        self._inject(
            f"{host} is slow",
            lambda: self._queue(host, "add", *bucket),
            lambda: self._queue(host, "del"),
        )

    def break_name(self, host: str, to: str | None = None, on: Sequence[str] | None = None) -> None:
        """Make a host's name unresolvable, or make it resolve to another address.

        Args:
            host: the name.
            to: the wrong address; None for no address.
            on: the affected hosts; None for all.

        Raises:
            LaboratoryError: the host does not exist.
        """
        resolvers = [*(self.hosts if on is None else on)]
        self._inject(
            f"{', '.join(resolvers)} cannot resolve {host}",
            lambda: self._rename(resolvers, host, to),
            lambda: self._rename(resolvers, host, self.address(host)),
        )

    def crash(self, host: str) -> None:
        """Kill a host permanently, as in a power failure: the others are not notified.

        Raises:
            LaboratoryError: the host does not exist.
        """
        self.cut(host)  # otherwise its connections would be closed
        os.kill(self._pids.pop(host), signal.SIGKILL)

    def restore(self) -> None:
        """Undo all faults; crashed hosts stay down."""
        while self._faults:
            self._faults.popitem()[1]()

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- internals -----------------------------------------------------------------------------

    def _inject(self, name: str, apply: Callable[[], None], undo: Callable[[], None]) -> None:
        """Inject a fault, in place of any earlier fault with the same name."""
        if name in self._faults:
            self._faults.pop(name)()
        apply()
        self._faults[name] = undo

    @cached_property
    def _listener(self) -> socket.socket:
        """A socket that this process owns and that listens on a free port on the first host."""
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
        """Return the router's network device for a host."""
        self._check(host)
        return f"port{self.hosts.index(host)}"

    def _queue(self, host: str, verb: str, *arguments: str) -> None:
        """Change the queues at both ends of a host's link, unless the host has crashed."""
        for end, device in (None, self._port(host)), (host, "eth0"):
            if host in self._pids:
                self._admin(end, "tc", "qdisc", verb, "dev", device, "root", *arguments)

    def _rename(self, resolvers: Sequence[str], host: str, to: str | None) -> None:
        """Make hosts resolve a name to this address."""
        self._check(host)
        for resolver in resolvers:
            self._check(resolver)
            self._names[resolver][host] = to
            self._write_names(resolver)

    def _process_options(
        self, host: str, argv: Sequence[str | Path], **options: Any
    ) -> dict[str, Any]:
        """Return the options of subprocess.run for a command on a host."""
        command = [*self.enter(host, options.pop("cwd", None)), *map(str, argv)]
        env = {**(options.pop("env", None) or os.environ)}
        variables = {name: value for name, value in env.items() if name not in _UNSET}
        return {"args": command, "env": variables, **options}

    def _admin_prefix(self, host: str | None) -> list[str]:
        """Return the prefix of a command run as root on a host; for None, on the router."""
        spaces = ["--mount", "--net", *(["--uts", "--ipc", "--pid"] if host else [])]
        spaces += ["--user", "--preserve-credentials"] if starting.ROOTLESS else []
        spaces += ["--time"] if host in self._skew else []
        return [find("nsenter"), f"--target={self._pid(host)}", *spaces]

    def _admin(self, host: str | None, program: str, *arguments: str) -> None:
        argv = [*self._admin_prefix(host), find(program), *arguments]
        result = subprocess.run(argv, capture_output=True, text=True)
        if result.returncode:
            command = shlex.join([program, *arguments])
            raise LaboratoryError(f"`{command}` failed: {result.stderr.strip()}")

    def _check(self, host: str) -> None:
        if host not in self._addresses:
            raise LaboratoryError(
                f"host {host!r} does not exist. The hosts are {', '.join(self.hosts)}."
            )

    def _pid(self, host: str | None) -> int:
        """Return the pid of a host's first process; for None, of the router's init process."""
        if self._init.poll() is not None:
            raise LaboratoryError("the laboratory is closed. Create another one.")
        if host is None:
            return self._init.pid
        self._check(host)
        if host not in self._pids:
            raise LaboratoryError(f"{host} has crashed.")
        return self._pids[host]

    def _write_names(self, host: str) -> None:
        """Write a host's ``/etc/hosts``."""
        text = plan.hosts_file(self._names[host])
        self.folder.joinpath(host, "hosts").write_text(text)
