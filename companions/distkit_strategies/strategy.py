"""What all strategies share, and the default one: a single replica, nothing to communicate."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from distkit.errors import StrategyError
from distkit_strategies import variables
from distkit_strategies.agreement import check_shapes
from distkit_strategies.collectives import HALF, all_gather, all_reduce, wide
from distkit_strategies.context import ReplicaContext, check_may_enter, entered
from distkit_strategies.input import InputContext, InputOptions, Placed
from distkit_strategies.variables import Made, ReduceOp, remember_rows

#: How ``distribute_dataset`` can divide data.
_DIVISION = dict.fromkeys(("policy", "shuffle", "seed"))


class Strategy:
    """The default strategy: one replica, as without any strategy.

    A subclass says what its replicas do together, in six methods that do nothing here:

    ====================  ========================================================================
    ``_created``          the variables of a scope exist: make them the same on all replicas
    ``_synchronize``      before ``optimizer.step()``: make the gradients those of the whole batch
    ``_compare``          show each other some numbers before a collective, such as shapes
    ``_failures``         tell each other what kept one from writing or reading a file
    ``_all_reduce``       sum a tensor over the replicas
    ``_all_gather``       get the tensors of all replicas
    ====================  ========================================================================

    A strategy can be made in the notebook and travels with the function to the ranks; there it
    finds its process group when it is used. A replica is a rank.

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

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._runs = 0

    # -- what a program uses -----------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are put together."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where this replica's variables and batches are."""
        return self._device or torch.get_default_device()

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Open a block that makes variables; when it closes, all replicas have rank 0's values.

        Raises:
            StrategyError: inside another strategy's scope or a replica function; the replicas
                have made different variables, or some on another device.
        """
        check_may_enter(self, "scope()")
        with entered(self, None), self.device, variables.watched(self) as made:
            yield self
        self._check_devices((m.name, m.tensor) for m in made)
        self._created(made)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function as this replica, and return this replica's results, without gradients.

        Before each ``optimizer.step()`` in it, gradients are put together: replica r has a batch
        of n_r rows, and its loss is a mean over them, so that::

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
        replica = ReplicaContext(self, _rows((args, kwargs)), self._runs)
        with self._run(replica), entered(self, replica):
            result = fn(*args, **(kwargs or {}))
        result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        return pytree.tree_map(lambda t: remember_rows(t, replica.rows), result)

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
        return pytree.tree_map(lambda v: self._reduce("reduce", ReduceOp(op), v, axis), value)

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
        check_may_enter(self, "gather()")
        return pytree.tree_map(lambda v: all_gather(self, "gather", v, axis).detach(), value)

    def distribute_dataset(
        self,
        data: Any,
        global_batch: int | None = None,
        options: InputOptions | None = None,
        **division: Any,
    ) -> Placed:
        """This replica's batches of a dataset, on its device.

        The last batch of an epoch may have fewer rows. TensorFlow's ``drop_remainder`` is left
        out: gradients and losses are weighted by rows, so every row counts.

        Args:
            data: see :class:`distkit.data.DistributedDataset`.
            global_batch: rows of all replicas' batches together; always needed, since torch's
                datasets have no batches of their own as ``tf.data`` has.
            options: where batches go, and how many of them ahead.
            division: ``policy``, ``shuffle``, ``seed``: as of ``DistributedDataset``.

        Raises:
            StrategyError: ``global_batch`` is missing or no whole number, an unknown argument, or
                a coordinator, which has no rows.
            ValueError: see :class:`distkit.data.DistributedDataset`.
        """
        if unknown := sorted(division.keys() - _DIVISION):
            raise StrategyError(
                f"distribute_dataset has no argument {unknown[0]}: there are global_batch, "
                f"options, {', '.join(_DIVISION)}. There is no drop_remainder, since gradients "
                "are weighted by rows: the last batch of an epoch may have fewer."
            )
        place, places = self._pipeline
        division = {"replica": place, "replicas": places, **division}
        return self._batches(data, global_batch, options, **division)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Placed:
        """This replica's batches from a function that makes them, on its device.

        Args:
            dataset_fn: gets an :class:`InputContext`, and returns an iterable of this replica's
                batches.
            options: where batches go, and how many of them ahead.

        Raises:
            StrategyError: a coordinator, which has no rows.
        """
        place, places = self._pipeline
        context = InputContext(places, place, self.num_replicas_in_sync)
        return Placed(dataset_fn(context), self.device, options)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of the replicas in this process, of which there is one."""
        return (value,)

    # -- what a subclass changes -------------------------------------------------------------

    @property
    def _replica(self) -> int:
        """The number of the replica in this process."""
        return 0

    @property
    def _pipeline(self) -> tuple[int, int]:
        """Which share of a dataset is this process's, and of how many."""
        return self._replica, self.num_replicas_in_sync

    @property
    def _steps_alone(self) -> bool:
        """True if optimizers may step outside of replica functions."""
        return self.num_replicas_in_sync == 1

    def _check_place(self, call: str) -> None:
        """Refuse a call inside another strategy or a replica function."""
        check_may_enter(self, call)

    def _run(self, replica: ReplicaContext) -> contextlib.AbstractContextManager[None]:
        """Open while this replica's function runs."""
        return contextlib.nullcontext()

    @property
    def _chief(self) -> bool:
        """True in the one process that prints, and writes what is the same in all."""
        return self._replica == 0

    @property
    def _chief_saves(self) -> bool:
        """True if the others have nothing to save that the chief has not."""
        return False

    def _state_here(self, optimizer: Optimizer | None) -> Optimizer | None:
        """The optimizer whose state is in this process, to be saved or loaded; None for none."""
        return optimizer

    def _saved(self, folder: Path, optimizer: Optimizer | None) -> None:
        """A checkpoint has been written here: add what torch does not see."""

    def _loaded(self, folder: Path, optimizer: Optimizer | None) -> None:
        """A checkpoint has been read into this process: bring it where it belongs."""

    def _created(self, made: Sequence[Made]) -> None:
        """A scope ends: make these variables the same on all replicas."""

    def _check_closure(self, optimizer: Optimizer) -> None:
        """Before a step with a closure: refuse it if replicas would call it unequally often."""

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        """Before a step: make the gradients of its parameters those of the whole batch."""

    def _stepped(self) -> None:
        """After a step."""

    def _compare(self, call: str, facts: Sequence[int]) -> list[list[int]]:
        """The facts of all replicas, once all are in this call: see :mod:`.agreement`."""
        return [list(facts)]

    def _decide(self, number: int) -> int:
        """The chief's number, on all replicas."""
        return self._compare("checkpoint", [number])[0][0]

    def _failures(self, call: str, error: Exception | None) -> list[str]:
        """What has kept replicas from completing a call, the same on all: see :mod:`.agreement`."""
        return [] if error is None else [f"{type(error).__name__}: {error}"]

    def _all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over the replicas, in place."""

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of each replica; they have the same shape."""
        return [x]

    # -- built from these --------------------------------------------------------------------

    def _batches(
        self, data: Any, global_batch: int | None, options: InputOptions | None, **division: Any
    ) -> Placed:
        from distkit.data import DistributedDataset

        if not isinstance(global_batch, Integral):
            raise StrategyError(
                f"distribute_dataset(global_batch={global_batch!r}): give the rows of all "
                "replicas' batches together, a whole number, such as global_batch=64."
            )
        rows = global_batch * (division["replicas"] // self.num_replicas_in_sync)
        return Placed(DistributedDataset(data, rows, **division), self.device, options)

    def _reduce(self, call: str, op: ReduceOp, value: Any, axis: int | None = None) -> Tensor:
        given, rows = self._tensor(call, value).detach(), getattr(value, "_rows", None)
        dtype, mean, x = given.dtype, op is ReduceOp.MEAN, wide(given)
        if mean and x.dtype is torch.int64:
            x = x.double()
        count = 1 if rows is None or not mean else rows
        if axis is not None:
            check_shapes(call, [x.shape], axis)
            x, count = x.sum(axis), x.shape[axis]
        shown = self._compare(call, [count, *x.shape])
        check_shapes(call, [s[1:] for s in shown])
        if axis is None and mean:
            x = x * count if count else torch.zeros_like(x)  # without rows a mean is NaN
        total = all_reduce(self, x, sum(s[0] for s in shown) if mean else None)
        return total.to(dtype) if dtype in HALF else total

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


def _rows(values: Any) -> int | None:
    """The rows of a batch: the first dimension of the first tensor that has one."""
    tensors = (t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.dim())
    return next((len(t) for t in tensors), None)


#: The strategy outside of every scope.
DEFAULT = Strategy()
