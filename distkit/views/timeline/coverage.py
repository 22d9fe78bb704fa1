"""How busy each rank was over a whole run, where its bars are too many to be drawn. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distkit.trace.columns import Floats
from distkit.views.scene.frame import Json

#: Into so many parts a run is cut; fewer where there are many lanes.
PARTS, ALL_PARTS = 240, 4_000


def parts(lanes: int) -> int:
    """Into how many parts a run on so many lanes is cut."""
    return min(PARTS, max(40, ALL_PARTS // max(1, lanes)))


def covered(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """How much of each part some intervals cover, 0 to 1.

    Args:
        starts: of the intervals.
        ends: of the intervals.
        edges: of the parts, one after the other.

    >>> covered(np.array([0.0, 1.0]), np.array([1.5, 3.0]), np.array([0.0, 2.0, 4.0])).tolist()
    [1.0, 0.5]
    """
    begun, ended = (
        _before(np.sort(times - edges[0]), edges - edges[0]) for times in (starts, ends)
    )
    share: Floats = np.diff(begun - ended) / np.diff(edges)
    return np.clip(share, 0, 1)


def _before(times: Floats, edges: Floats) -> Floats:
    """The sum, over the times before each edge, of how long ago they were."""
    n = np.searchsorted(times, edges)
    found: Floats = n * edges - np.append(0, np.cumsum(times))[n]
    return found


def coverage(frame: Json, times: Callable[[int], tuple[Floats, Floats]]) -> dict[int, Floats]:
    """The coverage of each lane of a picture; of none, where no time passes.

    Args:
        frame: has the lanes, and when the picture starts and ends.
        times: when a rank's communications began, and when they ended.
    """
    lanes = [lane["rank"] for lane in frame["lanes"]]
    if not frame["end"] or frame["end"] <= frame["start"]:
        return {}
    edges = np.linspace(frame["start"], frame["end"], parts(len(lanes)) + 1)
    return {rank: covered(*times(rank), edges) for rank in lanes}
