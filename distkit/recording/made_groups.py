"""Groups that a program makes and leaves behind, and those that it destroys.

A group that is not destroyed keeps its connections, threads and memory, though the program may
have lost sight of it: torch itself holds on to it.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from typing import Any

from torch.distributed import distributed_c10d as c10d


class MadeGroups:
    """The groups of a run, by the line that made them and by their members."""

    def __init__(self) -> None:
        self._made: dict[Any, list[tuple[weakref.ref[Any], int]]] = defaultdict(list)

    def add(self, group: weakref.ref[Any], where: str, members: Any) -> int:
        """Note a new group, and count those that the same line has made and the program lost.

        Args:
            group: the new group, to which only torch and the caller refer.
            where: the line.
            members: its ranks, as the line names them.
        """
        earlier = self._made[where, members]
        lost = sum(
            made() in c10d._world.pg_map and _references(made) <= held for made, held in earlier
        )
        earlier.append((group, _references(group) - 1))
        return lost

    def clear(self) -> None:
        """The run is over."""
        self._made.clear()


def _references(made: weakref.ref[Any]) -> int:
    group = made()
    return sys.getrefcount(group)
