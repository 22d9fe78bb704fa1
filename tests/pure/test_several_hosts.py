"""A run on several hosts: who is where, what went between them, and whose clock is how sure."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from distkit.events import Event, Op, State
from distkit.trace.causality import in_order
from distkit.trace.trace import Trace

HOSTS = ("alpha", "alpha", "beta", "gamma")


def ranks(hosts=HOSTS):
    return {str(r): {"name": f"rank {r}", "host": host} for r, host in enumerate(hosts)}


def message(n, src, dst, sent, received, nbytes=4):
    """The n-th message: its events by clocks that are right."""
    fields = {"nbytes": nbytes}
    yield Event(src, 2 * n, Op.SEND, State.STARTED, sent, peer=dst, **fields)
    yield Event(dst, 2 * n + 1, Op.RECV, State.STARTED, sent - 1e-3, peer=src, **fields)
    yield Event(src, 2 * n, Op.SEND, State.COMPLETED, received, peer=dst, **fields)
    yield Event(dst, 2 * n + 1, Op.RECV, State.COMPLETED, received, peer=src, **fields)


def all_reduce(n, begins, end):
    for rank, begin in enumerate(begins):
        yield Event(rank, 2 * n, Op.ALL_REDUCE, State.STARTED, begin)
        yield Event(rank, 2 * n, Op.ALL_REDUCE, State.COMPLETED, end)


def told(events, wrong, error):
    """The trace by clocks that are wrong by so much, on each host but the first."""
    clocks = {host: {"offset": 5.0, "error": error} for host in wrong}
    seen = [
        Event(
            e.rank,
            e.seq,
            e.op,
            e.state,
            e.time + wrong.get(HOSTS[e.rank], 0.0),
            e.peer,
            nbytes=e.nbytes,
        )
        for e in events
    ]
    return Trace(seen, {"world_size": len(HOSTS), "ranks": ranks(), "clocks": clocks})


ERROR = 1e-3
offset = st.floats(-ERROR, ERROR)


@given(st.integers(0, 2**32), offset, offset)
def test_no_message_is_received_before_it_was_sent_and_no_time_moves_by_more_than_its_error(
    seed, beta, gamma
):
    draw, events, now = random.Random(seed), [], 100.0
    for n in range(12):
        now += draw.expovariate(1 / 0.02)
        if draw.random() < 0.25:
            begins = [now + draw.uniform(0, 2e-3) for _ in HOSTS]
            events += all_reduce(n, begins, max(begins) + draw.uniform(1e-6, 1e-3))
        else:
            src, dst = draw.sample(range(len(HOSTS)), 2)
            events += message(n, src, dst, now, now + draw.uniform(1e-6, 2e-3))
    seen = told(events, {"beta": beta, "gamma": gamma}, ERROR)
    found = in_order(seen)

    assert all(m.sent < m.received for m in found.messages)
    for members in found.collectives:
        assert max(s.start for s in members) < min(s.end for s in members)
    before = {(e.rank, e.seq, e.state): e.time for e in seen}
    moved = {(e.rank, e.seq, e.state): e.time - before[e.rank, e.seq, e.state] for e in found}
    assert {e for e in moved} == {e for e in before}
    assert all(abs(t) <= (ERROR + 1e-9) * (HOSTS[r] != "alpha") for (r, _, _), t in moved.items())
    for rank in range(len(HOSTS)):  # and none of a rank overtakes another
        order = [(e.seq, e.state) for e in seen if e.rank == rank]
        assert order == [(e.seq, e.state) for e in found if e.rank == rank]


def test_a_trace_without_contradictions_stays_as_it_is():
    seen = told(message(0, 0, 2, 1.0, 1.002), {"beta": 1e-3}, ERROR)
    assert in_order(seen) is seen


def test_what_contradicts_by_more_than_the_error_is_no_matter_of_clocks():
    seen = told(message(0, 0, 2, 1.0, 1.002), {"beta": -0.5}, ERROR)
    assert in_order(seen) is seen


def test_bytes_within_hosts_and_between_them_are_counted_apart():
    sent = [(0, 1, 8), (1, 2, 100), (0, 2, 20), (3, 0, 5)]
    events = [
        e for n, (src, dst, size) in enumerate(sent) for e in message(n, src, dst, n, n + 0.1, size)
    ]
    trace = Trace(events, {"ranks": ranks()})
    assert trace.host_traffic == {
        ("alpha", "alpha"): (1, 8),
        ("alpha", "beta"): (2, 120),
        ("gamma", "alpha"): (1, 5),
    }
    frame = trace.to_dataframe()
    assert frame.host.tolist() == [HOSTS[r] for r in frame["rank"]]
    assert frame.peer_host.tolist() == [HOSTS[r] for r in frame.peer]
