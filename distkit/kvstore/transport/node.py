"""The identity of a process in a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """One process in a cluster of W workers, S servers and one scheduler.

    Args:
        role: "worker", "server" or "scheduler".
        index: its number within its role, from 0.
        workers: number of workers, W.
        servers: number of servers, S.
        folder: shared by the nodes of one cluster, and readable only by its user (0700), which
            protects the sockets in it.
        keys: public and secret key of the run (CurveZMQ); None to rely on the folder's permissions.
        incarnation: number of earlier processes of this node.
        address: the address of this host's interface to the other hosts, if there are any.
        scheduler_endpoint: the scheduler's endpoint, if it is on another host.

    >>> Node("server", 1, workers=4, servers=2, folder="f").id
    5
    """

    role: str
    index: int
    workers: int
    servers: int
    folder: str
    keys: tuple[str, str] | None = field(default=None, repr=False)
    incarnation: int = 0
    address: str = ""
    scheduler_endpoint: str = ""

    @property
    def id(self) -> int:
        """The number in the cluster: workers first, then servers, then the scheduler."""
        return self.index + {"worker": 0, "server": self.workers}.get(self.role, self.scheduler)

    @property
    def scheduler(self) -> int:
        """The id of the scheduler."""
        return self.workers + self.servers

    def name(self, node: int) -> str:
        """Return the name of a node of this cluster.

        >>> Node("scheduler", 0, workers=4, servers=2, folder="f").name(5)
        'server 1'
        """
        if node == self.scheduler:
            return "the scheduler"
        return f"worker {node}" if node < self.workers else f"server {node - self.workers}"

    def endpoint(self, node: int) -> str:
        """Return the endpoint of a server on this host, or of the scheduler."""
        if self.scheduler_endpoint and node == self.scheduler:
            return self.scheduler_endpoint
        return f"ipc://{self.folder}/kv{node}"

    def route(self, endpoint: str) -> str:
        """Return the route from this node to an endpoint: TCP unless both are in one folder.

        >>> node = Node("worker", 0, workers=4, servers=2, folder="/tmp/f")
        >>> node.route("tcp://10.0.0.2:4711 ipc:///tmp/f/kv4")
        'ipc:///tmp/f/kv4'
        >>> node.route("tcp://10.0.0.2:4711 ipc:///tmp/of-another-host/kv4")
        'tcp://10.0.0.2:4711'
        """
        remote, _, local = endpoint.partition(" ")
        if not remote.startswith("tcp://"):  # all nodes are on one host
            return endpoint
        return local if Path(local.removeprefix("ipc://")).parent == Path(self.folder) else remote
