"""Starts, monitors and ends the servers and the scheduler of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from distkit.cluster.processes.forkserver import (
    KILL_TIMEOUT,
    Child,
    ForkServer,
    fork_all,
    shut_down,
)
from distkit.errors import StartError

if TYPE_CHECKING:
    from distkit.cluster.plan import Plan
    from distkit.cluster.process_host import ProcessHost
    from distkit.kvstore import Node


class Nodes:
    """The processes of the servers and the scheduler, with ids after the workers' (the ranks').

    Args:
        plan: the numbers of workers and servers.
        hosts: their machines; the scheduler runs on the first.
        on_message: called with a node's id, and the kind and content of its message; also with
            "replaced" and its exit status if a server ends during the run, and "lost" if the
            scheduler does, or any node before the run.
    """

    def __init__(
        self,
        plan: Plan,
        hosts: list[ProcessHost],
        on_message: Callable[[int, str, Any], None],
    ) -> None:
        self._plan, self._hosts, self._on_message = plan, hosts, on_message
        self.closed = self._registered = self._recording = False
        self._endpoint: futures.Future[str] = futures.Future()  # of the scheduler
        self.children: dict[int, Child] = {}
        #: A node whose end ends the run, and its exit status.
        self.lost: tuple[int, int] | None = None
        self._flushed = threading.Semaphore(0)  # counts nodes that have flushed their events
        #: Public and secret key of this run's nodes.
        self._keys: tuple[str, str] | None = None
        roles = [("server", i) for i in range(plan.servers)] + [("scheduler", 0)]
        self.roles = {plan.ranks + n: r for n, r in enumerate(roles if plan.servers else [])}

    def start(self, recording: bool) -> None:
        """Start all nodes."""
        self._recording = recording
        if self.roles:
            from distkit.kvstore.transport.sockets import new_keys

            self._keys = new_keys()
            scheduler = max(self.roles)
            if self._hosts[0].address:  # other machines need its endpoint
                self._fork([scheduler])
                self._await_scheduler(self.children[scheduler])
            self._fork(self.roles.keys() - self.children.keys())

    def _fork(self, nodes: Iterable[int]) -> None:
        nodes = [*nodes]
        requests = [self._fork_args(n) for n in nodes]
        children = fork_all("distkit.cluster.processes.roles:node", requests)
        for n, child in zip(nodes, children, strict=True):
            self.children[n] = child
            child.on_message(partial(self._handle_message, n))
            child.on_exit(partial(self._handle_exit, n))

    def _fork_args(self, node: int) -> tuple[ForkServer, dict[str, Any]]:
        host, (kind, i) = self.host(node), self.roles[node]
        return host.server, {
            "node": self._node(kind, i, host),
            "folder": host.folder,
            "log": f"{kind}-{i}.log",
            "recording": self._recording,
        }

    def _await_scheduler(self, child: Child) -> None:
        """Wait until the scheduler reports its endpoint for other machines."""
        child.on_exit(lambda status: self._set_endpoint(""))
        if not self._endpoint.result():
            raise StartError(
                f"the scheduler on {child.server.host} ended while starting ({child.status}), "
                "before the other machines could connect."
            )

    def _set_endpoint(self, endpoint: str) -> None:
        with suppress(futures.InvalidStateError):  # it ended after it was listening
            self._endpoint.set_result(endpoint)

    def host(self, node: int) -> ProcessHost:
        """Return the machine of a server or the scheduler."""
        role, i = self.roles[node]
        if role == "scheduler":
            return self._hosts[0]
        return next(host for host in self._hosts if i in host.servers)

    def worker(self, i: int, host: ProcessHost, life: int) -> Node | None:
        """Return the identity of a worker for its KVStore; None without servers."""
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
            address=host.address,
            scheduler_endpoint=self._endpoint.result()
            if host.address and self._endpoint.done()
            else "",
        )

    def _handle_exit(self, node: int, status: int) -> None:
        """Report the end of a node.

        The end of the scheduler, or of any node before all have registered, ends the run. Later
        a server's backup takes over.
        """
        if self.closed:
            return
        if not self._registered or node == max(self.roles):
            self.lost = node, status
            self._on_message(node, "lost", status)
        else:
            self._on_message(node, "replaced", status)

    def leave(self, node: int, life: int, how: str) -> None:
        """Notify the scheduler that a process has ended, perhaps before it registered."""
        if self.roles:
            with suppress(OSError):  # it has ended, and so has the run
                self.children[max(self.roles)].channel.send(("left", node, life, how))

    def _handle_message(self, node: int, message: tuple[str, Any]) -> None:
        kind, what = message
        if kind == "flushed":
            self._flushed.release()
        elif kind == "listens":
            self._set_endpoint(what)
        elif kind == "begun":
            self._registered = True
        else:
            self._on_message(node, kind, what)

    def settle(self, command: str = "flush", timeout: float = 2.0) -> None:
        """Make the nodes flush their events; after "rest" they stop recording.

        Wait up to ``timeout`` seconds for each node.
        """
        requests = 0
        for child in self.children.values():
            with suppress(OSError):
                if child.status is None:
                    child.channel.send(command)
                    requests += 1
        for _ in range(requests):
            self._flushed.acquire(timeout=timeout)

    def close(self, timeout: float = KILL_TIMEOUT) -> None:
        """End all nodes, and wait ``timeout`` seconds for their ends."""
        self.closed = True
        shut_down(self.children.values(), timeout)
