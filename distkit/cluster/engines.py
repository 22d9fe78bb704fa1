"""Runs ``%%ranks`` cells and ``%px`` on an ipyparallel cluster with one engine per rank.

Unlike the ranks of a run, engines and their variables persist between cells. Engines start on first
use. If a cell cannot be interrupted, the engines that run it are killed. Cells cannot use a
parameter server, because servers exist only for the duration of a run.
"""

from __future__ import annotations

import json
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

from distkit.cluster.processes.fork_client import KILL_TIMEOUT, Child, fork_all, server, shut_down
from distkit.cluster.processes.roles import execute
from distkit.cluster.runs.conductor import Conductor
from distkit.cluster.runs.ranks import Ranks
from distkit.errors import StartError

#: The hub's heartbeat period [ms] and the number of heartbeats that an engine may miss. This number
#: is large because a busy engine responds slowly; the fork server reports exits immediately.
HEARTBEAT_PERIOD, MAX_MISSES = 50, 1200

#: Timeout for the engines to register [s]; long enough for busy machines.
REGISTRATION_TIMEOUT = 120.0


class Engines(Ranks):
    """Ranks that run cells.

    ``usable`` is False after a process has exited, or if the process group is not intact.
    ``loss_reported`` is False if a process exited while no cell was running, so no cell has
    warned about the lost variables.
    """

    role, kind = "distkit.cluster.processes.roles:engine", "engine"
    usable = loss_reported = True
    client: Any = None
    _controller: Child | None = None
    _connection = ""  # the engines' connection information, as JSON

    def start(self) -> None:
        """Start the controller and the engines and wait until all have registered."""
        self._name, self.servers = f"run-{secrets.token_hex(4)}", {}
        for fork in {server(), *(host.server for host in self.hosts)}:
            fork.preload("distkit.cluster.processes.roles:preload_engines")
        controller = {
            "target": "distkit.cluster.processes.roles:controller",
            "folder": self.folder,
            "log": "controller.log",
            "period": HEARTBEAT_PERIOD,
            "misses": MAX_MISSES,
        }
        [self._controller] = fork_all([(server(), controller)])
        try:
            connection = self._controller.channel.recv()
        except EOFError:
            raise StartError(
                "the ipyparallel controller did not start. " + self._log("controller.log")
            ) from None
        self._controller.on_message(lambda message: None)
        self._controller.on_exit(partial(self._on_exit, -1, self._controller))
        import ipyparallel

        self.client = ipyparallel.Client(
            connection["client"],
            profile_dir=self.folder,
            ipython_dir=self.folder,
            timeout=REGISTRATION_TIMEOUT,
        )
        self._connection = json.dumps(connection["engine"])
        self._fork(range(self.plan.ranks))
        self._wait_for_registration()

    def _fork_args(self, node: int) -> dict[str, Any]:
        folder = self.host(node).folder  # contains the controller's sockets on that machine
        local = json.loads(self._connection.replace(self.folder, folder))
        return {**super()._fork_args(node), "connection": local, "profile": folder}

    def _wait_for_registration(self) -> None:
        deadline = time.monotonic() + REGISTRATION_TIMEOUT
        while len(self.client.ids) < self.plan.ranks:
            if not self.usable:
                logs = "\n".join(
                    self._log(f"engine-{r}.log")
                    for r, child in self.children.items()
                    if child.status is not None
                )
                raise StartError(f"an engine exited while it was starting. {logs}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"the engines did not register within {REGISTRATION_TIMEOUT:.0f} s. The "
                    "machine may be overloaded: stop other programs, or use fewer ranks."
                )
            time.sleep(0.005)

    def _log(self, name: str) -> str:
        """Return the tail of a process's log, without the controller's own messages."""
        log = Path(self.folder, name)
        text = log.read_text(errors="replace")[-20_000:] if log.exists() else ""
        return "\n".join(line for line in text.splitlines() if "[IPController]" not in line)

    def _send(self, rank: int, payload: bytes, options: dict[str, Any]) -> None:
        self.client[rank].apply_async(execute, payload, options)

    def _clean_up(self, run: Conductor) -> None:
        if not run.intact:
            self.usable = False

    def _on_exit(self, rank: int, child: Child, status: int) -> None:
        if self.usable:
            self.usable, self.loss_reported = False, self.run is not None and not self.run.finished
        if child is self._controller and self.run is not None and not self.run.finished:
            self.run.abandon(
                "the ipyparallel controller exited, which disconnected the engines. Run the cell "
                "again"
            )
        super()._on_exit(rank, child, status)

    def close(self, timeout: float = KILL_TIMEOUT) -> None:
        """Terminate all processes, including the controller."""
        self.usable = False
        if self.client is not None:
            self.client.close()
        if self._controller is not None:
            shut_down([self._controller], timeout)
        super().close(timeout)
