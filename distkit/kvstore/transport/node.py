"""The identity of a process in a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """One process in a cluster of W workers, S servers and one scheduler.

    Args:
        role: "worker", "server" or "scheduler".
        index: its number within the role, from 0.
        workers: how many workers there are, W.
        servers: how many servers there are, S.
        folder: shared by the nodes of one cluster and readable by its user alone (0700): the
            sockets in it are protected by its permissions.
        keys: public and secret key of the run (CurveZMQ); None to rely on the folder alone.
        life: how many processes were this node before.
        heartbeat_timeout: a node whose heartbeats are missing for this long counts as dead [s],
            and none before half of it. Heartbeats come from ZeroMQ's own thread: a process that
            computes, whatever lock it holds, goes on sending them.
        address: where nodes have several hosts: of this host's interface that leads to the others.
        scheduler_endpoint: of the scheduler, if that is on another host.

    >>> Node("server", 1, workers=4, servers=2, folder="f").id
    5
    """

    role: str
    index: int
    workers: int
    servers: int
    folder: str
    keys: tuple[str, str] | None = field(default=None, repr=False)
    life: int = 0
    heartbeat_timeout: float = 30.0
    address: str = ""
    scheduler_endpoint: str = ""

    @property
    def id(self) -> int:
        """Its number in the whole cluster: workers first, then servers, then the scheduler."""
        return self.index + {"worker": 0, "server": self.workers}.get(self.role, self.scheduler)

    @property
    def scheduler(self) -> int:
        """The id of the scheduler."""
        return self.workers + self.servers

    def name(self, node: int) -> str:
        """A node of this cluster in words.

        >>> Node("scheduler", 0, workers=4, servers=2, folder="f").name(5)
        'server 1'
        """
        if node == self.scheduler:
            return "the scheduler"
        return f"worker {node}" if node < self.workers else f"server {node - self.workers}"

    def path(self, node: int) -> Path:
        """The socket of a server or the scheduler."""
        return Path(self.folder, f"kv{node}")

    def endpoint(self, node: int) -> str:
        """The endpoint of a server of this host, or of the scheduler."""
        if self.scheduler_endpoint and node == self.scheduler:
            return self.scheduler_endpoint
        return f"ipc://{self.path(node)}"

    def way(self, endpoint: str) -> str:
        """The way from this node to an endpoint: TCP, unless both are in the same folder.

        >>> node = Node("worker", 0, workers=4, servers=2, folder="/tmp/f")
        >>> node.way("tcp://10.0.0.2:4711 ipc:///tmp/f/kv4")
        'ipc:///tmp/f/kv4'
        >>> node.way("tcp://10.0.0.2:4711 ipc:///tmp/of-another-host/kv4")
        'tcp://10.0.0.2:4711'
        """
        far, _, near = endpoint.partition(" ")
        if not far.startswith("tcp://"):  # all nodes are on one host
            return endpoint
        return near if Path(near.removeprefix("ipc://")).parent == Path(self.folder) else far
