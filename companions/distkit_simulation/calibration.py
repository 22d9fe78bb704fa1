"""Measures the machine at hand: what a message and a sum cost on it, alone and in company.

Ranks of one machine share its processors, so that a message costs more the more of them are under
way. Three patterns show how much: one pair that plays ping-pong, all pairs that do, and a ring on
which everybody sends and receives. What lies between is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distkit.views.scene.figures import advance
from distkit_simulation.fitting import FEWEST, Fit, along, fit, quiet
from distkit_simulation.network import Floats, Network

#: What is measured by default [bytes], and how often.
SIZES = (4, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
BATCHES = 7

#: So large is the largest message at least [bytes]: smaller ones take as long as an empty one.
LARGE = 1 << 16

#: pattern -> size -> seconds of each batch.
Samples = dict[str, dict[int, list[float]]]


def calibrate(cluster: Any, *, sizes: Sequence[int] = SIZES, batches: int = BATCHES) -> Measured:
    """Measure the links between a cluster's ranks, as a network for :func:`simulate`.

    It takes some seconds, for which a notebook shows a bar; an idle machine gives the best result.

    Args:
        cluster: a :class:`distkit.Cluster` of two ranks or more.
        sizes: of messages [bytes], in ascending order.
        batches: how often each is measured, alternately; batches from idle times count.

    Raises:
        TypeError: ``cluster`` is not a cluster.
        ValueError: there is only one rank, or the sizes are too few or too small for a line.

    Example:
        >>> cluster = dk.Cluster(4)                  # doctest: +SKIP
        >>> machine = dk.simulation.calibrate(cluster)          # doctest: +SKIP
        >>> machine.link                             # doctest: +SKIP
        Link(alpha=5.9e-05, beta=3.1e-10, gamma=1.9e-10, switches=())
    """
    if not hasattr(cluster, "submit"):
        raise TypeError(
            f"calibrate needs a dk.Cluster, not {type(cluster).__name__}, as in "
            "dk.simulation.calibrate(dk.Cluster(4))"
        )
    rising = list(sizes) == sorted(set(sizes)) and min(sizes, default=0) > 0
    if not rising or len(sizes) < FEWEST or sizes[-1] < LARGE or batches < 1:
        raise ValueError(
            f"sizes {list(sizes)}, {batches} batches: give at least three sizes in ascending "
            f"order, up to {LARGE} bytes or more for the bandwidth, and at least one batch"
        )
    each = [cluster.submit(probe, list(sizes), 1).results for _ in advance(range(batches))]
    return Measured.of([_joined(of_rank) for of_rank in zip(*each, strict=True)])


def probe(sizes: Sequence[int], batches: int) -> Samples:
    """The program of every rank: three patterns and a sum, of every size, in turns."""
    import torch.distributed as dist

    samples: Samples = {}
    for _ in range(batches if dist.get_world_size() > 1 else 0):
        for nbytes in sizes:
            for pattern, seconds in once(nbytes).items():
                samples.setdefault(pattern, {}).setdefault(nbytes, []).append(seconds)
    return samples


def _joined(batches: Sequence[Samples]) -> Samples:
    """The batches of one rank as one."""
    return {
        pattern: {nbytes: [x for one in batches for x in one[pattern][nbytes]] for nbytes in times}
        for pattern, times in batches[0].items()
    }


def once(nbytes: int) -> dict[str, float]:
    """One batch of each pattern on this rank: seconds of one message, one sum, one call."""
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
    tensor, inbox = torch.ones(2 * size), torch.ones(size)  # zeros were one page of memory
    out, into = tensor[:size], inbox[:size]

    def pass_on(tokens: int) -> None:
        first = rank % (n // tokens) == 0 and rank // (n // tokens) < tokens
        moves = ((send, out, right), (recv, into, left))
        for move, what, peer in moves if first else moves[::-1]:
            move(what, peer, None)

    def ring() -> None:
        mine, theirs = tensor[:size], inbox[: len(out)]
        exchange(mine, right, theirs, left, None)

    @collective()
    def page(x: torch.Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
        combine(x, exchange(x, right, torch.empty_like(x), left, group), op)

    in_turn = 2 * (n - 1)  # as many as there are in a ring all-reduce: that long it lasts, too
    add = times(lambda: combine(out, into, SUM), nbytes, in_turn)
    return {
        "one": times(lambda: pass_on(1), nbytes, 2) / n,
        "some": times(lambda: pass_on(half), nbytes, 2) * half / n,
        "all": times(ring, nbytes, in_turn),
        "add": add,
        "call": times(lambda: page(out), nbytes) - times(ring, nbytes) - add,
    }


def times(action: Callable[[], object], nbytes: int, in_turn: int = 1) -> float:
    """The quiet time of an action, of several done in turn [s]; all ranks begin together."""
    import torch.distributed as dist

    taken = []
    dist.barrier()
    for _ in range(12 if nbytes <= 1 << 16 else 6 if nbytes <= 1 << 20 else 4):
        began = perf_counter()
        for _ in range(in_turn):
            action()
        taken.append((perf_counter() - began) / in_turn)
    return float(quiet(taken[1:]))


class Measured(Network):
    """A machine as it was measured: what messages take, by their size and by how many there are.

    Args:
        n: number of ranks.
        moves: transfers under way at once -> size -> seconds of each batch.
        adds: size -> seconds of each batch of adding so many bytes.
        calls: likewise of what a collective does beside its messages and sums: checks,
            memory for what comes in.
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
        self._times = np.array([quiet(list(at.values())) for at in self.moves.values()])
        self._adds = quiet(list(adds.values()))
        self.fits = {count: fit(at, adds) for count, at in self.moves.items()}
        self._calls = np.maximum(0.0, [np.median(batch) for batch in calls.values()])
        super().__init__(self.fits[1].link)

    @classmethod
    def of(cls, results: Sequence[Samples]) -> Measured:
        """From what :func:`probe` found on each rank: the mean of the ranks counts."""
        n = len(results)
        if n < 2:
            raise ValueError("calibrate needs at least 2 ranks: one rank has no partner to send to")
        mean = {
            pattern: {
                size: np.mean([r[pattern][size] for r in results], axis=0).tolist()
                for size in results[0][pattern]
            }
            for pattern in results[0]
        }
        moves = {n // 2: mean["some"], 1: mean["one"], n: mean["all"]}
        return cls(n, moves, mean["add"], mean["call"])

    def __repr__(self) -> str:
        return f"<Measured: {self.n} ranks; {self.fits[1]} alone; {self.fits[self.n]} all at once>"

    @property
    def ranks(self) -> int:
        """The number of measurements."""
        return self.n

    @property
    def shown(self) -> str:
        """See :attr:`Network.shown`."""
        return "the ranks that were measured"

    def fit(self, count: int = 1) -> Fit:
        """The line through the times of so many transfers at once, with its confidence."""
        if count not in self.fits:
            raise ValueError(f"{count} at once was not measured: ask for one of {list(self.fits)}")
        return self.fits[count]

    def seconds(self, src: ArrayLike, dst: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.seconds`: between the sizes and the numbers that were measured."""
        size = np.asarray(nbytes, float)
        counts = np.array(list(self.moves), float)
        share = np.interp(size.size, counts, np.arange(len(counts)))
        low = int(share)
        high = min(low + 1, len(counts) - 1)
        fewer, more = (along(size, self.sizes, self._times[i]) for i in (low, high))
        return fewer + (share - low) * (more - fewer)

    def calling(self, nbytes: int) -> float:
        """See :meth:`Network.calling`."""
        return float(along(np.array(float(nbytes)), self.sizes, self._calls))

    def adding(self, rank: ArrayLike, nbytes: ArrayLike) -> Floats:
        """See :meth:`Network.adding`."""
        size = np.asarray(nbytes, float)
        return np.where(size > 0, along(size, self.sizes, self._adds), 0.0)
