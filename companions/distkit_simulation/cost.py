"""Costs of all-reduce: the closed forms of the papers over alpha, beta and gamma. Pure.

n ranks, K bytes; a message of m bytes takes t(m) = alpha + m·beta, and adding m bytes takes
m·gamma. All functions broadcast arrays of ``n`` and ``nbytes``. If n divides K, each form equals
:func:`~distkit_simulation.simulator.finish_times` on a flat network, except the double tree's,
which is an upper bound of up to four times as much. Tests verify this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.rounds import Numbers, at_least, ceil_lg
from distkit_simulation.network import Link, check_link, plain


def lower_bound(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """max(⌈lg n⌉ alpha + 2(n-1)/n K·beta, (n-1)/n K·gamma): no all-reduce on such links is faster.

    Sums may overlap with messages, so the larger counts. With several protocols the smallest alpha
    and beta count. Chan et al., 2007.

    >>> lower_bound(4, 4000, Link(alpha=1e-6, beta=1e-9))
    8e-06
    """
    n, nbytes = _checked(n, nbytes, link)
    alpha = min([link.alpha, *(a for _, a, _ in link.switches)])
    beta = min([link.beta, *(b for _, _, b in link.switches)])
    share = (n - 1) / n * nbytes
    return plain(np.maximum(ceil_lg(n) * alpha + 2 * share * beta, share * link.gamma))


def _checked(n: Numbers, nbytes: Numbers, link: Link) -> tuple[Numbers, Numbers]:
    """Return ``n`` and ``nbytes`` as arrays of floats."""
    check_link(link)
    return at_least(1, ranks=n), at_least(0, bytes=nbytes)


def all_reduce(algorithm: str, n: Numbers, nbytes: Numbers, link: Link, **options: Any) -> Numbers:
    """Return the seconds of an all-reduce by the name of its algorithm.

    Args:
        algorithm: a name in :data:`~distkit.algorithms.ALL_REDUCES`.
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
    formula = ALL_REDUCES[algorithm].seconds if algorithm in ALL_REDUCES else None
    if formula is None:
        known = ", ".join(name for name, entry in ALL_REDUCES.items() if entry.seconds)
        raise ValueError(f"no cost formula for {algorithm!r}: choose from {known}")
    return plain(formula(*_checked(n, nbytes, link), link, **options))


def ring(n: Numbers, nbytes: Numbers, link: Link) -> Numbers:
    """Return the seconds of the ring all-reduce, which most models of training use.

    >>> ring(4, 4000, Link(alpha=1.0, beta=0.001))
    12.0
    """
    return all_reduce("ring", n, nbytes, link)


def table(n: Numbers, nbytes: Numbers, link: Link) -> dict[str, Any]:
    """Return the seconds of every all-reduce: name -> array.

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
    """Return the fastest algorithm from each size on: ``(nbytes, name)`` in ascending order.

    Args:
        n: number of ranks.
        link: the link between any two ranks.
        smallest: the first size [bytes].
        largest: the last size [bytes].
        among: names of all-reduces; None for all.

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
    t, back = at_least(0, seconds=sync), at_least(0, seconds=backward)
    b = at_least(1, buckets=buckets)
    return plain(np.maximum(t / b, t - back * (1 - 1 / b)))


def speedup(n: Numbers, compute: Numbers, sync: Numbers) -> Numbers:
    """n·compute/(compute + sync): samples per second relative to one rank.

    >>> speedup(4, compute=3.0, sync=1.0)
    3.0
    """
    t = at_least(0, seconds=compute)
    return plain(at_least(1, ranks=n) * t / (t + at_least(0, seconds=sync)))


def break_even(compute: Numbers, sync: Numbers) -> Numbers:
    """Training with n ranks pays when n > 1 + sync/compute.

    ``sync`` is taken as constant: true for a ring's bandwidth, false for its latency.

    >>> break_even(compute=1.0, sync=2.5)
    3.5
    """
    return plain(1 + at_least(0, seconds=sync) / at_least(0, seconds=compute))


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
    steps = at_least(0, samples=samples) / (at_least(1, ranks=n) * at_least(1, batch=batch))
    return plain(steps * (at_least(0, seconds=compute) + at_least(0, seconds=sync)))


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
    size = at_least(0, bytes=nbytes)
    share = np.maximum(size / at_least(1, servers=servers), largest)
    return plain(2 * link.seconds(np.maximum(size, at_least(1, workers=workers) * share)))
