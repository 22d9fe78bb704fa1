"""ipyparallel's cluster behind ``%%ranks`` cells and ``%px``: one engine a rank.

Unlike the ranks of a run, engines stay from cell to cell with their variables. They are started
with the first cell. A cell that has to be ended from outside costs its engines.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

from distkit.cluster.processes.forkserver import ENDED, Child, server, shut
from distkit.cluster.processes.roles import execute
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.outcome import Failure, Outcome
from distkit.cluster.runs.ranks import Ranks
from distkit.errors import StartError

#: Heartbeat of the hub [ms], and how many may fail: a starved laptop is not a dead engine,
#: and the fork server reports the deaths of processes at once.
PERIOD, MISSES = 50, 1200

#: How long the engines may take to register [s]: generous, for laptops under load.
PATIENCE = 120.0


class Engines(Ranks):
    """Ranks that run cells.

    ``usable`` is False once a process has ended, or was left in the middle of something;
    ``told`` says whether a run has warned of that.
    """

    role, kind = "distkit.cluster.processes.roles:engine", "engine"
    usable = told = True
    client: Any = None
    _controller: Child | None = None

    def start(self, *, recording: bool = True) -> None:
        """Start the controller and the engines, and wait until all have registered.

        Raises:
            StartError: they do not start.
        """
        self._meeting = f"store-{secrets.token_hex(4)}"
        for fork in {server(), *(host.server for host in self.hosts)}:
            fork.preload("distkit.cluster.processes.preload:engines")
        self._controller = server().fork(
            "distkit.cluster.processes.roles:controller",
            folder=self.folder,
            log="controller.log",
            period=PERIOD,
            misses=MISSES,
        )
        try:
            connection = self._controller.channel.recv()
        except EOFError:
            raise StartError(
                "ipyparallel's controller did not start. " + self._log("controller.log")
            ) from None
        self._controller.hear(lambda message: None)
        self._controller.on_exit(lambda status: self._spoil())
        import ipyparallel

        self.client = ipyparallel.Client(
            connection["client"],
            profile_dir=self.folder,
            ipython_dir=self.folder,
            timeout=PATIENCE,
        )
        self._connect(connection["engine"])
        self._await_registration()

    def _connect(self, connection: dict[str, Any]) -> None:
        """Fork the engines; each finds the controller's sockets in its machine's folder."""
        text = json.dumps(connection)
        for r in range(self.plan.ranks):
            folder = self.host(r).folder
            seen = json.loads(text.replace(self.folder, folder))
            self._fork([r], connection=seen, profile=folder)

    def _await_registration(self) -> None:
        end, wanted = time.monotonic() + PATIENCE, {*range(self.plan.ranks)}
        while missing := wanted - {*self.client.ids}:
            ended = [r for r in missing if self.ranks[r].status is not None]
            if ended:
                raise StartError(
                    f"rank {ended[0]} ended while starting ({self.ranks[ended[0]].status}). "
                    f"{self._log(f'engine-{ended[0]}.log')}"
                )
            if not self.usable:
                raise StartError("the engines ended while they were starting. Run the cell again.")
            if time.monotonic() > end:
                raise StartError(
                    f"ranks {sorted(missing)} did not report within {PATIENCE:.0f} s. The machine "
                    "may be overloaded: stop other programs, or ask for fewer ranks."
                )
            time.sleep(0.005)

    def _log(self, name: str) -> str:
        """The end of a process's low-level output."""
        log = Path(self.folder, name)
        text = log.read_text(errors="replace")[-20_000:] if log.exists() else ""
        return "\n".join(line for line in text.splitlines() if "[IPController]" not in line)

    def begin(self, number: int, recording: bool) -> None:
        """Start the parameter server of the cell that comes, if the cluster has one."""
        self.nodes = self._nodes()
        try:
            self.nodes.start(recording)
        except BaseException:
            self.nodes.close()
            raise

    def _send(self, rank: int, payload: bytes, options: dict[str, Any]) -> None:
        run = self.run

        def on_reply(reply: Any) -> None:
            """What the rank said itself counts, unless it could say nothing."""
            error = reply.exception()
            if error is not None and self.ranks[rank].status is None and run is not None:
                run.add_outcome(Outcome(rank, error=Failure(type(error).__name__, str(error))))

        answer = self.client[rank].apply_async(execute, payload, options)
        answer.add_done_callback(on_reply)

    def _tidy_up(self, run: Conductor) -> None:
        self.nodes.close()
        if not run.intact:
            self.usable = False

    def _on_exit(self, rank: int, child: Child, status: int) -> None:
        self._spoil()
        super()._on_exit(rank, child, status)

    def _spoil(self) -> None:
        if self.usable:
            self.usable, self.told = False, self.run is not None and not self.run.finished

    def close(self, within: float = ENDED) -> None:
        """End all processes, the controller's, too."""
        self.usable = False
        if self.client is not None:
            self.client.close()
        if self._controller is not None:
            shut([self._controller], within)
        super().close(within)
