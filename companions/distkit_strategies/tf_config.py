"""``TF_CONFIG``: which tasks a cluster has, and which of them this process is."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from msgspec import Meta, Struct, ValidationError, convert, field

from distkit.errors import StrategyError

#: The kinds of tasks, in the order of their ranks.
TASKS = ("chief", "worker", "ps", "evaluator")

#: What it looks like, for an error.
_FORM = (
    'It is {"cluster": {"worker": ["host:port", …], …}, "task": {"type": "worker", "index": 0}}, '
    f"with the tasks {', '.join(TASKS)}."
)

_Address = Annotated[str, Meta(pattern=r"^.+:[0-9]{1,5}$")]
_One = Annotated[list[_Address], Meta(max_length=1)]


class _Cluster(Struct, forbid_unknown_fields=True):
    """The addresses of each kind of task."""

    chief: _One = []
    worker: list[_Address] = []
    ps: list[_Address] = []
    evaluator: _One = []


class _Task(Struct, forbid_unknown_fields=True):
    """The place of a process."""

    type: Literal["chief", "worker", "ps", "evaluator"]
    index: Annotated[int, Meta(ge=0)]


class _Text(Struct, forbid_unknown_fields=True):
    """What ``TF_CONFIG`` may hold."""

    cluster: _Cluster = field(default_factory=_Cluster)
    task: _Task | None = None
    rpc_layer: Any = None
    environment: Any = None

    def __post_init__(self) -> None:
        """Check what fields have to do with each other."""
        hosts = {kind: getattr(self.cluster, kind) for kind in TASKS}
        places = [host.lower() for kind in TASKS for host in hosts[kind]]
        twice = [place for place in dict.fromkeys(places) if places.count(place) > 1]
        far = [place for place in places if int(place.rpartition(":")[2]) not in range(1, 1 << 16)]
        for wrong, what in (
            (twice, f"{twice} in cluster: each task needs an address of its own"),
            (far, f"{far} in cluster: a port is a number from 1 to 65535"),
            (
                (places or self.task) and not (self.cluster.chief or self.cluster.worker),
                "cluster: has neither a chief nor a worker",
            ),
            (len(places) > 1 and not self.task, 'task: must be {"type": …, "index": …}'),
        ):
            if wrong:
                raise ValueError(what)
        if self.task is not None and self.task.type != "evaluator":
            tasks = len(hosts[self.task.type])
            if self.task.index >= tasks:
                raise ValueError(f"task: {self.task.type} {self.task.index}, of {tasks} such tasks")


@dataclass(frozen=True)
class TFConfig:
    """A cluster, and this process's place in it.

    Args:
        cluster: for each kind of task the addresses, "host:port", of its processes.
        type: this process's kind of task.
        index: its number among them.

    As for TensorFlow's ``TFConfigClusterResolver``, an index may be a text, and ``{}`` is one
    process on its own. ``rpc_layer`` and ``environment`` are ignored.

    Source:
        TensorFlow, "Multi-worker training with Keras", ``TF_CONFIG``.

    >>> config = TFConfig.parse('{"cluster": {"worker": ["a:1", "b:1"]}, "task":'
    ...                         ' {"type": "worker", "index": 1}}')
    >>> config.rank, config.world_size, config.is_chief, config.master
    (1, 2, False, 'a:1')
    """

    cluster: Mapping[str, tuple[str, ...]]
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
            StrategyError: it is not valid JSON, which the error places, or a field is missing or
                wrong, which it names.
        """
        try:
            found = convert(json.loads(text), _Text, strict=False)
        except json.JSONDecodeError as error:
            line = text.split("\n")[error.lineno - 1]
            raise StrategyError(
                f"TF_CONFIG is not valid JSON: {error.msg} in line {error.lineno}, "
                f"column {error.colno}:\n    {line}\n    {' ' * (error.colno - 1)}^"
            ) from None
        except ValidationError as error:
            raise StrategyError(f"TF_CONFIG has a wrong field: {error}. {_FORM}") from None
        except (ValueError, RecursionError) as error:
            raise StrategyError(f"TF_CONFIG is not valid JSON: {error}") from None
        cluster = {kind: tuple(getattr(found.cluster, kind)) for kind in TASKS}
        task = found.task or _Task("chief" if cluster["chief"] else "worker", 0)
        return cls(cluster, task.type, task.index)

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the processes that train: the chief, and the workers."""
        return (*self.cluster["chief"], *self.cluster["worker"])

    @property
    def world_size(self) -> int:
        """The number of processes that train; without a cluster, 1."""
        return len(self.workers) or 1

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
        """Where processes meet: the address of rank 0; "" if there is no cluster."""
        return self.workers[0] if self.workers else ""

    @property
    def layout(self) -> dict[str, int]:
        """The same cluster on this machine: ``dk.Cluster(**config.layout)``.

        >>> config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}}
        >>> TFConfig.parse(json.dumps(config | {"task": {"type": "chief", "index": 0}})).layout
        {'workers': 2, 'servers': 1}
        """
        return {"workers": self.world_size, "servers": len(self.cluster["ps"])}


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
