"""Two-dimensional ring: rings along the rows and columns of a grid of hosts × devices."""

from __future__ import annotations

import math

import numpy as np
import torch.distributed as dist
from torch import Tensor

from distkit.algorithms.all_reduce import ALL_REDUCES, ring
from distkit.algorithms.all_reduce.ring import ring_of, ring_pass
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, host_layout
from distkit.algorithms.rounds import (
    LinkCost,
    Numbers,
    Round,
    Schedule,
    consecutive_hosts,
    offsets,
    ring_rounds,
)


def schedule(n: int, devices_per_host: int | None = None) -> Schedule:
    """Yield the rounds: reduce-scatter along rows, all-reduce along columns, all-gather along rows.

    Args:
        n: number of ranks, row by row.
        devices_per_host: the length of a row, a divisor of n; by default, the grid is as square as
            possible.
    """
    g = columns(n, devices_per_host)
    m, r = n // g, np.arange(n)
    row, column = np.divmod(r, g)
    right, down = row * g + (column + 1) % g, (r + g) % n
    shard = (column + 1) % g  # m chunks, complete on this rank after the first phase

    for t in ring_rounds(g, 0, reduce=True):
        yield Round(r, right, t.chunk[column] * m, t.reduce, count=m)
    for t in ring.schedule(m):
        yield Round(r, down, shard * m + t.chunk[row], t.reduce)
    for t in ring_rounds(g, 1, reduce=False):
        yield Round(r, right, t.chunk[column] * m, t.reduce, count=m)


def seconds(
    n: Numbers, nbytes: Numbers, link: LinkCost, *, devices_per_host: int | None = None
) -> Numbers:
    """Return 2(g-1) t(K/g) + 2(m-1) t(K/n) + (n-1)/n K·gamma on a grid of m rows of g.

    g divides n; by default it is the largest divisor up to √n. Mikami et al. (Sony), 2018.
    """
    g = np.vectorize(columns, otypes=[float])(n.astype(int), devices_per_host)
    row = 2 * (g - 1) * link.seconds(nbytes / g)
    column = 2 * (n / g - 1) * link.seconds(nbytes / n)
    return row + column + (n - 1) / n * nbytes * link.gamma


def columns(n: int, devices_per_host: int | None = None) -> int:
    """Return the length of a row of the grid.

    >>> columns(12), columns(7)
    (3, 1)
    """
    if devices_per_host is None:
        return max(g for g in range(1, math.isqrt(n) + 1) if n % g == 0)
    if n % devices_per_host:
        raise ValueError(
            f"a torus requires devices_per_host to be a divisor of the number of ranks, {n}; got "
            f"{devices_per_host}."
        )
    return devices_per_host


@ALL_REDUCES.register(
    title="Two-dimensional ring",
    summary="rings along the rows and the columns of a grid of hosts × devices",
    source="Ying et al., 2018; Mikami et al., 2018",
    cost="2(g-1 + m-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ",
    schedule=schedule,
    seconds=seconds,
)
@collective()
def torus_all_reduce(
    x: Tensor, op: ReduceOp = SUM, group: Group = None, *, devices_per_host: int | None = None
) -> None:
    """All-reduce with rings along the rows and columns of a grid of m hosts with g devices each.

    Reduce-scatter along the row, all-reduce of the resulting shard along the column, all-gather
    along the row::

        host 0    0 ─► 1 ─► 2 ─┐       between hosts, each device
                  ▼    ▼    ▼          all-reduces only K/g bytes
        host 1    3 ─► 4 ─► 5 ─┐

    Cost: 2(g-1 + m-1)α + 2(n-1)/n Kβ, with as many bytes as in a ring, in fewer rounds.
    Traffic inside hosts takes 2(g-1)/g Kβ of this time, and traffic between hosts takes
    2(m-1)/m K/g β.

    Args:
        x: tensor of K bytes, with the same shape on every rank.
        op: SUM, MIN, MAX or PRODUCT.
        group: the process group; None means the default group.
        devices_per_host: g, a divisor of the number of ranks. By default, each row is one of the
            hosts that the ranks run on, and all hosts must have the same number of ranks. If all
            ranks run on one host, the grid is as square as possible.

    Raises:
        ValueError: The ranks do not fill the grid.

    Source:
        Ying et al., "Image classification at supercomputer scale", 2018; Mikami et al.,
        "Massively distributed SGD", 2018.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    rows = host_layout(group, devices_per_host) or consecutive_hosts(n, columns(n))
    if len({*map(len, rows)}) > 1:
        sizes = ", ".join(str(len(host)) for host in rows)
        raise ValueError(
            f"a torus requires the same number of ranks on each host; got {sizes}. Pass "
            'devices_per_host, or use "hierarchical".'
        )
    m, g = len(rows), len(rows[0])
    row = next(host for host in rows if rank in host)
    column = row.index(rank)
    left, right = row[column - 1], row[(column + 1) % g]
    shards = x.tensor_split(offsets(len(x), n)[m:-1:m])  # m chunks each

    ring_pass(shards, column, left, right, group, op)
    ring_of([host[column] for host in rows], shards[(column + 1) % g], op, group)
    ring_pass(shards, column + 1, left, right, group)
