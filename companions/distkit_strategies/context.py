"""Where training code is: in a strategy's scope, in a replica function, or in neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distkit.errors import StrategyError
from distkit_strategies.agreement import check_shapes
from distkit_strategies.collectives import all_gather, all_reduce

if TYPE_CHECKING:
    from distkit_strategies.strategy import Strategy

_strategy: ContextVar[Strategy | None] = ContextVar("strategy", default=None)
_replica: ContextVar[ReplicaContext | None] = ContextVar("replica", default=None)


def get_strategy() -> Strategy:
    """The strategy whose scope or replica function this is; elsewhere the default one.

    Library code that asks here works with and without distribution.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    from distkit_strategies.strategy import DEFAULT

    return _strategy.get() or DEFAULT


def get_replica_context() -> ReplicaContext | None:
    """The replica whose function this is; None in a scope, where code speaks for all replicas.

    Outside of every scope it is the only replica of the default strategy.

    >>> get_replica_context().replica_id_in_sync_group
    0
    """
    return _replica.get() or (None if _strategy.get() else ReplicaContext(get_strategy()))


def replica() -> ReplicaContext | None:
    """The replica whose function this is, if ``run`` has called it."""
    return _replica.get()


def has_strategy() -> bool:
    """True in a strategy's scope and in its replica functions."""
    return _strategy.get() is not None


def in_cross_replica_context() -> bool:
    """True where code speaks for all replicas: in a scope, outside of replica functions."""
    return get_replica_context() is None


@contextmanager
def entered(strategy: Strategy, replica: ReplicaContext | None) -> Iterator[None]:
    """While it is open, code is in this strategy, and in this replica if there is one."""
    before, inside = _strategy.set(strategy), _replica.set(replica)
    try:
        yield
    finally:
        _replica.reset(inside)
        _strategy.reset(before)


def check_may_enter(strategy: Strategy, what: str) -> None:
    """Refuse what stands inside another strategy, or inside a replica function.

    Raises:
        StrategyError: it does.
    """
    outer = _strategy.get()
    if outer is not None and outer is not strategy:
        raise StrategyError(
            f"{what} of {strategy} inside {outer}: strategies do not nest. Leave the scope of "
            "the outer one first."
        )
    if _replica.get() is not None:
        raise StrategyError(
            f"{what} inside a replica function of {outer}. Call it outside `run`; in a replica "
            "function use dk.strategies.get_replica_context()."
        )


@dataclass
class ReplicaContext:
    """One replica during ``strategy.run``: who it is, and how it meets the others.

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

    def all_reduce(self, op: str, value: Any) -> Any:
        """Sum or mean of a value over the replicas, through which gradients flow.

        ::

            y = Σ_r x_r         ∂(Σ_s L_s)/∂x_r = Σ_s ∂L_s/∂y

        Args:
            op: "sum" or "mean", in which each replica counts the same.
            value: a tensor of the same shape on all replicas, or a structure of them.

        Raises:
            StrategyError: on all replicas: the shapes differ.
        """
        from distkit_strategies.variables import ReduceOp

        parts = self.num_replicas_in_sync if ReduceOp(op) is ReduceOp.MEAN else None
        return pytree.tree_map(lambda x: self._all_reduce(x, parts), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """The values of all replicas, joined along a dimension; gradients flow back.

        Args:
            value: a tensor, or a structure of them; its size along ``axis`` may differ.
            axis: the dimension along which they are joined.

        Raises:
            StrategyError: on all replicas: other dimensions differ, or a scalar.
        """
        gather = partial(all_gather, self.strategy, "all_gather", axis=axis)
        return pytree.tree_map(gather, value)

    def _all_reduce(self, value: Any, parts: int | None) -> Tensor:
        x = self.strategy._tensor("all_reduce", value)
        check_shapes("all_reduce", self.strategy._compare("all_reduce", x.shape))
        return all_reduce(self.strategy, x, parts)

    def mean_loss(self, loss: Tensor | float) -> Tensor:
        """The loss of the whole batch, for an optimizer that looks at it."""
        from distkit_strategies.variables import ReduceOp, remember_rows

        op = ReduceOp.SUM if self.summed else ReduceOp.MEAN
        if not isinstance(loss, Tensor):
            loss = torch.tensor(loss, dtype=torch.float64)
        return self.strategy._reduce("reduce", op, remember_rows(loss.detach(), self.rows))

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
