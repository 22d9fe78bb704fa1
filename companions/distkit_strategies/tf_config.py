"""``TF_CONFIG``: the tasks of a cluster, and the task of this process."""

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

#: The task types; a chief has a lower rank than the workers.
TASKS = ("chief", "worker", "ps", "evaluator")

#: The expected form, for error messages.
_FORM = (
    'Expected {"cluster": {"worker": ["host:port", …], …}, "task": {"type": "worker", "index": 0}} '
    f"with tasks of the types {', '.join(TASKS)}."
)

_Address = Annotated[str, Meta(pattern=r"^.+:[0-9]{1,5}$")]
_AtMostOne = Annotated[list[_Address], Meta(max_length=1)]


class _Cluster(Struct, forbid_unknown_fields=True):
    """The addresses of each task type."""

    chief: _AtMostOne = []
    worker: list[_Address] = []
    ps: list[_Address] = []
    evaluator: _AtMostOne = []


class _Task(Struct, forbid_unknown_fields=True):
    """The task of a process."""

    type: Literal["chief", "worker", "ps", "evaluator"]
    index: Annotated[int, Meta(ge=0)]


class _Config(Struct, forbid_unknown_fields=True):
    """The content of ``TF_CONFIG``."""

    cluster: _Cluster = field(default_factory=_Cluster)
    task: _Task | None = None
    rpc_layer: Any = None
    environment: Any = None

    def __post_init__(self) -> None:
        """Check the consistency of the fields."""
        hosts = {kind: getattr(self.cluster, kind) for kind in TASKS}
        addresses = [host.lower() for kind in TASKS for host in hosts[kind]]
        duplicates = [
            address for address in dict.fromkeys(addresses) if addresses.count(address) > 1
        ]
        bad_ports = [
            address
            for address in addresses
            if int(address.rpartition(":")[2]) not in range(1, 1 << 16)
        ]
        for failed, message in (
            (duplicates, f"{duplicates} in cluster: each task needs a different address"),
            (bad_ports, f"{bad_ports} in cluster: a port must be a number from 1 to 65535"),
            (
                (addresses or self.task) and not (self.cluster.chief or self.cluster.worker),
                "cluster: it needs a chief or a worker",
            ),
            (len(addresses) > 1 and not self.task, 'task: must be {"type": …, "index": …}'),
        ):
            if failed:
                raise ValueError(message)
        if self.task is not None and self.task.type != "evaluator":
            tasks = len(hosts[self.task.type])
            if self.task.index >= tasks:
                raise ValueError(
                    f"task: {self.task.type} {self.task.index} does not exist; "
                    f"the number of these tasks is {tasks}"
                )


@dataclass(frozen=True)
class TFConfig:
    """A cluster, and this process's task in it.

    Args:
        cluster: the addresses, "host:port", of the processes of each task type.
        type: this process's task type.
        index: the index of this process among the processes of that type.

    As in TensorFlow's ``TFConfigClusterResolver``, an index may be a string, and ``{}`` means a
    single process. ``rpc_layer`` and ``environment`` are ignored.

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
        """Return the configuration in the environment variable ``TF_CONFIG``, if set.

        Raises:
            StrategyError: the configuration is malformed.
        """
        text = os.environ.get("TF_CONFIG")
        return cls.parse(text) if text else None

    @classmethod
    def parse(cls, text: str) -> TFConfig:
        """Read and check a configuration.

        Raises:
            StrategyError: the text is not valid JSON, or a field is missing or invalid; the message
                contains the position or the field.
        """
        try:
            config = convert(json.loads(text), _Config, strict=False)
        except json.JSONDecodeError as error:
            line = text.split("\n")[error.lineno - 1]
            raise StrategyError(
                f"TF_CONFIG is not valid JSON: {error.msg} on line {error.lineno}, "
                f"column {error.colno}:\n    {line}\n    {' ' * (error.colno - 1)}^"
            ) from None
        except ValidationError as error:
            raise StrategyError(f"TF_CONFIG has an invalid field: {error}. {_FORM}") from None
        except (ValueError, RecursionError) as error:
            raise StrategyError(f"TF_CONFIG is not valid JSON: {error}") from None
        cluster = {kind: tuple(getattr(config.cluster, kind)) for kind in TASKS}
        task = config.task or _Task("chief" if cluster["chief"] else "worker", 0)
        return cls(cluster, task.type, task.index)

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the chief and the workers, which train."""
        return (*self.cluster["chief"], *self.cluster["worker"])

    @property
    def world_size(self) -> int:
        """The number of training processes; 1 if there is no cluster."""
        return len(self.workers) or 1

    @property
    def rank(self) -> int | None:
        """This process's rank among training processes; None for a server or an evaluator."""
        if self.type not in ("chief", "worker"):
            return None
        return self.index + (len(self.cluster["chief"]) if self.type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """True for the process that saves checkpoints and summaries: rank 0."""
        return self.rank == 0

    @property
    def master(self) -> str:
        """The rendezvous address, which is the address of rank 0; "" if there is no cluster."""
        return self.workers[0] if self.workers else ""

    @property
    def layout(self) -> dict[str, int]:
        """The arguments for the same cluster on this machine: ``dk.Cluster(**config.layout)``.

        >>> config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}}
        >>> TFConfig.parse(json.dumps(config | {"task": {"type": "chief", "index": 0}})).layout
        {'workers': 2, 'servers': 1}
        """
        return {"workers": self.world_size, "servers": len(self.cluster["ps"])}


def join(config: TFConfig) -> None:
    """Create the process group of a configuration's workers.

    Raises:
        StrategyError: this process does not train, its address cannot be used on this machine, or
            other processes did not join.
    """
    task = f"TF_CONFIG assigns this process the task {config.type} {config.index}"
    if config.rank is None:
        raise StrategyError(
            f"{task}, which does not train. Use MultiWorkerMirroredStrategy only on the chief and "
            "the workers."
        )
    address, own_address = config.master, config.workers[config.rank]
    try:  # fail early: torch would retry for half an hour
        socket.getaddrinfo(*_host_and_port(address))
        host, port = _host_and_port(address := own_address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"{task} at {own_address}, with rendezvous at {config.master}. This machine, "
            f"{socket.gethostname()}, cannot use {address}: {error}. A process's own address must "
            "belong to its machine and have a free port. Check task.index, and set TF_CONFIG on "
            "each machine separately."
        ) from None
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    method, size = f"tcp://{config.master}", config.world_size
    try:
        dist.init_process_group(backend, init_method=method, rank=config.rank, world_size=size)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise StrategyError(
            f"{task}, one of {size}, but it could not connect to the others at {config.master}: "
            f"{reason}. Check that all of them are running, each with its own TF_CONFIG, and that "
            "this machine can reach that port."
        ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
