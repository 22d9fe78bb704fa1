"""Measure the costs of single messages, concurrent messages and sums on this machine.

Ranks on one machine share its cores, so a message costs more while others are in flight. Three
patterns are measured on a ring of n ranks: one message in flight, n/2 messages in flight, and n
messages in flight, when every rank sends and receives. Costs for other numbers of messages are
interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distkit.views.scene.figures import advance
from distkit_simulation.network import Floats, Link, Network

Batches = Mapping[int, Sequence[float]]

#: Minimum number of sizes.
MIN_SIZES = 3

#: Minimum beta [s/byte]; a smaller beta means that large messages took no longer than small ones.
MIN_BETA = 1e-15


def lower_quartile(times: ArrayLike) -> Floats:
    """Return the lower quartile along the last axis, which estimates the time on an idle machine.

    Load only increases times, so short times are more reliable than long ones.

    >>> float(lower_quartile([1.0, 1.0, 1.0, 50.0, 90.0]))
    1.0
    """
    quartile: Floats = np.quantile(np.asarray(times, float), 0.25, axis=-1)
    return quartile


def interpolate(size: Floats, sizes: Floats, times: Floats) -> Floats:
    """Interpolate linearly between the sizes, and extrapolate beyond the last.

    >>> interpolate(np.array([1.5, 4.0]), np.array([1.0, 2.0]), np.array([10.0, 20.0])).tolist()
    [15.0, 40.0]
    """
    slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
    result: Floats = np.interp(size, sizes, times) + slope * np.maximum(size - sizes[-1], 0.0)
    return result


@dataclass(frozen=True)
class Fit:
    """A link, with 95% confidence intervals of its alpha and beta."""

    link: Link
    alpha: tuple[float, float]
    beta: tuple[float, float]

    def __str__(self) -> str:
        low, high = (1e6 * x for x in self.alpha)
        beta = self.link.beta
        bandwidth = f"{1e-9 / beta:.3g} GB/s" if beta > MIN_BETA else "no bandwidth found"
        return f"alpha {1e6 * self.link.alpha:.3g} µs [{low:.3g} to {high:.3g}], {bandwidth}"


def fit(moves: Batches, adds: Batches | None = None, *, draws: int = 200, seed: int = 0) -> Fit:
    """Fit a link to the lower quartiles, and bootstrap confidence intervals from the batches.

    Args:
        moves: the time of each batch of messages [s], by size [bytes].
        adds: the time of each batch of sums [s], by size [bytes]; used for gamma.
        draws: the number of bootstrap samples.
        seed: the seed for the bootstrap.

    Raises:
        ValueError: the messages have fewer than two sizes.

    Example:
        >>> line = {m: [1e-5 + m * 1e-9] * 3 for m in (4, 1000, 100_000, 10_000_000)}
        >>> link = fit(line).link
        >>> round(link.alpha * 1e6, 6), round(link.beta * 1e9, 6)
        (10.0, 1.0)
    """
    if len(moves) < 2:
        raise ValueError("a line fit needs messages of at least two sizes")
    sizes = np.array(list(moves), float)
    batches = np.array(list(moves.values()), float)
    gamma = (
        line(np.array(list(adds), float), lower_quartile(list(adds.values())))[1] if adds else 0.0
    )
    link = Link(*line(sizes, lower_quartile(batches)), gamma)
    rng, samples = np.random.default_rng(seed), []
    for _ in range(draws):
        indices = rng.integers(batches.shape[1], size=batches.shape)
        samples.append(line(sizes, lower_quartile(np.take_along_axis(batches, indices, axis=1))))
    low, high = np.percentile(np.array(samples), [2.5, 97.5], axis=0)
    return Fit(link, (low[0], high[0]), (low[1], high[1]))


def line(sizes: Floats, times: Floats) -> tuple[float, float]:
    """Fit nonnegative alpha and beta by least squares of the relative errors.

    >>> a, b = line(np.array([0.0, 100.0]), np.array([1.0, 3.0]))
    >>> round(a, 9), round(b, 9)
    (1.0, 0.02)
    """
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    alpha, beta = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)[0]
    if alpha < 0:
        return 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    if beta < 0:
        return float((1 / times).sum() / (1 / times**2).sum()), 0.0
    return float(alpha), float(beta)


#: Default message sizes [bytes].
SIZES = (4, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
#: Default number of batches.
BATCHES = 7

#: Minimum size of the largest message [bytes]: small messages take as long as empty ones.
MIN_LARGEST = 1 << 16

#: A batch of measurements on one rank: the time of each pattern [s], for each size.
Batch = list[dict[str, float]]


def calibrate(
    cluster: Any, *, sizes: Sequence[int] = SIZES, batches: int = BATCHES
) -> MeasuredNetwork:
    """Measure the links between a cluster's ranks and return a network for :func:`simulate`.

    The measurement takes a few seconds and shows a progress bar in notebooks. It is most accurate
    on an idle machine.

    Args:
        cluster: a :class:`distkit.Cluster` with two or more ranks.
        sizes: sizes of messages [bytes], in ascending order.
        batches: the number of measurements per size; measurements alternate between sizes.

    Raises:
        TypeError: ``cluster`` is not a cluster.
        ValueError: the cluster has only one rank; the sizes are too few, too small or not
            ascending; or ``batches`` is less than 1.

    Example:
        >>> cluster = dk.Cluster(4)                  # doctest: +SKIP
        >>> network = dk.simulation.calibrate(cluster)          # doctest: +SKIP
        >>> network.link                             # doctest: +SKIP
        Link(alpha=5.9e-05, beta=3.1e-10, gamma=1.9e-10, switches=())
    """
    if not hasattr(cluster, "submit"):
        raise TypeError(
            f"calibrate needs a dk.Cluster, not {type(cluster).__name__}: use "
            "dk.simulation.calibrate(dk.Cluster(4))"
        )
    ascending = list(sizes) == sorted(set(sizes)) and min(sizes, default=0) > 0
    if not ascending or len(sizes) < MIN_SIZES or sizes[-1] < MIN_LARGEST or batches < 1:
        raise ValueError(
            f"calibrate needs at least {MIN_SIZES} sizes in ascending order, the last one at least "
            f"{MIN_LARGEST:,} bytes, and at least 1 batch; got sizes={list(sizes)} and "
            f"batches={batches}"
        )
    results = [cluster.submit(probe, list(sizes)).results for _ in advance(range(batches))]
    return MeasuredNetwork.of(sizes, results)


def probe(sizes: Sequence[int]) -> Batch:
    """Measure a batch of every pattern and size on this rank; [] if there is only one rank."""
    import torch.distributed as dist

    return [measure_patterns(nbytes) for nbytes in sizes] if dist.get_world_size() > 1 else []


def measure_patterns(nbytes: int) -> dict[str, float]:
    """Time a message in each pattern, a sum, and the overhead of a collective [s]."""
    import torch
    import torch.distributed as dist

    from distkit.algorithms.contract import (
        SUM,
        Group,
        ReduceOp,
        collective,
        combine,
        exchange,
        recv,
        send,
    )

    rank, n = dist.get_rank(), dist.get_world_size()
    left, right, half = (rank - 1) % n, (rank + 1) % n, max(1, n // 2)
    size = max(1, nbytes // 4)
    out, into = torch.ones(size), torch.ones(size)  # zeros may share one page of memory

    def forward(tokens: int) -> None:
        first = rank % (n // tokens) == 0 and rank // (n // tokens) < tokens
        calls = ((send, out, right), (recv, into, left))
        for call, tensor, peer in calls if first else calls[::-1]:
            call(tensor, peer, None)

    def ring() -> None:
        exchange(out, right, into, left, None)

    @collective()
    def one_exchange(x: torch.Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
        combine(x, exchange(x, right, torch.empty_like(x), left, group), op)

    repeats = 2 * (n - 1)  # number of messages in a ring all-reduce
    add = times(lambda: combine(out, into, SUM), nbytes, repeats)
    return {
        "one": times(lambda: forward(1), nbytes, 2) / n,
        "some": times(lambda: forward(half), nbytes, 2) * half / n,
        "all": times(ring, nbytes, repeats),
        "add": add,
        "call": times(lambda: one_exchange(out), nbytes) - times(ring, nbytes) - add,
    }


def times(action: Callable[[], object], nbytes: int, repeats: int = 1) -> float:
    """Return the lower quartile of an action's time per call [s]; all ranks start together."""
    import torch.distributed as dist

    durations = []
    dist.barrier()
    for _ in range(12 if nbytes <= 1 << 16 else 6 if nbytes <= 1 << 20 else 4):
        start = perf_counter()
        for _ in range(repeats):
            action()
        durations.append((perf_counter() - start) / repeats)
    return float(lower_quartile(durations[1:]))


class MeasuredNetwork(Network):
    """A network with measured times of messages, by size and by number of concurrent messages.

    Args:
        n: the number of ranks.
        moves: the time of each batch of messages [s], by number of concurrent messages and by size.
        adds: the time of each batch of sums [s], by size.
        calls: the overhead of a collective (checks, allocations) in each batch [s], by size.
    """

    def __init__(
        self,
        n: int,
        moves: dict[int, dict[int, list[float]]],
        adds: dict[int, list[float]],
        calls: dict[int, list[float]],
    ) -> None:
        self.n, self.moves, self.adds = n, dict(sorted(moves.items())), adds
        self.sizes = np.array(list(adds), float)
        self._times = np.array([lower_quartile(list(x.values())) for x in self.moves.values()])
        self._adds = lower_quartile(list(adds.values()))
        self.fits = {count: fit(batches, adds) for count, batches in self.moves.items()}
        self._calls = np.maximum(0.0, [np.median(batch) for batch in calls.values()])
        super().__init__(self.fits[1].link, n, "measured")

    @classmethod
    def of(cls, sizes: Sequence[int], batches: Sequence[Sequence[Batch]]) -> MeasuredNetwork:
        """Create a network from the batches of all ranks, averaged over the ranks."""
        n = len(batches[0])
        if n < 2:
            raise ValueError("calibrate needs at least 2 ranks: a single rank cannot send messages")
        mean = {
            pattern: {
                size: [float(np.mean([rank[i][pattern] for rank in batch])) for batch in batches]
                for i, size in enumerate(sizes)
            }
            for pattern in batches[0][0][0]
        }
        return cls(
            n, {n // 2: mean["some"], 1: mean["one"], n: mean["all"]}, mean["add"], mean["call"]
        )

    def __repr__(self) -> str:
        return (
            f"<MeasuredNetwork: {self.n} ranks; {self.fits[1]} single; "
            f"{self.fits[self.n]} concurrent>"
        )

    def fit(self, count: int = 1) -> Fit:
        """Return the fit for a number of concurrent transfers, with confidence intervals."""
        if count not in self.fits:
            raise ValueError(
                f"{count} concurrent transfers were not measured: use one of {list(self.fits)}"
            )
        return self.fits[count]

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.seconds`; interpolate between measured sizes and transfer counts."""
        size = np.asarray(nbytes, float)
        counts = np.array(list(self.moves), float)
        position = np.interp(size.size, counts, np.arange(len(counts)))
        low = int(position)
        high = min(low + 1, len(counts) - 1)
        lower, upper = (interpolate(size, self.sizes, self._times[i]) for i in (low, high))
        return lower + (position - low) * (upper - lower)

    def overhead_seconds(self, nbytes: int) -> float:
        """See :meth:`Network.overhead_seconds`."""
        return float(interpolate(np.array(float(nbytes)), self.sizes, self._calls))

    def reduce_seconds(self, rank: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.reduce_seconds`."""
        size = np.asarray(nbytes, float)
        return np.where(size > 0, interpolate(size, self.sizes, self._adds), 0.0)
