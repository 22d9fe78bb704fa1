"""Data for data-parallel training: batches for one replica, evaluation, and a dataset of digits.

::

    data = dk.data.DistributedDataset(dk.data.digits(), 128, replica=rank, replicas=4)
    for images, labels in data:              # this replica's part of each global batch
        ...
    data.plan.rows(0, 3)                     # samples of replica 3 in step 0

Every replica runs the same number of steps, even if there are too few samples in the last step.
"""

from __future__ import annotations

import os
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from distkit.errors import DistkitError

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "Plan",
    "correct",
    "digits",
    "evaluate",
    "rank_and_world_size",
    "shard",
    "split",
]


class AutoShardPolicy(str, Enum):
    """A policy that divides data among replicas, with TensorFlow's names and meanings.

    ====== ===================================================================================
    AUTO   FILE if there are at least as many files as replicas, else DATA
    FILE   each replica reads separate files, which contain its part of each batch
    DATA   each replica uses its part of each global batch and skips the other samples
    OFF    each replica reads all samples
    ====== ===================================================================================

    Source:
        TensorFlow, ``tf.data.experimental.AutoShardPolicy``.
    """

    AUTO, FILE, DATA, OFF = "AUTO", "FILE", "DATA", "OFF"


def split(global_batch: int, replicas: int) -> tuple[int, ...]:
    """Split a global batch into one part per replica.

    The parts add up to the global batch and differ by at most one; the larger parts come first.

    Args:
        global_batch: total number of samples of all replicas, 0 or more.
        replicas: number of replicas, 1 or more.

    Raises:
        ValueError: The batch is negative, or there are no replicas.

    >>> split(10, 4), split(2, 3)
    ((3, 3, 2, 2), (1, 1, 0))
    """
    if global_batch < 0 or replicas < 1:
        raise ValueError(
            f"split needs a batch of 0 or more samples and at least 1 replica; got "
            f"global_batch={global_batch}, replicas={replicas}."
        )
    size, remainder = divmod(global_batch, replicas)
    return (size + 1,) * remainder + (size,) * (replicas - remainder)


@dataclass(frozen=True)
class Plan:
    """The samples of each replica in each step.

    Args:
        policy: FILE, DATA or OFF.
        global_batch: number of samples per step across all replicas.
        replicas: number of replicas.
        samples: number of samples.
        files: name and number of samples of each file, if the data is in files.
        seed: seed for the random order, or None for the order of the data.
        epoch: index of the epoch, from 0; each epoch has a different random order.

    >>> plan = Plan(AutoShardPolicy.DATA, global_batch=4, replicas=2, samples=10)
    >>> plan.steps, [list(plan.rows(2, replica)) for replica in (0, 1)]
    (3, [[8], [9]])
    """

    policy: AutoShardPolicy
    global_batch: int
    replicas: int
    samples: int
    files: tuple[tuple[str, int], ...] = ()
    seed: int | None = None
    epoch: int = 0

    @property
    def steps(self) -> int:
        """Number of steps in an epoch, the same on every replica."""
        if self.policy is AutoShardPolicy.DATA:
            return -(-self.samples // self.global_batch)
        return max(-(-n // b) for n, b in zip(self.shares, self.batch_sizes, strict=True))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Number of samples of each replica in a full step."""
        return split(self.global_batch, self.replicas)

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of samples that each replica uses in an epoch."""
        steps, remainder = divmod(self.samples, self.global_batch)
        if self.policy is not AutoShardPolicy.DATA:
            return tuple(len(_order(self, replica)) for replica in range(self.replicas))
        last = split(remainder, self.replicas)
        return tuple(steps * full + part for full, part in zip(self.batch_sizes, last, strict=True))

    def rows(self, step: int, replica: int) -> Sequence[int]:
        """Return a replica's samples in a step (0, 1, …), or none after its last sample.

        In step k, replica r of R, with batch size b, uses::

            DATA        rows r, r + R, r + 2R, … of global batch k
            FILE, OFF   rows k·b … (k + 1)·b − 1 of the replica's samples
        """
        batch, size = self.global_batch, self.batch_sizes[replica]
        if self.policy is AutoShardPolicy.DATA:
            part = slice(step * batch + replica, (step + 1) * batch, self.replicas)
        else:
            part = slice(step * size, (step + 1) * size)
        # under DATA all replicas share one order, and each skips the samples of the others
        return _order(self, 0 if self.policy is AutoShardPolicy.DATA else replica)[part]


def make_plan(
    global_batch: int,
    replicas: int,
    *,
    samples: int,
    files: Sequence[tuple[str, int]] = (),
    policy: AutoShardPolicy | str = AutoShardPolicy.AUTO,
    seed: int | None = None,
) -> Plan:
    """Return the plan that a policy yields; AUTO is resolved to FILE or DATA.

    Args:
        global_batch: number of samples per step across all replicas, at least one per replica.
        replicas: number of replicas.
        samples: number of samples.
        files: name and number of samples of each file, if the data is in files.
        policy: a policy or its name.
        seed: seed for the random order, or None for the order of the data.

    Raises:
        ValueError: The global batch has fewer samples than there are replicas, the policy is
            unknown, or FILE has fewer files than replicas.
    """
    if not 1 <= replicas <= global_batch:
        raise ValueError(
            f"global_batch={global_batch} cannot be divided among {replicas} replicas: each needs "
            f"at least one sample. Use global_batch={max(replicas, 1)} or more, or fewer replicas."
        )
    resolved = _resolve(AutoShardPolicy(policy), len(files), replicas)
    return Plan(resolved, global_batch, replicas, samples, tuple(files), seed)


def _resolve(policy: AutoShardPolicy, files: int, replicas: int) -> AutoShardPolicy:
    """Return FILE, DATA or OFF.

    TensorFlow also warns if the data is not in files. As that is the usual case, distkit warns only
    if there are too few files.
    """
    enough_files = files >= replicas
    if policy is AutoShardPolicy.FILE and not enough_files:
        raise ValueError(
            f"AutoShardPolicy.FILE needs at least as many files as replicas (files: {files}, "
            f"replicas: {replicas}). Divide the data into more files, or use DATA."
        )
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if files and not enough_files:
        warnings.warn(
            "AutoShardPolicy.AUTO uses DATA, because FILE needs at least as many files as replicas "
            f"(files: {files}, replicas: {replicas}). Each replica reads all files.",
            stacklevel=4,
        )
    return AutoShardPolicy.FILE if files and enough_files else AutoShardPolicy.DATA


@lru_cache(16)
def _order(plan: Plan, replica: int) -> Sequence[int]:
    """Return the samples available to a replica, in order of use."""
    blocks = [range(plan.samples)]
    if plan.policy is AutoShardPolicy.FILE:
        blocks = _file_ranges(plan)[replica :: plan.replicas]
    if plan.seed is not None:
        return _shuffle(blocks, [plan.seed, plan.epoch, replica])
    return blocks[0] if len(blocks) == 1 else array("q", chain.from_iterable(blocks))


def _file_ranges(plan: Plan) -> list[range]:
    """Return the sample range of each file."""
    ends = list(accumulate(size for _, size in plan.files))
    return [range(end - size, end) for end, (_, size) in zip(ends, plan.files, strict=True)]


def _shuffle(blocks: list[range], seed: list[int]) -> array[int]:
    """Shuffle the blocks and the samples within each, so that only one file is read at a time."""
    rng = np.random.default_rng(seed)
    parts = [np.asarray(rng.permutation(blocks[i])) for i in rng.permutation(len(blocks))]
    return array("q", np.concatenate(parts).astype(np.int64).tobytes())


#: A function that returns one number per sample from outputs (B, …) and targets (B, …).
Metric = Callable[[Tensor, Tensor], Tensor]


class DistributedDataset:
    """An iterable over one replica's part of each global batch, for any dataset.

    Every replica runs the same number of steps; a replica without samples gets batches of 0 rows.
    The parts of a full step add up to the global batch. With the DATA policy, their union is the
    batch of a single process that reads the data in the same order.

    Args:
        data: a map-style :class:`torch.utils.data.Dataset`; a tensor or an array; a tuple of
            tensors or arrays of equal length; or a list of ``.npy`` and ``.npz`` files. Every rank
            must be able to read the files, and has only one of them in memory at a time.
        global_batch: number of samples per step across all replicas, at least one per replica.
        replica: the index of this replica, from 0.
        replicas: number of replicas.
        policy: assignment of samples to replicas; see :class:`~distkit.data.AutoShardPolicy`.
        shuffle: whether to shuffle in each epoch. A complete iteration ends the epoch;
            :meth:`set_epoch` sets the epoch, as in torch's DistributedSampler.
        seed: seed for shuffling, the same on every replica.

    Raises:
        ValueError: The global batch has fewer samples than there are replicas, ``replica`` is out
            of range, arrays differ in length, the policy is unknown, FILE has fewer files than
            replicas, or a file is neither ``.npy`` nor ``.npz``.
        TypeError: ``data`` has an unsupported type.
        FileNotFoundError: A file does not exist on this rank.

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
        self._data, self.replica = open_data(data), replica
        #: The samples of each replica in each step of the current epoch.
        self.plan = make_plan(
            global_batch,
            replicas,
            samples=len(self._data),
            files=getattr(self._data, "files", ()),
            policy=policy,
            seed=seed if shuffle else None,
        )
        if not 0 <= replica < replicas:
            raise ValueError(
                f"replica={replica} is out of range: it must be from 0 to {replicas - 1}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0, which determines the random order."""
        self.plan = replace(self.plan, epoch=epoch)

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[Any]:
        plan = self.plan
        for step in range(plan.steps):
            yield self._data.take(plan.rows(step, self.replica))
        self.set_epoch(plan.epoch + 1)


class _Arrays:
    """Tensors with one sample per row."""

    def __init__(self, arrays: Any) -> None:
        self._is_single = not isinstance(arrays, tuple)
        self._tensors = tuple(map(torch.as_tensor, (arrays,) if self._is_single else arrays))
        lengths = [len(t) for t in self._tensors]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"The arrays of a dataset must have the same number of rows, but have {lengths}."
            )

    def __len__(self) -> int:
        return len(self._tensors[0])

    def take(self, rows: Sequence[int]) -> Any:
        """Return the samples in these rows; for a range, as a view instead of a copy."""
        index = (
            slice(rows.start, rows.stop, rows.step)
            if isinstance(rows, range)
            else torch.tensor(rows, dtype=torch.long)
        )
        batch = tuple(t[index] for t in self._tensors)
        return batch[0] if self._is_single else batch


class _Items:
    """A map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, rows: Sequence[int]) -> Any:
        """Return a batch of the samples in these rows, collated by torch."""
        getitems = getattr(self._dataset, "__getitems__", None)
        samples = (
            getitems(list(rows)) if getitems and rows else [self._dataset[row] for row in rows]
        )
        return _collate(samples, samples[0] if samples else self._dataset[0])


class _Files:
    """Samples in files, in file order, with only one file in memory."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        if missing := [str(path) for path in self._paths if not path.is_file()]:
            raise FileNotFoundError(
                f"files not found: {', '.join(missing)}. Every rank reads the files: put them in a "
                "folder that all ranks share."
            )
        self._open: Path | None = None
        self._arrays: tuple[Any, ...] = ()  # arrays of the open file
        sizes = [len(self._read(path)[0]) for path in self._paths]
        #: Name and number of samples of each file.
        self.files = tuple(zip(map(str, self._paths), sizes, strict=True))
        self._ends = list(accumulate(sizes))
        self._latest = 0  # the file read last, which determines the shape of batches of 0 rows

    def __len__(self) -> int:
        return self._ends[-1]

    def take(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the samples in these rows, as one batch."""
        runs = groupby(rows, key=lambda row: bisect_right(self._ends, row))
        parts = [self._take_from(file, list(group)) for file, group in runs]
        parts = parts or [self._take_from(self._latest, [])]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def _take_from(self, file: int, rows: list[int]) -> tuple[Tensor, ...]:
        self._latest, first = file, self._ends[file] - self.files[file][1]
        indices = np.array(rows, dtype=np.int64) - first
        return tuple(torch.as_tensor(a[indices]) for a in self._read(self._paths[file]))

    def _read(self, path: Path) -> tuple[Any, ...]:
        """Return the arrays of a file; pickled objects are rejected."""
        if self._open != path:
            if path.suffix not in (".npy", ".npz"):
                raise ValueError(
                    f"{path} is neither .npy nor .npz. Save its arrays with numpy.savez(file, x, "
                    "y), or pass a torch.utils.data.Dataset that reads it."
                )
            content = np.load(path, mmap_mode="r")
            self._arrays = (content,) if path.suffix == ".npy" else tuple(content.values())
            self._open = path
        return self._arrays


def open_data(data: Any) -> Any:
    """Return the data as an object with ``len`` and ``take``.

    Raises:
        TypeError: The data has an unsupported type.
    """
    if type(data) is TensorDataset:  # a subclass may change its samples
        return _Arrays(data.tensors)
    if isinstance(data, Tensor | np.ndarray):
        return _Arrays(data)
    parts = data if isinstance(data, list | tuple) else ()
    if parts and all(isinstance(part, str | Path) for part in parts):
        return _Files(parts)
    if isinstance(data, tuple) and all(isinstance(part, Tensor | np.ndarray) for part in parts):
        return _Arrays(data)
    is_unsupported = isinstance(data, str | IterableDataset)
    if not is_unsupported and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _Items(data)
    raise TypeError(
        f"expected a map-style dataset, got {type(data).__name__}. Pass a "
        "torch.utils.data.Dataset, a tensor, an array, a tuple of them, or a list of files."
    )


def _collate(samples: list[Any], template: Any) -> Any:
    """Return samples as one batch; if there are none, a batch of 0 rows like ``template``."""
    batch = default_collate(samples or [template])
    if not samples:
        batch = tree_map(lambda part: part[:0], batch)
    return tuple(batch) if isinstance(batch, list) else batch


# -- this rank's share of tensors that all ranks have ------------------------------------


def shard(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return this rank's equal share of each tensor: with R ranks, rank r gets rows r, r + R, ….

    If the number of rows is not divisible by R, the last rows are dropped, because the average of
    the shards' gradients is the gradient of the whole batch only if all shards have the same size.

    Args:
        tensors: shape (N, …), the same on every rank.

    Returns:
        Tensors of shape (N // R, …).
    """
    rank, replicas = rank_and_world_size()
    return tuple(t[: len(t) // replicas * replicas][rank::replicas] for t in tensors)


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the world size, from the environment if there is no process group."""
    from_environment = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if from_environment and not dist.is_initialized():
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.get_rank(), dist.get_world_size()


# -- evaluation -----------------------------------------------------------------------------------


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether each sample's target has the largest output: (B, C), (B,) -> (B,)."""
    return outputs.argmax(-1) == targets


def evaluate(model: nn.Module, data: Any, metric: Metric = correct, *, batch: int = 64) -> float:
    """Return, on every replica, the mean of a metric over all samples, each counted once.

    ::

        m = Σ_r Σ_i metric_ri / N        all-reduce of sums, then one division

    Batches are assigned to replicas round-robin. They do not depend on the number of replicas, and
    their sums are added in order, so the result is bitwise identical for any number of replicas. In
    contrast, torch's ``DistributedSampler`` repeats samples to even out the replicas.

    Args:
        model: a model with the same weights on every rank, evaluated in ``eval`` mode.
        data: inputs and targets, as for :class:`~distkit.data.DistributedDataset`.
        metric: returns one number per sample; by default 1 for the correct class and 0 otherwise,
            so the mean is the accuracy.
        batch: samples per batch.

    Raises:
        ValueError: There are no samples, or the metric does not return one number per sample.

    Example:
        >>> import distkit as dk
        >>> dk.run_ranks(lambda: dk.data.evaluate(net, dk.data.digits()), 3)  # doctest: +SKIP
    """
    rank, replicas = rank_and_world_size() if dist.is_initialized() else (0, 1)
    source, was_training = open_data(data), model.training
    samples = range(len(source))
    batches = [samples[first : first + batch] for first in samples[::batch]]
    sums = [(0.0, 0)] * len(batches)  # each batch's metric sum and size
    device = next((w.device for w in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        with torch.no_grad():
            for i in range(rank, len(batches), replicas):
                inputs, targets = (part.to(device) for part in source.take(batches[i]))
                sums[i] = total(metric, model(inputs), targets).item(), len(targets)
    finally:
        model.train(was_training)
    # the rows of other replicas are 0
    table = torch.tensor(sums, dtype=torch.float64, device=device)
    if replicas > 1:
        dist.all_reduce(table)
    metric_sum, count = table.reshape(-1, 2).sum(0).tolist()
    if not count:
        raise ValueError("There are no samples to evaluate the model on.")
    return float(metric_sum / count)


def total(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of a metric over samples.

    Raises:
        ValueError: The metric does not return one number per sample.
    """
    scores = metric(outputs, targets)
    if scores.shape[:1] != targets.shape[:1] or scores.numel() != len(targets):
        raise ValueError(
            f"The metric returned shape {tuple(scores.shape)} for {len(targets)} samples. Return "
            "one number for each sample, for example cross_entropy(..., reduction='none')."
        )
    return scores.double().sum()


# -- digits ---------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    """Load scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels.

    They are read directly from scikit-learn's data file, because importing scikit-learn takes a
    second on every rank.

    Returns:
        Images (1797, 64) float32 in [0, 1], and labels (1797,) int64; both are copies.
    """
    images, labels = _digits()
    return images.clone(), labels.clone()


@lru_cache(1)
def _digits() -> tuple[Tensor, Tensor]:
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DistkitError(
            "the digits require scikit-learn, which is not installed. Run: pip install scikit-learn"
        )
    table = torch.from_numpy(
        np.loadtxt(
            Path(package.origin).parent / "datasets/data/digits.csv.gz",
            delimiter=",",
            dtype=np.float32,
        )
    )
    return table[:, :-1] / 16, table[:, -1].long()
