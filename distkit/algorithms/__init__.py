"""Read this first: the algorithms, each as its paper writes it.

An algorithm has two faces. A *schedule* (:mod:`~distkit.algorithms.schedules`) is the figure: who
sends which chunk to whom in each round, for all ranks at once. A *page*
(:mod:`~distkit.algorithms.collectives` and its neighbours) is one rank's program in
``torch.distributed`` words. A test asserts that the recorded run of the page is the schedule.
The :mod:`~distkit.algorithms.catalogue` lists them all::

    dk.algorithms.ALL_REDUCES                       # a table
    dk.algorithms.ALL_REDUCES["ring"].schedule(4)   # its rounds on four ranks
    dk.algorithms.ALL_REDUCES["ring"].page(x)       # on a rank: reduces x in place
    dk.algorithms.COLLECTIVES["scatter"].page       # the other collectives
    dk.algorithms.PIPELINES["1f1b"].schedule(4, 8)  # what each of four stages computes, and when

Nothing here prints, traces or calls back: an algorithm never learns that it is watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit.algorithms.all_reduces import halving_doubling_all_reduce, tree_all_reduce
    from distkit.algorithms.catalogue import ALL_REDUCES, COLLECTIVES, PIPELINES, Algorithm
    from distkit.algorithms.collectives import ring_all_reduce
    from distkit.algorithms.sgd import sync_gradients, sync_initial_weights, sync_sgd_step
    from distkit.algorithms.shared_memory import shared_memory_all_reduce
    from distkit.algorithms.use import ddp_hook, use_algorithm

_HOMES = {
    "all_reduces": ["halving_doubling_all_reduce", "tree_all_reduce"],
    "catalogue": ["ALL_REDUCES", "COLLECTIVES", "PIPELINES", "Algorithm"],
    "collectives": ["ring_all_reduce"],
    "sgd": ["sync_gradients", "sync_initial_weights", "sync_sgd_step"],
    "shared_memory": ["shared_memory_all_reduce"],
    "use": ["ddp_hook", "use_algorithm"],
}

__all__ = [
    "ALL_REDUCES",
    "COLLECTIVES",
    "PIPELINES",
    "Algorithm",
    "ddp_hook",
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
