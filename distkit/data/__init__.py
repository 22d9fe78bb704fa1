"""Data for data-parallel training: assignment of samples to replicas, and a dataset.

::

    data = dk.data.DistributedDataset(dk.data.digits(), 128, replica=rank, replicas=4)
    for images, labels in data:              # this replica's part of each global batch
        ...
    data.plan.rows(0, 3)                     # samples of replica 3 in step 0

Every replica runs the same number of steps, even if there are too few samples in the last step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit.data.dataset import DistributedDataset, rank_and_world_size, shard
    from distkit.data.evaluation import correct, evaluate
    from distkit.data.policies import AutoShardPolicy, Plan, split
    from distkit.data.sets import digits

_HOMES = {
    "distkit.data.policies": ["AutoShardPolicy", "Plan", "split"],
    "distkit.data.dataset": ["DistributedDataset", "rank_and_world_size", "shard"],
    "distkit.data.evaluation": ["correct", "evaluate"],
    "distkit.data.sets": ["digits"],
}
_home = {name: module for module, names in _HOMES.items() for name in names}

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


__getattr__ = attributes(__name__, _home)
