"""How far two hosts' clocks are apart, by round trips between them. Pure.

Let θ be a host's clock minus the reference's. A message that the reference sent at s and the host
received at r took some time, so θ < r − s; one in the other direction, sent at s by the host, says
θ > s − r. Between two instants θ changes by the clock's drift, which is bounded. So each
message bounds θ at every instant.

The estimate is the middle between the bounds. Its error is at most half their distance, however
unequal the two directions are. For one round trip it is Cristian's and NTP's estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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

_ROUNDING = 1e-11
#: A straight line is sought through at most so many instants.
_POINTS = 64


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
    >>> round(offset.to_here(105.0), 6)
    100.0
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
    bounds = tighten(times, upper, lower, slopes)
    straight = constant_drift(times, *bounds, drift)
    if straight is not None:
        better = tighten(times, *bounds, straight)
        if consistent(*better):
            bounds, slopes = better, straight
    if not consistent(*bounds):
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


def tighten(times: Floats, upper: Floats, lower: Floats, slopes: Slopes) -> Bounds:
    """Upper and lower bounds at each instant that follow from those at all instants."""
    low, high = slopes
    return _least(times, upper, slopes), -_least(times, -lower, (-high, -low))


def consistent(upper: Floats, lower: Floats) -> bool:
    """True if no lower bound is above its upper one."""
    return bool((lower <= upper + _ROUNDING).all())


def constant_drift(times: Floats, upper: Floats, lower: Floats, drift: float) -> Slopes | None:
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
