"""Closed-form costs of all-reduce and of training steps, from the literature. No side effects.

In an all-reduce, n ranks reduce K bytes. A message of m bytes takes t(m) = alpha + m·beta, and
adding m bytes takes m·gamma. Arguments of type ``Numbers`` may be arrays, which are broadcast. If n
divides K, the formula of each algorithm equals the result of
:func:`~distkit_simulation.simulator.finish_times` on a flat network, except for the double tree,
whose formula is an upper bound, at most four times the simulated time. Tests verify this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.rounds import Numbers, at_least, ceil_lg
from distkit_simulation.network import Link, check_link, plain


def lower_bound(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """Return max(⌈lg n⌉ alpha + 2(n-1)/n K·beta, (n-1)/n K·gamma), a lower bound for all-reduce.

    Sums may overlap with messages, so the larger term is the bound. If the link has several
    protocols, the smallest alpha and beta are used. Chan et al., 2007.

    >>> lower_bound(4, 4000, Link(alpha=1e-6, beta=1e-9))
    8e-06
    """
    n, nbytes = _check_arguments(n, nbytes, link)
    alpha = min([link.alpha, *(a for _, a, _ in link.switches)])
    beta = min([link.beta, *(b for _, _, b in link.switches)])
    share = (n - 1) / n * nbytes
    return plain(np.maximum(ceil_lg(n) * alpha + 2 * share * beta, share * link.gamma))


def _check_arguments(n: Numbers, nbytes: Numbers, link: Link) -> tuple[Numbers, Numbers]:
    """Return ``n`` and ``nbytes`` as arrays of floats."""
    check_link(link)
    return at_least(1, ranks=n), at_least(0, bytes=nbytes)


def all_reduce(algorithm: str, n: Numbers, nbytes: Numbers, link: Link, **options: Any) -> Numbers:
    """Return the time of an all-reduce with the named algorithm [s].

    Args:
        algorithm: a name in :data:`~distkit.algorithms.ALL_REDUCES`.
        n: the number of ranks.
        nbytes: the size of the tensor [bytes].
        link: the link between any two ranks.
        options: options for the algorithm's formula.

    Raises:
        ValueError: the algorithm is unknown, ``n`` is less than 1, or ``nbytes`` is negative.

    Example:
        >>> all_reduce("ring", [2, 4], 4000, Link(alpha=1e-6, beta=1e-9))
        array([6.0e-06, 1.2e-05])
    """
    formula = ALL_REDUCES[algorithm].seconds if algorithm in ALL_REDUCES else None
    if formula is None:
        names = ", ".join(name for name, entry in ALL_REDUCES.items() if entry.seconds)
        raise ValueError(f"no cost formula for {algorithm!r}: choose from {names}")
    return plain(formula(*_check_arguments(n, nbytes, link), link, **options))


def ring(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """Return the time of a ring all-reduce, which is the usual choice in models of training [s].

    >>> ring(4, 4000, Link(alpha=1.0, beta=0.001))
    12.0
    """
    return all_reduce("ring", n, nbytes, link)


def table(n: Numbers, nbytes: Numbers, link: Link) -> dict[str, Any]:
    """Return the time of each all-reduce algorithm [s], by name.

    >>> times = table(8, 1e9, Link(1e-6, 1e-9))
    >>> times["ring"] < times["tree"] < times["flat"]
    True
    """
    return {name: all_reduce(name, n, nbytes, link) for name in ALL_REDUCES}


def crossovers(
    n: int,
    link: Link,
    *,
    smallest: float = 1.0,
    largest: float = 1e10,
    among: Iterable[str] | None = None,
) -> list[tuple[float, str]]:
    """Return the fastest algorithm for each range of sizes, as ``(first nbytes, name)``.

    Args:
        n: number of ranks.
        link: the link between any two ranks.
        smallest: the first size [bytes].
        largest: the last size [bytes].
        among: names of all-reduce algorithms; None for all.

    Example:
        >>> crossovers(8, Link(1e-6, 1e-9), among=["tree", "ring"])
        [(1.0, 'tree'), (1882.3..., 'ring')]
    """
    names = list(ALL_REDUCES if among is None else among)
    sizes = np.geomspace(smallest, largest, 4001)
    times = np.array([all_reduce(name, n, sizes, link) for name in names])
    best = times.argmin(axis=0)
    result = [(float(smallest), names[best[0]])]
    for i in np.flatnonzero(np.diff(best)):
        gap = [times[best[i + 1], j] - times[best[i], j] for j in (i, i + 1)]
        crossover = sizes[i] + (sizes[i + 1] - sizes[i]) * gap[0] / (gap[0] - gap[1])
        result.append((float(crossover), names[best[i + 1]]))
    return result


# -- training ---------------------------------------------------------------------------------


def exposed(sync: Numbers, backward: Numbers, buckets: Numbers = 1) -> Numbers:
    """Return the exposed communication time: max(sync/b, sync - backward (1 - 1/b)).

    Args:
        sync: the total time of the all-reduces of all buckets [s].
        backward: the time of the backward pass [s].
        buckets: the number b of equal buckets, each reduced while the next is being computed.

    Source:
        Li et al., "PyTorch distributed", VLDB 2020.

    Example:
        >>> exposed(sync=1.0, backward=2.0, buckets=4)
        0.25
    """
    t, t_backward = at_least(0, seconds=sync), at_least(0, seconds=backward)
    b = at_least(1, buckets=buckets)
    return plain(np.maximum(t / b, t - t_backward * (1 - 1 / b)))


def speedup(n: Numbers, compute: Numbers, sync: Numbers) -> Numbers:
    """Return n·compute/(compute + sync), the samples per second relative to one rank.

    >>> speedup(4, compute=3.0, sync=1.0)
    3.0
    """
    t = at_least(0, seconds=compute)
    return plain(at_least(1, ranks=n) * t / (t + at_least(0, seconds=sync)))


def break_even(compute: Numbers, sync: Numbers) -> Numbers:
    """Return 1 + sync/compute; training on more ranks than this is faster than on one rank.

    ``sync`` is assumed to be constant. This nearly holds for the bandwidth term of a ring, but not
    for its latency term.

    >>> break_even(compute=1.0, sync=2.5)
    3.5
    """
    return plain(1 + at_least(0, seconds=sync) / at_least(0, seconds=compute))


def epoch(
    samples: Numbers, batch: Numbers, n: Numbers, compute: Numbers, sync: Numbers = 0.0
) -> Numbers:
    """Return N/(R·B)·(Tcomp + Tsync), the time of an epoch [s].

    Args:
        samples: N, the number of samples in the dataset.
        batch: B, the samples per rank and step.
        n: R, the number of ranks.
        compute: Tcomp, the time of a batch on one rank while all R ranks are computing [s].
        sync: Tsync, the time of communication [s]; 0 for one rank.

    Example:
        >>> epoch(1000, batch=10, n=1, compute=0.5), epoch(1000, 10, n=4, compute=0.5, sync=0.3)
        (50.0, 20.0)
    """
    steps = at_least(0, samples=samples) / (at_least(1, ranks=n) * at_least(1, batch=batch))
    return plain(steps * (at_least(0, seconds=compute) + at_least(0, seconds=sync)))


# -- parameter server -------------------------------------------------------------------------


def parameter_server(
    workers: Numbers, servers: Numbers, nbytes: Numbers, link: Link, *, largest: float = 0.0
) -> Numbers:
    """Return the time for all workers to pull and push [s]: 2 t(max(K, W·max(K/S, largest))).

    The slower side determines the time: a worker moves K bytes, and a server moves its share of K
    once for each worker.

    Args:
        workers: W, the number of workers.
        servers: S, the number of servers, each on a separate machine.
        nbytes: K, the size of all parameters [bytes].
        link: the link of each machine.
        largest: the size of the largest array, if arrays are not split [bytes].

    Source:
        Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.

    Example:
        >>> parameter_server(8, 4, 1000, Link(0, 1))
        4000.0
    """
    check_link(link)
    size = at_least(0, bytes=nbytes)
    share = np.maximum(size / at_least(1, servers=servers), largest)
    return plain(2 * link.seconds(np.maximum(size, at_least(1, workers=workers) * share)))
