"""The clocks of several hosts, put right so that no message is received before it was sent. Pure.

Each message bounds the clocks of its ends, see :mod:`distkit_hosts.clocks`; over other
messages it bounds those of all hosts. With the middle between the bounds no message is received
before it was sent.

In a cluster, the offset of each host's clock was measured to within an error while the run went
on, and its times are by the reader's clock already. Where a message contradicts them, the offsets
are moved within these errors until it does not.

Source: Halpern, Megiddo and Munshi, 1985; Patt-Shamir and Rajsbaum, 1994.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distkit.cluster.process_host import DRIFT
from distkit.events import Op, Span, State
from distkit.trace.hosts import several
from distkit.trace.log import EventLog, Log

Floats = NDArray[np.float64]
#: Upper and lower bounds of how far a clock is ahead.
Bounds = tuple[Floats, Floats]

_ROUNDING = 1e-11
#: Drifts that are tried when messages contradict the usual one: a clock that is being set.
_SLEWED = (DRIFT, 1e-2, 0.1)
#: A message between hosts takes at least this long [s]: more than what rounding takes away.
LEAST = 1e-9
#: Bounds go from host to host at most so often.
_HOPS = 200
#: How far a clock may be from what is assumed of it, at first [s].
_NEAR = 1e-3

_CONTRADICTION = (
    "the clocks of the hosts cannot be aligned: some messages seem to have been received before "
    f"they were sent, whatever the offsets are, and drifts up to {_SLEWED[-1]:g}."
)


class ClocksDisagree(ValueError):
    """No drift that is possible explains the times of these messages."""


class Crossing(NamedTuple):
    """A message from a host to another: when it was sent and received, by the clock of each [s].

    ``sent`` may be earlier, and ``received`` later, than it really was.
    """

    src: str
    sent: float
    dst: str
    received: float


@dataclass(frozen=True, slots=True)
class Correction:
    """A host's clock by the reference's.

    Args:
        times: some instants of the host's clock, less ``begin``, in order [s].
        offsets: the host's clock minus the reference's then, less ``begin`` and plus
            ``origin`` [s].
        begin, origin: what instants of the two clocks are counted from: small numbers lose fewer
            digits [s].
        error: the largest by which an offset may be wrong [s]; infinite if messages went in one
            direction only, or none at all.
    """

    times: Floats
    offsets: Floats
    begin: float
    origin: float
    error: float

    @property
    def seconds(self) -> float:
        """The host's clock minus the reference's, in the middle of the run [s]."""
        return self.begin - self.origin + float(np.median(self.offsets))

    def __call__(self, there: Floats | Sequence[float]) -> Floats:
        """Instants of the host's clock by that of the reference [s]."""
        since = np.asarray(there, np.float64) - self.begin
        return since - np.interp(since, self.times, self.offsets) + self.origin


def align(hosts: Mapping[str, float], crossings: Iterable[Crossing]) -> dict[str, Correction]:
    """Put the clocks of some hosts right, so that no message is received before it was sent.

    Args:
        hosts: each host with what its clock minus the first host's is assumed to be [s], as by
            their wall clocks; that counts only where messages do not bound it from both sides.
            The first host's clock is the reference.
        crossings: messages between them; a round trip is two.

    Returns:
        ``{host: correction}``, to be called with instants of its clock.

    Raises:
        ClocksDisagree: the messages contradict each other.

    >>> there_and_back = [Crossing("a", 1.0, "b", 6.2), Crossing("b", 7.0, "a", 2.2)]
    >>> b = align({"a": 0.0, "b": 0.0}, there_and_back)["b"]
    >>> round(b.seconds, 2), round(b.error, 2), b([6.2]).round(2).tolist()
    (5.0, 0.2, [1.2])
    """
    names = list(hosts)
    net = _Net(names, [c for c in crossings if c.src != c.dst])
    return dict(zip(names, net.solve([hosts[name] for name in names]), strict=True))


class _Net:
    """The instants at which messages between hosts were sent and received."""

    def __init__(self, names: list[str], crossings: list[Crossing]) -> None:
        number = {name: i for i, name in enumerate(names)}
        ends = [(number[c.src], c.sent) for c in crossings]
        ends += [(number[c.dst], c.received) for c in crossings]
        host = np.array([h for h, _ in ends], np.int64)
        clock = np.array([t for _, t in ends], np.float64)
        firsts = [clock[host == i].min(initial=math.inf) for i in range(len(names))]
        #: What the instants of each host are counted from.
        self.begin = np.array([0.0 if math.isinf(first) else first for first in firsts])
        order = np.lexsort((clock, host))
        place = np.argsort(order)
        self.host, self.times = host[order], (clock - self.begin[host])[order]
        self.src, self.dst = place[: len(crossings)], place[len(crossings) :]
        self.took = self.times[self.dst] - self.times[self.src] - LEAST
        cuts = np.searchsorted(self.host, np.arange(len(names) + 1))
        self.parts = [slice(*cut) for cut in itertools.pairwise(cuts)]

    def solve(self, assumed: list[float]) -> Iterator[Correction]:
        """The correction of each host; ``assumed``: what its clock is ahead of the first's [s]."""
        near = np.array(assumed) - (self.begin - self.begin[0])
        upper = np.where(self.host == 0, 0.0, math.inf)
        for drift in _SLEWED:
            bounds = self._spread(drift, upper, -upper)
            if bounds is not None:
                closed = self._close(drift, bounds, near[self.host])
                return self._corrections(closed, bounds, near)
        raise ClocksDisagree(_CONTRADICTION)

    def _spread(self, drift: float, upper: Floats, lower: Floats) -> Bounds | None:
        """Let bounds go along clocks and over messages until no more follows; None: they clash."""
        for _ in range(_HOPS):
            high, low = upper.copy(), lower.copy()
            np.minimum.at(high, self.dst, upper[self.src] + self.took)
            np.maximum.at(low, self.src, lower[self.dst] - self.took)
            for host, part in enumerate(self.parts):
                most = drift * self.times[part] * (host > 0)
                high[part], low[part] = _least(most, high[part]), -_least(most, -low[part])
            if not consistent(high, low):
                return None
            if consistent(high, upper) and consistent(lower, low):
                return upper, lower
            upper, lower = high, low
        return None

    def _close(self, drift: float, bounds: Bounds, near: Floats) -> Bounds:
        """Bound what is open on a side, about as near to what is assumed as the others allow."""
        upper, lower = bounds
        is_open = np.isinf(upper) | np.isinf(lower)
        if not is_open.any():
            return bounds
        for doublings in range(64):
            slack = _NEAR * 2**doublings
            high = np.where(is_open, np.minimum(upper, near + slack), upper)
            low = np.where(is_open, np.maximum(lower, near - slack), lower)
            found = self._spread(drift, high, low) if consistent(high, low) else None
            if found is not None:
                return found
        raise ClocksDisagree(_CONTRADICTION)

    def _corrections(self, closed: Bounds, certain: Bounds, near: Floats) -> Iterator[Correction]:
        """The middles between bounds, and how far the certain ones are from them."""
        middle = (closed[0] + closed[1]) / 2
        wrong = np.maximum(certain[0] - middle, middle - certain[1])
        for i, part in enumerate(self.parts):
            times, offsets, error = np.zeros(1), near[i : i + 1], math.inf if i else 0.0
            if part.start < part.stop:
                times, offsets = self.times[part], middle[part]
                error = max(0.0, float(wrong[part].max()))
            yield Correction(times, offsets, float(self.begin[i]), float(self.begin[0]), error)


def _least(most: Floats, upper: Floats) -> Floats:
    """The upper bound at each instant that follows from those at all instants.

    Args:
        most: what a clock may have gained or lost by then, since it was zero.
        upper: the bound at each instant.
    """
    before = np.minimum.accumulate(upper - most) + most
    after = np.minimum.accumulate((upper + most)[::-1])[::-1] - most
    return np.minimum(upper, np.minimum(before, after))


def consistent(upper: Floats, lower: Floats) -> bool:
    """True if no lower bound is above its upper one."""
    return bool((lower <= upper + _ROUNDING).all())


# -- the messages of a trace ---------------------------------------------------------------------

#: All others wait for the root, or the root for all others; else everybody does for everybody.
_FROM_ROOT, _TO_ROOT = {Op.BROADCAST, Op.SCATTER}, {Op.REDUCE, Op.GATHER}
#: A member may end these before another one has begun: it gets nothing from it.
_LOOSE = {Op.ALL_TO_ALL, Op.NEW_GROUP}
#: Between more hosts than this, a collective counts as messages from and to the first and between
#: neighbours: there are too many pairs.
_ALL_PAIRS = 8
#: The reader's host, and every other one whose times are taken as they are.
_HERE = ""


def in_order(trace: Log) -> Log:
    """The trace with other times of hosts, if a message was received before it was sent.

    No time moves by more than its host's error, ``info.clocks[host].error``. A message that
    contradicts by more than that stays as it is: something else is wrong.

    >>> from distkit.events import Event
    >>> from distkit.trace.info import ClockOffset, RankInfo, RunInfo
    >>> from distkit.trace.trace import Trace
    >>> there = Event(0, 0, Op.SEND, State.STARTED, 1.0, peer=1)
    >>> here = Event(1, 0, Op.RECV, State.COMPLETED, 0.9999, peer=0)
    >>> ranks = {0: RankInfo(host="a"), 1: RankInfo(host="b")}
    >>> info = RunInfo(ranks=ranks, clocks={"b": ClockOffset(0.0, error=0.001)})
    >>> (message,) = in_order(Trace([there, here], info)).messages
    >>> message.sent < message.received
    True
    """
    errors = {host: clock.error for host, clock in trace.info.clocks.items() if clock.error}
    hosts = {rank: host if host in errors else _HERE for rank, host in several(trace.info).items()}
    near = [  # too quick by no more than the errors of both clocks
        c
        for c in crossings(trace, hosts)
        if abs(c.received - c.sent) <= errors.get(c.src, 0.0) + errors.get(c.dst, 0.0)
    ]
    if all(c.received >= c.sent for c in near):
        return trace
    try:
        corrections = align(dict.fromkeys([_HERE, *errors], 0.0), [*near, *_known(near, errors)])
    except ClocksDisagree:
        return trace
    return _moved(trace, hosts, corrections, errors)


def _known(near: list[Crossing], errors: Mapping[str, float]) -> Iterator[Crossing]:
    """What is known of each clock at the ends of these messages, said by messages."""
    for crossing in near:
        for host, at in (crossing.src, crossing.sent), (crossing.dst, crossing.received):
            if host in errors:
                yield Crossing(_HERE, at - errors[host], host, at)
                yield Crossing(host, at, _HERE, at + errors[host])


def crossings(trace: EventLog, hosts: Mapping[int, str]) -> Iterator[Crossing]:
    """The messages between hosts, those of collectives included.

    Args:
        trace: with the times of each host by its own clock.
        hosts: the host of each rank; messages of others do not count.
    """
    if len(set(hosts.values())) < 2:
        return
    for m in trace.messages:
        if m.sent is not None and m.received is not None and {m.src, m.dst} <= hosts.keys():
            yield Crossing(hosts[m.src], m.sent, hosts[m.dst], m.received)
    for members in trace.collectives:
        ops = {s.op for s in members}
        if len(ops) == 1 and not ops & _LOOSE:  # several do not belong together
            yield from _of_collective([s for s in members if s.rank in hosts], hosts)


def _of_collective(members: list[Span], hosts: Mapping[int, str]) -> Iterator[Crossing]:
    """A collective as messages: from the last to begin on a host to the first to end on another.

    Of a rooted one only the root sends, or ends after all have begun.
    """
    begun, ended = dict[str, float](), dict[str, float]()
    for s in members:
        host, is_root = hosts[s.rank], s.rank == s.peer
        if s.state is not State.SCHEDULED and (is_root or s.op not in _FROM_ROOT):
            begun[host] = max(s.start, begun.get(host, s.start))
        if s.state is State.COMPLETED and s.end is not None and (is_root or s.op not in _TO_ROOT):
            ended[host] = min(s.end, ended.get(host, s.end))
    for n, (src, sent) in enumerate(begun.items()):
        for m, (dst, received) in enumerate(ended.items()):
            if src != dst and (len(ended) <= _ALL_PAIRS or 0 in (n, m) or abs(n - m) == 1):
                yield Crossing(src, sent, dst, received)


def _moved(
    trace: Log,
    hosts: Mapping[int, str],
    corrections: Mapping[str, Correction],
    errors: Mapping[str, float],
) -> Log:
    """The trace by the corrected clocks; no time moves further than its error."""
    times = np.array([e.time for e in trace])
    ranks = np.array([hosts.get(e.rank, _HERE) for e in trace])
    for host, error in errors.items():
        mine = ranks == host
        moved = corrections[host](times[mine]) - times[mine]
        times[mine] += np.clip(moved, -error, error)
    events = (replace(e, time=t) for e, t in zip(trace, times.tolist(), strict=True))
    return type(trace)(events, trace.info)
