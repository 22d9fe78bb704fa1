"""The two balanced trees of the double tree, for any number of ranks."""

from __future__ import annotations

import numpy as np

from distkit.algorithms.rounds import Ints


def parents(n: int, other: bool = False) -> Ints:
    """Each rank's parent in the balanced tree in which odd ranks are leaves; -1 for the root.

    Args:
        n: number of ranks.
        other: the second tree, mirrored for an even n and shifted by one for an odd one.

    Example:
        >>> parents(8)
        array([-1,  2,  4,  2,  0,  6,  4,  6])
        >>> parents(8, other=True)
        array([ 1,  3,  1,  7,  5,  3,  5, -1])
    """
    r = np.arange(n)
    low = r & -r
    up = (r ^ low) | (low << 1)
    up = np.where(up < n, up, r ^ low)
    up[0] = -1
    if other:
        place = n - 1 - r if n % 2 == 0 else (r - 1) % n
        name = np.argsort(place)
        up = np.where(up[place] < 0, -1, name[up[place]])
    return up


def depth(up: Ints) -> Ints:
    """How many edges each rank is below the root, from :func:`parents`."""
    deep, above = np.zeros(len(up), dtype=int), up
    while (above >= 0).any():
        deep += above >= 0
        above = np.where(above >= 0, up[above], -1)
    return deep
