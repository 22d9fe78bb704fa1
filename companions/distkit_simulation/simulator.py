"""Simulate the trace that ranks would record for a schedule on a network. No side effects.

All transfers of a round are computed together, so simulating a ring of thousands of ranks takes
only seconds. A transfer starts when both ends are ready, as a large message does in gloo and MPI. A
rank sends at most one message and receives at most one at a time. It enters the next round when its
transfers in the current round are complete. Received data is reduced during the next transfers,
unless these move the same chunks.

:class:`Stragglers` describes slow ranks and late messages. All random numbers come from a seeded
generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs
from numpy.random import Generator
from numpy.typing import ArrayLike

from distkit.algorithms.all_reduce import ALL_REDUCES
from distkit.algorithms.catalog import Algorithm
from distkit.algorithms.collectives import COLLECTIVES
from distkit.algorithms.rounds import Ints, Round, chunk_sizes
from distkit.events import Event, Op, State
from distkit.trace.info import RankInfo, RunInfo
from distkit.trace.trace import Trace
from distkit_simulation.network import Floats, Network, check_network

#: A function ``delay(rng, shape)`` that draws an array of delays [s].
Delay = Callable[[Generator, tuple[int, ...]], Floats]


def exponential(mean: float) -> Delay:
    """Return a function that draws exponentially distributed delays with this mean [s].

    >>> exponential(1.0)(np.random.default_rng(0), (2,)).round(2)
    array([0.68, 1.02])
    """
    _check_nonnegative("mean", mean)
    return lambda rng, shape: rng.exponential(mean, shape)


def lognormal(median: float, sigma: float) -> Delay:
    """Return a function that draws lognormal delays [s], long-tailed like measured step times.

    >>> lognormal(2.0, 0.0)(np.random.default_rng(0), (2,))
    array([2., 2.])
    """
    _check_nonnegative("median", median)
    _check_nonnegative("sigma", sigma)
    return lambda rng, shape: median * np.exp(sigma * rng.standard_normal(shape))


@dataclass(frozen=True)
class Stragglers:
    """Slow ranks and late transfers.

    Args:
        slow: maps slow ranks to their slowdown factors. :func:`simulate` slows their transfers
            and sums, and simulations of training slow their computation. In real clusters, slow
            ranks tend to stay slow.
        jitter: the random delay of each transfer; see :func:`exponential`.

    Source:
        Persistence: Lin et al., "Understanding stragglers in large model training", 2025.

    Example:
        >>> Stragglers(slow={3: 2.0}).factors(4)
        array([1., 1., 1., 2.])
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: Delay | None = None

    def __post_init__(self) -> None:
        for rank, factor in self.slow.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(
                    f"the slowdown of rank {rank} must be finite and positive; got {factor}"
                )

    def factors(self, n: int) -> Floats:
        """Return the slowdown of each of ``n`` ranks, shape (n,)."""
        factors = np.ones(n)
        for rank, factor in self.slow.items():
            if not 0 <= rank < n:
                raise ValueError(f"slow rank {rank} does not exist: use a rank from 0 to {n - 1}")
            factors[rank] = factor
        return factors


def _check_nonnegative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0; got {value}")


Schedule = str | Algorithm | Callable[..., Iterable[Round]]

#: Maximum number of events of :func:`simulate`; a view of more events would be unreadable.
MAX_EVENTS = 2_000_000

#: Bytes per element of simulated tensors, which are float32.
ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class Transfers:
    """Concurrent transfers of one round with their times [s], as arrays of shape (m,).

    Each rank sends at most one of the messages, and receives at most one.
    ``sent`` and ``requested`` are the times of the send and receive calls; ``end`` is the time of
    completion.
    """

    src: Ints
    dst: Ints
    nbytes: Ints
    sent: Floats
    requested: Floats
    end: Floats


class RankClocks:
    """Advances the clocks of ranks round by round.

    Args:
        n: the number of ranks.
        network: the network that connects the ranks.
        stragglers: slow ranks and late transfers; none by default.
        seed: the seed for the jitter.
    """

    def __init__(
        self, n: int, network: Network, *, stragglers: Stragglers | None = None, seed: int = 0
    ) -> None:
        check_network(network, n)
        self.n, self.network = n, network
        faults = stragglers or Stragglers()
        self._factors = faults.factors(n) if faults.slow else None
        self._jitter, self._rng = faults.jitter, np.random.default_rng(seed)
        self._clock, self._sum_ends = np.zeros(n), np.zeros(n)  # end times of messages and sums

    def begin(self, start: ArrayLike, nbytes: int) -> None:
        """Begin a collective on each rank at ``start``, but not before its last one ends."""
        begin = np.broadcast_to(np.asarray(start, float), (self.n,))
        self._clock = np.maximum(self.finish, begin) + self.network.overhead_seconds(nbytes)
        self._low, self._high = np.zeros(self.n, int), np.zeros(self.n, int)  # chunks being summed

    @property
    def finish(self) -> Floats:
        """The time at which each rank finishes all its rounds [s]."""
        return np.maximum(self._clock, self._sum_ends)

    def run(self, rounds: Iterable[Round], sizes: Ints) -> Iterator[Transfers]:
        """Yield the transfers of rounds with chunks of these sizes [bytes]; advance the clocks."""
        edges = np.r_[0, np.cumsum(sizes)]
        for t in rounds:
            last = t.chunk + t.count
            nbytes = edges[last] - edges[t.chunk]
            adds = np.broadcast_to(t.reduce, nbytes.shape)
            send_clock, recv_clock = self._clock, self._clock
            for index in matchings(t.src, t.dst, self.n):
                src, dst = t.src[index], t.dst[index]
                sent = self._free(send_clock, src, t.chunk[index], last[index])
                requested = self._free(recv_clock, dst, t.chunk[index], last[index])
                end = self._end(src, dst, nbytes[index], np.maximum(sent, requested))
                send_clock, recv_clock = send_clock.copy(), recv_clock.copy()
                send_clock[src] = recv_clock[dst] = end
                yield Transfers(src, dst, nbytes[index], sent, requested, end)
                recv_clock[dst] = self._add(
                    dst, nbytes[index] * adds[index], end, t.chunk[index], last[index]
                )
            self._clock = np.maximum(send_clock, recv_clock)

    def _free(self, port: Floats, rank: Ints, first: Ints, last: Ints) -> Floats:
        """Return the times when ranks can send or receive these chunks, after pending sums."""
        times = port[rank]
        if self.network.link.gamma:
            busy = (self._low[rank] < last) & (first < self._high[rank])
            times = np.maximum(times, np.where(busy, self._sum_ends[rank], 0.0))
        return times

    def _end(self, src: Ints, dst: Ints, nbytes: Ints, begin: Floats) -> Floats:
        """Return the end times of transfers."""
        duration: Floats = self.network.seconds(src, dst, nbytes)
        if self._factors is not None:
            duration = duration * np.maximum(self._factors[src], self._factors[dst])
        if self._jitter is not None:
            duration = duration + self._jitter(self._rng, src.shape)
        return begin + duration

    def _add(self, rank: Ints, nbytes: Ints, end: Floats, first: Ints, last: Ints) -> Floats:
        """Sum received data; return the times at which the ranks can receive the next message."""
        if not self.network.link.gamma:
            return end
        free = np.where(nbytes > 0, np.maximum(end, self._sum_ends[rank]), end)
        duration = self.network.reduce_seconds(rank, nbytes)
        if self._factors is not None:
            duration = duration * self._factors[rank]
        self._sum_ends[rank] = np.where(nbytes > 0, free + duration, self._sum_ends[rank])
        self._low[rank] = np.where(nbytes > 0, first, self._low[rank])
        self._high[rank] = np.where(nbytes > 0, last, self._high[rank])
        return free


def matchings(src: Ints, dst: Ints, n: int) -> Iterator[Any]:
    """Split transfers into sets in which each rank sends and receives at most one message.

    Ranks with the most transfers come first and start with their nearest right neighbor, so that
    an all-to-all exchange of n ranks needs only n-1 sets.

    >>> [index.tolist() for index in matchings(np.array([0, 0, 1]), np.array([1, 2, 2]), 3)]
    [[0, 2], [1]]
    """
    if all(np.bincount(ranks, minlength=n).max(initial=0) <= 1 for ranks in (src, dst)):
        yield slice(None)
        return
    remaining = np.argsort((dst - src) % n, kind="stable")
    while remaining.size:
        load = np.bincount(src[remaining], minlength=n), np.bincount(dst[remaining], minlength=n)
        negative_load = -np.maximum(load[0][src[remaining]], load[1][dst[remaining]])
        index = _matching(remaining[np.argsort(negative_load, kind="stable")], src, dst, n)
        yield index
        remaining = remaining[~np.isin(remaining, index)]


def _matching(remaining: Ints, src: Ints, dst: Ints, n: int) -> Ints:
    """Return a maximal set of transfers that can run concurrently, preferring the first ones."""
    sends, receives = np.zeros(n, bool), np.zeros(n, bool)
    chosen = []
    while remaining.size:
        _, first = np.unique(src[remaining], return_index=True)
        one_each = remaining[np.sort(first)]
        _, first = np.unique(dst[one_each], return_index=True)
        chosen.append(one_each[first])
        sends[src[chosen[-1]]], receives[dst[chosen[-1]]] = True, True
        remaining = remaining[~(sends[src[remaining]] | receives[dst[remaining]])]
    return np.sort(np.concatenate(chosen))


def plan(
    schedule: Schedule, n: int, nbytes: int, chunks: int | None = None, **options: Any
) -> tuple[str, Iterable[Round], Ints]:
    """Return the name of a schedule, its rounds, and the sizes of its chunks [bytes].

    Raises:
        ValueError: the algorithm is unknown, or ``nbytes`` is negative or not a multiple of the
            element size.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative; got {nbytes}")
    if nbytes % ITEMSIZE:
        raise ValueError(f"nbytes must be a multiple of the element size {ITEMSIZE}; got {nbytes}")
    if isinstance(schedule, str):
        schedule = algorithm(schedule)
    if isinstance(schedule, Algorithm):
        chunks = schedule.chunks(n, **options) if chunks is None else chunks
        name = schedule.name
        make: Callable[..., Iterable[Round]] = schedule.schedule
    else:
        name, make = getattr(schedule, "__name__", "schedule"), schedule
    rounds: Iterable[Round] = make(n, **options)
    return name, rounds, chunk_sizes(nbytes // ITEMSIZE, n if chunks is None else chunks) * ITEMSIZE


def algorithm(name: str) -> Algorithm:
    """Return an algorithm by its name.

    Raises:
        ValueError: the algorithm is unknown.
    """
    known = {**COLLECTIVES, **ALL_REDUCES}
    if name not in known:
        raise ValueError(f"unknown algorithm {name!r}: choose from {', '.join(known)}")
    return known[name]


def finish_times(
    schedule: Schedule,
    n: int,
    nbytes: int,
    network: Network,
    *,
    start: ArrayLike = 0.0,
    stragglers: Stragglers | None = None,
    chunks: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Floats:
    """Return the end time of each rank [s], shape (n,), without recording a trace.

    >>> from distkit_simulation.network import Link
    >>> finish_times("ring", 4, 4000, Network(Link(alpha=1e-6, beta=1e-9)))
    array([1.2e-05, 1.2e-05, 1.2e-05, 1.2e-05])
    """
    clocks = RankClocks(n, network, stragglers=stragglers, seed=seed)
    clocks.begin(start, nbytes)
    _, rounds, sizes = plan(schedule, n, nbytes, chunks, **options)
    for _ in clocks.run(rounds, sizes):
        pass
    return clocks.finish


def simulate(
    schedule: Schedule,
    n: int,
    nbytes: int,
    network: Network,
    *,
    start: ArrayLike = 0.0,
    stragglers: Stragglers | None = None,
    chunks: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Trace:
    """Simulate a schedule on a network and return the trace that ``n`` real ranks would record.

    Args:
        schedule: the name of an algorithm, an entry of a catalog, or a function that returns the
            rounds for a number of ranks.
        n: the number of ranks.
        nbytes: the size of the float32 tensor [bytes]; elements are never split.
        network: the network that connects the ranks.
        start: the time of each rank's call [s]: a number, or an array of shape (n,).
        stragglers: slow ranks and jitter.
        chunks: the number of chunks of the tensor; by default, the number that the algorithm
            needs, or ``n`` for a function.
        seed: the seed for the jitter; the same seed gives the same trace.
        options: options for the schedule, such as ``devices_per_host``.

    Raises:
        TypeError: ``network`` is not a network.
        ValueError: the algorithm is unknown, the network has a different number of ranks, there are
            too many events, or another argument is invalid.

    Example:
        >>> from distkit_simulation.network import Link
        >>> trace = simulate("ring", 4, 4000, Network(Link(alpha=1e-6, beta=1e-9)))
        >>> len(trace.messages), round(1e6 * trace.seconds, 3)
        (24, 12.0)
    """
    clocks = RankClocks(n, network, stragglers=stragglers, seed=seed)
    clocks.begin(start, nbytes)
    # a transfer has two ends of two events each
    events = 4 * sum(len(t.src) for t in plan(schedule, n, nbytes, chunks, **options)[1])
    if events > MAX_EVENTS:
        raise ValueError(
            f"the trace would have {events:,} events, more than {MAX_EVENTS:,}: simulate fewer "
            "ranks, or use finish_times(), which records no trace"
        )
    name, rounds, sizes = plan(schedule, n, nbytes, chunks, **options)
    writer = Writer(n)
    for transfers in clocks.run(rounds, sizes):
        writer.add_transfers(transfers)
    return writer.trace(name)


class Writer:
    """Collects transfers and computations as events, numbered like a recorder's events."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._seq = np.zeros(n, int)
        self.events: list[Event] = []

    def add_transfers(self, t: Transfers) -> None:
        """Add the sends and receives of these transfers."""
        send = self._seq[t.src]
        self._seq[t.src] += 1
        recv = self._seq[t.dst]
        self._seq[t.dst] += 1
        columns = t.src, t.dst, send, recv, t.nbytes, t.sent, t.requested, t.end
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for src, dst, s, r, nbytes, sent, requested, end in rows:
            self._add_events(src, s, Op.SEND, sent, end, self.message_fields(dst, nbytes))
            self._add_events(dst, r, Op.RECV, requested, end, self.message_fields(src, nbytes))

    def add_operation(
        self,
        op: Op,
        rank: int,
        begin: float,
        end: float,
        final: State = State.COMPLETED,
        **fields: Any,
    ) -> None:
        """Add a rank's operation, whose last event has the state ``final``."""
        seq = int(self._seq[rank])
        self._seq[rank] += 1
        self._add_events(rank, seq, op, begin, end, fields, final)

    def add_operations(self, op: Op, begin: Floats, end: Floats, **fields: Any) -> None:
        """Add an operation of every rank."""
        for rank, times in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
            self.add_operation(op, rank, *times, **fields)

    def message_fields(self, peer: int, nbytes: int) -> dict[str, Any]:
        """Return the event fields of a send or receive."""
        return {
            "peer": peer,
            "nbytes": nbytes,
            "shape": (nbytes // ITEMSIZE,),
            "tag": 0,
            "dtype": "float32",
        }

    def _add_events(
        self,
        rank: int,
        seq: int,
        op: Op,
        begin: float,
        end: float,
        fields: dict[str, Any],
        final: State = State.COMPLETED,
    ) -> None:
        self.events.append(Event(rank, seq, op, State.STARTED, begin, **fields))
        if end < math.inf:
            self.events.append(Event(rank, seq, op, final, end, **fields))

    def trace(self, name: str, **fields: Any) -> Trace:
        """Return the events as a trace; ``fields`` override the defaults of its ``RunInfo``."""
        info = RunInfo(
            name=name,
            simulated=True,
            world_size=self.n,
            backend="simulated",
            ranks={r: RankInfo(f"rank {r}", "rank", host="none") for r in range(self.n)},
        )
        return Trace(self.events, structs.replace(info, **fields))
