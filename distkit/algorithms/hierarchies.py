"""The pages of the all-reduces that know of hosts, with slower links between them than inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine
from distkit.algorithms.p2p import exchange, recv, send
from distkit.algorithms.rounds import offsets
from distkit.algorithms.schedules import columns


def go_round(
    chunks: Sequence[Tensor],
    first: int,
    left: int,
    right: int,
    group: Group,
    op: ReduceOp | None = None,
) -> None:
    """One trip round a ring: pass on chunk ``first``, and then always what came last.

    Args:
        chunks: as many as ranks on the ring.
        first: the chunk that this rank passes on first.
        left: neighbour in the group to receive from.
        right: neighbour in the group to send to.
        group: the process group.
        op: how to combine what comes with one's own; None replaces one's own by it.
    """
    m, inbox = len(chunks), empty_like(chunks[0])
    for s in range(m - 1):
        out, mine = chunks[(first - s) % m], chunks[(first - s - 1) % m]
        if op is None:
            exchange(out, right, mine, left, group)
        else:
            combine(mine, exchange(out, right, inbox[: len(mine)], left, group), op)


@collective()
def hierarchical_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, devices_per_host: int = 2
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

    Source:
        TensorFlow, ``tf.distribute.HierarchicalCopyAllReduce``; the ring between hosts: Horovod,
        ``HOROVOD_HIERARCHICAL_ALLREDUCE``.
    """
    rank, n, g = dist.get_rank(group), dist.get_world_size(group), devices_per_host
    leader = rank - rank % g
    if rank != leader:
        send(x, leader, group)
        recv(x, leader, group)
        return

    devices, inbox = range(rank + 1, min(rank + g, n)), empty_like(x)
    for device in devices:
        combine(x, recv(inbox, device, group), op)

    leaders = range(0, n, g)
    host, hosts = rank // g, len(leaders)
    left, right = leaders[host - 1], leaders[(host + 1) % hosts]
    chunks = x.tensor_split(hosts)
    go_round(chunks, host, left, right, group, op)
    go_round(chunks, host + 1, left, right, group)

    for device in devices:
        send(x, device, group)


@collective()
def torus_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, devices_per_host: int | None = None
) -> None:
    """Rings along the rows and the columns of a grid of m hosts with g devices each.

    Reduce-scatter along the row, all-reduce of that shard along the column, all-gather along
    the row::

        host 0    0 ─► 1 ─► 2 ─┐       between hosts each device
                  ▼    ▼    ▼          passes only K/g bytes
        host 1    3 ─► 4 ─► 5 ─┐

    2(g-1 + m-1)α + 2(n-1)/n Kβ: a ring's bytes in fewer rounds. Of those 2(g-1)/g Kβ stay
    inside the host, and 2(m-1)/m K/g β go between hosts.

    Args:
        x: tensor of any shape, the same on every rank; K bytes.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        group: the process group; None is the world.
        devices_per_host: g, which divides the number of ranks; as square as can be by default.

    Source:
        Ying et al., "Image classification at supercomputer scale", 2018; Mikami et al.,
        "Massively distributed SGD", 2018.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    g = columns(n, devices_per_host)
    m, (row, column) = n // g, divmod(rank, g)
    left, right = row * g + (column - 1) % g, row * g + (column + 1) % g
    above, below = (rank - g) % n, (rank + g) % n

    start = offsets(len(x), n)
    shards = [x[start[i * m] : start[(i + 1) * m]] for i in range(g)]
    mine = (column + 1) % g  # the shard that this column completes
    pieces = [x[start[i] : start[i + 1]] for i in range(mine * m, (mine + 1) * m)]

    go_round(shards, column, left, right, group, op)
    go_round(pieces, row, above, below, group, op)
    go_round(pieces, row + 1, above, below, group)
    go_round(shards, column + 1, left, right, group)
