"""The figures: an algorithm as rounds of transfers, for all ranks at once.

A schedule is data, so that it can be proved right (:func:`held`), drawn, timed, simulated and
compared with what was recorded. ``r`` is the vector of all ranks, ``n`` their number; sources and
costs stand on the pages and in the :mod:`~distkit.algorithms.catalogue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distkit.algorithms.rounds import (
    Hosts,
    Ints,
    Round,
    bits,
    chunk_sizes,
    depth,
    held,
    highest_bit,
    neighbours,
    parents,
    placed,
    traffic,
)

__all__ = [
    "Ints",
    "Round",
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "chunk_sizes",
    "double_tree",
    "flat",
    "gather",
    "gossip",
    "halving_doubling",
    "held",
    "hierarchical",
    "pipelined_ring",
    "recursive_doubling",
    "reduce",
    "reduce_broadcast",
    "reduce_scatter",
    "ring",
    "scatter",
    "torus",
    "traffic",
    "tree",
]


# -- all-reduce: rings -------------------------------------------------------------------


def ring(n: int) -> Iterator[Round]:
    """Bandwidth-optimal all-reduce: 2(n-1) rounds of K/n bytes per rank.

    Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.

    Args:
        n: number of ranks.

    Example:
        >>> first = next(ring(4))
        >>> first.src, first.dst, first.chunk
        (array([0, 1, 2, 3]), array([1, 2, 3, 0]), array([0, 1, 2, 3]))
    """
    r = np.arange(n)
    for s in range(n - 1):  # reduce-scatter
        yield Round(src=r, dst=(r + 1) % n, chunk=(r - s) % n, reduce=True)
    for s in range(n - 1):  # all-gather
        yield Round(src=r, dst=(r + 1) % n, chunk=(r + 1 - s) % n, reduce=False)


def pipelined_ring(n: int, segments: int = 2) -> Iterator[Round]:
    """The ring with each chunk cut in segments: one is reduced while the next is on its way.

    Args:
        n: number of ranks.
        segments: pieces per chunk.
    """
    for t in ring(n):
        for segment in range(segments):
            yield Round(t.src, t.dst, t.chunk * segments + segment, t.reduce)


def hierarchical(
    n: int, devices_per_host: int = 2, *, hosts: Hosts | None = None
) -> Iterator[Round]:
    """Devices to their host's leader, a ring of the leaders, leaders to their devices.

    Args:
        n: number of ranks.
        devices_per_host: ranks of a host, which are neighbours; the last host may have fewer.
        hosts: the ranks of each host instead, its leader first; as many as there are on each.

    Example:
        >>> [t.src.tolist() for t in hierarchical(4)]
        [[1, 3], [0, 2], [0, 2], [0, 2]]
    """
    hosts = neighbours(n, devices_per_host) if hosts is None else placed(n, hosts)
    leaders = np.array([host[0] for host in hosts])
    devices, above = pairs([(device, host[0]) for host in hosts for device in host[1:]])
    chunks, start = len(leaders), np.zeros(len(devices), dtype=int)

    if len(devices):
        yield Round(devices, above, start, reduce=True, count=chunks)
    for t in ring(chunks):
        yield Round(leaders[t.src], leaders[t.dst], t.chunk, t.reduce)
    if len(devices):
        yield Round(above, devices, start, reduce=False, count=chunks)


def torus(
    n: int, devices_per_host: int | None = None, *, hosts: Hosts | None = None
) -> Iterator[Round]:
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
    place, (extra, partner) = np.array(rows), pairs(outside)
    m, g = place.shape
    r, start = place.ravel(), np.zeros(len(extra), dtype=int)
    right, down = np.roll(place, -1, axis=1).ravel(), np.roll(place, -1, axis=0).ravel()
    row, column = np.divmod(np.arange(m * g), g)
    shard = (column + 1) % g  # what is complete in a row, m chunks

    if len(extra):
        yield Round(extra, partner, start, reduce=True, count=m * g)
    for s in range(g - 1):
        yield Round(r, right, (column - s) % g * m, reduce=True, count=m)
    for s in range(m - 1):
        yield Round(r, down, shard * m + (row - s) % m, reduce=True)
    for s in range(m - 1):
        yield Round(r, down, shard * m + (row + 1 - s) % m, reduce=False)
    for s in range(g - 1):
        yield Round(r, right, (column + 1 - s) % g * m, reduce=False, count=m)
    if len(extra):
        yield Round(partner, extra, start, reduce=False, count=m * g)


def grid(hosts: Hosts) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """As many ranks of each host as the smallest has; and each other one with its partner there.

    >>> grid([[0, 1], [2, 3, 4]])
    ([[0, 1], [2, 3]], [(4, 2)])
    """
    g = min(map(len, hosts))
    rest = [(host[i], host[i % g]) for host in hosts for i in range(g, len(host))]
    return [list(host[:g]) for host in hosts], rest


def pairs(some: list[tuple[int, int]]) -> Ints:
    """Pairs of ranks as two arrays."""
    both: Ints = np.array(some, dtype=int).reshape(-1, 2).T
    return both


def columns(n: int, devices_per_host: int | None = None) -> int:
    """The length of a row of the :func:`torus`.

    >>> columns(12), columns(7)
    (3, 1)
    """
    if devices_per_host is None:
        return max(g for g in range(1, math.isqrt(n) + 1) if n % g == 0)
    if n % devices_per_host:
        raise ValueError(f"{n} ranks do not fill hosts of {devices_per_host}: a torus has no gaps.")
    return devices_per_host


# -- all-reduce: stars and trees ---------------------------------------------------------


def reduce_broadcast(n: int) -> Iterator[Round]:
    """Everybody sends everything to rank 0, which sends the result to everybody."""
    others, root = np.arange(1, n), np.zeros(max(n - 1, 0), dtype=int)
    if n > 1:
        yield Round(others, root, root, reduce=True)
        yield Round(root, others, root, reduce=False)


def flat(n: int) -> Iterator[Round]:
    """Everybody sends everything to everybody: one round, n(n-1) messages."""
    src, dst = np.nonzero(~np.eye(n, dtype=bool))
    if n > 1:
        yield Round(src, dst, np.zeros_like(src), reduce=True)


def tree(n: int) -> Iterator[Round]:
    """Up a binomial tree and down again."""
    yield from reduce(n)
    yield from broadcast(n)


def double_tree(n: int, segments: int = 4) -> Iterator[Round]:
    """Two trees, each for half of the data; who is a leaf in one works in the other.

    The halves go up and down in segments. In round t a rank of depth d passes segment t - (D-d)
    up and segment t - (D+d) down, D being the depth of the tree.

    Args:
        n: number of ranks.
        segments: pieces per half.
    """
    trees = [parents(n), parents(n, other=True)]
    depths = [depth(up) for up in trees]
    deepest = int(depths[0].max())
    for t in range(segments + 2 * deepest - 1 if n > 1 else 0):
        moves = []
        for half, (up, d) in enumerate(zip(trees, depths, strict=True)):
            child = np.flatnonzero(up >= 0)
            rising, sinking = t - deepest + d[child], t - deepest - d[child] + 1
            for src, dst, k, adds in [
                (child, up[child], rising, True),
                (up[child], child, sinking, False),
            ]:
                now = (k >= 0) & (k < segments)
                moves.append(
                    (src[now], dst[now], half * segments + k[now], np.full(now.sum(), adds))
                )
        yield Round(*(np.concatenate(column) for column in zip(*moves, strict=True)))


# -- all-reduce: doubling ------------------------------------------------------------------


def recursive_doubling(n: int) -> Iterator[Round]:
    """Partners at distance 1, 2, 4, … exchange everything they have.

    Ranks beyond a power of two are folded in: the first 2(n-p) pair up, and the even one of a pair
    waits outside.
    """
    yield from folded(n, chunks=1, inner=_doubling)


def halving_doubling(n: int) -> Iterator[Round]:
    """Reduce-scatter by halving what is exchanged, all-gather by doubling it.

    Example:
        >>> [(t.chunk.tolist(), t.count) for t in halving_doubling(4)][:2]
        [([2, 2, 0, 0], 2), ([1, 0, 3, 2], 1)]
    """
    yield from folded(n, chunks=highest_bit(n), inner=_halving_doubling)


def folded(n: int, chunks: int, inner: Callable[[int], Iterator[Round]]) -> Iterator[Round]:
    """Fold n ranks to p, a power of two, run ``inner(p)`` and unfold."""
    p = highest_bit(n)
    outside = np.arange(0, 2 * (n - p), 2)
    inside = np.setdiff1d(np.arange(n), outside)
    start = np.zeros_like(outside)

    if n > p:
        yield Round(outside, outside + 1, start, reduce=True, count=chunks)
    for t in inner(p):
        yield Round(inside[t.src], inside[t.dst], t.chunk, t.reduce, t.count)
    if n > p:
        yield Round(outside + 1, outside, start, reduce=False, count=chunks)


def _doubling(p: int) -> Iterator[Round]:
    r = np.arange(p)
    for bit in bits(p):
        yield Round(r, r ^ bit, np.zeros_like(r), reduce=True)


def _halving_doubling(p: int) -> Iterator[Round]:
    r = np.arange(p)
    for bit in reversed(bits(p)):  # give away the partner's half
        yield Round(r, r ^ bit, (r ^ bit) & -bit, reduce=True, count=bit)
    for bit in bits(p):
        yield Round(r, r ^ bit, r & -bit, reduce=False, count=bit)


# -- one to all, all to one ----------------------------------------------------------------


def broadcast(n: int, root: int = 0) -> Iterator[Round]:
    """Whoever has it sends it on: twice as many have it after each round."""
    for bit in reversed(bits(n)):
        have = np.arange(0, n - bit, 2 * bit)
        yield _from(root, n, have, have + bit, np.zeros_like(have), reduce=False)


def reduce(n: int, root: int = 0) -> Iterator[Round]:
    """The tree of :func:`broadcast`, upwards."""
    for bit in bits(n):
        to = np.arange(0, n - bit, 2 * bit)
        yield _from(root, n, to + bit, to, np.zeros_like(to), reduce=True)


def scatter(n: int, root: int = 0) -> Iterator[Round]:
    """Each message carries the chunks of a whole subtree; chunk i is for the i-th from the root."""
    for bit in reversed(bits(n)):
        have = np.arange(0, n - bit, 2 * bit)
        count = np.minimum(bit, n - have - bit)
        yield _from(root, n, have, have + bit, have + bit, reduce=False, count=count)


def gather(n: int, root: int = 0) -> Iterator[Round]:
    """The tree of :func:`scatter`, upwards; chunk i is of the i-th from the root."""
    for bit in bits(n):
        to = np.arange(0, n - bit, 2 * bit)
        count = np.minimum(bit, n - to - bit)
        yield _from(root, n, to + bit, to, to + bit, reduce=False, count=count)


def _from(root: int, n: int, src: Ints, dst: Ints, chunk: Ints, **how: Any) -> Round:
    """A round among places that are counted from the root."""
    return Round((src + root) % n, (dst + root) % n, chunk, **how)


# -- all to all ----------------------------------------------------------------------------


def all_gather(n: int) -> Iterator[Round]:
    """Everybody's chunk goes round the ring."""
    r = np.arange(n)
    for s in range(n - 1):
        yield Round(r, (r + 1) % n, (r - s) % n, reduce=False)


def reduce_scatter(n: int) -> Iterator[Round]:
    """Chunks are summed on their way round the ring; chunk r arrives at rank r."""
    r = np.arange(n)
    for s in range(n - 1):
        yield Round(r, (r + 1) % n, (r - s - 1) % n, reduce=True)


def all_to_all(n: int) -> Iterator[Round]:
    """Pairwise exchange; chunk n·i + j, of n², is what rank i has for rank j."""
    r = np.arange(n)
    for s in range(1, n):
        to = (r + s) % n
        yield Round(r, to, n * r + to, reduce=False)


def barrier(n: int) -> Iterator[Round]:
    """Dissemination: everybody has heard of 2^k ranks after k rounds, of some more than once."""
    r = np.arange(n)
    for bit in bits(n):
        yield Round(r, (r + bit) % n, np.zeros_like(r), reduce=True)


def gossip(n: int, rounds: int = 1) -> Iterator[Round]:
    """Neighbours on a ring tell each other what they have; nobody waits for the whole.

    Args:
        n: number of ranks.
        rounds: how often.
    """
    r = np.arange(n)
    src, dst = np.tile(r, 2), np.concatenate([(r + 1) % n, (r - 1) % n])
    for _ in range(rounds if n > 1 else 0):
        yield Round(src, dst, np.zeros_like(src), reduce=True)
