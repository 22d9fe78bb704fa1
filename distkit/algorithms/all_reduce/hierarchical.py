"""Hierarchical: reduce to each host's leader, all-reduce between leaders, broadcast back."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES, ring
from distkit.algorithms.all_reduce.ring import ring_of
from distkit.algorithms.contract import (
    SUM,
    Group,
    ReduceOp,
    collective,
    combine,
    host_layout,
    recv,
    send,
)
from distkit.algorithms.rounds import (
    LinkCost,
    Numbers,
    Round,
    Schedule,
    at_least,
    consecutive_hosts,
    with_folded_ranks,
)


def schedule(n: int, devices_per_host: int = 2) -> Schedule:
    """Yield the rounds: reduce to the leaders, all-reduce in a ring of leaders, then broadcast.

    Args:
        n: number of ranks.
        devices_per_host: number of consecutive ranks per host; the last host may have fewer.

    Example:
        >>> [t.src.tolist() for t in schedule(4)]
        [[1, 3], [0, 2], [0, 2], [0, 2]]
    """
    r = np.arange(n)
    leaders = r[::devices_per_host]
    devices = r[r % devices_per_host > 0]
    between = (
        Round(leaders[t.src], leaders[t.dst], t.chunk, t.reduce)
        for t in ring.schedule(len(leaders))
    )
    leader_of = devices - devices % devices_per_host
    yield from with_folded_ranks(between, devices, leader_of, len(leaders))


def seconds(
    n: Numbers, nbytes: Numbers, link: LinkCost, *, devices_per_host: Numbers = 2
) -> Numbers:
    """Return (g-1) (2t(K) + K·gamma) within a host of g devices, plus a ring of ⌈n/g⌉ leaders.

    TensorFlow's ``HierarchicalCopyAllReduce`` works this way.
    """
    g = np.minimum(at_least(1, devices=devices_per_host), n)
    local = (g - 1) * (2 * link.seconds(nbytes) + nbytes * link.gamma)
    return local + ring.seconds(np.ceil(n / g), nbytes, link)


@ALL_REDUCES.register(
    title="Hierarchical",
    summary="reduce to each host's leader, all-reduce between leaders, broadcast back",
    source="TensorFlow's HierarchicalCopyAllReduce; Horovod",
    cost="(g-1)(2α + 2Kβ + Kγ) + 2(m-1)α + (m-1)/m K(2β + γ), m hosts of g devices",
    schedule=schedule,
    seconds=seconds,
    chunks=lambda n, devices_per_host=2: -(-n // devices_per_host),
)
@collective()
def hierarchical_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, devices_per_host: int | None = None
) -> None:
    """Reduce to each host's leader, all-reduce between leaders, broadcast inside each host.

    ::

        host 0     1 ─► 0 ◄─ 2         0            0 ─► 1, 2
                                   ring ╲
        host 1     4 ─► 3 ◄─ 5         ► 3          3 ─► 4, 5

    With m hosts of g devices: 2(g-1)(α + Kβ) inside, 2(m-1)α + 2(m-1)/m Kβ between hosts.

    Args:
        x: tensor of K bytes, with the same shape on every rank.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.
        devices_per_host: number of consecutive ranks per host; the last host may have fewer.
            By default, the hosts are those that the ranks run on. If all ranks run on one host,
            hosts of two ranks are assumed.

    Source:
        TensorFlow, ``tf.distribute.HierarchicalCopyAllReduce``; the ring between hosts: Horovod,
        ``HOROVOD_HIERARCHICAL_ALLREDUCE``.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    hosts = host_layout(group, devices_per_host) or consecutive_hosts(n, 2)
    leader, *devices = next(host for host in hosts if rank in host)
    if rank != leader:
        send(x, leader, group)
        recv(x, leader, group)
        return

    recv_buffer = empty_like(x)
    for device in devices:
        combine(x, recv(recv_buffer, device, group), op)

    ring_of([host[0] for host in hosts], x, op, group)

    for device in devices:
        send(x, device, group)
