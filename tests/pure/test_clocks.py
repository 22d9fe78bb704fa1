"""Alignment of several hosts' clocks: causality, and offsets within their error bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distkit_hosts.causality import CrossHostMessage, align
from distkit_hosts.clocks import PeerClock, RoundTrip


@dataclass
class Host:
    """A clock that is ``ahead`` of the true time [s] and gains ``drift`` seconds per second."""

    ahead: float
    drift: float = 0.0

    def reading(self, true: float) -> float:
        return true + self.ahead + self.drift * true


offsets = st.floats(-1e6, 1e6)
drifts = st.floats(-1e-4, 1e-4)
delays = st.floats(1e-6, 0.05)


@st.composite
def networks(draw):
    """Generate hosts' clocks, and messages with their true times."""
    hosts = [Host(0.0)]
    hosts += [Host(draw(offsets)) for _ in range(draw(st.integers(1, 3)))]
    indices = st.integers(0, len(hosts) - 1)
    sent = draw(st.lists(st.tuples(indices, indices, st.floats(0, 500), delays), max_size=40))
    return hosts, [(src, dst, at, at + delay) for src, dst, at, delay in sent if src != dst]


def cross_host_messages(hosts, messages):
    return [
        CrossHostMessage(str(src), hosts[src].reading(sent), str(dst), hosts[dst].reading(got))
        for src, dst, sent, got in messages
    ]


def corrected_times(hosts, messages):
    found = cross_host_messages(hosts, messages)
    clocks = align({str(i): 0.0 for i in range(len(hosts))}, found)
    for c in found:
        yield c, c.sent - clocks[c.src].ahead, c.received - clocks[c.dst].ahead


@settings(deadline=None)
@given(networks())
def test_no_message_is_received_before_it_was_sent(network) -> None:
    for message, sent, received in corrected_times(*network):
        assert received > sent, message


@settings(deadline=None)
@example(  # a host whose offset is bounded only by a host with an assumed clock
    (
        [Host(0.0), Host(0.0), Host(0.0)],
        [(0, 1, 0.0, 0.03125), (1, 0, 0.0, 0.03125), (2, 1, 388.0, 388.015625)],
    )
)
@given(networks())
def test_offset_estimate_is_within_its_error(network) -> None:
    hosts, messages = network
    clocks = align({str(i): 0.0 for i in range(len(hosts))}, cross_host_messages(hosts, messages))
    for src, dst, sent, received in messages:
        for host, true in ((src, sent), (dst, received)):
            clock = clocks[str(host)]
            error = math.inf if clock.error is None else clock.error
            assert abs(hosts[host].reading(true) - clock.ahead - true) <= error + 1e-6


@pytest.mark.parametrize(("drift", "limit"), [(0.0, 5e-3), (5e-5, 0.1)])
def test_long_run_with_many_messages_is_aligned(drift: float, limit: float) -> None:
    """Offsets are constant, so with drift an arrow may point backward by the clocks' errors."""
    rng = np.random.default_rng(3)
    hosts = [Host(0.0), *(Host(*rng.normal(0, (100, drift))) for _ in range(4))]
    messages = []
    for at in np.sort(rng.uniform(0, 600, 3000)):
        src, dst = rng.choice(5, 2, replace=False)
        messages.append((src, dst, at, at + 1e-4 + rng.exponential(2e-3)))
    clocks = align({str(i): 0.0 for i in range(5)}, cross_host_messages(hosts, messages))
    for message, sent, received in corrected_times(hosts, messages):
        errors = clocks[message.src].error + clocks[message.dst].error
        assert received > sent - errors * (drift > 0), message
    for host, clock in zip(hosts, clocks.values(), strict=True):
        deviation = max(abs(host.reading(at) - clock.ahead - at) for at in np.linspace(0, 600, 100))
        assert deviation <= clock.error + 1e-9
        assert deviation < limit


def test_asymmetric_delays_do_not_bias_the_estimate() -> None:
    """The midpoint of a round trip may be off by 10 ms; the fastest messages are hardly delayed."""
    trips = [RoundTrip(t, t + 5 + out, t + 5 + out, t + out + back) for t, out, back in DELAYS]
    clock = PeerClock()
    for trip in trips:
        clock.add(trip)
    assert abs(clock.offset.seconds - 5) <= clock.offset.error < 2e-3
    both = [c for t in trips for c in (("a", t[0], "b", t[1]), ("b", t[2], "a", t[3]))]
    found = align({"a": 0.0, "b": 0.0}, [CrossHostMessage(*c) for c in both])["b"]
    assert abs(found.ahead - 5) <= found.error < 5e-3


DELAYS = [(float(t), 0.02 * (t % 5 > 0) + 1e-4, 0.02 * (t % 7 > 0) + 1e-4) for t in range(100)]


def test_without_round_trips_wall_clocks_are_used_within_message_bounds() -> None:
    one_way = [CrossHostMessage("a", 10.0, "b", 15.2), CrossHostMessage("a", 11.0, "b", 16.1)]
    for assumed, expected in ((5.0, 5.0), (4.0, 4.0), (7.0, 5.05)):
        found = align({"a": 0.0, "b": assumed, "c": 2.5}, one_way)
        assert found["b"].ahead == pytest.approx(expected, abs=0.05)
        assert found["c"].ahead == 2.5
        assert found["b"].error is found["c"].error is None
        assert 16.1 - found["b"].ahead > 11


# -- round trips -------------------------------------------------------------------------------


@settings(deadline=None)
@given(offsets, drifts, st.lists(st.tuples(delays, delays), min_size=1, max_size=100))
def test_every_round_trip_keeps_the_estimate_valid(ahead, drift, trips) -> None:
    remote, clock = Host(ahead, drift), PeerClock()
    for n, (out, back) in enumerate(trips):
        sent, got, end = n, n + out, n + out + 1e-4 + back
        clock.add(RoundTrip(sent, remote.reading(got), remote.reading(got + 1e-4), end))
        offset = clock.offset
        assert abs(offset.seconds - (offset.at - (end - back))) <= offset.error + 1e-6
        later = end + 10
        assert (
            abs(offset.to_local_time(remote.reading(later)) - later)
            <= offset.error_at(remote.reading(later)) + 1e-6
        )


def test_estimate_recovers_after_a_clock_adjustment() -> None:
    clock = PeerClock()
    for n in range(50):
        ahead = 5.0 if n < 40 else 9.0
        clock.add(RoundTrip(n, n + ahead + 1e-4, n + ahead + 1e-4, n + 2e-4))
    assert clock.offset.seconds == pytest.approx(9.0, abs=1e-3)
