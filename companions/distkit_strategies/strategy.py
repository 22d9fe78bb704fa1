"""The base class of all strategies, which is also the default strategy with one replica."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from distkit.data import DistributedDataset
from distkit.errors import StrategyError
from distkit_strategies import variables
from distkit_strategies.agreement import Agreement, all_gather_object, check_shapes, group_device
from distkit_strategies.replica import (
    ReduceOp,
    ReplicaContext,
    activate,
    current_replica,
    current_strategy,
)
from distkit_strategies.variables import CreatedVariables, with_rows

#: Arguments of ``distribute_dataset`` that control how data is divided.
_DIVISION = "policy", "shuffle", "seed"
#: 16-bit floating-point dtypes, which are summed in float32.
_HALF = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class InputContext:
    """The position of one input pipeline among all of them.

    Args:
        num_input_pipelines: the number of input pipelines, one for each process that reads data.
        input_pipeline_id: the index of this pipeline, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows in each replica's batch.

        Raises:
            StrategyError: the global batch size is not divisible by the number of replicas.

        >>> InputContext(4, 0, 4).get_per_replica_batch_size(128)
        32
        """
        per_replica, remainder = divmod(global_batch_size, self.num_replicas_in_sync)
        if remainder:
            raise StrategyError(
                f"A global batch of {global_batch_size} cannot be divided among "
                f"{self.num_replicas_in_sync} replicas. Use a multiple of the number of replicas, "
                "or strategy.distribute_dataset, which divides any batch."
            )
        return per_replica


class DeviceBatches:
    """Batches on a device; each batch is copied while the previous one is in use.

    Args:
        batches: an iterable; its ``len`` and other attributes are forwarded.
        device: the device of the tensors.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Any]:
        batches = map(self._copy, self._batches)
        for batch, _ in pairwise(chain(batches, [None])):  # copies the next batch first
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    def _copy(self, batch: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(self._device, non_blocking=True), batch)


class Strategy:
    """The default strategy: one replica, as in a program without strategies.

    A strategy can be created in the notebook. It is pickled as its constructor call and uses the
    process group of the ranks that unpickle it. In most strategies, each rank is a replica.

    Args:
        device: the device of variables and batches; None for torch's default.

    Source:
        TensorFlow, "Distributed training with TensorFlow", ``tf.distribute.Strategy``.

    >>> strategy = Strategy()
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(2, 1)
    >>> strategy.run(lambda x: model(x).sum(), args=(torch.zeros(4, 2),)).shape
    torch.Size([])
    """

    #: True if variables are sharded over the replicas.
    _sharded = False
    #: Returns the device if none is given.
    _default_device = staticmethod(torch.get_default_device)

    _call: partial[Strategy]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Record the constructor call, for pickling."""
        strategy = super().__new__(cls)
        strategy._call = partial(cls, *args, **options)
        return strategy

    def __reduce__(self) -> Any:
        """Pickle the constructor call and public attributes; private ones belong to the process."""
        return self._call, (), {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._devices = [] if device is None else [torch.device(device)]
        self._agreement, self._runs = Agreement(), 0

    # -- public interface -------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""
        return 1

    @property
    def device(self) -> torch.device:
        """The device of this replica's variables and batches."""
        if self._devices:
            return self._devices[self._replica % len(self._devices)]
        return self._default_device()

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Create variables in the context; at its end, all replicas get rank 0's values.

        Raises:
            StrategyError: the call is inside another strategy's scope or a replica function, the
                replicas have created different variables, or a variable is on a different device.
        """
        self._check_context("scope()")
        with activate(self, None), self.device, variables.watch_modules(self) as created:
            yield self
        self._check_devices(created.tensors)
        self._after_scope(created)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function as this replica, and return this replica's results, without gradients.

        Each ``optimizer.step()`` in the function first combines the gradients of all replicas.
        Replica r has a batch of n_r rows: the size of the first dimension of its first non-scalar
        tensor argument. If its loss is the mean over these rows, the combined gradient is the
        gradient of the mean over the global batch, even if replicas have different numbers of
        rows::

            g = Σ_r n_r g_r / Σ_r n_r

        With :func:`compute_average_loss`, the combined gradient is Σ_r g_r.

        Args:
            fn: plain torch code for one replica.
            args: the arguments of ``fn``, with this replica's tensors.
            kwargs: the keyword arguments of ``fn``.

        Raises:
            StrategyError: the call is inside a replica function, or another replica's function
                raised.
            Exception: ``fn`` raised; the strategy can still be used.
        """
        self._check_context("run()")
        self._runs += 1
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        rows = next((len(t) for t in tensors if t.dim()), None)
        replica = ReplicaContext(self, rows, self._runs)
        with self._run(replica), activate(self, replica):
            result = fn(*args, **(kwargs or {}))
        return pytree.tree_map(lambda leaf: with_rows(leaf, rows), result)

    def reduce(self, op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Return the sum or mean of a value over the replicas. Every replica gets the result.

        If the value is a tensor or float returned by :meth:`run`, its mean is weighted by the
        number of rows in each replica's batch, Σ n_r v_r / Σ n_r, because an unweighted mean would
        overweight the rows of small batches. Values that are computed from a result are weighted
        equally.

        Args:
            op: "sum" or "mean".
            value: a tensor or number of the same shape on all replicas, or a structure of these.
                Sparse tensors become dense.
            axis: a dimension to reduce as well; its size may differ between replicas. The mean is
                then taken over all elements along it, on all replicas.

        Raises:
            StrategyError: the shapes differ, the dimension does not exist, the values are not
                numbers, or the call is inside a replica function.
        """
        self._check_context("reduce()")
        return pytree.tree_map(
            lambda x: self._reduce(
                "reduce", ReduceOp(op), x, axis, rows=getattr(x, "_rows", None)
            ).detach(),
            value,
        )

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Return the values of all replicas, concatenated along a dimension.

        Args:
            value: a tensor, or a structure of tensors; its size along ``axis`` may differ. Sparse
                tensors become dense.
            axis: the dimension to concatenate along.

        Raises:
            StrategyError: other dimensions differ, the values are scalars or not numbers, or the
                call is inside a replica function.
        """
        self._check_context("gather()")
        return pytree.tree_map(lambda x: self._gather("gather", x, axis).detach(), value)

    def distribute_dataset(
        self,
        data: Any,
        global_batch: int | None = None,
        **division: Any,
    ) -> DeviceBatches:
        """Return this replica's batches of a dataset, on its device.

        The last batch of an epoch may have fewer rows. TensorFlow's ``drop_remainder`` is not
        supported: gradients and losses are weighted by rows, so every row counts.

        Args:
            data: see :class:`distkit.data.DistributedDataset`.
            global_batch: the total number of rows in all replicas' batches; required, since
                torch's datasets, unlike ``tf.data``, are not batched.
            division: ``policy``, ``shuffle``, ``seed``, as in ``DistributedDataset``.

        Raises:
            StrategyError: ``global_batch`` is missing or not an integer, an argument is unknown,
                or this process is a coordinator, which has no data.
            ValueError, TypeError, FileNotFoundError: see :class:`distkit.data.DistributedDataset`.
        """
        if unknown := sorted(division.keys() - {*_DIVISION}):
            raise StrategyError(
                f"distribute_dataset has no argument {unknown[0]}; it accepts global_batch, "
                f"{', '.join(_DIVISION)}. drop_remainder is not supported: gradients are "
                "weighted by rows, so the last batch of an epoch may have fewer."
            )
        return self._batches(data, global_batch, *self._input_shard, **division)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> DeviceBatches:
        """Return this replica's batches from a function that creates them, on its device.

        Args:
            dataset_fn: a function of an :class:`InputContext` that returns an iterable of this
                replica's batches.

        Raises:
            StrategyError: this process is a coordinator, which has no data.
        """
        shard, shards = self._input_shard
        context = InputContext(shards, shard, self.num_replicas_in_sync)
        return DeviceBatches(dataset_fn(context), self.device)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with the value of the only replica in this process."""
        return (value,)

    # -- hooks for subclasses ---------------------------------------------------------------

    @property
    def _replica(self) -> int:
        """The index of the replica in this process."""
        return 0

    @property
    def _chief(self) -> bool:
        """True in the only process that prints and writes shared files."""
        return self._replica == 0

    @property
    def _input_shard(self) -> tuple[int, int]:
        """The index of this process's share of a dataset, and the number of shares."""
        return self._replica, self.num_replicas_in_sync

    @property
    def _steps_outside_run(self) -> bool:
        """True if optimizers may step outside of replica functions."""
        return self._single_replica

    def _check_context(self, call: str) -> None:
        """Raise StrategyError in another strategy's scope, or in a replica function."""
        outer = current_strategy()
        if outer is not None and outer is not self:
            raise StrategyError(
                f"{call} of {self} was called inside {outer}, but strategies cannot be nested. "
                "Leave the scope of the outer strategy first."
            )
        if current_replica() is not None:
            raise StrategyError(
                f"{call} was called inside a replica function of {outer}. Call it outside `run`, "
                "or use dk.strategies.get_replica_context() in the replica function."
            )

    def _run(self, replica: ReplicaContext) -> contextlib.AbstractContextManager[None]:
        """Return a context for running this replica's function."""
        return self._agreement.inside_run()

    def _after_scope(self, created: CreatedVariables) -> None:
        """Make variables identical on all replicas, at the end of a scope.

        Raises:
            StrategyError: the replicas have created different variables; raised on all of them.
        """
        description = repr([(name, tuple(t.shape), t.dtype) for name, t in created.tensors])
        local = [len(created.tensors), zlib.crc32(description.encode())]
        gathered = self._compare("scope", local)
        if gathered.count(local) < len(gathered):
            counts = ", ".join(f"replica {r} created {n}" for r, (n, _) in enumerate(gathered))
            raise StrategyError(
                f"The replicas created variables that differ in number, name, shape or dtype: "
                f"{counts}. All replicas must create the same model."
            )
        for _, tensor in () if self._single_replica else created.tensors:
            dist.broadcast(tensor.detach(), 0)

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Combine the gradients of an optimizer's parameters over the replicas, before its step."""

    def _after_optimizer_step(self) -> None:
        """Send the results of a step to the other replicas."""

    def _local_optimizer(self, optimizer: Optimizer | None) -> Optimizer | None:
        """Return the optimizer whose state is saved or loaded by this process, if any."""
        return optimizer

    def _after_load(self, optimizer: Optimizer | None) -> None:
        """Distribute a checkpoint that has been loaded into this process."""

    def _broadcast_number(self, number: int) -> int:
        """Return the chief's number on all replicas."""
        return self._compare("checkpoint", [number])[0][0]

    # -- collectives -------------------------------------------------------------------------

    @property
    def _single_replica(self) -> bool:
        return self.num_replicas_in_sync == 1

    def _compare(self, call: str, values: Sequence[int]) -> list[list[int]]:
        """Exchange values with all replicas once all reach this call; see :mod:`.agreement`."""
        return [list(values)] if self._single_replica else self._agreement.compare(call, values)

    def _failures(self, error: Exception | None) -> list[str]:
        """Return the replicas' file errors, once all have tried to access their files."""
        message = "" if error is None else f"{type(error).__name__}: {error}"
        if not any(failed for (failed,) in self._compare("checkpoint", [bool(message)])):
            return []
        messages = enumerate([message] if self._single_replica else all_gather_object(message))
        return [f"replica {r}: {text}" for r, text in messages if text]

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the replicas."""
        total = x.clone(memory_format=torch.contiguous_format)
        if not self._single_replica:
            dist.all_reduce(total)
        return total

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all replicas, which have the same shape."""
        tensors = [torch.empty_like(x) for _ in range(self.num_replicas_in_sync)]
        if self._single_replica:
            return [x]
        dist.all_gather(tensors, x.contiguous())
        return tensors

    def _reduce(
        self,
        call: str,
        op: ReduceOp,
        value: Any,
        axis: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Return the sum or row-weighted mean over the replicas and, if given, along ``axis``."""
        x, mean = self._tensor(call, value), op is ReduceOp.MEAN
        dtype, x = x.dtype, _widen(x, mean)
        count = 1 if rows is None or not mean else rows
        if axis is not None:
            check_shapes(call, [x.shape], axis)
            x, count = x.sum(axis), x.shape[axis]
        gathered = self._compare(call, [count, *x.shape])
        check_shapes(call, [shape for _, *shape in gathered])
        if axis is None and mean:
            x = x * count if count else torch.zeros_like(x)  # the mean over no rows is NaN
        total: Tensor = _SumOfReplicas.apply(x, self, self._all_reduce)  # type: ignore[no-untyped-call]
        total = total / sum(n for n, *_ in gathered) if mean else total
        return total.to(dtype) if dtype in _HALF else total

    def _gather(self, call: str, value: Any, axis: int) -> Tensor:
        """Return the tensors of all replicas, concatenated along a dimension."""
        x = self._tensor(call, value)
        shapes = self._compare(call, x.shape)
        check_shapes(call, shapes, axis)
        local, sizes = x.movedim(axis, 0), [shape[axis] for shape in shapes]
        longest, offsets = max(sizes), [0, *accumulate(sizes)]
        padded = self._all_gather(_pad_rows(local.detach(), 0, longest))
        joined = torch.cat([rows[:size] for rows, size in zip(padded, sizes, strict=True)])
        padded_local = _pad_rows(local, offsets[self._replica], offsets[-1])
        with_gradient: Tensor = _SumOfReplicas.apply(padded_local, self, lambda _: joined)  # type: ignore[no-untyped-call]
        return with_gradient.movedim(0, axis)

    def _batches(
        self,
        data: Any,
        global_batch: int | None,
        replica: int,
        replicas: int,
        **division: Any,
    ) -> DeviceBatches:
        if not isinstance(global_batch, Integral):
            raise StrategyError(
                f"distribute_dataset needs an integer global_batch, the total number of rows in "
                f"all replicas' batches, such as 64; got {global_batch!r}."
            )
        rows = int(global_batch) * (replicas // self.num_replicas_in_sync)
        batches = DistributedDataset(data, rows, replica=replica, replicas=replicas, **division)
        return DeviceBatches(batches, self.device)

    def _tensor(self, call: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        try:
            return torch.as_tensor(value, dtype=dtype, device=self.device).to_dense()
        except (TypeError, ValueError, RuntimeError) as error:
            raise StrategyError(
                f"{call} accepts tensors and numbers; got {value!r:.60} "
                f"({type(value).__name__}). Check that the function passed to `run` returns its "
                "result."
            ) from error

    def _check_devices(self, named: Iterable[tuple[str, Tensor]]) -> None:
        expected = torch.empty(0, device=self.device).device  # adds a missing index
        for name, tensor in named:
            if tensor.device != expected:
                raise StrategyError(
                    f"{name} is on {tensor.device}, but the replica of {self} is on {self.device}. "
                    "Create it without a device argument, or pass its device to the strategy."
                )

    def __getattr__(self, name: str) -> Any:
        """Resolve TensorFlow's names that start with ``experimental_``, as in its tutorials."""
        plain = name.removeprefix("experimental_")
        if plain == name or not hasattr(type(self), plain):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is called {plain} in distkit.", stacklevel=2)
        return getattr(self, plain)

    def __repr__(self) -> str:
        return type(self).__name__


class ReplicatedStrategy(Strategy):
    """The base class of strategies whose replicas are the ranks of the process group."""

    _default_device = staticmethod(group_device)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of ranks; 1 if there is no process group."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def _replica(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0


class _SumOfReplicas(torch.autograd.Function):
    """A sum over the replicas; its gradient is the sum of the replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strategy: Strategy, total: Callable[..., Tensor]) -> Tensor:
        ctx.strategy = strategy
        return total(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.strategy._reduce("all_reduce", ReduceOp.SUM, gradient), None, None


def _pad_rows(rows: Tensor, begin: int, size: int) -> Tensor:
    """Return ``size`` rows: the given rows from index ``begin``, and zeros elsewhere."""
    zeros = rows.new_zeros(size - len(rows), *rows.shape[1:])
    return torch.cat([zeros[:begin], rows, zeros[begin:]])


def _widen(x: Tensor, mean: bool) -> Tensor:
    """Convert to a dtype wide enough for a sum, or for a mean of integers if ``mean`` is set."""
    if x.dtype in _HALF:
        return x.float()
    if x.is_floating_point() or x.is_complex():
        return x
    return x.double() if mean else x.long()


#: The strategy outside of any scope.
DEFAULT = Strategy()
