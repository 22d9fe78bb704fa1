"""distkit's ranks as an ipyparallel launcher: ``ipyparallel.Cluster(engines="distkit")``.

Registered under the entry point ``ipyparallel.engine_launchers``, so that ipyparallel's own
clusters and ``ipcluster start --engines=distkit`` get ranks that are forked from one warm
process, know each other through ``torch.distributed``, and end with their starter.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

from ipyparallel.cluster.launcher import EngineLauncher
from traitlets import Unicode

from distkit.cluster import limits
from distkit.cluster.plan import make_plan
from distkit.cluster.processes.forkserver import Child, ForkServer, server
from distkit.cluster.processes.rank_spec import Spec, free_port, surroundings


class ForkEngineSetLauncher(EngineLauncher):  # type: ignore[misc]  # has no type hints
    """Forks a set of engines, each a rank of one process group."""

    device = Unicode("auto", config=True, help="'auto', 'cpu', 'cuda' or 'cuda:0'")
    backend = Unicode("auto", config=True, help="'auto', 'gloo' or 'nccl'")

    _fork: ForkServer
    _children: list[Child]
    _folder = ""

    def find_args(self) -> list[str]:
        """The name of this engine in messages."""
        return ["distkit ranks"]

    def start(self, n: int) -> list[int]:
        """Fork ``n`` engines; ipyparallel has started the controller before."""
        plan = make_plan(
            n,
            0,
            self.device,
            self.backend,
            cpus=limits.cpus(),
            memory=limits.memory(),
            gpus=server().gpus(self.device),
        )
        connection = json.loads(self.environment["IPP_CONNECTION_INFO"])
        self._fork = server()
        self._folder = self._fork.make_folder(n)
        self._fork.preload("distkit.cluster.processes.preload:hook")
        around = {**surroundings(), "port": free_port()}
        self._children = self._fork.fork_all(
            "distkit.cluster.processes.roles:engine",
            [
                {
                    "spec": Spec(
                        r,
                        n,
                        self._folder,
                        f"rank-{r}",
                        plan.backend,
                        plan.seats[r],
                        plan.threads,
                        **around,
                    ),
                    "connection": connection,
                    "profile": self.profile_dir,
                    "folder": self._folder,
                    "log": f"rank-{r}.log",
                }
                for r in range(n)
            ],
        )
        for child in self._children:
            child.on_exit(lambda status: self.loop.add_callback(self._ended))
        pids = [child.pid for child in self._children]
        self.notify_start(pids)
        return pids

    def _ended(self) -> None:
        """One engine has ended; when all have, the set has."""
        codes = [child.status for child in self._children]
        if None not in codes:
            first_bad = next((c for c in codes if c), 0)
            self.notify_stop({"exit_code": first_bad, "engines": codes})

    def signal(self, sig: int) -> None:
        """End the engines: forked ranks know no gentler signal."""
        self._fork.kill(self._children)

    async def stop(self) -> None:
        """End the engines and remove their folder."""
        self.signal(9)
        await self.join()
        self._fork.remove(self._folder)

    async def join(self, timeout: float | None = None) -> None:
        """Wait until all engines have ended."""

        async def ended() -> None:
            while any(child.status is None for child in self._children):
                await asyncio.sleep(0.01)

        await asyncio.wait_for(ended(), timeout)

    def get_output(self, remove: bool = False) -> str:
        """The engines' low-level output."""
        logs = sorted(Path(self._folder).glob("rank-*.log")) if self._folder else []
        texts = []
        for log in logs:
            with suppress(FileNotFoundError):  # the folder goes when the last engine has
                texts.append(log.read_text(errors="replace"))
        return "\n".join(texts)
