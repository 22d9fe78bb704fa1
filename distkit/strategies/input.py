"""Batches of one replica, and where they go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distkit.errors import StrategyError


@dataclass(frozen=True)
class InputContext:
    """What a function that makes a replica's batches is told.

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
        ahead: list[Any] = []
        for batch in self._batches:
            ahead.append(self._moved(batch))
            if len(ahead) > 1:
                yield ahead.pop(0)
        yield from ahead

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    def _moved(self, batch: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to(self._to, non_blocking=True), batch)
