"""Read this first: the algorithms, each as its paper writes it.

An algorithm has two sides. Its *schedule* is the figure: which rank sends which chunk to which in
each round, for all ranks at once. Its *reference implementation* is one rank's program in
``torch.distributed`` words. A test asserts that the recorded run of the reference implementation is
the schedule. Every all-reduce is one file of :mod:`~distkit.algorithms.all_reduce`, the other
collectives are in :mod:`~distkit.algorithms.collectives`; catalogues list them::

    dk.algorithms.ALL_REDUCES                       # a table
    dk.algorithms.ALL_REDUCES["ring"].schedule(4)   # its rounds on four ranks
    dk.algorithms.ALL_REDUCES["ring"].reference(x)  # on a rank: reduces x in place
    dk.algorithms.COLLECTIVES["scatter"].reference  # the other collectives
    dk.algorithms.PIPELINES["1f1b"].schedule(4, 8)  # what each of four stages computes, and when

Nothing here prints, traces or calls back: an algorithm never learns that it is watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit.algorithms.all_reduce import ALL_REDUCES
    from distkit.algorithms.all_reduce.halving_doubling import halving_doubling_all_reduce
    from distkit.algorithms.all_reduce.ring import ring_all_reduce
    from distkit.algorithms.all_reduce.tree import tree_all_reduce
    from distkit.algorithms.catalogue import PIPELINES, Algorithm
    from distkit.algorithms.collectives import COLLECTIVES
    from distkit.algorithms.sgd import sync_gradients, sync_initial_weights, sync_sgd_step
    from distkit.algorithms.shared_memory import shared_memory_all_reduce
    from distkit.algorithms.use import use_algorithm

_HOMES = {
    "all_reduce": ["ALL_REDUCES"],
    "all_reduce.halving_doubling": ["halving_doubling_all_reduce"],
    "all_reduce.ring": ["ring_all_reduce"],
    "all_reduce.tree": ["tree_all_reduce"],
    "catalogue": ["PIPELINES", "Algorithm"],
    "collectives": ["COLLECTIVES"],
    "sgd": ["sync_gradients", "sync_initial_weights", "sync_sgd_step"],
    "shared_memory": ["shared_memory_all_reduce"],
    "use": ["use_algorithm"],
}

__all__ = [
    "ALL_REDUCES",
    "COLLECTIVES",
    "PIPELINES",
    "Algorithm",
    "halving_doubling_all_reduce",
    "ring_all_reduce",
    "shared_memory_all_reduce",
    "sync_gradients",
    "sync_initial_weights",
    "sync_sgd_step",
    "tree_all_reduce",
    "use_algorithm",
]

__getattr__ = attributes(
    __name__, {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}
)
