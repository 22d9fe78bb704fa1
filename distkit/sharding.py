"""Assignment of samples to replicas and steps. No side effects.

Every replica computes the plan of all replicas, so no communication is needed when the
data runs out.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain


class AutoShardPolicy(str, Enum):
    """A policy that divides data among replicas, with TensorFlow's names and meanings.

    ====== ===================================================================================
    AUTO   FILE if there are at least as many files as replicas, else DATA
    FILE   each replica reads separate files, which contain its part of each batch
    DATA   each replica uses its part of each global batch, and skips other samples
    OFF    each replica reads all samples
    ====== ===================================================================================

    Source:
        TensorFlow, ``tf.data.experimental.AutoShardPolicy``.
    """

    AUTO, FILE, DATA, OFF = "AUTO", "FILE", "DATA", "OFF"


def split(global_batch: int, replicas: int) -> tuple[int, ...]:
    """Split a global batch into one part per replica.

    The parts add up to the global batch and differ by at most one; the larger parts are first.

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
        seed: seed of the random order; None for the order of the data.
        epoch: number of earlier epochs; each epoch has a different random order.

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
        """Number of samples of each replica in an epoch."""
        steps, remainder = divmod(self.samples, self.global_batch)
        if self.policy is not AutoShardPolicy.DATA:
            return tuple(len(_order(self, replica)) for replica in range(self.replicas))
        last = split(remainder, self.replicas)
        return tuple(steps * full + part for full, part in zip(self.batch_sizes, last, strict=True))

    def rows(self, step: int, replica: int) -> Sequence[int]:
        """Return the samples of a replica in a step, counted from 0; empty after the last sample.

        ::

            DATA        rows r, r + R, r + 2R, … of global batch k
            FILE, OFF   rows k·b … (k + 1)·b - 1 of the replica's samples, if b is its batch size
        """
        batch, size = self.global_batch, self.batch_sizes[replica]
        if self.policy is AutoShardPolicy.DATA:
            part = slice(step * batch + replica, (step + 1) * batch, self.replicas)
        else:
            part = slice(step * size, (step + 1) * size)
        # under DATA all replicas share one order and skip other samples
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
    """Return the plan of the data under a policy, with AUTO resolved.

    Args:
        global_batch: number of samples per step across all replicas, at least one per replica.
        replicas: number of replicas.
        samples: number of samples.
        files: name and number of samples of each file, if the data is in files.
        policy: a policy or its name.
        seed: seed of the random order; None for the order of the data.

    Raises:
        ValueError: The global batch has fewer samples than there are replicas, the policy is
            unknown, or FILE has fewer files than replicas.
    """
    if not 1 <= replicas <= global_batch:
        raise ValueError(
            f"A global batch of {global_batch} samples cannot be divided among {replicas} "
            f"replicas: each needs at least one. Use global_batch={max(replicas, 1)} or more, "
            "or fewer replicas."
        )
    resolved = _resolve(AutoShardPolicy(policy), len(files), replicas)
    return Plan(resolved, global_batch, replicas, samples, tuple(files), seed)


def _resolve(policy: AutoShardPolicy, files: int, replicas: int) -> AutoShardPolicy:
    """Return FILE, DATA or OFF.

    TensorFlow also warns if the data is not in files, which is the usual case; distkit warns only
    if there are too few files.
    """
    enough_files = files >= replicas
    if policy is AutoShardPolicy.FILE and not enough_files:
        raise ValueError(
            f"AutoShardPolicy.FILE needs at least as many files as replicas; got {files} files "
            f"and {replicas} replicas. Divide the data into more files, or use DATA."
        )
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if files and not enough_files:
        warnings.warn(
            "AUTO sharding policy will apply DATA sharding policy as it failed to apply FILE "
            f"sharding policy because of the following reason: there are {files} files for "
            f"{replicas} replicas. Each replica reads all files.",
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
        return _shuffled(blocks, [plan.seed, plan.epoch, replica])
    return blocks[0] if len(blocks) == 1 else array("q", chain.from_iterable(blocks))


def _file_ranges(plan: Plan) -> list[range]:
    """Return the sample range of each file."""
    ends = list(accumulate(size for _, size in plan.files))
    return [range(end - size, end) for end, (_, size) in zip(ends, plan.files, strict=True)]


def _shuffled(blocks: list[range], seed: list[int]) -> array[int]:
    """Return shuffled blocks in random order, so that only one file is read at any time."""
    import numpy as np

    draw = np.random.default_rng(seed)
    parts = [np.asarray(draw.permutation(blocks[i])) for i in draw.permutation(len(blocks))]
    return array("q", np.concatenate(parts).astype(np.int64).tobytes())
