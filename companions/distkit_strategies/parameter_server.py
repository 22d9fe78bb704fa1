"""Variables on parameter servers: workers push gradients and pull values by the KVStore."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distkit import kvstore
from distkit.errors import StrategyError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.optimizer import groups_of
from distkit_strategies.replica import ReplicaContext
from distkit_strategies.strategy import ReplicatedStrategy
from distkit_strategies.synchronous import (
    combine,
    own_parameters,
)
from distkit_strategies.variables import Made

#: The size up to which the KVStore leaves an array whole: the partitioner cuts instead.
_WHOLE = 1 << 62


class ParameterServerStrategy(ReplicatedStrategy):
    """Training with the variables on the servers of ``dk.Cluster(workers=2, servers=1)``.

    Leaving the scope, variables have worker 0's values, on the servers. Each ``optimizer.step()``
    in ``run`` pushes gradients and pulls values: the servers keep the optimizer's state and make
    the update, and a checkpoint has the values alone. With "async", as in TensorFlow, each worker
    is one replica: it steps with its own batches, of ``global_batch`` rows each, and waits for
    no other. A worker that dies is replaced and trains from the beginning, on the values that are
    there. With "sync" the replicas are in sync: the result is that of one process.

    Args:
        variable_partitioner: decides in how many shards a variable lies on the servers; None for
            the KVStore's own rule.
        mode: "async" or "sync".
        options: of :func:`distkit.kvstore.create`, such as ``replication=2``: then a server may
            crash, too, and nothing is lost.

    Raises:
        StrategyError: an unknown mode; and at the first scope, a cluster without servers.

    Source:
        TensorFlow, ``tf.distribute.ParameterServerStrategy``; Li et al., 2014.
    """

    def __init__(
        self,
        variable_partitioner: Callable[[Sequence[int], torch.dtype], list[int]] | None = None,
        *,
        mode: str = "async",
        **options: Any,
    ) -> None:
        super().__init__()
        if mode not in ("async", "sync"):
            raise StrategyError(f'mode={mode!r}: give "async" or "sync".')
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise StrategyError(
                f"variable_partitioner={variable_partitioner!r:.60} is no partitioner. Give one "
                "such as dk.strategies.FixedShardsPartitioner(2)."
            )
        self.mode, self._partitioner = mode, variable_partitioner
        self._options: dict[str, Any] = {} if mode == "sync" else {"on_crash": "replace"}
        self._options |= {} if variable_partitioner is None else {"bigarray_bound": _WHOLE}
        self._options |= options
        self.coordinated = False  # by a ClusterCoordinator
        self._variables: list[Tensor] = []
        self._shards: list[tuple[Tensor, range]] = []  # parameters, and the keys of their shards
        self._optimized: set[int] = set()
        self._specs: list[tuple[Any, list[int]]] = []  # the optimizers that the servers have
        self._decisions = 0

    # -- who takes part ------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """With "async" 1; with "sync" the number of workers."""
        return 1 if self.mode == "async" else super().num_replicas_in_sync

    @property
    def _replica(self) -> int:
        return 0 if self.mode == "async" else super()._replica

    @property
    def _chief(self) -> bool:
        return self.store.rank == 0

    @property
    def _steps_alone(self) -> bool:
        return False

    @property
    def _pipeline(self) -> tuple[int, int]:
        """This worker's place among those that train; a coordinator is not one of them."""
        node = kvstore.here()
        if self.mode == "sync" or node is None:
            return super()._pipeline
        if self._coordinates:
            raise StrategyError(
                "Worker 0 coordinates, so it has no rows of a dataset. Let each worker make its "
                "own: coordinator.create_per_worker_dataset(lambda: "
                "strategy.distribute_dataset(data, global_batch=64))."
            )
        return node.index - self.coordinated, node.workers - self.coordinated

    @property
    def _coordinates(self) -> bool:
        """True in the process that schedules functions for the others."""
        return self.coordinated and self._chief

    def _check_place(self, call: str) -> None:
        super()._check_place(call)
        if call in ("run()", "reduce()") and self._coordinates:  # TensorFlow warns, too
            warnings.warn(
                f"strategy.{call} on worker 0, which coordinates, without coordinator.schedule: it "
                "runs there, and the other workers have no part in it. Call it in a function that "
                "coordinator.schedule gets.",
                stacklevel=3,
            )

    @property
    def store(self) -> kvstore.KVStore:
        """The store of this worker.

        Raises:
            StrategyError: this is no worker of a cluster with servers.
        """
        node = kvstore.here()
        if node is None or not node.servers:
            raise StrategyError(
                f"{self} needs parameter servers, and this process is no worker of a cluster "
                "that has them. Run the function there: dk.Cluster(workers=2, servers=1)"
                ".run(train, strategy)."
            )
        return kvstore.create(f"dist_{self.mode}", **self._options)

    # -- variables ------------------------------------------------------------------------------

    def _created(self, made: Made) -> None:
        if self.coordinated:
            raise StrategyError(
                "Variables were made after ClusterCoordinator(strategy): the other workers do "
                "not have them. Make all variables before the coordinator."
            )
        super()._created(made)
        known, shards = len(self._variables), len(self._shards)
        self._variables += [variable for _, variable in made.tensors]
        buffers: dict[Key, Tensor] = {}
        for n, variable in enumerate(self._variables[known:], known):
            if isinstance(variable, nn.Parameter):
                first = self._shards[-1][1].stop if self._shards else 0
                self._shards.append((variable, range(first, first + self._count(variable))))
            else:
                buffers[f"buffer {n}"] = variable.detach()
        values = _spread(self._shards[shards:]) | buffers
        self._share([*values], [*values.values()])

    def _share(self, keys: list[Key], values: list[Tensor]) -> None:
        """Give every worker the values of worker 0."""
        self.store.init(keys, values)
        self.store.pull(keys, values)

    def _count(self, variable: Tensor) -> int:
        """In how many shards it is."""
        if self._partitioner is None or not variable.dim():
            return 1
        shape = tuple(variable.shape)
        shards: Any = self._partitioner(shape, variable.dtype)
        first, *others = shards if isinstance(shards, list | tuple) and shards else [None]
        if not isinstance(first, int) or first < 1 or others != [1] * (len(shape) - 1):
            raise StrategyError(
                f"variable_partitioner returned {shards!r:.60} for a variable of shape {shape}. "
                "Variables are cut along their first axis: return the number of shards of each "
                f"axis, {[2] + [1] * (len(shape) - 1)} for two."
            )
        return max(1, min(first, shape[0]))

    @torch.no_grad()
    def pull(self) -> None:
        """Get the values that the servers have now into this worker's parameters."""
        values = _spread(self._shards)
        self.store.pull([*values], [*values.values()])

    # -- a step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Push gradients and pull values; the optimizer is left without gradients to apply."""
        weights, first = own_parameters(self, optimizer), self.store.rank * self._alone
        combine(self, weights, replica, _by_servers, "worker", first)
        self._set_optimizer(optimizer, weights)
        if replica.rows == 0 and self._alone:  # the mean over no rows is NaN
            self.pull()
        else:
            self._push({id(w) for w in weights if w.grad is not None})
        optimizer.zero_grad()

    def _push(self, weights: set[int]) -> None:
        """Push gradients, and pull the new values; the first layers go first."""
        shards = [(w, keys) for w, keys in self._shards if id(w) in weights]
        values = _spread(shards)
        gradients = _spread((w.grad, keys) for w, keys in shards if w.grad is not None)
        self.store.pushpull([*values], [*gradients.values()], [*values.values()])

    def _set_optimizer(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Give the servers the optimizer with its present options.

        Raises:
            StrategyError: they have another one.
        """
        mine = {id(w) for w in weights}
        self._optimized = self._optimized or mine
        if mine != self._optimized:
            raise StrategyError(
                f"a second optimizer, {type(optimizer).__name__}, under {self}: its servers have "
                "one. Give one optimizer all parameters, in groups if their rates differ."
            )
        keys_of = {id(w): keys for w, keys in self._shards}
        groups = groups_of(optimizer)
        specs = [
            (spec, [k for w in params for k in keys_of.get(id(w), ())] if groups[1:] else [])
            for spec, params in groups
        ]
        if specs != self._specs:
            again = bool(self._specs) or self.mode == "async"  # others may be ahead
            for spec, keys in specs:
                self.store.set_optimizer(spec, keys=keys, anew=again)
            self._specs = specs

    # -- checkpoints ----------------------------------------------------------------------------

    def _own(self, optimizer: Optimizer | None) -> Optimizer | None:
        return None

    @torch.no_grad()
    def _loaded(self, optimizer: Optimizer | None) -> None:
        """Give the servers worker 0's values, once, also if a worker dies meanwhile."""
        mark = f"load {self._decisions}"
        if self._chief and not self.store.note(mark):
            if optimizer is not None:
                warnings.warn(
                    "The servers begin with a new optimizer: they keep its state for one run, and "
                    "no checkpoint has it.",
                    stacklevel=3,
                )
            for key, value in _spread(self._shards).items():
                self.store._assign(key, value)
            self.store.note(mark, "done")
        self._decide(0)  # the others wait
        self.pull()

    def _decide(self, number: int) -> int:
        """Worker 0's number, on all workers: the same again for a process that replaces one."""
        self._decisions += 1
        found = torch.tensor([number])
        self._share([f"decision {self._decisions}"], [found])
        return int(found)


def _by_servers(gradients: Tensor) -> None:
    """Leave gradients as they are: the servers sum what replicas push."""


def _spread(wholes: Iterable[tuple[Tensor, range]]) -> dict[Key, Tensor]:
    """The rows of each key, in the memory of the whole; the first shards are the larger ones."""
    return {
        key: rows
        for whole, keys in wholes
        for key, rows in zip(
            keys,
            whole.detach().tensor_split(len(keys)) if whole.dim() else [whole.detach()],
            strict=True,
        )
    }


# -- partitioners: how variables are cut along the first axis -----------------------------------


class Partitioner(ABC):
    """Decides in how many shards a variable lies on the servers.

    It is called with the variable's shape and dtype, and returns the number of shards of each axis,
    as TensorFlow's ``tf.distribute.experimental.partitioners`` do. Each shard is a key of the
    KVStore, and keys take turns among the servers.
    """

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            StrategyError: one is not a whole number, or smaller than 1.
        """
        for name, n in vars(self).items():
            if n is not None and (not isinstance(n, int) or n < 1):
                raise StrategyError(
                    f"{type(self).__name__}({name}={n!r}): give a whole number, at least 1."
                )

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The number of shards of each axis: 1 for all but the first.

        Args:
            shape: the variable's, of one dimension or more.
            dtype: the variable's.
        """
        rows, *others = shape
        row = max(1, math.prod(others)) * dtype.itemsize
        return [max(1, min(rows, self.count(rows, row))), *(1 for _ in others)]

    @abstractmethod
    def count(self, rows: int, row: int) -> int:
        """The number of shards that is wanted; more than there are rows are not made.

        Args:
            rows: the size of the axis that is cut.
            row: the bytes of each.
        """


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable.

    Args:
        num_shards: how many.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), torch.float32)
    [2, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.
    """

    num_shards: int

    def count(self, rows: int, row: int) -> int:
        """The number that was given."""
        return self.num_shards


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """As many shards as have about ``min_shard_bytes`` each, at most ``max_shards``.

    As TensorFlow's, it rounds their number up, so a shard may be smaller: of several each has about
    half of that or more.

    Args:
        min_shard_bytes: the size of a shard [bytes], 256 KiB by default.
        max_shards: the most shards of a variable; such as the number of servers.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), torch.float32)
    [2, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MinSizePartitioner``.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def count(self, rows: int, row: int) -> int:
        """⌈bytes / min_shard_bytes⌉."""
        return min(self.max_shards, math.ceil(rows * row / self.min_shard_bytes))


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as have at most ``max_shard_bytes`` each, at most ``max_shards``.

    Args:
        max_shard_bytes: the most bytes of a shard; one row is never cut.
        max_shards: the most shards of a variable, which then may be larger; None for any number.

    >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), torch.float32)
    [3, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MaxSizePartitioner``.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def count(self, rows: int, row: int) -> int:
        """⌈rows / rows that fit in a shard⌉."""
        shards = math.ceil(rows / max(1, self.max_shard_bytes // row))
        return min(self.max_shards or shards, shards)
