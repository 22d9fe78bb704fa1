"""Runs on several hosts: the ranks' hosts, traffic between hosts, clock errors."""

from __future__ import annotations

import random
import re

import pytest
import traces
from hypothesis import given
from hypothesis import strategies as st
from traces import on_hosts

from distkit.events import Event, Op, State
from distkit.trace.trace import Trace
from distkit.views.compare import Compare
from distkit.views.scenes import Stage
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.view import Timeline
from distkit_hosts.causality import cross_host_messages, enforce_causality

HOSTS = ("alpha", "alpha", "beta", "gamma")


def ranks(hosts=HOSTS):
    return {str(r): {"name": f"rank {r}", "host": host} for r, host in enumerate(hosts)}


def message(n, src, dst, sent, received, nbytes=4):
    """Return the events of the n-th message with correct clocks."""
    fields = {"nbytes": nbytes}
    yield Event(src, 2 * n, Op.SEND, State.STARTED, sent, peer=dst, **fields)
    yield Event(dst, 2 * n + 1, Op.RECV, State.STARTED, sent - 1e-3, peer=src, **fields)
    yield Event(src, 2 * n, Op.SEND, State.COMPLETED, received, peer=dst, **fields)
    yield Event(dst, 2 * n + 1, Op.RECV, State.COMPLETED, received, peer=src, **fields)


def all_reduce(n, begins, end):
    for rank, begin in enumerate(begins):
        yield Event(rank, 2 * n, Op.ALL_REDUCE, State.STARTED, begin)
        yield Event(rank, 2 * n, Op.ALL_REDUCE, State.COMPLETED, end)


def with_clock_errors(events, clock_errors, error):
    """Return the trace of the events, with these clock errors by host."""
    clocks = {host: {"ahead": 5.0, "error": error} for host in clock_errors}
    shifted = [
        Event(
            e.rank,
            e.seq,
            e.op,
            e.state,
            e.time + clock_errors.get(HOSTS[e.rank], 0.0),
            e.peer,
            nbytes=e.nbytes,
        )
        for e in events
    ]
    return Trace(shifted, traces.info(world_size=len(HOSTS), ranks=ranks(), clocks=clocks))


ERROR = 1e-3
offset = st.floats(-ERROR, ERROR)


@given(st.integers(0, 2**32), offset, offset)
def test_corrections_stay_within_the_clock_error(seed, beta, gamma):
    draw, events, now = random.Random(seed), [], 100.0
    for n in range(12):
        now += draw.expovariate(1 / 0.02)
        if draw.random() < 0.25:
            begins = [now + draw.uniform(0, 2e-3) for _ in HOSTS]
            events += all_reduce(n, begins, max(begins) + draw.uniform(1e-6, 1e-3))
        else:
            src, dst = draw.sample(range(len(HOSTS)), 2)
            events += message(n, src, dst, now, now + draw.uniform(1e-6, 2e-3))
    measured = with_clock_errors(events, {"beta": beta, "gamma": gamma}, ERROR)
    corrected = enforce_causality(measured)

    assert all(m.sent < m.received for m in corrected.messages)
    for members in corrected.collectives:
        assert max(s.start for s in members) < min(s.end for s in members)
    before = {(e.rank, e.seq, e.state): e.time for e in measured}
    moved = {(e.rank, e.seq, e.state): e.time - before[e.rank, e.seq, e.state] for e in corrected}
    assert {e for e in moved} == {e for e in before}
    assert all(abs(t) <= (ERROR + 1e-9) * (HOSTS[r] != "alpha") for (r, _, _), t in moved.items())
    for rank in range(len(HOSTS)):  # the order of each rank's events does not change
        order = [(e.seq, e.state) for e in measured if e.rank == rank]
        assert order == [(e.seq, e.state) for e in corrected if e.rank == rank]


def test_contradiction_beyond_the_clock_error_is_not_corrected():
    measured = with_clock_errors(message(0, 0, 2, 1.0, 1.002), {"beta": -0.5}, ERROR)
    assert enforce_causality(measured) is measured


def test_bytes_within_and_between_hosts_are_counted():
    sent = [(0, 1, 8), (1, 2, 100), (0, 2, 20), (3, 0, 5)]
    events = [
        e for n, (src, dst, size) in enumerate(sent) for e in message(n, src, dst, n, n + 0.1, size)
    ]
    trace = Trace(events, traces.info(ranks=ranks()))
    assert trace.host_traffic == {
        ("alpha", "alpha"): (1, 8),
        ("alpha", "beta"): (2, 120),
        ("gamma", "alpha"): (1, 5),
    }
    frame = trace.to_dataframe()
    assert frame.host.tolist() == [HOSTS[r] for r in frame["rank"]]
    assert frame.peer_host.tolist() == [HOSTS[r] for r in frame.peer]


# -- the views ------------------------------------------------------------------------------------


def test_static_timeline_names_each_host_once():
    svg = Timeline(on_hosts(("alpha", "beta", "gamma")))._svg()
    assert re.findall(">(alpha|beta|gamma)</text>", svg) == ["alpha", "beta", "gamma"]
    y = {w: float(y) for y, w in re.findall(r'y="([\d.]+)"[^>]*>(alpha|beta|gamma|rank \d)<', svg)}
    assert sorted(y, key=y.__getitem__) == [
        "alpha",
        "rank 0",
        "rank 1",
        "beta",
        "rank 2",
        "rank 3",
        "gamma",
        "rank 4",
        "rank 5",
    ]
    assert "6 ranks · 3 hosts · gloo" in svg
    assert "192 B between hosts · 12 messages" in svg
    assert "±300 µs between the clocks of alpha, beta and gamma" in svg


def test_summaries_show_bytes_between_hosts():
    trace = on_hosts(("alpha", "beta", "gamma"))
    lines = repr(Timeline(trace)).splitlines()
    assert lines[-2:] == [
        "  192 B between hosts · 12 messages",
        "  ±300 µs between the clocks of alpha, beta and gamma",
    ]
    table = repr(Compare({"three": trace, "one": on_hosts(("alpha",), each=6)}))
    assert re.search(r"bytes between hosts +192 B +0 B", table)


def test_single_host_is_not_shown():
    trace = on_hosts(("alpha",), each=4)
    frame = Columns(trace).frame
    assert not frame["host_totals"] and "hosts" not in " ".join(frame["facts"])
    assert not any("host" in lane for lane in frame["lanes"])
    assert "alpha" not in Timeline(trace)._svg() + Stage(trace)._svg()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Op.ALL_REDUCE, {("a", 2.0, "b", 3.0), ("b", 2.5, "a", 3.25)}),
        (Op.BROADCAST, {("a", 1.0, "b", 3.0)}),  # rank 0 sends, so its end is no bound
        (Op.GATHER, {("b", 2.5, "a", 3.5)}),  # rank 0 ends after all have begun
        (Op.ALL_TO_ALL, set()),  # some ranks receive nothing
    ],
)
def test_collective_bounds_the_clock_offset(
    op: Op, expected: set[tuple[str, float, str, float]]
) -> None:
    """Ranks 0 and 1 are on one host, rank 2 is on the other."""
    root = 0 if op in (Op.BROADCAST, Op.GATHER) else None
    times = [(1.0, 3.5), (2.0, 3.25), (2.5, 3.0)]
    states = State.STARTED, State.COMPLETED
    events = [
        Event(rank, 0, op, state, at, peer=root)
        for rank, span in enumerate(times)
        for state, at in zip(states, span, strict=True)
    ]
    found = cross_host_messages(Trace(events, traces.info(world_size=3)), {0: "a", 1: "a", 2: "b"})
    assert {*map(tuple, found)} == expected
