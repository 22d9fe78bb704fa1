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


class InputOptions:
    """How a replica gets its batches.

    TensorFlow's ``experimental_replication_mode`` and ``experimental_place_dataset_on_device`` are
    left out: each replica is a process, which makes its own batches.

    Args:
        fetch_to_device: move batches to the replica's device; False leaves them where they are.
        per_replica_buffer_size: how many batches are read ahead.
        experimental: the same two by TensorFlow's names, which begin with ``experimental_``.

    Raises:
        StrategyError: another option, or a buffer of no whole number of batches.

    Source:
        TensorFlow, ``tf.distribute.InputOptions``.

    >>> InputOptions(experimental_fetch_to_device=False).fetch_to_device
    False
    """

    def __init__(
        self, fetch_to_device: bool = True, per_replica_buffer_size: int = 1, **experimental: Any
    ) -> None:
        given = {name.removeprefix("experimental_"): value for name, value in experimental.items()}
        self.fetch_to_device = given.pop("fetch_to_device", fetch_to_device)
        size = given.pop("per_replica_buffer_size", per_replica_buffer_size)
        if given or not isinstance(size, int) or size < 0:
            others = "".join(f", {name}=…" for name in experimental)
            raise StrategyError(
                f"InputOptions(per_replica_buffer_size={size!r}{others}): there are "
                "fetch_to_device, True or False, and per_replica_buffer_size, a number of batches."
            )
        self.per_replica_buffer_size = size


class Placed:
    """Batches, moved to a device: each while the one before it is in use.

    Args:
        batches: what to iterate over; its ``len`` and other attributes show through.
        device: where tensors go.
        options: None for the usual ones.
    """

    def __init__(
        self, batches: Iterable[Any], device: torch.device, options: InputOptions | None = None
    ) -> None:
        self._batches, self._to, self._options = batches, device, options or InputOptions()
        if not isinstance(self._options, InputOptions):
            raise StrategyError(
                f"options={options!r:.60} of a dataset: give dk.strategies.InputOptions(…), or "
                "policy, shuffle and seed by their names."
            )

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        for batch in self._batches:
            ahead.append(self._moved(batch))
            if len(ahead) > self._options.per_replica_buffer_size:
                yield ahead.pop(0)
        yield from ahead

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)

    def _moved(self, batch: Any) -> Any:
        if not self._options.fetch_to_device:
            return batch
        return pytree.tree_map_only(Tensor, lambda t: t.to(self._to, non_blocking=True), batch)
