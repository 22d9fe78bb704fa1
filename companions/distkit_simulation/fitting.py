"""Lines through measured times: alpha, beta and gamma, protocols, and how sure they are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from distkit_simulation.network import Floats, Link

Batches = Mapping[int, Sequence[float]]

#: At most so many protocols, each of so many sizes at least.
PROTOCOLS, FEWEST = 3, 3

#: Seconds per byte that are none: large messages took no longer than small ones.
NO_TIME = 1e-15


def quiet(times: ArrayLike) -> Floats:
    """The lower quartile along the last axis: how long it takes when little else disturbs.

    What else a machine does only makes times longer, so that small ones tell more than large.

    >>> float(quiet([1.0, 1.0, 1.0, 50.0, 90.0]))
    1.0
    """
    found: Floats = np.quantile(np.asarray(times, float), 0.25, axis=-1)
    return found


def along(size: Floats, sizes: Floats, times: Floats) -> Floats:
    """Linear between the sizes, and on beyond the last.

    >>> along(np.array([1.5, 4.0]), np.array([1.0, 2.0]), np.array([10.0, 20.0])).tolist()
    [15.0, 40.0]
    """
    slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
    found: Floats = np.interp(size, sizes, times) + slope * np.maximum(size - sizes[-1], 0.0)
    return found


@dataclass(frozen=True)
class Fit:
    """A link and the 95 % confidence intervals of its first protocol's alpha and beta.

    ``error`` is the median relative distance of the times from the line.
    """

    link: Link
    alpha: tuple[float, float]
    beta: tuple[float, float]
    error: float

    def __str__(self) -> str:
        low, high = (1e6 * x for x in self.alpha)
        found = self.last_beta > NO_TIME
        bandwidth = f"{1e-9 / self.last_beta:.3g} GB/s" if found else "no bandwidth found"
        return f"alpha {1e6 * self.link.alpha:.3g} µs [{low:.3g} to {high:.3g}], {bandwidth}"

    @property
    def last_beta(self) -> float:
        """Seconds per byte of the largest messages."""
        return max(self.link.switches[-1][2] if self.link.switches else self.link.beta, NO_TIME)


def fit(moves: Batches, adds: Batches | None = None, *, draws: int = 200, seed: int = 0) -> Fit:
    """A link through the quiet times of what was measured; intervals by bootstrap over the batches.

    Args:
        moves: size of a message [bytes] -> seconds of each batch.
        adds: likewise of adding so many bytes; for gamma.
        draws: of the bootstrap.
        seed: of the draws.

    Raises:
        ValueError: there are fewer than two sizes.

    Example:
        >>> line = {m: [1e-5 + m * 1e-9] * 3 for m in (4, 1000, 100_000, 10_000_000)}
        >>> found = fit(line)
        >>> round(found.link.alpha * 1e6, 6), round(found.link.beta * 1e9, 6), found.link.switches
        (10.0, 1.0, ())
    """
    if len(moves) < 2:
        raise ValueError("a line fit needs messages of at least two sizes")
    sizes = np.array(list(moves), float)
    batches = np.array(list(moves.values()), float)
    times = quiet(batches)
    starts = regimes(sizes, times)
    first, *others = lines(sizes, times, starts)
    gamma = 0.0
    if adds:
        gamma = line(np.array(list(adds), float), quiet(list(adds.values())))[1]
    switches = tuple(
        (float(sizes[i - 1]), *other) for i, other in zip(starts[1:], others, strict=True)
    )
    link = Link(*first, gamma, switches)
    rng, drawn = np.random.default_rng(seed), []
    for _ in range(draws):
        pick = rng.integers(batches.shape[1], size=batches.shape)
        again = quiet(np.take_along_axis(batches, pick, axis=1))
        drawn.append(lines(sizes, again, starts)[0])
    low, high = np.percentile(np.array(drawn), [2.5, 97.5], axis=0)
    error = float(np.median(np.abs(link.seconds(sizes) / times - 1)))
    return Fit(link, (low[0], high[0]), (low[1], high[1]), error)


def line(sizes: Floats, times: Floats) -> tuple[float, float]:
    """Alpha and beta, neither negative, of the least relative squares.

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


def lines(sizes: Floats, times: Floats, starts: Sequence[int]) -> list[tuple[float, float]]:
    """The line of each protocol; ``starts`` are the indices of its first sizes."""
    ends = [*starts[1:], len(sizes)]
    return [line(sizes[a:b], times[a:b]) for a, b in zip(starts, ends, strict=True)]


def regimes(sizes: Floats, times: Floats) -> list[int]:
    """The sizes at which protocols begin: as few as explain the times (Schwarz's criterion).

    >>> sizes = np.array([1.0, 2, 3, 100, 200, 300])
    >>> regimes(sizes, np.where(sizes < 50, 5 + sizes, 100 + sizes / 10) / 10)
    [0, 3]
    """
    m = len(sizes)
    best, least = [0], np.inf
    for count in range(min(PROTOCOLS, max(1, m // FEWEST))):
        for cuts in combinations(range(FEWEST, m - FEWEST + 1), count):
            starts = [0, *cuts]
            if any(b - a < FEWEST for a, b in zip(starts, [*cuts, m], strict=True)) and count:
                continue
            fitted = Link(*lines(sizes, times, starts)[0]).seconds(sizes)
            for a, (alpha, beta) in zip(starts, lines(sizes, times, starts), strict=True):
                fitted[a:] = alpha + beta * sizes[a:]
            spread = np.mean((fitted / times - 1) ** 2) + 1e-6
            score = m * np.log(spread) + (2 + 3 * count) * np.log(m)
            if score < least:
                best, least = starts, score
    return best
