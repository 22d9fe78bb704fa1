"""Hierarchical: devices to their host's leader, a ring of leaders, and back."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES, ring
from distkit.algorithms.all_reduce.ring import ring_of
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, recv, send
from distkit.algorithms.hosts import laid_out
from distkit.algorithms.rounds import (
    Hosts,
    LinkCost,
    Numbers,
    Round,
    Schedule,
    at_least,
    folded,
    neighbours,
    pairs,
    placed,
)


def schedule(n: int, devices_per_host: int = 2, *, hosts: Hosts | None = None) -> Schedule:
    """Devices to their host's leader, a ring of the leaders, leaders to their devices.

    Args:
        n: number of ranks.
        devices_per_host: ranks of a host, which are neighbours; the last host may have fewer.
        hosts: the ranks of each host instead, its leader first; as many as there are on each.

    Example:
        >>> [t.src.tolist() for t in schedule(4)]
        [[1, 3], [0, 2], [0, 2], [0, 2]]
    """
    hosts = neighbours(n, devices_per_host) if hosts is None else placed(n, hosts)
    leaders = np.array([host[0] for host in hosts])
    devices, above = pairs([(device, host[0]) for host in hosts for device in host[1:]])
    m = len(leaders)
    between = (Round(leaders[t.src], leaders[t.dst], t.chunk, t.reduce) for t in ring.schedule(m))
    yield from folded(between, devices, above, m)


def seconds(
    n: Numbers,
    nbytes: Numbers,
    link: LinkCost,
    *,
    devices_per_host: Numbers = 2,
    hosts: Hosts | None = None,
    inside: LinkCost | None = None,
) -> Numbers:
    """(g-1) (2t'(K) + K·gamma) inside hosts of g, and the ring of the ⌈n/g⌉ leaders.

    ``t'`` belongs to the link ``inside`` a host. If ``hosts`` have unequal numbers of ranks, g is
    the largest. TensorFlow's ``HierarchicalCopyAllReduce``.
    """
    g = np.minimum(at_least(1, devices=devices_per_host), n)
    m = np.ceil(n / g)
    if hosts is not None:
        g, m = float(max(map(len, hosts))), float(len(hosts))
    near = (g - 1) * (2 * (inside or link).seconds(nbytes) + nbytes * link.gamma)
    return near + ring.seconds(m, nbytes, link)


def chunks(n: int, devices_per_host: int = 2, hosts: Hosts | None = None) -> int:
    """One for each host."""
    return -(-n // devices_per_host) if hosts is None else len(hosts)


@ALL_REDUCES.register(
    title="Hierarchical",
    summary="devices to their host's leader, a ring of leaders, and back",
    source="TensorFlow's HierarchicalCopyAllReduce; Horovod",
    cost="(g-1)(2α + 2Kβ + Kγ) + 2(m-1)α + (m-1)/m K(2β + γ), m hosts of g",
    schedule=schedule,
    seconds=seconds,
    chunks=chunks,
)
@collective()
def hierarchical_all_reduce(
    x: Tensor,
    op: ReduceOp = SUM,
    group: Group = None,
    *,
    devices_per_host: int | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Reduce inside each host to its leader, all-reduce between the leaders, broadcast inside.

    ::

        host 0     1 ─► 0 ◄─ 2         0            0 ─► 1, 2
                                   ring ╲
        host 1     4 ─► 3 ◄─ 5         ► 3          3 ─► 4, 5

    Of g devices per host and m hosts: 2(α + (g-1)Kβ) inside, 2(m-1)α + 2(m-1)/m Kβ between.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.
        devices_per_host: ranks of a host, which are neighbours; the last host may have fewer.
        hosts: the ranks of each host instead, its leader first. Without either, those that are
            really on each; where all are on one, two on each are imagined.

    Source:
        TensorFlow, ``tf.distribute.HierarchicalCopyAllReduce``; the ring between hosts: Horovod,
        ``HOROVOD_HIERARCHICAL_ALLREDUCE``.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    hosts = laid_out(group, devices_per_host, hosts) or neighbours(n, 2)
    leader, *devices = next(host for host in hosts if rank in host)
    if rank != leader:
        send(x, leader, group)
        recv(x, leader, group)
        return

    inbox = empty_like(x)
    for device in devices:
        combine(x, recv(inbox, device, group), op)

    ring_of([host[0] for host in hosts], x, op, group)

    for device in devices:
        send(x, device, group)
