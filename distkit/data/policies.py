"""Which sample goes to which replica at which step. Pure: no torch, no files, no communication.

Every replica computes the plan of all replicas by itself, so that nobody has to be asked when
the data end.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain

#: So many samples may have data that do not tell how many they have.
_ENDLESS = 1 << 60


class AutoShardPolicy(str, Enum):
    """How data are divided among replicas, with TensorFlow's names and meanings.

    ====== ===================================================================================
    AUTO   FILE if there are at least as many files as replicas, else DATA
    FILE   each replica reads files of its own, and its piece of each batch from them
    DATA   each replica takes its piece of each global batch, and skips the others' samples
    OFF    each replica reads all samples
    HINT   refused: it means a marker within a ``tf.data`` pipeline
    ====== ===================================================================================

    Source:
        TensorFlow, ``tf.data.experimental.AutoShardPolicy``.
    """

    AUTO, FILE, DATA, OFF, HINT = "AUTO", "FILE", "DATA", "OFF", "HINT"


def split(global_batch: int, replicas: int) -> tuple[int, ...]:
    """Divide a global batch into a piece for each replica.

    The pieces add up to the global batch and differ by at most one; the larger ones come first.

    Args:
        global_batch: samples of all replicas together, 0 or more.
        replicas: how many replicas, 1 or more.

    Raises:
        ValueError: a negative batch or no replica.

    >>> split(10, 4), split(2, 3)
    ((3, 3, 2, 2), (1, 1, 0))
    """
    if global_batch < 0 or replicas < 1:
        raise ValueError(
            f"split needs a batch of 0 or more samples and at least 1 replica; got "
            f"global_batch={global_batch}, replicas={replicas}."
        )
    each, more = divmod(global_batch, replicas)
    return (each + 1,) * more + (each,) * (replicas - more)


@dataclass(frozen=True)
class Plan:
    """Which samples each replica uses in each step.

    Args:
        policy: FILE, DATA or OFF.
        global_batch: samples of all replicas in one step.
        replicas: how many replicas.
        samples: how many samples there are; None if that is not known.
        files: the name of each file and the number of its samples, if the data are in files.
        seed: of the random order; None for the order of the data.
        epoch: how often the data have been used before: each time in another random order.

    >>> plan = Plan(AutoShardPolicy.DATA, global_batch=4, replicas=2, samples=10)
    >>> plan.steps, [list(plan.rows(2, replica)) for replica in (0, 1)]
    (3, [[8], [9]])
    """

    policy: AutoShardPolicy
    global_batch: int
    replicas: int
    samples: int | None
    files: tuple[tuple[str, int], ...] = ()
    seed: int | None = None
    epoch: int = 0

    @property
    def steps(self) -> int:
        """The steps of an epoch: the same number on every replica.

        Raises:
            TypeError: the number of samples is not known.
        """
        samples = self._known()
        if self.policy is AutoShardPolicy.DATA:
            return -(-samples // self.global_batch)
        return max(-(-n // b) for n, b in zip(self.shares, self.pieces, strict=True))

    @property
    def pieces(self) -> tuple[int, ...]:
        """The samples of each replica in a full step."""
        return split(self.global_batch, self.replicas)

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each replica in an epoch.

        Raises:
            TypeError: the number of samples is not known.
        """
        full, rest = divmod(self._known(), self.global_batch)
        if self.policy is not AutoShardPolicy.DATA:
            return tuple(len(_order(self, replica)) for replica in range(self.replicas))
        last = split(rest, self.replicas)
        return tuple(full * b + more for b, more in zip(self.pieces, last, strict=True))

    def rows(self, step: int, replica: int) -> Sequence[int]:
        """The samples of a replica in a step, counted from 0; none when it has used all of its own.

        ::

            DATA        rows r, r + R, r + 2R, … of global batch k
            FILE, OFF   rows k·b … (k + 1)·b of the replica's own, with its piece b of the batch
        """
        batch, piece = self.global_batch, self.pieces[replica]
        if self.policy is AutoShardPolicy.DATA:
            mine = slice(step * batch + replica, (step + 1) * batch, self.replicas)
        else:
            mine = slice(step * piece, (step + 1) * piece)
        # under DATA the order is that of all replicas: each skips what is the others'
        return _order(self, 0 if self.policy is AutoShardPolicy.DATA else replica)[mine]

    def files_of(self, replica: int) -> tuple[str, ...]:
        """The files that a replica reads."""
        mine = slice(replica, None, self.replicas)
        own = self.policy is AutoShardPolicy.FILE
        return tuple(name for name, _ in self.files[mine if own else slice(None)])

    def _known(self) -> int:
        if self.samples is None:
            raise TypeError(
                "An iterable dataset does not tell how many samples it has: its steps cannot be "
                "counted before it has been read."
            )
        return self.samples


def make_plan(
    global_batch: int,
    replicas: int,
    *,
    samples: int | None,
    files: Sequence[tuple[str, int]] = (),
    policy: AutoShardPolicy | str = AutoShardPolicy.AUTO,
    seed: int | None = None,
) -> Plan:
    """The plan of these data under a policy, AUTO resolved.

    Args:
        global_batch: samples of all replicas in one step, at least one for each.
        replicas: how many replicas.
        samples: how many samples there are; None if that is not known.
        files: the name of each file and the number of its samples, if the data are in files.
        policy: how to divide them, perhaps by its name.
        seed: of the random order; None for the order of the data.

    Raises:
        ValueError: fewer samples in a batch than replicas, fewer files than replicas under FILE,
            or HINT.
    """
    if not 1 <= replicas <= global_batch:
        raise ValueError(
            f"A global batch of {global_batch} samples cannot be divided among {replicas} "
            f"replicas: each needs at least one. Use global_batch={max(replicas, 1)} or more, "
            "or fewer replicas."
        )
    chosen = _resolve(AutoShardPolicy(policy), len(files), replicas)
    return Plan(chosen, global_batch, replicas, samples, tuple(files), seed)


def _resolve(policy: AutoShardPolicy, files: int, replicas: int) -> AutoShardPolicy:
    """FILE, DATA or OFF.

    TensorFlow also warns about data that are not in files, and nearly every program gets that
    warning: here only what somebody may have expected otherwise is warned about.
    """
    enough = files >= replicas
    if policy is AutoShardPolicy.HINT:
        raise ValueError(
            "AutoShardPolicy.HINT refers to shard(SHARD_HINT, ...) in a tf.data pipeline; a torch "
            "dataset has no such marker. Use AUTO, FILE, DATA or OFF."
        )
    if policy is AutoShardPolicy.FILE and not enough:
        raise ValueError(
            f"AutoShardPolicy.FILE needs at least as many files as replicas; got {files} files "
            f"and {replicas} replicas. Divide the data into more files, or use DATA."
        )
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if files and not enough:
        warnings.warn(
            "AUTO sharding policy will apply DATA sharding policy as it failed to apply FILE "
            f"sharding policy because of the following reason: there are {files} files for "
            f"{replicas} replicas. Each replica reads all files.",
            stacklevel=4,
        )
    return AutoShardPolicy.FILE if files and enough else AutoShardPolicy.DATA


@lru_cache(16)
def _order(plan: Plan, replica: int) -> Sequence[int]:
    """The samples that a replica chooses from, in the order in which it uses them."""
    blocks = [range(_ENDLESS if plan.samples is None else plan.samples)]
    if plan.policy is AutoShardPolicy.FILE:
        blocks = _of_files(plan)[replica :: plan.replicas]
    if plan.seed is not None:
        return _shuffled(blocks, [plan.seed, plan.epoch, replica])
    return blocks[0] if len(blocks) == 1 else array("q", chain.from_iterable(blocks))


def _of_files(plan: Plan) -> list[range]:
    """The samples of each file."""
    ends = list(accumulate(size for _, size in plan.files))
    return [range(end - size, end) for end, (_, size) in zip(ends, plan.files, strict=True)]


def _shuffled(blocks: list[range], seed: list[int]) -> array[int]:
    """Blocks in random order, and so the samples in each: a file is read from end to end."""
    import numpy as np

    draw = np.random.default_rng(seed)
    parts = [np.asarray(draw.permutation(blocks[i])) for i in draw.permutation(len(blocks))]
    return array("q", np.concatenate(parts).astype(np.int64).tobytes())
