"""Estimate the difference between two hosts' clocks from round trips, without I/O.

Let θ be a host's clock minus the reference clock. A message that the reference sent at s and the
host received at r took some time, so θ < r − s. A message in the other direction, sent at s by the
host, implies θ > s − r. The drift of the clocks is bounded, so each message also bounds θ at all
other times.

The estimate is the midpoint of the bounds. Its error is at most half the distance between them,
even if one direction is slower. For one round trip, it equals the estimates of Cristian's algorithm
and NTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from distkit.trace.info import ClockOffset

#: Maximum drift of a clock [s/s]: the rate at which the operating system may slew it.
DRIFT = 5e-4


class Offset(NamedTuple):
    """The offset of another host's clock from this host's.

    Args:
        seconds: the difference [s] when the other clock reads ``at``.
        error: maximum error of the difference [s].
        at: the other host's clock at the latest round trip [s].

    >>> offset = Offset(seconds=5.0, error=1e-4, at=105.0)
    >>> round(offset.to_local_time(105.0), 6)
    100.0
    >>> round(offset.error_at(105.2), 6)
    0.0002
    """

    seconds: float
    error: float
    at: float

    def error_at(self, remote: float) -> float:
        """Return the maximum error of the offset at a time on the other clock [s]."""
        return self.error + DRIFT * abs(remote - self.at)

    def to_local_time(self, remote: float) -> float:
        """Convert a time on the other host's clock to this host's clock [s]."""
        return remote - self.seconds


class RoundTrip(NamedTuple):
    """The times of a request and its reply [s].

    ``received_there`` and ``sent_there`` are times on the other host's clock.
    """

    sent_here: float
    received_there: float
    sent_there: float
    received_here: float


class PeerClock:
    """An estimate of another host's clock, updated by each round trip to it.

    Earlier round trips contribute bounds that are widened by drift. They are discarded if they
    contradict the latest one, for example after a clock was set.

    >>> clock = PeerClock()
    >>> clock.add(RoundTrip(10.0, 15.2, 15.2, 10.5))
    >>> round(clock.offset.seconds, 3), round(clock.offset.error, 3)
    (4.95, 0.25)
    >>> clock.add(RoundTrip(11.0, 16.01, 16.02, 11.03))
    >>> round(clock.offset.seconds, 3), round(clock.offset.error, 3)
    (5.0, 0.01)
    """

    def __init__(self) -> None:
        #: The best estimate from all round trips; None before the first.
        self.offset: Offset | None = None
        self._low, self._high, self._latest = -math.inf, math.inf, 0.0

    def add(self, trip: RoundTrip) -> None:
        """Update the estimate with the latest round trip."""
        drift, self._latest = DRIFT * (trip.sent_there - self._latest), trip.sent_there
        reply_drift = DRIFT * (trip.sent_there - trip.received_there)
        low = trip.sent_there - trip.received_here
        high = trip.received_there - trip.sent_here + reply_drift
        self._low, self._high = max(low, self._low - drift), min(high, self._high + drift)
        if self._low > self._high:
            self._low, self._high = low, high
        middle, error = (self._high + self._low) / 2, (self._high - self._low) / 2
        self.offset = Offset(middle, error, self._latest)


class LiveClocks:
    """Converts ranks' times to this host's clock, with estimates that improve during a run."""

    def __init__(self) -> None:
        self._clocks: dict[int, Offset] = {}  # the estimate in use for each rank
        self._last_times: dict[int, float] = {}  # the last converted time of each rank
        self._errors: dict[int, float] = {}  # the largest possible error of each rank's times [s]

    def converter(
        self, rank: int, offset: Offset, first: float, last: float
    ) -> Callable[[float], float]:
        """Return a function that converts a rank's times to this machine's clock.

        The times are between ``first`` and ``last``. A rank keeps its offset until a later offset
        has less than half the error. Converted times never decrease, even if the offset changes.
        """

        def error(estimate: Offset) -> float:
            return max(estimate.error_at(first), estimate.error_at(last))

        clock = self._clocks.get(rank, offset)
        clock = self._clocks[rank] = offset if error(offset) < error(clock) / 2 else clock
        self._errors[rank] = max(error(clock), self._errors.get(rank, 0.0))
        minimum = self._last_times.get(rank, -math.inf)
        self._last_times[rank] = max(minimum, clock.to_local_time(last))
        return lambda remote: max(minimum, clock.to_local_time(remote))

    def offsets(self, hosts: dict[int, str]) -> dict[str, ClockOffset]:
        """Return the offsets of other machines' clocks, given the host of each rank."""
        clocks, errors = dict[str, ClockOffset](), dict[str, float]()
        for rank, offset in sorted(self._clocks.items()):
            host = hosts[rank]
            errors[host] = max(self._errors[rank], errors.get(host, 0.0))
            clocks[host] = ClockOffset(offset.seconds, errors[host])
        return clocks
