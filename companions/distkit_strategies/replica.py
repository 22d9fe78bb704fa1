"""Where training code runs, and what a replica's function can use: collectives and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from distkit.errors import StrategyError

if TYPE_CHECKING:
    from distkit_strategies.strategy import Strategy

_strategy: ContextVar[Strategy | None] = ContextVar("strategy", default=None)
_replica: ContextVar[ReplicaContext | None] = ContextVar("replica", default=None)
#: The strategy that has been entered, and the replica whose function ``run`` has called, if any.
strategy_here, running = _strategy.get, _replica.get


class ReduceOp(str, Enum):
    """How the values of the replicas become one."""

    SUM, MEAN = "sum", "mean"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        name = str(value).rpartition(".")[2].upper()  # TensorFlow's are ReduceOp.SUM, …
        if name not in cls.__members__:
            raise ValueError(f'no reduction {value!r}: there are "sum" and "mean".')
        return cls[name]


def get_strategy() -> Strategy:
    """The strategy whose scope or replica function this is; elsewhere the default one.

    Library code that asks here works with and without distribution.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    from distkit_strategies.strategy import DEFAULT

    return strategy_here() or DEFAULT


def get_replica_context() -> ReplicaContext | None:
    """The replica whose function this is; None in a scope, where code speaks for all replicas.

    Outside of every scope it is the only replica of the default strategy.

    >>> get_replica_context().replica_id_in_sync_group
    0
    """
    return running() or (None if strategy_here() else ReplicaContext(get_strategy()))


@contextmanager
def entered(strategy: Strategy, replica: ReplicaContext | None) -> Iterator[None]:
    """While it is open, code is in this strategy, and in this replica if there is one."""
    before, inside = _strategy.set(strategy), _replica.set(replica)
    try:
        yield
    finally:
        _replica.reset(inside)
        _strategy.reset(before)


@dataclass
class ReplicaContext:
    """One replica during ``strategy.run``: its number, and its collectives with the others.

    Args:
        strategy: the strategy that runs it.
        rows: the rows of its batch, if a tensor was among the arguments of the function.
        number: which run of the strategy this is, from 1.
    """

    strategy: Strategy
    rows: int | None = None
    number: int = 0
    #: The loss is divided by the global batch already: gradients are summed.
    summed: bool = field(default=False, repr=False)
    #: A regularization loss is divided by the number of replicas.
    scaled: bool = field(default=False, repr=False)

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's number, from 0."""
        return self.strategy._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self.strategy.num_replicas_in_sync

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """Sum or mean of a value over the replicas, through which gradients flow.

        ::

            y = Σ_r x_r         ∂(Σ_s L_s)/∂x_r = Σ_s ∂L_s/∂y

        Args:
            op: "sum" or "mean", in which each replica counts the same.
            value: a tensor of the same shape on all replicas, or a structure of them.

        Raises:
            StrategyError: on all replicas: the shapes differ.
        """
        reduce = self.strategy._reduce
        return pytree.tree_map(lambda x: reduce("all_reduce", ReduceOp(op), x), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """The values of all replicas, joined along a dimension; gradients flow back.

        Args:
            value: a tensor, or a structure of them; its size along ``axis`` may differ.
            axis: the dimension along which they are joined.

        Raises:
            StrategyError: on all replicas: other dimensions differ, or a scalar.
        """
        gather = self.strategy._gather
        return pytree.tree_map(lambda x: gather("all_gather", x, axis), value)

    def merge_call(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """``fn(strategy, *args, **kwargs)`` outside the replica, where ``strategy.reduce`` works.

        All replicas call it together. Its arguments and its result are this replica's own.

        Args:
            fn: gets the strategy first.
            args: passed on.
            kwargs: passed on.
        """
        with entered(self.strategy, None):
            return fn(self.strategy, *args, **(kwargs or {}))


# -- losses whose sum over the replicas is the mean over the global batch --------------------------


def compute_average_loss(
    per_example_loss: Tensor, *, global_batch_size: int | None = None
) -> Tensor:
    """This replica's part of the mean loss of the global batch: Σ of its examples / global batch.

    The gradients of this run are then summed over the replicas, and so is the loss:
    ``strategy.reduce("sum", loss)``.

    A row of shape (T,), such as the losses of a text's tokens, adds all its T losses: it is not
    averaged. For the mean over tokens give their number as ``global_batch_size``.

    Args:
        per_example_loss: a loss for each row, shape (B, …), as with ``reduction="none"``.
        global_batch_size: rows of all replicas; None to count them, which takes a small message.

    Raises:
        StrategyError: a scalar loss or no tensor, a size that is no whole number, or a call
            outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.compute_average_loss``.

    >>> import torch
    >>> compute_average_loss(torch.tensor([1.0, 2.0, 3.0]), global_batch_size=4)
    tensor(1.5000)
    """
    replica, size = _of_loss("compute_average_loss", per_example_loss), global_batch_size
    if not per_example_loss.dim():
        raise StrategyError(
            "compute_average_loss needs a loss for each example, not a scalar, which has been "
            'averaged already. Compute the loss with reduction="none".'
        )
    if size is not None and not (isinstance(size, Integral) and size >= 0):
        raise StrategyError(
            f"compute_average_loss(global_batch_size={size!r}): give the rows of all replicas' "
            "batches together, a whole number, or None to count them."
        )
    if size is None:
        shown = replica.strategy._compare("average_loss", [len(per_example_loss)])
        size = sum(rows for (rows,) in shown)
    replica.summed = True
    return per_example_loss.sum() / (size or math.inf)


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """This replica's part of a loss that does not depend on the batch: it, summed, / replicas.

    It goes with :func:`compute_average_loss`. A plain mean loss needs no scaling. A loss of sharded
    parameters, each of which has its gradient once and not on each replica, is whole in
    ``backward``.

    Raises:
        StrategyError: no tensor, or a call outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.scale_regularization_loss``.

    >>> import torch
    >>> scale_regularization_loss(torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    replica = _of_loss("scale_regularization_loss", regularization_loss)
    replica.scaled = True
    loss, replicas = regularization_loss.sum(), replica.num_replicas_in_sync
    if not hasattr(loss, "full_tensor"):
        return loss / replicas
    whole: Tensor = loss.full_tensor()
    return whole - whole.detach() * (1 - 1 / replicas)


def _of_loss(call: str, loss: Any) -> ReplicaContext:
    if not isinstance(loss, Tensor):
        raise StrategyError(
            f"{call} of {loss!r:.60}, a {type(loss).__name__}: give a tensor. Of a list of tensors "
            "torch.stack makes one, through which gradients flow."
        )
    if (replica := get_replica_context()) is None:
        raise StrategyError(
            f"{call} outside of a replica function: it divides what one replica computes. Call it "
            "in the function that strategy.run gets."
        )
    return replica
