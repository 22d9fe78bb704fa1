"""Learning rates that change with the number of updates, computed where the updates are made.

A scheduler is a pure function of the number of updates, so that it travels to the servers as a name
and numbers. Names and formulas are MXNet's (``mxnet.lr_scheduler``).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from distkit.errors import KVStoreError


@dataclass(frozen=True)
class LRScheduler:
    """A learning rate that depends on the number of updates.

    Args:
        base_lr: the rate to begin with, unless the optimizer was given a ``learning_rate``.
        warmup_steps: the first updates, during which the rate rises.
        warmup_begin_lr: the rate of update 0.
        warmup_mode: "linear", or "constant": ``warmup_begin_lr`` until the warm-up is over.

    Raises:
        KVStoreError: the numbers do not describe a schedule.
    """

    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.warmup_mode not in ("linear", "constant"):
            raise KVStoreError(f"{name}(warmup_mode={self.warmup_mode!r}): linear or constant.")
        if self.warmup_begin_lr > self.base_lr or self.warmup_steps < 0:
            raise KVStoreError(
                f"{name}: a warm-up has 0 or more steps and begins at base_lr or below."
            )
        self.check(name)

    def check(self, name: str) -> None:
        """Refuse numbers that describe no schedule."""

    def __call__(self, num_update: int, base_lr: float | None = None) -> float:
        """The learning rate of this update, counted from 1.

        Args:
            num_update: how often the most updated parameter was updated, this update included.
            base_lr: in place of the scheduler's own.
        """
        base = self.base_lr if base_lr is None else base_lr
        if num_update >= self.warmup_steps:
            return self.after_warmup(num_update, base)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (base - self.warmup_begin_lr) * num_update / self.warmup_steps

    def after_warmup(self, num_update: int, base: float) -> float:
        """The learning rate of an update after the warm-up."""
        return base


@dataclass(frozen=True)
class FactorScheduler(LRScheduler):
    """Multiply the rate by ``factor`` every ``step`` updates.

    >>> [FactorScheduler(step=2, factor=0.5, base_lr=1.0)(n) for n in range(1, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    step: int = 1
    factor: float = 1.0
    stop_factor_lr: float = 1e-8

    def __init__(
        self,
        step: int,
        factor: float = 1.0,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        _fill(self, locals())

    def check(self, name: str) -> None:
        """A step of at least 1, a factor of at most 1."""
        if self.step < 1 or self.factor > 1:
            raise KVStoreError(f"{name}: step is 1 or more updates and factor at most 1.")

    def after_warmup(self, num_update: int, base: float) -> float:
        """``base · factor^k`` in period ``k``, never below ``stop_factor_lr``."""
        periods = max(0, num_update - 1) // self.step
        return max(base * self.factor**periods, self.stop_factor_lr) if periods else base


@dataclass(frozen=True)
class MultiFactorScheduler(LRScheduler):
    """Multiply the rate by ``factor`` after each of these updates.

    >>> [MultiFactorScheduler(step=[2, 3], factor=0.5, base_lr=1.0)(n) for n in range(1, 6)]
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """

    step: tuple[int, ...] = (1,)
    factor: float = 1.0

    def __init__(
        self,
        step: list[int] | tuple[int, ...],
        factor: float = 1.0,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        step = tuple(step)
        _fill(self, locals())

    def check(self, name: str) -> None:
        """Steps in ascending order, a factor of at most 1."""
        if not self.step or self.step[0] < 1 or [*self.step] != sorted({*self.step}):
            raise KVStoreError(f"{name}: step is a list of ascending numbers of updates.")
        if self.factor > 1:
            raise KVStoreError(f"{name}: factor is at most 1.")

    def after_warmup(self, num_update: int, base: float) -> float:
        """``base · factor^k`` after ``k`` of the steps."""
        return float(base * self.factor ** sum(num_update > step for step in self.step))


@dataclass(frozen=True)
class PolyScheduler(LRScheduler):
    """Lower the rate to ``final_lr`` along a polynomial of power ``pwr``.

    >>> [PolyScheduler(max_update=4, base_lr=1.0, pwr=1)(n) for n in (1, 4, 9)]
    [0.75, 0.0, 0.0]
    """

    max_update: int = 1
    pwr: float = 2.0
    final_lr: float = 0.0

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2.0,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        _fill(self, locals())

    def check(self, name: str) -> None:
        """More updates than those of the warm-up."""
        if self.max_update < 1 or self.max_update <= self.warmup_steps or self.pwr < 0:
            raise KVStoreError(
                f"{name}: max_update is 1 or more, and above warmup_steps; pwr is 0 or more."
            )

    def share(self, left: float) -> float:
        """The remaining part of the way from ``final_lr`` to the base, of the updates left."""
        return float(left**self.pwr)

    def after_warmup(self, num_update: int, base: float) -> float:
        """Between the base and ``final_lr``, which it keeps."""
        done = min(num_update, self.max_update) - self.warmup_steps
        left = 1 - done / (self.max_update - self.warmup_steps)
        return self.final_lr + (base - self.final_lr) * self.share(left)


@dataclass(frozen=True)
class CosineScheduler(PolyScheduler):
    """Lower the rate to ``final_lr`` along half a cosine.

    >>> [round(CosineScheduler(max_update=4, base_lr=1.0)(n), 3) for n in (1, 2, 4)]
    [0.854, 0.5, 0.0]
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        _fill(self, locals())

    def share(self, left: float) -> float:
        """Same as in :class:`PolyScheduler`."""
        return (1 + math.cos(math.pi * (1 - left))) / 2


def _fill(made: LRScheduler, given: dict[str, Any]) -> None:
    """Set the fields: MXNet's order of arguments is another than that of inherited fields."""
    for field in fields(made):
        object.__setattr__(made, field.name, given.get(field.name, field.default))
    made.__post_init__()


SCHEDULERS: dict[str, type[LRScheduler]] = {
    kind.__name__: kind
    for kind in (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)
}


def to_spec(scheduler: Any) -> list[Any] | None:
    """A scheduler as a name and numbers, to send it.

    Raises:
        KVStoreError: it is none of this module's.
    """
    if scheduler is None:
        return None
    name = type(scheduler).__name__
    if SCHEDULERS.get(name) is not type(scheduler):
        raise KVStoreError(
            f"lr_scheduler={name}: give one of kvstore.lr_scheduler: {', '.join(SCHEDULERS)}. With "
            "a scheduler of torch.optim give Trainer the torch optimizer itself, and call "
            "scheduler.step() after trainer.step(...)."
        )
    return [name, asdict(scheduler)]


def from_spec(spec: Any) -> LRScheduler | None:
    """The scheduler of a name and numbers.

    Raises:
        KVStoreError: there is no such scheduler.
    """
    if spec is None:
        return None
    try:
        name, numbers = spec
        if "pwr" in numbers and name == "CosineScheduler":
            numbers = {k: v for k, v in numbers.items() if k != "pwr"}
        return SCHEDULERS[name](**numbers)
    except (KeyError, TypeError, ValueError):
        raise KVStoreError(
            f"no learning rate scheduler: {spec!r:.80}. There are: {', '.join(SCHEDULERS)}."
        ) from None
