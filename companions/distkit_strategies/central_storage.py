"""Variables in one place: the first rank updates them, and gives them to the others."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from distkit.errors import StrategyError
from distkit_strategies.context import ReplicaContext
from distkit_strategies.gradients import as_one, own_parameters, put_together
from distkit_strategies.mirrored import ReplicatedStrategy


class CentralStorageStrategy(ReplicatedStrategy):
    """Synchronous training with the variables on rank 0, and computation on all ranks.

    Before each step the gradients of all replicas are summed on rank 0. It alone makes the step,
    and has the optimizer's state; then it sends the new values to the others. The result is
    that of one process. All messages go to or from one rank: compare :class:`MirroredStrategy`.

    Source:
        TensorFlow, ``tf.distribute.experimental.CentralStorageStrategy``.

    Example:
        >>> cluster.run(train, CentralStorageStrategy())              # doctest: +SKIP
    """

    def _check_closure(self, optimizer: Optimizer) -> None:
        if not self._alone:
            raise StrategyError(
                f"{type(optimizer).__name__}.step(closure) under {self}: rank 0 alone makes the "
                "step, and would call the closure more often than the others. Call step() without "
                "a closure, or use MirroredStrategy."
            )

    def _synchronize(self, optimizer: Optimizer, replica: ReplicaContext) -> None:
        weights = own_parameters(self, optimizer)
        if self._alone:
            return
        put_together(self, weights, replica, _sum_on_0)
        self._updated = [w for w in weights if w.grad is not None]
        if self._replica:
            optimizer.zero_grad()  # nothing is left to do here

    @torch.no_grad()
    def _stepped(self) -> None:
        if not self._alone:
            self._compare("optimizer.step", [])  # rank 0's step may have raised
            as_one(self._updated, _from_0)

    @property
    def _chief_saves(self) -> bool:
        return True

    def _loaded(self, folder: Path, optimizer: Optimizer | None) -> None:
        if optimizer is not None and not self._chief:
            optimizer.state.clear()  # only the chief makes steps


def _sum_on_0(x: Tensor) -> None:
    """Sum gradients on rank 0; what says which gradients there are, on all ranks."""
    if x.is_floating_point():
        dist.reduce(x, 0)
    else:
        dist.all_reduce(x)


def _from_0(x: Tensor) -> None:
    """Rank 0's values, on all ranks."""
    dist.broadcast(x, 0)
