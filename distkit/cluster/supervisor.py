"""The processes of one cluster: those of the run that goes on, and the engines of its cells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from distkit.cluster.card import Card
from distkit.cluster.engines import Engines
from distkit.cluster.plan import Plan
from distkit.cluster.process_host import Fleet, ProcessHost
from distkit.cluster.processes import folders
from distkit.cluster.processes.forkserver import server
from distkit.cluster.runs import report
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.ranks import Ranks, this_machine
from distkit.errors import DistkitError, StartError

_WIPED = (
    "the cluster's folder {} was removed, perhaps by a program that cleans temporary folders, and "
    "its ranks cannot meet without it."
)


_Kind = TypeVar("_Kind", bound=Ranks)


class Supervisor:
    """The processes of one cluster.

    ``stage`` says how far starting has come; the card shows that, and each process's state.

    Args:
        plan: how many ranks there are, and where.
        heartbeat_timeout: how long a worker or a server may be silent [s].
        start_hosts: starts the other machines, if ranks are to be there: called with the cluster's
            folder, and with what is to be told of the stages.
    """

    def __init__(
        self,
        plan: Plan,
        heartbeat_timeout: float,
        start_hosts: Callable[[str, Callable[[str], None]], Fleet] | None = None,
    ) -> None:
        self.plan, self._fork = plan, server()
        self.folder = self._fork.make_folder(plan.processes, True)
        #: The machines that the ranks are on; of others, once they are there.
        self.hosts: list[ProcessHost] = [this_machine(plan, self.folder)]
        self.card, self._heartbeat_timeout = Card(self), heartbeat_timeout
        self.stage, self.failure = "starting", ""
        self.started = time.monotonic()
        self.run: Conductor | None = None
        self.ranks: Ranks | None = None  # of the run that goes on
        self.engines: Engines | None = None
        self.ready = threading.Event()
        self.settled = threading.Event()  # the latest run has ended, with its processes
        self.closed = self.forked = False  # forked: it is the parent's of this process
        self._failing, self._starting = threading.Lock(), threading.Lock()
        self._fleet = None if start_hosts is None else start_hosts(self.folder, self._stage)
        self._deaf = [self._fork.on_loss(self._fail)]  # to hear no loss any more
        threading.Thread(target=self._start, name="distkit-start", daemon=True).start()

    # -- starting ---------------------------------------------------------------

    def _start(self) -> None:
        try:
            if self._fleet is not None:
                self.hosts, self.plan = self._fleet.gather(self.plan)
                self._deaf += [host.server.on_loss(self._fail) for host in self.hosts]
            self._stage("importing torch")
            self._import()
            self._stage("ready")
        except Exception as error:
            self.failure = self._explain(error)
            self._stage("failed")
            self._end_all()
        finally:
            if self.closed:  # stopped while starting: end also what was started since
                self._end_all()
            self.ready.set()

    def _import(self) -> None:
        """Have the fork servers import what ranks need, and wait for it."""
        for host in self.hosts:
            host.server.preload("distkit.cluster.processes.preload:hook")
        for host in self.hosts:
            host.server.wait_until_idle()

    def _explain(self, error: Exception) -> str:
        if not self._fork.alive:
            return self._again(self._fork.why())
        if isinstance(error, DistkitError):
            return str(error)
        return (
            f"the cluster could not be started ({type(error).__name__}: {error}). The machine may "
            "be overloaded: stop other programs and make the cluster again."
        )

    # -- running ----------------------------------------------------------------

    def fork(self, number: int, *, cell: bool, recording: bool) -> Ranks:
        """The ranks for a run: new ones, or for a cell the engines.

        Raises:
            StartError: they cannot be started.
        """
        self._check_folder()
        if self.stage == "failed":
            raise StartError(self.failure)
        if cell:
            engines = self.start_engines()
            engines.begin(number, recording)
            return engines
        ranks = self._made(Ranks, number)
        try:
            ranks.start(recording=recording)
        except BaseException:
            ranks.close(0)
            raise
        return ranks

    @property
    def processes(self) -> Ranks:
        """The ranks of the current run, else the engines, else ranks that have not started."""
        return self.ranks or self.engines or Ranks(self.plan, self.folder, hosts=self.hosts)

    def _made(self, kind: type[_Kind], number: int) -> _Kind:
        return kind(
            self.plan,
            self.folder,
            number,
            hosts=self.hosts,
            heartbeat_timeout=self._heartbeat_timeout,
            on_change=self.card.refresh,
        )

    def start_engines(self) -> Engines:
        """The engines; new ones if there are none, or if one of them has ended.

        Raises:
            StartError: they do not start.
        """
        with self._starting:
            before = self.engines
            if before is not None and before.usable:
                return before
            if before is not None:
                before.close()
                report.warn([] if before.told else [report.LOST_CELLS])
            engines = self.engines = self._made(Engines, 0)
            self._stage("starting engines")
            try:
                engines.start()
            except BaseException:
                engines.close()
                raise
            finally:
                self._stage("ready")
            return engines

    def submit(self, ranks: Ranks, run: Conductor, payload: bytes, options: dict[str, Any]) -> None:
        """Hand the call to every rank; what comes back goes to ``run`` from another thread."""
        self.settled.clear()
        self.run, self.ranks = run, ranks
        if self.stage == "failed":  # since the ranks were forked
            run.cluster_failure = self.failure
        try:
            if self.closed:
                raise StartError("the cluster was stopped.")
            ranks.submit(run, payload, options, self._on_settled)
        except BaseException:
            ranks.close(0)
            self._on_settled()
            raise
        self.card.refresh()

    def _on_settled(self) -> None:
        self.run = self.ranks = None
        self.settled.set()
        self.card.refresh()

    # -- the end ----------------------------------------------------------------

    def _fail(self, why: str) -> None:
        """The cluster is over: the fork server has ended, or the folder was removed."""
        with self._failing:
            if self.closed or self.stage == "failed" or not self.ready.is_set():
                return
            self.failure = self._again(why)
            self._stage("failed")
        run, ranks = self.run, self.ranks
        if run is not None:
            run.cluster_failure = why
        if ranks is not None:
            ranks.end(ranks.ranks)
        threading.Thread(target=self._tidy, name="distkit-tidy", daemon=True).start()

    def _check_folder(self) -> None:
        """Without their folder ranks cannot meet, and no other can be started."""
        if not folders.is_there(self.folder):
            self._fail(_WIPED.format(self.folder))

    def _again(self, why: str) -> str:
        """The reason why the cluster is over, and what to do."""
        ended = why.rstrip().removesuffix(".")
        return f"{ended}. Make the cluster again: dk.Cluster({self.plan.wish})."

    def _tidy(self) -> None:
        """End what is left of a cluster that is over, when its last run has told all."""
        if self.run is not None:
            self.settled.wait()
        self._end_all()

    def restart(self) -> None:
        """End the current run and the engines; new engines start with the next cell."""
        if (run := self.run) is not None:
            run.abandon("the cluster was restarted")
            self.settled.wait()
        with self._starting:
            if self.engines is not None:
                self.engines.close()
                self.engines = None

    def close(self) -> None:
        """End every process of this cluster and remove its folder."""
        if self.closed:
            return
        self.closed = True
        for deafen in self._deaf:
            deafen()
        if (run := self.run) is not None:
            run.abandon("the cluster was stopped")
        self._end_all()
        self.stage = "stopped"
        self.card.refresh()

    def _end_all(self) -> None:
        for ranks in (self.ranks, self.engines):
            if ranks is not None:
                ranks.close(0)  # a finalizer may run in the thread that hears of their ends
        if self._fleet is not None:
            self._fleet.close()
        self._fork.remove(self.folder)

    def _stage(self, stage: str) -> None:
        if not self.closed and self.stage != "failed":
            self.stage = stage
            self.card.refresh()
