"""Distributed algorithms, each as published in its paper. Start reading here.

An algorithm has two parts. Its *schedule* lists which rank sends which chunk to which rank in each
round, for all ranks. Its *reference implementation* is the program of one rank in
``torch.distributed`` calls. A test asserts that the reference implementation sends the messages of
the schedule. Each all-reduce has its own file in :mod:`~distkit.algorithms.all_reduce`; the other
collectives are in :mod:`~distkit.algorithms.collectives`. Catalogs list them by name::

    dk.algorithms.ALL_REDUCES                       # a table
    dk.algorithms.ALL_REDUCES["ring"].schedule(4)   # its rounds on four ranks
    dk.algorithms.ALL_REDUCES["ring"].reference(x)  # on a rank: reduces x in place
    dk.algorithms.COLLECTIVES["scatter"].reference  # the other collectives
    dk.algorithms.PIPELINES["1f1b"].schedule(4, 8)  # the actions of four stages, in order

The algorithms do not print, trace or invoke callbacks. Recording is invisible to them.
"""

from typing import TYPE_CHECKING

from distkit.imports import attributes

if TYPE_CHECKING:
    from distkit.algorithms.all_reduce import ALL_REDUCES
    from distkit.algorithms.all_reduce.halving_doubling import halving_doubling_all_reduce
    from distkit.algorithms.all_reduce.ring import ring_all_reduce
    from distkit.algorithms.all_reduce.tree import tree_all_reduce
    from distkit.algorithms.catalog import Algorithm
    from distkit.algorithms.collectives import COLLECTIVES
    from distkit.algorithms.sgd import sync_gradients, sync_initial_weights, sync_sgd_step
    from distkit.algorithms.shared_memory import shared_memory_all_reduce
    from distkit.algorithms.use import use_algorithm
    from distkit_parallel.schedules import PIPELINES

#: Public names, by module.
_EXPORTS = {
    "distkit.algorithms.all_reduce": ["ALL_REDUCES"],
    "distkit.algorithms.all_reduce.halving_doubling": ["halving_doubling_all_reduce"],
    "distkit.algorithms.all_reduce.ring": ["ring_all_reduce"],
    "distkit.algorithms.all_reduce.tree": ["tree_all_reduce"],
    "distkit.algorithms.catalog": ["Algorithm"],
    "distkit.algorithms.collectives": ["COLLECTIVES"],
    "distkit.algorithms.sgd": ["sync_gradients", "sync_initial_weights", "sync_sgd_step"],
    "distkit.algorithms.shared_memory": ["shared_memory_all_reduce"],
    "distkit.algorithms.use": ["use_algorithm"],
    "distkit_parallel.schedules": ["PIPELINES"],
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
    __name__, {name: module for module, names in _EXPORTS.items() for name in names}
)
