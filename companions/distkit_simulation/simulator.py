"""Plays a schedule on a network, and writes the trace that real ranks would have left. Pure.

All transfers of a round are computed at once, so that a ring of thousands of ranks takes
seconds. A transfer begins when both ends are there, as gloo's and MPI's large messages do. A rank
sends one message and receives one at a time, and comes to the next round when its part of this one
is over. What came is added up beside the next transfers, unless they move the same chunks.

:class:`Stragglers` are late, slow or gone; every draw comes from a generator that is handed in.
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

from distkit.algorithms.catalogue import ALL_REDUCES, COLLECTIVES, Algorithm
from distkit.algorithms.rounds import Ints
from distkit.algorithms.schedules import Round, chunk_sizes
from distkit.events import Event, Op, State
from distkit.trace.info import RankEnd, RankInfo, RunInfo
from distkit.trace.trace import Trace
from distkit.views.scene.units import human_seconds
from distkit_simulation.network import Floats, Network, a_network

#: Draws an array of a shape, in seconds: ``delay(rng, shape)``.
Delay = Callable[[Generator, tuple[int, ...]], Floats]


def exponential(mean: float) -> Delay:
    """Memoryless delays of ``mean`` seconds: many short ones, few long ones.

    >>> exponential(1.0)(np.random.default_rng(0), (2,)).round(2)
    array([0.68, 1.02])
    """
    _seconds("mean", mean)
    return lambda rng, shape: rng.exponential(mean, shape)


def lognormal(median: float, sigma: float) -> Delay:
    """Delays around ``median`` seconds with a long tail, as step times have.

    >>> lognormal(2.0, 0.0)(np.random.default_rng(0), (2,))
    array([2., 2.])
    """
    _seconds("median", median)
    _seconds("sigma", sigma)
    return lambda rng, shape: median * np.exp(sigma * rng.standard_normal(shape))


def constant(seconds: float) -> Delay:
    """Always the same delay."""
    _seconds("delay", seconds)
    return lambda rng, shape: np.full(shape, float(seconds))


@dataclass(frozen=True)
class Stragglers:
    """Faults of the ranks.

    Args:
        slow: rank -> factor; all that the rank does or takes part in lasts so many times longer.
            Persistent slow ranks are what clusters really have.
        jitter: delay of every transfer, drawn anew for each; see :func:`exponential`.
        fails: rank -> when it dies [s]. Whoever needs it afterwards waits for ever.

    Source:
        Persistence: Lin et al., "Understanding stragglers in large model training", 2025.

    Example:
        >>> Stragglers(slow={3: 2.0}).factors(4)
        array([1., 1., 1., 2.])
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: Delay | None = None
    fails: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, factor in self.slow.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"rank {rank} is {factor} times as slow: give a positive factor")
        for rank, at in self.fails.items():
            _seconds(f"failure of rank {rank}", at)

    def factors(self, n: int) -> Floats:
        """The slowdown of each of ``n`` ranks, shape (n,)."""
        return self._by_rank(self.slow, n, 1.0)

    def deaths(self, n: int) -> Floats:
        """The time at which each of ``n`` ranks dies [s], infinity for those that live."""
        return self._by_rank(self.fails, n, math.inf)

    @staticmethod
    def _by_rank(known: Mapping[int, float], n: int, otherwise: float) -> Floats:
        values = np.full(n, otherwise)
        for rank, value in known.items():
            if not 0 <= rank < n:
                raise ValueError(f"there is no rank {rank} among {n}: name one from 0 to {n - 1}")
            values[rank] = value
        return values


def _seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"a {name} of {value}: give a number that is not negative")


Schedule = str | Algorithm | Callable[..., Iterable[Round]]

#: A trace with more events than this is no trace for people to look at.
MOST_EVENTS = 2_000_000

_DTYPES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}


@dataclass(frozen=True, slots=True)
class Transfers:
    """Some transfers of one round and their times [s], infinity for never; arrays of shape (m,).

    ``sent`` and ``asked`` are when sender and receiver called, ``end`` when both were through.
    """

    src: Ints
    dst: Ints
    nbytes: Ints
    sent: Floats
    asked: Floats
    end: Floats


class Player:
    """Ranks, their clocks, and what happens to both in a round.

    Args:
        n: number of ranks.
        network: what connects them.
        stragglers: what is wrong with them.
        seed: of the jitter.
    """

    def __init__(
        self, n: int, network: Network, *, stragglers: Stragglers | None = None, seed: int = 0
    ) -> None:
        a_network(network, n)
        self.n, self.network = n, network
        wrong = stragglers or Stragglers()
        self._factors = wrong.factors(n) if wrong.slow else None
        self.deaths = wrong.deaths(n) if wrong.fails else None
        self._jitter, self._rng = wrong.jitter, np.random.default_rng(seed)
        self._clock, self._adding = np.zeros(n), np.zeros(n)  # its messages and its sums are done

    def begin(self, start: ArrayLike, nbytes: int) -> None:
        """A new collective, which each rank calls at ``start`` or when it is through the last."""
        begin = np.broadcast_to(np.asarray(start, float), (self.n,))
        self._clock = np.maximum(self.finish, begin) + self.network.calling(nbytes)
        self._low, self._high = np.zeros(self.n, int), np.zeros(self.n, int)  # what it adds up

    @property
    def finish(self) -> Floats:
        """The time when each rank has finished all that was played [s]."""
        return np.maximum(self._clock, self._adding)

    def play(self, rounds: Iterable[Round], sizes: Ints) -> Iterator[Transfers]:
        """Play rounds whose chunks have these sizes [bytes]; the clocks move along."""
        edges = np.r_[0, np.cumsum(sizes)]
        for t in rounds:
            last = t.chunk + t.count
            nbytes = edges[last] - edges[t.chunk]
            adds = np.broadcast_to(t.reduce, nbytes.shape)
            out, into = self._clock, self._clock
            for at in matchings(t.src, t.dst, self.n):
                src, dst = t.src[at], t.dst[at]
                sent = self._free(out, src, t.chunk[at], last[at])
                asked = self._free(into, dst, t.chunk[at], last[at])
                end = self._end(src, dst, nbytes[at], np.maximum(sent, asked))
                out, into = out.copy(), into.copy()
                out[src] = into[dst] = end
                yield Transfers(src, dst, nbytes[at], sent, asked, end)
                into[dst] = self._add(dst, nbytes[at] * adds[at], end, t.chunk[at], last[at])
            self._clock = np.maximum(out, into)

    def _free(self, port: Floats, rank: Ints, first: Ints, last: Ints) -> Floats:
        """The times when ranks can move these chunks: not while they add to them."""
        at = port[rank]
        if self.network.link.gamma:
            busy = (self._low[rank] < last) & (first < self._high[rank])
            at = np.maximum(at, np.where(busy, self._adding[rank], 0.0))
        return at

    def _end(self, src: Ints, dst: Ints, nbytes: Ints, begin: Floats) -> Floats:
        """The ends of transfers, infinity if one of the two ranks dies before."""
        took = self.network.seconds(src, dst, nbytes)
        if self._factors is not None:
            took = took * np.maximum(self._factors[src], self._factors[dst])
        if self._jitter is not None:
            took = took + self._jitter(self._rng, src.shape)
        end: Floats = begin + took
        if self.deaths is None:
            return end
        return np.where(end <= np.minimum(self.deaths[src], self.deaths[dst]), end, math.inf)

    def _add(self, rank: Ints, nbytes: Ints, end: Floats, first: Ints, last: Ints) -> Floats:
        """Have ranks add what came; when they can take the next: one may wait beside it."""
        if not self.network.link.gamma:
            return end
        free = np.where(nbytes > 0, np.maximum(end, self._adding[rank]), end)
        took = self.network.adding(rank, nbytes)
        if self._factors is not None:
            took = took * self._factors[rank]
        self._adding[rank] = np.where(nbytes > 0, free + took, self._adding[rank])
        self._low[rank] = np.where(nbytes > 0, first, self._low[rank])
        self._high[rank] = np.where(nbytes > 0, last, self._high[rank])
        return free


def matchings(src: Ints, dst: Ints, n: int) -> Iterator[Any]:
    """Split transfers so that in each part a rank sends one at most and receives one at most.

    Ranks with most to do come first, and begin with the neighbour nearest to their right, so
    that an exchange of all with all needs no more parts than partners.

    >>> [part.tolist() for part in matchings(np.array([0, 0, 1]), np.array([1, 2, 2]), 3)]
    [[0, 2], [1]]
    """
    if _once(src, n) and _once(dst, n):
        yield slice(None)
        return
    left = np.argsort((dst - src) % n, kind="stable")
    while left.size:
        load = np.bincount(src[left], minlength=n), np.bincount(dst[left], minlength=n)
        urgent = -np.maximum(load[0][src[left]], load[1][dst[left]])
        part = _matching(left[np.argsort(urgent, kind="stable")], src, dst, n)
        yield part
        left = left[~np.isin(left, part)]


def _matching(left: Ints, src: Ints, dst: Ints, n: int) -> Ints:
    """Transfers that can go at once, the first ones first; no other could join them."""
    sends, takes = np.zeros(n, bool), np.zeros(n, bool)
    found = []
    while left.size:
        _, first = np.unique(src[left], return_index=True)
        one = left[np.sort(first)]
        _, first = np.unique(dst[one], return_index=True)
        found.append(one[first])
        sends[src[found[-1]]], takes[dst[found[-1]]] = True, True
        left = left[~(sends[src[left]] | takes[dst[left]])]
    return np.sort(np.concatenate(found))


def _once(ranks: Ints, n: int) -> bool:
    return bool(np.bincount(ranks, minlength=n).max(initial=0) <= 1)


def plan(
    schedule: Schedule, n: int, nbytes: int, itemsize: int, chunks: int | None, **options: Any
) -> tuple[str, Iterable[Round], Ints]:
    """The name of a schedule, its rounds, and the sizes of its chunks [bytes].

    Raises:
        ValueError: there is no such algorithm, no rank, or the bytes are no whole elements.
    """
    if n < 1:
        raise ValueError(f"{n} ranks: at least 1 is needed")
    if itemsize not in _DTYPES:
        raise ValueError(f"elements of {itemsize} bytes: give one of {sorted(_DTYPES)}")
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes: nbytes must not be negative")
    if nbytes % itemsize:
        raise ValueError(f"{nbytes} bytes are not whole elements of {itemsize}: give a multiple")
    if isinstance(schedule, str):
        schedule = algorithm(schedule)
    if isinstance(schedule, Algorithm):
        chunks = schedule.chunks(n, **options) if chunks is None else chunks
        name = schedule.name
        make: Callable[..., Iterable[Round]] = schedule.schedule
    else:
        name, make = getattr(schedule, "__name__", "schedule"), schedule
    rounds: Iterable[Round] = make(n, **options)
    return name, rounds, chunk_sizes(nbytes // itemsize, n if chunks is None else chunks) * itemsize


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name.

    Raises:
        ValueError: there is none.
    """
    known = {**COLLECTIVES, **ALL_REDUCES}
    if name not in known:
        raise ValueError(f"there is no algorithm {name!r}: choose from {', '.join(known)}")
    return known[name]


def finish_times(
    schedule: Schedule,
    n: int,
    nbytes: int,
    network: Network,
    *,
    start: ArrayLike = 0.0,
    stragglers: Stragglers | None = None,
    itemsize: int = 4,
    chunks: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Floats:
    """The end of each rank [s], shape (n,): :func:`simulate` without its trace, for many ranks.

    >>> from distkit_simulation.network import Link
    >>> finish_times("ring", 4, 4000, Network(Link(alpha=1e-6, beta=1e-9)))
    array([1.2e-05, 1.2e-05, 1.2e-05, 1.2e-05])
    """
    player = Player(n, network, stragglers=stragglers, seed=seed)
    player.begin(start, nbytes)
    _, rounds, sizes = plan(schedule, n, nbytes, itemsize, chunks, **options)
    for _ in player.play(rounds, sizes):
        pass
    return player.finish


def simulate(
    schedule: Schedule,
    n: int,
    nbytes: int,
    network: Network,
    *,
    start: ArrayLike = 0.0,
    stragglers: Stragglers | None = None,
    itemsize: int = 4,
    chunks: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Trace:
    """Simulate a schedule on a network: the trace that ``n`` real ranks would produce.

    Args:
        schedule: the name of an algorithm, an entry of the catalogue, or a function of the
            number of ranks that gives rounds.
        n: number of ranks.
        nbytes: size of the tensor [bytes].
        network: what connects the ranks.
        start: when each rank calls [s], one for all or shape (n,).
        stragglers: slow ranks, jitter, failures.
        itemsize: bytes of an element, which is never cut.
        chunks: number of chunks of the tensor, if the schedule does not define it.
        seed: of the jitter; the same seed gives the same trace.
        options: of the schedule, such as ``devices=`` of the hierarchical one.

    Raises:
        TypeError: ``network`` is not a network.
        ValueError: an unknown algorithm, a network of another size, too many events …

    Example:
        >>> from distkit_simulation.network import Link
        >>> trace = simulate("ring", 4, 4000, Network(Link(alpha=1e-6, beta=1e-9)))
        >>> len(trace.messages), round(1e6 * trace.seconds, 3)
        (24, 12.0)
    """
    player = Player(n, network, stragglers=stragglers, seed=seed)
    player.begin(start, nbytes)
    _check_events(plan(schedule, n, nbytes, itemsize, chunks, **options)[1])
    name, rounds, sizes = plan(schedule, n, nbytes, itemsize, chunks, **options)
    writer = Writer(n, player.deaths, itemsize)
    for moved in player.play(rounds, sizes):
        writer.transfers(moved)
    return writer.trace(name)


def _check_events(rounds: Iterable[Round]) -> None:
    """Two ends of each transfer, two events of each."""
    if (events := 4 * sum(len(t.src) for t in rounds)) > MOST_EVENTS:
        raise ValueError(
            f"{events:,} events are more than {MOST_EVENTS:,}: simulate fewer ranks, or take "
            "finish_times(), which makes none"
        )


class Writer:
    """Turns transfers and computations into events, numbered as a recorder would."""

    def __init__(self, n: int, deaths: Floats | None = None, itemsize: int = 4) -> None:
        self.n, self._itemsize = n, itemsize
        self._deaths = np.full(n, math.inf) if deaths is None else deaths
        self._seq = np.zeros(n, int)
        self.events: list[Event] = []

    def transfers(self, moved: Transfers) -> None:
        """The sends and the receives of one round."""
        send = self._seq[moved.src]
        self._seq[moved.src] += 1
        recv = self._seq[moved.dst]
        self._seq[moved.dst] += 1
        columns = (
            moved.src,
            moved.dst,
            send,
            recv,
            moved.nbytes,
            moved.sent,
            moved.asked,
            moved.end,
        )
        for src, dst, s, r, nbytes, sent, asked, end in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            self._put(src, s, Op.SEND, sent, end, self.message(dst, nbytes))
            self._put(dst, r, Op.RECV, asked, end, self.message(src, nbytes))

    def operation(self, op: Op, rank: int, begin: float, end: float, **fields: Any) -> None:
        """One operation of one rank, of any kind."""
        seq = int(self._seq[rank])
        self._seq[rank] += 1
        self._put(rank, seq, op, begin, end, fields)

    def message(self, peer: int, nbytes: int) -> dict[str, Any]:
        """The fields of a send's or a receive's events."""
        return {
            "peer": peer,
            "nbytes": nbytes,
            "shape": (nbytes // self._itemsize,),
            "tag": 0,
            "dtype": _DTYPES[self._itemsize],
        }

    def _put(
        self, rank: int, seq: int, op: Op, begin: float, end: float, fields: dict[str, Any]
    ) -> None:
        """Events as far as the rank lives."""
        if begin < self._deaths[rank]:  # infinity is not: it never came so far
            self.events.append(Event(rank, seq, op, State.STARTED, begin, **fields))
            if end < math.inf and end <= self._deaths[rank]:
                self.events.append(Event(rank, seq, op, State.COMPLETED, end, **fields))

    def trace(self, name: str, **facts: Any) -> Trace:
        """The recorded events as a trace; ``facts``: fields of its info that differ."""
        ranks = {
            r: RankInfo(f"rank {r}", "rank", host="none", device="simulated") for r in range(self.n)
        }
        ends = {
            r: RankEnd("died", f"it was to fail at {human_seconds(at)}", time=at)
            for r, at in enumerate(self._deaths.tolist())
            if at < math.inf
        }
        info = RunInfo(
            name=name,
            simulated=True,
            world_size=self.n,
            backend="simulated",
            ranks=ranks,
            ends=ends,
        )
        return Trace(self.events, structs.replace(info, **facts))
