"""The processes of one run: forked, heard, released and ended.

The semantics of torchrun at the speed of fork: every run has ranks of its own, forked from a
process that has imported torch, and they end with it, whatever they leave behind.
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
from distkit.cluster.plan import HEARTBEAT_TIMEOUT, Plan
from distkit.cluster.process_host import ProcessHost
from distkit.cluster.processes.forkserver import ENDED, Child, Stop, end, fork_all, server, shut
from distkit.cluster.processes.rank_spec import Spec, free_port
from distkit.cluster.runs.conductor import READY, Conductor, RankController
from distkit.cluster.runs.report import cause
from distkit.errors import StartError
from distkit.trace.info import RankInfo, RunInfo

if TYPE_CHECKING:
    from distkit.cluster.process_host import Offset

#: A server that is not stopped hands its events over within this time [s].
QUICK = 0.2

#: A process whose connections broke ends within this time [s], or it hangs.
ENDS = 1.0


def this_machine(plan: Plan, folder: str) -> ProcessHost:
    """This machine, with all ranks of a plan."""
    return ProcessHost(server(), folder, range(plan.ranks), range(plan.servers))


class Ranks(RankController):
    """The ranks of a run, and its parameter server, if there is one.

    Args:
        plan: how many there are, and where.
        folder: where they meet.
        number: of the run.
        hosts: the machines that they are on; by default this one.
        heartbeat_timeout: how long a worker or a server may be silent [s].
        on_change: called, from any thread, when a process stops or ends.
    """

    #: What a rank's process runs.
    role = "distkit.cluster.processes.roles:plain"
    #: What the names of a rank's files begin with.
    kind = "rank"

    def __init__(
        self,
        plan: Plan,
        folder: str,
        number: int = 1,
        *,
        hosts: Iterable[ProcessHost] = (),
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.folder = plan, folder
        self.hosts = [*hosts] or [this_machine(plan, folder)]
        self.ranks: dict[int, Child] = {}
        self.run: Conductor | None = None
        self._on_change, self._heartbeat_timeout = on_change, heartbeat_timeout
        self._port, self._call = 0, (b"", dict[str, Any]())
        self.nodes = self._nodes()
        self._meeting = f"store-{number}"

    def _nodes(self) -> Nodes:
        timeout = self._heartbeat_timeout
        return Nodes(self.plan, self.folder, self.hosts, self._hear_node, timeout)

    # -- starting ---------------------------------------------------------------

    def start(self, *, recording: bool = True) -> None:
        """Fork all of them.

        Raises:
            StartError: they cannot be started.
        """
        self._port = free_port()
        self.nodes.start(recording)
        self._fork(range(self.plan.ranks))

    def _fork(self, ranks: Iterable[int], **arguments: Any) -> None:
        """Fork ranks, on all machines at once."""
        ranks, asked = [*ranks], []
        for r in ranks:
            told = self._spec(r)
            each = {"spec": told, "folder": told.folder, "log": f"{told.name}.log", **arguments}
            asked.append((self.host(r).server, each))
        for r, child in zip(ranks, fork_all(self.role, asked), strict=True):
            self.ranks[r] = child
            child.hear(partial(self._hear, r))
            child.on_exit(partial(self._on_exit, r, child))
            child.on_stop = partial(self._on_stop, r)

    def _spec(self, r: int) -> Spec:
        plan = self.plan
        return Spec(
            rank=r,
            world_size=plan.ranks,
            backend=plan.backend,
            seat=plan.seats[r],
            threads=plan.threads,
            name=f"{self.kind}-{r}",
            meeting=self._meeting,
            **{"port": self._port, **self.host(r).surroundings(r, self.hosts)},
        )

    def host(self, rank: int) -> ProcessHost:
        """The machine on which a rank is, or another node."""
        ranks = (host for host in self.hosts if rank in host.ranks)
        return next(ranks, None) or self.nodes.host(rank)

    def _clock(self, rank: int) -> Offset | None:
        return self.host(rank).clock

    @property
    def children(self) -> dict[int, Child]:
        """The process of each rank, server and scheduler, by its number."""
        return {**self.ranks, **self.nodes.children}

    def info(self) -> RunInfo:
        """Facts of the processes for a trace; those that have not started have no pid."""
        plan, role = self.plan, "worker" if self.plan.servers else "rank"
        known = {r: (f"{role} {r}", role, device) for r, device in enumerate(plan.devices)}
        for n, (role, i) in self.nodes.roles.items():
            known[n] = (role if role == "scheduler" else f"{role} {i}", role, "cpu")
        ranks, children = {}, self.children
        for n, (name, role, device) in known.items():
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
        """Hand the call to every rank; what comes back goes to ``run`` from another thread.

        ``on_settled`` is called when the processes have ended, too.
        """
        self.run, self._call = run, (payload, {**options, "run": run.number})
        run.live.offset = self._clock
        for n, child in self.children.items():
            if child.stopped[0]:
                run.hear(n, "stopped", child.stopped)
        for r, child in self.ranks.items():
            if child.status is not None:
                self._on_exit(r, child, child.status)
        for r in run.ranks:
            self._execute(r)
        if self.nodes.lost is not None:
            self._lose_node(*self.nodes.lost)
        told = run, on_settled
        threading.Thread(target=self._conduct, args=told, name="distkit-run", daemon=True).start()

    def _execute(self, rank: int, life: int = 0, **other: Any) -> None:
        payload, options = self._call
        node = self.nodes.worker(rank, self.host(rank), life)
        self._send(rank, payload, {**options, **other, "life": life, "node": node})

    def _send(self, rank: int, payload: bytes, options: dict[str, Any]) -> None:
        with suppress(OSError):  # it has just ended, which is heard
            self.ranks[rank].channel.send(dumps((payload, options)))

    def _conduct(self, run: Conductor, on_settled: Callable[[], None]) -> None:
        run.conduct(self)
        self._tidy_up(run)
        on_settled()

    def _tidy_up(self, run: Conductor) -> None:
        """The run has ended, and its processes end with it."""
        self.close()
        if any(o.imported for o in run.outcomes.values()):
            for fork in {child.server for child in self.ranks.values()}:
                with suppress(StartError):  # it has ended
                    fork.complete()

    def replace(self, run: Conductor, rank: int, life: int) -> None:
        """Put another in a dead rank's place, in the middle of its run.

        It runs the function from its beginning. It is in no process group: the others' would
        have to be made anew on every rank.
        """
        self._fork([rank])
        made = self._call[1].get("trouble")
        if made is not None:  # what was to kill the rank has done so
            made = replace(made, kill={r: n for r, n in made.kill.items() if r != rank})
        self._execute(rank, life, trouble=made)

    def go(self, ranks: Iterable[int], count: int | None) -> None:
        """Let these ranks through the gate ``count`` times, or for good when None."""
        self._tell(ranks, "go", count)

    def release(self, ranks: Iterable[int]) -> None:
        """Have these ranks report where they are, and end."""
        self.nodes.settle("rest", QUICK)
        self._tell(ranks, "release")

    def _tell(self, ranks: Iterable[int], word: str, *what: Any) -> None:
        assert self.run is not None
        for r in ranks:
            with suppress(OSError):  # it has just ended
                self.ranks[r].channel.send((word, self.run.number, *what))

    def end(self, ranks: Iterable[int]) -> None:
        """End these ranks' processes; their deaths are reported to the run."""
        end([self.ranks[r] for r in ranks])

    def settle(self) -> None:
        """Have the servers and the scheduler hand over what they still hold."""
        self.nodes.settle()

    def close(self, within: float = ENDED) -> None:
        """End all processes, wait so long [s] until they have ended, and drop what they met by."""
        self.nodes.close(within)
        shut(self.ranks.values(), within)
        for host in self.hosts:
            host.forget(self._meeting)

    # -- what they tell ---------------------------------------------------------

    def _hear(self, rank: int, message: tuple[int, str, Any]) -> None:
        number, kind, what = message
        if kind == "waits":
            what = what[0], *self.host(rank).certainly(*what[1:])
        elif kind == "unreached":
            what = [host.server.host for host in self.hosts if host.address in what]
        if self.run is not None and self.run.number == number:
            self.run.hear(rank, kind, what)

    def _hear_node(self, node: int, kind: str, what: Any) -> None:
        """Pass on what a server or the scheduler records."""
        if kind == "missed":
            threading.Thread(target=self._missed, args=what, daemon=True).start()
        elif kind == "lost":
            self._lose_node(node, what)
        elif self.run is not None:
            self.run.hear(node, kind, what)

    def _lose_node(self, node: int, status: int) -> None:
        """A node has ended before all had registered: the others would wait forever."""
        if self.run is not None and not self.run.cluster_failure:
            how = cause(status, silent_for=self.run.silent_for.get(node, 0.0))
            role, i = self.nodes.roles[node]
            name = f"server {i}" if role == "server" else "the scheduler"
            self.run.cluster_failure = f"{name} has ended ({how}). Run again."
            self.run.abandon(READY)

    def _missed(self, node: int, pid: int) -> None:
        """A process is taken for dead; if it is not, it hangs, and is ended.

        Without a ``pid`` it is the scheduler.
        """
        child = self.children.get(node)
        if child is None or pid not in (0, child.pid) or child.wait(ENDS):
            return
        if self.run is not None:
            self.run.silent_for[node] = self._heartbeat_timeout
        end([child])

    def _on_stop(self, rank: int, stop: Stop) -> None:
        """A signal has stopped a rank's process, or it continues: say so."""
        if self.run is not None:
            self.run.hear(rank, "stopped", stop)
        self._on_change()

    def _on_exit(self, rank: int, child: Child, status: int) -> None:
        """A rank's process ended: tell the run."""
        run = self.run
        if self.ranks.get(rank) is child and run is not None and not run.finished:
            life = run.life(rank)
            run.add_death(rank, status, Path(self.folder, f"{self.kind}-{rank}"))
            self.nodes.leave(rank, life, cause(status))
        self._on_change()
