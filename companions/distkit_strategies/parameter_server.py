"""Training with variables on parameter servers, through the KVStore."""

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
    strategy_parameters,
)
from distkit_strategies.variables import CreatedVariables

#: A ``bigarray_bound`` so large that only the partitioner splits arrays, not the KVStore.
_NEVER_SPLIT = 1 << 62


class ParameterServerStrategy(ReplicatedStrategy):
    """Training with the variables on the servers of ``dk.Cluster(workers=2, servers=1)``.

    At the end of the scope, the servers get worker 0's values. Each ``optimizer.step()`` in ``run``
    pushes gradients and pulls values: the servers keep the optimizer's state and apply the update.
    Checkpoints contain only the values.

    With "async", as in TensorFlow, each worker is one replica: it takes steps with its own batches
    of ``global_batch`` rows and does not wait for the others. A dead worker is replaced, and its
    replacement runs the function from the start, with the current values. With "sync", the replicas
    are synchronized, and the result is the same as in one process.

    Args:
        variable_partitioner: a function of a variable's shape and dtype that returns the number of
            shards along each axis; None to split large variables as the KVStore does.
        mode: "async" or "sync".
        options: options of :func:`distkit.kvstore.create`, such as ``replication=2``, which
            tolerates the crash of a server.

    Raises:
        StrategyError: the mode is unknown, the partitioner is not callable, or, at the first scope,
            the cluster has no servers.

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
            raise StrategyError(f'mode must be "async" or "sync"; got {mode!r}.')
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise StrategyError(
                "variable_partitioner must be callable, such as "
                f"dk.strategies.FixedShardsPartitioner(2); got {variable_partitioner!r:.60}."
            )
        self.mode, self._partitioner = mode, variable_partitioner
        self._options: dict[str, Any] = {} if mode == "sync" else {"on_crash": "replace"}
        self._options |= {} if variable_partitioner is None else {"bigarray_bound": _NEVER_SPLIT}
        self._options |= options
        self.coordinated = False  # by a ClusterCoordinator
        self._variables: list[Tensor] = []
        self._shards: list[tuple[Tensor, range]] = []  # parameters and the keys of their shards
        self._optimized_ids: set[int] = set()
        self._specs: list[tuple[Any, list[int]]] = []  # optimizers on the servers
        self._broadcasts = 0

    # -- participants --------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """1 with "async"; the number of workers with "sync"."""
        return 1 if self.mode == "async" else super().num_replicas_in_sync

    @property
    def _replica(self) -> int:
        return 0 if self.mode == "async" else super()._replica

    @property
    def _chief(self) -> bool:
        return self.store.rank == 0

    @property
    def _steps_outside_run(self) -> bool:
        return False

    @property
    def _input_shard(self) -> tuple[int, int]:
        """This worker's index and the number of workers, not counting a coordinator."""
        node = kvstore.current_node()
        if self.mode == "sync" or node is None:
            return super()._input_shard
        if self._is_coordinator:
            raise StrategyError(
                "Worker 0 is the coordinator, so it has no share of a dataset. Create a dataset on "
                "each other worker: coordinator.create_per_worker_dataset(lambda: "
                "strategy.distribute_dataset(data, global_batch=64))."
            )
        return node.index - self.coordinated, node.workers - self.coordinated

    @property
    def _is_coordinator(self) -> bool:
        """True in the process that schedules functions."""
        return self.coordinated and self._chief

    def _check_context(self, call: str) -> None:
        super()._check_context(call)
        if call in ("run()", "reduce()") and self._is_coordinator:  # like TensorFlow
            warnings.warn(
                f"strategy.{call} was called on worker 0, which is the coordinator: it runs "
                "only there, not on the other workers. Call it in a function passed to "
                "coordinator.schedule.",
                stacklevel=3,
            )

    @property
    def store(self) -> kvstore.KVStore:
        """The store of this worker.

        Raises:
            StrategyError: this process is not a worker of a cluster with servers.
        """
        node = kvstore.current_node()
        if node is None or not node.servers:
            raise StrategyError(
                f"{self} needs parameter servers, but this process is not a worker of a cluster "
                "that has them. Run the function with dk.Cluster(workers=2, servers=1)"
                ".run(train, strategy)."
            )
        return kvstore.create(f"dist_{self.mode}", **self._options)

    # -- variables ------------------------------------------------------------------------------

    def _after_scope(self, created: CreatedVariables) -> None:
        if self.coordinated:
            raise StrategyError(
                "Variables were created after ClusterCoordinator(strategy), so the other workers "
                "do not have them. Create all variables before the coordinator."
            )
        super()._after_scope(created)
        known, shards = len(self._variables), len(self._shards)
        self._variables += [variable for _, variable in created.tensors]
        buffers: dict[Key, Tensor] = {}
        for n, variable in enumerate(self._variables[known:], known):
            if isinstance(variable, nn.Parameter):
                first = self._shards[-1][1].stop if self._shards else 0
                self._shards.append((variable, range(first, first + self._shard_count(variable))))
            else:
                buffers[f"buffer {n}"] = variable.detach()
        values = _rows_by_key(self._shards[shards:]) | buffers
        self._share([*values], [*values.values()])

    def _share(self, keys: list[Key], values: list[Tensor]) -> None:
        """Send the values of worker 0 to every worker."""
        self.store.init(keys, values)
        self.store.pull(keys, values)

    def _shard_count(self, variable: Tensor) -> int:
        """Return the number of shards of a variable."""
        if self._partitioner is None or not variable.dim():
            return 1
        shape = tuple(variable.shape)
        shards: Any = self._partitioner(shape, variable.dtype)
        first, *others = shards if isinstance(shards, list | tuple) and shards else [None]
        if not isinstance(first, int) or first < 1 or others != [1] * (len(shape) - 1):
            raise StrategyError(
                f"variable_partitioner returned {shards!r:.60} for a variable of shape {shape}. "
                "Variables are split along their first axis: return the number of shards of each "
                f"axis, such as {[2] + [1] * (len(shape) - 1)} for two shards."
            )
        return max(1, min(first, shape[0]))

    @torch.no_grad()
    def pull(self) -> None:
        """Pull the current values from the servers into this worker's parameters."""
        values = _rows_by_key(self._shards)
        self.store.pull([*values], [*values.values()])

    # -- a step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Push gradients and pull values; clear the gradients of the local optimizer."""
        weights, first = (
            strategy_parameters(self, optimizer),
            self.store.rank * self._single_replica,
        )
        combine(self, weights, replica, _summed_by_servers, "worker", first)
        self._set_optimizer(optimizer, weights)
        if replica.rows == 0 and self._single_replica:  # the mean over no rows is NaN
            self.pull()
        else:
            self._push({id(w) for w in weights if w.grad is not None})
        optimizer.zero_grad()

    def _push(self, weights: set[int]) -> None:
        """Push gradients and pull the new values, in the order of the layers."""
        shards = [(w, keys) for w, keys in self._shards if id(w) in weights]
        values = _rows_by_key(shards)
        gradients = _rows_by_key((w.grad, keys) for w, keys in shards if w.grad is not None)
        self.store.pushpull([*values], [*gradients.values()], [*values.values()])

    def _set_optimizer(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Send the optimizer with its current options to the servers.

        Raises:
            StrategyError: the servers have a different optimizer.
        """
        ids = {id(w) for w in weights}
        self._optimized_ids = self._optimized_ids or ids
        if ids != self._optimized_ids:
            raise StrategyError(
                f"{type(optimizer).__name__} is a second optimizer under {self}, whose servers "
                "support one. Pass all parameters to one optimizer, in groups if options differ."
            )
        keys_of = {id(w): keys for w, keys in self._shards}
        groups = groups_of(optimizer)
        specs = [
            (spec, [k for w in params for k in keys_of.get(id(w), ())] if groups[1:] else [])
            for spec, params in groups
        ]
        if specs != self._specs:
            replace = bool(self._specs) or self.mode == "async"  # other workers may be ahead
            for spec, keys in specs:
                self.store.set_optimizer(spec, keys=keys, replace=replace)
            self._specs = specs

    # -- checkpoints ----------------------------------------------------------------------------

    def _local_optimizer(self, optimizer: Optimizer | None) -> Optimizer | None:
        return None

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer | None) -> None:
        """Send worker 0's values to the servers, exactly once even if a worker dies."""
        mark = f"load {self._broadcasts}"
        if self._chief and not self.store.note(mark):
            if optimizer is not None:
                warnings.warn(
                    "The servers start with a new optimizer state: they keep it for one run, and "
                    "checkpoints do not contain it.",
                    stacklevel=3,
                )
            for key, value in _rows_by_key(self._shards).items():
                self.store._assign(key, value)
            self.store.note(mark, "done")
        self._broadcast_number(0)  # a barrier for the others
        self.pull()

    def _broadcast_number(self, number: int) -> int:
        """Return worker 0's number on all workers, including replacement processes."""
        self._broadcasts += 1
        value = torch.tensor([number])
        self._share([f"broadcast {self._broadcasts}"], [value])
        return int(value)


def _summed_by_servers(gradients: Tensor) -> None:
    """Do nothing: the servers sum the gradients that replicas push."""


def _rows_by_key(tensors: Iterable[tuple[Tensor, range]]) -> dict[Key, Tensor]:
    """Return a view of the rows of each key; if sizes differ, the first shards are larger."""
    return {
        key: rows
        for tensor, keys in tensors
        for key, rows in zip(
            keys,
            tensor.detach().tensor_split(len(keys)) if tensor.dim() else [tensor.detach()],
            strict=True,
        )
    }


# -- partitioners, which split variables along the first axis -------------------------------------


class Partitioner(ABC):
    """A function that determines the number of shards of a variable on the servers.

    It is called with the variable's shape and dtype, and returns the number of shards of each axis,
    like TensorFlow's ``tf.distribute.experimental.partitioners``. Each shard is a key of the
    KVStore; keys are spread evenly over the servers.
    """

    def __post_init__(self) -> None:
        """Raise StrategyError if a number is not a positive integer."""
        for name, n in vars(self).items():
            if n is not None and (not isinstance(n, int) or n < 1):
                raise StrategyError(
                    f"{type(self).__name__} needs an integer {name} of at least 1; got {n!r}."
                )

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        """Return the number of shards of each axis: 1 for all but the first.

        Args:
            shape: the shape of the variable, with one dimension or more.
            dtype: the dtype of the variable.
        """
        rows, *others = shape
        row = max(1, math.prod(others)) * dtype.itemsize
        return [max(1, min(rows, self.count(rows, row))), *(1 for _ in others)]

    @abstractmethod
    def count(self, rows: int, row: int) -> int:
        """Return the requested number of shards, which may exceed the number of rows.

        Args:
            rows: the size of the first axis.
            row: the size of a row [bytes].
        """


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """Splits every variable into the same number of shards.

    Args:
        num_shards: the number of shards.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), torch.float32)
    [2, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.
    """

    num_shards: int

    def count(self, rows: int, row: int) -> int:
        """Return ``num_shards``."""
        return self.num_shards


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """Splits variables into at most ``max_shards`` shards of about ``min_shard_bytes`` each.

    Like TensorFlow's partitioner, it rounds the number of shards up, so a shard may be only half as
    large.

    Args:
        min_shard_bytes: the size of a shard [bytes], 256 KiB by default.
        max_shards: maximum number of shards, such as the number of servers.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), torch.float32)
    [2, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MinSizePartitioner``.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def count(self, rows: int, row: int) -> int:
        """Return ⌈bytes / min_shard_bytes⌉."""
        return min(self.max_shards, math.ceil(rows * row / self.min_shard_bytes))


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """Splits variables into the fewest shards of at most ``max_shard_bytes`` each.

    Args:
        max_shard_bytes: maximum size of a shard [bytes]; rows are never split.
        max_shards: maximum number of shards, which takes precedence; None for no limit.

    >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), torch.float32)
    [3, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MaxSizePartitioner``.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def count(self, rows: int, row: int) -> int:
        """Return ⌈rows / rows that fit in a shard⌉."""
        shards = math.ceil(rows / max(1, self.max_shard_bytes // row))
        return min(self.max_shards or shards, shards)
