"""Variables on parameter servers: workers push gradients and pull values by the KVStore."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distkit import kvstore
from distkit.errors import StrategyError
from distkit.kvstore.protocol.messages import Key
from distkit.kvstore.protocol.optimizer import from_torch
from distkit_strategies.checkpoint import STATES
from distkit_strategies.context import ReplicaContext
from distkit_strategies.gradients import (
    first_not_finite,
    make_dense,
    own_parameters,
    put_together,
    refuse_not_finite,
)
from distkit_strategies.mirrored import ReplicatedStrategy
from distkit_strategies.partitioners import cuts
from distkit_strategies.variables import Made, owned

#: No array is cut by its size: the partitioner does it.
_WHOLE = 1 << 62
#: The mark of a checkpoint that worker 0 has put on the servers.
_GIVEN = 1


class Shard(NamedTuple):
    """A variable's rows that are one key of the store."""

    key: int
    variable: Tensor
    rows: slice

    @property
    def value(self) -> Tensor:
        """The rows, in the variable's own memory."""
        return self.variable.detach()[self.rows] if self.variable.dim() else self.variable.detach()

    @property
    def gradient(self) -> Tensor:
        """The rows of its gradient, which it has."""
        g = self.variable.grad
        assert g is not None
        return g[self.rows] if g.dim() else g


class ParameterServerStrategy(ReplicatedStrategy):
    """Training with the variables on the servers of ``dk.Cluster(workers=2, servers=1)``.

    Leaving the scope, variables have worker 0's values, on the servers. Each ``optimizer.step()``
    in ``run`` pushes gradients and pulls values: the servers keep the optimizer's state and make
    the update. With "async", as in TensorFlow, each worker is one replica: it steps with its own
    batches, of ``global_batch`` rows each, and waits for nobody. A worker that dies is replaced and
    trains from the beginning, on the values that are there. With "sync" the replicas are in sync:
    the result is that of one process.

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
        self._forget()

    def _forget(self) -> None:
        self._shards: list[Shard] = []
        self._variables: list[Tensor] = []
        self._rule: Any = None
        self._optimized: set[int] | None = None
        self._loads = self._decisions = 0  # so many checkpoints were loaded, numbers agreed on
        self.coordinated = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the variables: they belong to this process."""
        own = ("_shards", "_variables", "_rule", "_optimized", "_loads", "_decisions")
        return {k: v for k, v in super().__getstate__().items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

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
    def _chief_saves(self) -> bool:
        return True

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
        return self.coordinated and self.store.rank == 0

    def _check_place(self, call: str) -> None:
        super()._check_place(call)
        if self._coordinates:  # TensorFlow warns, too
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

    def _created(self, made: Sequence[Made]) -> None:
        if self.coordinated:
            raise StrategyError(
                "Variables were made after ClusterCoordinator(strategy): the other workers do "
                "not have them. Make all variables before the coordinator."
            )
        if self.mode == "sync":
            super()._created(made)
        first = len(self._shards)
        for m in made:
            self._shards += self._cut(m.tensor) if m.trains else []
        values: dict[Key, Tensor] = {s.key: s.value for s in self._shards[first:]}
        before, buffers = len(self._variables), [m.tensor for m in made if not m.trains]
        values |= {f"buffer {before + n}": b.detach() for n, b in enumerate(buffers)}
        self._variables += [m.tensor for m in made]
        self.store.broadcast([*values], [*values.values()], [*values.values()])

    def _cut(self, variable: Tensor) -> list[Shard]:
        rows, first = variable.shape[0] if variable.dim() else 1, len(self._shards)
        ends = cuts(rows, self._count(variable))
        return [Shard(first + n, variable, slice(*end)) for n, end in enumerate(ends)]

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
        self.store.pull([s.key for s in self._shards], [s.value for s in self._shards])

    # -- a step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Push gradients and pull values; the optimizer is left without gradients to apply."""
        weights = own_parameters(self, optimizer)
        make_dense(weights)
        if self.mode == "sync":
            put_together(self, weights, replica, _only_masks)
        elif replica.rows != 0 and (bad := first_not_finite(w.grad for w in weights)) >= 0:
            refuse_not_finite(weights[bad], replica, self.store.rank, "worker")
        self._tell(optimizer, weights)
        ids = {id(w) for w in weights if w.grad is not None}
        mine = [s for s in self._shards if id(s.variable) in ids]
        if replica.rows == 0 and self.mode == "async":  # the mean over no rows is NaN
            self.pull()
        else:
            self._push(mine)
        optimizer.zero_grad()

    def _push(self, shards: list[Shard]) -> None:
        """Push gradients, and pull what comes of them; the first layers go first."""
        keys: list[Key] = [s.key for s in shards]
        values = [s.value for s in shards]
        priorities = [-n for n in range(len(shards))]
        self.store.pushpull(keys, [s.gradient for s in shards], values, priorities)

    def keeping_buffers(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a scheduled function, which may not change a buffer: nobody would hear of it.

        Raises:
            StrategyError: it has.
        """
        buffers = [v for v in self._variables if not isinstance(v, nn.Parameter)]
        before = [(b, b.clone()) for b in buffers if b.is_floating_point()]
        result = fn(*args, **kwargs)
        for buffer, was in before:
            if not torch.allclose(buffer, was, rtol=0, atol=0, equal_nan=True):
                raise StrategyError(
                    f"A scheduled function changed {owned(buffer)[1]}, a buffer: under a "  # type: ignore[index]
                    "ClusterCoordinator each worker would have its own, and the coordinator none. "
                    "Put such layers into eval() mode, use nn.GroupNorm or nn.LayerNorm, or "
                    "return the numbers from the function."
                )
        return result

    # -- checkpoints ----------------------------------------------------------------------------

    def _state_here(self, optimizer: Optimizer | None) -> Optimizer | None:
        return None

    def _saved(self, folder: Path, optimizer: Optimizer | None) -> None:
        if optimizer is not None and self._chief:
            self._tell(optimizer, own_parameters(self, optimizer))
            self.store.save_optimizer_states(folder / STATES, dump_optimizer=True)

    @torch.no_grad()
    def _loaded(self, folder: Path, optimizer: Optimizer | None) -> None:
        if self.mode == "sync":
            if self._chief:
                self._give(folder, optimizer)
            self.store.barrier()
        else:
            self._give_once(folder, optimizer)
        self.pull()

    def _give(self, folder: Path, optimizer: Optimizer | None) -> None:
        """Put the values of a checkpoint, which are here, on the servers."""
        for s in self._shards:
            self.store._assign(s.key, s.value)
        if optimizer is not None:
            self._load_states(folder / STATES, optimizer)

    def _give_once(self, folder: Path, optimizer: Optimizer | None) -> None:
        """Worker 0 gives the values, and the others wait for them; a mark on the servers says so.

        Who takes a dead worker's place does not wait: worker 0 may have gone on long ago. Nor does
        worker 0 give the values a second time: the steps that were made since would be lost.
        """
        mark, node = f"loaded {self._loads}", kvstore.here()
        assert node is not None
        self._loads += 1
        if self._chief and not node.life:
            self._give(folder, optimizer)
            self._agreed(mark, _GIVEN)
        elif self._chief and self._agreed(mark, 0) != _GIVEN:  # its life before ended in between
            self._give(folder, optimizer)
            self.store._assign(mark, torch.tensor([_GIVEN]))
        elif not node.life:
            self._agreed(mark, 0)

    def _agreed(self, key: Key, number: int) -> int:
        """Worker 0's number, on all workers; if it had ended before it told one, another's."""
        told = torch.tensor([number])
        self.store.broadcast([key], [told], [told])
        return int(told)

    def _decide(self, number: int) -> int:
        if self.mode == "sync":
            return super()._decide(number)
        self._decisions += 1
        return self._agreed(f"decision {self._decisions}", number)

    def _load_states(self, file: Path, optimizer: Optimizer) -> None:
        self.store.load_optimizer_states(file)
        self._rule = self.store._optimizer
        self._tell(optimizer, own_parameters(self, optimizer))

    # -- the optimizer --------------------------------------------------------------------------

    def _tell(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Let the servers have the optimizer, as it is now."""
        mine = {id(w) for w in weights}
        self._optimized = self._optimized or mine
        if mine != self._optimized:
            raise StrategyError(
                f"a second optimizer, {type(optimizer).__name__}, under {self}: its servers have "
                "one. Give one optimizer all parameters, in groups if their rates differ."
            )
        numbers = {id(v): n for n, v in enumerate(self._variables)}
        rule = from_torch(optimizer, numbers)
        of: dict[Key, int] = {s.key: numbers[id(s.variable)] for s in self._shards}
        rates, decays = (
            {k: mult[n] for k, n in of.items() if n in mult}
            for mult in (rule.lr_mult, rule.wd_mult)
        )
        rule = replace(rule, lr_mult=rates, wd_mult=decays)
        if rule != self._rule:
            again = self._rule is not None or self.mode == "async"  # others may be ahead
            self.store.set_optimizer(rule, anew=again)
            self._rule = rule


def _only_masks(x: Tensor) -> None:
    """Sum what says which gradients there are; the gradients themselves are summed by servers."""
    if not x.is_floating_point():
        dist.all_reduce(x)
