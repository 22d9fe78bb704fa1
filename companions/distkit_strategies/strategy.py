"""What all strategies share, and the default one: a single replica, nothing to communicate."""

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
from distkit_strategies.agreement import Agreement, check_shapes, group_device, of_all
from distkit_strategies.replica import (
    ReduceOp,
    ReplicaContext,
    entered,
    running,
    strategy_here,
)
from distkit_strategies.variables import Made, remember_rows

#: How ``distribute_dataset`` can divide data.
_DIVISION = "policy", "shuffle", "seed"
#: Floating-point dtypes that sums overflow.
_HALF = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class InputContext:
    """Which batches a function should make.

    Args:
        num_input_pipelines: how many such functions run; here one per replica.
        input_pipeline_id: which one this is, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of each replica's batch.

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


class Placed:
    """Batches, moved to a device: each while the one before it is in use.

    Args:
        batches: what to iterate over; its ``len`` and other attributes show through.
        device: where tensors go.
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

    A strategy can be made in the notebook and travels with the function to the ranks, as the call
    that made it; there it uses their process group. A replica is a rank.

    Args:
        device: where variables are made and batches go; None for torch's default device.

    Source:
        TensorFlow, "Distributed training with TensorFlow", ``tf.distribute.Strategy``.

    >>> strategy = Strategy()
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(2, 1)
    >>> strategy.run(lambda x: model(x).sum(), args=(torch.zeros(4, 2),)).shape
    torch.Size([])
    """

    #: True if each replica has parts of the variables that the others do not have.
    _sharded = False
    #: The device of a strategy that is given none.
    _default_device = staticmethod(torch.get_default_device)

    _call: partial[Strategy]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Remember the call."""
        made = super().__new__(cls)
        made._call = partial(cls, *args, **options)
        return made

    def __reduce__(self) -> Any:
        """Pickle the call and public attributes: what else it keeps belongs to its process."""
        return self._call, (), {k: v for k, v in vars(self).items() if not k.startswith("_")}

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._devices = [] if device is None else [torch.device(device)]
        self._agreement, self._runs = Agreement(), 0

    # -- what a program uses -----------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where this replica's variables and batches are."""
        if self._devices:
            return self._devices[self._replica % len(self._devices)]
        return self._default_device()

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Open a block that makes variables; when it closes, all replicas have rank 0's values.

        Raises:
            StrategyError: inside another strategy's scope or a replica function; the replicas
                have made different variables, or some on another device.
        """
        self._check_place("scope()")
        with entered(self, None), self.device, variables.watched(self) as made:
            yield self
        self._check_devices(made.tensors)
        self._created(made)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function as this replica, and return this replica's results, without gradients.

        Before each ``optimizer.step()`` in it, gradients are combined: replica r has a batch of n_r
        rows, and its loss is a mean over them, so that::

            g = Σ_r n_r g_r / Σ_r n_r

        is the gradient of the mean over the whole batch, also when its pieces differ. With
        :func:`compute_average_loss` it is Σ_r g_r. n_r is the first dimension of the first tensor
        among the arguments.

        Args:
            fn: plain torch code of one replica.
            args: its arguments; tensors, and structures of them, are this replica's own.
            kwargs: likewise.

        Raises:
            StrategyError: inside a replica function; another replica's function raised.
            Exception: what ``fn`` raises; the strategy can be used again.
        """
        self._check_place("run()")
        self._runs += 1
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        rows = next((len(t) for t in tensors if t.dim()), None)
        replica = ReplicaContext(self, rows, self._runs)
        with self._run(replica), entered(self, replica):
            result = fn(*args, **(kwargs or {}))
        return pytree.tree_map(lambda leaf: remember_rows(leaf, rows), result)

    def reduce(self, op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Sum or mean of a value over the replicas, the same on all of them.

        The mean of what :meth:`run` has returned, a tensor or a number, is weighted by the rows of
        each replica's batch, Σ n_r v_r / Σ n_r: a mean of means would count rows of small pieces
        more. Of what is computed from it later, each replica's value counts the same.

        Args:
            op: "sum" or "mean".
            value: a tensor or number of the same shape on all replicas, or a structure of them;
                of a sparse tensor the result is dense.
            axis: also reduce this dimension, whose size may then differ: the mean is the sum
                of all elements divided by their number.

        Raises:
            StrategyError: shapes differ, no such dimension, no numbers, or this is a replica
                function.
        """
        self._check_place("reduce()")
        return pytree.tree_map(
            lambda x: self._reduce(
                "reduce", ReduceOp(op), x, axis, rows=getattr(x, "_rows", None)
            ).detach(),
            value,
        )

    def gather(self, value: Any, axis: int = 0) -> Any:
        """The values of all replicas, joined along a dimension in the order of replicas.

        Args:
            value: a tensor, or a structure of them; its size along ``axis`` may differ. Of sparse
                tensors the result is dense.
            axis: the dimension along which they are joined.

        Raises:
            StrategyError: other dimensions differ, a scalar, no numbers, or this is a replica
                function.
        """
        self._check_place("gather()")
        return pytree.tree_map(lambda x: self._gather("gather", x, axis).detach(), value)

    def distribute_dataset(
        self,
        data: Any,
        global_batch: int | None = None,
        **division: Any,
    ) -> Placed:
        """This replica's batches of a dataset, on its device.

        The last batch of an epoch may have fewer rows. TensorFlow's ``drop_remainder`` is left
        out: gradients and losses are weighted by rows, so every row counts.

        Args:
            data: see :class:`distkit.data.DistributedDataset`.
            global_batch: rows of all replicas' batches together; always needed, since torch's
                datasets have no batches of their own as ``tf.data`` has.
            division: ``policy``, ``shuffle``, ``seed``: as of ``DistributedDataset``.

        Raises:
            StrategyError: ``global_batch`` is missing or no whole number, an unknown argument, or
                a coordinator, which has no rows.
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
    ) -> Placed:
        """This replica's batches from a function that makes them, on its device.

        Args:
            dataset_fn: gets an :class:`InputContext`, and returns an iterable of this replica's
                batches.

        Raises:
            StrategyError: a coordinator, which has no rows.
        """
        pipeline, pipelines = self._pipeline
        context = InputContext(pipelines, pipeline, self.num_replicas_in_sync)
        return Placed(dataset_fn(context), self.device)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of the replicas in this process, of which there is one."""
        return (value,)

    # -- what a subclass changes -------------------------------------------------------------

    @property
    def _replica(self) -> int:
        """The number of the replica in this process."""
        return 0

    @property
    def _chief(self) -> bool:
        """True in the one process that prints, and writes what is the same in all."""
        return self._replica == 0

    @property
    def _pipeline(self) -> tuple[int, int]:
        """Which share of a dataset is this process's, and of how many."""
        return self._replica, self.num_replicas_in_sync

    @property
    def _steps_alone(self) -> bool:
        """True if optimizers may step outside of replica functions."""
        return self._alone

    def _check_place(self, call: str) -> None:
        """Refuse a call inside another strategy or a replica function.

        Raises:
            StrategyError: it is made there.
        """
        outer = strategy_here()
        if outer is not None and outer is not self:
            raise StrategyError(
                f"{call} of {self} inside {outer}: strategies do not nest. Leave the scope of the "
                "outer one first."
            )
        if running() is not None:
            raise StrategyError(
                f"{call} inside a replica function of {outer}. Call it outside `run`; in a replica "
                "function use dk.strategies.get_replica_context()."
            )

    def _run(self, replica: ReplicaContext) -> contextlib.AbstractContextManager[None]:
        """Open while this replica's function runs."""
        return self._agreement.inside_run()

    def _created(self, made: Made) -> None:
        """Make variables the same on all replicas.

        Raises:
            StrategyError: on all replicas: they have made different ones.
        """
        about = repr([(name, tuple(t.shape), t.dtype) for name, t in made.tensors])
        facts = [len(made.tensors), zlib.crc32(about.encode())]
        shown = self._compare("scope", facts)
        if shown.count(facts) < len(shown):
            counts = ", ".join(f"replica {r} made {n}" for r, (n, _) in enumerate(shown))
            raise StrategyError(
                f"The replicas made different variables, by number, name, shape or dtype: {counts}."
                " All replicas must make the same model."
            )
        for _, tensor in () if self._alone else made.tensors:
            dist.broadcast(tensor.detach(), 0)

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Before a step, make the gradients of its parameters those of the whole batch."""

    def _stepped(self) -> None:
        """After a step, give its results to the other replicas."""

    def _own(self, optimizer: Optimizer | None) -> Optimizer | None:
        """The optimizer whose state is in this process, to be saved or loaded; None for none."""
        return optimizer

    def _loaded(self, optimizer: Optimizer | None) -> None:
        """Bring a checkpoint, which has been loaded into this process, to where it belongs."""

    def _decide(self, number: int) -> int:
        """The chief's number, on all replicas."""
        return self._compare("checkpoint", [number])[0][0]

    # -- built from these --------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        return self.num_replicas_in_sync == 1

    def _compare(self, call: str, facts: Sequence[int]) -> list[list[int]]:
        """The facts of all replicas, once all are in this call: see :mod:`.agreement`."""
        return [list(facts)] if self._alone else self._agreement.compare(call, facts)

    def _failures(self, error: Exception | None) -> list[str]:
        """What has kept replicas from reading or writing files, once all have tried."""
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        if not any(failed for (failed,) in self._compare("checkpoint", [bool(mine)])):
            return []
        found = enumerate([mine] if self._alone else of_all(mine))
        return [f"replica {r}: {text}" for r, text in found if text]

    def _all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the replicas."""
        total = x.clone(memory_format=torch.contiguous_format)
        if not self._alone:
            dist.all_reduce(total)
        return total

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of each replica; they have the same shape."""
        found = [torch.empty_like(x) for _ in range(self.num_replicas_in_sync)]
        if self._alone:
            return [x]
        dist.all_gather(found, x.contiguous())
        return found

    def _reduce(
        self,
        call: str,
        op: ReduceOp,
        value: Any,
        axis: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Sum or mean over the replicas, weighted by rows, also along a dimension."""
        x, mean = self._tensor(call, value), op is ReduceOp.MEAN
        dtype, x = x.dtype, _wide(x, mean)
        count = 1 if rows is None or not mean else rows
        if axis is not None:
            check_shapes(call, [x.shape], axis)
            x, count = x.sum(axis), x.shape[axis]
        shown = self._compare(call, [count, *x.shape])
        check_shapes(call, [shape for _, *shape in shown])
        if axis is None and mean:
            x = x * count if count else torch.zeros_like(x)  # without rows a mean is NaN
        total: Tensor = _Summed.apply(x, self, self._all_reduce)  # type: ignore[no-untyped-call]
        total = total / sum(n for n, *_ in shown) if mean else total
        return total.to(dtype) if dtype in _HALF else total

    def _gather(self, call: str, value: Any, axis: int) -> Tensor:
        """The tensors of all replicas, joined along a dimension whose size may differ."""
        x = self._tensor(call, value)
        shapes = self._compare(call, x.shape)
        check_shapes(call, shapes, axis)
        mine, sizes = x.movedim(axis, 0), [shape[axis] for shape in shapes]
        most, begins = max(sizes), [0, *accumulate(sizes)]
        found = self._all_gather(_padded(mine.detach(), 0, most))
        joined = torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])
        whole = _padded(mine, begins[self._replica], begins[-1])
        with_gradient: Tensor = _Summed.apply(whole, self, lambda _: joined)  # type: ignore[no-untyped-call]
        return with_gradient.movedim(0, axis)

    def _batches(
        self,
        data: Any,
        global_batch: int | None,
        replica: int,
        replicas: int,
        **division: Any,
    ) -> Placed:
        if not isinstance(global_batch, Integral):
            raise StrategyError(
                f"distribute_dataset(global_batch={global_batch!r}): give the rows of all "
                "replicas' batches together, a whole number, such as global_batch=64."
            )
        rows = int(global_batch) * (replicas // self.num_replicas_in_sync)
        batches = DistributedDataset(data, rows, replica=replica, replicas=replicas, **division)
        return Placed(batches, self.device)

    def _tensor(self, call: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        try:
            return torch.as_tensor(value, dtype=dtype, device=self.device).to_dense()
        except (TypeError, ValueError, RuntimeError) as error:
            raise StrategyError(
                f"{call} of {value!r:.60}, a {type(value).__name__}: it combines tensors and "
                "numbers. Does the function that `run` gets return its result?"
            ) from error

    def _check_devices(self, named: Iterable[tuple[str, Tensor]]) -> None:
        here = torch.empty(0, device=self.device).device  # with its number, if it has one
        for name, tensor in named:
            if tensor.device != here:
                raise StrategyError(
                    f"{name} is on {tensor.device}, but the replica of {self} is on {self.device}. "
                    "Leave the placing to the scope, or choose the strategy's device."
                )

    def __getattr__(self, name: str) -> Any:
        """TensorFlow's names with ``experimental_``, which its tutorials have."""
        plain = name.removeprefix("experimental_")
        if plain == name or not hasattr(type(self), plain):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is {plain} here: it is no experiment.", stacklevel=2)
        return getattr(self, plain)

    def __repr__(self) -> str:
        return type(self).__name__


class ReplicatedStrategy(Strategy):
    """What strategies have in common whose replicas are the ranks of the process group."""

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
    """The rows from ``begin`` on, among ``size`` rows of which the others are 0."""
    zeros = rows.new_zeros(size - len(rows), *rows.shape[1:])
    return torch.cat([zeros[:begin], rows, zeros[begin:]])


def _wide(x: Tensor, mean: bool) -> Tensor:
    """The same numbers, in a dtype that has room for their sum; whole ones as ``torch.sum``."""
    if x.dtype in _HALF:
        return x.float()
    if x.is_floating_point() or x.is_complex():
        return x
    return x.double() if mean else x.long()


#: The strategy outside of every scope.
DEFAULT = Strategy()
