"""Ranks that are late, slow or gone. Pure; every draw comes from a generator that is handed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Draws an array of a shape, in seconds: ``delay(rng, shape)``.
Delay = Callable[[Generator, tuple[int, ...]], Floats]


def exponential(mean: float) -> Delay:
    """Memoryless delays of ``mean`` seconds: many short ones, few long ones.

    >>> exponential(1.0)(np.random.default_rng(0), (2,)).round(2)
    array([0.68, 1.02])
    """
    _seconds("mean", mean)
    return lambda rng, shape: rng.exponential(mean, shape)


def lognormal(median: float, sigma: float) -> Delay:
    """Delays around ``median`` seconds with a long tail, as step times have.

    >>> lognormal(2.0, 0.0)(np.random.default_rng(0), (2,))
    array([2., 2.])
    """
    _seconds("median", median)
    _seconds("sigma", sigma)
    return lambda rng, shape: median * np.exp(sigma * rng.standard_normal(shape))


def constant(seconds: float) -> Delay:
    """Always the same delay."""
    _seconds("delay", seconds)
    return lambda rng, shape: np.full(shape, float(seconds))


@dataclass(frozen=True)
class Stragglers:
    """Faults of the ranks.

    Args:
        slow: rank -> factor; all that the rank does or takes part in lasts so many times longer.
            Persistent slow ranks are what clusters really have.
        jitter: delay of every transfer, drawn anew for each; see :func:`exponential`.
        fails: rank -> when it dies [s]. Whoever needs it afterwards waits for ever.

    Source:
        Persistence: Lin et al., "Understanding stragglers in large model training", 2025.

    Example:
        >>> Stragglers(slow={3: 2.0}).factors(4)
        array([1., 1., 1., 2.])
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: Delay | None = None
    fails: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, factor in self.slow.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"rank {rank} is {factor} times as slow: give a positive factor")
        for rank, at in self.fails.items():
            _seconds(f"failure of rank {rank}", at)

    def factors(self, n: int) -> Floats:
        """The slowdown of each of ``n`` ranks, shape (n,)."""
        return self._by_rank(self.slow, n, 1.0)

    def deaths(self, n: int) -> Floats:
        """The time at which each of ``n`` ranks dies [s], infinity for those that live."""
        return self._by_rank(self.fails, n, math.inf)

    @staticmethod
    def _by_rank(known: Mapping[int, float], n: int, otherwise: float) -> Floats:
        values = np.full(n, otherwise)
        for rank, value in known.items():
            if not 0 <= rank < n:
                raise ValueError(f"there is no rank {rank} among {n}: name one from 0 to {n - 1}")
            values[rank] = value
        return values


def _seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"a {name} of {value}: give a number that is not negative")
