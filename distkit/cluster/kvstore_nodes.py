"""The servers and the scheduler of a run: started, watched, ended with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.cluster.processes.forkserver import ENDED, Child, ForkServer, fork_all, shut
from distkit.errors import StartError

if TYPE_CHECKING:
    from distkit.cluster.plan import Plan
    from distkit.cluster.process_host import ProcessHost
    from distkit.kvstore import Node


class Nodes:
    """Their processes, by id: after the workers, which are the ranks.

    Args:
        plan: how many there are.
        folder: the cluster's own on this machine.
        hosts: the machines that they are on, the scheduler on the first.
        hear: called with a node's id and what it records; with "replaced" and the exit status of
            a server that ends in the middle of the run; with "lost" if a node ends before it; and
            with "missed" and the pid of a process that the scheduler takes for dead.
        heartbeat_timeout: how long a node may be silent before that [s].
    """

    def __init__(
        self,
        plan: Plan,
        folder: str,
        hosts: list[ProcessHost],
        hear: Callable[[int, str, Any], None],
        heartbeat_timeout: float,
    ) -> None:
        self._plan, self._folder, self._hear = plan, folder, hear
        self._hosts, self._heartbeat_timeout = hosts, heartbeat_timeout
        self.closed = self._begun = self._recording = False
        self._endpoint: futures.Future[str] = futures.Future()  # where the scheduler listens
        self.children: dict[int, Child] = {}
        #: A node that ended before all had registered, and its exit status.
        self.lost: tuple[int, int] | None = None
        self._flushed = threading.Semaphore(0)  # counts nodes that have flushed their events
        #: Public and secret key, known to the nodes of this run alone.
        self._keys: tuple[str, str] | None = None
        roles = [("server", i) for i in range(plan.servers)] + [("scheduler", 0)]
        self.roles = {plan.ranks + n: r for n, r in enumerate(roles if plan.servers else [])}

    def start(self, recording: bool) -> None:
        """Start all."""
        self._recording = recording
        if self.roles:
            from distkit.kvstore.transport.sockets import new_keys

            self._keys = new_keys()
            scheduler = max(self.roles)
            if self._hosts[0].address:  # the others have to know where it listens
                self._fork([scheduler])
                self._await_scheduler(self.children[scheduler])
            self._fork(self.roles.keys() - self.children.keys())

    def _fork(self, nodes: Iterable[int]) -> None:
        nodes = [*nodes]
        each = [self._call(n) for n in nodes]
        children = fork_all("distkit.cluster.processes.roles:node", each)
        for n, child in zip(nodes, children, strict=True):
            self.children[n] = child
            child.hear(partial(self._said, n))
            child.on_exit(partial(self._ended, n))
            child.on_stop = partial(self._hear, n, "stopped")

    def _call(self, node: int) -> tuple[ForkServer, dict[str, Any]]:
        host, (kind, i) = self.host(node), self.roles[node]
        return host.server, {
            "node": self._node(kind, i, host),
            "folder": host.folder,
            "log": f"{kind}-{i}.log",
            "recording": self._recording,
        }

    def _await_scheduler(self, child: Child) -> None:
        """Wait until the scheduler reports where it listens to other machines."""
        child.on_exit(lambda status: self._set_endpoint(""))
        if not self._endpoint.result():
            log = Path(self._folder, "scheduler-0.log")  # from there
            said = log.read_text().splitlines()[-1:] if log.exists() else []
            raise StartError(
                f"the scheduler on {child.server.host} ended while starting ({child.status}), "
                f"before it could listen to the other machines. {''.join(said)}"
            )

    def _set_endpoint(self, endpoint: str) -> None:
        with suppress(futures.InvalidStateError):  # it has ended after it listened
            self._endpoint.set_result(endpoint)

    def host(self, node: int) -> ProcessHost:
        """The machine on which a server or the scheduler is."""
        role, i = self.roles[node]
        if role == "scheduler":
            return self._hosts[0]
        return next(host for host in self._hosts if i in host.servers)

    def worker(self, i: int, host: ProcessHost, life: int) -> Node | None:
        """The identity of a worker for its KVStore; None without servers."""
        return self._node("worker", i, host, life) if self.roles else None

    def _node(self, role: str, i: int, host: ProcessHost, life: int = 0) -> Node:
        from distkit.kvstore import Node

        return Node(
            role,
            i,
            self._plan.ranks,
            self._plan.servers,
            host.folder,
            keys=self._keys,
            life=life,
            heartbeat_timeout=self._heartbeat_timeout,
            address=host.address,
            scheduler_endpoint=self._endpoint.result()
            if host.address and self._endpoint.done()
            else "",
        )

    def _ended(self, node: int, status: int) -> None:
        """A process has ended.

        Before all have registered this ends the run. Later the backup of a server serves in its
        place, and workers report the end of the scheduler.
        """
        if self.closed:
            return
        if not self._begun:
            self.lost = node, status
            self._hear(node, "lost", status)
        elif node != max(self.roles):
            self._hear(node, "replaced", status)

    def leave(self, worker: int, life: int, how: str) -> None:
        """Tell the scheduler that a worker's process has ended: it may never have met it."""
        if self.roles:
            with suppress(OSError):  # it has ended, and so has the run
                self.children[max(self.roles)].channel.send(("left", worker, life, how))

    def _said(self, node: int, message: tuple[str, Any]) -> None:
        kind, what = message
        if kind == "flushed":
            self._flushed.release()
        elif kind == "listens":
            self._set_endpoint(what)
        elif kind == "begun":
            self._begun = True
        else:
            self._hear(node, kind, what)

    def settle(self, word: str = "flush", within: float = 2.0) -> None:
        """Have them hand over the events that they still hold; with "rest", the last ones.

        One that does not answer is waited for this long [s].
        """
        asked = 0
        for child in self.children.values():
            with suppress(OSError):
                if child.status is None:
                    child.channel.send(word)
                    asked += 1
        for _ in range(asked):
            self._flushed.acquire(timeout=within)

    def close(self, within: float = ENDED) -> None:
        """End all, and wait so long [s] until they have ended."""
        self.closed = True
        shut(self.children.values(), within)
