"""Mirrored variables over the processes of several workers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distkit.algorithms.use import page
from distkit.errors import StrategyError
from distkit_strategies.mirrored import MirroredStrategy
from distkit_strategies.tf_config import TFConfig


class CommunicationImplementation(str, Enum):
    """How gradients are summed over workers.

    ====  =====================================================================================
    AUTO  NCCL between GPUs; else :func:`~distkit.algorithms.use.auto_all_reduce`
    RING  our ring, :func:`~distkit.algorithms.collectives.ring_all_reduce`
    NCCL  NCCL's all-reduce; needs GPUs
    ====  =====================================================================================
    """

    AUTO, RING, NCCL = "AUTO", "RING", "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How workers exchange gradients.

    Args:
        bytes_per_pack: gradients travel in packs of at most so many bytes; 0 for one pack.
        timeout_seconds: how long a worker waits for the others in a collective [s]; None for the
            process group's own limit. Shared memory, in AUTO on one host, has none.
        implementation: "RING", "NCCL" or "AUTO".

    Raises:
        ValueError: a negative number, or no such implementation.

    Source:
        TensorFlow, ``tf.distribute.experimental.CommunicationOptions``.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        CommunicationImplementation(self.implementation)
        limit = 1 if self.timeout_seconds is None else self.timeout_seconds
        if self.bytes_per_pack < 0 or not 0 < limit < float("inf"):
            raise ValueError(
                "CommunicationOptions needs bytes_per_pack of at least 0 and a positive "
                f"timeout_seconds; got {self.bytes_per_pack} and {self.timeout_seconds}."
            )


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Synchronous training on several workers: :class:`MirroredStrategy` over all their replicas.

    In a script of its own it takes its place from ``TF_CONFIG``, if that is set, and meets the
    other workers at the address of worker 0, through torch's own TCPStore.

    Args:
        communication_options: how gradients are summed.

    Raises:
        StrategyError: ``TF_CONFIG`` is malformed, or there is no NCCL for it.

    Source:
        TensorFlow, ``tf.distribute.MultiWorkerMirroredStrategy``.

    >>> MultiWorkerMirroredStrategy(CommunicationOptions(implementation="RING")).options
    CommunicationOptions(bytes_per_pack=0, timeout_seconds=None, implementation='RING')
    """

    def __init__(self, communication_options: CommunicationOptions | None = None) -> None:
        super().__init__()
        self.options = communication_options or CommunicationOptions()
        config = None if dist.is_initialized() else TFConfig.from_environment()
        if config is not None and config.workers:
            join(config)

    @cached_property
    def _group(self) -> Any:
        """A group with the timeout that was asked for."""
        limit = self.options.timeout_seconds
        return None if limit is None else dist.new_group(timeout=timedelta(seconds=limit))

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {k: v for k, v in super().__getstate__().items() if k not in ("_group", "_page")}

    def _sum(self, x: Tensor) -> None:
        """Sum gradients over the replicas, in place, pack by pack."""
        most = self.options.bytes_per_pack // x.element_size()
        for part in x.split(max(most, 1)) if self.options.bytes_per_pack else (x,):
            self._page(part, group=self._group)

    @cached_property
    def _page(self) -> Callable[..., Any]:
        chosen = CommunicationImplementation(self.options.implementation)
        on_gpus = dist.get_backend() == "nccl"
        if chosen is CommunicationImplementation.NCCL and not on_gpus:
            raise StrategyError(
                f"CommunicationOptions asks for NCCL, and these ranks use {dist.get_backend()}. "
                "Start them on GPUs with backend nccl, or choose RING or AUTO."
            )
        if chosen is CommunicationImplementation.RING:
            return page("ring")
        return dist.all_reduce if on_gpus else page("auto")


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
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            line.bind((host, port))
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
