"""A view of samples by replica, or of parameter shards by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distkit.data import Plan
from distkit.views.scene.frame import Json
from distkit.views.widget.view import SceneView
from distkit_simulation.shard_map import parameters, samples


class ShardMap(SceneView):
    """A view that shows how data or parameters are divided.

    A dataset is shown with a cell for each sample in the color of its replica, and with the
    samples of each replica in each step. A model is shown with a box for each parameter and rank,
    in which the rank's shard is colored.

    Args:
        source: a :class:`~distkit.data.DistributedDataset` or its ``plan``; or parameters with
            their shards, as returned by :func:`distkit_parallel.shards`.
        name: the title.

    Raises:
        TypeError: ``source`` is none of these.

    >>> half = {"rank": 1, "offset": [2, 0], "shape": [2, 3], "placement": "Shard(0)"}
    >>> ShardMap([{"name": "weight", "shape": [4, 3], "shards": [half]}])
    Shard map: 1 rank, 1 parameter, 12 values
      weight 4 × 3
        rank 1: [2:4, :] (2 × 3), Shard(0)
    """

    def __init__(self, source: Any, name: str = "") -> None:
        plan = getattr(source, "plan", source)
        if isinstance(plan, Plan):
            picture, lines = samples.Renderer(plan).picture(name), samples.describe(plan)
        else:
            model = _parameters(source)
            picture, lines = parameters.Renderer(model).picture(name), parameters.describe(model)
        self._data, self._lines = picture, list(lines)
        self._open()

    def __repr__(self) -> str:
        head = f"{self._data['title']}: {', '.join(self._data['facts'])}"
        return "\n".join([head, *(f"  {line}" for line in self._lines)])


def _parameters(source: Any) -> Sequence[Json]:
    """Return parameters with their shards."""
    known = isinstance(source, Sequence) and all(
        isinstance(p, dict) and {"name", "shape", "shards"} <= p.keys() for p in source
    )
    if not known:
        raise TypeError(
            "ShardMap needs a DistributedDataset, its plan, or the "
            f"result of distkit_parallel.shards(model); got {type(source).__name__}."
        )
    return list(source)
