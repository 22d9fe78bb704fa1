"""Which ranks of a group are on which host: they tell each other once."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from weakref import WeakKeyDictionary

import torch.distributed as dist

from distkit.algorithms.contract import Group
from distkit.algorithms.rounds import Hosts, neighbours

_known: WeakKeyDictionary[dist.ProcessGroup, Hosts] = WeakKeyDictionary()


def hosts_of(group: Group = None) -> Hosts:
    """The ranks of each host, counted in the group: hosts by their first rank, ranks in order.

    Where the launcher has put all ranks on one host, nobody is asked. Else the first call of a
    group tells the others this rank's host through the store, and waits for theirs: all members
    have to call it.

    Args:
        group: the process group; None is the world.

    Example:
        >>> hosts_of()        # doctest: +SKIP
        [[0, 1], [2, 3, 4]]
    """
    group = group or dist.group.WORLD
    assert group is not None  # a group has been made
    if os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()):
        return [[*range(dist.get_world_size(group))]]
    if group not in _known:
        store, names = group.get_group_store(), defaultdict[bytes, list[int]](list)
        store.set(f"distkit/host/{dist.get_rank(group)}", socket.gethostname())
        for rank in range(dist.get_world_size(group)):
            names[store.get(f"distkit/host/{rank}")].append(rank)
        _known[group] = list(names.values())
    return _known[group]


def layout(group: Group, devices_per_host: int | None) -> Hosts:
    """The ranks of each host, as given or as they are; [] if all are on one host."""
    if devices_per_host is not None:
        return neighbours(dist.get_world_size(group), devices_per_host)
    found = hosts_of(group)
    return found if len(found) > 1 else []
