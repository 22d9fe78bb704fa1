"""The servers and the scheduler of a run: started, watched, ended with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.cluster.processes.forkserver import ENDED, Child, ForkServer, fork_all, server, shut
from distkit.errors import StartError

if TYPE_CHECKING:
    from distkit.cluster.hosts.fleet import Place
    from distkit.cluster.plan import Plan
    from distkit.kvstore import Node


class Nodes:
    """Their processes, by id: after the workers, which are the ranks.

    Args:
        plan: how many there are.
        folder: the cluster's own.
        places: the other machines, if ranks are on such: so are these nodes, the scheduler on the
            first.
        hear: called with a node's id and what it records; with "replaced" and the exit status of
            a server that ends in the middle of the run; with "lost" if a node ends before it; and
            with "missed" and the pid of a process that the scheduler takes for dead.
        heartbeat_timeout: how long a node may be silent before that [s].
    """

    def __init__(
        self,
        plan: Plan,
        folder: str,
        places: list[Place],
        hear: Callable[[int, str, Any], None],
        heartbeat_timeout: float,
    ) -> None:
        self._plan, self._folder, self._hear = plan, folder, hear
        self._places, self._heartbeat_timeout = places, heartbeat_timeout
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
            if self._places:  # the others have to know where it listens
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
        place, (kind, i) = self.place(node), self.roles[node]
        return server() if place is None else place.server, {
            "node": self._node(kind, i, place),
            "folder": self._folder if place is None else place.folder,
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

    def place(self, node: int) -> Place | None:
        """The other machine on which a server or the scheduler is; None: it is here."""
        role, i = self.roles.get(node, ("", 0))
        if role == "scheduler":
            return self._places[0] if self._places else None
        return next((p for p in self._places if role == "server" and i in p.servers), None)

    def worker(self, i: int, place: Place | None, life: int) -> Node | None:
        """The identity of a worker for its KVStore; None without servers."""
        return self._node("worker", i, place, life) if self.roles else None

    def _node(self, role: str, i: int, place: Place | None, life: int = 0) -> Node:
        from distkit.kvstore import Node

        return Node(
            role,
            i,
            self._plan.ranks,
            self._plan.servers,
            self._folder if place is None else place.folder,
            keys=self._keys,
            life=life,
            heartbeat_timeout=self._heartbeat_timeout,
            address="" if place is None else place.server.facts["address"],
            scheduler_endpoint=self._endpoint.result()
            if place is not None and self._endpoint.done()
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
