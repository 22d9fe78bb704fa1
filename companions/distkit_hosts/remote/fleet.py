"""Start or attach the machines of a cluster, and allocate ranks to them."""

from __future__ import annotations

import queue
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from distkit._format import named
from distkit.cluster.machine import own_address
from distkit.cluster.plan import Plan
from distkit.cluster.processes.roles import PORTS
from distkit.cluster.runs.ranks import ProcessHost
from distkit.errors import StartError
from distkit.kvstore.transport.sockets import new_keys
from distkit_hosts.clocks import Offset
from distkit_hosts.remote.agent import versions
from distkit_hosts.remote.host import HostForkServer
from distkit_hosts.remote.launching import launch
from distkit_hosts.remote.planning import Machine, plan_for_machines
from distkit_hosts.remote.store import NAME, StoreServer
from distkit_hosts.remote.tunnel import Multiplexer, Tunnel

#: Time to wait for further failures after the first one, to report all [s].
MORE_FAILURES_WITHIN = 1.0


@dataclass(frozen=True)
class HostRequest:
    """The machines that a cluster requests.

    Args:
        ranks: number of ranks by machine, or in total.
        engines: ipyparallel's launcher: "ssh", "mpi", "slurm", …; "" with a client.
        client: the client of an existing cluster.
        interface: an address of this machine that the others reach, also with a port or as a
            listening socket; "" to detect it.
        timeout: timeout of the machines' start [s].
        options: options of the launcher.
        device, backend, threads: as for a cluster.
    """

    ranks: dict[str, int] | int
    engines: str = "ssh"
    client: Any = None
    interface: str | socket.socket = ""
    timeout: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    backend: str = "auto"
    threads: int | None = None

    def start(self, folder: str, progress: Callable[[str], None]) -> Fleet:
        """Start the machines, for a cluster with this local folder."""
        return Fleet(self, folder, progress)

    @property
    def count(self) -> int:
        """Total number of ranks."""
        return self.ranks if isinstance(self.ranks, int) else sum(self.ranks.values())

    def address(self) -> str:
        """Return the address of this machine that the others reach."""
        if isinstance(self.interface, socket.socket):
            return str(self.interface.getsockname()[0])
        if self.interface:
            return own_address(self.interface.partition(":")[0])
        if self.engines == "local":
            return "127.0.0.1"
        names = [name.rpartition("@")[2].partition(":")[0] for name in self._names()]
        return _resolve(next(iter(names), ""))

    def _names(self) -> list[str]:
        """Return the names of the machines that are known in advance."""
        if isinstance(self.ranks, dict):
            return list(self.ranks)
        if self.engines == "slurm":
            with suppress(OSError):
                ask = ["sinfo", "--noheader", "--Node", "--format=%N"]
                return subprocess.run(ask, capture_output=True, text=True).stdout.split()
        return list(self.options.get("mpi_hosts", {}))

    @property
    def port(self) -> str:
        """The port on which this machine listens, "*" for any."""
        if isinstance(self.interface, socket.socket):
            return str(self.interface.getsockname()[1])
        return self.interface.partition(":")[2] or "*"


def _resolve(name: str) -> str:
    try:
        return own_address(name or "192.0.2.1")  # a documentation address, for the default route
    except OSError as error:
        if name and not isinstance(error, socket.gaierror):
            raise StartError(f"{name} cannot be reached: {error.strerror}.") from error
    try:
        return own_address(socket.gethostname())
    except OSError:
        return "127.0.0.1"


@dataclass
class RemoteHost(ProcessHost):
    """Another machine with ranks, whose groups use ``store`` on this machine."""

    server: HostForkServer
    store: StoreServer = field(kw_only=True)

    @property
    def clock(self) -> Offset | None:
        """The machine's clock; None before the first round trip."""
        return self.server.clock

    def machine(self, device: str) -> Machine:
        """Return the machine's description for a plan."""
        known, gpus = self.server.facts, self.server.gpus(device)
        ranks, servers = len(self.ranks), len(self.servers)
        return Machine(self.server.host, ranks, known["cpus"], known["memory"], gpus, servers)

    def spec_fields(self, rank: int, hosts: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of a rank's Spec that describe this machine."""
        known, first = self.server.facts, hosts[0].server.facts
        here = super().spec_fields(rank, hosts)
        return {
            **here,
            "environ": known["environ"],
            "path": [*here["path"], *known["path"]],
            "port": first["port"],
            "address": first["address"],
            "interface": known["interface"],
            "host": hosts.index(self),
            "hosts": len(hosts),
            "local_rank": self.ranks.index(rank),
            "local_world_size": len(self.ranks),
        }

    def certainly(self, since: float, until: float) -> tuple[float, float]:
        """Convert an interval to this machine's clock, shortened by the possible error."""
        clock = self.clock
        if clock is None:
            return since, until
        error = max(clock.error_at(since), clock.error_at(until))
        return clock.to_here(since) + error, clock.to_here(until) - error

    def remove_store(self, name: str) -> None:
        """Delete the values in the stores of a run."""
        self.store.forget(name)


class Fleet:
    """Starts agents, and waits until they are connected.

    Args:
        request: the requested machines.
        folder: the cluster's folder on this machine.
        progress: called with a description of pending machines.
    """

    def __init__(self, request: HostRequest, folder: str, progress: Callable[[str], None]) -> None:
        self.request, self._folder, self._progress = request, folder, progress
        self._hosts: list[RemoteHost] = []
        self._news: queue.SimpleQueue[tuple[Tunnel, dict[str, Any]] | str] = queue.SimpleQueue()
        keys = new_keys()
        self._multiplexer = self._listen(f"tcp://{request.address()}:{request.port}", keys)
        self._where = {"endpoint": self._multiplexer.endpoint, "keys": keys}
        try:
            self._launch = launch(
                request.engines if request.client is None else request.client,
                request.ranks,
                folder,
                request.options,
                self._where,
                self._news.put,
            )
        except StartError:
            self._multiplexer.close()
            raise
        self.store = StoreServer(folder)

    def _listen(self, endpoint: str, keys: tuple[str, str]) -> Multiplexer:
        given = self.request.interface
        listener = given if isinstance(given, socket.socket) else None
        try:
            return Multiplexer(endpoint, keys, listen=True, accept=self._accept, listener=listener)
        except zmq.ZMQError as error:
            raise StartError(
                f"this machine cannot listen at {endpoint}: {error.strerror}. Name one of its "
                "addresses, and a port that is free: interface='10.0.0.1:45000'."
            ) from error

    def _accept(self, tunnel: Tunnel) -> None:
        def handle(message: dict[str, Any]) -> None:
            if "here" in message:  # otherwise a dismissed agent ends
                self._news.put((tunnel, message["here"]))

        tunnel.on_message = handle

    def gather(self, plan: Plan) -> tuple[list[RemoteHost], Plan]:
        """Wait for all machines, and allocate the ranks to them.

        Each machine has a folder, whose sockets are forwarded to this machine.

        Raises:
            StartError: a machine failed; the message quotes its output.
        """
        self._multiplexer.start()
        self._launch.start()
        hosts = self._hosts = self._share(self._await())
        sockets = {f"s:{n}": f"s-{n}" for n in range(1, PORTS + 1)} | {NAME: NAME}
        for first, host in enumerate(hosts):
            host.servers = range(first, plan.servers, len(hosts))
            processes = len(host.ranks) + len(host.servers) + bool(plan.servers and not first)
            host.folder = host.server.make_folder(processes, like=self._folder, sockets=sockets)
        request = self.request
        machines = [host.machine(request.device) for host in hosts]
        asked = request.device, request.backend, request.threads
        allocation = plan_for_machines(machines, plan.servers, *asked)
        ranks = (rank for host in hosts for rank in host.ranks)
        devices = dict(zip(ranks, allocation.devices, strict=True))
        in_order = tuple(devices[rank] for rank in sorted(devices))
        return hosts, replace(allocation, devices=in_order)

    def _await(self) -> dict[str, tuple[HostForkServer, list[int]]]:
        """Return the fork server and the task numbers of each machine, by name."""
        found: dict[str, tuple[HostForkServer, list[int]]] = {}
        failures: dict[str, None] = {}  # several processes may report the same
        end, connected = time.monotonic() + self.request.timeout, 0
        wanted = self._processes()
        while connected < wanted:
            self._progress(self._progress_message(found, connected, wanted))
            try:
                news = self._news.get(timeout=max(0.0, min(1.0, end - time.monotonic())))
                connected += 1
                self._register(found, news)
            except queue.Empty:
                if self._launch.state.startswith("PENDING"):  # no timeout while queued
                    end = time.monotonic() + self.request.timeout
                if time.monotonic() > end:
                    failures = failures or {self._timeout_message(found, connected, wanted): None}
                    break
            except StartError as error:
                failures[str(error)] = None
                end = min(end, time.monotonic() + MORE_FAILURES_WITHIN)
        if failures:
            raise StartError("\n\n".join(failures))
        return found

    def _processes(self) -> int:
        if self.request.client is not None:
            return len(self.request.client.ids)
        ranks = self.request.ranks
        return len(ranks) if isinstance(ranks, dict) else ranks

    def _register(
        self,
        found: dict[str, tuple[HostForkServer, list[int]]],
        news: tuple[Tunnel, dict[str, Any]] | str,
    ) -> None:
        """Register a process; the first of each machine, already importing torch, is its agent."""
        if isinstance(news, str):
            raise StartError(news)
        tunnel, facts = news
        name, order = facts["name"], facts["order"]
        _check_compatible(facts)
        agent, orders = found.get(name, (None, []))
        if agent is not None and min(orders) < order:
            with suppress(OSError):
                tunnel.send({"do": "leave"})
        else:
            if agent is not None:
                agent.close()
            agent = HostForkServer(tunnel, facts)
        found[name] = agent, [*orders, order]

    def _share(self, found: dict[str, tuple[HostForkServer, list[int]]]) -> list[RemoteHost]:
        """Number ranks like the launcher's tasks, or else machine by machine."""
        ranks, launched = self.request.ranks, self.request.client is None
        in_order = sorted(found.values(), key=lambda there: min(there[1]))
        orders = [(server, sorted(numbers)) for server, numbers in in_order]
        if isinstance(ranks, dict):
            orders = [(found[name][0], [0] * n) for name, n in ranks.items()]
        tasks = sorted(number for _, numbers in orders for number in numbers)
        hosts, begin = [], 0
        for server, numbers in orders:
            block = range(begin, begin + len(numbers))
            host_ranks = numbers if launched and tasks == [*range(len(tasks))] else block
            server.launcher_details, server.processes_there = (
                self._launch.details,
                named(host_ranks),
            )
            address = server.facts["address"]
            hosts.append(RemoteHost(server, "", host_ranks, address=address, store=self.store))
            begin = block.stop
        return hosts

    def _progress_message(self, found: dict[str, Any], connected: int, wanted: int) -> str:
        ranks = self.request.ranks
        if isinstance(ranks, dict):
            return "waiting for " + ", ".join(name for name in ranks if name not in found)
        state = f" ({self._launch.state})" if self._launch.state else ""
        return (
            f"waiting for {self.request.engines or 'engines'}{state}: {connected} of {wanted} have "
            "connected"
        )

    def _timeout_message(self, found: dict[str, Any], connected: int, wanted: int) -> str:
        return (
            f"{self._progress_message(found, connected, wanted)} after "
            f"{self.request.timeout:.0f} s. The machines must reach "
            f"{self._multiplexer.endpoint} on this "
            "one: open that port, name "
            "another address with interface=…, or a longer timeout=…."
        )

    def close(self) -> None:
        """End all agents and their launchers."""
        for host in self._hosts:
            host.server.closed = True
            host.server.remove(host.folder)
        for tunnel in list(self._multiplexer.tunnels.values()):
            with suppress(OSError):
                tunnel.send({"do": "leave"})
        self._multiplexer.close()
        self._launch.stop()
        self.store.close()


def _check_compatible(facts: dict[str, Any]) -> None:
    """Check that a machine has the required packages and compatible versions.

    Raises:
        StartError: a package is missing, or Python or distkit has another version.
    """
    for package in facts["missing"]:
        raise StartError(
            f"{package} is not installed on {facts['name']}. Install it there: "
            f"{facts['executable']} -m "
            f"pip install {package}"
        )
    for what, version in versions().items():
        if facts[what].split(".")[:2] != version.split(".")[:2]:
            raise StartError(
                f"{facts['name']} has {what} {facts[what]} ({facts['executable']}), but "
                f"this machine has {version}. Install the same there, or pass another Python: "
                "remote_python='/path/to/python'."
            )
