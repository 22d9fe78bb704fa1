"""A parameter server on one host: the formula of a round, and training by it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkit.events import Op
from distkit.simulation import Host, Stragglers, exponential, parameter_server
from distkit.views import Timeline

#: A round alone takes 4 s, of which 1 s is the processors'; any other adds that much.
HOST = Host(2, (0, 1000), (4.0, 4.0), (2.0, 2.0), (0.5, 0.5), (1.0, 1.0), computes=False)
BUSY = Host(2, (0, 1000), (4.0, 4.0), (2.0, 2.0), (0.5, 0.5), (1.0, 1.0))

SECONDS = st.floats(1e-6, 10)


@given(
    alone=SECONDS,
    work=SECONDS,
    served=SECONDS,
    loss=st.floats(1, 3),
    processors=st.integers(1, 64),
    share=st.floats(0.01, 1),
)
def test_a_round_is_between_its_bounds(
    alone: float, work: float, served: float, loss: float, processors: int, share: float
) -> None:
    tables = [[x, x] for x in (alone, work, served, loss)]
    host = Host(processors, (0, 1), *tables)
    each = min(alone, loss * max(work / processors, served * share))
    took = [host.seconds(1, n, share=share) for n in range(1, 9)]
    assert took[0] == pytest.approx(alone)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(took))
    for n, t in enumerate(took, 1):
        together = host.seconds(1, n, share=share, together=True)
        assert max(alone, n * each) <= t * (1 + 1e-9)
        assert t <= together * (1 + 1e-9)
        assert together == pytest.approx(alone + (n - 1) * each)
    assert host.seconds(1, 500, share=share) >= 500 * each * (1 - 1e-9)


def test_servers_count_where_they_are_the_bottleneck() -> None:
    many = Host(64, (0, 1000), (4.0, 4.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    assert many.seconds(0, 100, share=1.0) == pytest.approx(100, rel=0.05)
    assert many.seconds(0, 100, share=0.25) == pytest.approx(25, rel=0.2)


def test_what_was_measured_in_the_crowd_is_what_it_says_of_the_crowd() -> None:
    sizes = {1000: 1.0, 1_000_000: 2.0}
    host = Host.of(
        2,
        64,
        dict.fromkeys(sizes, 0.1),
        sizes,
        dict.fromkeys(sizes, 0.02),
        dict.fromkeys(sizes, 0.005),
    )
    for m, seconds in sizes.items():
        assert host.seconds(m, 64) == pytest.approx(seconds, rel=0.05)
    assert host.seconds(500_500, 64) == pytest.approx(1.5, rel=0.05)
    assert host.seconds(2_000_000, 64) > 2.5


# -- training ------------------------------------------------------------------------------------


def rate(workers: int, host: Host = HOST, compute: float = 0.0, **options: object) -> float:
    run = parameter_server(workers, [400], 1, host, compute, steps=50, record=False, **options)
    assert len(run.finished) == len(run.workers) == 50 * workers - run.dropped
    return run.rate


def test_synchronous_rounds_take_what_the_formula_says() -> None:
    assert rate(1) == pytest.approx(1 / 4)
    assert rate(4) == pytest.approx(4 / 7)
    assert rate(4, compute=3.0) == pytest.approx(4 / 10)


def test_asynchronous_rounds_take_what_the_formula_says() -> None:
    assert rate(4, staleness=math.inf) == pytest.approx(4 / HOST.seconds(400, 4))


def test_a_straggler_slows_all_only_where_they_wait_for_it() -> None:
    slow = {"compute": 10.0, "stragglers": Stragglers(slow={0: 5.0})}
    sync, ssp, free = (rate(4, staleness=s, **slow) for s in (0, 2, math.inf))
    assert sync == pytest.approx(4 / (50 + 4), rel=0.1)
    assert sync < ssp * 1.01
    assert ssp < free / 2
    assert free == pytest.approx(3 / (10 + 5) + 1 / (50 + 5), rel=0.1)


def test_processors_are_shared_with_what_is_computed() -> None:
    assert rate(8, BUSY, 100.0) == pytest.approx(8 / 400, rel=0.05)  # 8 on 2 processors
    assert rate(8, HOST, 100.0) == pytest.approx(8 / 111, rel=0.05)  # each on its own device


def test_backups_stop_whoever_is_late() -> None:
    run = parameter_server(4, [400], 1, BUSY, exponential(1.0), steps=40, backups=1, seed=1)
    assert run.dropped == 40
    assert len(run.finished) == 3 * 40


def test_work_is_done_at_the_pace_of_the_moment() -> None:
    """One push begins when another is half through: both go on at the pace of two."""
    run = parameter_server(
        2,
        [400],
        1,
        HOST,
        2.0,
        staleness=math.inf,
        record=False,
        stragglers=Stragglers(slow={1: 1.5}),
    )
    two, one = HOST.seconds(400, 2) / 2, HOST.seconds(400, 1) / 2
    first = two + 2.0 + one / 2 + two / 2  # both pull, it computes, pushes alone, and with another
    assert run.finished == pytest.approx([first, first + one / 2])


def test_its_trace_is_like_any_other() -> None:
    run = parameter_server(3, [400, 400], 2, BUSY, 1.0, steps=2)
    ops = [str(m.op) for m in run.trace.messages]
    assert ops.count("push") == ops.count("pull") == 3 * 2 * 2 * 2  # both ends
    steps = [s for s in run.trace.spans if s.op is Op.MARK and (s.label or "").startswith("step")]
    assert len(steps) == 3 * 2
    assert max(e.time for e in run.trace.events) == pytest.approx(run.seconds)
    assert Timeline(run.trace) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"processors": 0},
        {"sizes": (0,)},
        {"sizes": (5, 5)},
        {"alone": (0.0, 1.0)},
        {"loss": (np.nan, 1.0)},
    ],
)
def test_a_host_that_makes_no_sense(wrong: dict[str, object]) -> None:
    fields = {
        "processors": 2,
        "sizes": (0, 1),
        "alone": (1, 1),
        "work": (1, 1),
        "served": (1, 1),
        "loss": (1, 1),
    }
    with pytest.raises(ValueError, match="give a processor, two rising sizes"):
        Host(**{**fields, **wrong})
