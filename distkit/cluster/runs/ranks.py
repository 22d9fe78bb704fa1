"""Forks, releases and terminates the processes of one run, and exchanges messages with them.

Unlike under torchrun, ranks are forked from a process that has already imported torch, so a run
starts quickly. When the run ends, the ranks and their children are killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import dumps
from typing import TYPE_CHECKING, Any

from distkit.cluster.plan import Plan
from distkit.cluster.processes.fork_client import (
    KILL_TIMEOUT,
    Child,
    ForkClient,
    fork_all,
    kill_processes,
    server,
    shut_down,
)
from distkit.cluster.processes.rank_spec import Spec, free_port, inherited_fields
from distkit.cluster.runs.conductor import Conductor, RankController
from distkit.cluster.runs.outcome import exit_cause
from distkit.errors import StartError
from distkit.trace.info import RankInfo, RunInfo

if TYPE_CHECKING:
    from distkit.kvstore import Node

#: Timeout for a server to flush its events [s]; the shorter one applies before a release. A
#: suspended server (SIGSTOP) never flushes.
FLUSH_TIMEOUT, QUICK_FLUSH_TIMEOUT = 2.0, 0.2


@dataclass
class ProcessHost:
    """A host that runs ranks. This class represents the local machine.

    Args:
        server: the client of the host's fork server.
        folder: the cluster's folder on the machine.
        ranks: the ranks that it runs.
        servers: the numbers of the parameter servers that it runs.
        address: its address as seen from other machines, or "" if there are none.
    """

    server: ForkClient
    folder: str
    ranks: Sequence[int]
    servers: Sequence[int] = ()
    address: str = ""

    @property
    def clock(self) -> Any:
        """Clock offset of this host, a :class:`distkit_hosts.clocks.Offset`.

        None for the local machine, or before the first round trip.
        """
        return None

    def spec_fields(self, rank: int, hosts: Sequence[ProcessHost]) -> dict[str, Any]:
        """Return the fields of a rank's Spec that depend on the machine."""
        return {
            "folder": self.folder,
            "local_rank": self.ranks.index(rank),
            "local_world_size": len(self.ranks),
            **inherited_fields(),
        }

    def convert_interval(self, since: float, until: float) -> tuple[float, float]:
        """Convert an interval to the local clock, and shorten it by the clocks' maximum error."""
        return since, until

    def remove_files(self, name: str) -> None:
        """Remove a run's rendezvous stores and its servers' sockets."""
        with suppress(OSError):  # the folder was removed
            for file in Path(self.folder).glob(f"{name}-*"):
                file.unlink(missing_ok=True)


def this_machine(plan: Plan, folder: str) -> ProcessHost:
    """Return the local host, which runs all ranks of the plan."""
    return ProcessHost(server(), folder, range(plan.ranks), range(plan.servers))


class Ranks(RankController):
    """The ranks of a run, and its servers and scheduler if it uses a parameter server.

    Args:
        plan: number and devices of the ranks.
        folder: the cluster's folder on the local machine.
        number: run number.
        hosts: the machines that run them; by default the local machine.
        on_change: called from any thread when a process exits.
    """

    #: Function that a rank's process calls.
    role = "distkit.cluster.processes.roles:plain_rank"
    #: Prefix of the names of a rank's files.
    kind = "rank"

    def __init__(
        self,
        plan: Plan,
        folder: str,
        number: int = 1,
        *,
        hosts: Iterable[ProcessHost] = (),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.folder = plan, folder
        self.hosts = [*hosts] or [this_machine(plan, folder)]
        #: The process of each node. Servers are numbered after the ranks, and the scheduler last.
        self.children: dict[int, Child] = {}
        servers = [("server", i) for i in range(plan.servers)] + [("scheduler", 0)]
        #: Role and number of each server and of the scheduler, by node.
        self.servers = dict(enumerate(servers if plan.servers else (), plan.ranks))
        self.run: Conductor | None = None
        self._on_change = on_change
        self._port, self._call = 0, (b"", dict[str, Any]())
        self._name = f"run-{number}"  # prefix of the names of the run's files
        #: Whether :meth:`close` was called, and whether all nodes have registered.
        self._closed = self._registered = False
        self._keys: tuple[str, str] | None = None  # the servers' public and secret key
        self._endpoint: futures.Future[str] = futures.Future()  # the scheduler's endpoint
        self._flushed = threading.Semaphore(0)  # counts servers that have flushed their events

    # -- starting ---------------------------------------------------------------

    def start(self) -> None:
        """Start all processes.

        Raises:
            StartError: a process cannot be started; the others remain until :meth:`close`.
        """
        self._port = free_port()
        if self.servers:
            for host in self.hosts:  # an import by each process would be slower
                host.server.preload("distkit.kvstore.client.worker")
            scheduler = max(self.servers)
            if self.hosts[0].address:  # other machines need the scheduler's endpoint
                from distkit.kvstore.transport.node import new_keys

                self._keys = new_keys()
                self._fork([scheduler])
                self._wait_for_scheduler(self.children[scheduler])
            self._fork(self.servers.keys() - self.children.keys())
        self._fork(range(self.plan.ranks))

    def _fork(self, nodes: Collection[int]) -> None:
        """Fork processes on all machines concurrently."""
        children = fork_all((self.host(n).server, self._fork_args(n)) for n in nodes)
        for n, child in zip(nodes, children, strict=True):
            self.children[n] = child
            handle = self._handle_server_message if n in self.servers else self._handle_message
            child.on_message(partial(handle, n))
            child.on_exit(partial(self._on_exit, n, child))

    def _fork_args(self, node: int) -> dict[str, Any]:
        host = self.host(node)
        if node in self.servers:
            role, i = self.servers[node]
            return {
                "target": "distkit.cluster.processes.roles:node",
                "folder": host.folder,
                "log": f"{role}-{i}.log",
                "node": self._node(role, i, host),
                "recording": self._call[1].get("record", True),
            }
        spec = self._spec(node)
        return {"target": self.role, "folder": spec.folder, "log": f"{spec.name}.log", "spec": spec}

    def _node(self, role: str, i: int, host: ProcessHost, incarnation: int = 0) -> Node:
        from distkit.kvstore import Node

        is_known = host.address and self._endpoint.done()
        return Node(
            role,
            i,
            self.plan.ranks,
            self.plan.servers,
            host.folder,
            keys=self._keys,
            incarnation=incarnation,
            address=host.address,
            scheduler_endpoint=self._endpoint.result() if is_known else "",
            run=self._name,
        )

    def _wait_for_scheduler(self, child: Child) -> None:
        """Wait until the scheduler reports its endpoint for other machines."""
        child.on_exit(lambda status: self._set_endpoint(""))
        if not self._endpoint.result():
            raise StartError(
                f"the scheduler on {child.server.host} exited during startup "
                f"({exit_cause(child.status or 0)}), before the other machines could connect. "
                f"Its log is in {self.folder}/scheduler-0.log until the cluster is stopped."
            )

    def _set_endpoint(self, endpoint: str) -> None:
        with suppress(
            futures.InvalidStateError
        ):  # the scheduler exited after it had reported its endpoint
            self._endpoint.set_result(endpoint)

    def _spec(self, r: int) -> Spec:
        plan = self.plan
        return Spec(
            rank=r,
            world_size=plan.ranks,
            backend=plan.backend,
            device=plan.devices[r],
            threads=plan.threads,
            name=f"{self.kind}-{r}",
            store=self._name,
            **{"port": self._port, **self.host(r).spec_fields(r, self.hosts)},
        )

    def host(self, node: int) -> ProcessHost:
        """Return the machine that runs a node. The scheduler runs on the first machine."""
        role, i = self.servers.get(node, ("rank", node))
        if role == "scheduler":
            return self.hosts[0]
        return next(h for h in self.hosts if i in (h.ranks if role == "rank" else h.servers))

    def info(self) -> RunInfo:
        """Return the processes' metadata for the trace; a pid is "" until the process starts."""
        plan, role = self.plan, "worker" if self.plan.servers else "rank"
        nodes = {r: (f"{role} {r}", role, device) for r, device in enumerate(plan.devices)}
        for n, (role, i) in self.servers.items():
            nodes[n] = (role if role == "scheduler" else f"{role} {i}", role, "cpu")
        ranks = {}
        for n, (name, role, device) in nodes.items():
            host, child = self.host(n).server.host, self.children.get(n)
            ranks[n] = RankInfo(name, role, host, child.pid if child else "", device)
        return RunInfo(world_size=plan.ranks, backend=plan.backend, ranks=ranks)

    # -- running ----------------------------------------------------------------

    def submit(
        self,
        run: Conductor,
        payload: bytes,
        options: dict[str, Any],
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Send the call to every rank and start a thread that controls the run.

        The processes are started first, unless they are running. ``on_ended`` is called after the
        run has ended and its processes have been terminated.

        Raises:
            StartError: a process cannot be started.
        """
        self._call = payload, {**options, "run": run.number}
        run.live.offset = lambda rank: self.host(rank).clock
        self.run = run
        for node, child in self.children.items():
            if child.status is not None:  # an engine that exited before this call
                self._on_exit(node, child, child.status)
        if not self.children:
            self.start()
        run.live.update(ranks=self.info().ranks, seed=options["seed"])
        for r in run.ranks:
            self._execute(r)
        threading.Thread(
            target=self._conduct, args=(run, on_ended), name="distkit-run", daemon=True
        ).start()

    def _execute(self, rank: int, incarnation: int = 0, **overrides: Any) -> None:
        payload, options = self._call
        node = self._node("worker", rank, self.host(rank), incarnation) if self.servers else None
        self._send(
            rank, payload, {**options, **overrides, "incarnation": incarnation, "node": node}
        )

    def _send(self, rank: int, payload: bytes, options: dict[str, Any]) -> None:
        self.children[rank].send(dumps((payload, options)))

    def _conduct(self, run: Conductor, on_ended: Callable[[], None]) -> None:
        try:
            run.conduct(self)
        finally:  # a subscriber's error must not keep the cluster busy
            self._clean_up(run)
            on_ended()

    def _clean_up(self, run: Conductor) -> None:
        """Terminate the processes of the run."""
        self.close()

    def replace(self, run: Conductor, rank: int, incarnation: int) -> None:
        """Replace a dead rank during its run.

        The replacement runs the function from its beginning. It is in no process group, because
        every rank would have to create the group again.
        """
        self._fork([rank])
        faults = self._call[1]["faults"]  # do not repeat the fault that killed the rank
        kill = {r: n for r, n in faults.kill.items() if r != rank}
        self._execute(rank, incarnation, faults=replace(faults, kill=kill))

    def open_gates(self, ranks: Iterable[int], count: int | None) -> None:
        """Open the gates of these ranks ``count`` times, or permanently if None."""
        self._send_command(ranks, "go", count)

    def release(self, ranks: Iterable[int]) -> None:
        """Make these ranks report their position and exit."""
        self.collect_events("quiesce", QUICK_FLUSH_TIMEOUT)
        self._send_command(ranks, "release")

    def _send_command(self, ranks: Iterable[int], command: str, *args: Any) -> None:
        assert self.run is not None
        for r in ranks:
            self.children[r].send((command, self.run.number, *args))

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill these ranks' processes; their exits are reported to the run."""
        kill_processes([self.children[r] for r in ranks])

    def collect_events(self, command: str = "flush", timeout: float = FLUSH_TIMEOUT) -> None:
        """Make the servers and the scheduler flush their events.

        After the command "quiesce" they also stop recording. Wait up to ``timeout`` seconds for
        each.
        """
        live_servers = [c for n in self.servers if (c := self.children[n]).status is None]
        for child in live_servers:
            child.send(command)
        for _ in live_servers:
            self._flushed.acquire(timeout=timeout)

    def close(self, timeout: float = KILL_TIMEOUT) -> None:
        """Kill all processes, wait up to ``timeout`` seconds for each, and remove their files."""
        self._closed = True
        shut_down(self.children.values(), timeout)
        for host in self.hosts:
            host.remove_files(self._name)

    # -- messages ---------------------------------------------------------------

    def _handle_message(self, rank: int, message: tuple[int, str, Any]) -> None:
        number, kind, data = message
        if kind == "waits":
            data = data[0], *self.host(rank).convert_interval(*data[1:])
        if self.run is not None and self.run.number == number:
            self.run.handle_event(rank, kind, data)

    def _handle_server_message(self, node: int, message: tuple[str, Any]) -> None:
        match message:
            case "flushed", _:
                self._flushed.release()
            case "listening", endpoint:
                self._set_endpoint(endpoint)
            case "started", _:
                self._registered = True
            case kind, data if self.run is not None:
                self.run.handle_event(node, kind, data)

    def _on_exit(self, node: int, child: Child, status: int) -> None:
        """Report the exit of a process.

        After the run, or if the process has already been replaced, only ``on_change`` is called.
        """
        run = self.run
        if run is not None and not run.finished:
            if node in self.servers:
                self._on_server_exit(run, node, status)
            elif self.children.get(node) is child:
                incarnation = run.incarnation(node)
                run.add_death(node, status, Path(self.folder, f"{self.kind}-{node}"))
                self._notify_scheduler_of_exit(node, incarnation, status)
        self._on_change()

    def _on_server_exit(self, run: Conductor, node: int, status: int) -> None:
        """Report a server's exit; its backup takes over or, if it has none, requests fail.

        End the run if the scheduler has exited, or if some node has not registered yet.
        """
        if self._closed:
            return
        if self._registered and node != max(self.servers):
            self._notify_scheduler_of_exit(node, 0, status)
            run.handle_event(node, "replaced", status)
        else:
            role, i = self.servers[node]
            name = f"server {i}" if role == "server" else "the scheduler"
            run.abandon(f"{name} has exited ({exit_cause(status)}). Run the function again")

    def _notify_scheduler_of_exit(self, node: int, incarnation: int, status: int) -> None:
        """Notify the scheduler that a process has exited, possibly before it registered."""
        if self.servers:
            self.children[max(self.servers)].send(("exited", node, incarnation, exit_cause(status)))
