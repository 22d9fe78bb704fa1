"""The clocks of several hosts: how far they are apart, by messages between them. Pure.

Let θ be a host's clock minus the reference's. A message that the reference sent at s and the host
received at r took some time, so θ < r − s; one in the other direction, sent at s by the host, says
θ > s − r. Between two instants θ changes by the clock's drift, which is bounded. So each
message bounds θ at every instant and, over other messages, at every host.

The estimate is the middle between the bounds. Its error is at most half their distance, however
unequal the two directions are, and by it no message is received before it was sent.

Source: Halpern, Megiddo and Munshi, 1985; Patt-Shamir and Rajsbaum, 1994. For two hosts and one
round trip it is Cristian's and NTP's estimate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
#: The least and the largest change of θ per second of the host's clock.
Slopes = tuple[float, float]
#: Upper and lower bounds of θ.
Bounds = tuple[Floats, Floats]

#: A clock gains or loses at most this much [s/s]: so fast the kernel may slew it to be right.
DRIFT = 5e-4
#: Where a straight line fits, the drift changes by at most this much [s/s], as by temperature.
WANDER = 1e-6
#: Drifts that are tried when messages contradict the usual one: a clock that is being set.
_SLEWED = (DRIFT, 1e-2, 0.1)

#: A message between hosts takes at least this long [s]: more than what rounding takes away.
LEAST = 1e-9
_ROUNDING = 1e-11
#: A straight line is sought through at most so many instants.
_POINTS = 64
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


class RoundTrip(NamedTuple):
    """A question and its answer: four instants [s], each by the clock of the host named."""

    sent_here: float
    received_there: float
    sent_there: float
    received_here: float

    @property
    def seconds(self) -> float:
        """The time that the two messages took together [s]."""
        return (self.received_here - self.sent_here) - (self.sent_there - self.received_there)


class Crossing(NamedTuple):
    """A message from a host to another: when it was sent and received, by the clock of each [s].

    ``sent`` may be earlier, and ``received`` later, than it really was.
    """

    src: str
    sent: float
    dst: str
    received: float


# -- two hosts, while they talk ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offset:
    """Another host's clock minus this one's.

    Args:
        seconds: the difference [s] when the other clock shows ``at``.
        error: the largest by which it may be wrong [s].
        drift: seconds that the other clock gains in each of its seconds.
        drift_error: the largest by which that may be wrong.
        at: the other host's clock at the latest round trip [s].

    >>> offset = Offset(seconds=5.0, error=1e-4, drift=1e-5, drift_error=1e-6, at=105.0)
    >>> round(offset.to_here(105.0), 6), round(offset.to_there(100.0), 6)
    (100.0, 105.0)
    >>> round(offset.error_at(205.0), 6)
    0.0002
    """

    seconds: float
    error: float
    drift: float
    drift_error: float
    at: float

    def error_at(self, there: float) -> float:
        """The largest by which the offset may be wrong at an instant of the other clock [s]."""
        return self.error + self.drift_error * abs(there - self.at)

    def to_here(self, there: float) -> float:
        """An instant of the other host's clock by this one's [s]."""
        return there - (self.seconds + self.drift * (there - self.at))

    def to_there(self, here: float) -> float:
        """An instant of this host's clock by the other's [s]."""
        return self.at + (here - (self.at - self.seconds)) / (1 - self.drift)


class PeerClock:
    """The clock of another host, estimated anew with each round trip to it.

    Old round trips count as long as the drift allows; those that contradict the newer ones, as
    after a clock was set, are dropped.

    Args:
        drift_bound: a clock gains or loses at most this much [s/s].
        window: round trips older than this do not count [s].

    >>> clock = PeerClock()
    >>> clock.add(RoundTrip(10.0, 15.2, 15.3, 10.6))  # it took 0.5 s: the middle is 4.95 s
    >>> round(clock.offset.seconds, 3), round(clock.offset.error, 3)
    (4.95, 0.25)
    >>> clock.add(RoundTrip(11.0, 16.01, 16.02, 11.03))
    >>> round(clock.offset.seconds, 3), round(clock.offset.error, 3)
    (5.0, 0.01)
    """

    def __init__(self, *, drift_bound: float = DRIFT, window: float = 300.0) -> None:
        self._drift, self._window = drift_bound, window
        self._trips: list[RoundTrip] = []
        self._offset: Offset | None = None

    def add(self, trip: RoundTrip) -> None:
        """Take in a round trip, the latest so far.

        Raises:
            ValueError: it ended before it began.
        """
        if trip.received_here < trip.sent_here or trip.sent_there < trip.received_there:
            raise ValueError(f"a round trip cannot end before it begins: {trip}")
        oldest = trip.sent_there - self._window
        self._trips = [t for t in self._trips if t.sent_there >= oldest] + [trip]
        if len(self._trips) > _POINTS:
            self._drop_one()
        self._offset = None

    @property
    def offset(self) -> Offset | None:
        """The best estimate of all round trips so far; None before the first."""
        while self._trips and self._offset is None:
            self._offset = _offset_of(self._trips, self._drift)
            if self._offset is None:
                del self._trips[: max(1, len(self._trips) // 2)]
        return self._offset

    def _drop_one(self) -> None:
        """Drop the slower one of the two that are nearest in time."""
        at = [trip.sent_there for trip in self._trips[:-1]]
        i = int(np.argmin(np.diff(at)))
        one, other = self._trips[i : i + 2]
        del self._trips[i if one.seconds > other.seconds else i + 1]


def _offset_of(trips: list[RoundTrip], drift: float) -> Offset | None:
    """The offset that these round trips allow at the end of the last; None if they disagree."""
    last, first = trips[-1], trips[0].received_there
    away = first - trips[0].sent_here  # small numbers lose fewer digits
    times = np.array([x - first for t in trips for x in (t.received_there, t.sent_there)])
    upper, lower = np.full(len(times), math.inf), np.full(len(times), -math.inf)
    upper[::2] = [t.received_there - t.sent_here - away for t in trips]
    lower[1::2] = [t.sent_there - t.received_here - away for t in trips]
    slopes: Slopes = -drift, drift
    bounds = _both(times, upper, lower, slopes)
    straight = _straight(times, *bounds, drift)
    if straight is not None:
        better = _both(times, *bounds, straight)
        if _agree(*better):
            bounds, slopes = better, straight
    if not _agree(*bounds):
        return None
    high, low = (float(bound[-1]) for bound in bounds)
    return Offset(
        seconds=away + (high + low) / 2,
        error=max(high - low, 0.0) / 2,
        drift=sum(slopes) / 2,
        drift_error=(slopes[1] - slopes[0]) / 2,
        at=last.sent_there,
    )


# -- bounds along one clock ----------------------------------------------------------------------


def _least(times: Floats, upper: Floats, slopes: Slopes) -> Floats:
    """The upper bound at each instant that follows from those at all instants."""
    low, high = (slope * times for slope in slopes)
    before = np.minimum.accumulate(upper - high) + high
    after = np.minimum.accumulate((upper - low)[::-1])[::-1] + low
    return np.minimum(upper, np.minimum(before, after))


def _both(times: Floats, upper: Floats, lower: Floats, slopes: Slopes) -> Bounds:
    """Upper and lower bounds at each instant that follow from those at all instants."""
    low, high = slopes
    return _least(times, upper, slopes), -_least(times, -lower, (-high, -low))


def _agree(upper: Floats, lower: Floats) -> bool:
    return bool((lower <= upper + _ROUNDING).all())


def _straight(times: Floats, upper: Floats, lower: Floats, drift: float) -> Slopes | None:
    """The slopes of straight lines between the bounds; None if there are none."""
    some = np.linspace(0, len(times) - 1, min(len(times), _POINTS)).astype(int)
    times, upper, lower = times[some], upper[some], lower[some]
    apart = times[None, :] - times[:, None]
    later = apart > 0
    if not later.any():
        return None
    rise = (lower[None, :] - upper[:, None])[later] / apart[later]
    most = (upper[None, :] - lower[:, None])[later] / apart[later]
    low = max(float(rise.max()) - WANDER, -drift)
    high = min(float(most.min()) + WANDER, drift)
    return (low, high) if low <= high else None


# -- several hosts, after a run ------------------------------------------------------------------


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
        drift: seconds that the host's clock gains in each of its seconds, before and after these
            instants.
    """

    times: Floats
    offsets: Floats
    begin: float
    origin: float
    error: float
    drift: float

    @property
    def seconds(self) -> float:
        """The host's clock minus the reference's, in the middle of the run [s]."""
        return self.begin - self.origin + float(np.median(self.offsets))

    def __call__(self, there: Floats | Sequence[float]) -> Floats:
        """Instants of the host's clock by that of the reference [s]."""
        since = np.asarray(there, np.float64) - self.begin
        outside = since - np.clip(since, self.times[0], self.times[-1])
        offset = np.interp(since, self.times, self.offsets) + self.drift * outside
        return since - offset + self.origin


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
            slopes = [(0.0, 0.0), *[(-drift, drift)] * (len(self.parts) - 1)]
            bounds = self._spread(slopes, upper, -upper)
            if bounds is not None:
                is_open = np.isinf(bounds[0]) | np.isinf(bounds[1])
                closed = self._close(slopes, *bounds, near[self.host])
                return self._corrections(*self._straighten(slopes, *closed, drift), is_open, near)
        raise ClocksDisagree(_CONTRADICTION)

    def _spread(self, slopes: list[Slopes], upper: Floats, lower: Floats) -> Bounds | None:
        """Let bounds go along clocks and over messages until no more follows; None: they clash."""
        for _ in range(_HOPS):
            high, low = upper.copy(), lower.copy()
            np.minimum.at(high, self.dst, upper[self.src] + self.took)
            np.maximum.at(low, self.src, lower[self.dst] - self.took)
            for part, slope in zip(self.parts, slopes, strict=True):
                high[part], low[part] = _both(self.times[part], high[part], low[part], slope)
            if not _agree(high, low):
                return None
            if _agree(high, upper) and _agree(lower, low):
                return upper, lower
            upper, lower = high, low
        return None

    def _close(self, slopes: list[Slopes], upper: Floats, lower: Floats, near: Floats) -> Bounds:
        """Bound what is open on a side, about as near to what is assumed as the others allow."""
        is_open = np.isinf(upper) | np.isinf(lower)
        if not is_open.any():
            return upper, lower
        for doublings in range(64):
            slack = _NEAR * 2**doublings
            high = np.where(is_open, np.minimum(upper, near + slack), upper)
            low = np.where(is_open, np.maximum(lower, near - slack), lower)
            found = self._spread(slopes, high, low) if _agree(high, low) else None
            if found is not None:
                return found
        raise ClocksDisagree(_CONTRADICTION)

    def _straighten(
        self, slopes: list[Slopes], upper: Floats, lower: Floats, drift: float
    ) -> tuple[list[Slopes], Floats, Floats]:
        """Narrower bounds, if drifts may have been constant."""
        lines = [
            _straight(self.times[part], upper[part], lower[part], drift) for part in self.parts[1:]
        ]
        straight = [
            slopes[0],
            *(line or slope for line, slope in zip(lines, slopes[1:], strict=True)),
        ]
        found = self._spread(straight, upper, lower)
        return (slopes, upper, lower) if found is None else (straight, *found)

    def _corrections(
        self, slopes: list[Slopes], upper: Floats, lower: Floats, is_open: Any, near: Floats
    ) -> Iterator[Correction]:
        for i, (part, slope) in enumerate(zip(self.parts, slopes, strict=True)):
            times, offsets, error = np.zeros(1), near[i : i + 1], math.inf if i else 0.0
            if part.start < part.stop:
                times, offsets = self.times[part], (upper[part] + lower[part]) / 2
                if not is_open[part].any():
                    error = max(0.0, float((upper[part] - lower[part]).max()) / 2)
            ends = float(self.begin[i]), float(self.begin[0])
            yield Correction(times, offsets, *ends, error, sum(slope) / 2)
