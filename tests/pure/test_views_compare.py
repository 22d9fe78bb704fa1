"""Comparison of traces: metrics, projection, static picture, table."""

import json
import random
import xml.etree.ElementTree as ET

import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import MS, Script

import distkit as dk
from benchmarks.views import long_trace
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit.views.compare import Side, summary
from distkit.views.timeline.columns import Columns

CHUNK = dict(nbytes=16, shape=(4,), dtype="float32")


def naive(n: int = 4) -> Trace:
    """The other ranks send to rank 0, which replies to one after the other."""
    s, t = Script(), 0.0
    for r in range(1, n):
        s.op(r, Op.SEND, 0.0, t + 0.1 * MS, peer=0, **CHUNK)
        s.op(0, Op.RECV, t, t + 0.1 * MS, peer=r, **CHUNK)
        t += 0.1 * MS
    for r in range(1, n):
        s.op(0, Op.SEND, t, t + 0.1 * MS, peer=r, **CHUNK)
        s.op(r, Op.RECV, 0.1 * MS * r, t + 0.1 * MS, peer=0, **CHUNK)
        t += 0.1 * MS
    return s.trace(name="naive", world_size=n)


def rows(view_or_picture):
    return {row["key"]: row["values"] for row in view_or_picture["rows"]}


# -- metrics ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 4, 7])
def test_ring_takes_2n_minus_2_rounds_with_equal_traffic(n: int) -> None:
    trace = traces.ring(n, size=4 * n)
    side = Side("ring", trace)
    assert side.metrics["rounds"] == 2 * (n - 1)
    assert side.metrics["messages"] == len(trace.messages) == 2 * n * (n - 1)
    sent = {lane["bytes"] for lane in side.frame["lanes"]}
    assert sent == {side.metrics["most_sent"]} == {2 * (n - 1) * 16}


def test_waiting_ends_when_the_last_rank_arrives() -> None:
    s = Script()
    for r in range(3):
        s.op(r, Op.ALL_REDUCE, r * MS, 4 * MS, **CHUNK)
    c = Columns(s.trace(world_size=3))
    assert c.waits.waited.tolist() == pytest.approx([2 * MS, 1 * MS, 0])
    ranks = c.frame["lanes"]
    assert [r["waiting"] for r in ranks] == pytest.approx([0.5, 0.25, 0], abs=1e-3)
    assert [r["busy"] for r in ranks] == pytest.approx([1, 0.75, 0.5], abs=1e-3)


def test_computing_rank_does_not_wait() -> None:
    """An early receive counts as waiting from the end of the overlapping computation."""
    s = Script()
    s.op(0, Op.RECV, 0, 9 * MS, peer=1, **CHUNK)
    s.op(0, Op.MARK, 1 * MS, 6 * MS, attributes={"label": "compute"})
    s.op(1, Op.SEND, 8 * MS, 9 * MS, peer=0, **CHUNK)
    c = Columns(s.trace(world_size=2))
    assert c.waits.waited[0] == pytest.approx(2 * MS, abs=1e-5)
    assert c.frame["lanes"][0]["waiting"] == pytest.approx(2 / 9, abs=1e-3)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_metrics_are_consistent_for_any_trace(seed: int, ranks: int) -> None:
    import simulated
    from simulated import Simulation

    rng = random.Random(seed)
    ops = [Op.SEND, Op.RECV, Op.ALL_REDUCE, Op.BARRIER]
    programs = [
        [
            simulated.Step(rng.choice(ops), peer=rng.choice([p for p in range(ranks) if p != r]))
            for _ in range(rng.randrange(6))
        ]
        for r in range(ranks)
    ]
    for r, program in enumerate(programs):
        for step in program:
            if step.op in (Op.ALL_REDUCE, Op.BARRIER):
                step.peer = None
        assert all(step.peer != r for step in program)
    trace = Simulation(programs, random=rng).run().live()
    side = Side("a", trace)
    found = side.metrics
    assert 0 <= found["rounds"] <= found["messages"] + found["collectives"]
    assert found["messages"] == len([m for m in trace.messages if m.sent is not None])
    assert all(0 <= lane["waiting"] <= lane["busy"] <= 1 for lane in side.frame["lanes"])
    json.dumps(summary([side, Side("b", Trace())]), allow_nan=False)


# -- the comparison -------------------------------------------------------------------------


def test_differences_are_listed() -> None:
    picture = summary([Side("ring", traces.ring(4, size=16)), Side("naive", naive(4))])
    assert picture["title"] == "ring and naive"
    found = rows(picture)
    assert (found["messages"], found["rounds"]) == ([24, 6], [6, 6])
    assert found["most_sent"] == [96, 48] and "collectives" not in found
    assert picture["runs"] == ["ring", "naive"]


class Running:
    """A run that is still running."""

    finished, trace = False, traces.ring()

    def subscribe(self, callback):
        raise AssertionError("subscribe() must not be called")


@pytest.mark.parametrize(
    ("compare", "error", "message"),
    [
        (
            lambda ring: dk.Compare({"ring": ring}),
            ValueError,
            r"2 to 8 traces, not 1. Use Compare\(",
        ),
        (lambda ring: dk.Compare(), ValueError, "not 0"),
        (lambda ring: dk.Compare(*[ring] * 9), ValueError, "not 9"),
        (lambda ring: dk.Compare(ring, 5), TypeError, "not int"),
        (
            lambda ring: dk.Compare([ring, ring]),
            TypeError,
            r"got a list. Use Compare\(run_a, run_b\)",
        ),
        (
            lambda ring: dk.Compare(ring, Running()),
            ValueError,
            r"still running. Wait for it with run.wait\(\)",
        ),
    ],
)
def test_invalid_comparisons_raise(compare, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(traces.ring())


# -- pictures ------------------------------------------------------------------------------


def test_table_compares_with_the_first_run() -> None:
    table = repr(dk.Compare({"naive": naive(4), "ring": traces.ring(4, size=16)}))
    line = next(line for line in table.splitlines() if "messages " in line and "bytes" not in line)
    assert line.split() == ["messages", "6", "24", "4×"]


@pytest.mark.parametrize("case", ["two", "eight", "empty", "thousand", "long", "hang"])
def test_static_pictures_are_small_and_complete(case: str) -> None:
    wide = Script()
    for r in range(1000 if case == "thousand" else 0):
        wide.op(r, Op.ALL_REDUCE, 0, MS, **CHUNK)
    named = {
        "two": {"ring": traces.ring(), "naive": naive()},
        "eight": {str(i): traces.ring(16, seed=i) for i in range(8)},
        "empty": {"nothing": Trace(), "none": Trace()},
        "thousand": {"wide": wide.trace(world_size=1000), "ring": traces.ring()},
        "long": {"a": long_trace(30_000), "b": long_trace(20_000)},
        "hang": {"<hang>": traces.hang(), "odd & ends": traces.odd_values()},
    }[case]
    view = dk.Compare(named)
    svg = view._svg()
    assert len(svg.encode()) <= 60_000
    words = "".join(ET.fromstring(svg).itertext())
    assert all(name in words for name in named)
    assert ("nothing was recorded" in words) == (case == "empty")
    assert "total time" in repr(view)
