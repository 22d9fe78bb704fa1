"""Process groups by a name that all their members use, and who these members are.

Torch knows the members of the groups that its own functions have made. A program may also make a
``ProcessGroup`` by hand, as fault-tolerant trainers do: such a group has a rank and a size, often
no name, and nobody knows which ranks of the run belong to it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distkit.events import WORLD


@dataclass(frozen=True, slots=True)
class Known:
    """A group as a rank knows it: its name, and the global ranks of its members by place."""

    name: str
    members: tuple[int | None, ...]
    judged: bool  # whether operations of several ranks can be told to belong together

    def rank(self, place: int) -> int | None:
        """The global rank of a member, None if it is not known or there is none."""
        return self.members[place] if 0 <= place < len(self.members) else None


class Groups:
    """The groups that a rank communicates in, during one run."""

    def __init__(self) -> None:
        #: Called with the name and the members of each group when it is first seen.
        self.on_group: Callable[[str, list[int]], None] | None = None
        self._named: dict[str, tuple[Any, Known]] = {}
        self._latest: tuple[Any, Known] | None = None  # of them
        self._made: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()
        self._count: Counter[int] = Counter()  # groups without a name, by their size

    def clear(self) -> None:
        """The run is over."""
        self._named.clear()
        self._latest = None
        self._made.clear()
        self._count.clear()

    def known(self, script: Any, rank: int) -> Known:
        """The group that rank ``rank`` calls an operator with."""
        group = dist.ProcessGroup.unbox(script)
        latest = self._latest
        if latest is not None and latest[0]() is group:
            return latest[1]
        name = _name(group)
        found = self._named.get(name)
        if found is not None and found[0]() is group:
            self._latest = found
            return found[1]
        return self._of_torch(group, name) or self._by_hand(group, name, rank)

    def rank(self, name: str, place: int) -> int | None:
        """The global rank of a member of a group that was communicated in."""
        seen = [*(known for _, known in self._named.values()), *self._made.values()]
        return next((known.rank(place) for known in seen if known.name == name), None)

    def _of_torch(self, group: Any, name: str) -> Known | None:
        """A group that torch's own functions have made."""
        ranks = c10d._world.pg_group_ranks.get(group)
        if ranks is None:
            return None
        default = dist.group.WORLD
        label = WORLD if default is not None and name == _name(default) else name
        members: list[int] = sorted(ranks, key=ranks.__getitem__)
        known = Known(label, tuple(members), judged=True)
        self._named[name] = weakref.ref(group), known
        if self.on_group is not None:
            self.on_group(label, members)
        return known

    def _by_hand(self, group: Any, name: str, rank: int) -> Known:
        """A group that the program made: of its members this rank knows only itself."""
        known = self._made.get(group)
        if known is None:
            size, place = group.size(), group.rank()
            self._count[size] += not name
            label = name or f"group {self._count[size]} of {size} ranks, made by hand"
            members = tuple(rank if i == place else None for i in range(size))
            known = self._made[group] = Known(label, members, judged=False)
        return known


def _name(group: Any) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:  # it was made by hand, and has none
        return ""
