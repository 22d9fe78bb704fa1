"""``TF_CONFIG``: which tasks a cluster has, and which of them this process is."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

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

    As for TensorFlow's ``TFConfigClusterResolver``, an index may be a text, a type may be a number,
    and ``{}`` is one process on its own. ``rpc_layer`` and ``environment`` are ignored.

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
                wrong, which it names.
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
        hosts = {kind: tuple(places) for kind, places in found.get("cluster", {}).items()}
        alone = {"type": "chief" if hosts.get("chief") else "worker", "index": 0}
        task = found.get("task", alone)
        cluster = {**dict.fromkeys(TASKS, ()), **hosts}
        return cls(cluster, str(task["type"]), int(task["index"]))

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


def _errors(found: Any) -> list[str]:
    """What is wrong, field by field."""
    if not isinstance(found, dict):
        return [f'the whole: a {type(found).__name__}; it must be {{"cluster": …, "task": …}}']
    cluster, task = found.get("cluster", {}), found.get("task")
    unknown = sorted(found.keys() - {"cluster", "task", "rpc_layer", "environment"})
    errors = [f"{name}: unknown; there are cluster, task and rpc_layer" for name in unknown]
    if not isinstance(cluster, dict) or (not cluster and found.keys() & {"cluster", "task"}):
        return [*errors, 'cluster: must be {"worker": ["host:port", …], …}']
    known: dict[str, str] = {}
    for kind, hosts in cluster.items():
        errors += _errors_of_hosts(kind, hosts, known, _type(task))
    if cluster and not cluster.get("chief") and not cluster.get("worker"):
        errors.append("cluster: has neither a chief nor a worker")
    if "task" in found or len(known) > 1:
        errors += _errors_of_task(task, cluster)
    return errors


def _errors_of_hosts(kind: str, hosts: Any, known: dict[str, str], own: str | None) -> list[str]:
    """What is wrong with the addresses of a kind of task; ``known`` has those of the others."""
    where = f"cluster.{kind}"
    if kind not in (*TASKS, own):
        return [f"{where}: no such kind of task; there are {', '.join(TASKS)}"]
    if not isinstance(hosts, list):
        return [f"{where}: must be a list of addresses, not a {type(hosts).__name__}"]
    errors = []
    for k, host in enumerate(hosts):
        place = f"{where}[{k}]"
        first = known.setdefault(str(host).lower(), place)
        if not _is_address(host):
            errors.append(f"{place}: {host!r:.60} is not host:port")
        elif first != place:
            errors.append(f"{place}: {host!r} is also the address of {first}")
    if kind in ("chief", "evaluator") and len(hosts) > 1:
        errors.append(f"{where}: has {len(hosts)} addresses; there is at most one {kind}")
    return errors


def _errors_of_task(task: Any, cluster: dict[str, Any]) -> list[str]:
    """What is wrong with the place of this process."""
    if not isinstance(task, dict):
        return ['task: must be {"type": …, "index": …}, the place of this process']
    own, index = _type(task), task.get("index")
    counts = {"evaluator": 1} | {k: len(h) for k, h in cluster.items() if isinstance(h, list) and h}
    if own not in counts:
        given = f"{task.get('type')!r:.60}"
        return [f"task.type: {given} is not in the cluster, which has {', '.join(cluster)}"]
    last = counts[own] - 1
    known = f"there is {own} 0" + (f" to {last}" if last else "")
    return [] if 0 <= _number(index) <= last else [f"task.index: {index!r:.60}; {known}"]


def _type(task: Any) -> str | None:
    """A task's type: a text or a number, as TensorFlow takes it; None for what it cannot be."""
    found = task.get("type") if isinstance(task, dict) else None
    return str(found) if type(found) in (str, int) else None


def _number(value: Any) -> int:
    """A whole number, perhaps in a text, as TensorFlow takes it; -1 for what is none."""
    text = str(value) if type(value) in (str, int) else ""
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def _is_address(host: Any) -> bool:
    name, colon, port = host.rpartition(":") if isinstance(host, str) else ("", "", "")
    return bool(name and colon) and 0 < _number(port) < 65536


def join(config: TFConfig) -> None:
    """Meet the workers of a configuration in a process group.

    Raises:
        StrategyError: this process is not one that trains, its address is not this machine's, or
            the others did not come.
    """
    me = f"TF_CONFIG says that this process is {config.type} {config.index}"
    if config.rank is None:
        raise StrategyError(
            f"{me}, which does not train: MultiWorkerMirroredStrategy is for the chief and the "
            "workers."
        )
    address, own = config.master, config.workers[config.rank]
    try:  # torch would try for half an hour
        socket.getaddrinfo(*_host_and_port(address))
        host, port = _host_and_port(address := own)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"{me} at {own}, and that it meets the others at {config.master}. This machine, "
            f"{socket.gethostname()}, cannot use {address}: {error}. A process's own address must "
            "be one of its machine, with a free port: check task.index, and give each machine its "
            "own TF_CONFIG."
        ) from None
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    method, size = f"tcp://{config.master}", config.world_size
    try:
        dist.init_process_group(backend, init_method=method, rank=config.rank, world_size=size)
    except dist.DistError as error:
        why = str(error).splitlines()[0]
        raise StrategyError(
            f"{me} of {size}, and it has not met the others at {config.master}: {why}. See that "
            "all of them run, each with its own TF_CONFIG, and that this machine reaches that port."
        ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
