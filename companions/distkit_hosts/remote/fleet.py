"""The machines of a cluster: start or attach to them, allocate ranks, and fork ranks there."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from distkit._format import named
from distkit.cluster.machine import local_address
from distkit.cluster.plan import Plan, make_plan
from distkit.cluster.processes.channel import Channel
from distkit.cluster.processes.fork_client import ForkClient
from distkit.cluster.processes.roles import PORTS
from distkit.cluster.runs.ranks import ProcessHost
from distkit.errors import StartError
from distkit.kvstore.transport.node import new_keys
from distkit_hosts.clocks import Offset, PeerClock
from distkit_hosts.remote.agent import versions
from distkit_hosts.remote.launching import launch
from distkit_hosts.remote.planning import combine
from distkit_hosts.remote.store import NAME, StoreServer
from distkit_hosts.remote.tunnel import Multiplexer, Tunnel

#: Timeout for learning why a machine was lost [s].
LOSS_DETAILS_TIMEOUT = 1.0

#: Grace period for a process's last messages, which may arrive after its exit status [s].
LAST_MESSAGES_TIMEOUT = 1.0


#: Time to wait for further failures after the first one, so that all of them are reported [s].
MORE_FAILURES_TIMEOUT = 1.0


@dataclass(frozen=True)
class HostRequest:
    """The machines that a cluster requests.

    Args:
        ranks: number of ranks by machine, or in total.
        engines: the ipyparallel launcher: "ssh", "mpi", "slurm", …; "" if a client is given.
        client: the client of an existing cluster.
        interface: an address of this machine that the others can reach, optionally with a port, or
            a listening socket; "" to detect the address.
        timeout: timeout for starting the machines [s].
        options: options for the launcher.
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

    def endpoint(self) -> str:
        """Return this machine's ZeroMQ endpoint."""
        if isinstance(self.interface, socket.socket):
            address, port = self.interface.getsockname()
            return f"tcp://{address}:{port}"
        address, _, port = self.interface.partition(":")
        if address:
            return f"tcp://{local_address(address)}:{port or '*'}"
        names = self.ranks if isinstance(self.ranks, dict) else self.options.get("mpi_hosts", {})
        hosts = [name.rpartition("@")[2].partition(":")[0] for name in names]
        default_route = "192.0.2.1"  # a documentation address
        for target in (hosts[0] if hosts else default_route, socket.gethostname()):
            with suppress(OSError):
                return f"tcp://{local_address(target)}:*"
        return "tcp://127.0.0.1:*"


class TunnelChannel(Channel):
    """A tunnel as the channel to a fork server; file descriptors are sent as streams."""

    def __init__(self, tunnel: Tunnel) -> None:
        self._tunnel = tunnel
        #: The received messages; None after the tunnel is lost.
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tunnel.on_message = self._messages.put
        tunnel.on_lost = lambda reason: self._messages.put(None)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send a message, optionally with a socket, which becomes the local end of a stream."""
        self._tunnel.send(message, fd)

    def recv(self) -> Any:
        """Wait for a message; raise EOFError when the tunnel is lost."""
        message = self._messages.get()
        if message is None:
            raise EOFError(self._tunnel.reason)
        return message

    def close(self) -> None:
        """Do nothing: the tunnel belongs to its multiplexer."""


class HostForkClient(ForkClient):
    """Forks on another machine, through its agent.

    Args:
        tunnel: the tunnel to the agent.
        facts: the agent's description of its machine.
    """

    def __init__(self, tunnel: Tunnel, facts: dict[str, Any]) -> None:
        self.facts, self.mirror = facts, ""
        self.processes_there = "all processes there"  # for messages
        self._end_reason = ""  # the reason that the agent has reported
        #: Returns the launcher's current description of the agent.
        self.launcher_details: Callable[[], str] = str
        #: That machine's clock, compared with the local one.
        self.peer_clock = PeerClock()
        self._tunnel = tunnel
        tunnel.on_stream, tunnel.on_trip = self._on_stream, self.peer_clock.add
        super().__init__(TunnelChannel(tunnel), facts["name"])
        with suppress(OSError):  # the tunnel is lost, which the next request reports
            tunnel.send({"do": "welcome"})

    def make_folder(
        self,
        processes: int,
        *,
        like: str = "",
        sockets: dict[str, str] | None = None,
    ) -> str:
        """Create a folder on that machine.

        Args:
            processes: number of processes there.
            like: the local folder, which receives the files of processes that exit there.
            sockets: maps names of sockets there to names of sockets in ``like``.
        """
        self.mirror = like
        reply = self._ask({"do": "folder", "processes": processes, "sockets": sockets or {}})
        if "refused" in reply:
            raise StartError(f"on {self.host}: {reply['refused']}")
        return str(reply["folder"])

    def loss_reason(self) -> str:
        """Explain why the machine was lost."""
        if self.closed:
            return "the cluster was stopped."
        self.lost.wait(LOSS_DETAILS_TIMEOUT)
        lost = self._end_reason or self._tunnel.reason or "it does not respond"
        return (
            f"{self.host} is lost, together with {self.processes_there}: {lost}. Check the network "
            f"and the machine: distkit doctor --hosts {self.host}{self.launcher_details()}"
        )

    def shut_down_channel(self, channel: Channel) -> None:
        """Shut down an exited process's channel, after a grace period for its last messages."""
        timer = threading.Timer(LAST_MESSAGES_TIMEOUT, channel.shutdown)
        timer.daemon = True
        timer.start()

    def devices(self) -> dict[str, Any]:
        """Return the GPUs found by the agent."""
        return dict(self.facts["gpus"])

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handle a message from the agent, or from the fork server there."""
        if "ended" in message:
            self._end_reason = message["ended"]
            return
        for name, data in message.pop("files", {}).items():  # files of a process that exited
            with suppress(OSError):
                Path(self.mirror, Path(name).name).write_bytes(data)
        super()._handle_message(message)

    def _on_stream(self, message: dict[str, Any]) -> socket.socket:
        """Connect a stream to a socket on the local machine."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"{self.mirror}/{message['to']}")
        except OSError:
            sock.close()
            raise
        return sock


@dataclass
class RemoteHost(ProcessHost):
    """Another machine with ranks, whose process groups use ``store`` on the local machine."""

    server: HostForkClient
    store: StoreServer = field(kw_only=True)

    @property
    def clock(self) -> Offset | None:
        """The offset of the machine's clock; None before the first round trip."""
        return self.server.peer_clock.offset

    def plan(self, request: HostRequest) -> Plan:
        """Plan the processes on the machine.

        Raises:
            StartError: the machine cannot meet the request.
        """
        try:
            return make_plan(
                len(self.ranks),
                len(self.servers),
                request.device,
                request.backend,
                cpus=self.server.facts["cpus"],
                memory=self.server.facts["memory"],
                gpus=self.server.gpus(request.device),
                threads=request.threads,
            )
        except StartError as error:
            raise StartError(f"on {self.server.host}: {error}") from error

    def spec_fields(self, rank: int, hosts: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of a rank's Spec that depend on the machine."""
        facts, first = self.server.facts, hosts[0].server.facts
        fields = super().spec_fields(rank, hosts)
        return {
            **fields,
            "environ": facts["environ"],
            "path": [*fields["path"], *facts["path"]],
            "port": first["port"],
            "address": first["address"],
            "interface": facts["interface"],
            "host": hosts.index(self),
            "hosts": len(hosts),
        }

    def convert_interval(self, since: float, until: float) -> tuple[float, float]:
        """Convert an interval to the local clock; shorten it at each end by the maximum error."""
        clock = self.clock
        if clock is None:
            return since, until
        error = max(clock.error_at(since), clock.error_at(until))
        return clock.to_local_time(since) + error, clock.to_local_time(until) - error

    def remove_files(self, name: str) -> None:
        """Delete a run's values from the rendezvous store."""
        self.store.forget(name)


class Fleet:
    """Starts agents and waits until they are connected.

    Args:
        request: the requested machines.
        folder: the cluster's folder on this machine.
        progress: called with a description of pending machines.
    """

    def __init__(self, request: HostRequest, folder: str, progress: Callable[[str], None]) -> None:
        self.request, self._folder, self._progress = request, folder, progress
        self._hosts: list[RemoteHost] = []
        self._arrivals: queue.SimpleQueue[tuple[Tunnel, dict[str, Any]] | str] = queue.SimpleQueue()
        keys = new_keys()
        self._multiplexer = self._listen(request.endpoint(), keys)
        try:
            self._launch = launch(
                request.engines if request.client is None else request.client,
                request.ranks,
                folder,
                request.options,
                {"endpoint": self._multiplexer.endpoint, "keys": keys},
                self._arrivals.put,
            )
        except StartError:
            self._multiplexer.close()
            raise
        self.store = StoreServer(folder)

    def _listen(self, endpoint: str, keys: tuple[str, str]) -> Multiplexer:
        interface = self.request.interface
        listener = interface if isinstance(interface, socket.socket) else None
        try:
            return Multiplexer(endpoint, keys, listen=True, accept=self._accept, listener=listener)
        except zmq.ZMQError as error:
            raise StartError(
                f"this machine cannot listen on {endpoint}: {error.strerror}. Pass one of its "
                "addresses and a free port: interface='10.0.0.1:45000'."
            ) from error

    def _accept(self, tunnel: Tunnel) -> None:
        def handle(message: dict[str, Any]) -> None:
            if "here" in message:  # otherwise a surplus agent exits
                self._arrivals.put((tunnel, message["here"]))

        tunnel.on_message = handle

    def gather(self, plan: Plan) -> tuple[list[RemoteHost], Plan]:
        """Wait for all machines, and allocate the ranks to them.

        Each machine gets a folder with sockets that are forwarded to this machine.

        Raises:
            StartError: a machine failed or did not connect in time; the message explains why.
        """
        self._multiplexer.start()
        self._launch.start()
        hosts = self._hosts = self._allocate(self._wait_for_agents())
        sockets = {f"s:{n}": f"s-{n}" for n in range(1, PORTS + 1)} | {NAME: NAME}
        for first, host in enumerate(hosts):
            host.servers = range(first, plan.servers, len(hosts))
            processes = len(host.ranks) + len(host.servers) + bool(plan.servers and not first)
            host.folder = host.server.make_folder(processes, like=self._folder, sockets=sockets)
        return hosts, combine({host.server.host: host.plan(self.request) for host in hosts})

    def _wait_for_agents(self) -> dict[str, list[Any]]:
        """Return each machine's fork client and the tunnels of its surplus agents, by name."""
        found: dict[str, list[Any]] = defaultdict(list)
        failures: dict[str, None] = {}  # several processes may report the same failure
        end, connected = time.monotonic() + self.request.timeout, 0
        ranks = self.request.ranks
        wanted = len(ranks) if isinstance(ranks, dict) else ranks
        while connected < wanted:
            self._progress(self._progress_message(found, connected, wanted))
            try:
                arrival = self._arrivals.get(timeout=max(0.0, min(1.0, end - time.monotonic())))
                connected += 1
                self._register(found, arrival)
            except queue.Empty:
                if self._launch.state.startswith("PENDING"):  # no timeout while queued
                    end = time.monotonic() + self.request.timeout
                if time.monotonic() > end:
                    timed_out = (
                        f"still {self._progress_message(found, connected, wanted)} after "
                        f"{self.request.timeout:.0f} s. The machines must reach "
                        f"{self._multiplexer.endpoint} here: open that port, or pass "
                        "another address with interface=… or a longer timeout=…."
                    )
                    failures = failures or {timed_out: None}
                    break
            except StartError as error:
                failures[str(error)] = None
                end = min(end, time.monotonic() + MORE_FAILURES_TIMEOUT)
        if failures:
            raise StartError("\n\n".join(failures))
        for agents in found.values():
            for tunnel in agents[1:]:  # not earlier: the exit of an agent counts as a failure
                with suppress(OSError):
                    tunnel.send({"do": "leave"})
        return found

    def _register(
        self, found: dict[str, list[Any]], arrival: tuple[Tunnel, dict[str, Any]] | str
    ) -> None:
        """Register a process; the first process of each machine is its agent."""
        if isinstance(arrival, str):
            raise StartError(arrival)
        tunnel, facts = arrival
        _check_compatible(facts)
        agents = found[facts["name"]]
        agents.append(tunnel if agents else HostForkClient(tunnel, facts))

    def _allocate(self, found: dict[str, list[Any]]) -> list[RemoteHost]:
        """Number the ranks machine by machine, in the order of the request, or else by name."""
        ranks = self.request.ranks
        counts = ranks if isinstance(ranks, dict) else {n: len(found[n]) for n in sorted(found)}
        hosts, begin = [], 0
        for name, count in counts.items():
            server, numbers = found[name][0], range(begin, begin + count)
            server.launcher_details, server.processes_there = self._launch.details, named(numbers)
            address = server.facts["address"]
            hosts.append(RemoteHost(server, "", numbers, address=address, store=self.store))
            begin = numbers.stop
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

    def close(self) -> None:
        """Stop all agents and their launchers."""
        for host in self._hosts:
            host.server.closed = True
            host.server.remove(host.folder)
        self._multiplexer.close()  # so that the agents exit
        self._launch.stop()
        self.store.close()


def _check_compatible(facts: dict[str, Any]) -> None:
    """Check that a machine has the required packages and compatible versions.

    Raises:
        StartError: a package is missing, or the version of Python or distkit is incompatible.
    """
    for package in facts["missing"]:
        raise StartError(
            f"{package} is not installed on {facts['name']}. Install it there: "
            f"{facts['executable']} -m pip install {package}"
        )
    for component, version in versions().items():
        if facts[component].split(".")[:2] != version.split(".")[:2]:
            raise StartError(
                f"{facts['name']} has {component} {facts[component]} ({facts['executable']}), but "
                f"this machine has {version}. Install that version there, or pass another Python: "
                "remote_python='/path/to/python'."
            )
