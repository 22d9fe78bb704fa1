"""Two-dimensional ring: rings along the rows and the columns of a grid of hosts × devices."""

from __future__ import annotations

import math

import numpy as np
import torch.distributed as dist
from torch import Tensor, empty_like

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.all_reduce.ring import go_round
from distkit.algorithms.contract import SUM, Group, ReduceOp, collective, combine, recv, send
from distkit.algorithms.hosts import laid_out
from distkit.algorithms.rounds import (
    Hosts,
    Ints,
    LinkCost,
    Numbers,
    Round,
    Schedule,
    folded,
    neighbours,
    offsets,
    pairs,
    placed,
)


def schedule(
    n: int, devices_per_host: int | None = None, *, hosts: Hosts | None = None
) -> Schedule:
    """Reduce-scatter along the rows of a grid, all-reduce along its columns, all-gather along rows.

    Ranks beyond those of the smallest host are folded in: they give others of their host all they
    have first, and get the result last.

    Args:
        n: number of ranks, row by row.
        devices_per_host: the length of a row, which divides n; as square as can be by default.
        hosts: the ranks of each host instead, a row each; as many as there are on each.
    """
    square = neighbours(n, columns(n, devices_per_host))
    rows, outside = grid(square if hosts is None else placed(n, hosts))
    place, (extra, partners) = np.array(rows), pairs(outside)
    yield from folded(_along(place), extra, partners, place.size)


def _along(place: Ints) -> Schedule:
    """The rounds of the ranks of a grid."""
    m, g = place.shape
    r = place.ravel()
    right, down = np.roll(place, -1, axis=1).ravel(), np.roll(place, -1, axis=0).ravel()
    row, column = np.divmod(np.arange(m * g), g)
    shard = (column + 1) % g  # what is complete in a row, m chunks

    for s in range(g - 1):
        yield Round(r, right, (column - s) % g * m, reduce=True, count=m)
    for s in range(m - 1):
        yield Round(r, down, shard * m + (row - s) % m, reduce=True)
    for s in range(m - 1):
        yield Round(r, down, shard * m + (row + 1 - s) % m, reduce=False)
    for s in range(g - 1):
        yield Round(r, right, (column + 1 - s) % g * m, reduce=False, count=m)


def seconds(
    n: Numbers,
    nbytes: Numbers,
    link: LinkCost,
    *,
    devices_per_host: Numbers | None = None,
    hosts: Hosts | None = None,
    inside: LinkCost | None = None,
) -> Numbers:
    """2(g-1) t'(K/g) + 2(m-1) t(K/n) + (n-1)/n K·gamma on a grid of m rows of g.

    ``t'`` belongs to the link ``inside`` a row; g divides n, and is the largest such number up to
    √n by default. If ``hosts`` have unequal numbers of ranks, g is the smallest and n the size of
    the grid; each rank outside the grid adds 2t'(K) + K·gamma to the rank that represents it.
    Mikami et al. (Sony), 2018.
    """
    if hosts is None:
        g, more = _columns(n.astype(int), devices_per_host).astype(float), 0.0
    else:
        sizes = [*map(len, hosts)]
        g, n = float(min(sizes)), min(sizes) * len(sizes)
        more = math.ceil(max(sizes) / g) - 1.0
    m, near = n / g, inside or link
    fold = more * (2 * near.seconds(nbytes) + nbytes * link.gamma)
    row = 2 * (g - 1) * near.seconds(nbytes / g)
    column = 2 * (m - 1) * link.seconds(nbytes / n)
    return fold + row + column + (n - 1) / n * nbytes * link.gamma


def grid(hosts: Hosts) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """As many ranks of each host as the smallest has; and each other one with its partner there.

    >>> grid([[0, 1], [2, 3, 4]])
    ([[0, 1], [2, 3]], [(4, 2)])
    """
    g = min(map(len, hosts))
    rest = [(host[i], host[i % g]) for host in hosts for i in range(g, len(host))]
    return [list(host[:g]) for host in hosts], rest


def columns(n: int, devices_per_host: int | None = None) -> int:
    """The length of a row of the grid.

    >>> columns(12), columns(7)
    (3, 1)
    """
    if devices_per_host is None:
        return max(g for g in range(1, math.isqrt(n) + 1) if n % g == 0)
    if n % devices_per_host:
        raise ValueError(f"{n} ranks do not fill hosts of {devices_per_host}: a torus has no gaps.")
    return devices_per_host


_each_columns = np.vectorize(columns, otypes=[int], excluded=[1])


def _columns(n: Numbers, devices_per_host: int | None) -> Numbers:
    """:func:`columns` of each number; of many numbers by a sieve."""
    if devices_per_host is not None or n.size < 1000 or n.max() > 10_000_000:
        return _each_columns(n, devices_per_host)
    most = int(n.max())
    largest = np.ones(most + 1, dtype=np.int64)
    for g in range(2, math.isqrt(most) + 1):
        largest[g * g :: g] = g
    return largest[n]


def chunks(n: int, devices_per_host: int | None = None, hosts: Hosts | None = None) -> int:
    """One for each place of the grid."""
    return n if hosts is None else len(hosts) * min(map(len, hosts))


@ALL_REDUCES.register(
    title="Two-dimensional ring",
    summary="rings along the rows and the columns of a grid of hosts × devices",
    source="Ying et al., 2018; Mikami et al., 2018",
    cost="2(g-1 + m-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ",
    schedule=schedule,
    seconds=seconds,
    chunks=chunks,
)
@collective()
def torus_all_reduce(
    x: Tensor,
    op: ReduceOp = SUM,
    group: Group = None,
    *,
    devices_per_host: int | None = None,
    hosts: Hosts | None = None,
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
        devices_per_host: g, which divides the number of ranks.
        hosts: the ranks of each host instead; of a larger one than the smallest the others give
            all they have to one of it first, and get the result last. Without either, those that
            are really on each; where all are on one, a grid as square as can be.

    Source:
        Ying et al., "Image classification at supercomputer scale", 2018; Mikami et al.,
        "Massively distributed SGD", 2018.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if devices_per_host is not None:
        columns(n, devices_per_host)  # it has no gaps
    hosts = laid_out(group, devices_per_host, hosts) or neighbours(n, columns(n))
    rows, outside = grid(hosts)
    for extra, partner in outside:
        if rank == extra:
            send(x, partner, group)
            recv(x, partner, group)
            return
        if rank == partner:
            combine(x, recv(empty_like(x), extra, group), op)

    m, g = len(rows), len(rows[0])
    row = next(i for i in range(m) if rank in rows[i])
    column = rows[row].index(rank)
    left, right = rows[row][column - 1], rows[row][(column + 1) % g]
    above, below = rows[row - 1][column], rows[(row + 1) % m][column]

    start = offsets(len(x), m * g)
    shards = [x[start[i * m] : start[(i + 1) * m]] for i in range(g)]
    mine = (column + 1) % g  # the shard that this column completes
    pieces = [x[start[i] : start[i + 1]] for i in range(mine * m, (mine + 1) * m)]

    go_round(shards, column, left, right, group, op)
    go_round(pieces, row, above, below, group, op)
    go_round(pieces, row + 1, above, below, group)
    go_round(shards, column + 1, left, right, group)

    for extra, partner in outside:
        if rank == partner:
            send(x, extra, group)
