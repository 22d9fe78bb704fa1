"""The batches of one replica, from any dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as changed
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from distkit.data.files import Files
from distkit.data.policies import AutoShardPolicy, Plan, make_plan


class DistributedDataset:
    """This replica's piece of each global batch, for any dataset and any number of replicas.

    Every replica makes the same number of steps: who has no sample left gets batches of 0 rows. The
    pieces of a step add up to the global batch; with the default policy they are, together, the
    batch of one process that reads the data in the same order.

    Args:
        data: a :class:`torch.utils.data.Dataset`, map-style or iterable; a tensor or an array; a
            tuple of them, of equal lengths; or a list of files, see :class:`~distkit.data.Files`.
        global_batch: samples of all replicas in one step, at least one for each.
        replica: which replica this is, counted from 0.
        replicas: how many there are.
        policy: how the samples are divided, see :class:`~distkit.data.AutoShardPolicy`.
        shuffle: whether each epoch is in another random order. An iteration that reaches its end
            ends the epoch; :meth:`set_epoch` sets it, as that of torch's DistributedSampler.
        seed: of that order, the same on every replica.

    Raises:
        ValueError: fewer samples in a batch than replicas, no such replica, arrays of different
            lengths, fewer files than replicas under FILE, HINT, or an iterable dataset with
            ``shuffle`` or FILE.
        TypeError: ``data`` is none of these.

    Source:
        TensorFlow, ``tf.distribute.Strategy.experimental_distribute_dataset``.

    >>> data = DistributedDataset(torch.arange(10), 4, replica=1, replicas=2)
    >>> [batch.tolist() for batch in data]
    [[1, 3], [5, 7], [9]]
    """

    def __init__(
        self,
        data: Any,
        global_batch: int,
        *,
        replica: int,
        replicas: int,
        policy: AutoShardPolicy | str = AutoShardPolicy.AUTO,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self._data, self.replica = _opened(data), replica
        stream = isinstance(self._data, IterableDataset)
        self._plan = make_plan(
            global_batch,
            replicas,
            samples=None if stream else len(self._data),
            files=_sizes(self._data),
            policy=policy,
            seed=seed if shuffle else None,
        )
        if not 0 <= replica < replicas:
            raise ValueError(f"There is no replica {replica} of {replicas}: they count from 0.")
        if stream and shuffle:
            raise ValueError("shuffle=True needs random access: shuffle in the iterable dataset.")

    @property
    def plan(self) -> Plan:
        """Which samples each replica uses in each step of the present epoch."""
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Go on with the random order of this epoch, counted from 0."""
        self._plan = changed(self._plan, epoch=epoch)

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan
        if plan.samples is None:
            yield from self._stream(plan)
        else:
            for step in range(plan.steps):
                yield self._data.take(plan.rows(step, self.replica))
        self.set_epoch(plan.epoch + 1)

    def _stream(self, plan: Plan) -> Iterator[Any]:
        """Under DATA every replica reads the whole stream, and skips what is the others'."""
        alone = plan.policy is AutoShardPolicy.OFF
        batch = plan.pieces[self.replica] if alone else plan.global_batch
        mine = slice(None) if alone else slice(self.replica, None, plan.replicas)
        stream, steps, read, last = iter(self._data), 0, 0, None
        while samples := list(islice(stream, batch)):
            steps, read, last = steps + 1, read + len(samples), samples[0]
            yield _collated(samples[mine], last)
        if alone:  # others have smaller pieces, and more steps
            for _ in range(steps, -(-read // min(plan.pieces))):
                yield _collated([], last)


def chunks(data: Any, size: int, replica: int, replicas: int) -> Iterator[Any]:
    """All samples in their order, ``size`` at a time: the replicas' batches in turn.

    Yields:
        A batch, or None in the place of another replica's.
    """
    opened = _opened(data)
    if isinstance(opened, IterableDataset):
        stream, i = iter(opened), 0
        while samples := list(islice(stream, size)):
            yield _collated(samples, None) if i % replicas == replica else None
            i += 1
        return
    for i, first in enumerate(range(0, len(opened), size)):
        rows = range(first, min(first + size, len(opened)))
        yield opened.take(rows) if i % replicas == replica else None


class _Arrays:
    """Tensors with a sample in each row."""

    def __init__(self, given: Any) -> None:
        self._lone = not isinstance(given, tuple)
        self._tensors = tuple(map(torch.as_tensor, (given,) if self._lone else given))
        lengths = [len(t) for t in self._tensors]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"The arrays of a dataset have a row for each sample; these have {lengths} rows."
            )

    def __len__(self) -> int:
        return len(self._tensors[0])

    def take(self, rows: Sequence[int]) -> Any:
        """The samples of these rows; those at equal distances are not copied."""
        where = (
            slice(rows.start, rows.stop, rows.step)
            if isinstance(rows, range)
            else torch.tensor(rows, dtype=torch.long)
        )
        batch = tuple(t[where] for t in self._tensors)
        return batch[0] if self._lone else batch


class _Items:
    """A map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: Sequence[int]) -> Any:
        """The samples of these rows as one batch, by torch's collate function."""
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(list(rows)) if many and rows else [self._dataset[row] for row in rows]
        return _collated(samples, samples[0] if samples else self._dataset[0])


def _opened(data: Any) -> Any:
    """The data as something with ``len`` and ``take``, or as an iterable dataset."""
    if isinstance(data, Files | IterableDataset):
        return data
    if type(data) is TensorDataset:  # a subclass may change its samples
        return _Arrays(data.tensors)
    if isinstance(data, Tensor | np.ndarray):
        return _Arrays(data)
    parts = data if isinstance(data, list | tuple) else ()
    if parts and all(isinstance(part, str | Path) for part in parts):
        return Files(parts)
    if isinstance(data, tuple) and all(isinstance(part, Tensor | np.ndarray) for part in parts):
        return _Arrays(data)
    if not isinstance(data, str) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _Items(data)
    raise TypeError(
        f"a {type(data).__name__} is no dataset. Pass a torch.utils.data.Dataset, a tensor, an "
        "array, a tuple of them, or a list of files."
    )


def _sizes(data: Any) -> tuple[tuple[str, int], ...]:
    """The files of data that are in files, and the number of samples in each."""
    if not isinstance(data, Files):
        return ()
    return tuple(zip(map(str, data.paths), data.sizes, strict=True))


def _collated(samples: list[Any], like: Any) -> Any:
    """Samples as one batch; of no samples, one of 0 rows that is otherwise like theirs."""
    batch = default_collate(samples or [like])
    if not samples:
        batch = tree_map(lambda part: part[:0], batch)
    return tuple(batch) if isinstance(batch, list) else batch
