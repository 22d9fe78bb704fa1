"""``TF_CONFIG``: which tasks a cluster has, and which of them this process is."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distkit.errors import StrategyError

#: The kinds of tasks, in the order of their ranks.
TASKS = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class TFConfig:
    """A cluster, and this process's place in it.

    Args:
        cluster: for each kind of task the addresses, "host:port", of its processes.
        type: this process's kind of task.
        index: its number among them.

    Source:
        TensorFlow, "Multi-worker training with Keras", ``TF_CONFIG``.

    >>> config = TFConfig.parse('{"cluster": {"worker": ["a:1", "b:1"]}, "task":'
    ...                         ' {"type": "worker", "index": 1}}')
    >>> config.rank, config.world_size, config.is_chief, config.master
    (1, 2, False, 'a:1')
    """

    cluster: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    type: str = "worker"
    index: int = 0

    @classmethod
    def from_environment(cls) -> TFConfig | None:
        """The configuration in the environment variable ``TF_CONFIG``; None if it is not set.

        Raises:
            StrategyError: it is malformed.
        """
        text = os.environ.get("TF_CONFIG")
        return cls.parse(text) if text else None

    @classmethod
    def parse(cls, text: str) -> TFConfig:
        """Read and check a configuration.

        Raises:
            StrategyError: it is not valid JSON, which the error places, or fields are missing or
                wrong, each of which it names.
        """
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            line = text.splitlines()[error.lineno - 1 : error.lineno] or [""]
            raise StrategyError(
                f"TF_CONFIG is not valid JSON: {error.msg} in line {error.lineno}, "
                f"column {error.colno}:\n    {line[0]}\n    {' ' * (error.colno - 1)}^"
            ) from None
        if errors := _errors(found):
            lines = "\n".join(f"    {e}" for e in errors)
            raise StrategyError(f"TF_CONFIG has {len(errors)} wrong fields:\n{lines}")
        task = found.get("task", {"type": "worker", "index": 0})
        cluster = {kind: tuple(found["cluster"].get(kind, ())) for kind in TASKS}
        return cls(cluster, task["type"], task["index"])

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the processes that train: the chief, and the workers."""
        return (*self.cluster["chief"], *self.cluster["worker"])

    @property
    def world_size(self) -> int:
        """The number of processes that train."""
        return len(self.workers)

    @property
    def rank(self) -> int | None:
        """This process's rank among those that train; None for a server or an evaluator."""
        if self.type not in ("chief", "worker"):
            return None
        return self.index + (len(self.cluster["chief"]) if self.type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """True for the process that saves checkpoints and summaries: rank 0."""
        return self.rank == 0

    @property
    def master(self) -> str:
        """Where processes meet: the address of rank 0."""
        return self.workers[0]

    @property
    def layout(self) -> dict[str, int]:
        """The same cluster on this machine: ``dk.Cluster(**config.layout)``.

        >>> config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}}
        >>> TFConfig.parse(json.dumps(config | {"task": {"type": "chief", "index": 0}})).layout
        {'workers': 2, 'servers': 1}
        """
        return {"workers": self.world_size, "servers": len(self.cluster["ps"])}

    @property
    def machines(self) -> dict[str, Any]:
        """The same cluster on its machines, reached by SSH: ``dk.Cluster(**config.machines)``.

        Ranks are numbered machine by machine. Servers go round the machines that have ranks; they
        choose their ports themselves.

        >>> config = {"cluster": {"chief": ["a:1"], "worker": ["a:2", "b:1"], "ps": ["b:2"]}}
        >>> TFConfig.parse(json.dumps(config | {"task": {"type": "ps", "index": 0}})).machines
        {'hosts': {'a': 2, 'b': 1}, 'servers': 1}
        """
        hosts = Counter(address.rpartition(":")[0] for address in self.workers)
        return {"hosts": dict(hosts), "servers": len(self.cluster["ps"])}


def _errors(found: Any) -> list[str]:
    """What is wrong, field by field."""
    if not isinstance(found, dict):
        return [f'the whole: a {type(found).__name__}; it must be {{"cluster": …, "task": …}}']
    cluster, unknown = (
        found.get("cluster"),
        sorted(found.keys() - {"cluster", "task", "environment", "rpc_layer"}),
    )
    errors = [f"{name}: unknown; there are cluster and task" for name in unknown]
    if not isinstance(cluster, dict) or not cluster:
        return [*errors, 'cluster: must be {"worker": ["host:port", …], …}']
    errors += [e for kind, hosts in cluster.items() for e in _errors_of_hosts(kind, hosts)]
    if not cluster.get("chief") and not cluster.get("worker"):
        errors.append("cluster: has neither a chief nor a worker")
    if "task" in found or sum(len(h) for h in cluster.values() if isinstance(h, list)) > 1:
        errors += _errors_of_task(found.get("task"), cluster)
    return errors


def _errors_of_hosts(kind: str, hosts: Any) -> list[str]:
    where = f"cluster.{kind}"
    if kind not in TASKS:
        return [f"{where}: no such kind of task; there are {', '.join(TASKS)}"]
    if not isinstance(hosts, list):
        return [f"{where}: must be a list of addresses, not a {type(hosts).__name__}"]
    errors = [
        f"{where}[{k}]: {h!r} is not host:port" for k, h in enumerate(hosts) if not _is_address(h)
    ]
    if kind in ("chief", "evaluator") and len(hosts) > 1:
        errors.append(f"{where}: has {len(hosts)} addresses; there is at most one {kind}")
    return errors


def _is_address(host: Any) -> bool:
    name, colon, port = host.rpartition(":") if isinstance(host, str) else ("", "", "")
    return bool(name and colon) and port.isdigit() and 0 < int(port) < 65536


def _errors_of_task(task: Any, cluster: dict[str, Any]) -> list[str]:
    if not isinstance(task, dict):
        return ['task: must be {"type": …, "index": …}, the place of this process']
    kind, index = task.get("type"), task.get("index")
    if kind not in cluster and kind != "evaluator":
        return [f"task.type: {kind!r} is not in the cluster, which has {', '.join(cluster)}"]
    count = len(cluster.get(kind, ["evaluator"]))
    if type(index) is not int or not 0 <= index < count:
        return [
            f"task.index: {index!r}; there is {kind} 0" + (f" to {count - 1}" if count > 1 else "")
        ]
    return []
