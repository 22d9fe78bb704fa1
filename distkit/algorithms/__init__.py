"""Read this first: the algorithms, each as its paper writes it.

An algorithm has two faces. A *schedule* (:mod:`~distkit.algorithms.schedules`) is the figure: who
sends which chunk to whom in each round, for all ranks at once. A *page*
(:mod:`~distkit.algorithms.collectives`) is one rank's program in ``torch.distributed``
words. A test asserts that the recorded run of the page is the schedule.

Nothing here prints, traces or calls back: an algorithm never learns that it is watched.
"""
