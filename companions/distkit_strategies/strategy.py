"""The base class of strategies, which is also the default one with a single replica."""

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

#: Arguments of ``distribute_dataset`` that control the division of data.
_DIVISION = "policy", "shuffle", "seed"
#: Floating-point dtypes whose sums may overflow.
_HALF = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class InputContext:
    """The share of the batches that a dataset function creates.

    Args:
        num_input_pipelines: number of dataset functions; here one per replica.
        input_pipeline_id: index of this one, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of each replica's batch.

        Raises:
            StrategyError: the global batch cannot be divided by the number of replicas.

        >>> InputContext(4, 0, 4).get_per_replica_batch_size(128)
        32
        """
        each, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise StrategyError(
                f"A global batch of {global_batch_size} cannot be divided among "
                f"{self.num_replicas_in_sync} replicas. Take a multiple of that, or "
                "strategy.distribute_dataset, which divides any batch."
            )
        return each


class DeviceBatches:
    """Batches moved to a device, each while the previous one is in use.

    Args:
        batches: an iterable; its ``len`` and other attributes are forwarded.
        device: the device of the tensors.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches, self._to = batches, device

    def __iter__(self) -> Iterator[Any]:
        batches = map(self._moved, self._batches)
        for ahead, _ in pairwise(chain(batches, [None])):
            yield ahead

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    def _moved(self, batch: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(self._to, non_blocking=True), batch)


class Strategy:
    """The default strategy: one replica, as without any strategy.

    A strategy can be created in the notebook. It is pickled as its constructor call, and on the
    ranks uses their process group. A replica is a rank.

    Args:
        device: the device of variables and batches; None for torch's default device.

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
    #: The device if none is given.
    _default_device = staticmethod(torch.get_default_device)

    _call: partial[Strategy]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Remember the constructor call."""
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
        """Open a block that creates variables; at its end all replicas get rank 0's values.

        Raises:
            StrategyError: inside another strategy's scope or a replica function; the replicas
                have created different variables, or some on another device.
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

        Before each ``optimizer.step()`` in it, gradients are combined. If replica r has a batch of
        n_r rows, and its loss is their mean::

            g = Σ_r n_r g_r / Σ_r n_r

        is the gradient of the mean over the global batch, even if replicas have different numbers
        of rows. With :func:`compute_average_loss` it is Σ_r g_r. n_r is the first dimension of the
        first tensor among the arguments.

        Args:
            fn: plain torch code of one replica.
            args: its arguments, with this replica's tensors.
            kwargs: its keyword arguments.

        Raises:
            StrategyError: inside a replica function; another replica's function raised.
            Exception: the exception of ``fn``; the strategy can be used again.
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
        """Return the sum or mean of a value over the replicas, on all of them.

        The mean of a result of :meth:`run`, a tensor or a number, is weighted by the rows of each
        replica's batch, Σ n_r v_r / Σ n_r: an unweighted mean would overweight rows of small
        batches. Values computed from a result are weighted equally.

        Args:
            op: "sum" or "mean".
            value: a tensor or number of the same shape on all replicas, or a structure of them;
                sparse tensors give dense results.
            axis: also reduce this dimension, whose size may then differ: the mean is the sum of
                all elements divided by their number.

        Raises:
            StrategyError: shapes differ, no such dimension, no numbers, or this is a replica
                function.
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
            value: a tensor, or a structure of them; its size along ``axis`` may differ. Sparse
                tensors give dense results.
            axis: the dimension along which they are concatenated.

        Raises:
            StrategyError: other dimensions differ, a scalar, no numbers, or this is a replica
                function.
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
            global_batch: rows of all replicas' batches together; required, since torch's datasets,
                unlike ``tf.data``, are not batched.
            division: ``policy``, ``shuffle``, ``seed``, as in ``DistributedDataset``.

        Raises:
            StrategyError: ``global_batch`` is missing or no whole number, an argument is unknown,
                or this is a coordinator, which has no rows.
            ValueError: see :class:`distkit.data.DistributedDataset`.
        """
        if unknown := sorted(division.keys() - {*_DIVISION}):
            raise StrategyError(
                f"distribute_dataset has no argument {unknown[0]}: there are global_batch, "
                f"{', '.join(_DIVISION)}. There is no drop_remainder, since gradients "
                "are weighted by rows: the last batch of an epoch may have fewer."
            )
        return self._batches(data, global_batch, *self._pipeline, **division)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> DeviceBatches:
        """Return this replica's batches from a function that creates them, on its device.

        Args:
            dataset_fn: gets an :class:`InputContext`, and returns an iterable of this replica's
                batches.

        Raises:
            StrategyError: this is a coordinator, which has no rows.
        """
        pipeline, pipelines = self._pipeline
        context = InputContext(pipelines, pipeline, self.num_replicas_in_sync)
        return DeviceBatches(dataset_fn(context), self.device)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of the replicas in this process, always one."""
        return (value,)

    # -- hooks of subclasses ----------------------------------------------------------------

    @property
    def _replica(self) -> int:
        """The number of the replica in this process."""
        return 0

    @property
    def _chief(self) -> bool:
        """True in the one process that prints and writes shared files."""
        return self._replica == 0

    @property
    def _pipeline(self) -> tuple[int, int]:
        """Index of this process's share of a dataset, and number of shares."""
        return self._replica, self.num_replicas_in_sync

    @property
    def _steps_outside_run(self) -> bool:
        """True if optimizers may step outside of replica functions."""
        return self._single_replica

    def _check_context(self, call: str) -> None:
        """Check that a call is not inside another strategy or a replica function.

        Raises:
            StrategyError: it is.
        """
        outer = current_strategy()
        if outer is not None and outer is not self:
            raise StrategyError(
                f"{call} of {self} inside {outer}: strategies do not nest. Leave the scope of the "
                "outer one first."
            )
        if current_replica() is not None:
            raise StrategyError(
                f"{call} inside a replica function of {outer}. Call it outside `run`; in a replica "
                "function use dk.strategies.get_replica_context()."
            )

    def _run(self, replica: ReplicaContext) -> contextlib.AbstractContextManager[None]:
        """Return the context in which this replica's function runs."""
        return self._agreement.inside_run()

    def _after_scope(self, created: CreatedVariables) -> None:
        """Make variables equal on all replicas, at the end of a scope.

        Raises:
            StrategyError: on all replicas: they have created different variables.
        """
        description = repr([(name, tuple(t.shape), t.dtype) for name, t in created.tensors])
        facts = [len(created.tensors), zlib.crc32(description.encode())]
        gathered = self._compare("scope", facts)
        if gathered.count(facts) < len(gathered):
            counts = ", ".join(f"replica {r} made {n}" for r, (n, _) in enumerate(gathered))
            raise StrategyError(
                f"The replicas made different variables, by number, name, shape or dtype: {counts}."
                " All replicas must make the same model."
            )
        for _, tensor in () if self._single_replica else created.tensors:
            dist.broadcast(tensor.detach(), 0)

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Before a step, combine the gradients of its parameters over the replicas."""

    def _after_optimizer_step(self) -> None:
        """After a step, send its results to the other replicas."""

    def _local_optimizer(self, optimizer: Optimizer | None) -> Optimizer | None:
        """Return the optimizer whose state is in this process, to save or load; None for none."""
        return optimizer

    def _after_load(self, optimizer: Optimizer | None) -> None:
        """Distribute a checkpoint that has been loaded into this process."""

    def _decide(self, number: int) -> int:
        """Return the chief's number on all replicas."""
        return self._compare("checkpoint", [number])[0][0]

    # -- collectives -------------------------------------------------------------------------

    @property
    def _single_replica(self) -> bool:
        return self.num_replicas_in_sync == 1

    def _compare(self, call: str, facts: Sequence[int]) -> list[list[int]]:
        """Return the facts of all replicas, once all are in this call: see :mod:`.agreement`."""
        return [list(facts)] if self._single_replica else self._agreement.compare(call, facts)

    def _failures(self, error: Exception | None) -> list[str]:
        """Return the replicas' errors in reading or writing files, once all have tried."""
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
        """Return the sum or mean over the replicas, weighted by rows, also along a dimension."""
        x, mean = self._tensor(call, value), op is ReduceOp.MEAN
        dtype, x = x.dtype, _wide(x, mean)
        count = 1 if rows is None or not mean else rows
        if axis is not None:
            check_shapes(call, [x.shape], axis)
            x, count = x.sum(axis), x.shape[axis]
        gathered = self._compare(call, [count, *x.shape])
        check_shapes(call, [shape for _, *shape in gathered])
        if axis is None and mean:
            x = x * count if count else torch.zeros_like(x)  # without rows a mean is NaN
        total: Tensor = _Summed.apply(x, self, self._all_reduce)  # type: ignore[no-untyped-call]
        total = total / sum(n for n, *_ in gathered) if mean else total
        return total.to(dtype) if dtype in _HALF else total

    def _gather(self, call: str, value: Any, axis: int) -> Tensor:
        """Return the tensors of all replicas, concatenated along a dimension."""
        x = self._tensor(call, value)
        shapes = self._compare(call, x.shape)
        check_shapes(call, shapes, axis)
        local, sizes = x.movedim(axis, 0), [shape[axis] for shape in shapes]
        longest, offsets = max(sizes), [0, *accumulate(sizes)]
        padded = self._all_gather(_padded(local.detach(), 0, longest))
        joined = torch.cat([rows[:size] for rows, size in zip(padded, sizes, strict=True)])
        own = _padded(local, offsets[self._replica], offsets[-1])
        with_gradient: Tensor = _Summed.apply(own, self, lambda _: joined)  # type: ignore[no-untyped-call]
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
                f"distribute_dataset(global_batch={global_batch!r}): give the rows of all "
                "replicas' batches together, a whole number, such as global_batch=64."
            )
        rows = int(global_batch) * (replicas // self.num_replicas_in_sync)
        batches = DistributedDataset(data, rows, replica=replica, replicas=replicas, **division)
        return DeviceBatches(batches, self.device)

    def _tensor(self, call: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        try:
            return torch.as_tensor(value, dtype=dtype, device=self.device).to_dense()
        except (TypeError, ValueError, RuntimeError) as error:
            raise StrategyError(
                f"{call} of {value!r:.60}, a {type(value).__name__}: it combines tensors and "
                "numbers. Does the function that `run` gets return its result?"
            ) from error

    def _check_devices(self, named: Iterable[tuple[str, Tensor]]) -> None:
        expected = torch.empty(0, device=self.device).device  # with its index, if it has one
        for name, tensor in named:
            if tensor.device != expected:
                raise StrategyError(
                    f"{name} is on {tensor.device}, but the replica of {self} is on {self.device}. "
                    "Leave the placing to the scope, or choose the strategy's device."
                )

    def __getattr__(self, name: str) -> Any:
        """Resolve TensorFlow's names with ``experimental_``, which its tutorials use."""
        plain = name.removeprefix("experimental_")
        if plain == name or not hasattr(type(self), plain):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is {plain} here: it is no experiment.", stacklevel=2)
        return getattr(self, plain)

    def __repr__(self) -> str:
        return type(self).__name__


class ReplicatedStrategy(Strategy):
    """The base class of strategies whose replicas are the ranks of the process group."""

    _default_device = staticmethod(group_device)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of ranks; without a process group, 1."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def _replica(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0


class _Summed(torch.autograd.Function):
    """A sum over the replicas, whose gradient is the sum of the replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strategy: Strategy, total: Callable[..., Tensor]) -> Tensor:
        ctx.strategy = strategy
        return total(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.strategy._reduce("all_reduce", ReduceOp.SUM, gradient), None, None


def _padded(rows: Tensor, begin: int, size: int) -> Tensor:
    """Place the rows at ``begin`` among ``size`` rows; the others are 0."""
    zeros = rows.new_zeros(size - len(rows), *rows.shape[1:])
    return torch.cat([zeros[:begin], rows, zeros[begin:]])


def _wide(x: Tensor, mean: bool) -> Tensor:
    """Convert to a dtype wide enough for sums; whole numbers as in ``torch.sum``."""
    if x.dtype in _HALF:
        return x.float()
    if x.is_floating_point() or x.is_complex():
        return x
    return x.double() if mean else x.long()


#: The strategy outside of every scope.
DEFAULT = Strategy()
