"""Synchronous replicas with the same variables: gradients are put together by all-reduce."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distkit.algorithms.use import page
from distkit.errors import StrategyError
from distkit_strategies.agreement import Agreement
from distkit_strategies.context import ReplicaContext
from distkit_strategies.gradients import own_parameters, put_together
from distkit_strategies.one_device import is_present, present
from distkit_strategies.strategy import Strategy
from distkit_strategies.variables import Made

#: TensorFlow's names, and ours for the same algorithm.
CROSS_DEVICE_OPS = {
    "native": "native",
    "NcclAllReduce": "native",
    "hierarchical": "hierarchical",
    "HierarchicalCopyAllReduce": "hierarchical",
    "reduce_to_one": "reduce_broadcast",
    "ReductionToOneDevice": "reduce_broadcast",
}


class ReplicatedStrategy(Strategy):
    """What strategies have in common whose replicas are the ranks of the process group.

    Args:
        device: of this replica; None for that of its process group.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of ranks; without a process group, 1."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def _replica(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def _alone(self) -> bool:
        return self.num_replicas_in_sync == 1

    @cached_property
    def _agreement(self) -> Agreement:
        return Agreement(_group_device())

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {k: v for k, v in self.__dict__.items() if k != "_agreement"}

    def _run(self, replica: ReplicaContext) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._alone else self._agreement.inside_run()

    def _compare(self, call: str, facts: Sequence[int]) -> list[list[int]]:
        return [list(facts)] if self._alone else self._agreement.compare(call, facts)

    def _failures(self, call: str, error: Exception | None) -> list[str]:
        return (
            super()._failures(call, error) if self._alone else self._agreement.failures(call, error)
        )

    def _all_reduce(self, x: Tensor) -> None:
        if not self._alone:
            dist.all_reduce(x)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        if self._alone:
            return [x]
        found = [torch.empty_like(x) for _ in range(self.num_replicas_in_sync)]
        dist.all_gather(found, x.contiguous())
        return found

    def _created(self, made: Sequence[Made]) -> None:
        described = repr([(m.name, tuple(m.tensor.shape), m.tensor.dtype) for m in made])
        facts = [len(made), zlib.crc32(described.encode())]
        shown = self._compare("scope", facts)
        if shown.count(facts) < len(shown):
            raise StrategyError(
                f"The replicas made different variables: {_counts(shown)}. All replicas must make "
                "the same model."
            )
        if not self._alone:
            for m in made:
                dist.broadcast(m.tensor.detach(), 0)


class MirroredStrategy(ReplicatedStrategy):
    """Synchronous training: a copy of each variable on every replica, kept the same by all-reduce.

    Leaving the scope, all replicas get rank 0's values. Before each step the gradients of all
    replicas are summed; every replica then makes the same step.

    Args:
        devices: the device of each rank, in their order, such as ["cuda:0", "cuda:1"]; None for
            that of its process group. An absent one is left out, with a warning. With fewer
            devices than ranks, ranks share them in turn, with a warning.
        cross_device_ops: how gradients are summed: "native" (the backend's own all-reduce),
            "hierarchical", "reduce_to_one" or TensorFlow's names for them, another name of
            :data:`~distkit.algorithms.catalogue.ALL_REDUCES`, "auto", "shared_memory", or a
            function with the contract of ``dist.all_reduce``.

    Raises:
        StrategyError: none of the devices is present.
        ValueError: there is no such algorithm.

    Source:
        TensorFlow, ``tf.distribute.MirroredStrategy``; Goyal et al., 2017.

    Example:
        >>> def train(strategy):
        ...     with strategy.scope():
        ...         model = torch.nn.Linear(2, 1)
        ...     return strategy.num_replicas_in_sync
        >>> cluster.run(train, MirroredStrategy()).results            # doctest: +SKIP
        [4, 4, 4, 4]
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str] | None = None,
        cross_device_ops: str | Callable[..., Any] = "native",
    ) -> None:
        super().__init__()
        self._devices = None if devices is None else _chosen(devices)
        self._cross_device = _algorithm(cross_device_ops)

    @property
    def device(self) -> torch.device:
        """Where this replica's variables and batches are."""
        if self._devices is None:
            return _group_device()
        return self._devices[self._replica % len(self._devices)]

    def _created(self, made: Sequence[Made]) -> None:
        if self._chief and self._devices is not None:
            _warn_of_shared(self._devices, self.num_replicas_in_sync)
        super()._created(made)

    def _sum(self, x: Tensor) -> None:
        """Sum gradients over the replicas, in place."""
        self._cross_device(x)

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        weights = own_parameters(self, optimizer)
        if not self._alone:
            put_together(self, weights, replica, self._sum)


def _counts(shown: Sequence[Sequence[int]]) -> str:
    """How many variables each replica made, if that is the difference."""
    counts = [s[0] for s in shown]
    if len({*counts}) == 1:
        return f"each made {counts[0]}, but their names, shapes or dtypes differ"
    return ", ".join(f"replica {r} made {n}" for r, n in enumerate(counts))


def _group_device() -> torch.device:
    """Where the default process group sends from."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _chosen(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """Those that are present; warn about the others."""
    wanted = [torch.device(d) for d in devices]
    here = [d for d in wanted if is_present(d)]
    absent = ", ".join(str(d) for d in wanted if d not in here)
    if not here:
        raise StrategyError(f"None of the devices {absent} is present. There are: {present()}.")
    if absent:
        warnings.warn(f"Not present, and left out: {absent}. There are: {present()}.", stacklevel=3)
    return here


def _warn_of_shared(devices: Sequence[torch.device], replicas: int) -> None:
    """Say which replicas have one device together: a replica is a rank, however many are chosen."""
    users = {d: [*range(replicas)][n :: len(devices)] for n, d in enumerate(devices)}
    shared = [f"replicas {', '.join(map(str, r))} share {d}" for d, r in users.items() if r[1:]]
    if shared:
        warnings.warn(
            f"There are {replicas} replicas, which are the ranks, and fewer devices: "
            f"{'; '.join(shared)}. Choose a device for each rank, or start fewer ranks.",
            stacklevel=2,
        )


def _algorithm(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """What sums gradients.

    Raises:
        ValueError: there is no such algorithm.
    """
    known = CROSS_DEVICE_OPS.get(name, name) if isinstance(name, str) else name
    return dist.all_reduce if known == "native" else page(known)
