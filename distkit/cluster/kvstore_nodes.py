"""The servers and the scheduler of a cluster's parameter server: started, watched, replaced."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.cluster.processes.forkserver import Child, ForkServer
from distkit.cluster.runs.report import MOST_REPLACEMENTS
from distkit.errors import StartError
from distkit.trace.info import RankInfo

if TYPE_CHECKING:
    from distkit.cluster.hosts.fleet import Place
    from distkit.cluster.plan import Plan
    from distkit.kvstore import Node


class Nodes:
    """Their processes, by id: after the workers, which are the ranks.

    Args:
        plan: how many there are.
        fork: what they are forked from.
        folder: the cluster's own.
        hear: called with a node's id and what it records; with "replaced" and the exit status of
            one that ends in the middle of a run; and with "missed" and the pid of a process that
            the scheduler takes for dead.
        heartbeat_timeout: how long a node may be silent before that [s].
    """

    def __init__(
        self,
        plan: Plan,
        fork: ForkServer,
        folder: str,
        hear: Callable[[int, str, Any], None],
        heartbeat_timeout: float,
    ) -> None:
        self._plan, self._fork, self._folder, self._hear = plan, fork, folder, hear
        self._heartbeat_timeout, self.closed = heartbeat_timeout, False
        self._starting = threading.Lock()
        self.run: int | None = None  # number of the run that goes on
        #: The other machines, if ranks are on such: so are these nodes, the scheduler on the first.
        self.places: list[Place] = []
        self._chief: futures.Future[str] = futures.Future()  # where the scheduler listens there
        self._begun = 0  # the latest run that the scheduler saw begin
        self.children: dict[int, Child] = {}
        self._losses: Counter[int] = Counter()  # of each node, in this run
        self._flushed = threading.Semaphore(0)  # counts nodes that have flushed their events
        self._recording = True
        #: Public and secret key, known to the nodes of this cluster alone.
        self.keys: tuple[str, str] | None = None
        roles = [("server", i) for i in range(plan.servers)] + [("scheduler", 0)]
        self.roles = {plan.ranks + n: r for n, r in enumerate(roles if plan.servers else [])}

    def start(self) -> None:
        """Start those that are not there: all at first, later those that have ended."""
        with self._starting:
            self._losses.clear()
            missing = {n: role for n, role in self.roles.items() if self._ended(n)}
            if missing and not self.closed:
                self._start(missing)

    def _ended(self, node: int) -> bool:
        return node not in self.children or self.children[node].status is not None

    def _start(self, missing: dict[int, tuple[str, int]]) -> None:
        from distkit.kvstore.transport.sockets import new_keys

        self.keys = self.keys or new_keys()
        scheduler = max(self.roles)
        if self.places and not self._chief.done():
            self._fork_all({scheduler: missing.pop(scheduler)})
            self._await_chief(self.children[scheduler])
        self._fork_all(missing)

    def _fork_all(self, missing: dict[int, tuple[str, int]]) -> None:
        of: dict[ForkServer, list[int]] = {}
        for n in missing:
            place = self.place(n)
            of.setdefault(self._fork if place is None else place.server, []).append(n)
        for server, mine in of.items():
            told = [self._arguments(missing[n], self.place(n)) for n in mine]
            children = server.fork_all("distkit.cluster.processes.roles:node", told)
            for n, child in zip(mine, children, strict=True):
                self.children[n] = child
                child.hear(partial(self._said, n))
                child.on_exit(partial(self._replace, n))
                child.on_stop = partial(self._hear, n, "stopped")

    def _arguments(self, role: tuple[str, int], place: Place | None) -> dict[str, Any]:
        kind, i = role
        return {
            "node": self.node(kind, i, place),
            "folder": self._folder if place is None else place.folder,
            "log": f"{kind}-{i}.log",
            "recording": self._recording,
        }

    def _await_chief(self, child: Child) -> None:
        """Wait until the scheduler reports where it listens to other machines."""
        child.on_exit(lambda status: self._set_chief(""))
        if not self._chief.result():
            self._chief = futures.Future()
            log = Path(self._folder, "scheduler-0.log")  # from there
            said = log.read_text().splitlines()[-1:] if log.exists() else []
            raise StartError(
                f"the scheduler on {child.server.host} ended while starting ({child.status}), "
                f"before it could listen to the other machines. {''.join(said)}"
            )

    def _set_chief(self, endpoint: str) -> None:
        with suppress(futures.InvalidStateError):  # where another was before
            self._chief.set_result(endpoint)

    def place(self, node: int) -> Place | None:
        """The other machine on which a server or the scheduler is; None: it is here."""
        role, i = self.roles.get(node, ("", 0))
        if role == "scheduler":
            return self.places[0] if self.places else None
        return next((p for p in self.places if role == "server" and i in p.servers), None)

    def node(self, role: str, i: int, place: Place | None = None) -> Node:
        """The identity of a server, the scheduler or a worker, perhaps on another machine."""
        from distkit.kvstore import Node

        return Node(
            role,
            i,
            self._plan.ranks,
            self._plan.servers,
            self._folder if place is None else place.folder,
            run=-1,
            keys=self.keys,
            heartbeat_timeout=self._heartbeat_timeout,
            address="" if place is None else place.server.facts["address"],
            chief=self._chief.result() if place is not None and self._chief.done() else "",
        )

    def _replace(self, node: int, status: int) -> None:
        """A process has ended: start another in its place, a few times in a run.

        In a run that has begun it serves from the next one on.
        """
        if self.closed:
            return
        if self.run is not None and self.run == self._begun and node != max(self.roles):
            self._hear(node, "replaced", status)
        threading.Thread(target=self._start_again, args=(node,), daemon=True).start()

    def _start_again(self, node: int) -> None:
        with self._starting, suppress(StartError):  # if all of them fail, the next run raises
            if self._ended(node) and not self.closed and self._losses[node] < MOST_REPLACEMENTS:
                self._losses[node] += 1
                self._start({node: self.roles[node]})

    def leave(self, run: int, worker: int, life: int, how: str) -> None:
        """Tell the scheduler that a worker's process has ended: it may never have met it."""
        if self.roles:
            with suppress(OSError):  # it has ended, and so has the run
                self.children[max(self.roles)].channel.send(("left", run, worker, life, how))

    def _said(self, node: int, message: tuple[str, Any]) -> None:
        kind, what = message
        if kind == "flushed":
            self._flushed.release()
        elif kind == "listens":
            self._set_chief(what)
        elif kind == "begun":
            self._begun = what
        else:
            self._hear(node, kind, what)

    def settle(self) -> None:
        """Have them hand over the events that they still hold."""
        self._tell("flush")

    def record(self, whether: bool) -> None:
        """Have them record the next run, or not."""
        if whether != self._recording:
            self._recording = whether
            self._tell("record" if whether else "rest")

    def _tell(self, word: str) -> None:
        asked = 0
        for child in self.children.values():
            with suppress(OSError):
                if child.status is None:
                    child.channel.send(word)
                    asked += 1
        for _ in range(asked):
            self._flushed.acquire(timeout=2)

    def info(self) -> dict[int, RankInfo]:
        """Facts of each node for a trace, by id."""
        return {
            n: self.children[n].about(role if role == "scheduler" else f"{role} {i}", role)
            for n, (role, i) in self.roles.items()
            if n in self.children
        }
