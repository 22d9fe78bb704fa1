"""Costs of all-reduce, as in the papers: closed forms over alpha, beta and gamma. Pure.

n ranks, K bytes; a message of m bytes takes t(m) = alpha + m·beta, and adding m bytes takes
m·gamma. All functions broadcast arrays of ``n`` and ``nbytes``. If n divides K, each form equals
:func:`~distkit_simulation.simulator.finish_times` on a flat network, except the double tree's,
which is an upper bound of up to four times as much. Tests verify this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distkit.algorithms.rounds import Hosts
from distkit.algorithms.schedules import columns
from distkit_simulation.network import Link, check_link, plain

Numbers = Any  # a number or an array
Form = Callable[..., Any]


def _form(formula: Form) -> Form:
    """Check ``n``, ``nbytes`` and the link, and convert numbers to arrays of floats."""

    @functools.wraps(formula)
    def form(n: Numbers, nbytes: Numbers, link: Link, **options: Any) -> Numbers:
        check_link(link)
        ranks, size = _at_least(1, ranks=n), _at_least(0, bytes=nbytes)
        return plain(formula(ranks, size, link, **options))

    return form


def _at_least(least: float, **given: Numbers) -> Numbers:
    """Convert to an array of floats, and check its minimum."""
    ((name, numbers),) = given.items()
    array = np.asarray(numbers, float)
    if not np.all(array >= least):
        raise ValueError(f"{np.min(array):g} {name}: give {least:g} or more")
    return array


@_form
def ring(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """2(n-1) t(K/n) + (n-1)/n K·gamma. Patarasuk & Yuan, 2009.

    >>> ring(4, 4000, Link(alpha=1.0, beta=0.001))
    12.0
    """
    return 2 * (n - 1) * link.seconds(nbytes / n) + (n - 1) / n * nbytes * link.gamma


@_form
def reduce_broadcast(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """2(n-1) t(K) + (n-1) K·gamma: all ranks send to rank 0 in turn, and back.

    TensorFlow's ``ReductionToOneDevice``.
    """
    return (n - 1) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


@_form
def flat(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """(n-1) (t(K) + K·gamma): every rank sends everything to every other."""
    return (n - 1) * (link.seconds(nbytes) + nbytes * link.gamma)


@_form
def tree(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """2⌈lg n⌉ t(K) + ⌈lg n⌉ K·gamma: binomial reduce, binomial broadcast.

    Thakur, Rabenseifner & Gropp, 2005.
    """
    return _ceil_lg(n) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


@_form
def recursive_doubling(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """⌊lg n⌋ (t(K) + K·gamma), plus 2t(K) + K·gamma if n is no power of two.

    Thakur, Rabenseifner & Gropp, 2005.
    """
    return _floor_lg(n) * (link.seconds(nbytes) + nbytes * link.gamma) + _folded(n, nbytes, link)


@_form
def halving_doubling(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """2 lg n·alpha + 2(n-1)/n K·beta + (n-1)/n K·gamma; folded like doubling if n is no power.

    Rabenseifner, 2004; in Gloo and in Goyal et al., 2017.
    """
    rounds = _floor_lg(n)
    part = 1 - 1 / np.exp2(rounds)
    if link.switches:
        each = np.zeros(np.broadcast(n, nbytes).shape)
        for i in range(1, int(np.max(rounds)) + 1):
            each += np.where(i <= rounds, 2 * link.seconds(nbytes / 2.0**i), 0.0)
    else:
        each = 2 * (rounds * link.alpha + part * nbytes * link.beta)
    return each + part * nbytes * link.gamma + _folded(n, nbytes, link)


@_form
def pipelined_ring(n: Numbers, nbytes: Numbers, link: Link, *, segments: Numbers = 2) -> Numbers:
    """2(n-1) S·t(K/nS): segments are summed during the next transfer, if sums are as fast.

    With one segment it is the ring. Patarasuk & Yuan, 2009; Gloo's ``ring_chunked``.
    """
    s = _at_least(1, segments=segments)
    each = link.seconds(nbytes / n / s)
    adding = nbytes / n / s * link.gamma
    alone = (n - 1) * (2 * each + adding)
    return np.where(s > 1, (n - 1) * s * (each + np.maximum(each, adding)), alone)


@_form
def hierarchical(
    n: Numbers,
    nbytes: Numbers,
    link: Link,
    *,
    devices_per_host: Numbers = 2,
    hosts: Hosts | None = None,
    inside: Link | None = None,
) -> Numbers:
    """(g-1) (2t'(K) + K·gamma) inside hosts of g, and the ring of the ⌈n/g⌉ leaders.

    ``t'`` belongs to the link ``inside`` a host. If ``hosts`` have unequal numbers of ranks, g is
    the largest. TensorFlow's ``HierarchicalCopyAllReduce``.
    """
    g = np.minimum(_at_least(1, devices=devices_per_host), n)
    m = np.ceil(n / g)
    if hosts is not None:
        g, m = float(max(map(len, hosts))), float(len(hosts))
    near = (g - 1) * (2 * (inside or link).seconds(nbytes) + nbytes * link.gamma)
    return near + ring(m, nbytes, link)


@_form
def torus(
    n: Numbers,
    nbytes: Numbers,
    link: Link,
    *,
    devices_per_host: Numbers | None = None,
    hosts: Hosts | None = None,
    inside: Link | None = None,
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


@_form
def double_tree(n: Numbers, nbytes: Numbers, link: Link, *, segments: Numbers = 4) -> Numbers:
    """(S + 2⌈lg n⌉ - 1) (4 t(K/2S) + K/S·gamma) at most.

    An upper bound up to eight segments: no rank has more than four messages and two sums in a
    round. With many more, ranks in different rounds wait for each other, for up to half as long
    again. Sanders, Speck & Träff, 2009.
    """
    s = _at_least(1, segments=segments)
    each = 4 * link.seconds(nbytes / 2 / s) + nbytes / s * link.gamma
    return (s + 2 * _ceil_lg(n) - 1) * each * (n > 1)


@_form
def lower_bound(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """max(⌈lg n⌉ alpha + 2(n-1)/n K·beta, (n-1)/n K·gamma): no all-reduce on such links is faster.

    Sums may overlap with messages: the larger counts. Of a link with several protocols the
    smallest alpha and beta count. Chan et al., 2007.

    >>> lower_bound(4, 4000, Link(alpha=1e-6, beta=1e-9))
    8e-06
    """
    alpha = min([link.alpha, *(a for _, a, _ in link.switches)])
    beta = min([link.beta, *(b for _, _, b in link.switches)])
    share = (n - 1) / n * nbytes
    return np.maximum(_ceil_lg(n) * alpha + 2 * share * beta, share * link.gamma)


#: The closed form of every all-reduce, by its name in the catalogue.
ALL_REDUCES: dict[str, Form] = {
    form.__name__: form
    for form in (
        ring,
        pipelined_ring,
        hierarchical,
        torus,
        reduce_broadcast,
        flat,
        tree,
        double_tree,
        recursive_doubling,
        halving_doubling,
    )
}


def all_reduce(algorithm: str, n: Numbers, nbytes: Numbers, link: Link, **options: Any) -> Numbers:
    """Seconds of an all-reduce by the name of its algorithm.

    Args:
        algorithm: a name in :data:`ALL_REDUCES`.
        n: number of ranks.
        nbytes: size of the tensor [bytes].
        link: the link between any two ranks.
        options: options of the algorithm's form.

    Raises:
        ValueError: the algorithm is unknown, there is no rank, or the size is negative.

    Example:
        >>> all_reduce("ring", [2, 4], 4000, Link(alpha=1e-6, beta=1e-9))
        array([6.0e-06, 1.2e-05])
    """
    if algorithm not in ALL_REDUCES:
        known = ", ".join(ALL_REDUCES)
        raise ValueError(
            f"no cost formula for {algorithm!r}: choose from {known}, or add its closed form to "
            "ALL_REDUCES in distkit_simulation/cost.py."
        )
    return ALL_REDUCES[algorithm](n, nbytes, link, **options)


def table(n: Numbers, nbytes: Numbers, link: Link) -> dict[str, Any]:
    """Seconds of every all-reduce: name -> array.

    >>> times = table(8, 1e9, Link(1e-6, 1e-9))
    >>> times["ring"] < times["tree"] < times["flat"]
    True
    """
    return {name: form(n, nbytes, link) for name, form in ALL_REDUCES.items()}


def crossovers(
    n: int,
    link: Link,
    *,
    smallest: float = 1.0,
    largest: float = 1e10,
    among: Iterable[str] | None = None,
) -> list[tuple[float, str]]:
    """The fastest algorithm from each size on: ``(nbytes, name)`` in ascending order.

    Args:
        n: number of ranks.
        link: the link between any two ranks.
        smallest: the first size [bytes].
        largest: the last size [bytes].
        among: names of :data:`ALL_REDUCES`; None for all.

    Example:
        >>> crossovers(8, Link(1e-6, 1e-9), among=["tree", "ring"])
        [(1.0, 'tree'), (1882.3..., 'ring')]
    """
    names = list(ALL_REDUCES if among is None else among)
    sizes = np.geomspace(smallest, largest, 4001)
    times = np.array([all_reduce(name, n, sizes, link) for name in names])
    best = times.argmin(axis=0)
    found = [(float(smallest), names[best[0]])]
    for i in np.flatnonzero(np.diff(best)):
        gap = [times[best[i + 1], j] - times[best[i], j] for j in (i, i + 1)]
        at = sizes[i] + (sizes[i + 1] - sizes[i]) * gap[0] / (gap[0] - gap[1])
        found.append((float(at), names[best[i + 1]]))
    return found


def _folded(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """Ranks beyond a power of two first send everything to a partner, and last receive the sum."""
    return (n != np.exp2(_floor_lg(n))) * (2 * link.seconds(nbytes) + nbytes * link.gamma)


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


def _floor_lg(n: Numbers) -> Numbers:
    return np.frexp(n)[1] - 1.0


def _ceil_lg(n: Numbers) -> Numbers:
    return np.frexp(n - 0.5)[1] * 1.0


# -- training ---------------------------------------------------------------------------------


def exposed(sync: Numbers, backward: Numbers, buckets: Numbers = 1) -> Numbers:
    """Communication not hidden by backward: max(sync/b, sync - backward (1 - 1/b)).

    Args:
        sync: total seconds of all buckets' all-reduces.
        backward: seconds of backward.
        buckets: number b of equal buckets, each reduced while the next is computed.

    Source:
        Li et al., "PyTorch distributed", VLDB 2020.

    Example:
        >>> exposed(sync=1.0, backward=2.0, buckets=4)
        0.25
    """
    t, back = _at_least(0, seconds=sync), _at_least(0, seconds=backward)
    b = _at_least(1, buckets=buckets)
    return plain(np.maximum(t / b, t - back * (1 - 1 / b)))


def speedup(n: Numbers, compute: Numbers, sync: Numbers) -> Numbers:
    """n·compute/(compute + sync): samples per second relative to one rank.

    >>> speedup(4, compute=3.0, sync=1.0)
    3.0
    """
    t = _at_least(0, seconds=compute)
    return plain(_at_least(1, ranks=n) * t / (t + _at_least(0, seconds=sync)))


def break_even(compute: Numbers, sync: Numbers) -> Numbers:
    """Training with n ranks pays when n > 1 + sync/compute.

    ``sync`` is taken as constant: true for a ring's bandwidth, false for its latency.

    >>> break_even(compute=1.0, sync=2.5)
    3.5
    """
    return plain(1 + _at_least(0, seconds=sync) / _at_least(0, seconds=compute))


def epoch(
    samples: Numbers, batch: Numbers, n: Numbers, compute: Numbers, sync: Numbers = 0.0
) -> Numbers:
    """N/(R·B)·(Tcomp + Tsync): the seconds of an epoch.

    Args:
        samples: N, the size of the data set.
        batch: B, samples per rank and step.
        n: R, number of ranks.
        compute: Tcomp of a batch while R ranks compute [s].
        sync: Tsync [s]; 0 for one rank.

    Example:
        >>> epoch(1000, batch=10, n=1, compute=0.5), epoch(1000, 10, n=4, compute=0.5, sync=0.3)
        (50.0, 20.0)
    """
    steps = _at_least(0, samples=samples) / (_at_least(1, ranks=n) * _at_least(1, batch=batch))
    return plain(steps * (_at_least(0, seconds=compute) + _at_least(0, seconds=sync)))


def crowded(compute: Numbers, n: Numbers, processors: Numbers) -> Numbers:
    """compute·max(1, n/processors): ranks that share processors take turns.

    >>> crowded(2.0, n=4, processors=2), crowded(2.0, n=2, processors=8)
    (4.0, 2.0)
    """
    turns = np.maximum(1.0, _at_least(1, ranks=n) / _at_least(1, processors=processors))
    return plain(_at_least(0, seconds=compute) * turns)


# -- parameter server -------------------------------------------------------------------------


def parameter_server(
    workers: Numbers, servers: Numbers, nbytes: Numbers, link: Link, *, largest: float = 0.0
) -> Numbers:
    """Pull and push of all workers: 2 t(max(K, W·max(K/S, largest))).

    The maximum of a worker, which moves K bytes, and a server, which moves a share per worker.

    Args:
        workers: W.
        servers: S, each on a separate machine.
        nbytes: K, the size of all parameters [bytes].
        link: the link of each machine.
        largest: size of the largest array, if arrays are not split [bytes].

    Source:
        Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.

    Example:
        >>> parameter_server(8, 4, 1000, Link(0, 1))
        4000.0
    """
    check_link(link)
    size = _at_least(0, bytes=nbytes)
    share = np.maximum(size / _at_least(1, servers=servers), largest)
    return plain(2 * link.seconds(np.maximum(size, _at_least(1, workers=workers) * share)))


def byteps(n: Numbers, cpus: Numbers, nbytes: Numbers, beta: float) -> Numbers:
    """2n(n-1)/(n² + kn - 2k) K·beta: the optimum of n GPU and k CPU machines.

    With k = 0 it is all-reduce, with k = n the parameter server.

    Source:
        Jiang et al., "A unified architecture for accelerating distributed DNN training", OSDI 2020.

    Example:
        >>> byteps(4, 0, 1000, 1.0), byteps(4, 4, 1000, 1.0)
        (1500.0, 1000.0)
    """
    m, size, k = _at_least(1, ranks=n), _at_least(0, bytes=nbytes), _at_least(0, machines=cpus)
    if np.any(k > m):
        raise ValueError(f"{cpus} CPU machines beside {n} of GPUs: give as many at most")
    return plain(2 * m * (m - 1) / np.maximum(m * m + k * m - 2 * k, 1) * size * beta)
