"""Starts, monitors and terminates a cluster's engines and the processes of its runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from distkit.cluster.card import Card
from distkit.cluster.engines import Engines
from distkit.cluster.notebook import LOST_VARIABLES, Cell, warn
from distkit.cluster.plan import Plan
from distkit.cluster.processes.fork_client import server
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.ranks import ProcessHost, Ranks, this_machine
from distkit.errors import DistkitError, StartError


class Supervisor:
    """The processes of one cluster.

    ``stage`` describes the cluster's state, such as "importing torch", "ready" or "failed". The
    status card shows it.

    Args:
        plan: how many ranks there are, and which devices they use.
        start_hosts: a function that starts distkit on other machines, if there are any. It receives
            the cluster's folder and a callback that reports stages, and returns a
            :class:`distkit_hosts.remote.fleet.Fleet`.
    """

    def __init__(
        self,
        plan: Plan,
        start_hosts: Callable[[str, Callable[[str], None]], Any] | None = None,
    ) -> None:
        self.plan, self._fork_server = plan, server()
        self.folder = self._fork_server.make_folder(plan.processes)
        #: The machines that run the ranks: this one, or others once they have connected.
        self.hosts: list[ProcessHost] = [this_machine(plan, self.folder)]
        self.card = Card(self)
        self.stage, self.failure = "starting", ""
        self.start_time = time.monotonic()
        self.run: Conductor | None = None
        self.ranks: Ranks | None = None  # of the current run
        self.engines: Engines | None = None
        self.ready = threading.Event()
        # set once the latest run has ended and its processes, except engines, have been killed
        self.run_ended = threading.Event()
        self.closed = False
        self._engines_lock = threading.Lock()
        self._fleet = None if start_hosts is None else start_hosts(self.folder, self._set_stage)
        self._fork_server.on_loss.add(self._fail)
        threading.Thread(target=self._start, name="distkit-start", daemon=True).start()

    # -- starting ---------------------------------------------------------------

    def _start(self) -> None:
        try:
            if self._fleet is not None:
                self.hosts, self.plan = self._fleet.gather(self.plan)
            self._set_stage("importing torch")
            for host in self.hosts:
                host.server.on_loss.add(self._fail)
                host.server.preload("distkit.cluster.processes.roles:preload")
            for host in self.hosts:
                host.server.wait_until_idle()
            self._set_stage("ready")
        except Exception as error:
            self.failure = str(error)
            if not isinstance(error, DistkitError):
                self.failure = (
                    f"the cluster could not be started ({type(error).__name__}: {error}). The "
                    "machine may be overloaded: stop other programs and create the cluster again."
                )
            self._set_stage("failed")
            self._kill_all()
        finally:
            if self.closed:  # stopped during startup: kill processes that have been started since
                self._kill_all()
            self.ready.set()

    # -- running ----------------------------------------------------------------

    def prepare(self, number: int, fn: Any, payload: bytes) -> Ranks:
        """Return the ranks for a run of ``fn``, or the engines for a cell.

        ``payload`` is the pickled call.

        Raises:
            StartError: the cluster's folder does not exist, or the engines cannot be started.
        """
        if not Path(self.folder).exists():
            raise StartError(
                f"the cluster's folder {self.folder} no longer exists, and the ranks cannot "
                "connect without it. A program that cleans up temporary files may have deleted it. "
                "Create the cluster again."
            )
        if isinstance(fn, Cell):
            return self.start_engines()
        for host in self.hosts:
            host.server.prepare(fn, payload)
        return Ranks(self.plan, self.folder, number, hosts=self.hosts, on_change=self.card.refresh)

    @property
    def processes(self) -> Ranks:
        """The current run's ranks, else the engines, else ranks that have not started."""
        return self.ranks or self.engines or Ranks(self.plan, self.folder, hosts=self.hosts)

    def start_engines(self) -> Engines:
        """Return the engines; start new ones if there are none, or if they are not usable.

        Raises:
            StartError: the engines do not start.
        """
        with self._engines_lock:
            if (previous := self.engines) is not None:
                if previous.usable:
                    return previous
                previous.close()
                warn([] if previous.loss_reported else [LOST_VARIABLES])
            engines = self.engines = Engines(
                self.plan, self.folder, hosts=self.hosts, on_change=self.card.refresh
            )
            self._set_stage("starting engines")
            try:
                engines.start()
            except BaseException:
                engines.close(0)
                raise
            finally:
                self._set_stage("ready")
            return engines

    def submit(self, ranks: Ranks, run: Conductor, payload: bytes, options: dict[str, Any]) -> None:
        """Start the ranks' processes and send them the call.

        After any exception, including an interrupt, the ranks are terminated, because a call on
        only some of them would hang.

        Raises:
            StartError: a process cannot be started.
        """
        self.run_ended.clear()
        self.run, self.ranks = run, ranks
        try:
            if self.closed:
                raise StartError("the cluster was stopped. Create a new one.")
            ranks.submit(run, payload, options, partial(self._on_run_ended, run))
        except BaseException:
            ranks.close(0)
            self._on_run_ended(run)
            raise
        self.card.refresh()

    def _on_run_ended(self, run: Conductor) -> None:
        if self.run is run:
            self.run = self.ranks = None
            self.run_ended.set()
            self.card.refresh()

    # -- ending -----------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        """Mark the cluster as failed after a fork server has exited."""
        if self.closed or self.stage == "failed" or not self.ready.is_set():
            return
        self.failure = f"{reason.rstrip().removesuffix('.')}. Create the cluster again."
        self._set_stage("failed")
        if (run := self.run) is not None:
            run.abandon(reason)

    def restart(self) -> None:
        """Stop the current run and the engines; new engines start on next use."""
        if (run := self.run) is not None:
            run.abandon("the cluster was restarted")
            self.run_ended.wait()
        with self._engines_lock:
            if self.engines is not None:
                self.engines.close()
                self.engines = None

    def close(self) -> None:
        """Terminate all processes of this cluster and remove its folder."""
        if self.closed:
            return
        self.closed = True
        self._fork_server.on_loss.discard(self._fail)
        if (run := self.run) is not None:
            run.abandon("the cluster was stopped")
        self._kill_all()
        self.stage = "stopped"
        self.card.refresh()

    def _kill_all(self) -> None:
        for ranks in (self.ranks, self.engines):
            if ranks is not None:
                # do not wait: a finalizer may run in the thread that receives the exit notices
                ranks.close(0)
        if self._fleet is not None:
            self._fleet.close()
        self._fork_server.remove(self.folder)

    def _set_stage(self, stage: str) -> None:
        if not self.closed and self.stage != "failed":
            self.stage = stage
            self.card.refresh()
