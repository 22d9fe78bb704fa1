"""The current strategy and replica, and the collectives and losses of replica functions."""

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
#: Return the active strategy, and the replica whose function is running, if any.
current_strategy, current_replica = _strategy.get, _replica.get


class ReduceOp(str, Enum):
    """How values of the replicas are reduced."""

    SUM, MEAN = "sum", "mean"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        name = str(value).rpartition(".")[2].upper()  # TensorFlow's names are ReduceOp.SUM, …
        if name not in cls.__members__:
            raise ValueError(f'unknown reduction {value!r}: use "sum" or "mean".')
        return cls[name]


def get_strategy() -> Strategy:
    """Return the strategy of the current scope or replica function, or the default one elsewhere.

    Library code that uses this function works with and without distribution.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    from distkit_strategies.strategy import DEFAULT

    return current_strategy() or DEFAULT


def get_replica_context() -> ReplicaContext | None:
    """Return the replica of the current function; None in a scope, which applies to all replicas.

    Outside of any scope, return the only replica of the default strategy.

    >>> get_replica_context().replica_id_in_sync_group
    0
    """
    return current_replica() or (None if current_strategy() else ReplicaContext(get_strategy()))


@contextmanager
def activate(strategy: Strategy, replica: ReplicaContext | None) -> Iterator[None]:
    """Make a strategy and a replica, or no replica, current in the context."""
    strategy_token, replica_token = _strategy.set(strategy), _replica.set(replica)
    try:
        yield
    finally:
        _replica.reset(replica_token)
        _strategy.reset(strategy_token)


@dataclass
class ReplicaContext:
    """A replica during ``strategy.run``, with its collectives.

    Args:
        strategy: the strategy that runs it.
        rows: the number of rows of its batch, if the function has a tensor argument.
        number: the number of the strategy's run, from 1.
    """

    strategy: Strategy
    rows: int | None = None
    number: int = 0
    #: True if the loss is already divided by the global batch size, so gradients are summed.
    summed: bool = field(default=False, repr=False)
    #: True if a regularization loss is divided by the number of replicas.
    scaled: bool = field(default=False, repr=False)

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's index, from 0."""
        return self.strategy._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self.strategy.num_replicas_in_sync

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """Return the sum or mean of a value over the replicas, with gradients.

        ::

            y = Σ_r x_r         ∂(Σ_s L_s)/∂x_r = Σ_s ∂L_s/∂y

        Args:
            op: "sum", or "mean" with equal weights for all replicas.
            value: a tensor of the same shape on all replicas, or a structure of such tensors.

        Raises:
            StrategyError: the shapes differ; raised on all replicas.
        """
        reduce = self.strategy._reduce
        return pytree.tree_map(lambda x: reduce("all_reduce", ReduceOp(op), x), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Return the values of all replicas, concatenated along a dimension, with gradients.

        Args:
            value: a tensor, or a structure of tensors; its size along ``axis`` may differ.
            axis: the dimension to concatenate along.

        Raises:
            StrategyError: other dimensions differ, or the value is a scalar; raised on all
                replicas.
        """
        gather = self.strategy._gather
        return pytree.tree_map(lambda x: gather("all_gather", x, axis), value)

    def merge_call(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``fn(strategy, *args, **kwargs)`` outside the replica function.

        The function may call ``strategy.reduce``. All replicas call it, with their own arguments.

        Args:
            fn: the function; its first argument is the strategy.
            args: its other arguments.
            kwargs: its keyword arguments.
        """
        with activate(self.strategy, None):
            return fn(self.strategy, *args, **(kwargs or {}))


# -- losses that sum to the mean over the global batch ---------------------------------------------


def compute_average_loss(
    per_example_loss: Tensor, *, global_batch_size: int | None = None
) -> Tensor:
    """Return the sum of this replica's per-example losses, divided by the global batch size.

    The gradients of this run are then summed over the replicas. Sum the loss in the same way, with
    ``strategy.reduce("sum", loss)``.

    A row of shape (T,), such as the losses of a text's tokens, contributes the sum of its losses.
    For the mean over tokens, pass the number of tokens as ``global_batch_size``.

    Args:
        per_example_loss: the loss of each row, shape (B, …), as with ``reduction="none"``.
        global_batch_size: the number of rows on all replicas; None to count them with a small
            all-gather.

    Raises:
        StrategyError: the loss is a scalar or not a tensor, the size is not an integer ≥ 0, or the
            call is in a scope, but outside of a replica function.

    Source:
        TensorFlow, ``tf.nn.compute_average_loss``.

    >>> import torch
    >>> compute_average_loss(torch.tensor([1.0, 2.0, 3.0]), global_batch_size=4)
    tensor(1.5000)
    """
    replica, size = _replica_of_loss("compute_average_loss", per_example_loss), global_batch_size
    if not per_example_loss.dim():
        raise StrategyError(
            "compute_average_loss needs the loss of each example, not a scalar, which is already "
            'averaged. Compute the loss with reduction="none".'
        )
    if size is not None and not (isinstance(size, Integral) and size >= 0):
        raise StrategyError(
            "compute_average_loss needs an integer global_batch_size, the total number of rows in "
            f"all replicas' batches, or None to count them; got {size!r}."
        )
    if size is None:
        gathered = replica.strategy._compare("average_loss", [len(per_example_loss)])
        size = sum(rows for (rows,) in gathered)
    replica.summed = True
    return per_example_loss.sum() / (size or math.inf)


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """Return this replica's share of a loss that does not depend on the batch.

    Use it with :func:`compute_average_loss`; a plain mean loss needs no scaling. If the parameters
    are sharded, only the loss is divided, not its gradients, since each of them exists on only one
    replica.

    Raises:
        StrategyError: the loss is not a tensor, or the call is in a scope, but outside of a replica
            function.

    Source:
        TensorFlow, ``tf.nn.scale_regularization_loss``.

    >>> import torch
    >>> scale_regularization_loss(torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    replica = _replica_of_loss("scale_regularization_loss", regularization_loss)
    replica.scaled = True
    loss, replicas = regularization_loss.sum(), replica.num_replicas_in_sync
    if not hasattr(loss, "full_tensor"):
        return loss / replicas
    full_loss: Tensor = loss.full_tensor()
    return full_loss - full_loss.detach() * (1 - 1 / replicas)


def _replica_of_loss(call: str, loss: Any) -> ReplicaContext:
    if not isinstance(loss, Tensor):
        raise StrategyError(
            f"{call} needs a tensor; got {loss!r:.60} ({type(loss).__name__}). Use torch.stack to "
            "combine a list of tensors, so that gradients flow through it."
        )
    if (replica := get_replica_context()) is None:
        raise StrategyError(
            f"{call} was called outside of a replica function, but it divides the loss of one "
            "replica. Call it in the function passed to strategy.run."
        )
    return replica
