"""Forks, releases and ends the processes of one run, and exchanges messages with them.

A run has the semantics of torchrun at the speed of fork: its ranks are forked from a process that
has imported torch, and end with the run, including their children.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import dumps
from typing import TYPE_CHECKING, Any

from distkit.cluster.kvstore_nodes import Nodes
from distkit.cluster.plan import Plan
from distkit.cluster.process_host import ProcessHost
from distkit.cluster.processes.forkserver import (
    KILL_TIMEOUT,
    Child,
    end,
    fork_all,
    server,
    shut_down,
)
from distkit.cluster.processes.rank_spec import Spec, free_port
from distkit.cluster.runs.conductor import Conductor, RankController
from distkit.cluster.runs.report import cause
from distkit.trace.info import RankInfo, RunInfo

if TYPE_CHECKING:
    from distkit.cluster.process_host import Offset

#: Timeout for a server to flush its events [s]; a stopped server does not.
QUICK_FLUSH_TIMEOUT = 0.2


def this_machine(plan: Plan, folder: str) -> ProcessHost:
    """Return this machine, with all ranks of a plan."""
    return ProcessHost(server(), folder, range(plan.ranks), range(plan.servers))


class Ranks(RankController):
    """The ranks of a run, and its parameter server, if there is one.

    Args:
        plan: number and devices of the ranks.
        folder: folder of their rendezvous.
        number: number of the run.
        hosts: their machines; by default this one.
        on_change: called, from any thread, when a process ends.
    """

    #: Function that a rank's process calls.
    role = "distkit.cluster.processes.roles:plain"
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
        self.ranks: dict[int, Child] = {}
        self.run: Conductor | None = None
        self._on_change = on_change
        self._port, self._call = 0, (b"", dict[str, Any]())
        self.nodes = self._nodes()
        self._store = f"store-{number}"

    def _nodes(self) -> Nodes:
        return Nodes(self.plan, self.hosts, self._handle_node_message)

    # -- starting ---------------------------------------------------------------

    def start(self, *, recording: bool = True) -> None:
        """Fork all processes.

        Raises:
            StartError: a process cannot be started.
        """
        self._port = free_port()
        self.nodes.start(recording)
        self._fork(range(self.plan.ranks))

    def _fork(self, ranks: Iterable[int], **arguments: Any) -> None:
        """Fork ranks on all machines concurrently."""
        ranks, requests = [*ranks], []
        for r in ranks:
            spec = self._spec(r)
            fork_args = {
                "spec": spec,
                "folder": spec.folder,
                "log": f"{spec.name}.log",
                **arguments,
            }
            requests.append((self.host(r).server, fork_args))
        for r, child in zip(ranks, fork_all(self.role, requests), strict=True):
            self.ranks[r] = child
            child.on_message(partial(self._handle_message, r))
            child.on_exit(partial(self._on_exit, r, child))

    def _spec(self, r: int) -> Spec:
        plan = self.plan
        return Spec(
            rank=r,
            world_size=plan.ranks,
            backend=plan.backend,
            device=plan.devices[r],
            threads=plan.threads,
            name=f"{self.kind}-{r}",
            store=self._store,
            **{"port": self._port, **self.host(r).spec_fields(r, self.hosts)},
        )

    def host(self, rank: int) -> ProcessHost:
        """Return the machine of a rank or another node."""
        ranks = (host for host in self.hosts if rank in host.ranks)
        return next(ranks, None) or self.nodes.host(rank)

    def _clock(self, rank: int) -> Offset | None:
        return self.host(rank).clock

    @property
    def children(self) -> dict[int, Child]:
        """The process of each rank, server and scheduler, by node number."""
        return {**self.ranks, **self.nodes.children}

    def info(self) -> RunInfo:
        """Return the trace's facts about the processes, without pids before they start."""
        plan, role = self.plan, "worker" if self.plan.servers else "rank"
        nodes = {r: (f"{role} {r}", role, device) for r, device in enumerate(plan.devices)}
        for n, (role, i) in self.nodes.roles.items():
            nodes[n] = (role if role == "scheduler" else f"{role} {i}", role, "cpu")
        ranks, children = {}, self.children
        for n, (name, role, device) in nodes.items():
            host, child = self.host(n).server.host, children.get(n)
            ranks[n] = RankInfo(name, role, host, child.pid if child else "", device)
        return RunInfo(world_size=plan.ranks, backend=plan.backend, ranks=ranks)

    # -- running ----------------------------------------------------------------

    def submit(
        self,
        run: Conductor,
        payload: bytes,
        options: dict[str, Any],
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        """Send the call to every rank; another thread passes their messages to ``run``.

        ``on_settled`` is called after the run and its processes have ended.
        """
        self.run, self._call = run, (payload, {**options, "run": run.number})
        run.live.offset = self._clock
        for r, child in self.ranks.items():
            if child.status is not None:
                self._on_exit(r, child, child.status)
        for r in run.ranks:
            self._execute(r)
        if self.nodes.lost is not None:
            self._handle_node_loss(*self.nodes.lost)
        args = run, on_settled
        threading.Thread(target=self._conduct, args=args, name="distkit-run", daemon=True).start()

    def _execute(self, rank: int, life: int = 0, **overrides: Any) -> None:
        payload, options = self._call
        node = self.nodes.worker(rank, self.host(rank), life)
        self._send(rank, payload, {**options, **overrides, "life": life, "node": node})

    def _send(self, rank: int, payload: bytes, options: dict[str, Any]) -> None:
        with suppress(OSError):  # it has just ended, which is reported
            self.ranks[rank].channel.send(dumps((payload, options)))

    def _conduct(self, run: Conductor, on_settled: Callable[[], None]) -> None:
        run.conduct(self)
        self._clean_up(run)
        on_settled()

    def _clean_up(self, run: Conductor) -> None:
        """End the processes of the run."""
        self.close()

    def replace(self, run: Conductor, rank: int, life: int) -> None:
        """Replace a dead rank during its run.

        The replacement runs the function from its beginning. It is in no process group, because
        every rank would have to create the group again.
        """
        self._fork([rank])
        faults = self._call[1].get("trouble")
        if faults is not None:  # do not repeat the fault that killed the rank
            faults = replace(faults, kill={r: n for r, n in faults.kill.items() if r != rank})
        self._execute(rank, life, trouble=faults)

    def go(self, ranks: Iterable[int], count: int | None) -> None:
        """Open the gates of these ranks ``count`` times, or permanently if None."""
        self._send_command(ranks, "go", count)

    def release(self, ranks: Iterable[int]) -> None:
        """Make these ranks report their position, and end."""
        self.nodes.settle("rest", QUICK_FLUSH_TIMEOUT)
        self._send_command(ranks, "release")

    def _send_command(self, ranks: Iterable[int], command: str, *what: Any) -> None:
        assert self.run is not None
        for r in ranks:
            with suppress(OSError):  # it has just ended
                self.ranks[r].channel.send((command, self.run.number, *what))

    def end(self, ranks: Iterable[int]) -> None:
        """Kill these ranks' processes; their ends are reported to the run."""
        end([self.ranks[r] for r in ranks])

    def settle(self) -> None:
        """Make the servers and the scheduler flush their events."""
        self.nodes.settle()

    def close(self, timeout: float = KILL_TIMEOUT) -> None:
        """End all processes, wait ``timeout`` seconds for their ends, and remove their stores."""
        self.nodes.close(timeout)
        shut_down(self.ranks.values(), timeout)
        for host in self.hosts:
            host.remove_store(self._store)

    # -- messages ---------------------------------------------------------------

    def _handle_message(self, rank: int, message: tuple[int, str, Any]) -> None:
        number, kind, what = message
        if kind == "waits":
            what = what[0], *self.host(rank).certainly(*what[1:])
        if self.run is not None and self.run.number == number:
            self.run.handle_event(rank, kind, what)

    def _handle_node_message(self, node: int, kind: str, what: Any) -> None:
        """Handle a message of a server or the scheduler."""
        if kind == "lost":
            self._handle_node_loss(node, what)
            return
        if kind == "replaced":
            self.nodes.leave(node, 0, cause(what))
        if self.run is not None:
            self.run.handle_event(node, kind, what)

    def _handle_node_loss(self, node: int, status: int) -> None:
        """End the run with a node without which the others would wait forever."""
        if self.run is not None:
            role, i = self.nodes.roles[node]
            name = f"server {i}" if role == "server" else "the scheduler"
            self.run.abandon(f"{name} has ended ({cause(status)}). Run again")

    def _on_exit(self, rank: int, child: Child, status: int) -> None:
        """Notify the run that a rank's process has ended."""
        run = self.run
        if self.ranks.get(rank) is child and run is not None and not run.finished:
            life = run.life(rank)
            run.add_death(rank, status, Path(self.folder, f"{self.kind}-{rank}"))
            self.nodes.leave(rank, life, cause(status))
        self._on_change()
