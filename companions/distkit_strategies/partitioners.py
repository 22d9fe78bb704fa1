"""How variables are cut over parameter servers: along the first axis, in nearly equal shards.

A partitioner is called with a variable's shape and dtype, and returns the number of shards of each
axis, as TensorFlow's ``tf.distribute.experimental.partitioners`` do. Each shard is a key of the
KVStore, and keys take turns among the servers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distkit.errors import StrategyError


class Partitioner(ABC):
    """Decides in how many shards a variable lies on the servers."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            StrategyError: one is not a whole number, or smaller than 1.
        """
        for name, n in vars(self).items():
            if n is not None and (not isinstance(n, int) or n < 1):
                raise StrategyError(
                    f"{type(self).__name__}({name}={n!r}): give a whole number, at least 1."
                )

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, axis: int = 0) -> list[int]:
        """The number of shards of each axis: 1 for all but ``axis``.

        Args:
            shape: the variable's.
            dtype: the variable's.
            axis: the one that is cut.

        Raises:
            StrategyError: there is no such axis.
        """
        if not 0 <= axis < len(shape):
            raise StrategyError(
                f"{self} of a variable of shape {tuple(shape)} along axis {axis}: there is no "
                "such axis. Give an axis of its shape."
            )
        rows = shape[axis]
        row = max(1, math.prod(shape) // max(1, rows)) * dtype.itemsize
        shards = [1] * len(shape)
        shards[axis] = max(1, min(rows, self.count(rows, row)))
        return shards

    @abstractmethod
    def count(self, rows: int, row: int) -> int:
        """The number of shards that is wanted; more than there are rows are not made.

        Args:
            rows: the size of the axis that is cut.
            row: the bytes of each.
        """


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable.

    Args:
        num_shards: how many.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), torch.float32)
    [2, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.FixedShardsPartitioner``.
    """

    num_shards: int

    def count(self, rows: int, row: int) -> int:
        """The number that was given."""
        return self.num_shards


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """As many shards as have about ``min_shard_bytes`` each, at most ``max_shards``.

    As TensorFlow's, it rounds their number up, so a shard may be smaller: of several each has about
    half of that or more.

    Args:
        min_shard_bytes: the size of a shard [bytes], 256 KiB by default.
        max_shards: the most shards of a variable; such as the number of servers.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), torch.float32)
    [2, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MinSizePartitioner``.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def count(self, rows: int, row: int) -> int:
        """⌈bytes / min_shard_bytes⌉."""
        return min(self.max_shards, math.ceil(rows * row / self.min_shard_bytes))


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """As few shards as have at most ``max_shard_bytes`` each, at most ``max_shards``.

    Args:
        max_shard_bytes: the most bytes of a shard; one row is never cut.
        max_shards: the most shards of a variable, which then may be larger; None for any number.

    >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), torch.float32)
    [3, 1]

    Source: TensorFlow, ``tf.distribute.experimental.partitioners.MaxSizePartitioner``.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def count(self, rows: int, row: int) -> int:
        """⌈rows / rows that fit in a shard⌉."""
        shards = math.ceil(rows / max(1, self.max_shard_bytes // row))
        return min(self.max_shards or shards, shards)
