"""The servers and the scheduler of a cluster's parameter server: started, heard, replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.cluster.forkserver import Child, server

if TYPE_CHECKING:
    from distkit.cluster.plan import Plan


class Nodes:
    """Their processes, by id: after the workers, which are the ranks.

    Args:
        plan: how many there are.
        folder: the cluster's own.
        hear: called with a node's id and what it records.
    """

    def __init__(
        self, plan: Plan, folder: str, hear: Callable[[int, str, Any], None]
    ) -> None:
        self._plan, self._folder, self._hear = plan, folder, hear
        self.children: dict[int, Child] = {}
        self._flushed = threading.Semaphore(0)  # counts nodes that did as told
        self._recording = True
        #: Public and secret key, known to the nodes of this cluster alone.
        self.keys: tuple[str, str] | None = None
        roles = [("server", i) for i in range(plan.servers)] + [("scheduler", 0)]
        self.roles = {plan.ranks + n: r for n, r in enumerate(roles if plan.servers else [])}

    def start(self) -> None:
        """Start those that are not there: all at first, later those that have ended."""
        plan, folder = self._plan, self._folder
        missing = {n: r for n, r in self.roles.items()
                   if n not in self.children or self.children[n].status is not None}  # fmt: skip
        if not missing:
            return
        from distkit.kvstore import Node
        from distkit.kvstore.sockets import new_keys

        self.keys = self.keys or new_keys()
        for n in missing:  # who served in its place does so no more
            Path(folder, f"kv{n}").unlink(missing_ok=True)
        children = server().fork_all("distkit.cluster.processes:node", [
            {"node": Node(role, i, plan.ranks, plan.servers, folder, 0, self.keys),
             "folder": folder, "log": f"{role}-{i}.log"}
            for role, i in missing.values()
        ])  # fmt: skip
        for n, child in zip(missing, children, strict=True):
            self.children[n] = child
            child.hear(partial(self._said, n))
        self._recording = True

    def _said(self, node: int, message: tuple[str, Any]) -> None:
        kind, what = message
        if kind == "flushed":
            self._flushed.release()
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

    def meta(self, host: str) -> dict[str, dict[str, Any]]:
        """What a trace should say about them, by id."""
        return {
            str(n): {"name": role if role == "scheduler" else f"{role} {i}", "role": role,
                     "host": host, "pid": self.children[n].pid, "device": "cpu"}
            for n, (role, i) in self.roles.items() if n in self.children
        }  # fmt: skip
