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
        rpc_layer: kept for programs that ask for it: torch's processes meet by TCP, whatever it is.

    As for TensorFlow's ``TFConfigClusterResolver``, an index may be a text, a type may be a number,
    and ``{}`` is one process on its own.

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
    rpc_layer: str | None = None

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
            line = text.split("\n")[error.lineno - 1]
            raise StrategyError(
                f"TF_CONFIG is not valid JSON: {error.msg} in line {error.lineno}, "
                f"column {error.colno}:\n    {line}\n    {' ' * (error.colno - 1)}^"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise StrategyError(f"TF_CONFIG is not valid JSON: {error}") from None
        if errors := _errors(found):
            lines = "\n".join(f"    {e}" for e in errors)
            raise StrategyError(f"TF_CONFIG has {len(errors)} wrong fields:\n{lines}")
        cluster = {kind: tuple(hosts) for kind, hosts in found.get("cluster", {}).items()}
        cluster = {**dict.fromkeys(TASKS, ()), **cluster}
        alone = {"type": "chief" if cluster["chief"] else "worker", "index": 0}
        task = found.get("task", alone)
        return cls(cluster, str(task["type"]), int(task["index"]), found.get("rpc_layer"))

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the processes that train: the chief, and the workers."""
        return (*self.cluster.get("chief", ()), *self.cluster.get("worker", ()))

    @property
    def world_size(self) -> int:
        """The number of processes that train; without a cluster, 1."""
        return len(self.workers) or 1

    @property
    def rank(self) -> int | None:
        """This process's rank among those that train; None for a server or an evaluator."""
        if self.type not in ("chief", "worker"):
            return None
        return self.index + (len(self.cluster.get("chief", ())) if self.type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """True for the process that saves checkpoints and summaries: rank 0."""
        return self.rank == 0

    @property
    def master(self) -> str:
        """Where processes meet: the address of rank 0; "" if there is no cluster."""
        return self.workers[0] if self.workers else ""

    @property
    def layout(self) -> dict[str, int]:
        """The same cluster on this machine: ``dk.Cluster(**config.layout)``.

        >>> config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}}
        >>> TFConfig.parse(json.dumps(config | {"task": {"type": "chief", "index": 0}})).layout
        {'workers': 2, 'servers': 1}
        """
        return {"workers": self.world_size, "servers": len(self.cluster.get("ps", ()))}

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
        return {"hosts": dict(hosts), "servers": len(self.cluster.get("ps", ()))}


def _errors(found: Any) -> list[str]:
    """What is wrong, field by field."""
    if not isinstance(found, dict):
        return [f'the whole: a {type(found).__name__}; it must be {{"cluster": …, "task": …}}']
    cluster, rpc_layer = found.get("cluster", {}), found.get("rpc_layer")
    unknown = sorted(found.keys() - {"cluster", "task", "rpc_layer", "environment"})
    errors = [f"{name}: unknown; there are cluster, task and rpc_layer" for name in unknown]
    if not isinstance(rpc_layer, str | None):
        errors.append(f'rpc_layer: {rpc_layer!r:.60} must be a text, such as "grpc"')
    if not isinstance(cluster, dict) or (not cluster and found.keys() & {"cluster", "task"}):
        return [*errors, 'cluster: must be {"worker": ["host:port", …], …}']
    own, places = _text(found.get("task")), dict[str, str]()
    for kind, hosts in cluster.items():
        if kind in TASKS or kind == own:
            errors += _errors_of_hosts(kind, hosts, places)
        else:
            errors.append(f"cluster.{kind}: no such kind of task; there are {', '.join(TASKS)}")
    if cluster and not cluster.get("chief") and not cluster.get("worker"):
        errors.append("cluster: has neither a chief nor a worker")
    if "task" in found or len(places) > 1:
        errors += _errors_of_task(found.get("task"), cluster)
    return errors


def _errors_of_hosts(kind: str, hosts: Any, places: dict[str, str]) -> list[str]:
    """What is wrong with the addresses of a kind of task; ``places`` has those of the others."""
    where = f"cluster.{kind}"
    if not isinstance(hosts, list):
        return [f"{where}: must be a list of addresses, not a {type(hosts).__name__}"]
    errors = []
    for k, host in enumerate(hosts):
        if not _is_address(host):
            errors.append(f"{where}[{k}]: {host!r:.60} is not host:port")
        elif host.lower() in places:
            errors.append(f"{where}[{k}]: {host!r} is also the address of {places[host.lower()]}")
        else:
            places[host.lower()] = f"{where}[{k}]"
    if kind in ("chief", "evaluator") and len(hosts) > 1:
        errors.append(f"{where}: has {len(hosts)} addresses; there is at most one {kind}")
    return errors


def _is_address(host: Any) -> bool:
    name, colon, port = host.rpartition(":") if isinstance(host, str) else ("", "", "")
    return bool(name and colon) and (_whole(port) or 0) in range(1, 65536)


def _errors_of_task(task: Any, cluster: dict[str, Any]) -> list[str]:
    if not isinstance(task, dict):
        return ['task: must be {"type": …, "index": …}, the place of this process']
    kind, index = _text(task), _whole(task.get("index"))
    counts = {k: len(hosts) for k, hosts in cluster.items() if isinstance(hosts, list) and hosts}
    if kind not in {*counts, "evaluator"}:
        given = f"{task.get('type')!r:.60}"
        return [f"task.type: {given} is not in the cluster, which has {', '.join(cluster)}"]
    last = counts.get(kind, 1) - 1
    if index is None or not 0 <= index <= last:
        known = f"there is {kind} 0" + (f" to {last}" if last else "")
        return [f"task.index: {task.get('index')!r:.60}; {known}"]
    return []


def _text(task: Any) -> str | None:
    """A task's type: a text or a number, as TensorFlow takes it; None for what it cannot be."""
    found = task.get("type") if isinstance(task, dict) else None
    return str(found) if type(found) in (str, int) else None


def _whole(value: Any) -> int | None:
    """A whole number, perhaps in a text, as TensorFlow takes it; None for what is none."""
    try:
        return int(value) if type(value) in (str, int) else None
    except ValueError:
        return None
