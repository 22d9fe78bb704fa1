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

from distkit.lazy import attributes

if TYPE_CHECKING:
    from distkit.algorithms.catalogue import ALL_REDUCES, COLLECTIVES, PIPELINES, Algorithm

__all__ = ["ALL_REDUCES", "COLLECTIVES", "PIPELINES", "Algorithm"]


__getattr__ = attributes(__name__, dict.fromkeys(__all__, "distkit.algorithms.catalogue"))
