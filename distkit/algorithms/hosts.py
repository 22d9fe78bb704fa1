"""Mapping of a group's ranks to hosts, after one exchange of host names."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from weakref import WeakKeyDictionary

import torch.distributed as dist

from distkit.algorithms.contract import Group
from distkit.algorithms.rounds import Hosts, neighbours

_hosts: WeakKeyDictionary[dist.ProcessGroup, Hosts] = WeakKeyDictionary()


def hosts_of(group: Group = None) -> Hosts:
    """Return the group ranks of each host, with hosts ordered by their first rank.

    If the launcher put all ranks on one host, nothing is exchanged. Otherwise all members must make
    the first call for a group, which publishes this rank's host name in the store and waits for the
    other ranks'.

    Args:
        group: the process group; None is the world.

    Example:
        >>> hosts_of()        # doctest: +SKIP
        [[0, 1], [2, 3, 4]]
    """
    group = group or dist.group.WORLD
    assert group is not None  # the default group exists
    if os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()):
        return [[*range(dist.get_world_size(group))]]
    if group not in _hosts:
        store, names = group.get_group_store(), defaultdict[bytes, list[int]](list)
        store.set(f"distkit/host/{dist.get_rank(group)}", socket.gethostname())
        for rank in range(dist.get_world_size(group)):
            names[store.get(f"distkit/host/{rank}")].append(rank)
        _hosts[group] = list(names.values())
    return _hosts[group]


def layout(group: Group, devices_per_host: int | None) -> Hosts:
    """Return the ranks of each host, specified or detected; [] if all are on one host."""
    if devices_per_host is not None:
        return neighbours(dist.get_world_size(group), devices_per_host)
    hosts = hosts_of(group)
    return hosts if len(hosts) > 1 else []
